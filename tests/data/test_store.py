"""Decoded images in a file: the same as in memory, built once, never half-written, never written to."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch

from hf_fixastep.data import images, load_dataset, store
from hf_fixastep.data.images import Images
from hf_fixastep.data.loader import PairedLoader
from tests.short_runs import make_trainer, tiny_wide_resnet, train


COUNT = 40
SIZE = (5, 6)
ROW = 3 * 5 * 6
NOBODY = 65534
FEATURES = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(images, "IN_MEMORY_BYTES", 0)


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """Rows in the order in which they are decoded."""
    rows: list[int] = []
    before = images._open
    monkeypatch.setattr(
        images, "_open", lambda value, mode, row: rows.append(row) or before(value, mode, row)
    )
    return rows


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def split_of(arrays: Any, folder: Path) -> datasets.Dataset:
    """On the disk, as a builder leaves it; with labels 0, 1, 0, 1, ..."""
    pictures = [PIL.Image.fromarray(array) for array in arrays]
    labels = [row % 2 for row in range(len(pictures))]
    datasets.Dataset.from_dict({"image": pictures, "label": labels}, FEATURES).save_to_disk(folder)
    return datasets.load_from_disk(folder)


@pytest.fixture
def split(tmp_path) -> datasets.Dataset:
    """Colour images, kept in `tmp_path / "set"`."""
    return split_of(noise(COUNT, *SIZE, 3), tmp_path / "set")


def expected() -> np.ndarray:
    return noise(COUNT, *SIZE, 3).transpose(0, 3, 1, 2)


def pixel_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("pixels-*"))


def leave_no_partial(folder: Path) -> bool:
    return not list(folder.rglob("*.partial"))


def in_memory(split: datasets.Dataset, size: tuple[int, int], **settings: Any) -> Images:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "IN_MEMORY_BYTES", 2**30)
        found = Images.from_dataset(split, size, **settings)
    assert found.file is None
    return found


class Child:
    """A function in a process of its own, which sends back what it returns, or the text of its error."""

    def __init__(self, function: Callable, *arguments: Any) -> None:
        self.receiver, sender = fork.Pipe(duplex=False)
        self.process = fork.Process(target=self._run, args=(sender, function, *arguments))
        self.process.start()
        sender.close()

    @staticmethod
    def _run(sender: Any, function: Callable, *arguments: Any) -> None:
        try:
            sender.send(function(*arguments))
        except Exception as error:
            sender.send(f"{type(error).__name__}: {error}")

    def result(self) -> Any:
        assert self.receiver.poll(20), "the process hangs"
        outcome = self.receiver.recv()
        self.process.join(20)
        return outcome


class TestContent:
    @pytest.mark.parametrize("size", [SIZE, (9, 4)])
    @pytest.mark.parametrize("channels", [None, 1, 3])
    @pytest.mark.parametrize("colour", [True, False])
    def test_a_mapped_store_equals_one_in_memory(self, tmp_path, size, channels, colour):
        split = split_of(noise(COUNT, *SIZE, 3) if colour else noise(COUNT, *SIZE), tmp_path / "set")
        memory = in_memory(split, size, channels=channels)
        mapped = Images.from_dataset(split, size, channels=channels)
        assert mapped.file is not None
        assert torch.equal(mapped.pixels, memory.pixels)
        assert mapped.pixels.shape == (COUNT, channels or (3 if colour else 1), *size)
        assert torch.equal(mapped.labels, memory.labels)
        assert mapped.class_names == memory.class_names == ["cat", "dog"]
        assert mapped.fingerprint == memory.fingerprint

    @pytest.mark.parametrize(("grey", "at_once"), [(1, 1), (3, 1), (127, 128), (128, 128), (300, 128)])
    def test_grey_images_before_a_coloured_one_become_rgb(self, tmp_path, monkeypatch, grey, at_once):
        monkeypatch.setattr(store, "BLOCK_BYTES", at_once * SIZE[0] * SIZE[1])
        arrays = [*noise(grey, *SIZE), *noise(3, *SIZE, 3), *noise(2, *SIZE)]
        split = split_of(arrays, tmp_path / "set")
        pixels = Images.from_dataset(split, SIZE).pixels
        assert np.array_equal(pixels[:grey], noise(grey, 1, *SIZE).repeat(3, axis=1))
        assert torch.equal(pixels, in_memory(split, SIZE).pixels)
        assert torch.equal(Images.from_dataset(split, SIZE).pixels, pixels)

    def test_the_file_is_a_page_of_json_and_raw_pixels(self, split, tmp_path):
        images = Images.from_dataset(split, SIZE)
        content = images.file.path.read_bytes()
        header = json.loads(content[:4096])
        assert header["shape"] == [COUNT, 3, *SIZE]
        assert header["dtype"] == "uint8"
        assert header["version"] == store.VERSION
        assert header["key"] in images.file.path.name
        assert content[4096:] == expected().tobytes()

    @pytest.mark.parametrize(("limit", "mapped"), [(COUNT * ROW, False), (COUNT * ROW - 1, True)])
    def test_small_sets_stay_in_memory(self, split, monkeypatch, limit, mapped):
        monkeypatch.setattr(images, "IN_MEMORY_BYTES", limit)
        assert (Images.from_dataset(split, SIZE).file is not None) == mapped

    def test_memory_while_building_does_not_grow_with_the_store(self, tmp_path):
        shades = [np.zeros((512, 512) if row < 200 else (512, 512, 3), np.uint8) for row in range(300)]
        split = split_of(shades, tmp_path / "set")  # 1 MB of PNG for 236 MB of pixels

        def growth() -> int:
            Images.from_dataset(split.select(range(150, 220)), (64, 64))  # first use of the libraries
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            images = Images.from_dataset(split, (512, 512))
            assert images.pixels.shape == (300, 3, 512, 512)
            return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024

        assert Child(growth).result() < 300 * 3 * 512 * 512 / 4

    @pytest.mark.skipif(
        Path("/proc/sys/vm/overcommit_memory").is_file()
        and Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2",
        reason="this system sets memory aside for every mapping",
    )
    def test_a_file_larger_than_the_memory_can_be_mapped(self, tmp_path):
        file = store.PixelFile(tmp_path / "sparse", "key", "source", (2**20, 3, 1024, 1024))  # 3 TiB
        file.path.touch()
        os.truncate(file.path, file.size)
        assert not file.map().index_select(0, torch.tensor([2**20 - 1])).any()

    def test_training_on_mapped_images_is_training_on_decoded_ones(self, split, tmp_path):
        objects = {"train_dataset": split.with_transform(lambda batch: batch), "unlabeled_dataset": split}
        memory = {"train_dataset": in_memory(split, (8, 8)), "unlabeled_dataset": in_memory(split, (8, 8))}
        settings = {"max_steps": 2, "dataloader_num_workers": 1}
        mapped = make_trainer(tmp_path, tiny_wide_resnet(num_labels=2), objects=objects, **settings)
        assert mapped.train_dataset.file is not None
        assert mapped.unlabeled.file is not None
        decoded = make_trainer(tmp_path, tiny_wide_resnet(num_labels=2), objects=memory, **settings)
        first, second = (train(trainer).raw[-1] for trainer in (mapped, decoded))
        assert all(torch.equal(first[name], second[name]) for name in second)


class TestPlace:
    def test_a_set_in_memory_uses_the_cache_of_datasets(self, split, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "not" / "yet")
        held = datasets.Dataset.from_dict(split[:], FEATURES)
        assert not held.cache_files
        images = Images.from_dataset(held, SIZE)
        assert images.file.path.parent == tmp_path / "not" / "yet"
        assert np.array_equal(images.pixels, expected())

    def test_a_second_use_decodes_nothing(self, split, decoded, tmp_path):
        first = Images.from_dataset(split, SIZE)
        assert first.file.path.parent == tmp_path / "set"  # beside the Arrow file
        second = Images.from_dataset(datasets.load_from_disk(tmp_path / "set"), SIZE)
        assert decoded == list(range(COUNT))
        assert torch.equal(first.pixels, second.pixels)
        assert torch.equal(first.labels, second.labels)

    def test_another_process_finds_the_file(self, tmp_path, decoded):
        folder = tmp_path / "cache"

        def path() -> Path:
            data = load_dataset("digits_open_set", "zeta50", cache_dir=folder)
            return Images.from_dataset(data["unlabeled"], (8, 8)).file.path

        first = Child(path).result()  # builds the set, too
        assert (path(), decoded) == (first, [])

    def test_formats_and_transforms_do_not_matter(self, split, decoded):
        path = Images.from_dataset(split, SIZE).file.path
        counter = iter(range(9))  # cannot be hashed: the fingerprint of the split is random
        for other in (
            split.with_format("torch"),
            split.with_transform(lambda batch: {"image": [next(counter)]}),
            split.with_format("numpy", columns=["label"]),
        ):
            images = Images.from_dataset(other, SIZE)
            assert images.file.path == path
            assert images.labels.tolist() == [0, 1] * (COUNT // 2)
        assert len(decoded) == COUNT

    def test_other_rows_have_another_file(self, split):
        parts = {
            "whole": (split, range(COUNT)),
            "head": (split.select(range(10)), range(10)),
            "tail": (split.select(range(10, 20)), range(10, 20)),
            "some": (split.select([7, 3, 3]), [7, 3, 3]),
            "others": (split.select([7, 3, 4]), [7, 3, 4]),
            "filtered": (split.filter(lambda label: label == 1, input_columns="label"), range(1, COUNT, 2)),
            "twice": (datasets.concatenate_datasets([split, split]), [*range(COUNT), *range(COUNT)]),
        }
        for part, rows in parts.values():
            assert np.array_equal(Images.from_dataset(part, SIZE).pixels, expected()[list(rows)])
        assert len({Images.from_dataset(part, SIZE).file.path for part, _ in parts.values()}) == len(parts)

    def test_each_way_of_decoding_has_another_file(self, split, monkeypatch):
        renamed = split.rename_column("image", "photo")
        grey = split.cast_column("image", datasets.Image(mode="L"))
        paths = [
            Images.from_dataset(split, SIZE).file.path,
            Images.from_dataset(split, SIZE[::-1]).file.path,
            Images.from_dataset(split, SIZE, channels=1).file.path,
            Images.from_dataset(split, SIZE, channels=3).file.path,
            Images.from_dataset(renamed, SIZE, image="photo").file.path,
            Images.from_dataset(grey, SIZE).file.path,
        ]
        monkeypatch.setattr(store, "VERSION", store.VERSION + 1)
        paths.append(Images.from_dataset(split, SIZE).file.path)
        assert len(set(paths)) == len(paths)


class TestDamage:
    """A file that is not what it should be is built again, with a warning."""

    def damage_is_repaired(self, split: datasets.Dataset, decoded: list[int], caplog) -> bool:
        decoded.clear()
        images = Images.from_dataset(split, SIZE)
        warned = f"{images.file.path} is damaged or of older images, and is built again." in caplog.messages
        return warned and len(decoded) == COUNT and np.array_equal(images.pixels, expected())

    @pytest.mark.parametrize("change", [-1, 1, -COUNT * ROW - 4096])
    def test_of_another_length(self, split, decoded, caplog, change):
        path = Images.from_dataset(split, SIZE).file.path
        os.truncate(path, path.stat().st_size + change)
        assert self.damage_is_repaired(split, decoded, caplog)

    @pytest.mark.parametrize(
        "header",
        [b"\xff" * 4096, json.dumps({"version": 1, "dtype": "uint8", "shape": [COUNT, 3, *SIZE]}).encode()],
    )
    def test_with_another_header(self, split, decoded, caplog, header):
        path = Images.from_dataset(split, SIZE).file.path
        with open(path, "r+b") as file:
            file.write(header)
        assert self.damage_is_repaired(split, decoded, caplog)

    @pytest.mark.parametrize("at", [0, COUNT * ROW // 2, COUNT * ROW - 1])
    def test_of_a_pixel(self, split, decoded, caplog, monkeypatch, at):
        monkeypatch.setattr(store, "BLOCKS", 1)  # of several one is looked at
        path = Images.from_dataset(split, SIZE).file.path
        with open(path, "r+b") as file:
            file.seek(store.HEADER_BYTES + at)
            value = file.read(1)[0]
            file.seek(store.HEADER_BYTES + at)
            file.write(bytes([value ^ 16]))
        assert self.damage_is_repaired(split, decoded, caplog)

    def test_each_part_has_a_checksum(self, split):
        images = Images.from_dataset(split, SIZE)
        content = images.file.path.read_bytes()
        pixels, parts = content[4096:], json.loads(content[:4096])["checksums"]
        ends = [len(pixels) * part // 64 for part in range(65)]
        assert parts == [zlib.crc32(pixels[a:b]) for a, b in itertools.pairwise(ends)]

    def test_of_other_images(self, split, decoded, caplog):
        path = Images.from_dataset(split, SIZE).file.path
        other = Images.from_dataset(split.select(range(1, 5)), SIZE).file.path
        shutil.copy(other, path)
        assert self.damage_is_repaired(split, decoded, caplog)

    def test_of_an_arrow_file_that_was_written_again(self, split, decoded, caplog):
        images = Images.from_dataset(split, SIZE)
        os.utime(split.cache_files[0]["filename"])
        assert self.damage_is_repaired(split, decoded, caplog)
        assert np.array_equal(images.pixels, expected())  # those who use the old file are not disturbed

    def test_of_image_files_that_were_written_again(self, tmp_path, monkeypatch, decoded):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
        names = [str(tmp_path / f"{row}.png") for row in range(3)]
        for name, array in zip(names, noise(3, *SIZE), strict=True):
            PIL.Image.fromarray(array).save(name)
        named = datasets.Dataset.from_dict({"image": names}, datasets.Features({"image": datasets.Image()}))
        Images.from_dataset(named, SIZE)
        Images.from_dataset(named, SIZE)
        assert decoded == [0, 1, 2]
        PIL.Image.new("L", SIZE[::-1], 77).save(names[1])
        assert (Images.from_dataset(named, SIZE).pixels[1] == 77).all()


class TestSeveralProcesses:
    def test_two_that_start_at_once_decode_once(self, split, tmp_path, monkeypatch):
        decoded, start = fork.Value("i", 0), fork.Barrier(2)
        before = images._open

        def count(value: Any, mode: Any, row: int) -> PIL.Image.Image:
            with decoded.get_lock():
                decoded.value += 1
            time.sleep(0.005)
            return before(value, mode, row)

        def build() -> tuple[np.ndarray, int]:
            start.wait(10)
            images = Images.from_dataset(split, SIZE)
            return images.pixels.numpy().copy(), images.file.path.stat().st_ino

        monkeypatch.setattr(images, "_open", count)
        results = [child.result() for child in [Child(build), Child(build)]]
        assert all(np.array_equal(pixels, expected()) for pixels, _ in results)
        assert results[0][1] == results[1][1]
        assert decoded.value == COUNT
        assert len(pixel_files(tmp_path / "set")) == 1

    def test_a_killed_builder_leaves_nothing_that_is_used(self, split, tmp_path, monkeypatch, decoded):
        half = fork.Event()
        before = images._open

        def stop_half_way(value: Any, mode: Any, row: int) -> PIL.Image.Image:
            if row == COUNT // 2:
                half.set()
                time.sleep(60)
            return before(value, mode, row)

        with monkeypatch.context() as patch:
            patch.setattr(images, "_open", stop_half_way)
            builder = Child(Images.from_dataset, split, SIZE)
            assert half.wait(20)
        # Must not wait for ever.
        waiting = Child(lambda: Images.from_dataset(split, SIZE).pixels.numpy().copy())
        time.sleep(0.2)
        assert [path.suffix for path in pixel_files(tmp_path / "set")] == [".partial"]
        os.kill(builder.process.pid, signal.SIGKILL)
        builder.process.join()
        assert np.array_equal(waiting.result(), expected())
        assert leave_no_partial(tmp_path)
        assert np.array_equal(Images.from_dataset(split, SIZE).pixels, expected())
        assert not decoded

    def test_a_file_in_use_is_small_to_send(self, split):
        images = Images.from_dataset(split, SIZE)
        large = Images.from_dataset(datasets.concatenate_datasets([split] * 9), SIZE)
        assert len(pickle.dumps(large)) - len(pickle.dumps(images)) < 8 * len(large) + 100  # the labels
        again = pickle.loads(pickle.dumps(images))
        assert torch.equal(again.pixels, images.pixels)
        assert torch.equal(again.labels, images.labels)
        assert again.fingerprint == images.fingerprint
        assert again.pixels.data_ptr() != images.pixels.data_ptr()

    def test_workers_read_the_rows_of_their_draws(self, split):
        images = Images.from_dataset(split, SIZE)
        for batch in PairedLoader(images, images, (3, 7), steps_per_epoch=4, num_workers=1):
            assert np.array_equal(batch["unlabeled"], expected()[batch["unlabeled_index"]])
            assert (batch["labels"] < 2).all()


class TestWriting:
    @pytest.mark.parametrize(
        "write",
        [lambda pixels: pixels[3].fill_(0), lambda pixels: torch.add(pixels, 1, out=pixels)],
    )
    def test_pixels_cannot_be_written(self, split, write):
        images = Images.from_dataset(split, SIZE)
        with pytest.raises(RuntimeError, match=r"You can make a clone"):
            write(images.pixels)
        assert np.array_equal(Images.from_dataset(split, SIZE).pixels, expected())

    def test_batches_can_be_written(self, split):
        images = Images.from_dataset(split, SIZE)
        batch = images.__getitems__([4, 0, 4])["pixel_values"]
        assert np.array_equal(batch, expected()[[4, 0, 4]])
        batch.zero_()
        images[0]["pixel_values"].zero_()
        assert np.array_equal(images.pixels, expected())


@contextlib.contextmanager
def open_to_all() -> Iterator[Path]:
    """A folder that other users can enter, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def as_nobody(function: Callable) -> Any:
    """Without the rights of root, which may write everywhere."""

    def drop_rights_and_run() -> Any:
        if os.geteuid() == 0:
            os.seteuid(NOBODY)
        return function()

    return Child(drop_rights_and_run).result()


