import io
import itertools
import json
import logging
import os
import shutil
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import PIL.Image
import PIL.ImageFile
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize

from hf_fixastep.data import files, folder_report, folders, load_dataset
from hf_fixastep.data.cutting import cut
from hf_fixastep.data.files import digest, encode, read_picture, to_8_bits, walk
from hf_fixastep.data.images import Images
from hf_fixastep.data.listings import duplicates, list_labeled, list_unlabeled


@pytest.fixture(autouse=True)
def _no_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, seed: int = 0, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(noise(seed, 6, 5, 3)).save(path, **options)
    return path


def make(root: Path, classes: dict[str, int], start: int = 0) -> Path:
    """Class folders with files 0.png, 1.png, ..., all different."""
    seeds = itertools.count(start)
    for name, count in classes.items():
        for number in range(count):
            save(root / name / f"{number}.png", next(seeds))
    return root


@pytest.fixture
def sides(tmp_path) -> dict[str, Path]:
    return {
        "labeled": make(tmp_path / "labeled", {"cat": 10, "dog": 20}),
        "unlabeled": make(tmp_path / "pile", {"a": 4, "b/c": 3}, start=1000),
    }


@pytest.fixture
def load(tmp_path):
    def load_here(sides, **settings):
        return load_dataset("folders", **sides, cache_dir=tmp_path / "cache", **settings)

    return load_here


def folder(data) -> Path:
    return Path(data["test"].cache_files[0]["filename"]).parent


def pixels_of(path: Path) -> np.ndarray:
    return np.asarray(read_picture(str(path)).image)


