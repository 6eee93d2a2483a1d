"""What goes wrong with downloads of TMED-2, Unity and CAMUS, as tables: what is made, and what has to come of
it.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import datasets
import numpy as np
import pytest

from hf_fixastep.data import folder_report, load_dataset
from tests.echo.echo_sets import (
    COLUMNS,
    TMED2_ROWS,
    UNITY_ROWS,
    heart,
    nifti,
    pack,
    picture,
    png,
    put,
    put_csv,
    put_meta,
    tmed2_table,
    unity_place,
    write_camus,
    write_camus_nifti,
    write_tmed2,
    write_unity,
)


FOLD = "DEV56/TMED2_fold0_labeledpart.csv"
LABELED = "view_and_diagnosis_labeled_set/labeled/14s1_0.png"
META = "training/patient0002/patient0002_4CH_ED.mhd"
NIFTI = "CAMUS_public/database_nifti/patient0002/patient0002_4CH_ED.nii.gz"
WRITERS = {"tmed2": write_tmed2, "unity": write_unity, "camus": write_camus, "nifti": write_camus_nifti}


@pytest.fixture(autouse=True)
def _no_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def load(tmp_path):
    """Write a set, change it, and load it; the change may return settings."""

    def load_here(name: str, change: Callable[[Path], object]):
        root = WRITERS[name](tmp_path / name)
        made = change(root)
        settings = {"data_dir": root, **(made if isinstance(made, dict) else {})}
        return load_dataset(name if name != "nifti" else "camus", cache_dir=tmp_path / "cache", **settings)

    return load_here


def without(column: str) -> Callable[[Path], None]:
    keep = [place for place, name in enumerate(COLUMNS) if name != column]
    rows = [(key, view, "no_AS", part, "x", folder) for key, view, part, folder in TMED2_ROWS]

    def change(root: Path) -> None:
        put_csv(
            root / FOLD, [COLUMNS[place] for place in keep], [[row[place] for place in keep] for row in rows]
        )

    return change


def rows(*more: tuple, first: int = 0) -> Callable[[Path], object]:
    return lambda root: tmed2_table(root / FOLD, [*TMED2_ROWS[first:], *more])


def content(name: str, data: bytes | str) -> Callable[[Path], object]:
    return lambda root: put(root / name, data)


def given(**settings) -> Callable[[Path], dict]:
    return lambda root: settings


def packed(name: str, damage: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """A folder as a damaged zip file."""

    def change(root: Path) -> None:
        archive = pack(root / name)
        archive.write_bytes(damage(archive.read_bytes()))

    return change


def each(change: Callable[[Path], object], pattern: str) -> Callable[[Path], None]:
    def change_all(root: Path) -> None:
        for path in list(root.rglob(pattern)):
            change(path)

    return change_all


def both_releases(root: Path) -> None:
    write_camus_nifti(root)


def missing_data_dir(root: Path) -> dict:
    return {"data_dir": root / "nowhere"}


def moved_unlabeled(root: Path) -> None:
    for path in (root / "unlabeled_set").iterdir():
        path.rename(path.with_name(f"10s3_{path.stem[-1]}{path.stem[:3]}.png"))


def reference(value: object) -> Callable[[Path], dict]:
    return lambda root: {
        "quantile_match": True,
        "reference": put(
            root.parent / "report.json", value if isinstance(value, bytes) else json.dumps(value)
        ),
    }


TOO_FEW = {"pixel_counts": [1] * 255}
# set, what is done to it, and the sentence
REFUSED = {
    "no data_dir": (
        "tmed2",
        given(data_dir=None),
        r"^tmed2 needs data_dir=, the folder of your own download: apply for",
    ),
    "no data_dir for Unity": (
        "unity",
        given(data_dir=None),
        "^unity needs data_dir=, .*: download png-cache.zip and",
    ),
    "no data_dir for CAMUS": (
        "camus",
        given(data_dir=None),
        "^camus needs data_dir=, .*: register at https://",
    ),
    "a data_dir that is not there": (
        "tmed2",
        missing_data_dir,
        "^There is no folder .*/nowhere: give the one of your",
    ),
    "a fold that is not there": (
        "tmed2",
        given(config="split3"),
        "^Unknown config of tmed2 'split3'. Did you mean sp",
    ),
    "a fold without its table": (
        "tmed2",
        given(config="split2"),
        "has neither DEV56/TMED2_fold2_labeledpart.csv nor ",
    ),
    "an unknown development set": (
        "tmed2",
        given(dev="DEV57"),
        r"^Unknown dev 'DEV57'\.( Did .*)? Choose one of DEV56,",
    ),
    "a development set without tables": (
        "tmed2",
        given(dev="DEV479"),
        "has neither DEV479/TMED2_fold0_labeledpart.cs",
    ),
    "an unknown setting": ("unity", given(quantile_match=True), "^Unknown setting of unity 'quantile_match'"),
    "another set for TMED-2": (
        "tmed2",
        lambda root: {"data_dir": write_unity(root / "u")},
        "has neither DEV56/TMED2_",
    ),
    **{
        f"a table without {column}": (
            "tmed2",
            without(column),
            f"{FOLD} has the columns .*, but expected one called {column}: rename or add it",
        )
        for column in ("query_key", "view_label", "view_classifier_split", "SourceFolder")
    },
    "an empty table": (
        "tmed2",
        content(FOLD, b""),
        f"{FOLD} cannot be read as a table: No columns to parse from file",
    ),
    "a table without rows": (
        "tmed2",
        content(FOLD, ",".join(COLUMNS)),
        f"{FOLD} has no rows: download it again",
    ),
    "a table of bytes": ("tmed2", content(FOLD, b"\xff\xfe\0" * 99), f"{FOLD} cannot be read as a table"),
    "a table with a ragged row": (
        "tmed2",
        content(FOLD, "a,b\n1,2\n1,2,3,4\n"),
        f"{FOLD} cannot be read as a table",
    ),
    "a row without a view": (
        "tmed2",
        rows(("15s1_0.png", "", "test", "x")),
        "^Row 10 of .* has no view_label: fill it",
    ),
    "an image that comes twice": (
        "tmed2",
        rows(TMED2_ROWS[0]),
        r"names 10s1_0\.png 2 times: keep one row for each",
    ),
    "a name without a patient": (
        "tmed2",
        lambda root: (
            (rows(("echo.png", "PLAX", "test", "s"))(root), put(root / "s/echo.png", png(picture("x"))))
        ),
        r"names the image echo\.png, which does not tell the patient: expected names such as 4860s1_0\.png",
    ),
    "an image that is missing": (
        "tmed2",
        lambda root: (root / LABELED).unlink(),
        r"names 1 images that are not in .*, such as 14s1_0\.png: put all folders or zip files of the release there",
    ),
    "a folder that is missing": (
        "tmed2",
        lambda root: shutil.rmtree(root / "view_labeled_set"),
        r"names 2 images that are not in .*, such as 11s1_0\.png",
    ),
    "an image in another folder": (
        "tmed2",
        lambda root: (root / LABELED).rename(root / "view_labeled_set/labeled/14s1_0.png"),
        r"names 1 images that are not in .*, such as 14s1_0\.png",
    ),
    "a broken labeled image": (
        "tmed2",
        content(LABELED, b"words"),
        f"^The test image {LABELED} cannot be read: it is no image of a known format. Download it again",
    ),
    "a labeled image cut short": (
        "tmed2",
        content(LABELED, png(picture("x"))[:900]),
        "cannot be read: image file is tr",
    ),
    "no row for the test": ("tmed2", lambda root: tmed2_table(root / FOLD, TMED2_ROWS[:7]), "split test"),
    "only unknown views": (
        "tmed2",
        lambda root: tmed2_table(root / FOLD, [(a, "Apical", c, d) for a, _, c, d in TMED2_ROWS]),
        f"^{FOLD} has no image of the four views with view_classifier_split train",
    ),
    "unknown words for the splits": (
        "tmed2",
        lambda root: tmed2_table(root / FOLD, [(a, b, f"{c}ing", d) for a, b, c, d in TMED2_ROWS]),
        f"^{FOLD} has no image of the four views with view_classifier_split train",
    ),
    "no unlabeled images": (
        "tmed2",
        lambda root: shutil.rmtree(root / "unlabeled_set"),
        "has no image of further patients in a folder unlabeled_set: put that folder of the release there",
    ),
    "unlabeled images of labeled patients alone": (
        "tmed2",
        moved_unlabeled,
        "has no image of further patients",
    ),
    "unlabeled images without patients": (
        "tmed2",
        each(lambda path: path.rename(path.with_name(f"frame{path.name}")), "unlabeled_set/*.png"),
        r"such as unlabeled_set/frame900s1_0\.png \(its name does not tell the patient\)",
    ),
    "broken unlabeled images alone": (
        "tmed2",
        each(lambda path: path.write_bytes(b""), "unlabeled_set/*.png"),
        r"^No image of unlabeled in .* could be read, such as unlabeled_set/900s1_0\.png \(it is empty\)",
    ),
    "a zip file cut short": (
        "tmed2",
        packed("unlabeled_set", lambda data: data[:-30]),
        r"unlabeled_set\.zip cannot be read as a zip file \(File is not a zip file\): download it again",
    ),
    "a page for a zip file": (
        "unity",
        packed("png-cache", lambda data: b"<html>"),
        r"png-cache\.zip cannot be read as",
    ),
    "no index of views": (
        "unity",
        lambda root: (root / "view_index.csv").unlink(),
        r"has no view_index\.csv: download",
    ),
    "an index without views": (
        "unity",
        lambda root: put_csv(root / "view_index.csv", ["file", "label"], UNITY_ROWS),
        r"view_index\.csv has the columns file, label, but expected one called view",
    ),
    "an index of other views": (
        "unity",
        lambda root: put_csv(root / "view_index.csv", ["file", "view"], [(a, "A3C") for a, _ in UNITY_ROWS]),
        r"has no image with the view A2C, A4C, PLAX in view_index\.csv: download png-cache\.zip",
    ),
    "an index without images": (
        "unity",
        lambda root: shutil.rmtree(root / "png-cache"),
        r"has no image with the view .* in view_index\.csv, such as 01-4d.*\(it does not exist\)",
    ),
    "no file of CAMUS": (
        "camus",
        lambda root: {"data_dir": put(root / "e/x.txt", b"").parent},
        "has no file such as",
    ),
    "two releases": (
        "camus",
        both_releases,
        "has two releases of CAMUS, with training/.* and CAMUS_public/.*: give",
    ),
    "no raw file at all": (
        "camus",
        each(Path.unlink, "*.raw"),
        r"^No image of test in .* could be read, such as .*\(the file of its pixels is not beside it\)",
    ),
    "a match without a reference": (
        "camus",
        given(quantile_match=True),
        "^quantile_match is True and reference is None, but expected both or none: give quantile_match=True and refe",
    ),
    "a reference without a match": (
        "camus",
        given(reference="."),
        r"^quantile_match is False and reference is \., but",
    ),
    "a reference that is not there": (
        "camus",
        given(quantile_match=True, reference="/nowhere"),
        "^There is no folder /n",
    ),
    "a reference without images": (
        "camus",
        lambda root: {"quantile_match": True, "reference": root},
        r"^The reference .*/camus has no images such as 4860s1_0\.png: give the folder of TMED-2",
    ),
    "a reference of other JSON": (
        "camus",
        reference([1, 2]),
        r"report\.json has no 256 pixel_counts: give the report",
    ),
    "a reference of no JSON": ("camus", reference(b"{"), r"report\.json has no 256 pixel_counts"),
    "a reference of too few counts": ("camus", reference(TOO_FEW), r"report\.json has no 256 pixel_counts"),
    "a reference of no pixels": (
        "camus",
        reference({"pixel_counts": [0] * 256}),
        r"report\.json has no 256 pixel_counts",
    ),
    "a reference of negative counts": (
        "camus",
        reference({"pixel_counts": [-1] * 256}),
        "has no 256 pixel_counts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_one_sentence_and_leaves_nothing(case, load, tmp_path):
    name, change, sentence = REFUSED[case]
    with pytest.raises((ValueError, OSError), match=sentence) as error:
        load(name, change)
    assert type(error.value) in (ValueError, FileNotFoundError)
    message = str(error.value)
    assert "\n" not in message
    assert message.endswith(".")
    left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert not [name for name in left if not name.endswith(".lock")]


def meta(data: bytes | None = None, shape: tuple[int, ...] = (96, 60), **entries) -> Callable[[Path], object]:
    pixels = np.resize(heart("x"), shape)
    return lambda root: put_meta(root / META, pixels, data, **entries)


def gz(pixels: np.ndarray, **settings) -> bytes:
    return gzip.compress(nifti(pixels, **settings))


def damaged(data: bytes) -> bytes:
    """A zip file with a wrong byte in the pixels of one image, which it does not compress."""
    image = png(picture(UNITY_ROWS[3][0]))
    place = data.index(image) + len(image) // 2
    return data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]


UNITY = str(unity_place(Path(), UNITY_ROWS[3][0]))
# set, what is done to it, the file that is listed, and why
SKIPPED = {
    "a raw file that is missing": (
        "camus",
        lambda root: (root / META).with_suffix(".raw").unlink(),
        META,
        "not beside it",
    ),
    "a raw file cut short": (
        "camus",
        meta(bytes(100)),
        META,
        "it holds 100 bytes of pixels, but its header speaks of",
    ),
    "a wrong type of pixels": ("camus", meta(ElementType="MET_DOUBLE"), META, "its header speaks of 46,080"),
    "no spacing": (
        "camus",
        meta(ElementSpacing=None),
        META,
        "its ElementSpacing is missing or not two or three",
    ),
    "a spacing of zero": (
        "camus",
        meta(ElementSpacing="0.3 0 1"),
        META,
        "its ElementSpacing is missing or not",
    ),
    "a spacing of the wrong unit": (
        "camus",
        meta(ElementSpacing="0.3 154 1"),
        META,
        "its pixels are 0.3 wide and 154 h",
    ),
    "a header of words": ("camus", content(META, "patient: John Doe\n"), META, "it is no MetaImage header"),
    "an empty header": ("camus", content(META, b""), META, "it is no MetaImage header"),
    "a broken packed file": (
        "camus",
        meta(b"words", CompressedData="True"),
        META,
        r"it is damaged \(error\)",
    ),
    "a packed bomb": (
        "camus",
        meta(zlib.compress(bytes(10**8)), CompressedData="True"),
        META,
        "it holds 5,761 bytes of pixels, but its header speaks of 5,760",
    ),
    "a clip for an image": ("camus", meta(shape=(3, 96, 60)), META, "it has 3 frames, expected one"),
    "a black image": ("camus", meta(bytes(96 * 60)), META, "all its pixels are equal"),
    "a gz file cut short": (
        "nifti",
        content(NIFTI, gz(heart("x"))[:-99]),
        NIFTI,
        r"it is damaged \(EOFError\)",
    ),
    "a gz file of something else": (
        "nifti",
        content(NIFTI, gzip.compress(b"x" * 999)),
        NIFTI,
        "it is no complete NIfTI",
    ),
    "a NIfTI spacing of zero": (
        "nifti",
        content(NIFTI, gz(heart("x"), zooms=(0.3, 0.0))),
        NIFTI,
        "0.3 wide and 0 high",
    ),
    "a NIfTI file of numbers that are none": (
        "nifti",
        content(NIFTI, gz(np.full((48, 60), np.nan, np.float32), kind=16)),
        NIFTI,
        "some of its pixels are not numbers",
    ),
    "a NIfTI clip for an image": (
        "nifti",
        content(NIFTI, gz(np.stack([heart("x")] * 2))),
        NIFTI,
        "it has 2 frames, expected one",
    ),
    "an empty PNG": ("unity", content(UNITY, b""), UNITY, "it is empty"),
    "a PNG cut short": ("unity", content(UNITY, png(picture("x"))[:999]), UNITY, "image file is truncated"),
    "a page for a PNG": (
        "unity",
        content(UNITY, b"<html>404</html>"),
        UNITY,
        "it is no image of a known format",
    ),
    "a damaged member of a zip file": (
        "unity",
        packed("png-cache", damaged),
        UNITY,
        "Bad CRC-32",
    ),
    "a row without its image": (
        "unity",
        lambda root: (root / UNITY).unlink(),
        Path(UNITY).name,
        "it does not exist",
    ),
    "a broken unlabeled image": (
        "tmed2",
        content("unlabeled_set/900s1_1.png", b"x"),
        "unlabeled_set/900s1_1.png",
        "no im",
    ),
    "an unlabeled image without a patient": (
        "tmed2",
        content("unlabeled_set/copy of 900s1_1.png", png(picture("x"))),
        "unlabeled_set/copy of 900s1_1.png",
        "its name does not tell the patient",
    ),
    "an unlabeled row without its image": (
        "tmed2",
        lambda root: put_csv(
            root / "JACC_train_unlabeled_WithSourceFolder.csv",
            ["query_key", "SourceFolder"],
            [("900s1_0.png", "unlabeled_set"), ("999s1_0.png", "unlabeled_set")],
        ),
        "999s1_0.png",
        "it does not exist",
    ),
}


@pytest.mark.parametrize("case", SKIPPED)
def test_it_is_skipped_and_listed_and_the_rest_is_read(case, load):
    name, change, listed, why = SKIPPED[case]
    whole = sum(len(part) for part in load(name, lambda root: None).values())
    data = load(name, change)
    skipped = folder_report(data)["skipped"]
    assert list(skipped) == [listed]
    assert re.search(why, skipped[listed])
    assert "Doe" not in skipped[listed]
    lost = {"an unlabeled image without a patient": 0, "an unlabeled row without its image": 3}
    assert sum(len(part) for part in data.values()) == whole - lost.get(case, 1)
