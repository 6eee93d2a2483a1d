"""Features are computed once, are those of the network, and depend on the image alone."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch

from hf_fixastep.data.features import Features
from hf_fixastep.data.processing import with_size
from hf_fixastep.features import embed as module
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.features.embed import embed
from hf_fixastep.features.part import CHUNK
from hf_fixastep.step.forwards import head_inputs
from tests.features.networks import pictures, tiny_backbone, tiny_network, tiny_processor


ROOT = Path(__file__).parents[2]


def versions_of(features: Features) -> np.ndarray:
    return np.stack([features[at]["pixel_values"].numpy() for at in range(len(features))])


def test_plain_features_are_what_the_head_gets_of_the_processed_image(tmp_path: Path) -> None:
    split, model, processor = pictures(5), tiny_network(), tiny_processor()
    features = embed(split, tiny_backbone(), cache_dir=tmp_path).plain()
    for at, image in enumerate(split["image"]):
        with torch.no_grad(), head_inputs(model, 10) as seen:
            model(**processor(image, return_tensors="pt"))
        np.testing.assert_allclose(features[at], seen[0][0], rtol=2e-3, atol=1e-4)


def test_features_depend_on_the_image_and_not_on_its_neighbours(tmp_path: Path) -> None:
    split = pictures(7)
    one = versions_of(embed(split, tiny_backbone(), cache_dir=tmp_path / "one"))
    other = versions_of(embed(split.select([6, 2]), tiny_backbone(), cache_dir=tmp_path / "other"))
    np.testing.assert_array_equal(other, one[[6, 2]])


def test_views_differ_from_each_other_and_from_the_plain_image(tmp_path: Path) -> None:
    rows = versions_of(embed(pictures(3), tiny_backbone(), weak=3, strong=2, cache_dir=tmp_path))
    assert rows.shape == (3, 6, tiny_backbone().size)
    for row in rows:
        assert len(np.unique(row, axis=0)) >= 5  # two weak views may be the same crop


def test_a_view_is_the_one_of_views_py_with_the_generator_of_the_image(tmp_path: Path) -> None:
    split, backbone = pictures(1), tiny_backbone()
    rows = versions_of(embed(split, backbone, weak=1, strong=1, cache_dir=tmp_path))
    (hashes,) = (np.load(path) for path in tmp_path.glob("*/split-*.npy"))
    seed = int(np.frombuffer(hashes.tobytes(), np.int64)[0]) & (2**62 - 1)
    generator = torch.Generator().manual_seed(seed)
    views, pixels = backbone.views(), backbone.pixels([split[0]["image"]])
    expected = [backbone.features(view(pixels, generator)) for view in (views.weak, views.strong)]
    np.testing.assert_allclose(rows[0, 1:], torch.cat(expected), rtol=2e-3, atol=1e-4)


def test_a_second_call_and_a_grown_pile_run_the_network_on_new_images_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, counted = tiny_backbone(), []
    before = versions_of(embed(pictures(4), backbone, cache_dir=tmp_path))
    pixels = backbone.pixels
    monkeypatch.setattr(backbone, "pixels", lambda images: counted.append(len(images)) or pixels(images))
    again = versions_of(embed(pictures(4), backbone, cache_dir=tmp_path))
    grown = datasets.concatenate_datasets([pictures(2, seed=1), pictures(4)])
    after = versions_of(embed(grown, backbone, cache_dir=tmp_path))
    assert counted == [2]
    np.testing.assert_array_equal(again, before)
    np.testing.assert_array_equal(after[2:], before)


def test_a_killed_call_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split, counted = pictures(3 * CHUNK + 5), []
    whole = versions_of(embed(split, tiny_backbone(), weak=1, strong=0, cache_dir=tmp_path / "whole"))
    features = module.Work.features

    def killed(self: Any, pixels: Any, seeds: Any) -> Any:
        counted.append(len(pixels))
        if len(counted) == 3:
            raise KeyboardInterrupt
        return features(self, pixels, seeds)

    monkeypatch.setattr(module.Work, "features", killed)
    with pytest.raises(KeyboardInterrupt):
        embed(split, tiny_backbone(), weak=1, strong=0, cache_dir=tmp_path / "killed")
    resumed = embed(split, tiny_backbone(), weak=1, strong=0, cache_dir=tmp_path / "killed")
    assert counted == [CHUNK, CHUNK, CHUNK, CHUNK, 5]
    np.testing.assert_array_equal(versions_of(resumed), whole)


def test_a_kill_while_the_file_is_made_leaves_no_file_that_is_too_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, *args: Any) -> None:
        path.write_bytes(b"half a header")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np.lib.format, "open_memmap", killed)
        with pytest.raises(KeyboardInterrupt):
            embed(pictures(2), tiny_backbone(), cache_dir=tmp_path)
    assert len(embed(pictures(2), tiny_backbone(), cache_dir=tmp_path)) == 2


def test_a_number_that_a_kill_has_cut_off_does_not_shift_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = pictures(2 * CHUNK)
    whole = versions_of(embed(split, tiny_backbone(), weak=0, strong=0, cache_dir=tmp_path / "whole"))
    features = module.Work.features

    def killed(self: Any, pixels: Any, seeds: Any) -> Any:
        if next(tmp_path.glob("killed/*/*.done-0")).stat().st_size >= 4:
            raise KeyboardInterrupt
        return features(self, pixels, seeds)

    with monkeypatch.context() as patch:
        patch.setattr(module.Work, "features", killed)
        with pytest.raises(KeyboardInterrupt):
            embed(split, tiny_backbone(), weak=0, strong=0, cache_dir=tmp_path / "killed")
    (note,) = tmp_path.glob("killed/*/*.done-0")
    assert note.read_bytes() == b"\x00" * 4
    note.write_bytes(note.read_bytes() + b"\x01\x00")
    monkeypatch.setattr(module.Part, "_finish", lambda part: None)
    with pytest.raises(OSError, match="has lost features"):
        embed(split, tiny_backbone(), weak=0, strong=0, cache_dir=tmp_path / "killed")
    assert note.read_bytes() == b"\x00" * 4 + b"\x01" + b"\x00" * 3
    monkeypatch.undo()
    resumed = versions_of(embed(split, tiny_backbone(), weak=0, strong=0, cache_dir=tmp_path / "killed"))
    np.testing.assert_array_equal(resumed, whole)


def test_what_another_run_has_made_meanwhile_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen that it is missing, and the second waited for the first."""
    split, backbone, find = pictures(3), tiny_backbone(), module.lookup
    embed(split, backbone, cache_dir=tmp_path)
    (folder,) = tmp_path.iterdir()
    answers = iter([(None, np.arange(3), [])])
    monkeypatch.setattr(module, "lookup", lambda *args: next(answers, None) or find(*args))
    monkeypatch.setattr(module.Work, "features", None)
    assert len(embed(split, backbone, cache_dir=tmp_path)) == 3
    assert not list(folder.glob("*.partial"))


