"""TMED-2, Unity and CAMUS from small folders in the real layouts."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import os
import re
import shutil
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import PIL.Image
import PIL.PngImagePlugin
import pytest
import torch

from hf_fixastep.data import DATASETS, export_dataset, folder_report, list_datasets, load_dataset
from hf_fixastep.data.images import Images
from hf_fixastep.data.loader import PairedLoader
from hf_fixastep.data.registry import is_medical
from hf_fixastep.data.store import PixelFile
from hf_fixastep.echo import files, heart2heart, phantom
from hf_fixastep.losses.functional import class_weights
from tests.echo.echo_sets import (
    ENDS,
    SIDE,
    TMED2_ROWS,
    UNITY_ROWS,
    UNLABELED,
    heart,
    nifti,
    pack,
    picture,
    png,
    put,
    put_csv,
    tmed2_table,
    unity_name,
    unity_place,
    write_camus,
    write_camus_nifti,
    write_tmed2,
    write_unity,
)


VIEWS = ["PLAX", "PSAX", "A4C", "A2C"]
NAMES = ["camus", "tmed2", "unity"]
CARDS = Path(__file__).parents[2] / "hub_cards"


@pytest.fixture(autouse=True)
def _no_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def load(tmp_path):
    def load_here(name: str, root: Path, config: str | None = None, **settings):
        return load_dataset(name, config, data_dir=root, cache_dir=tmp_path / "cache", **settings)

    return load_here


@pytest.fixture
def tmed2(tmp_path) -> Path:
    return write_tmed2(tmp_path / "approved_users_only")


@pytest.fixture
def unity(tmp_path) -> Path:
    return write_unity(tmp_path / "unity")


@pytest.fixture
def camus(tmp_path) -> Path:
    return write_camus(tmp_path / "camus")


def rows_of(data, unlabeled: bool = True) -> dict[str, list[tuple]]:
    """Pixels, view and patient of every row."""
    return {
        split: [(np.asarray(row["image"]).tobytes(), row.get("label"), row["patient"]) for row in part]
        for split, part in data.items()
        if unlabeled or split != "unlabeled"
    }


def folder(data) -> Path:
    return Path(data["test"].cache_files[0]["filename"]).parent


def expected_tmed2(rows=TMED2_ROWS, unlabeled=UNLABELED) -> dict[str, list[tuple]]:
    parts = {"train": "labeled", "": "unlabeled", "val": "validation", "test": "test"}
    splits = {split: [] for split in parts.values()}
    for name, view, part, _ in rows:
        if view in VIEWS:
            splits[parts[part]].append((picture(name).tobytes(), VIEWS.index(view), name.split("s")[0]))
    splits["unlabeled"] = [(picture(name).tobytes(), None, name.split("s")[0]) for name in unlabeled]
    return splits


class TestTmed2:
    def test_rows_are_those_of_the_tables(self, load, tmed2):
        data = load("tmed2", tmed2)
        assert list(data) == ["labeled", "unlabeled", "validation", "test"]
        assert rows_of(data) == expected_tmed2()
        assert data["test"].features["label"].names == VIEWS
        assert data["test"].column_names == ["image", "label", "patient"]
        assert data["unlabeled"].column_names == ["image", "patient"]
        assert data["labeled"][0]["image"].mode == "L"

    def test_a_config_is_a_fold_and_dev_a_folder(self, load, tmed2):
        assert rows_of(load("tmed2", tmed2)) == rows_of(load("tmed2", tmed2, "split0", dev="DEV56"))
        first = load("tmed2", tmed2, "split1")
        assert (first["validation"]["patient"][:], first["test"]["patient"][:]) == (["14"], ["13"])
        larger = load("tmed2", tmed2, dev="DEV165")
        assert set(larger["labeled"]["patient"]) == {"11"}

    @pytest.mark.parametrize("inside", ["", "same"])
    def test_zip_files_are_read_in_place(self, load, tmed2, inside):
        leaves = [
            tmed2 / name for name in ("view_and_diagnosis_labeled_set/labeled", "view_labeled_set/labeled")
        ]
        for leaf in [*leaves, tmed2 / "unlabeled_set", tmed2 / "DEV56"]:
            pack(leaf, leaf.name if inside else "")
        before = sorted(tmed2.rglob("*"))
        assert rows_of(load("tmed2", tmed2)) == expected_tmed2()
        assert sorted(tmed2.rglob("*")) == before

    def test_the_whole_release_may_be_one_zip_file(self, load, tmed2):
        assert rows_of(load("tmed2", pack(tmed2))) == expected_tmed2()

    def test_doubled_folders_are_looked_into(self, load, tmed2):
        for name in ("view_and_diagnosis_labeled_set/labeled", "view_labeled_set", "unlabeled_set", "DEV56"):
            (tmed2 / name).rename(tmed2 / "moved")
            (tmed2 / name).mkdir()
            (tmed2 / "moved").rename(tmed2 / name / Path(name).name)
        assert (tmed2 / "view_and_diagnosis_labeled_set/labeled/labeled/10s1_0.png").is_file()
        assert rows_of(load("tmed2", tmed2)) == expected_tmed2()

    def test_the_folder_above_the_release_will_do(self, load, tmed2, tmp_path):
        shutil.move(tmed2, tmp_path / "above/approved_users_only")
        assert rows_of(load("tmed2", tmp_path / "above")) == expected_tmed2()

    def test_the_other_spelling_of_the_tables(self, load, tmed2):
        for dev in ("DEV56", "DEV165"):
            shutil.rmtree(tmed2 / dev)
        tmed2_table(tmed2 / "fold0/DEV56/labeledset_labeledpart.csv", TMED2_ROWS)
        tmed2_table(tmed2 / "fold1/DEV56/labeledset_labeledpart.csv", TMED2_ROWS[4:])
        listed = [(key, "Not_Provided", "unlabeled", "unlabeled_set") for key in UNLABELED[1:]]
        tmed2_table(tmed2 / "JACC_train_unlabeled_WithSourceFolder.csv", listed)
        assert rows_of(load("tmed2", tmed2)) == expected_tmed2(unlabeled=UNLABELED[1:])

    def test_columns_are_found_by_name_and_folders_may_have_slashes(self, load, tmed2):
        rows = [(f" /{place}/", part, key, "x", view) for key, view, part, place in TMED2_ROWS]
        columns = ["SourceFolder", "view_classifier_split", "query_key ", "more", "view_label"]
        path = put_csv(tmed2 / "DEV56/TMED2_fold0_labeledpart.csv", columns, rows)
        put(path, b"\xef\xbb\xbf" + path.read_bytes())
        assert rows_of(load("tmed2", tmed2)) == expected_tmed2()

    def test_an_image_is_taken_from_the_folder_of_its_row(self, load, tmed2):
        put(tmed2 / "view_and_diagnosis_labeled_set/unlabeled/10s1_0.png", png(picture("another")))
        put(tmed2 / "aside/view_labeled_set/10s1_0.png", png(picture("another")))
        assert rows_of(load("tmed2", tmed2)) == expected_tmed2()

    def test_what_is_left_out_is_counted(self, load, tmed2):
        rows = [
            *TMED2_ROWS,
            ("15s1_0.png", "Subcostal", "test", "x"),
            ("15s1_1.png", "A2C", "unlabeled", "x"),
        ]
        tmed2_table(tmed2 / "DEV56/TMED2_fold0_labeledpart.csv", rows)
        put(tmed2 / "unlabeled_set/thumbs.png", png(picture("x")))
        put(tmed2 / "unlabeled_set/903s1_0.png", b"")
        put(tmed2 / "unlabeled_set/notes.txt", b"")
        data = load("tmed2", tmed2)
        report = folder_report(data)
        assert rows_of(data) == expected_tmed2()
        assert report["passed_over"] == {"view A4CorA2CorOther": 1, "view Subcostal": 1, "split unlabeled": 1}
        assert report["skipped"] == {
            "unlabeled_set/thumbs.png": "its name does not tell the patient",
            "unlabeled_set/903s1_0.png": "it is empty",
        }
        assert report["images"] == {"labeled": 4, "unlabeled": 4, "validation": 2, "test": 2}
        assert report["patients"] == {"labeled": 2, "unlabeled": 3, "validation": 1, "test": 2}
        assert report["classes"]["test"] == {"PLAX": 1, "PSAX": 0, "A4C": 0, "A2C": 1}
        names = [*(row[0] for row in TMED2_ROWS if row[1] in VIEWS), *UNLABELED]
        pooled = np.concatenate([picture(name).ravel() for name in names])
        assert report["pixel_counts"] == [int(np.sum(pooled == value)) for value in range(256)]

    def test_what_is_skipped_is_warned_of(self, load, tmed2, caplog):
        load("tmed2", tmed2)
        assert not caplog.records
        put(tmed2 / "unlabeled_set/903s1_0.png", b"words")
        with caplog.at_level(logging.WARNING):
            data = load("tmed2", tmed2)
        (message,) = [record.getMessage() for record in caplog.records]
        assert message == (
            "Images left out: 1, such as unlabeled_set/903s1_0.png (it is no image of a known format). All of them "
            f"are in {folder(data) / 'report.json'}."
        )

    def test_nothing_but_pixels_is_kept(self, load, tmed2):
        secret = PIL.PngImagePlugin.PngInfo()
        secret.add_text("PatientName", "Jane Doe")
        path = tmed2 / "unlabeled_set/900s1_0.png"
        PIL.Image.open(path).save(path, pnginfo=secret)
        assert b"Jane Doe" in path.read_bytes()
        data = load("tmed2", tmed2)
        assert rows_of(data) == expected_tmed2()
        assert not [path for path in folder(data).iterdir() if b"Jane Doe" in path.read_bytes()]

    def test_an_image_of_another_size_is_fitted(self, load, tmed2):
        put(tmed2 / "unlabeled_set/900s1_0.png", png(np.full((30, 60, 3), 9, np.uint8)))
        image = np.asarray(load("tmed2", tmed2)["unlabeled"][0]["image"])
        assert image.shape == (SIDE, SIDE)
        assert np.all(image[:56] == 9)
        assert not image[56:].any()

    def test_streaming_gives_the_same_rows(self, load, tmed2):
        assert rows_of(load("tmed2", tmed2, streaming=True)) == rows_of(load("tmed2", tmed2))


class TestPatients:
    @pytest.mark.parametrize(("one", "other"), itertools.combinations(["train", "val", "test"], 2))
    def test_no_patient_may_be_in_two_splits(self, load, tmed2, one, other):
        of = {"train": "11s1_0.png", "val": "12s1_0.png", "test": "14s1_0.png"}
        source = next(row for row in TMED2_ROWS if row[0] == of[one])
        moved = (f"{of[one].split('_')[0][:2]}s9_5.png", source[1], other, source[3])
        put(tmed2 / moved[3] / moved[0], png(picture("x")))
        tmed2_table(tmed2 / "DEV56/TMED2_fold0_labeledpart.csv", [*TMED2_ROWS, moved])
        splits = {"train": "labeled", "val": "validation", "test": "test"}
        with pytest.raises(ValueError) as error:  # noqa: PT011, the whole sentence is compared
            load("tmed2", tmed2)
        assert str(error.value) == (
            f"The splits {splits[one]} and {splits[other]} share 1 patients, such as {of[one][:2]}, but expected none"
            ": use the CSV files of the release as they are."
        )

    @pytest.mark.parametrize("patient", [11, 12, 14])
    def test_unlabeled_images_of_labeled_patients_are_left_out(self, load, tmed2, patient):
        put(tmed2 / f"unlabeled_set/{patient}s2_0.png", png(picture("x")))
        data = load("tmed2", tmed2)
        assert rows_of(data) == expected_tmed2()
        assert folder_report(data)["passed_over"]["unlabeled, but of a labeled patient"] == 1

    @pytest.mark.parametrize("config", ["split0", "split1"])
    def test_splits_share_no_patient(self, load, tmed2, config):
        patients = [set(part["patient"]) for part in load("tmed2", tmed2, config).values()]
        assert all(not one & other for one, other in itertools.combinations(patients, 2))
        assert all(patients)


class TestCache:
    def test_the_second_load_builds_nothing(self, load, tmed2, monkeypatch):
        first = load("tmed2", tmed2)
        monkeypatch.setattr(heart2heart.Tmed2, "find_frames", None)
        monkeypatch.chdir(tmed2)
        assert folder(load("tmed2", Path())) == folder(first)
        with pytest.raises(TypeError, match="not callable"):
            load("tmed2", tmed2, "split1")
        with pytest.raises(TypeError, match="not callable"):
            load("tmed2", tmed2, dev="DEV165")

    def test_new_files_are_seen(self, load, tmed2):
        load("tmed2", tmed2)
        put(tmed2 / "unlabeled_set/905s1_0.png", png(picture("x")))
        assert len(load("tmed2", tmed2)["unlabeled"]) == len(UNLABELED) + 1

    def test_edited_readers_build_anew(self, load, unity, tmp_path, monkeypatch):
        first = load("unity", unity)
        edited = put(tmp_path / "echo_files.py", Path(files.__file__).read_text() + "# edited\n")
        monkeypatch.setattr(files, "__file__", str(edited))
        assert folder(load("unity", unity)) != folder(first)


class TestUnity:
    def expected(self) -> list[tuple[int, str]]:
        return [(0, unity_name(0x4D, 0)[:67])] * 2 + [
            (2, unity_name(0x50, 0)[:67]),
            (3, unity_name(0x51, 0, "02")[:67]),
        ]

    def test_rows_are_those_of_the_index(self, load, unity):
        data = load("unity", unity)
        assert list(data) == ["test"]
        assert sorted(zip(data["test"]["label"], data["test"]["patient"], strict=True)) == self.expected()
        assert data["test"].features["label"].names == VIEWS
        report = folder_report(data)
        assert report["passed_over"] == {"view A5C": 1, "view A3C": 1, "not in view_index.csv": 1}
        assert report["skipped"] == {}

    def test_images_are_grey_and_fitted(self, load, unity):
        images = {
            (row["label"], row["patient"][-4:]): np.asarray(row["image"])
            for row in load("unity", unity)["test"]
        }
        name = UNITY_ROWS[2][0]
        colour = PIL.Image.fromarray(picture(name, (90, 70, 3))).convert("L")
        tall = next(image for (label, _), image in images.items() if label == 2)
        assert np.array_equal(tall[:, :87], np.asarray(colour.resize((87, 112))))
        assert not tall[:, 87:].any()
        square = next(image for (label, _), image in images.items() if label == 3)
        assert np.array_equal(square, picture(UNITY_ROWS[3][0]))

    @pytest.mark.parametrize("inside", ["", "png-cache"])
    def test_the_download_is_read_in_place(self, load, unity, inside):
        before = rows_of(load("unity", unity))
        pack(unity / "png-cache", inside)
        put(unity / "labels/labels-all.json", "{}")
        pack(unity / "labels")
        assert rows_of(load("unity", unity)) == before

    def test_missing_and_contradicting_images_are_listed(self, load, unity):
        gone, twice, broken = UNITY_ROWS[0][0], UNITY_ROWS[2][0], UNITY_ROWS[3][0]
        unity_place(unity, gone).unlink()
        unity_place(unity, broken).write_bytes(b"")
        put_csv(
            unity / "view_index.csv", ["view", "file"], [(b, a) for a, b in [*UNITY_ROWS, (twice, "PLAX")]]
        )
        data = load("unity", unity)
        assert len(data["test"]) == 1
        place = str(unity_place(unity, broken).relative_to(unity))
        assert folder_report(data)["skipped"] == {
            gone: "it does not exist",
            twice: "it has the views A4C and PLAX",
            place: "it is empty",
        }

    def test_a_row_that_comes_twice_counts_once(self, load, unity):
        put_csv(unity / "view_index.csv", ["file", "view"], [*UNITY_ROWS, (UNITY_ROWS[0][0], "PLAX")])
        assert len(load("unity", unity)["test"]) == 4


class TestCamus:
    def expected_labels(self) -> list[tuple[str, int]]:
        patients = ["patient0001", "patient0002", "patient0451"]
        return [(patient, label) for patient in patients for label in (3, 3, 2, 2)]

    def test_rows_are_the_ends_of_every_cycle(self, load, camus):
        data = load("camus", camus)
        assert list(data) == ["test"]
        assert (
            list(zip(data["test"]["patient"], data["test"]["label"], strict=True)) == self.expected_labels()
        )
        assert folder_report(data)["skipped"] == {}

    def test_pixels_are_square_upright_and_stretched(self, load, camus):
        image = np.asarray(load("camus", camus)["test"][0]["image"]).astype(float)
        pixels = heart("trainingpatient0001_2CH_ED").astype(float)
        square = (pixels[::2] + pixels[1::2]) / 2  # 48 rows of 60 pixels
        scaled = (square - square.min()) / (square.max() - square.min()) * 255
        expected = PIL.Image.fromarray(np.rint(scaled).astype(np.uint8)).resize((112, 89))
        assert np.array_equal(image[:89], np.asarray(expected))
        assert not image[89:].any()

    def test_both_releases_give_the_same_rows(self, load, camus, tmp_path):
        old, new = load("camus", camus)["test"], load("camus", write_camus_nifti(tmp_path / "new"))["test"]
        assert old["patient"][:] == new["patient"][:]
        assert old["label"][:] == new["label"][:]
        for one, other in zip(old, new, strict=True):
            difference = np.asarray(one["image"]).astype(int) - np.asarray(other["image"])
            assert np.abs(difference).max() <= 4  # the newer one is rounded once more, before it is stretched
            assert np.abs(difference).mean() < 1

    @pytest.mark.parametrize("inside", ["", "training"])
    def test_the_downloads_are_read_in_place(self, load, camus, inside):
        before = rows_of(load("camus", camus))
        pack(camus / "training", inside)
        pack(camus / "testing", inside and "testing")
        assert rows_of(load("camus", camus)) == before

    def test_a_zip_file_of_the_newer_release(self, load, tmp_path):
        root = write_camus_nifti(tmp_path / "new")
        before = rows_of(load("camus", root))
        assert rows_of(load("camus", pack(root / "CAMUS_public", "CAMUS_public"))) == before

    def test_one_part_alone(self, load, camus):
        assert set(load("camus", camus / "testing")["test"]["patient"]) == {"patient0451"}

    def test_the_newer_release_numbers_all_patients_whatever_folder_they_are_in(self, load, tmp_path):
        root = write_camus_nifti(tmp_path / "new")
        shutil.move(root / "CAMUS_public/database_nifti/patient0451", root / "testing/patient0451")
        assert set(load("camus", root)["test"]["patient"]) == {"patient0001", "patient0002", "patient0451"}

    def test_a_third_axis_of_length_one_and_files_without_gz(self, load, tmp_path):
        root = write_camus_nifti(tmp_path / "new")
        before = rows_of(load("camus", root))
        path = root / "CAMUS_public/database_nifti/patient0001/patient0001_4CH_ES.nii.gz"
        content = gzip.decompress(path.read_bytes())
        pixels = np.frombuffer(content[352:], np.uint8).reshape(1, 48, 60)
        put(path.with_suffix(""), nifti(pixels))
        path.unlink()
        assert rows_of(load("camus", root)) == before

    def test_missing_images_are_listed(self, load, camus):
        folder_of = camus / "training/patient0002"
        for end in ("4CH_ES.mhd", "4CH_ED.raw"):
            (folder_of / f"patient0002_{end}").unlink()
        shutil.rmtree(camus / "testing/patient0001")
        put(camus / "testing/patient0001/Info_2CH.cfg", "ED: 1\n")
        data = load("camus", camus)
        assert [row for row in self.expected_labels() if row[0] != "patient0451"][:-2] == list(
            zip(data["test"]["patient"], data["test"]["label"], strict=True)
        )
        assert folder_report(data)["skipped"] == {
            "patient0002_4CH_ES": "it does not exist",
            **{f"patient0451_{end}": "it does not exist" for end in ENDS},
            "training/patient0002/patient0002_4CH_ED.mhd": "the file of its pixels is not beside it",
        }


class TestQuantileMatch:
    def pooled(self, data) -> np.ndarray:
        return np.concatenate(
            [np.asarray(image).ravel() for part in data.values() for image in part["image"]]
        )

    def direct(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        shares = [np.mean(source < value) + np.mean(source == value) / 2 for value in range(256)]
        return np.quantile(target, shares, method="inverted_cdf").astype(np.uint8)

    def dark(self, tmed2: Path) -> Path:
        for path in tmed2.rglob("*.png"):
            path.write_bytes(png(picture(path.name) // 3))
        return tmed2

    def test_intensities_are_those_of_the_reference(self, load, camus, tmed2):
        plain = load("camus", camus)
        matched = load("camus", camus, quantile_match=True, reference=self.dark(tmed2))
        reference = np.concatenate(
            [np.asarray(PIL.Image.open(path)).ravel() for path in tmed2.rglob("*.png")]
        )
        table = self.direct(self.pooled(plain), reference)
        for before, after in zip(plain["test"]["image"], matched["test"]["image"], strict=True):
            assert np.array_equal(table[np.asarray(before)], np.asarray(after))
        assert self.pooled(matched).max() <= reference.max() < self.pooled(plain).max()

    def test_the_report_of_tmed2_is_a_reference_too(self, load, camus, tmed2, tmp_path):
        built = load("tmed2", self.dark(tmed2))
        report = shutil.copy(folder(built) / "report.json", tmp_path / "reference.json")
        matched = load("camus", camus, quantile_match=True, reference=report)
        table = self.direct(self.pooled(load("camus", camus)), self.pooled(built))
        assert np.array_equal(self.pooled(matched), table[self.pooled(load("camus", camus))])

    def test_another_reference_builds_anew(self, load, camus, tmed2):
        first = load("camus", camus, quantile_match=True, reference=tmed2)
        assert folder(load("camus", camus, quantile_match=True, reference=tmed2)) == folder(first)
        assert folder(load("camus", camus)) != folder(first)
        assert folder(load("camus", camus, quantile_match=True, reference=self.dark(tmed2))) != folder(first)


class TestRegistry:
    def test_only_the_three_sets_are_medical(self):
        assert [name for name in list_datasets() if is_medical(name)] == NAMES
        with pytest.raises(ValueError, match=r"Unknown dataset 'tmed'\. Did you mean tmed2\?"):
            is_medical("tmed")

    @pytest.mark.parametrize("name", NAMES)
    def test_none_may_be_exported(self, name, tmp_path):
        with pytest.raises(ValueError, match=f"^{name} may not be exported: [A-Z].*[a-z]\\.$"):
            export_dataset(name, None, tmp_path / "out", data_dir=tmp_path)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("name", NAMES)
    def test_each_has_a_card_that_tells_how_to_get_it(self, name):
        card = huggingface_hub.DatasetCard.load(CARDS / f"{name}.md")
        assert card.data.license == "other"
        assert "configs" not in card.data.to_dict()  # there is nothing to load
        builder = DATASETS[name]
        for text in (builder.homepage, builder.terms, *builder.citation.split("\n")):
            assert text in card.content
        for title in ("Access", "Files", "Licence", "What may not be redistributed", "Citation"):
            assert f"\n## {title}\n" in card.content
        assert "not a medical device" in card.content

    def test_the_card_of_tmed2_has_the_weights(self):
        text = (CARDS / "tmed2.md").read_text()
        for split, counts in enumerate([(632, 239, 405, 285), (650, 223, 462, 325), (572, 199, 379, 277)]):
            weights = ", ".join(f"{weight:.3f}" for weight in class_weights(torch.tensor(counts)))
            assert f"| split{split} | {', '.join(map(str, counts))} | {sum(counts):,} | {weights} |" in text


class TestSize:
    def test_frames_stay_grey(self, load, tmed2):
        images = Images.from_dataset(load("tmed2", tmed2)["unlabeled"], (SIDE, SIDE))
        assert images.pixels.shape == (4, 1, SIDE, SIDE)
        assert torch.equal(images.pixels[0, 0], torch.from_numpy(picture(UNLABELED[0])))

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured through /proc")
    def test_353500_frames_are_drawn_from_without_being_held_in_memory(self, tmp_path):
        """On a finished store of that many frames, most of which take no room on the disk."""
        file = PixelFile(tmp_path / "frames.uint8", "key", "source", (353_500, 1, SIDE, SIDE))
        with open(file.path, "wb") as out:
            out.write(file.header)
            out.truncate(4096 + 353_500 * SIDE * SIDE - 1)
            out.seek(0, os.SEEK_END)
            out.write(b"\7")
        assert file.path.stat().st_blocks * 512 < 10**6
        assert file.is_finished()
        labeled = Images(
            torch.zeros(1561, 1, SIDE, SIDE, dtype=torch.uint8), torch.zeros(1561, dtype=torch.int64)
        )
        before = own_megabytes()
        unlabeled = Images(file.map())
        seen: set[int] = set()
        for batch in PairedLoader(labeled, unlabeled, (64, 320), steps_per_epoch=10):
            assert batch["unlabeled"].shape == (320, 1, SIDE, SIDE)
            seen.update(batch["unlabeled_index"].tolist())
        assert len(seen) == 10 * 320
        assert max(seen) > 350_000
        assert unlabeled.pixels[-1, 0, -1, -1] == 7
        assert own_megabytes() - before < 30  # the frames drawn have 40


def own_megabytes() -> float:
    """Memory of this process that is not the content of a file, which the system can drop at any time."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def test_the_report_is_json_that_tells_the_root(load, camus):
    report = json.loads((folder(load("camus", camus)) / "report.json").read_text())
    assert report["root"] == str(camus)
    assert sum(report["pixel_counts"]) == 12 * SIDE * SIDE


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("phantom")
    phantom.write_phantom(out, phantom.SMALLEST)
    return out


@pytest.mark.parametrize(
    ("name", "root", "config", "views"),
    [
        ("tmed2", "tmed2", "split0", set(VIEWS)),
        ("tmed2", "tmed2", "split2", set(VIEWS)),
        ("unity", "unity", None, {"PLAX", "A4C", "A2C"}),
        ("camus", "camus", None, {"A4C", "A2C"}),
        ("camus", "camus_nifti", None, {"A4C", "A2C"}),
    ],
)
def test_phantom_data_are_read_whole(load, phantoms, name, root, config, views):
    report = folder_report(load(name, phantoms / root, config))
    assert report["skipped"] == {}
    assert {view for view, count in report["classes"]["test"].items() if count} == views
    assert all(report["images"].values())