class TestReading:
    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16"])
    def test_every_mode_becomes_grey_or_rgb(self, mode, tmp_path):
        picture = (
            PIL.Image.fromarray(noise(0, 6, 5, 3)).convert("L" if mode == "I;16" else "RGB").convert(mode)
        )
        path = tmp_path / ("image.tif" if mode in ("CMYK", "YCbCr", "I", "F") else "image.png")
        # Pillow 12.3 writes uncompressed YCbCr that it takes for truncated itself.
        picture.save(path, **({"compression": "tiff_lzw"} if mode == "YCbCr" else {}))
        image = read_picture(str(path)).image
        assert image.mode == ("L" if mode in ("1", "L", "LA", "I", "F", "I;16") else "RGB")
        assert image.size == (5, 6)

    def test_transparent_pixels_lie_on_black(self, tmp_path):
        array = np.array([[[200, 100, 50, 255], [200, 100, 50, 0], [200, 100, 50, 51]]], dtype=np.uint8)
        PIL.Image.fromarray(array).save(tmp_path / "a.png")
        assert pixels_of(tmp_path / "a.png").tolist() == [[[200, 100, 50], [0, 0, 0], [40, 20, 10]]]
        PIL.Image.fromarray(array[..., [0, 3]], "LA").save(tmp_path / "b.png")
        assert pixels_of(tmp_path / "b.png").tolist() == [[200, 0, 40]]
        palette = PIL.Image.fromarray(np.array([[0, 1]], dtype=np.uint8)).convert("P")
        palette.putpalette([10, 20, 30, 40, 50, 60])
        palette.save(tmp_path / "c.png", transparency=1)
        assert pixels_of(tmp_path / "c.png").tolist() == [[[10, 20, 30], [0, 0, 0]]]

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            (np.array([0, 4095, 819], np.uint16), [0, 255, 51]),  # 12 bits
            (np.array([0, 4096], np.int32), [0, 16]),  # 16 bits
            (np.array([-100, 0, 155], np.int32), [0, 100, 255]),
            (np.array([0, 65536], np.int32), [0, 255]),
            (np.array([0.0, 0.2, 0.5], np.float32), [0, 51, 128]),
            (np.array([10.0, 15.0, 20.0], np.float32), [0, 128, 255]),
            (np.array([-3e38, 3e38], np.float32), [0, 255]),
            (np.array([np.nan, 5.0, np.inf, 6.0], np.float32), [0, 0, 0, 255]),
            (np.array([np.nan], np.float32), [0]),
            (np.array([7.0, 7.0], np.float32), [0, 0]),
            (np.array([[1, 2]], ">u2"), [[0, 0]]),
        ],
    )
    def test_more_than_eight_bits_are_scaled_by_the_first_range_that_fits(self, values, expected):
        assert to_8_bits(values).tolist() == expected

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_exif_orientation_is_applied(self, orientation, tmp_path):
        upright = noise(0, 16, 24)
        undo = [None, lambda a: a, np.fliplr, lambda a: np.rot90(a, 2), np.flipud, np.transpose]
        undo += [lambda a: np.rot90(a, 1), lambda a: np.rot90(a, 2).T, lambda a: np.rot90(a, 3)]
        exif = PIL.Image.Exif()
        exif[274] = orientation
        PIL.Image.fromarray(np.ascontiguousarray(undo[orientation](upright))).save(
            tmp_path / "a.png", exif=exif
        )
        assert np.array_equal(pixels_of(tmp_path / "a.png"), upright)

    def test_the_stored_bytes_do_not_turn_the_image_again(self, tmp_path):
        exif = PIL.Image.Exif()
        exif[274] = 6
        picture = read_picture(str(save(tmp_path / "a.jpg", exif=exif)))
        stored = datasets.Image().decode_example({"bytes": encode(picture, None), "path": None})
        assert np.array_equal(np.asarray(stored), np.asarray(picture.image))
        assert stored.size == (6, 5)
        broken = save(tmp_path / "b.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\xff\xff")
        assert pixels_of(broken).shape == (6, 5, 3)

    @pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
    def test_plain_files_are_stored_as_they_are_unless_much_follows_the_image(self, suffix, tmp_path):
        path = save(tmp_path / f"a.{suffix}")
        assert encode(read_picture(str(path)), None) == path.read_bytes()
        assert encode(read_picture(str(path)), (6, 5)) == path.read_bytes()
        path.write_bytes(path.read_bytes() + bytes(10**6))
        assert len(encode(read_picture(str(path)), None)) < 1000

    def test_resizing_is_that_of_the_image_processors(self, tmp_path):
        array = noise(0, 30, 40, 3)
        PIL.Image.fromarray(array).save(tmp_path / "a.png")
        stored = PIL.Image.open(io.BytesIO(encode(read_picture(str(tmp_path / "a.png")), (8, 12))))
        expected = resize(
            torch.from_numpy(array).permute(2, 0, 1), [8, 12], InterpolationMode.BILINEAR, antialias=True
        )
        assert np.abs(np.asarray(stored).astype(int) - expected.permute(1, 2, 0).numpy()).max() <= 1

    def test_truncated_files_are_refused_whatever_was_set(self, tmp_path, monkeypatch):
        monkeypatch.setattr(PIL.ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        path = save(tmp_path / "a.png")
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(files.UnreadableImage, match="truncated"):
            read_picture(str(path))
        assert PIL.ImageFile.LOAD_TRUNCATED_IMAGES

    def test_equal_pixels_have_equal_digests(self, tmp_path):
        one, same, other = save(tmp_path / "a.png"), save(tmp_path / "a.tif"), save(tmp_path / "b.png", 1)
        assert one.read_bytes() != same.read_bytes()
        digests = [digest(read_picture(str(path)).image) for path in (one, same, other)]
        assert digests[0] == digests[1] != digests[2]
        wide, high = PIL.Image.new("L", (4, 2)), PIL.Image.new("L", (2, 4))
        assert digest(wide) != digest(high)

    def test_duplicates_are_told_by_split(self):
        digests = {"labeled": [5, 6, 7, 7], "unlabeled": [5, 8, 8, 0], "test": [9, 6, 0]}
        found = duplicates({name: np.array(values, np.uint64) for name, values in digests.items()})
        assert found == [
            {"labeled": [0], "unlabeled": [0]},
            {"labeled": [1], "test": [1]},
            {"labeled": [2, 3]},
        ]


class TestListing:
    def test_the_first_folder_is_the_class(self, tmp_path):
        save(tmp_path / "cat/deep/er/1.PNG")
        save(tmp_path / "dog/2.jpeg")
        listing = list_labeled("labeled", tmp_path, None)
        assert listing.names == ["cat/deep/er/1.PNG", "dog/2.jpeg"]
        assert listing.labels == ["cat", "dog"]

    def test_hidden_and_other_files_are_counted(self, tmp_path):
        save(tmp_path / "a/1.png")
        for name in (".hidden.png", ".folder/2.png", "__MACOSX/3.png", "a/notes.txt", "a/Thumbs.db"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("x")
        listing = list_unlabeled("unlabeled", str(tmp_path), None)
        assert listing.names == ["a/1.png"]
        assert listing.passed_over == {"hidden": 3, "not an image": 2}

    def test_links_are_followed_but_not_in_circles(self, tmp_path):
        save(tmp_path / "elsewhere/1.png")
        (tmp_path / "pile/a").mkdir(parents=True)
        (tmp_path / "pile/a/link").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "pile/a/up").symlink_to(tmp_path / "pile")
        listing = list_unlabeled("unlabeled", tmp_path / "pile", None)
        assert listing.names == ["a/link/1.png"]
        assert listing.passed_over == {"link to what is there already": 1}

    def test_a_walk_gives_sorted_names_and_the_state_of_what_can_be_read(self, tmp_path):
        for name in ("b/2.txt", "b-c.txt", "b/1/x", ".hidden"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(name)
        (tmp_path / "itself").symlink_to("itself")
        (tmp_path / "nowhere").symlink_to("gone")
        os.mkfifo(tmp_path / "pipe")
        assert [(name, state and state.st_size) for name, state in walk(tmp_path)] == [
            ("b-c.txt", 7),
            ("b/1/x", 5),
            ("b/2.txt", 7),
            ("itself", None),
            ("nowhere", None),
            ("pipe", 0),
        ]
        with pytest.raises(FileNotFoundError):
            walk(tmp_path / "gone")

    def test_several_sources_are_joined(self, tmp_path):
        make(tmp_path / "one", {"a": 1})
        make(tmp_path / "two", {"a": 2})
        pd.DataFrame({"file_name": ["one/a/0.png", "two/a/0.png"]}).to_csv(tmp_path / "table.csv")
        sources = [tmp_path / "one", f"{tmp_path}/two/*/1.png", tmp_path / "table.csv"]
        listing = list_unlabeled("unlabeled", sources, None)
        assert listing.names == ["one/a/0.png", "two/a/1.png", "two/a/0.png"]
        assert listing.passed_over == {"given twice": 1}
        assert all(os.path.isfile(listing.path(row)) for row in range(3))

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("pile/*", ["a/0.png", "b/c/0.png", "b/c/1.png"]),
            ("pile/**", ["a/0.png", "b/c/0.png", "b/c/1.png"]),
            ("pile/**/0.*", ["a/0.png", "b/c/0.png"]),
            ("p*e/b", ["pile/b/c/0.png", "pile/b/c/1.png"]),
        ],
    )
    def test_globs_match_files_and_folders(self, pattern, expected, tmp_path, monkeypatch):
        make(tmp_path / "pile", {"a": 1, "b/c": 2})
        assert list_unlabeled("unlabeled", f"{tmp_path}/{pattern}", None).names == expected
        monkeypatch.chdir(tmp_path)
        listing = list_unlabeled("unlabeled", pattern, None)
        assert listing.names == expected
        assert os.path.isfile(listing.path(0))

    @pytest.mark.parametrize("suffix", ["csv", "parquet"])
    def test_tables_give_labels_and_groups(self, suffix, tmp_path):
        table = pd.DataFrame(
            {"file_name": ["x/1.png", "2.png"], "label": ["NA", 10], "patient": [1, 2]}
        ).astype(str)
        getattr(table, f"to_{suffix}")(tmp_path / f"t.{suffix}", index=False)
        listing = list_labeled("labeled", tmp_path / f"t.{suffix}", "patient")
        assert (listing.names, listing.labels, listing.groups) == (
            ["x/1.png", "2.png"],
            ["NA", "10"],
            ["1", "2"],
        )
        assert listing.path(0) == str(tmp_path / "x/1.png")
        unlabeled = list_unlabeled("unlabeled", tmp_path / f"t.{suffix}", "patient")
        assert unlabeled.labels == []
        assert unlabeled.groups == ["1", "2"]

    def test_names_that_are_not_utf8_are_found_and_told(self, tmp_path):
        pile = tmp_path / "pile[1]"  # a folder with characters of a glob is a folder
        save(pile / "a/1.png").rename(os.fsdecode(os.fsencode(pile) + b"/a/caf\xe9.png"))
        listing = list_unlabeled("unlabeled", pile, None)
        assert listing.shown(0) == "a/caf\\xe9.png"
        assert read_picture(listing.path(0)).image.size == (5, 6)
        (pile / "t.csv").write_bytes(b"file_name\na/caf\xe9.png\n")
        assert list_unlabeled("unlabeled", pile / "t.csv", None).names == listing.names

    def test_groups_come_from_file_names(self, tmp_path):
        make(tmp_path, {"cat/p1": 1, "dog/p2": 1})
        assert list_labeled("labeled", tmp_path, r"(p\d)/").groups == ["p1", "p2"]
        assert list_unlabeled("unlabeled", tmp_path, r"(p1)/").groups == ["p1", ""]
        assert list_unlabeled("unlabeled", tmp_path, "patient").groups == []