def test_a_disk_that_fills_up_is_said_in_a_sentence_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No room is left in .*: make room"):
            embed(pictures(3), tiny_backbone(), cache_dir=tmp_path)
    assert len(embed(pictures(3), tiny_backbone(), cache_dir=tmp_path)) == 3


def test_an_error_of_the_machine_does_not_make_an_image_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out(self: Any, value: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(datasets.Image, "decode_example", out)
        with pytest.raises(OSError, match="Too many open files"):
            embed(pictures(3), tiny_backbone(), cache_dir=tmp_path, skip_unreadable=True)
    assert len(embed(pictures(3), tiny_backbone(), cache_dir=tmp_path)) == 3


def test_equal_images_are_embedded_once(tmp_path: Path) -> None:
    twice = datasets.concatenate_datasets([pictures(2), pictures(2)])
    features = embed(twice, tiny_backbone(), cache_dir=tmp_path)
    assert len(features) == 4
    assert len(features.parts[0]) == 2


def test_other_weights_another_size_and_other_views_have_caches_of_their_own(tmp_path: Path) -> None:
    for backbone, weak in (
        (tiny_backbone(), 4),
        (tiny_backbone(seed=1), 4),
        (Backbone(tiny_network(), tiny_processor(), image_size=48), 4),
        (tiny_backbone(), 2),
    ):
        embed(pictures(1), backbone, weak=weak, cache_dir=tmp_path)
    assert len(list(tmp_path.glob("*/part-*.hashes.npy"))) == 4


def test_the_classes_of_the_head_are_no_part_of_the_key(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    other = tiny_network(num_labels=3)
    other.load_state_dict(
        {
            **backbone.model.state_dict(),
            **{name: value for name, value in other.state_dict().items() if name.startswith("classifier")},
        }
    )
    assert Backbone(other, tiny_processor()).identity == backbone.identity


def test_labels_come_with_the_features(tmp_path: Path) -> None:
    features = embed(pictures(5, classes=3), tiny_backbone(), cache_dir=tmp_path)
    assert features.labels.tolist() == [0, 1, 2, 0, 1]
    assert features.class_names == ["class 0", "class 1", "class 2"]


def with_broken(count: int) -> datasets.Dataset:
    values = pictures(count).cast_column("image", datasets.Image(decode=False))["image"][:]
    values[1] = {"bytes": values[1]["bytes"][:60], "path": "pile/cut.png"}
    return datasets.Dataset.from_dict({"image": values}, features=datasets.Features(image=datasets.Image()))


def test_unreadable_images_are_skipped_and_listed_or_refused(tmp_path: Path) -> None:
    features = embed(with_broken(4), tiny_backbone(), cache_dir=tmp_path, skip_unreadable=True)
    assert (len(features), features.skipped) == (3, ["pile/cut.png"])
    assert np.isfinite(features.plain()).all()
    with pytest.raises(ValueError, match=r"1 of 4 images cannot be read, the first is pile/cut.png"):
        embed(with_broken(4), tiny_backbone(), cache_dir=tmp_path)


def test_no_room_is_said_before_the_first_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    monkeypatch.setattr(module.Work, "features", None)
    needed = 3 * 7 * tiny_backbone().size * 2
    with pytest.raises(OSError, match=f"3 images need {needed:,} bytes in .* but 1 are free"):
        embed(pictures(3), tiny_backbone(), cache_dir=tmp_path)


def test_a_cache_of_another_network_is_refused(tmp_path: Path) -> None:
    embed(pictures(1), tiny_backbone(), cache_dir=tmp_path)
    (about,) = tmp_path.glob("*/about.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"weights": "other"}))
    with pytest.raises(ValueError, match="holds features of another weights"):
        embed(pictures(1), tiny_backbone(), cache_dir=tmp_path)


def test_another_size_keeps_the_share_of_the_centre_crop() -> None:
    processor = with_size(tiny_processor(), 64)
    image = processor(PIL.Image.new("RGB", (100, 200)), return_tensors="pt")["pixel_values"]
    assert image.shape == (1, 3, 64, 64)
    assert processor.size["shortest_edge"] == 72


def test_features_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    backbone.features = lambda images: torch.full((len(images), backbone.size), 1e5)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="reach 1e"):
        embed(pictures(1), backbone, cache_dir=tmp_path)


MEMORY = """
import io, resource, sys, tempfile
import datasets, PIL.Image, torch
from hf_fixastep.features.embed import embed
from tests.features.networks import tiny_backbone

torch.set_num_threads(1)

def rows(count):
    for at in range(count):
        buffer = io.BytesIO()
        PIL.Image.new("RGB", (1, 1), (at % 256, at // 256, 0)).save(buffer, "PNG")
        yield {"image": {"bytes": buffer.getvalue(), "path": None}}

with tempfile.TemporaryDirectory() as folder:
    kinds = datasets.Features(image=datasets.Image())
    split = datasets.Dataset.from_generator(
        rows, kinds, cache_dir=folder, gen_kwargs={"count": int(sys.argv[1])}
    )
    backbone = tiny_backbone()
    backbone.features = lambda images: torch.zeros(len(images), 64)
    found = embed(split, backbone, weak=1, strong=0, cache_dir=folder)
    assert len(found) == int(sys.argv[1])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_pile() -> None:
    """Between 2,000 and 8,000 images; each has 256 bytes of features, and 16 bytes of hash are kept."""
    found = []
    for count in (2000, 8000):
        command = [sys.executable, "-c", MEMORY, str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        found.append(int(done.stdout))  # kilobytes
    assert found[1] - found[0] < 6_000
