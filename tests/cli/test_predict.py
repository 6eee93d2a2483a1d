"""The prediction of a folder of images; that of echo files is tested in tests/echo."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from hf_fixastep.cli import predict
from hf_fixastep.evaluation.calibration import Calibration, write_calibration
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.evaluation.foreign import KnownImages
from tests.echo.test_dicom import clip_of, dicom, encoded
from tests.short_runs import tiny_processor, tiny_vit


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    network = tiny_vit()
    network.config.id2label = dict(enumerate(["cat", "dog", "owl"]))
    network.save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    (folder / "deep").mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (9, 8 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / ("deep" if number else ".") / f"{number}.png")
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def set_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_every_image_gets_a_row_and_every_broken_file_a_reason(model, photos, tmp_path, capsys):
    predict.main([str(model), str(photos), "--out", str(tmp_path / "new/answers.csv"), "--batch_size", "2"])
    found = pd.read_csv(tmp_path / "new/answers.csv")
    assert sorted(found["file"]) == ["0.png", "deep/1.png", "deep/2.png"]
    columns = ["probability_cat", "probability_dog", "probability_owl"]
    assert list(found.columns) == ["file", "class", "probability", *columns]
    for _, row in found.iterrows():
        shares = Classifier(model).probabilities([Image.open(photos / row["file"])])[0]
        assert list(row[columns]) == pytest.approx(list(shares), abs=1e-5)
        assert row["class"] == ["cat", "dog", "owl"][shares.argmax()]
        assert row["probability"] == pytest.approx(shares.max(), abs=1e-5)
    skipped = pd.read_csv(tmp_path / "new/answers_skipped.csv")
    assert skipped.to_dict("list") == {"file": ["broken.png"], "reason": ["it is no image of a known format"]}
    text = capsys.readouterr().out
    assert "3 files used, 1 skipped" in text
    assert "not calibrated" in text


def test_a_calibrated_model_abstains_below_its_threshold(model, photos, tmp_path):
    calibrated = tmp_path / "model"
    calibrated.mkdir()
    for path in model.iterdir():
        (calibrated / path.name).write_bytes(path.read_bytes())
    expected = [Classifier(model).logits([Image.open(photos / "0.png")])[0] / 0.5]
    shares = np.exp(expected[0]) / np.exp(expected[0]).sum()
    for limit in (shares.max() - 0.01, shares.max() + 0.01):
        write_calibration(calibrated, Calibration(0.5, abstain_below=limit))
        predict.main(
            ["--model", str(calibrated), "--input", str(photos / "0.png"), "--out", str(tmp_path / "a.csv")]
        )
        found = pd.read_csv(tmp_path / "a.csv")
        assert list(found["file"]) == ["0.png"]
        assert list(found["abstain"]) == [shares.max() < limit]
        assert list(found["probability"]) == pytest.approx([shares.max()], abs=1e-5)


@pytest.mark.parametrize("sign", ["views", "file", "header", "option"])
def test_echo_models_and_echo_files_go_to_the_echo_reader(sign, model, photos, tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(predict.echo, "main", called.append)
    source, folder, more = tmp_path / "in", tmp_path / "model", []
    folder.mkdir()
    source.mkdir()
    (source / "notes.txt").write_text("no image")
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if sign == "views":
        set_config(folder, id2label=dict(enumerate(["PLAX", "PSAX", "A4C", "A2C"])))
    elif sign == "file":
        (source / "heart.nii.gz").touch()
    elif sign == "header":
        (source / "IM0001").write_bytes(b"\0" * 128 + b"DICM")
    else:
        more = ["--echo", "true"]
    predict.main([str(folder), str(source), "--out", "views.csv", "--mask", "false", *more])
    (words,) = called
    settings = dict(zip(words[::2], words[1::2], strict=True))
    assert settings == {
        "--model": str(folder),
        "--input": str(source),
        "--out": "views.csv",
        "--mask": "false",
    }


def test_a_model_of_fetal_planes_takes_dicom_and_pictures_and_tells_foreign_images(
    model, photos, tmp_path, capsys
):
    folder, source = tmp_path / "planes", tmp_path / "in"
    folder.mkdir()
    source.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    set_config(folder, id2label=dict(enumerate(["Trans-thalamic", "Trans-cerebellum", "Trans-ventricular"])))
    pictures, _ = clip_of(2, (120, 160))
    (source / "IM0001").write_bytes(encoded(dicom(pictures)))
    (source / "0.png").write_bytes((photos / "0.png").read_bytes())
    own = Classifier(folder).logits_and_features([Image.open(photos / "deep/1.png")])[1]
    KnownImages.fit(own, np.concatenate([own, -own])).write(folder)
    predict.main([str(folder), str(source), "--out", str(tmp_path / "out.csv")])
    found = pd.read_csv(tmp_path / "out.csv").set_index(["file", "frame"])
    assert sorted(found.index) == [("0.png", 0), ("IM0001", 0), ("IM0001", 1)]
    frame = Image.fromarray(pictures[1]).convert("L")
    shares = Classifier(folder).probabilities([frame])[0]
    row = found.loc[("IM0001", 1)]
    assert list(row[[f"probability_{name}" for name in Classifier(folder).classes]]) == pytest.approx(
        list(shares), abs=0.02
    )
    assert set(found["foreign"]) <= {0.0, 0.5, 1.0}
    text = capsys.readouterr().out
    assert "2 files used, 0 skipped" in text
    assert "not a medical device" in text


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["nowhere", "PHOTOS", "--out", "a.csv"], "There is no folder nowhere"),
        (["MODEL", "nowhere", "--out", "a.csv"], "input is nowhere, which is missing"),
        (["MODEL", "PHOTOS", "--out", "PHOTOS"], "which is a folder; give the name of a CSV file"),
        (["MODEL", "PHOTOS/broken.png", "--out", "a.csv"], "None of the 1 files in"),
        (["MODEL", "PHOTOS", "--ouput", "a.csv"], "Unknown argument 'ouput'. Did you mean out?"),
        (["MODEL", "PHOTOS", "--out", "a.csv", "--batch_size", "0"], "batch_size is 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_sentence(argv, sentence, model, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"MODEL": str(model), "PHOTOS": str(photos)}
    argv = [re.sub("MODEL|PHOTOS", lambda word: places[word.group()], word) for word in argv]
    with pytest.raises(SystemExit, match=re.escape(sentence)) as stopped:
        predict.main(argv)
    assert "\n" not in str(stopped.value)
