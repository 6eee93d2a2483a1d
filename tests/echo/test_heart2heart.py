"""TMED-2, Unity and CAMUS from small folders in the real layouts."""

from __future__ import annotations

import gzip
import itertools
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
from hf_fixastep.data.store import BLOCKS, PixelFile
from hf_fixastep.echo import files, heart2heart, volumes
from hf_fixastep.losses.functional import class_weights
from tests.echo import echo_sets
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
)


VIEWS = ["PLAX", "PSAX", "A4C", "A2C"]
NAMES = ["camus", "tmed2", "unity"]
FOLD = "DEV56/TMED2_fold0_labeledpart.csv"
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
    return echo_sets.write_tmed2(tmp_path / "approved_users_only")


@pytest.fixture
def unity(tmp_path) -> Path:
    return echo_sets.write_unity(tmp_path / "unity")


@pytest.fixture
def camus(tmp_path) -> Path:
    return echo_sets.write_camus(tmp_path / "camus")


def rows_of(data) -> dict[str, list[tuple]]:
    """Pixels, view and patient of every row."""
    return {
        split: [(np.asarray(row["image"]).tobytes(), row.get("label"), row["patient"]) for row in part]
        for split, part in data.items()
    }


def folder(data) -> Path:
    return Path(data["test"].cache_files[0]["filename"]).parent


def expected_tmed2(unlabeled=UNLABELED) -> dict[str, list[tuple]]:
    parts = {"train": "labeled", "": "unlabeled", "val": "validation", "test": "test"}
    splits = {split: [] for split in parts.values()}
    for name, view, part, _ in TMED2_ROWS:
        if view in VIEWS:
            splits[parts[part]].append((picture(name).tobytes(), VIEWS.index(view), name.split("s")[0]))
    splits["unlabeled"] = [(picture(name).tobytes(), None, name.split("s")[0]) for name in unlabeled]
    return splits


# TMED-2


def test_rows_of_tmed2_are_those_of_the_tables(load, tmed2):
    data = load("tmed2", tmed2)
    assert list(data) == ["labeled", "unlabeled", "validation", "test"]
    assert rows_of(data) == rows_of(load("tmed2", tmed2, streaming=True)) == expected_tmed2()
    assert data["test"].features["label"].names == VIEWS
    assert data["test"].column_names == ["image", "label", "patient"]
    assert data["unlabeled"].column_names == ["image", "patient"]
    assert data["labeled"][0]["image"].mode == "L"


def test_a_config_is_a_fold_and_dev_a_folder(load, tmed2):
    first = load("tmed2", tmed2, "split1")
    assert (first["validation"]["patient"][:], first["test"]["patient"][:]) == (["14"], ["13"])
    assert set(load("tmed2", tmed2, dev="DEV165")["labeled"]["patient"]) == {"11"}


def zip_each(root: Path, inside: bool = False) -> Path:
    places = ("view_and_diagnosis_labeled_set/labeled", "view_labeled_set/labeled", "unlabeled_set", "DEV56")
    for place in places:
        pack(root / place, Path(place).name if inside else "")
    return root


def double_folders(root: Path) -> Path:
    for name in ("view_and_diagnosis_labeled_set/labeled", "view_labeled_set", "unlabeled_set", "DEV56"):
        (root / name).rename(root / "moved")
        (root / name).mkdir()
        (root / "moved").rename(root / name / Path(name).name)
    return root


def other_columns(root: Path) -> Path:
    rows = [(f" /{place}/", part, key, "x", view) for key, view, part, place in TMED2_ROWS]
    columns = ["SourceFolder", "view_classifier_split", "query_key ", "more", "view_label"]
    path = put_csv(root / FOLD, columns, rows)
    put(path, b"\xef\xbb\xbf" + path.read_bytes())
    return root


def images_of_the_same_name(root: Path) -> Path:
    put(root / "view_and_diagnosis_labeled_set/unlabeled/10s1_0.png", png(picture("another")))
    put(root / "aside/view_labeled_set/10s1_0.png", png(picture("another")))
    return root


