import builtins
import copyreg
import dataclasses
import hashlib
import importlib.util
import io
import os
import pickle
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_fixastep.data import cifar, cifar_files, load_dataset
from hf_fixastep.data.cifar import Cifar10SixAnimal, Cifar100FiftyClass
from hf_fixastep.data.cifar_files import CIFAR10, CIFAR100, Batch, read_cifar
from hf_fixastep.data.open_set import Rows, split_rows


SPLITS = ["labeled", "unlabeled", "validation", "test"]
SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_cifar10 = pytest.mark.skipif(
    not (SHARED / "cifar10").is_dir(), reason="the real CIFAR-10 is not in ../shared/data beside this project"
)
needs_writer = pytest.mark.skipif(
    not (SHARED / "restore_pickles.py").is_file(), reason="../shared/data has no writer of the official files"
)


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def pixels_of(images) -> np.ndarray:
    return np.stack([np.asarray(image).transpose(2, 0, 1).reshape(3072) for image in images])


def same(first: tuple[Rows, Rows], second: tuple[Rows, Rows]) -> bool:
    return all(
        np.array_equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz", compresslevel=0) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def restore_pickles():
    spec = importlib.util.spec_from_file_location("restore_pickles", SHARED / "restore_pickles.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The real CIFAR-10


@pytest.fixture(scope="module")
def labels() -> np.ndarray:
    """Of the training images, in the official order, in which the shared parquet file has them."""
    found = pq.read_table(SHARED / "cifar10/plain_text/train-00000-of-00001.parquet", columns=["label"])
    return found["label"].to_numpy()


def rows_of(
    labels: np.ndarray, config: str = "zeta50", count: int = 400, seed: int = 0
) -> dict[str, np.ndarray]:
    shown = Cifar10SixAnimal.unlabeled_classes[config]
    return split_rows(labels, range(2, 8), shown, {"validation": 500, "labeled": count}, seed)


@needs_cifar10
class TestRealSplits:
    @pytest.mark.parametrize(
        ("seed", "count", "head"),
        [
            (0, 400, [11841, 19602, 45519]),
            (1, 50, [26247, 35067, 34590]),
            (2, 400, [23656, 27442, 40162]),
            (3, 123, [35437, 16296, 23122]),
            (4, 50, [16477, 5969, 46459]),
        ],
    )
    def test_the_split_follows_the_recipe(self, labels, seed, count, head):
        permutation = np.random.RandomState(seed).permutation(50_000).tolist()
        assert permutation[:3] == head
        expected = {name: [] for name in ("labeled", "unlabeled", "validation")}
        for label in range(10):
            mine = [row for row in permutation if labels[row] == label]
            if label in (2, 3, 4, 5, 6, 7):
                expected["validation"] += mine[:500]
                expected["labeled"] += mine[500 : 500 + count]
            if label in (0, 1, 6, 7):
                expected["unlabeled"] += mine[500 + count :]
        rows = rows_of(labels, count=count, seed=seed)
        assert {name: sorted(part) for name, part in rows.items()} == {
            name: sorted(part) for name, part in expected.items()
        }

    @pytest.mark.parametrize(
        ("config", "count", "seed", "digests"),
        [
            ("zeta50", 400, 0, ["c52dcf0c27c6", "b00872cd4d2f", "016c1fbe6ee7"]),
            ("zeta50", 50, 1, ["e2169dfadcee", "f088da6a26fd", "454b074676d8"]),
            ("zeta100", 400, 4, ["a62e9f58813d", "648dcac97e1b", "6d773f400669"]),
        ],
    )
    def test_rows_and_their_order_are_those_of_the_published_results(
        self, labels, config, count, seed, digests
    ):
        rows = rows_of(labels, config, count, seed)
        found = [rows[name].astype(np.int64) for name in ("labeled", "unlabeled", "validation")]
        assert [hashlib.sha256(part.tobytes()).hexdigest()[:12] for part in found] == digests

    @pytest.mark.parametrize(("config", "foreign"), [(f"zeta{25 * n}", n) for n in range(5)])
    def test_zeta_is_the_share_of_foreign_images_and_changes_no_other_split(self, labels, config, foreign):
        rows, half = rows_of(labels, config), rows_of(labels)
        unlabeled = labels[rows["unlabeled"]]
        assert np.mean((unlabeled < 2) | (unlabeled > 7)) == foreign / 4
        assert not {2, 3} & set(unlabeled)  # birds and cats are never unlabeled
        assert all(np.array_equal(rows[name], half[name]) for name in ("labeled", "validation"))

    @pytest.mark.parametrize("config", Cifar10SixAnimal.unlabeled_classes)
    def test_the_order_of_unlabeled_rows_hides_their_labels(self, labels, config):
        found = labels[rows_of(labels, config)["unlabeled"]]
        assert np.mean(found[1:] != found[:-1]) == pytest.approx(0.75, abs=0.02)  # four classes, shuffled
        for label in Cifar10SixAnimal.unlabeled_classes[config]:
            assert np.mean(np.flatnonzero(found == label)) / len(found) == pytest.approx(0.5, abs=0.02)

    def test_labeled_sets_are_nested(self, labels):
        assert set(rows_of(labels, count=50)["labeled"]) < set(rows_of(labels, count=400)["labeled"])

    @pytest.mark.parametrize(
        ("config", "settings", "sizes"),
        [
            ("zeta0", {"labels_per_class": 50}, (300, 17_800, 3000, 6000)),
            ("zeta50", {}, (2400, 16_400, 3000, 6000)),
            ("zeta50", {"labels_per_class": 4499}, (26_994, 4, 3000, 6000)),
            ("zeta0", {"oracle": True}, (2400, 16_400, 3000, 6000)),
            ("zeta50", {"oracle": True}, (2400, 8200, 3000, 6000)),
            ("zeta75", {"oracle": True, "labels_per_class": 50, "seed": 3}, (300, 4450, 3000, 6000)),
        ],
    )
    def test_sizes_of_the_variants(self, labels, monkeypatch, tmp_path, config, settings, sizes):
        balanced = [Rows(np.zeros((len(y), 1), np.uint8), y) for y in (labels, np.arange(10_000) % 10)]
        monkeypatch.setattr(cifar, "read_cifar", lambda *args: balanced)
        builder = Cifar10SixAnimal(config_name=config, cache_dir=str(tmp_path), **settings)
        found = {split.name: split.gen_kwargs["labels"] for split in builder._split_generators(None)}
        assert {name: len(part) for name, part in found.items()} == dict(zip(SPLITS, sizes, strict=True))
        assert set(found["unlabeled"]) == {-1}
        assert set(found["labeled"]) == set(range(6))


@pytest.mark.slow
@needs_cifar10
class TestRealSources:
    @pytest.fixture(scope="class")
    def official(self) -> tuple[Rows, Rows]:
        """Read from parquet files with the rows in the official order."""
        return read_cifar(CIFAR10, str(SHARED / "cifar10"))

    @pytest.fixture(scope="class")
    def pickles(self, official, tmp_path_factory) -> Iterator[Path]:
        """The official files; the writer refuses to write any that has not the published MD5."""
        writer = restore_pickles()

        def load(path, columns):  # what the writer would decode once more
            rows = official[path.name.startswith("test")]
            names = pq.ParquetFile(path).read(columns=["img.path"]).flatten()["img.path"].to_pylist()
            return rows.pixels, names, [rows.labels.tolist()], None

        writer.load = load
        folder = tmp_path_factory.mktemp("official")
        writer.cifar10(folder)
        yield folder
        shutil.rmtree(folder)  # 186 MB; pytest would keep them

    def test_rows_are_in_the_official_order(self, official, labels):
        assert [rows.pixels.shape for rows in official] == [(50_000, 3072), (10_000, 3072)]
        assert np.array_equal(official[0].labels, labels)
        assert official[0].labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
        assert np.bincount(official[1].labels).tolist() == [1000] * 10

    def test_the_official_files_and_their_archive_give_the_same_rows(self, official, pickles, tmp_path):
        assert same(official, read_cifar(CIFAR10, str(pickles)))
        files = {f"{CIFAR10.folder}/{path.name}": path.read_bytes() for path in pickles.rglob("*_batch*")}
        archive = tmp_path / "cifar-10-python.tar.gz"
        write_archive(archive, files)
        with pytest.raises(
            ValueError, match=r"has the MD5 \w+, but the official file has c58f30108f718f92721"
        ):
            read_cifar(CIFAR10, str(tmp_path))
        known = dataclasses.replace(CIFAR10, archive_md5=md5(archive.read_bytes()))
        assert same(official, read_cifar(known, str(tmp_path)))
        assert list(tmp_path.iterdir()) == [archive]

    def test_rows_in_the_order_of_the_hub_give_the_same_rows(self, official, tmp_path):
        table = pq.read_table(SHARED / "cifar10/plain_text/train-00000-of-00001.parquet")
        table = pa.concat_tables(table.slice(10_000 * (batch - 1), 10_000) for batch in (4, 3, 2, 5, 1))
        assert table["label"][0].as_py() == 0  # an airplane, as on the Hub
        pq.write_table(table.slice(0, 17_000), tmp_path / "train-00000-of-00002.parquet")
        pq.write_table(table.slice(17_000), tmp_path / "train-00001-of-00002.parquet")
        rows = cifar_files._read_parquet(CIFAR10, "train", sorted(tmp_path.iterdir()), tmp_path)
        assert same((rows, rows), (official[0], official[0]))

    def test_images_are_those_of_the_rows(self, official, pickles, tmp_path):
        built = load_dataset("cifar10_six_animal", data_dir=pickles, cache_dir=tmp_path)
        # No two of the 60,000 images are equal, so an image tells its row.
        row_of = {
            image.tobytes(): row for row, image in enumerate(np.concatenate([o.pixels for o in official]))
        }
        assert len(row_of) == 60_000
        found = {
            name: [row_of[image.tobytes()] for image in pixels_of(built[name]["image"])] for name in SPLITS
        }
        labels = np.concatenate([rows.labels for rows in official])
        expected = rows_of(official[0].labels) | {
            "test": np.flatnonzero(np.isin(labels, range(2, 8)))[-6000:]
        }
        assert {name: list(part) for name, part in expected.items()} == found
        assert len(set().union(*found.values())) == 27_800  # the splits are disjoint
        for name in ("labeled", "validation", "test"):
            assert np.array_equal(built[name]["label"], labels[found[name]] - 2)
            assert built[name].features["label"].names == ["bird", "cat", "deer", "dog", "frog", "horse"]


# CIFAR-100 in small: 15 random train and 4 test images per class


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory):
    """Rows, their description, and a folder with sub-folders for each kind of source."""
    random = np.random.RandomState(5)
    root = tmp_path_factory.mktemp("tiny")
    for kind in ("archive", "extracted/cifar-100-python", "parquet/cifar100"):
        (root / kind).mkdir(parents=True)
    rows, batches, contents = [], {}, {}
    for name, per_class in (("train", 15), ("test", 4)):
        fine = random.permutation(np.repeat(np.arange(100), per_class))
        pixels = random.randint(256, size=(len(fine), 3072)).astype(np.uint8)
        rows.append(Rows(pixels, fine))
        batch = {b"data": pixels, b"fine_labels": fine.tolist(), b"coarse_labels": (fine // 5).tolist()}
        contents[name] = pickle.dumps(batch, protocol=4)
        records = b"".join(
            bytes([y // 5, y]) + image.tobytes() for image, y in zip(pixels, fine, strict=True)
        )
        batches[name] = (Batch(name, md5(contents[name]), hashlib.sha1(records).hexdigest()),)
        (root / "extracted/cifar-100-python" / name).write_bytes(contents[name])
        images = [
            {"bytes": cifar_files.to_png(image), "path": f"{y}.png"}
            for image, y in zip(pixels, fine, strict=True)
        ]
        table = pa.table({"img": images, "fine_label": fine, "coarse_label": fine // 5})
        half = len(fine) // 2
        pq.write_table(table.slice(0, half), root / f"parquet/cifar100/{name}-00000-of-00002.parquet")
        pq.write_table(table.slice(half), root / f"parquet/cifar100/{name}-00001-of-00002.parquet")
    archive = root / "archive" / CIFAR100.archive
    write_archive(
        archive,
        {
            "cifar-100-python/file.txt~": b"",
            "/cifar-100-python/train": b"absolute",
            "../cifar-100-python/train": b"outside",
            "cifar-100-python/../train": b"winding",
            "cifar-100-python/test": contents["test"],
            "cifar-100-python/train": contents["train"],
        },
    )
    tiny = dataclasses.replace(
        CIFAR100, archive_md5=md5(archive.read_bytes()), train_size=1500, test_size=400, **batches
    )
    return rows, tiny, root


@pytest.fixture
def tiny(tiny_files, monkeypatch, tmp_path):
    """A copy of the folder that may be spoiled; `load` then reads from it."""
    _, description, root = tiny_files
    shutil.copytree(root, tmp_path / "raw")
    monkeypatch.setattr(Cifar100FiftyClass, "cifar", description)
    monkeypatch.setattr(Cifar100FiftyClass, "per_class", {"validation": 5})
    return Tiny(tmp_path / "raw", tmp_path / "cache", monkeypatch)


@dataclasses.dataclass
class Tiny:
    root: Path
    cache: Path
    monkeypatch: pytest.MonkeyPatch

    def load(self, source: str | None, config: str = "zeta50", **settings):
        settings = {"labels_per_class": 4, "cache_dir": self.cache} | settings
        data_dir = None if source is None else self.root / source
        return load_dataset("cifar100_fifty_class", config, data_dir=data_dir, **settings)

    def describe(self, **changes) -> None:
        changed = dataclasses.replace(Cifar100FiftyClass.cifar, **changes)
        self.monkeypatch.setattr(Cifar100FiftyClass, "cifar", changed)

    def refuses(self, source: str | None, error: type[Exception] = ValueError, **settings) -> str:
        """The one sentence of the refusal; nothing is left in the cache."""
        with pytest.raises(error) as caught:
            self.load(source, **settings)
        assert [path for path in self.cache.rglob("*") if path.is_file() and path.suffix != ".lock"] == []
        assert list(self.cache.rglob("*.incomplete")) == []
        message = str(caught.value)
        assert "\n" not in message
        assert message.endswith(".")
        return message


class TestTinyCifar100:
    def test_every_source_gives_the_same_splits(self, tiny, tiny_files):
        rows = tiny_files[0]
        expected = split_rows(rows[0].labels, range(50), range(25, 75), {"validation": 5, "labeled": 4}, 0)
        for split in ("train", "test"):  # as the Hub's conversion to parquet lays them out
            shards = sorted((tiny.root / "parquet/cifar100").glob(f"{split}*"))
            converted = tiny.root / "converted/cifar100" / split / "0000.parquet"
            converted.parent.mkdir(parents=True)
            pq.write_table(pa.concat_tables(map(pq.read_table, shards)), converted)
        for source in ("archive", "extracted", "extracted/cifar-100-python", "parquet", "converted"):
            data = tiny.load(source)
            for name, part in expected.items():
                assert np.array_equal(pixels_of(data[name]["image"]), rows[0].pixels[part])
            assert data["labeled"]["label"][:] == rows[0].labels[expected["labeled"]].tolist()
            assert data["test"]["label"][:] == [label for label in rows[1].labels if label < 50]

    def test_nothing_on_the_disk_tells_the_class_of_an_unlabeled_image(self, tiny):
        unlabeled = tiny.load("extracted")["unlabeled"]
        assert unlabeled.column_names == ["image"]
        stored = datasets.Dataset.from_file(unlabeled.cache_files[0]["filename"])
        cells = stored.cast_column("image", datasets.Image(decode=False))["image"]
        assert set(stored["label"]) == {-1}
        assert {cell["path"] for cell in cells} == {None}
        picture = PIL.Image.open(io.BytesIO(cells[0]["bytes"]))
        assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (32, 32))

    @pytest.mark.parametrize(("config", "first", "last"), [("zeta50", 25, 74), ("zeta100", 50, 99)])
    def test_fifty_classes_are_unlabeled(self, tiny, tiny_files, config, first, last):
        rows = tiny_files[0][0]
        class_of = {image.tobytes(): label for image, label in zip(rows.pixels, rows.labels, strict=True)}
        data = tiny.load("extracted", config)
        labels = [class_of[image.tobytes()] for image in pixels_of(data["unlabeled"]["image"])]
        assert np.bincount(labels, minlength=100).tolist() == [6 * (first <= c <= last) for c in range(100)]
        assert np.bincount(data["labeled"]["label"]).tolist() == [4] * 50
        assert np.bincount(data["validation"]["label"]).tolist() == [5] * 50
        assert np.bincount(data["test"]["label"]).tolist() == [4] * 50

    @pytest.mark.parametrize(
        ("config", "oracle", "seen", "unseen"),
        [
            ("zeta50", False, (50, 75), (75, 100)),
            ("zeta50", True, (), (50, 100)),
            ("zeta100", False, (50, 100), ()),
        ],
    )
    def test_foreign_test_images_are_of_classes_without_labels(
        self, tiny, tiny_files, config, oracle, seen, unseen
    ):
        rows = tiny_files[0][1]
        class_of = {image.tobytes(): label for image, label in zip(rows.pixels, rows.labels, strict=True)}
        data = tiny.load("extracted", config, foreign=True, oracle=oracle)
        for name, bounds in (("seen_foreign", seen), ("unseen_foreign", unseen)):
            if not bounds:
                assert name not in data
                continue
            assert data[name].column_names == ["image"]
            labels = [class_of[image.tobytes()] for image in pixels_of(data[name]["image"])]
            assert sorted(labels) == [c for c in range(*bounds) for _ in range(4)]
            stored = datasets.Dataset.from_file(data[name].cache_files[0]["filename"])
            assert set(stored["label"]) == {-1}
        assert len(data["unlabeled"]) == 6 * (25 if oracle else 50)
        assert np.bincount(data["test"]["label"]).tolist() == [4] * 50

    def test_streaming_gives_the_same_rows_and_a_second_load_reads_no_source(self, tiny):
        built, streamed = tiny.load("archive"), tiny.load("archive", streaming=True)
        for name in SPLITS:
            images = [row["image"] for row in streamed[name]]
            assert np.array_equal(pixels_of(images), pixels_of(built[name]["image"]))
        tiny.monkeypatch.setattr(cifar, "read_cifar", None)
        assert len(tiny.load("archive")["test"]) == 200

    def test_without_a_folder_the_hub_is_asked(self, tiny):
        calls = []

        def download(repository, **kwargs):
            calls.append((repository, kwargs["repo_type"], kwargs["allow_patterns"]))
            return str(tiny.root / "parquet")

        tiny.monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert len(tiny.load(None)["labeled"]) == 200
        assert calls == [("uoft-cs/cifar100", "dataset", "cifar100/*.parquet")]


class TestCifar100:
    @pytest.mark.parametrize(("oracle", "unlabeled"), [(False, 17_500), (True, 8750)])
    def test_sizes(self, monkeypatch, tmp_path, oracle, unlabeled):
        balanced = [
            Rows(np.zeros((len(y), 1), np.uint8), y)
            for y in (np.arange(50_000) % 100, np.arange(10_000) % 100)
        ]
        monkeypatch.setattr(cifar, "read_cifar", lambda *args: balanced)
        builder = Cifar100FiftyClass(cache_dir=str(tmp_path), oracle=oracle)
        sizes = [len(split.gen_kwargs["labels"]) for split in builder._split_generators(None)]
        assert sizes == [5000, unlabeled, 2500, 5000]

    @needs_writer
    def test_class_names_are_those_of_the_official_meta_file(self):
        coarse = """
            aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
            household_furniture insects large_carnivores large_man-made_outdoor_things
            large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals
            non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2
            """
        writer = restore_pickles().Py2Pickler
        entries = {"fine_label_names": list(CIFAR100.class_names), "coarse_label_names": coarse.split()}
        meta = writer().dict([(name, writer.texts, names) for name, names in entries.items()])
        assert md5(meta) == "7973b15100ade9c7d40fb424638fde48"


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "title", "count", "largest"),
        [
            ("cifar10_six_animal", "CIFAR-10", 4500, 4499),
            ("cifar100_fifty_class", "CIFAR-100", 0, 449),
        ],
    )
    def test_an_impossible_number_of_labels_is_refused_before_reading(
        self, name, title, count, largest, tmp_path
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011, the whole sentence is compared
            load_dataset(name, labels_per_class=count, data_dir="nowhere", cache_dir=tmp_path)
        assert str(error.value) == (
            f"labels_per_class is {count}, but the images of {title} suffice for 1 to {largest}: choose a "
            "number in that range."
        )

    @pytest.mark.parametrize("name", ["cifar10_six_animal", "cifar100_fifty_class"])
    def test_an_oracle_that_leaves_nothing_is_refused(self, name, tmp_path):
        with pytest.raises(ValueError) as error:  # noqa: PT011, the whole sentence is compared
            load_dataset(name, "zeta100", oracle=True, data_dir="nowhere", cache_dir=tmp_path)
        assert str(error.value) == (
            "oracle=True drops every unlabeled image of zeta100, which leaves labeled-only training: use "
            "loss=supervised, without the oracle."
        )


class TestRefusals:
    def test_no_folder(self, tiny):
        assert tiny.refuses("nowhere", FileNotFoundError) == (
            f"There is no folder {tiny.root / 'nowhere'}: make it, download cifar-100-python.tar.gz from "
            "https://www.cs.toronto.edu/~kriz/cifar.html and put it there."
        )

    def test_folder_without_the_set(self, tiny):
        (tiny.root / "empty").mkdir()
        for name in ("notes.txt", "readme.parquet", "cifar-10-python.tar.gz"):
            (tiny.root / "empty" / name).write_text("nothing of interest")
        assert tiny.refuses("empty", FileNotFoundError) == (
            f"{tiny.root / 'empty'} holds neither cifar-100-python.tar.gz nor cifar-100-python nor the "
            "parquet files of uoft-cs/cifar100: download cifar-100-python.tar.gz from "
            "https://www.cs.toronto.edu/~kriz/cifar.html and put it there."
        )

    def test_no_folder_given_and_no_network(self, tiny, tmp_path):
        tiny.monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        assert tiny.refuses(None, ConnectionError) == (
            "CIFAR-100 cannot be fetched from uoft-cs/cifar100 on the Hub (LocalEntryNotFoundError): "
            "download cifar-100-python.tar.gz from https://www.cs.toronto.edu/~kriz/cifar.html and pass the "
            "folder that holds it as data_dir."
        )

    @pytest.mark.parametrize("file", [f"archive/{CIFAR100.archive}", "extracted/cifar-100-python/train"])
    def test_other_bytes_than_published_are_not_even_unpickled(self, tiny, file):
        path = tiny.root / file
        content = path.read_bytes()
        path.write_bytes(content[:-100])
        tiny.monkeypatch.setattr(cifar_files.ArrayUnpickler, "load", None)
        assert tiny.refuses(file.split("/")[0]) == (
            f"{path} has the MD5 {md5(content[:-100])}, but the official file has {md5(content)}: it is "
            "damaged, incomplete or not the original; download it again from "
            "https://www.cs.toronto.edu/~kriz/cifar.html."
        )

    def test_missing_batch(self, tiny):
        folder = tiny.root / "extracted/cifar-100-python"
        (folder / "test").unlink()
        assert tiny.refuses("extracted", FileNotFoundError) == (
            f"{folder} lacks test of the batches of CIFAR-100: download cifar-100-python.tar.gz from "
            "https://www.cs.toronto.edu/~kriz/cifar.html again."
        )

    def test_archive_of_hostile_names(self, tiny):
        archive = tiny.root / "archive" / CIFAR100.archive
        with tarfile.open(archive, "w:gz") as tar:
            for name in ("/cifar-100-python/train", "../cifar-100-python/train", "../../escaped"):
                tar.addfile(tarfile.TarInfo(name), io.BytesIO())
            link = tarfile.TarInfo("cifar-100-python/test")
            link.type, link.linkname = tarfile.SYMTYPE, str(tiny.root / "extracted/cifar-100-python/test")
            tar.addfile(link)
        tiny.describe(archive_md5=md5(archive.read_bytes()))
        before = sorted(tiny.root.parent.rglob("*"))
        message = tiny.refuses("archive", FileNotFoundError)
        assert message.startswith(f"{archive} lacks train, test of the batches of CIFAR-100")
        assert [path for path in sorted(tiny.root.parent.rglob("*")) if tiny.cache not in path.parents] in (
            before,
            sorted([*before, tiny.cache]),
        )

    @pytest.mark.parametrize(
        ("split", "lost", "left", "size"), [("train", "*1-of*", 750, 1500), ("test", "*", 0, 400)]
    )
    def test_missing_shards(self, tiny, split, lost, left, size):
        folder = tiny.root / "parquet/cifar100"
        for file in folder.glob(f"{split}{lost}"):
            file.unlink()
        assert tiny.refuses("parquet") == (
            f"The parquet files of {split} in {folder} hold {left} rows, but CIFAR-100 has {size}: download "
            "all parquet files of uoft-cs/cifar100."
        )

    @pytest.mark.parametrize("kept", [slice(-10), slice(0)])
    def test_truncated_parquet_file(self, tiny, kept):
        file = tiny.root / "parquet/cifar100/train-00001-of-00002.parquet"
        file.write_bytes(file.read_bytes()[kept])
        assert tiny.refuses("parquet") == (
            f"{file} is no complete parquet file: download it again from uoft-cs/cifar100."
        )

    @pytest.mark.parametrize(
        "columns",
        [
            {"img": [{"bytes": b"", "path": ""}], "label": [1]},
            {"img": [{"path": ""}], "fine_label": [1], "coarse_label": [1]},
            {"img": [{"bytes": b"", "path": ""}], "fine_label": ["fox"], "coarse_label": [1]},
        ],
    )
    def test_wrong_columns(self, tiny, columns):
        file = tiny.root / "parquet/cifar100/train-00001-of-00002.parquet"
        pq.write_table(pa.table(columns), file)
        assert tiny.refuses("parquet") == (
            f"{file} has the columns {', '.join(columns)}, but uoft-cs/cifar100 has encoded images in img "
            "and numbers in coarse_label and fine_label: put its own parquet files there."
        )

    @pytest.mark.parametrize("spoil", ["swapped rows", "one label", "one pixel"])
    def test_other_rows_than_the_official(self, tiny, spoil):
        file = tiny.root / "parquet/cifar100/train-00000-of-00002.parquet"
        rows = pq.read_table(file).to_pylist()
        if spoil == "swapped rows":
            rows[:2] = rows[1::-1]
        elif spoil == "one label":
            rows[7]["fine_label"] ^= 1
        else:
            pixels = pixels_of([PIL.Image.open(io.BytesIO(rows[7]["img"]["bytes"]))])[0]
            pixels[0] ^= 1
            rows[7]["img"]["bytes"] = cifar_files.to_png(pixels)
        pq.write_table(pa.Table.from_pylist(rows), file)
        assert tiny.refuses("parquet") == (
            f"The parquet files of train in {file.parent} hold other images or labels than CIFAR-100, or not "
            "batch by batch, so that the official order is unknown: download the parquet files of "
            "uoft-cs/cifar100."
        )

    @pytest.mark.parametrize("spoil", ["missing", "another size", "cut off", "jpeg"])
    def test_other_images_than_expected(self, tiny, spoil):
        file = tiny.root / "parquet/cifar100/train-00000-of-00002.parquet"
        rows, buffer = pq.read_table(file).to_pylist(), io.BytesIO()
        picture = PIL.Image.new("RGB", (33 if spoil == "another size" else 32, 32))
        picture.save(buffer, "JPEG" if spoil == "jpeg" else "PNG")
        content = buffer.getvalue()[: -30 if spoil == "cut off" else None]
        rows[7]["img"]["bytes"] = None if spoil == "missing" else content
        pq.write_table(pa.Table.from_pylist(rows), file)
        assert tiny.refuses("parquet") == (
            f"{file} holds something else than PNG or WebP images of 32x32 pixels: download it again."
        )


class TestBatchOrder:
    BATCHES = tuple(
        Batch(str(n), "", hashlib.sha1(bytes([n, *[n] * 3072]) * 2).hexdigest()) for n in range(5)
    )  # two rows each, all bytes equal to the number of the batch

    def order(self, *numbers: int) -> list[int] | None:
        labels = np.repeat(np.array(numbers, np.uint8), 2)
        order = cifar_files._official_order(
            self.BATCHES, np.repeat(labels[:, None], 3072, axis=1), labels[:, None]
        )
        return None if order is None else order.tolist()

    def test_batches_are_put_in_order(self):
        assert self.order(0, 1, 2, 3, 4) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert self.order(3, 2, 1, 4, 0) == [8, 9, 4, 5, 2, 3, 0, 1, 6, 7]

    def test_a_repeated_batch_is_no_order(self):
        assert self.order(0, 1, 2, 3, 3) is None


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class TestHostilePickles:
    @pytest.mark.parametrize("protocol", [0, 4])
    @pytest.mark.parametrize(
        ("function", "arguments"),
        [
            (os.system, ("touch {}",)),
            (builtins.eval, ("open({!r}, 'w')",)),
            (builtins.getattr, (Call(__import__, "os"), "system")),
            (copyreg._reconstructor, (Tiny, object, None)),
            (np.fromfile, ("{}",)),
        ],
    )
    def test_nothing_of_it_is_run(self, tiny, tmp_path, function, arguments, protocol):
        marker = tmp_path / "marker"
        call = Call(function, *(a.format(str(marker)) if isinstance(a, str) else a for a in arguments))
        content = pickle.dumps({b"data": [{"deep": call}], b"fine_labels": [0]}, protocol=protocol)
        (tiny.root / "extracted/cifar-100-python/train").write_bytes(content)
        tiny.describe(train=(Batch("train", md5(content), ""),))
        message = tiny.refuses("extracted", pickle.UnpicklingError)
        assert message.startswith("The pickle asks for ")
        assert message.endswith(
            "but a CIFAR batch holds only plain values and numpy arrays: do not use this file."
        )
        assert not marker.exists()

    def test_the_attack_would_work_without_the_guard(self, tmp_path):
        pickle.loads(pickle.dumps(Call(os.system, f"touch {tmp_path / 'marker'}")))
        assert (tmp_path / "marker").exists()

    @pytest.mark.parametrize(
        "content",
        [
            b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__class__\x93.",  # an attribute of something allowed
            b"cnumpy.core.multiarray\nscalar\n.",
            b"cnumpy.core.os\nsystem\n.",
            b"\x82\x01.",  # an entry of copyreg's table of extensions
        ],
    )
    def test_side_doors_are_shut(self, content):
        with pytest.raises((pickle.UnpicklingError, ValueError)):
            cifar_files.ArrayUnpickler(io.BytesIO(content)).load()
