"""The evaluation on three hospitals, and the prediction of a folder, as programs."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import PIL.Image
import pydicom
import pytest
import torch
import yaml
from scipy.special import softmax
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, recall_score
from transformers import AutoConfig, ViTImageProcessor

from hf_fixastep import WideResNetConfig, WideResNetForImageClassification, load_dataset
from hf_fixastep.echo import evaluation, prediction, report
from hf_fixastep.evaluation.calibration import Calibration, write_calibration
from tests.echo import echo_sets
from tests.echo.echo_sets import put
from tests.echo.test_dicom import clip_of, dicom, encoded


VIEWS = ["PLAX", "PSAX", "A4C", "A2C"]
PROBABILITIES = [f"probability_{view}" for view in VIEWS]
CLIP = "deep/er/IM0001"
CALIBRATION = {"temperature": 0.05, "abstain_below": 0.6, "coverage": 0.9}
NAME = "DOE JOHN"
save_figures = evaluation.save_figures
UID = "1.2.826.0.1.3680043.8.498.777"


def save_run(folder: Path, seed: int = 0, split: str = "split0", **settings: Any) -> Path:
    """An untrained model as a run leaves it."""
    torch.manual_seed(seed)
    shape = {"depth": 10, "width": 1, "num_stages": 4, "image_size": 28, "num_labels": 4, "bn_momentum": 0.5}
    config = WideResNetConfig(**shape, id2label=dict(enumerate(VIEWS)), **settings)
    model = WideResNetForImageClassification(config)
    with torch.no_grad():  # predictions that differ from image to image
        model.train()(pixel_values=torch.rand(8, 3, 28, 28))
        model.classifier.weight.mul_(5)
    model.save_pretrained(folder)
    plain = {"do_convert_rgb": True, "do_normalize": False, "image_mean": None, "image_std": None}
    ViTImageProcessor(size={"height": 28, "width": 28}, **plain).save_pretrained(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"dataset": "tmed2", "dataset_config": split}))
    return folder


@pytest.fixture
def run(tmp_path) -> Path:
    folder = save_run(tmp_path / "run")
    write_calibration(folder, Calibration(**CALIBRATION))
    return folder


# Evaluation


def make_images(kinds: list[int], patients: int, seed: int, count: int = 60) -> datasets.Dataset:
    random = np.random.default_rng(seed)
    features = datasets.Features(
        image=datasets.Image(), label=datasets.ClassLabel(names=VIEWS), patient=datasets.Value("string")
    )
    pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
    rows = {
        "image": [PIL.Image.fromarray(frame) for frame in pixels],
        "label": [kinds[i % len(kinds)] for i in range(count)],
        "patient": [f"p{i % patients}" for i in range(count)],
    }
    return datasets.Dataset.from_dict(rows, features=features)


@pytest.fixture
def hospitals(monkeypatch, tmp_path) -> dict[tuple, datasets.Dataset]:
    """Three sets in memory instead of the builders; Unity has no PSAX, CAMUS two views."""
    found = {
        **{("tmed2", f"split{k}", "validation"): make_images([0, 1, 2, 3], 5, 10 + k) for k in range(3)},
        **{("tmed2", f"split{k}", "test"): make_images([0, 1, 2, 3], 7, 20 + k) for k in range(3)},
        ("unity", None, "test"): make_images([0, 2, 3], 20, 30),
        ("camus", None, "test"): make_images([2, 3], 15, 40),
    }

    def load(name, config=None, *, split, data_dir, **settings):
        assert data_dir == str(tmp_path / name)
        return found[name, config, split]

    monkeypatch.setattr(evaluation, "load_dataset", load)
    monkeypatch.setattr(evaluation, "save_figures", lambda *_: [])  # they take a second each
    for name in ("tmed2", "unity", "camus"):
        (tmp_path / name).mkdir()
    return found


def folders(root: Path, *names: str) -> list[str]:
    return [word for name in names for word in (f"--{name}", str(root / name))]


def naive_logits(folder: Path, data: datasets.Dataset) -> np.ndarray:
    model = WideResNetForImageClassification.from_pretrained(folder).eval()
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in data["image"]]).transpose(0, 3, 1, 2)
    with torch.no_grad():
        return model(pixel_values=torch.tensor(pixels / 255, dtype=torch.float32)).logits.double().numpy()


def numbers_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "heart2heart.json").read_text())


def test_the_evaluation_gives_the_numbers_of_scikit_learn(run, hospitals, tmp_path):
    evaluation.main([str(run), *folders(tmp_path, "tmed2", "unity"), "--draws", "200"])
    numbers = numbers_of(run / "heart2heart")
    assert not numbers["phantom"]
    for site, key in (("tmed2", ("tmed2", "split0", "test")), ("unity", ("unity", None, "test"))):
        data, found = hospitals[key], numbers["sites"][site]
        logits, labels = naive_logits(run, data), np.array(data["label"])
        guess, present = logits.argmax(-1), np.unique(labels)
        recalls = recall_score(labels, guess, labels=present, average=None, zero_division=0)
        assert found["balanced_accuracy"]["value"] == pytest.approx(recalls.mean())
        assert found["confusion"] == [confusion_matrix(labels, guess, labels=range(4)).tolist()]
        for kind, view in enumerate(VIEWS):
            negatives = labels != kind
            assert found["specificity"][view]["value"] == pytest.approx(np.mean(guess[negatives] != kind))
            if kind in present:
                recall = recalls[list(present).index(kind)]
                assert found["sensitivity"][view]["value"] == pytest.approx(recall)
        low, value, high = (found["balanced_accuracy"][name] for name in ("low", "value", "high"))
        assert low < value < high
    absent = numbers["sites"]["unity"]["sensitivity"]["PSAX"]
    assert absent == {"value": None, "low": None, "high": None, "runs": [None]}
    assert numbers["sites"]["unity"]["clips"] == 20
    assert numbers["sites"]["tmed2"]["patients"] == 7


def test_the_calibration_is_fitted_on_validation_and_written_for_predict(run, hospitals, tmp_path):
    key = "tmed2", "split0", "validation"
    logits = naive_logits(run, hospitals[key])
    labels = (logits.argmax(-1) + (np.arange(60) % 5 == 0)) % 4  # four of five are right
    features = hospitals[key].features
    hospitals[key] = hospitals[key].remove_columns("label").add_column("label", labels).cast(features)
    before = (run / "config.json").read_bytes()
    arguments = [str(run), *folders(tmp_path, "tmed2"), "--coverage", "0.8", "--draws", "100"]
    evaluation.main([*arguments, "--write_calibration", "false"])
    assert (run / "config.json").read_bytes() == before
    evaluation.main(arguments)
    calibration = AutoConfig.from_pretrained(run).calibration
    losses = {}
    for factor in (0.98, 1, 1.02):
        shares = softmax(logits / (factor * calibration["temperature"]), -1)
        losses[factor] = -np.log(shares[np.arange(60), labels]).mean()
    assert min(losses, key=losses.__getitem__) == 1
    confidence = softmax(logits / calibration["temperature"], -1).max(-1)
    assert np.mean(confidence >= calibration["abstain_below"] - 1e-6) == pytest.approx(0.8)
    assert numbers_of(run / "heart2heart")["calibration"] == {str(run): calibration}


def test_three_runs_are_averaged_each_on_its_own_split(hospitals, tmp_path, capsys):
    runs = [save_run(tmp_path / f"run{k}", seed=k, split=f"split{k}") for k in range(3)]
    out = tmp_path / "out"
    evaluation.main([*map(str, runs), *folders(tmp_path, "tmed2"), "--out", str(out), "--draws", "100"])
    found = numbers_of(out)["sites"]["tmed2"]["balanced_accuracy"]
    expected = []
    for k, folder in enumerate(runs):
        data = hospitals["tmed2", f"split{k}", "test"]
        expected.append(balanced_accuracy_score(data["label"], naive_logits(folder, data).argmax(-1)))
    assert found["runs"] == pytest.approx(expected)
    assert found["value"] == pytest.approx(np.mean(expected))
    assert "mean of 3 runs" in capsys.readouterr().out


def test_answers_may_be_restricted_to_the_views_of_a_hospital(run, hospitals, tmp_path):
    evaluation.main([str(run), *folders(tmp_path, "camus"), "--present_only", "true"])
    data = hospitals["camus", None, "test"]
    logits = naive_logits(run, data)
    expected = balanced_accuracy_score(data["label"], 2 + logits[:, 2:].argmax(-1))
    found = numbers_of(run / "heart2heart")["sites"]["camus"]
    assert found["balanced_accuracy"]["value"] == pytest.approx(expected)
    assert np.sum(found["confusion"]) == 60


def test_figures_and_the_same_numbers_are_left_by_every_call(run, hospitals, tmp_path, monkeypatch):
    arguments = [str(run), *folders(tmp_path, "unity", "camus"), "--draws", "100"]
    evaluation.main(arguments)
    first = numbers_of(run / "heart2heart")
    monkeypatch.setattr(evaluation, "save_figures", save_figures)
    evaluation.main(arguments)
    assert numbers_of(run / "heart2heart") == first
    names = {path.name for path in (run / "heart2heart").glob("*.png")}
    assert names == {"forest.png", "intensities.png", "confusion_unity.png", "confusion_camus.png"}


@pytest.fixture(scope="module")
def phantom(tmp_path_factory) -> Path:
    """Folders in the real layouts, marked as phantom."""
    root = tmp_path_factory.mktemp("phantom")
    rows = [
        (f"{patient}s1_{image}.png", view, part, echo_sets.BOTH)
        for part, patients in (("train", (20, 21)), ("val", (30, 31)), ("test", (40, 41, 42)))
        for patient in patients
        for image, view in enumerate(VIEWS)
    ]
    echo_sets.write_tmed2(root / "tmed2", rows)
    echo_sets.write_unity(root / "unity")
    echo_sets.write_camus(root / "camus")
    for name in ("tmed2", "unity", "camus"):
        (root / name / "PHANTOM.txt").write_text("synthetic")
    return root


def test_phantom_data_are_called_so_in_table_numbers_and_figures(run, phantom, capsys, monkeypatch):
    titles = []
    monkeypatch.setattr(
        report.Figure, "savefig", lambda figure, *_, **__: titles.append(figure.get_suptitle())
    )
    evaluation.main([str(run), *folders(phantom, "tmed2", "unity", "camus"), "--draws", "100"])
    printed = capsys.readouterr().out
    assert printed.count("PHANTOM DATA") >= 3
    numbers = numbers_of(run / "heart2heart")
    assert numbers["phantom"]
    assert "PHANTOM" in numbers["note"]
    assert [site["phantom"] for site in numbers["sites"].values()] == [True] * 4
    assert list(numbers["sites"]) == ["tmed2", "unity", "camus", "camus_matched"]
    assert len(titles) == 6
    assert all("PHANTOM DATA" in title for title in titles)


def test_prediction_and_evaluation_see_the_same_pixels(run, phantom, tmp_path):
    """The logits of the test images of TMED-2 and CAMUS, by the files and by the builders."""
    classifier = prediction.Classifier(run)
    for name in ("tmed2", "camus"):
        data = load_dataset(name, split="test", data_dir=phantom / name)
        by_builder = evaluation.ask(classifier, data).logits
        views = pd.read_csv(call(run, phantom / name, "--mask", "false", out=tmp_path / "views.csv"))
        columns = views[PROBABILITIES].to_numpy()
        for row in softmax(by_builder / CALIBRATION["temperature"], -1):
            assert np.abs(columns - row).max(-1).min() < 1e-5


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "No data were given"),
        (["--tmed2", "x", "--draws", "5"], "draws is 5"),
        (["--tmed2", "x", "--coverage", "0"], "coverage is 0"),
        (["--tmed2", "x", "--coverage", "1.5"], "coverage is 1.5"),
        (["--tmde2", "x"], "Unknown argument 'tmde2'. Did you mean tmed2?"),
        (["--tmed2", "nowhere"], "There is no folder"),
        (None, "Found 0 runs"),
        (["again", "again", "again", "--tmed2", "x"], "Found 4 runs"),
        (["nowhere", "--tmed2", "x"], "There is no file"),
        (["digits", "--tmed2", "x"], "trained on digits_open_set, but expected tmed2"),
        (["letters", "--unity", "unity"], "The model knows a, b, c, d, but unity has PLAX"),
    ],
)
def test_a_mistake_in_the_evaluation_ends_in_one_sentence(words, sentence, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "digits/recipe.yaml", "dataset: digits_open_set\n")
    shutil.copytree(run, tmp_path / "letters")
    config = json.loads((run / "config.json").read_text()) | {"id2label": dict(enumerate("abcd"))}
    put(tmp_path / "letters/config.json", json.dumps(config))
    echo_sets.write_unity(tmp_path / "unity")
    others = words is not None and words[:1] and not words[0].startswith("--") and words[0] != "again"
    with pytest.raises(SystemExit, match=re.escape(sentence)) as stopped:
        evaluation.main(words if others else [] if words is None else [str(run), *words])
    assert "\n" not in str(stopped.value)
    assert not list(tmp_path.rglob("heart2heart"))


# Prediction


def read_outputs(out: Path) -> dict[str, pd.DataFrame]:
    names = {"clips": "views.csv", "frames": "views_frames.csv", "skipped": "views_skipped.csv"}
    return {part: pd.read_csv(out.with_name(name), keep_default_na=False) for part, name in names.items()}


@pytest.fixture
def studies(tmp_path) -> Path:
    """A folder with a clip, a still, and what is none."""
    folder = tmp_path / "studies"
    pictures, _ = clip_of(3, (120, 160))
    put(folder / CLIP, encoded(dicom(pictures, StudyInstanceUID=UID)))
    PIL.Image.fromarray(pictures[0]).save(folder / "still.jpg", quality=95)
    put(folder / "notes.txt", "nothing")
    put(folder / "broken.png", b"\x89PNG\r\n\x1a\n")
    return folder


def call(run: Path, folder: Path, *more: str, out: Path | None = None) -> Path:
    out = out or folder.parent / "out" / "views.csv"
    prediction.main(["--model", str(run), "--input", str(folder), "--out", str(out), *more])
    return out


def test_files_frames_and_skipped_files_are_listed(run, studies, capsys):
    found = read_outputs(call(run, studies))
    clips, frames, skipped = found["clips"].set_index("file"), found["frames"], found["skipped"]
    assert sorted(clips.index) == [CLIP, "still.jpg"]
    assert clips.loc[CLIP, "frames"] == 3
    assert set(skipped["file"]) == {"notes.txt", "broken.png"}
    own = frames[frames["file"] == CLIP]
    assert list(own["frame"]) == [0, 1, 2]
    np.testing.assert_allclose(own[PROBABILITIES].sum(1), 1, atol=1e-4)
    assert list(own["view"]) == [VIEWS[number] for number in own[PROBABILITIES].to_numpy().argmax(-1)]
    means = own[PROBABILITIES].mean(0)
    np.testing.assert_allclose(clips.loc[CLIP, PROBABILITIES].astype(float), means, atol=1e-5)
    printed = capsys.readouterr().out
    assert "2 files used, 2 skipped" in printed
    assert "not a medical device" in printed


def test_probabilities_are_scaled_and_low_ones_abstained(run, studies):
    frames = read_outputs(call(run, studies))["frames"]
    assert list(frames["abstain"]) == [value < 0.6 for value in frames[PROBABILITIES].max(1)]
    plain = read_outputs(call(run, studies, "--uncalibrated", "true"))["frames"]
    powers = plain[PROBABILITIES].to_numpy() ** (1 / CALIBRATION["temperature"])
    np.testing.assert_allclose(frames[PROBABILITIES], powers / powers.sum(1, keepdims=True), atol=1e-3)
    assert not plain["abstain"].any()


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([[0.6, 0.4], [0.6, 0.4], [0.0, 1.0]], (0, 0.4, 2 / 3)),  # the majority, not the mean
        ([[0.6, 0.4], [0.1, 0.9]], (1, 0.65, 0.5)),  # a tie
        ([[0.2, 0.8]], (1, 0.8, 1.0)),
    ],
)
def test_a_clip_is_decided_by_the_votes_of_its_frames(frames, expected):
    assert prediction.vote(np.array(frames)) == pytest.approx(expected)


def test_a_clip_abstains_by_its_mean_probability(run, studies, monkeypatch):
    logits = np.log([[0.9, 0.1, 1e-9, 1e-9], [0.9, 0.1, 1e-9, 1e-9], [1e-3, 0.999, 1e-9, 1e-9]])
    monkeypatch.setattr(prediction.Classifier, "logits", lambda *_: logits * CALIBRATION["temperature"])
    clip = read_outputs(call(run, studies))["clips"].set_index("file").loc[CLIP]
    assert (clip["view"], clip["abstain"]) == ("PLAX", False)
    assert clip["votes"] == pytest.approx(2 / 3, 1e-4)
    assert clip["probability"] == pytest.approx((0.9 + 0.9 + 0.001) / 3, 1e-4)


def test_the_study_id_is_a_salted_hash(run, studies):
    salts = [(), (), ("--salt", "s3cret"), ("--salt", "s3cret")]
    tables = [read_outputs(call(run, studies, *salt))["clips"].set_index("file") for salt in salts]
    first, second, *salted = (table.loc[CLIP, "study"] for table in tables)
    assert first != second
    expected = hashlib.sha256(b"s3cret\0" + UID.encode()).hexdigest()[:16]
    assert salted == [expected, expected]
    assert hashlib.sha256(UID.encode()).hexdigest()[:16] not in (first, expected)
    assert tables[0].loc["still.jpg", "study"] == ""


TEXTS = {"AE", "CS", "LO", "LT", "PN", "SH", "ST", "UC", "UT"}
PIXELS = {"SamplesPerPixel", "PhotometricInterpretation", "PlanarConfiguration"}


def plant_names(data: Any) -> int:
    """Put the name into every element of the dictionary that takes text, and into private ones."""
    planted = 0
    for tag, (kind, _, _, retired, keyword) in pydicom.datadict.DicomDictionary.items():
        allowed = kind in TEXTS and not retired and keyword and keyword not in PIXELS
        if allowed and tag >> 16 not in (0, 2, 4) and keyword != "SpecificCharacterSet":
            data.add_new(tag, kind, NAME)
            planted += 1
    data.add_new(0x00091010, "LO", NAME)
    data.file_meta.ImplementationVersionName = NAME
    return planted


@pytest.mark.filterwarnings("ignore")
def test_no_header_value_reaches_any_output(run, tmp_path, capfd, caplog):
    """Names in a thousand fields of good and of bad files; files, screen and log are searched."""
    folder = tmp_path / "named"
    pictures, _ = clip_of(2, (120, 160))
    bad = {
        "good": {},
        "photometric": {"PhotometricInterpretation": NAME},
        "spacing": {"PixelSpacing": [0, 0]},
        "frames": {"NumberOfFrames": 50},
        "rows": {"Rows": 700},
        "bits": {"BitsAllocated": 13},
    }
    for name, elements in bad.items():
        data = dicom(pictures, StudyInstanceUID=UID)
        assert plant_names(data) > 1000
        for keyword, value in elements.items():
            setattr(data, keyword, value)
        put(folder / name, encoded(data))
    put(folder / "damaged", encoded(data)[:-500])
    put(folder / "clip.mhd", f"PatientName = {NAME}\nDimSize = {NAME}\nElementDataFile = {NAME}.raw\n")
    still = echo_sets.nifti(echo_sets.heart("x"))
    put(folder / "still.nii", still[:148] + NAME.encode() * 13 + still[252:])
    capfd.readouterr()
    caplog.clear()  # of what was said while they were written
    out = call(run, folder)
    assert list(read_outputs(out)["clips"]["file"]) == ["good", "still.nii"]
    assert len(read_outputs(out)["skipped"]) >= 5
    written = "".join(path.read_text() for path in out.parent.iterdir())
    everything = written + "".join(capfd.readouterr()) + caplog.text
    for secret in ("DOE", "JOHN", UID, UID[-10:]):
        assert secret not in everything


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--input", "nowhere"], "There is no folder"),
        (["--input", "empty"], "holds no file"),
        (["--batch_size", "0"], "batch_size is 0"),
        (["--model", "nowhere"], "There is no folder nowhere; as a model on the Hub"),
        (
            ["--model", "plain"],
            "run fixastep heart2heart plain --tmed2 FOLDER first, or add --uncalibrated true",
        ),
        (["--out", "empty"], "which is a folder"),
        (["--inptu", "x"], "Unknown argument 'inptu'. Did you mean input?"),
        (["--input", "damaged"], "cannot be read as a zip file"),
        (
            ["--input", "useless"],
            "None of the 1 files in useless could be used, such as notes.txt: it is no im",
        ),
    ],
)
def test_a_mistake_in_the_prediction_ends_in_one_sentence(
    words, sentence, run, studies, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    save_run(tmp_path / "plain")
    put(tmp_path / "damaged/more.zip", b"PK no zip")
    put(tmp_path / "useless/notes.txt", "nothing")
    with pytest.raises(SystemExit, match=re.escape(sentence)) as stopped:
        call(run, studies, *words)
    assert "\n" not in str(stopped.value)
    if "useless" in words:
        assert list(pd.read_csv(tmp_path / "out" / "views_skipped.csv")["file"]) == ["notes.txt"]


def test_a_folder_that_may_not_be_opened_is_an_error(run, studies, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(SystemExit, match="Permission denied"):
        call(run, studies)


def test_what_was_predicted_is_on_the_disk_when_a_later_file_ends_the_program(
    run, studies, tmp_path, monkeypatch
):
    whole, part = tmp_path / "whole.csv", tmp_path / "part.csv"
    words = ["--model", str(run), "--input", str(studies), "--salt", "pepper", "--out"]
    prediction.main([*words, str(whole)])
    read, names = prediction.read_clip, list[str]()

    def read_two(tree, name):
        names.append(name)
        if len(names) > 2:
            raise KeyboardInterrupt
        return read(tree, name)

    monkeypatch.setattr(prediction, "read_clip", read_two)
    with pytest.raises(KeyboardInterrupt):
        prediction.main([*words, str(part)])
    found, expected = pd.read_csv(part), pd.read_csv(whole)
    listed = len(found) + len(pd.read_csv(tmp_path / "part_skipped.csv"))
    assert listed == 2
    pd.testing.assert_frame_equal(found, expected[: len(found)])


def test_one_file_may_be_given_instead_of_a_folder_and_a_model_without_calibration(studies, tmp_path):
    run = save_run(tmp_path / "plain")
    out = call(run, studies / "still.jpg", "--uncalibrated", "true", out=tmp_path / "one.csv")
    assert list(pd.read_csv(out)["file"]) == ["still.jpg"]