class TestDisk:
    """One sentence says how many bytes are needed where; nothing half-written is left."""

    def sentence(self, needed: str, folder: Path, reason: str) -> str:
        return (
            f"OSError: The decoded images need {needed} bytes in {folder}, which failed ({reason}): "
            "make room and allow writing there, or load the data set with another cache_dir."
        )

    @pytest.mark.parametrize(("channels", "needed"), [(None, "up to 7,696"), (1, "5,296")])
    def test_a_folder_that_may_not_be_written(self, channels, needed):
        with open_to_all() as folder:
            split = split_of(noise(COUNT, *SIZE, 3), folder / "set")
            os.chmod(folder / "set", 0o555)
            found = as_nobody(lambda: Images.from_dataset(split, SIZE, channels=channels))
            assert found == self.sentence(needed, folder / "set", "Permission denied")
            assert not pixel_files(folder / "set")
            os.chmod(folder / "set", 0o755)

    def test_a_finished_file_serves_where_nothing_may_be_written(self):
        with open_to_all() as folder:
            split = split_of(noise(COUNT, *SIZE, 3), folder / "set")
            Images.from_dataset(split, SIZE)
            os.chmod(folder / "set", 0o555)
            pixels = as_nobody(lambda: Images.from_dataset(split, SIZE).pixels.numpy().copy())
            assert np.array_equal(pixels, expected())
            os.chmod(folder / "set", 0o755)

    def test_a_folder_that_cannot_be_made(self, split, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
        held = datasets.Dataset.from_dict(split[:], FEATURES)
        with pytest.raises(
            OSError, match=r"need up to 7,696 bytes in .*file/cache, which failed \(Not a directory\)"
        ):
            Images.from_dataset(held, SIZE)

    def test_too_little_room_is_seen_before_decoding(self, split, tmp_path, monkeypatch, decoded):
        monkeypatch.setattr(store.shutil, "disk_usage", lambda folder: SimpleNamespace(free=7695))
        with pytest.raises(
            OSError, match=r"need 7,696 bytes in .*set, which failed \(No space left on device\)"
        ):
            Images.from_dataset(split, SIZE)
        assert decoded == [0]
        assert not pixel_files(tmp_path / "set")

    @pytest.mark.parametrize("grey", [0, 60])
    def test_a_disk_that_fills_up(self, tmp_path, grey):
        arrays = [*noise(grey, *SIZE), *noise(400, *SIZE, 3)]
        split = split_of(arrays, tmp_path / "set")

        def build() -> Any:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            return Images.from_dataset(split, SIZE)

        needed = f"{4096 + len(arrays) * ROW:,}"
        assert Child(build).result() == self.sentence(needed, tmp_path / "set", "File too large")
        assert not pixel_files(tmp_path / "set")
        assert len(Images.from_dataset(split, SIZE)) == len(arrays)

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_an_error_while_decoding_leaves_nothing(self, split, tmp_path, monkeypatch, error):
        def fail(value: Any, mode: Any, row: int) -> PIL.Image.Image:
            if row == 30:
                raise error
            return PIL.Image.new("L", SIZE)

        monkeypatch.setattr(images, "_open", fail)
        (tmp_path / "set" / "pixels-9x9-abc.123.partial").write_bytes(b"of a process that died")
        with pytest.raises(error):
            Images.from_dataset(split, SIZE)
        assert not pixel_files(tmp_path / "set")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Only Linux tells how a file is mapped.")
@pytest.mark.parametrize("fits", [True, False])
def test_a_file_beyond_the_memory_is_read_row_by_row(split, tmp_path, monkeypatch, fits):
    monkeypatch.setattr(store, "memory", lambda: 2**40 if fits else 2**10)
    images = Images.from_dataset(split, SIZE)
    (path,) = pixel_files(tmp_path / "set")
    mappings = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    flags = [mapping.split("VmFlags:")[1].splitlines()[0].split() for mapping in mappings]
    assert [("rr" in found) for found in flags] == [not fits] * len(flags)
    assert flags
    assert len(images) == len(split)