class TestCut:
    LABELS = ["cat"] * 50 + ["dog"] * 20 + ["owl"] * 10
    SHARES = {"validation": 0.1, "test": 0.2}

    def test_shares_hold_in_every_class(self):
        parts = cut(self.LABELS, range(80), self.SHARES, seed=0)
        counts = {name: Counter(self.LABELS[row] for row in rows) for name, rows in parts.items()}
        assert counts == {
            "validation": {"cat": 5, "dog": 2, "owl": 1},
            "test": {"cat": 10, "dog": 4, "owl": 2},
            "labeled": {"cat": 35, "dog": 14, "owl": 7},
        }
        assert sorted(itertools.chain(*parts.values())) == list(range(80))

    @pytest.mark.parametrize("seed", range(5))
    def test_no_group_is_on_two_sides(self, seed):
        random = np.random.RandomState(seed)
        groups = random.randint(25, size=80).astype(str).tolist()  # each with several classes
        parts = cut(self.LABELS, groups, self.SHARES, seed)
        owners = [{groups[row] for row in rows} for rows in parts.values()]
        assert all(one.isdisjoint(other) for one, other in itertools.combinations(owners, 2))
        assert all({self.LABELS[row] for row in rows} == {"cat", "dog", "owl"} for rows in parts.values())
        assert len(parts["test"]) == pytest.approx(16, abs=4)
        assert len(parts["validation"]) == pytest.approx(8, abs=4)

    def test_shares_hold_with_groups_of_several_classes(self):
        random = np.random.RandomState(0)
        labels = random.choice(["cat", "dog", "owl"], p=[0.6, 0.3, 0.1], size=2000).tolist()
        groups = random.randint(200, size=2000).tolist()
        parts = cut(labels, groups, self.SHARES, seed=0)
        for label, total in Counter(labels).items():
            for name, share in self.SHARES.items():
                assert sum(labels[row] == label for row in parts[name]) / total == pytest.approx(
                    share, abs=0.02
                )

    def test_a_huge_group_stays_labeled(self):
        groups = ["big"] * 40 + [str(n) for n in range(40, 50)]
        for seed in range(5):
            parts = cut(["cat"] * 50, groups, self.SHARES, seed)
            assert set(range(40)) <= set(parts["labeled"])
            assert 1 <= len(parts["validation"]) <= 5

    def test_a_cut_that_groups_forbid_is_refused(self):
        labels = ["cat", "dog", "cat", "dog", "dog"]
        with pytest.raises(
            ValueError,
            match=r"^Cutting validation and test from labeled needs 3 groups of every class, but 'cat' has 2",
        ):
            cut(labels, ["1", "1", "2", "2", "3"], self.SHARES, 0)
        # only group 1 has one image of every class; without it two groups always share a class
        labels, groups = ["cat", "dog", "owl", "cat", "dog", "cat", "owl", "dog", "owl"], list("111223344")
        with pytest.raises(
            ValueError, match=r"^The groups cannot be cut so that labeled and validation and test have"
        ):
            cut(labels, groups, self.SHARES, 0)

    def test_copies_stay_together(self, load, sides, tmp_path):
        for number in range(10):
            for copy in "xyz":
                shutil.copy(
                    sides["labeled"] / f"dog/{number}.png", sides["labeled"] / f"dog/{number}{copy}.png"
                )
        data = load(sides)
        # Dog/3x.png.
        names = [{name[4] for name in part["file_name"] if name[5] in "xyz"} for part in data.values()]
        assert sum(map(len, names)) == 10
        assert folder_report(data)["duplicates"] == []


