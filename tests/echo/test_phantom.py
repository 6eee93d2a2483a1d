"""The phantom, read with readers written here: nothing of the package but the generator."""

from __future__ import annotations

import csv
import gzip
import hashlib
import re
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score

from hf_fixastep.data import load_dataset
from hf_fixastep.echo import files, phantom


PATIENTS, SEED = 6, 3
VIEWS = ("PLAX", "PSAX", "A4C", "A2C")
LABELED = ("view_and_diagnosis_labeled_set/labeled", "view_labeled_set/labeled")
COLUMNS = {
    *("query_key", "view_label", "diagnosis_label", "view_classifier_split", "diagnosis_classifier_split"),
    "SourceFolder",
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phantom")
    phantom.main(["--out", str(folder), "--patients", str(PATIENTS), "--seed", str(SEED)])
    return folder


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def pixels_of(path: Path) -> np.ndarray:
    with PIL.Image.open(path) as picture:
        return np.asarray(picture)


def read_mhd(path: Path) -> tuple[np.ndarray, list[float]]:
    """[T, H, W] and the spacing, from key = value lines and a raw file, x fastest."""
    header = dict(line.split(" = ") for line in path.read_text().splitlines())
    assert (header["ElementType"], header["BinaryData"], header["CompressedData"]) == (
        "MET_UCHAR",
        "True",
        "False",
    )
    width, height, time = map(int, header["DimSize"].split())
    raw = (path.parent / header["ElementDataFile"]).read_bytes()
    assert len(raw) == width * height * time
    voxel = [
        [[raw[(t * height + y) * width + x] for x in range(width)] for y in range(height)] for t in range(1)
    ]
    pixels = np.frombuffer(raw, np.uint8).reshape(time, height, width)
    assert np.array_equal(pixels[0], voxel[0])
    return pixels, [float(number) for number in header["ElementSpacing"].split()]


def read_nifti(path: Path) -> tuple[np.ndarray, tuple[float, ...]]:
    """Indexed by x, y and perhaps time, as nibabel would give it, and the zooms."""
    data = gzip.decompress(path.read_bytes())
    assert struct.unpack_from("<i", data)[0] == 348
    assert data[344:348] == b"n+1\0"
    dim = struct.unpack_from("<8h", data, 40)
    assert struct.unpack_from("<2h", data, 70) == (2, 8)
    start = int(struct.unpack_from("<f", data, 108)[0])
    shape = dim[1 : 1 + dim[0]]
    return np.frombuffer(data[start:], np.uint8).reshape(shape, order="F"), struct.unpack_from(
        "<2f", data, 80
    )


def test_every_set_says_that_it_is_a_phantom(out: Path) -> None:
    assert sorted(path.name for path in out.iterdir()) == ["camus", "camus_nifti", "tmed2", "unity"]
    for root in out.iterdir():
        assert "synthetic" in (root / "PHANTOM.txt").read_text()
        assert files.is_phantom(root)
    assert not files.is_phantom(out)
    assert not files.is_phantom(None)


# ---- TMED-2


@pytest.mark.parametrize("fold", range(3))
@pytest.mark.parametrize("dev", ["DEV479", "DEV165", "DEV56"])
def test_every_row_of_tmed2_names_an_image(out: Path, dev: str, fold: int) -> None:
    for part, splits in (("labeled", {"train", "val", "test"}), ("unlabeled", {"unlabeled"})):
        rows = rows_of(out / "tmed2" / dev / f"TMED2_fold{fold}_{part}part.csv")
        assert {*rows[0]} == COLUMNS
        assert {row["view_classifier_split"] for row in rows} == splits
        assert {row["SourceFolder"].rpartition("/")[2] for row in rows} == {part}
        for row in rows:
            assert re.fullmatch(r"\d+s[12]_\d+\.png", row["query_key"])
            assert (out / "tmed2" / row["SourceFolder"] / row["query_key"]).is_file()
        if part == "labeled":
            assert {row["view_label"] for row in rows} == {*VIEWS, "A4CorA2CorOther"}
        else:
            assert {row["view_label"] for row in rows} == {"Not_Provided"}


def test_tmed2_lists_every_labeled_image_once(out: Path) -> None:
    root = out / "tmed2"
    rows = rows_of(root / "labels_per_image.csv")
    assert list(rows[0]) == ["query_key", "view_label", "diagnosis_label"]
    images = [path.name for folder in LABELED for path in (root / folder).iterdir()]
    assert sorted(row["query_key"] for row in rows) == sorted(images)


def test_images_of_tmed2_are_grey_squares_padded_below(out: Path) -> None:
    paths = list((out / "tmed2").rglob("*.png"))
    for path in paths[::7]:
        with PIL.Image.open(path) as picture:
            assert (picture.mode, picture.size) == ("L", (112, 112))
        pixels = pixels_of(path)
        assert pixels[84:].max() == 0
        assert pixels[:84].max() > 100


@pytest.mark.parametrize("fold", range(3))
@pytest.mark.parametrize("dev", ["DEV479", "DEV165", "DEV56"])
def test_no_patient_of_tmed2_is_in_two_parts(out: Path, dev: str, fold: int) -> None:
    rows = rows_of(out / "tmed2" / dev / f"TMED2_fold{fold}_labeledpart.csv")
    parts: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    for row in rows:
        parts[row["view_classifier_split"]].add(row["query_key"].split("s")[0])
    parts["pile"] = {path.name.split("s")[0] for path in (out / "tmed2/unlabeled_set").iterdir()}
    assert all(parts.values())
    assert sum(map(len, parts.values())) == len(set.union(*parts.values()))


def test_the_folds_of_tmed2_test_different_patients_and_the_development_sets_grow(out: Path) -> None:
    tested, sizes = [], []
    for fold in range(3):
        rows = rows_of(out / f"tmed2/DEV479/TMED2_fold{fold}_labeledpart.csv")
        tested.append({r["query_key"].split("s")[0] for r in rows if r["view_classifier_split"] == "test"})
    assert not tested[0] & tested[1]
    assert not tested[1] & tested[2]
    for dev in ("DEV56", "DEV165", "DEV479"):
        rows = rows_of(out / f"tmed2/{dev}/TMED2_fold0_labeledpart.csv")
        sizes.append(Counter(row["view_classifier_split"] for row in rows))
    assert sizes[0]["train"] < sizes[1]["train"] < sizes[2]["train"]
    assert sizes[0]["test"] == sizes[2]["test"]


def test_some_patients_of_tmed2_came_twice(out: Path) -> None:
    rows = rows_of(out / "tmed2/labels_per_image.csv")
    studies = {row["query_key"].split("_")[0] for row in rows}
    assert 0 < sum(study.endswith("s2") for study in studies) < len(studies) / 4


# ---- Unity


def test_unity_has_names_places_and_views_of_its_own(out: Path) -> None:
    root = out / "unity"
    images = {path.name: path for path in (root / "png-cache").rglob("*.png")}
    for name, path in images.items():
        assert re.fullmatch(r"0[12]-[0-9a-f]{64}-\d{4}\.png", name)
        assert path.relative_to(root / "png-cache").parts[:3] == (name[:2], name[3:5], name[5:7])
    index = {row["file"]: row["view"] for row in rows_of(root / "view_index.csv")}
    assert index.keys() < images.keys()  # some image has no view
    assert {"plax", "a4c", "a2c"} <= set(index.values()) <= {"plax", "a4c", "a2c", "a3c", "a5c"}
    clips = {name.rpartition("-")[0]: view for name, view in index.items()}
    assert all(clips[name.rpartition("-")[0]] == view for name, view in index.items())


def test_images_of_unity_have_several_sizes_and_modes(out: Path) -> None:
    seen = set()
    for path in (out / "unity").rglob("*.png"):
        with PIL.Image.open(path) as picture:
            seen.add((picture.mode, picture.size))
    assert {mode for mode, _ in seen} == {"L", "RGB"}
    assert len({size for _, size in seen}) == 3


# ---- CAMUS


def test_the_older_release_of_camus_has_its_files(out: Path) -> None:
    folders = sorted(path for part in ("training", "testing") for path in (out / "camus" / part).iterdir())
    assert {path.name for path in folders if path.parent.name == "testing"} == {"patient0001"}
    for folder in folders:
        ends = ["ED", "ES", "sequence"] + (["ED_gt", "ES_gt"] if folder.parent.name == "training" else [])
        names = {f"{folder.name}_{view}_{end}" for view in ("2CH", "4CH") for end in ends}
        wanted = {f"{name}{suffix}" for name in names for suffix in (".mhd", ".raw")}
        assert {path.name for path in folder.iterdir()} == wanted | {"Info_2CH.cfg", "Info_4CH.cfg"}


def test_pixels_of_the_older_release_are_half_as_high_as_wide(out: Path) -> None:
    pixels, spacing = read_mhd(out / "camus/training/patient0001/patient0001_4CH_ED.mhd")
    assert spacing[1] == pytest.approx(spacing[0] / 2, rel=1e-4)
    time, height, width = pixels.shape
    assert time == 1
    assert 0.6 < height * spacing[1] / (width * spacing[0]) < 0.9
    # the sector is as deep as the picture, and as wide at its widest row as twice the sine of 34 to 39
    # degrees
    seen = np.flatnonzero((pixels[0] > 0).any(0))
    widest = (seen[-1] - seen[0]) * spacing[0] / (height * spacing[1])
    assert 2 * np.sin(np.radians(33)) < widest < 2 * np.sin(np.radians(40))


def test_both_releases_of_camus_show_the_same(out: Path) -> None:
    older, spacing = read_mhd(out / "camus/training/patient0002/patient0002_2CH_ES.mhd")
    place = out / "camus_nifti/CAMUS_public/database_nifti/patient0002/patient0002_2CH_ES.nii.gz"
    newer, zooms = read_nifti(place)
    assert zooms == pytest.approx((spacing[0], spacing[0]), rel=1e-4)
    assert np.array_equal(newer.T, older[0, ::2])


def test_a_clip_of_camus_starts_at_the_end_of_diastole_and_ends_at_that_of_systole(out: Path) -> None:
    folder = out / "camus/training/patient0001"
    clip, (first, _), (last, _) = (
        read_mhd(folder / f"patient0001_2CH_{end}.mhd") for end in ("sequence", "ED", "ES")
    )
    assert np.array_equal(clip[0][0], first[0])
    assert np.array_equal(clip[0][-1], last[0])
    newer, _ = read_nifti(
        out / "camus_nifti/CAMUS_public/database_nifti/patient0001/patient0001_2CH_half_sequence.nii.gz"
    )
    assert np.array_equal(newer.transpose(2, 1, 0), clip[0][:, ::2])


def test_the_left_ventricle_of_camus_shrinks_and_is_darker_than_its_muscle(out: Path) -> None:
    areas, darker = [], []
    for folder in (out / "camus/training").iterdir():
        masks = {}
        for end in ("ED", "ES"):
            masks[end], _ = read_mhd(folder / f"{folder.name}_2CH_{end}_gt.mhd")
            pixels, _ = read_mhd(folder / f"{folder.name}_2CH_{end}.mhd")
            assert set(np.unique(masks[end])) == {0, 1, 2, 3}
            darker.append(pixels[masks[end] == 1].mean() < pixels[masks[end] == 2].mean())
        areas.append((masks["ED"] == 1).sum() - (masks["ES"] == 1).sum())
    assert min(areas) > 0
    assert np.mean(darker) > 0.8


def test_every_patient_of_the_newer_release_is_in_one_subgroup(out: Path) -> None:
    root = out / "camus_nifti/CAMUS_public"
    groups = [
        (root / f"database_split/subgroup_{name}.txt").read_text().split()
        for name in ("training", "validation", "testing")
    ]
    assert all(groups)
    assert sorted(name for group in groups for name in group) == sorted(
        path.name for path in (root / "database_nifti").iterdir()
    )


def test_nibabel_reads_the_newer_release(out: Path) -> None:
    nibabel = pytest.importorskip("nibabel", reason="the extra [echo] is not installed")
    place = out / "camus_nifti/CAMUS_public/database_nifti/patient0001/patient0001_4CH_ED.nii.gz"
    image = nibabel.load(place)
    pixels, zooms = read_nifti(place)
    assert np.array_equal(np.asarray(image.dataobj), pixels)
    assert image.header.get_zooms() == pytest.approx(zooms)
    assert np.all(np.diag(image.affine)[:2] < 0)


# ---- what is in the images


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_seed_gives_the_same_files_and_another_one_others(out: Path, tmp_path: Path) -> None:
    counts = phantom.write_phantom(tmp_path / "again", PATIENTS, SEED)
    phantom.write_phantom(tmp_path / "other", 5, SEED + 1)
    first, again, other = (digests(folder) for folder in (out, tmp_path / "again", tmp_path / "other"))
    assert first == again
    assert not set(first.values()) & {
        other[name] for name in other if name.endswith((".png", ".raw", ".nii.gz"))
    }
    assert counts["tmed2"] == sum(name.startswith("tmed2/") and name.endswith(".png") for name in first)
    assert counts["unity"] == sum(name.startswith("unity/") and name.endswith(".png") for name in first)
    assert counts["camus"] == sum(bool(re.search("_E[DS].mhd$", name)) for name in first)


def frames(view: str, count: int, hospital: phantom.Hospital, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    parameters = phantom.draw_frames([view] * count, range(count), range(count), hospital, random)
    return phantom.render(parameters, (84, 112), hospital, random)


def test_views_can_be_told_apart_but_not_by_a_line_through_a_few_pixels() -> None:
    """Logistic regression on 14x10 blocks: far above chance, far from perfect."""
    views = ("PLAX", "PSAX valve", "A4C", "A2C")
    pixels, labels = [], []
    for label, view in enumerate(views):
        blocks = frames(view, 90, phantom.BOSTON, seed=label).reshape(90, 12, 7, 14, 8).mean((2, 4))
        pixels += list(blocks.reshape(90, -1) / 255)
        labels += [label] * 90
    x, y = np.array(pixels), np.array(labels)
    train = np.arange(len(y)) % 90 < 40
    model = LogisticRegression(max_iter=2000).fit(x[train], y[train])
    assert 0.5 < balanced_accuracy_score(y[~train], model.predict(x[~train])) < 0.95


def test_hospitals_differ_in_brightness() -> None:
    means = {}
    for hospital in (phantom.BOSTON, phantom.UNITED_KINGDOM, phantom.FRANCE):
        pictures = frames("A4C", 60, hospital, seed=0).astype(float)
        values = np.array([picture[picture > 0].mean() for picture in pictures])
        means[hospital] = values.mean(), values.std() / np.sqrt(len(values))
    (boston, _), (kingdom, _), (france, _) = means.values()
    error = max(error for _, error in means.values())
    assert kingdom - boston > 5 * error
    assert boston - france > 5 * error


def test_speckle_is_that_of_many_scatterers() -> None:
    """Without compression the amplitude in even tissue has the mean to deviation of a Rayleigh distribution,
    1.91.
    """
    random = np.random.default_rng(0)
    field = random.standard_normal((4, 120, 88, 2)).view(np.complex128)[..., 0]
    amplitudes = np.abs(phantom.blur(phantom.blur(field, 1, 0.8), 2, 1.6))
    assert amplitudes.mean() / amplitudes.std() == pytest.approx(np.sqrt(np.pi / (4 - np.pi)), rel=0.05)
    assert np.square(amplitudes).mean() == pytest.approx(2, rel=0.05)


def test_outside_of_the_sector_a_picture_is_black() -> None:
    beams = np.ones((1, *phantom.BEAM_GRID), np.float32)
    picture = phantom.scan_convert(beams, np.radians([40.0]).astype(np.float32), (84, 112), 1.0)[0]
    for row in range(84):
        for column in range(112):
            x, z = column - 55.5, float(row)
            if np.hypot(x, z) > 84 or abs(np.degrees(np.arctan2(x, z))) > 40.5:
                assert picture[row, column] == 0
            elif np.hypot(x, z) < 82 and abs(np.degrees(np.arctan2(x, z))) < 39.5:
                assert picture[row, column] == 255


# ---- the command


def test_nothing_is_written_over(out: Path, capsys: pytest.CaptureFixture) -> None:
    before = digests(out)
    with pytest.raises(SystemExit):
        phantom.main(["--out", str(out), "--patients", "5"])
    assert "tmed2 is already there" in capsys.readouterr().err
    assert digests(out) == before


@pytest.mark.parametrize(
    ("settings", "sentence"), [({"patients": 4}, "patients is 4"), ({"seed": -1}, "seed is -1")]
)
def test_too_few_patients_and_a_negative_seed_are_refused(
    tmp_path: Path, settings: dict, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        phantom.write_phantom(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_a_data_set_of_phantoms_says_so(out: Path, tmp_path: Path) -> None:
    for name in ("unity", "camus"):
        data = load_dataset(name, data_dir=out / name, cache_dir=tmp_path)
        assert data["test"].info.description.startswith("PHANTOM DATA. ")