LAYOUTS = {
    "zip files": zip_each,
    "zip files with a folder inside": lambda root: zip_each(root, inside=True),
    "one zip file": pack,
    "doubled folders": double_folders,
    "the folder above": lambda root: Path(shutil.move(root, root.with_name("above") / root.name)).parent,
    "columns found by name": other_columns,
    "images of the same name in other folders": images_of_the_same_name,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tmed2_is_read_in_every_layout_and_in_place(layout, load, tmed2):
    tmed2.with_name("above").mkdir()
    root = LAYOUTS[layout](tmed2)
    before = sorted(root.rglob("*"))
    assert rows_of(load("tmed2", root)) == expected_tmed2()
    assert sorted(root.rglob("*")) == before


def test_the_other_spelling_of_the_tables(load, tmed2):
    shutil.rmtree(tmed2 / "DEV56")
    tmed2_table(tmed2 / "fold0/DEV56/labeledset_labeledpart.csv", TMED2_ROWS)
    tmed2_table(tmed2 / "fold1/DEV56/labeledset_labeledpart.csv", TMED2_ROWS[4:])
    listed = [(key, "Not_Provided", "unlabeled", "unlabeled_set") for key in UNLABELED[1:]]
    tmed2_table(tmed2 / "JACC_train_unlabeled_WithSourceFolder.csv", listed)
    assert rows_of(load("tmed2", tmed2)) == expected_tmed2(UNLABELED[1:])


def test_what_is_left_out_is_counted_and_warned_of(load, tmed2, caplog):
    more = [("15s1_0.png", "Subcostal", "test", "x"), ("15s1_1.png", "A2C", "unlabeled", "x")]
    tmed2_table(tmed2 / FOLD, [*TMED2_ROWS, *more])
    put(tmed2 / "unlabeled_set/notes.txt", b"")
    load("tmed2", tmed2)
    assert not caplog.records
    put(tmed2 / "unlabeled_set/thumbs.png", png(picture("x")))
    put(tmed2 / "unlabeled_set/903s1_0.png", b"")
    with caplog.at_level(logging.WARNING):
        data = load("tmed2", tmed2)
    (message,) = [record.getMessage() for record in caplog.records]
    assert re.match(r"Images left out: 2, such as .* \(.*\)\. All of them are in ", message)
    assert message.endswith(f"{folder(data) / 'report.json'}.")
    report = folder_report(data)
    assert rows_of(data) == expected_tmed2()
    assert report["root"] == str(tmed2)
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
    assert report["pixel_counts"] == np.bincount(pooled, minlength=256).tolist()


def test_nothing_but_pixels_is_kept(load, tmed2):
    secret = PIL.PngImagePlugin.PngInfo()
    secret.add_text("PatientName", "Jane Doe")
    path = tmed2 / "unlabeled_set/900s1_0.png"
    PIL.Image.open(path).save(path, pnginfo=secret)
    assert b"Jane Doe" in path.read_bytes()
    data = load("tmed2", tmed2)
    assert rows_of(data) == expected_tmed2()
    assert not [path for path in folder(data).iterdir() if b"Jane Doe" in path.read_bytes()]


# Patients


@pytest.mark.parametrize(("one", "other"), itertools.combinations(["train", "val", "test"], 2))
def test_no_patient_may_be_in_two_splits(load, tmed2, one, other):
    of = {"train": "11s1_0.png", "val": "12s1_0.png", "test": "14s1_0.png"}
    source = next(row for row in TMED2_ROWS if row[0] == of[one])
    moved = (f"{of[one][:2]}s9_5.png", source[1], other, source[3])
    put(tmed2 / moved[3] / moved[0], png(picture("x")))
    tmed2_table(tmed2 / FOLD, [*TMED2_ROWS, moved])
    splits = {"train": "labeled", "val": "validation", "test": "test"}
    sentence = (
        f"The splits {splits[one]} and {splits[other]} share 1 patients, such as {of[one][:2]}, but expected"
    )
    with pytest.raises(ValueError, match=f"^{sentence} none: use the CSV files of the release as they are.$"):
        load("tmed2", tmed2)


def test_unlabeled_images_of_labeled_patients_are_left_out(load, tmed2):
    for patient in (11, 12, 14):
        put(tmed2 / f"unlabeled_set/{patient}s2_0.png", png(picture("x")))
    data = load("tmed2", tmed2)
    assert rows_of(data) == expected_tmed2()
    assert folder_report(data)["passed_over"]["unlabeled, but of a labeled patient"] == 3


# Cache


def test_the_second_load_builds_nothing_and_other_settings_do(load, tmed2, monkeypatch):
    first = load("tmed2", tmed2)
    monkeypatch.setattr(heart2heart.Tmed2, "find_frames", None)
    monkeypatch.chdir(tmed2)
    assert folder(load("tmed2", Path())) == folder(first)
    put(tmed2 / "unlabeled_set/905s1_0.png", png(picture("x")))
    for settings in ({"config": "split1"}, {"dev": "DEV165"}, {}):
        with pytest.raises(TypeError, match="not callable"):
            load("tmed2", tmed2, **settings)


@pytest.mark.parametrize("module", [files, volumes])
def test_edited_readers_build_anew(load, unity, tmp_path, monkeypatch, module):
    first = load("unity", unity)
    edited = put(tmp_path / "edited.py", Path(module.__file__).read_text() + "# edited\n")
    monkeypatch.setattr(module, "__file__", str(edited))
    assert folder(load("unity", unity)) != folder(first)


# Unity


def test_rows_of_unity_are_those_of_the_index(load, unity):
    put_csv(
        unity / "view_index.csv", ["file", "view"], [*UNITY_ROWS, (UNITY_ROWS[0][0], "PLAX")]
    )  # one twice
    data = load("unity", unity)
    assert list(data) == ["test"]
    clips = [(0, unity_name(0x4D, 0)[:67])] * 2
    clips += [(2, unity_name(0x50, 0)[:67]), (3, unity_name(0x51, 0, "02")[:67])]
    assert sorted(zip(data["test"]["label"], data["test"]["patient"], strict=True)) == clips
    assert data["test"].features["label"].names == VIEWS
    report = folder_report(data)
    assert report["passed_over"] == {"view A5C": 1, "view A3C": 1, "not in view_index.csv": 1}
    assert report["skipped"] == {}


def test_images_of_unity_are_grey_and_fitted(load, unity):
    images = {row["label"]: np.asarray(row["image"]) for row in load("unity", unity)["test"]}
    colour = PIL.Image.fromarray(picture(UNITY_ROWS[2][0], (90, 70, 3))).convert("L")
    assert np.array_equal(images[2][:, :87], np.asarray(colour.resize((87, 112))))
    assert not images[2][:, 87:].any()
    assert np.array_equal(images[3], picture(UNITY_ROWS[3][0]))


@pytest.mark.parametrize("inside", ["", "png-cache"])
def test_the_download_of_unity_is_read_in_place(load, unity, inside):
    before = rows_of(load("unity", unity))
    pack(unity / "png-cache", inside)
    put(unity / "labels/labels-all.json", "{}")
    pack(unity / "labels")
    assert rows_of(load("unity", unity)) == before


def test_missing_and_contradicting_images_are_listed(load, unity):
    missing, twice = UNITY_ROWS[0][0], UNITY_ROWS[2][0]
    unity_place(unity, missing).unlink()
    rows = [(view, file) for file, view in [*UNITY_ROWS, (twice, "PLAX")]]
    put_csv(unity / "view_index.csv", ["view", "file"], rows)
    data = load("unity", unity)
    assert len(data["test"]) == 2
    reasons = {missing: "it does not exist", twice: "it has the views A4C and PLAX"}
    assert folder_report(data)["skipped"] == reasons


# CAMUS


CAMUS_ROWS = [
    (patient, label)
    for patient in ("patient0001", "patient0002", "patient0451")  # the last one of the folder testing
    for label in (3, 3, 2, 2)
]


def test_rows_of_camus_are_the_ends_of_every_cycle_upright_and_stretched(load, camus):
    data = load("camus", camus)
    assert list(zip(data["test"]["patient"], data["test"]["label"], strict=True)) == CAMUS_ROWS
    assert folder_report(data)["skipped"] == {}
    pixels = heart("trainingpatient0001_2CH_ED").astype(float)
    square = (pixels[::2] + pixels[1::2]) / 2  # 48 rows of 60 pixels
    scaled = np.rint((square - square.min()) / (square.max() - square.min()) * 255).astype(np.uint8)
    image = np.asarray(data["test"][0]["image"])
    assert np.array_equal(image[:89], np.asarray(PIL.Image.fromarray(scaled).resize((112, 89))))
    assert not image[89:].any()


def test_both_releases_give_the_same_rows(load, camus, tmp_path):
    root = echo_sets.write_camus_nifti(tmp_path / "new")
    # the newer release numbers all patients, whatever folder they are in
    shutil.move(root / "CAMUS_public/database_nifti/patient0451", root / "testing/patient0451")
    old, new = load("camus", camus)["test"], load("camus", root)["test"]
    assert old["patient"][:] == new["patient"][:]
    assert old["label"][:] == new["label"][:]
    for one, other in zip(old, new, strict=True):
        difference = np.asarray(one["image"]).astype(int) - np.asarray(other["image"])
        assert np.abs(difference).max() <= 4  # the newer one is rounded once more, before it is stretched
        assert np.abs(difference).mean() < 1


@pytest.mark.parametrize("inside", [False, True])
def test_the_downloads_of_camus_are_read_in_place(load, camus, tmp_path, inside):
    root = echo_sets.write_camus_nifti(tmp_path / "new")
    old, new = rows_of(load("camus", camus)), rows_of(load("camus", root))
    for part in (camus / "training", camus / "testing", root / "CAMUS_public"):
        pack(part, part.name if inside else "")
    assert rows_of(load("camus", camus)) == old
    assert rows_of(load("camus", root)) == rows_of(load("camus", root / "CAMUS_public.zip")) == new


def test_one_part_of_camus_alone(load, camus):
    assert set(load("camus", camus / "testing")["test"]["patient"]) == {"patient0451"}


def test_a_third_axis_of_length_one_and_files_without_gz(load, tmp_path):
    root = echo_sets.write_camus_nifti(tmp_path / "new")
    before = rows_of(load("camus", root))
    path = root / "CAMUS_public/database_nifti/patient0001/patient0001_4CH_ES.nii.gz"
    content = gzip.decompress(path.read_bytes())
    put(path.with_suffix(""), nifti(np.frombuffer(content[352:], np.uint8).reshape(1, 48, 60)))
    path.unlink()
    assert rows_of(load("camus", root)) == before


def test_missing_images_of_camus_are_listed(load, camus):
    for end in ("4CH_ES.mhd", "4CH_ED.raw"):
        (camus / f"training/patient0002/patient0002_{end}").unlink()
    shutil.rmtree(camus / "testing/patient0001")
    put(camus / "testing/patient0001/Info_2CH.cfg", "ED: 1\n")
    data = load("camus", camus)
    assert list(zip(data["test"]["patient"], data["test"]["label"], strict=True)) == CAMUS_ROWS[:6]
    assert folder_report(data)["skipped"] == {
        "patient0002_4CH_ES": "it does not exist",
        **{f"patient0451_{end}": "it does not exist" for end in ENDS},
        "training/patient0002/patient0002_4CH_ED.mhd": "the file of its pixels is not beside it",
    }


def pooled(data) -> np.ndarray:
    return np.concatenate([np.asarray(image).ravel() for part in data.values() for image in part["image"]])


def test_intensities_are_those_of_the_reference(load, camus, tmed2, tmp_path):
    """The reference may be the folder of TMED-2 or the report of its build."""
    before = load("camus", camus, quantile_match=True, reference=tmed2)
    for path in tmed2.rglob("*.png"):
        path.write_bytes(png(picture(path.name) // 3))
    built, plain = load("tmed2", tmed2), load("camus", camus)
    report = shutil.copy(folder(built) / "report.json", tmp_path / "reference.json")
    every = np.concatenate([np.asarray(PIL.Image.open(path)).ravel() for path in tmed2.rglob("*.png")])
    source, places = pooled(plain), {folder(before), folder(plain)}
    for reference, target in ((tmed2, every), (report, pooled(built))):
        matched = load("camus", camus, quantile_match=True, reference=reference)
        shares = [np.mean(source < value) + np.mean(source == value) / 2 for value in range(256)]
        table = np.quantile(target, shares, method="inverted_cdf").astype(np.uint8)
        assert np.array_equal(pooled(matched), table[source])
        assert folder(matched) not in places
        assert folder(load("camus", camus, quantile_match=True, reference=reference)) == folder(matched)
        places.add(folder(matched))


# All three


def test_all_three_sets_are_medical():
    assert [name for name in list_datasets() if is_medical(name) and name != "fetal_planes"] == NAMES
    with pytest.raises(ValueError, match=r"Unknown dataset 'tmed'\. Did you mean tmed2\?"):
        is_medical("tmed")


@pytest.mark.parametrize("name", NAMES)
def test_none_may_be_exported_and_a_card_tells_how_to_get_it(name, tmp_path):
    with pytest.raises(ValueError, match=f"^{name} may not be exported: [A-Z].*[a-z]\\.$"):
        export_dataset(name, None, tmp_path / "out", data_dir=tmp_path)
    assert not (tmp_path / "out").exists()
    card = huggingface_hub.DatasetCard.load(CARDS / f"{name}.md")
    assert card.data.license == "other"
    assert "configs" not in card.data.to_dict()  # there is nothing to load
    builder = DATASETS[name]
    titles = ("Access", "Files", "Licence", "What may not be redistributed", "Citation")
    texts = (builder.homepage, builder.terms, *builder.citation.split("\n"), "not a medical device")
    for text in (*texts, *(f"\n## {title}\n" for title in titles)):
        assert text in card.content


def test_the_card_of_tmed2_has_the_weights():
    text = (CARDS / "tmed2.md").read_text()
    for split, counts in enumerate([(632, 239, 405, 285), (650, 223, 462, 325), (572, 199, 379, 277)]):
        weights = ", ".join(f"{weight:.3f}" for weight in class_weights(torch.tensor(counts)))
        assert f"| split{split} | {', '.join(map(str, counts))} | {sum(counts):,} | {weights} |" in text


def own_megabytes() -> float:
    """Memory of this process that is not the content of a file, which the system can drop at any time."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured through /proc")
def test_353500_frames_are_drawn_from_without_being_held_in_memory(tmp_path):
    """On a finished store of that many frames, 4.4 GB, most of which take no room on the disk."""
    file = PixelFile(tmp_path / "frames.uint8", "key", "source", (353_500, 1, SIDE, SIDE))
    with open(file.path, "wb+") as out:
        out.truncate(4096 + 353_500 * SIDE * SIDE - 1)
        out.seek(0, os.SEEK_END)
        out.write(b"\7")
        zeros, last = file.checksum(out, 0), file.checksum(out, BLOCKS - 1)  # all parts are of one size
        out.seek(0)
        out.write(file.header([zeros] * (BLOCKS - 1) + [last]))
    assert file.is_finished()
    pixels = torch.zeros(1561, 1, SIDE, SIDE, dtype=torch.uint8)
    labeled, before = Images(pixels, torch.zeros(1561, dtype=torch.int64)), own_megabytes()
    unlabeled, seen = Images(file.map()), set()
    for batch in PairedLoader(labeled, unlabeled, (64, 320), steps_per_epoch=2):
        assert batch["unlabeled"].shape == (320, 1, SIDE, SIDE)
        seen.update(batch["unlabeled_index"].tolist())
    assert len(seen) == 2 * 320
    assert max(seen) > 340_000
    assert unlabeled.pixels[-1, 0, -1, -1] == 7
    assert own_megabytes() - before < 30
