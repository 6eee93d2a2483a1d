"""The phantom: layouts read with pandas, SimpleITK and nibabel, and pictures that a model can learn from."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import nibabel
import numpy as np
import pandas as pd
import PIL.Image
import pytest
import SimpleITK
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score

from hf_fixastep.data import folder_report, load_dataset
from hf_fixastep.echo import phantom
from hf_fixastep.echo.files import ECHO_VIEWS, is_phantom


SEED = 3
LABELED = ("view_and_diagnosis_labeled_set/labeled", "view_labeled_set/labeled")


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("phantom")
    phantom.main(["--out", str(folder), "--patients", str(phantom.SMALLEST), "--seed", str(SEED)])
    return folder


def patients_of(keys) -> set[str]:
    return {key.split("s")[0] for key in keys}


@pytest.mark.parametrize("fold", range(3))
def test_tables_of_tmed2_name_images_of_separate_patients(out, fold):
    root, sizes = out / "tmed2", []
    for dev in ("DEV56", "DEV165", "DEV479"):
        labeled, pile = (
            pd.read_csv(root / dev / f"TMED2_fold{fold}_{part}part.csv") for part in ("labeled", "unlabeled")
        )
        assert list(labeled) == phantom.FOLD_COLUMNS
        assert set(labeled["view_label"]) == {*ECHO_VIEWS, "A4CorA2CorOther"}
        assert set(pile["view_label"]) == {"Not_Provided"}
        for row in pd.concat([labeled, pile]).itertuples():
            assert re.fullmatch(r"\d+s[12]_\d+\.png", row.query_key)
            assert (root / row.SourceFolder / row.query_key).is_file()
        groups = labeled.groupby("view_classifier_split")["query_key"].apply(patients_of).to_dict()
        assert set(groups) == {"train", "val", "test"}
        assert patients_of(pile["query_key"]) <= groups["train"]
        groups["pile"] = patients_of(path.name for path in (root / "unlabeled_set").iterdir())
        assert sum(map(len, groups.values())) == len(set.union(*groups.values()))
        sizes.append((labeled["view_classifier_split"] == "train").sum())
    assert sizes[0] <= sizes[1] < sizes[2]
    images = [path.name for folder in LABELED for path in (root / folder).iterdir()]
    assert sorted(pd.read_csv(root / "labels_per_image.csv")["query_key"]) == sorted(images)


def test_images_of_tmed2_are_grey_squares_padded_below(out):
    for path in list((out / "tmed2").rglob("*.png"))[::9]:
        with PIL.Image.open(path) as picture:
            assert (picture.mode, picture.size) == ("L", (112, 112))
            pixels = np.asarray(picture)
        assert pixels[84:].max() == 0
        assert pixels[:84].max() > 100


def test_unity_has_names_places_sizes_and_views_of_its_own(out):
    images, seen = {path.name: path for path in (out / "unity/png-cache").rglob("*.png")}, set()
    for name, path in images.items():
        assert re.fullmatch(r"0[12]-[0-9a-f]{64}-\d{4}\.png", name)
        assert path.parts[-4:-1] == (name[:2], name[3:5], name[5:7])
        with PIL.Image.open(path) as picture:
            seen |= {picture.mode, picture.size}
    assert {"L", "RGB", *(shape[::-1] for shape in phantom.UNITY_SHAPES)} == seen
    index = pd.read_csv(out / "unity/view_index.csv").set_index("file")["view"]
    assert set(index.index) < set(images)  # some image has no view
    assert {"plax", "a4c", "a2c"} <= set(index) <= {"plax", "a4c", "a2c", "a3c", "a5c"}


def test_both_releases_of_camus_have_their_files_and_the_same_pixels(out):
    newer = out / "camus_nifti/CAMUS_public"
    groups = [
        (newer / f"database_split/subgroup_{part}.txt").read_text().split()
        for part in ("training", "validation", "testing")
    ]
    assert sorted(name for group in groups for name in group) == sorted(
        path.name for path in (newer / "database_nifti").iterdir()
    )
    for folder in sorted((out / "camus").glob("t*/*")):
        is_training = folder.parent.name == "training"
        ends = ["ED", "ES", "sequence", *(["ED_gt", "ES_gt"] if is_training else [])]
        names = [f"{folder.name}_{view}_{end}" for view in ("2CH", "4CH") for end in ends]
        wanted = {f"{name}{suffix}" for name in names for suffix in (".mhd", ".raw")}
        assert {path.name for path in folder.iterdir()} == wanted | {"Info_2CH.cfg", "Info_4CH.cfg"}
        other = newer / "database_nifti" / (folder.name if is_training else "patient0005")
        for name in names:
            old = SimpleITK.ReadImage(str(folder / f"{name}.mhd"))
            pixels, spacing = SimpleITK.GetArrayFromImage(old), old.GetSpacing()
            twin = name.replace(folder.name, other.name).replace("seq", "half_seq")
            new = nibabel.load(other / f"{twin}.nii.gz")
            assert spacing[1] == pytest.approx(spacing[0] / 2, rel=1e-4)
            assert new.header.get_zooms()[:2] == pytest.approx(spacing[:1] * 2, rel=1e-4)
            assert np.all(np.diag(new.affine)[:2] < 0)
            assert np.array_equal(np.asarray(new.dataobj).T.reshape(pixels[:, ::2].shape), pixels[:, ::2])


def test_the_left_ventricle_of_camus_shrinks_and_is_darker_than_its_muscle(out):
    for folder in (out / "camus/training").iterdir():
        read = {
            end: SimpleITK.GetArrayFromImage(
                SimpleITK.ReadImage(str(folder / f"{folder.name}_2CH_{end}.mhd"))
            )
            for end in ("ED", "ES", "ED_gt", "ES_gt", "sequence")
        }
        assert np.array_equal(read["sequence"][[0, -1]], np.concatenate([read["ED"], read["ES"]]))
        assert set(np.unique(read["ED_gt"])) == {0, 1, 2, 3}
        assert (read["ED_gt"] == 1).sum() > (read["ES_gt"] == 1).sum()
        assert read["ED"][read["ED_gt"] == 1].mean() < read["ED"][read["ED_gt"] == 2].mean()


def digests(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_a_seed_gives_the_same_files_and_nothing_is_written_over(out, tmp_path, capsys):
    counts = phantom.write_phantom(tmp_path, phantom.SMALLEST, SEED)
    assert digests(tmp_path) == digests(out)
    assert counts["tmed2"] == len(list((out / "tmed2").rglob("*.png")))
    assert counts["unity"] == len(list((out / "unity").rglob("*.png")))
    assert counts["camus"] == counts["camus_nifti"] == len(list((out / "camus").rglob("*_E[DS].mhd")))
    with pytest.raises(SystemExit):
        phantom.main(["--out", str(tmp_path), "--patients", "5"])
    assert "tmed2 is already there" in capsys.readouterr().err
    assert digests(tmp_path) == digests(out)


@pytest.mark.parametrize(
    ("settings", "sentence"), [({"patients": 4}, "patients is 4"), ({"seed": -1}, "seed is -1")]
)
def test_too_few_patients_and_a_negative_seed_are_refused(tmp_path, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        phantom.write_phantom(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def pictures(view: str, hospital: phantom.Hospital, seed: int, count: int = 90) -> np.ndarray:
    return np.stack([phantom.draw(view, (seed, n, 1, 1), (84, 112), hospital)[0] for n in range(count)])


def test_views_can_be_told_apart_but_not_by_a_line_through_a_few_pixels():
    """Logistic regression on 14x12 blocks: far above chance, far from perfect."""
    groups = [pictures(view, phantom.BOSTON, seed) for seed, view in enumerate(ECHO_VIEWS)]
    x = np.concatenate(groups).reshape(360, 12, 7, 14, 8).mean((2, 4)).reshape(360, -1) / 255
    y, train = np.repeat(range(4), 90), np.arange(360) % 90 < 40
    model = LogisticRegression(max_iter=2000).fit(x[train], y[train])
    assert 0.5 < balanced_accuracy_score(y[~train], model.predict(x[~train])) < 0.95


def test_hospitals_differ_in_brightness():
    france, boston, kingdom = (
        pictures("A4C", hospital, 0, 30).mean()
        for hospital in (phantom.FRANCE, phantom.BOSTON, phantom.UNITED_KINGDOM)
    )
    assert 1.3 * france < boston < kingdom / 1.3


@pytest.mark.parametrize(
    ("name", "root", "config", "views"),
    [
        ("tmed2", "tmed2", "split0", set(ECHO_VIEWS)),
        ("tmed2", "tmed2", "split2", set(ECHO_VIEWS)),
        ("unity", "unity", None, {"PLAX", "A4C", "A2C"}),
        ("camus", "camus", None, {"A4C", "A2C"}),
        ("camus", "camus_nifti", None, {"A4C", "A2C"}),
    ],
)
def test_the_builders_read_all_of_it_and_call_it_a_phantom(out, tmp_path, name, root, config, views):
    data = load_dataset(name, config, data_dir=out / root, cache_dir=tmp_path)
    report = folder_report(data)
    assert report["skipped"] == {}
    assert {view for view, count in report["classes"]["test"].items() if count} == views
    assert all(report["images"].values())
    assert data["test"].info.description.startswith("PHANTOM DATA. ")
    assert is_phantom(out / root)
    assert not is_phantom(out)
    assert not is_phantom(None)