class TestBuiltSet:
    def test_columns_and_labels(self, load, sides):
        data = load(sides)
        assert list(data) == ["labeled", "unlabeled", "validation", "test"]
        assert [len(part) for part in data.values()] == [21, 7, 3, 6]
        assert data["labeled"].features["label"].names == ["cat", "dog"]
        stored = datasets.Dataset.from_file(data["unlabeled"].cache_files[0]["filename"])
        assert set(stored["label"]) == {-1}
        assert data["unlabeled"].column_names == ["image", "file_name"]
        for name in ("labeled", "validation", "test"):
            assert data[name].column_names == ["image", "label", "file_name"]
            assert [data[name].features["label"].int2str(label) for label in data[name]["label"]] == [
                file_name.split("/")[0] for file_name in data[name]["file_name"]
            ]
        for row in data["unlabeled"]:
            assert np.array_equal(row["image"], pixels_of(sides["unlabeled"] / row["file_name"]))

    def test_classes_that_are_numbers_are_sorted_as_numbers(self, load, sides, tmp_path):
        labeled = load({**sides, "labeled": make(tmp_path / "numbers", {"10": 3, "9": 3, "1": 3})})["labeled"]
        assert labeled.features["label"].names == ["1", "9", "10"]
        classes = {
            name.split("/")[0]: y for name, y in zip(labeled["file_name"], labeled["label"], strict=True)
        }
        assert classes == {"1": 0, "9": 1, "10": 2}

    def test_given_splits_are_taken_as_they_are(self, load, sides, tmp_path):
        test = make(tmp_path / "test", {"dog": 1}, start=500)
        data = load(
            {**sides, "test": test, "validation": make(tmp_path / "v", {"cat": 2, "dog": 1}, start=600)}
        )
        assert [len(part) for part in data.values()] == [30, 7, 3, 1]
        assert data["test"]["label"] == [1]

    @pytest.mark.parametrize("group", [r"(p\d+)_", "patient"])
    def test_groups_are_not_cut(self, load, tmp_path, sides, group):
        for number in range(48):
            save(tmp_path / f"g/p{number // 4}_{number}.png", number)
        names = [f"p{number // 4}_{number}.png" for number in range(48)]
        table = {
            "file_name": names,
            "label": ["cat", "dog"] * 24,
            "patient": [name.split("_")[0] for name in names],
        }
        pd.DataFrame(table).to_csv(tmp_path / "g/labels.csv")
        data = load({**sides, "labeled": tmp_path / "g/labels.csv"}, group=group)
        patients = [
            {name.split("_")[0] for name in data[split]["file_name"]}
            for split in ("labeled", "validation", "test")
        ]
        assert sum(map(len, patients)) == 12
        assert [len(data[split]) for split in ("labeled", "validation", "test")] == [36, 4, 8]

    def test_images_are_resized(self, load, sides):
        assert {image.size for image in load(sides, image_size=8)["test"]["image"]} == {(8, 8)}
        data = load(sides, image_size=[7, 9])
        assert {image.size for image in data["unlabeled"]["image"]} == {(9, 7)}
        assert Images.from_dataset(data["labeled"], (7, 9)).pixels.shape == (21, 3, 7, 9)

    def test_streaming_gives_the_same_rows(self, load, sides):
        streamed, built = load(sides, streaming=True), load(sides)
        for name in built:
            assert [row["file_name"] for row in streamed[name]] == built[name]["file_name"]


