"""What goes wrong with downloads of TMED-2, Unity and CAMUS: what is done to them, and what comes of it."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest

from hf_fixastep.data import folder_report, load_dataset
from tests.echo import echo_sets
from tests.echo.echo_sets import (
    COLUMNS,
    TMED2_ROWS,
    UNITY_ROWS,
    nifti,
    pack,
    picture,
    png,
    put,
    put_csv,
    put_meta,
    tmed2_table,
)


FOLD = "DEV56/TMED2_fold0_labeledpart.csv"
LABELED = "view_and_diagnosis_labeled_set/labeled/14s1_0.png"
META = "training/patient0002/patient0002_4CH_ED.mhd"
NIFTI = "CAMUS_public/database_nifti/patient0002/patient0002_4CH_ED.nii.gz"
UNITY = str(echo_sets.unity_place(Path(), UNITY_ROWS[3][0]))
WRITERS = {
    "tmed2": echo_sets.write_tmed2,
    "unity": echo_sets.write_unity,
    "camus": echo_sets.write_camus,
    "nifti": echo_sets.write_camus_nifti,
}
Change = Callable[[Path], object]


@pytest.fixture(autouse=True)
def _no_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def load(tmp_path):
    """Write a set, change it, and load it; the change may return settings."""

    def load_here(name: str, change: Change):
        root = WRITERS[name](tmp_path / name)
        made = change(root)
        settings = {"data_dir": root, **(made if isinstance(made, dict) else {})}
        return load_dataset(name if name != "nifti" else "camus", cache_dir=tmp_path / "cache", **settings)

    return load_here


def given(**settings) -> Change:
    return lambda root: settings


def content(name: str, data: bytes | str) -> Change:
    return lambda root: put(root / name, data)


def gone(name: str) -> Change:
    return lambda root: shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()


def table(*rows: tuple) -> Change:
    return lambda root: tmed2_table(root / FOLD, list(rows))


def index(*columns: str, view: str | None = None) -> Change:
    return lambda root: put_csv(
        root / "view_index.csv", list(columns), [(file, view or given) for file, given in UNITY_ROWS]
    )


def packed(name: str, damage: Callable[[bytes], bytes]) -> Change:
    """A folder as a damaged zip file."""

    def change(root: Path) -> None:
        archive = pack(root / name)
        archive.write_bytes(damage(archive.read_bytes()))

    return change


def each(change: Callable[[Path], object], pattern: str) -> Change:
    return lambda root: [change(path) for path in list(root.rglob(pattern))] and None


def without(column: str) -> Change:
    rows = [(key, view, "no_AS", part, "x", folder) for key, view, part, folder in TMED2_ROWS]
    keep = [place for place, name in enumerate(COLUMNS) if name != column]
    cells = [[row[place] for place in keep] for row in rows]
    return lambda root: put_csv(root / FOLD, [COLUMNS[place] for place in keep], cells)


def reference(value: object) -> Change:
    data = value if isinstance(value, bytes) else json.dumps(value)
    return lambda root: {"quantile_match": True, "reference": put(root.parent / "report.json", data)}


def nameless(root: Path) -> None:
    put(root / "s/echo.png", png(picture("x")))
    tmed2_table(root / FOLD, [*TMED2_ROWS, ("echo.png", "PLAX", "test", "s")])


def unlabeled_of_labeled_patients(root: Path) -> None:
    for path in (root / "unlabeled_set").iterdir():
        path.rename(path.with_name(f"10s3_{path.stem[-1]}{path.stem[:3]}.png"))


COUNTS = r"report\.json has no 256 pixel_counts: give the report"
NO_TRAIN = f"^{FOLD} has no image of the four views with view_classifier_split train"
NEITHER = "has neither DEV56/TMED2_fold{}_labeledpart.csv nor "
# set, what is done to it, and the sentence
REFUSED: list[tuple[str, Change, str]] = [
    ("tmed2", given(data_dir=None), "^tmed2 needs data_dir=, .* of your own download: apply"),
    ("unity", given(data_dir=None), "^unity needs data_dir=, .*: download png-cache"),
    ("camus", given(data_dir=None), "^camus needs data_dir=, .*: register at https"),
    ("tmed2", given(data_dir="/nowhere"), "^There is no folder /nowhere: give"),
    ("tmed2", given(config="split3"), "^Unknown config of tmed2 'split3'. Did you mean sp"),
    ("tmed2", given(config="split2"), NEITHER.format(2)),
    ("tmed2", given(dev="DEV57"), r"^Unknown dev 'DEV57'\..* one of DEV56, DEV165"),
    ("unity", given(quantile_match=True), "^Unknown setting of unity 'quantile_match'"),
    ("tmed2", lambda root: {"data_dir": WRITERS["unity"](root / "u")}, NEITHER.format(0)),
    *(
        ("tmed2", without(column), f"{FOLD} has the columns .* one called {column}: ")
        for column in ("query_key", "view_label", "view_classifier_split", "SourceFolder")
    ),
    ("tmed2", content(FOLD, b""), f"{FOLD} cannot be read as a table: No columns"),
    ("tmed2", table(), f"{FOLD} has no rows: download it again"),
    ("tmed2", content(FOLD, b"\xff\xfe\0" * 99), f"{FOLD} cannot be read as a table"),
    ("tmed2", content(FOLD, "a,b\n1,2\n1,2,3,4\n"), f"{FOLD} cannot be read as a table"),
    ("tmed2", table(("15s1_0.png", "", "test", "x")), "^Row 1 of .* has no view_label: "),
    ("tmed2", table(TMED2_ROWS[0], *TMED2_ROWS), r"names 10s1_0\.png 2 times: keep"),
    ("tmed2", nameless, r"image echo\.png, which does not tell the patient: expected"),
    ("tmed2", gone(LABELED), r"names 1 images .* such as 14s1_0\.png: put all folders"),
    ("tmed2", gone("view_labeled_set"), r"names 2 images .* such as 11s1_0\.png"),
    (
        "tmed2",
        lambda root: (root / LABELED).rename(root / "view_labeled_set/labeled/14s1_0.png"),
        r"names 1 images that are not in .*, such as 14s1_0\.png",
    ),
    ("tmed2", content(LABELED, b"words"), f"^The test image {LABELED} cannot be read"),
    ("tmed2", content(LABELED, png(picture("x"))[:900]), "read: image file is truncated"),
    ("tmed2", table(*TMED2_ROWS[:7]), "view_classifier_split test"),
    ("tmed2", table(*((a, "Apical", c, d) for a, _, c, d in TMED2_ROWS)), NO_TRAIN),
    ("tmed2", table(*((a, b, f"{c}ing", d) for a, b, c, d in TMED2_ROWS)), NO_TRAIN),
    ("tmed2", gone("unlabeled_set"), "has no image of further patients in a folder unl"),
    ("tmed2", unlabeled_of_labeled_patients, "no image of further pat"),
    (
        "tmed2",
        each(lambda path: path.rename(path.with_name(f"frame{path.name}")), "unlabeled_set/*.png"),
        r"such as unlabeled_set/frame900s1_0\.png \(its name does not tell the patient\)",
    ),
    (
        "tmed2",
        each(lambda path: path.write_bytes(b""), "unlabeled_set/*.png"),
        r"^No image of unlabeled in .* could be read, such as unlabeled_set/900s1_0\.png \(it is empty\)",
    ),
    (
        "tmed2",
        packed("unlabeled_set", lambda data: data[:-30]),
        r"unlabeled_set\.zip cannot be read as a zip file \(File is not a zip file\): download it again",
    ),
    ("unity", gone("view_index.csv"), r"has no view_index\.csv: download"),
    ("unity", index("file", "label"), "columns file, label, but expected one called vi"),
    ("unity", index("file", "view", view="A3C"), "no image with the view A2C, A4C, PL"),
    ("unity", gone("png-cache"), r"such as 01-4d.*\(it does not exist\)"),
    ("camus", lambda root: {"data_dir": put(root / "e/x", "").parent}, "has no file such as"),
    ("camus", lambda root: WRITERS["nifti"](root) and None, "has two releases of CAMUS, with tr"),
    ("camus", each(Path.unlink, "*.raw"), r"No image of test .* is not beside it\)"),
    ("camus", given(quantile_match=True), "quantile_match is True and reference is"),
    ("camus", given(reference="."), r"^quantile_match is False and reference is \."),
    ("camus", given(quantile_match=True, reference="/nowhere"), "^There is no folder /n"),
    (
        "camus",
        lambda root: {"quantile_match": True, "reference": root},
        r"^The reference .*/camus has no images such as 4860s1_0\.png: give the folder of TMED-2",
    ),
    ("camus", reference([1, 2]), COUNTS),
    ("camus", reference(b"{"), COUNTS),
    ("camus", reference({"pixel_counts": [1] * 255}), COUNTS),
    ("camus", reference({"pixel_counts": [0] * 256}), COUNTS),
    ("camus", reference({"pixel_counts": [-1] * 256}), COUNTS),
]


@pytest.mark.parametrize(("name", "change", "sentence"), REFUSED)
def test_it_is_refused_with_one_sentence_and_leaves_nothing(name, change, sentence, load, tmp_path):
    with pytest.raises((ValueError, OSError), match=sentence) as error:
        load(name, change)
    assert type(error.value) in (ValueError, FileNotFoundError)
    assert re.fullmatch(r"[^\n]*\.", str(error.value))
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not [name for name in left if not name.endswith(".lock")]


def damaged(data: bytes) -> bytes:
    """A zip file with a wrong byte in the pixels of one image, which it does not compress."""
    image = png(picture(UNITY_ROWS[3][0]))
    place = data.index(image) + len(image) // 2
    return data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]


def clip(root: Path) -> None:
    put_meta(root / META, np.resize(picture("x"), (3, 96, 60)))


NOT_NUMBERS = gzip.compress(nifti(np.full((48, 60), np.nan, np.float32), kind=16))
COPY = "unlabeled_set/copy of 900s1_1.png"
# set, what is done to it, the file that is listed, and why; readers have tests of their own
SKIPPED: list[tuple[str, Change, str, str]] = [
    ("camus", gone(META.replace("mhd", "raw")), META, "not beside it"),
    ("camus", content(META, "patient: John Doe\n"), META, "it is no MetaImage header"),
    ("camus", clip, META, "it has 3 frames, expected one"),
    ("nifti", content(NIFTI, NOT_NUMBERS), NIFTI, "some of its pixels are not numbers"),
    ("unity", content(UNITY, png(picture("x"))[:999]), UNITY, "image file is truncated"),
    ("unity", packed("png-cache", damaged), UNITY, "Bad CRC-32"),
    ("unity", gone(UNITY), Path(UNITY).name, "it does not exist"),
    ("tmed2", content(COPY, png(picture("x"))), COPY, "does not tell the pa"),
    (
        "tmed2",
        lambda root: put_csv(
            root / "JACC_train_unlabeled_WithSourceFolder.csv",
            ["query_key", "SourceFolder"],
            [("900s1_0.png", "unlabeled_set"), ("999s1_0.png", "unlabeled_set")],
        ),
        "999s1_0.png",
        "it does not exist",
    ),
]
LOST = {COPY: 0, "999s1_0.png": 3}  # rows; otherwise one


@pytest.mark.parametrize(("name", "change", "listed", "why"), SKIPPED)
def test_it_is_skipped_and_listed_and_the_rest_is_read(name, change, listed, why, load):
    whole = sum(len(part) for part in load(name, lambda root: None).values())
    data = load(name, change)
    skipped = folder_report(data)["skipped"]
    assert list(skipped) == [listed]
    assert re.search(why, skipped[listed])
    assert "Doe" not in skipped[listed]
    assert sum(len(part) for part in data.values()) == whole - LOST.get(listed, 1)