class TestCache:
    def test_the_same_folders_are_loaded_from_the_cache(self, load, sides, monkeypatch):
        first = load(sides)
        monkeypatch.setattr(folders.Folders, "_generate_examples", None)
        assert folder(load(sides)) == folder(first)
        assert folder(load({side: str(path) for side, path in sides.items()})) == folder(first)

    def test_every_change_is_built_anew(self, load, sides):
        seen = [folder(load(sides))]
        save(sides["unlabeled"] / "new.png", 77)
        seen.append(folder(load(sides)))
        (sides["unlabeled"] / "a/0.png").unlink()
        seen.append(folder(load(sides)))
        os.utime(sides["labeled"] / "cat/0.png", ns=(1, 1))
        seen.append(folder(load(sides)))
        (sides["labeled"] / "cat/0.png").rename(sides["labeled"] / "dog/new.png")
        seen += [
            folder(load(sides, **change))
            for change in ({}, {"seed": 1}, {"image_size": 4}, {"test_share": 0.3})
        ]
        table = pd.DataFrame({"file_name": [f"dog/{n}.png" for n in range(10)], "label": ["a", "b"] * 5})
        for labels in (["a", "b"] * 5, ["b", "a"] * 5):
            table.assign(label=labels).to_csv(sides["labeled"] / "t.csv")
            seen.append(folder(load({**sides, "labeled": sides["labeled"] / "t.csv"})))
        assert len(set(seen)) == len(seen)


def test_a_share_of_0_cuts_no_split_off(load, sides):
    data = load(sides, validation_share=0, test_share=0)
    assert list(data) == ["labeled", "unlabeled"]
    labeled = list_labeled("labeled", sides["labeled"], None)
    assert data["labeled"]["file_name"][:] == labeled.names
    assert list(load(sides, validation_share=0)) == ["labeled", "unlabeled", "test"]


class TestReport:
    def test_skipped_files_and_duplicates_are_told(self, load, sides, tmp_path, caplog):
        (sides["unlabeled"] / "page.png").write_text("<html>")
        test = make(tmp_path / "test", {"cat": 2}, start=900)
        shutil.copy(sides["labeled"] / "cat/3.png", test / "cat/copy.png")
        shutil.copy(test / "cat/0.png", sides["unlabeled"] / "copy.png")
        shutil.copy(sides["labeled"] / "cat/0.png", sides["labeled"] / "dog/x.png")
        with caplog.at_level(logging.WARNING, "hf_fixastep"):
            data = load({**sides, "test": test, "validation": make(tmp_path / "v", {"cat": 1}, start=800)})
        report = folder_report(data)
        assert len(data["unlabeled"]) == report["images"]["unlabeled"] == 8
        assert report["skipped"] == {"page.png": "it is no image of a known format"}
        assert len(report["duplicates"]) == 2
        assert {"labeled": ["cat/3.png"], "test": ["cat/copy.png"]} in report["duplicates"]
        assert {"unlabeled": ["copy.png"], "test": ["cat/0.png"]} in report["duplicates"]
        assert report["two_classes"] == [{"cat": ["cat/0.png"], "dog": ["dog/x.png"]}]
        assert report["classes"]["labeled"] == {"cat": 10, "dog": 21}
        place = folder(data) / "report.json"
        assert json.loads(place.read_text()) == report == folder_report(data["test"])
        sentences = [record.getMessage() for record in caplog.records]
        assert sorted(sentence.split(". All of them")[0] for sentence in sentences) == [
            "Images in both labeled and test: 1, such as cat/3.png and cat/copy.png",
            "Images in both unlabeled and test: 1, such as copy.png and cat/0.png",
            "Images in two classes: 1, such as cat/0.png and dog/x.png",
            "Unlabeled files that cannot be read: 1, such as page.png (it is no image of a known format)",
        ]
        assert all(sentence.endswith(f"{place}.") for sentence in sentences)

    def test_groups_on_two_sides_are_told(self, load, sides, tmp_path):
        test = make(tmp_path / "test", {"cat": 2}, start=900)
        report = folder_report(load({**sides, "test": test}, group=r"/(\d+)\.png"))
        assert report["shared_groups"]["unlabeled and test"] == ["0", "1"]

    def test_clean_folders_are_built_without_a_warning(self, load, sides, caplog):
        with caplog.at_level(logging.WARNING, "hf_fixastep"):
            report = folder_report(load(sides))
        assert caplog.records == []
        assert not any(report[key] for key in ("skipped", "duplicates", "two_classes", "shared_groups"))
