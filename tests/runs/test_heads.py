"""Runs on a frozen network: heads on its features, the probe, and the baselines beside a fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTImageProcessor

from hf_fixastep import WideResNetConfig, WideResNetForImageClassification, load_dataset
from hf_fixastep.features.probe import fit_neighbours, fit_probe
from hf_fixastep.features.shape import fit_shape, fit_shaped_probe
from hf_fixastep.runs import heads, training
from hf_fixastep.step.forwards import head_inputs
from hf_fixastep.study import sweep


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    torch.manual_seed(0)
    config = WideResNetConfig(depth=10, width=1, num_labels=10, image_size=8)
    WideResNetForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 8, "width": 8}, do_convert_rgb=True).save_pretrained(folder)
    return folder


@pytest.fixture
def settings(network: Path, tmp_path: Path) -> dict[str, object]:
    return {
        "dataset": "digits_open_set",
        "zeta": 50,
        "labels_per_class": 5,
        "model": str(network),
        "cache_dir": str(tmp_path / "cache"),
        "trainable": "head",
        "preset": "pretrained",
        "flip": False,
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "save_strategy": "no",
        "eval_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "cpu_threads": 1,
    }


def start(settings: dict[str, object], folder: Path, **more: object) -> dict:
    words = [word for key, value in (settings | more).items() for word in (f"--{key}", str(value))]
    training.main([*words, "--output_dir", str(folder)])
    return json.loads((folder / "metrics.json").read_text())


def plain_features(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray | None]:
    """What the head gets of the images as the processor makes them, one at a time."""
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    processor = AutoImageProcessor.from_pretrained(folder)
    data = load_dataset("digits_open_set", "zeta50", labels_per_class=5)[split]
    rows = []
    for image in data["image"]:
        with torch.no_grad(), head_inputs(model, model.config.num_labels) as seen:
            model(**processor(image.convert("RGB"), return_tensors="pt"))
        rows.append(seen[0][0].numpy())
    labels = np.asarray(data["label"]) if "label" in data.column_names else None
    return np.stack(rows).astype(np.float16).astype(float), labels


def predictions(folder: Path) -> np.ndarray:
    return pd.read_csv(folder / "test_predictions.csv")["prediction"].to_numpy()


def test_the_saved_network_answers_as_the_head_did(settings: dict, tmp_path: Path) -> None:
    start(settings, tmp_path / "run", loss="fixmatch", learning_rate=0.01)
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "run").eval()
    assert model.config.num_labels == 6
    features, _ = plain_features(tmp_path / "run", "test")
    with torch.no_grad():
        logits = model.classifier(torch.from_numpy(features).float())
    assert (logits.argmax(-1).numpy() == predictions(tmp_path / "run")).mean() > 0.995  # ties by rounding


def test_a_probe_run_and_the_baseline_beside_a_fine_tuning_are_the_probe(
    settings: dict, network: Path, tmp_path: Path
) -> None:
    train, labels = plain_features(network, "labeled")
    test, truth = plain_features(network, "test")
    expected = (fit_probe(train, labels, 6).logits(test).argmax(-1) == truth).mean()
    probe = start(settings, tmp_path / "probe", loss="probe")
    assert probe["loss"] == "probe"
    saved = AutoModelForImageClassification.from_pretrained(tmp_path / "probe")
    assert probe["parameters"] == saved.num_parameters()
    assert probe["test_accuracy"] == pytest.approx(expected, abs=0.01)  # features in float16
    tuned = start(settings, tmp_path / "tuned", loss="supervised", trainable="all")
    assert tuned["baselines"]["probe"]["test_accuracy"] == probe["test_accuracy"]
    assert set(tuned["baselines"]["labeled-only"]) == set(tuned["baselines"]["probe"])


def test_heads_that_see_the_pile_start_from_the_shaped_probe(
    settings: dict, network: Path, tmp_path: Path
) -> None:
    heads.LAST.clear()
    found = start(settings, tmp_path / "shaped", loss="shaped_probe")
    ((_, features, _),) = heads.LAST.values()
    plain = {name: plain_features(network, name) for name in ("labeled", "unlabeled", "test")}
    versions = np.stack([features["labeled"][at]["pixel_values"].numpy() for at in range(30)])
    versions = np.concatenate([plain["labeled"][0][:, None], versions[:, 1:5]], 1)  # and four weak views
    shape = fit_shape(plain["unlabeled"][0])
    expected = fit_shaped_probe(versions, plain["labeled"][1], 6, shape).logits(plain["test"][0]).argmax(-1)
    assert (predictions(tmp_path / "shaped") == expected).mean() > 0.98  # features in float16
    assert found["test_accuracy"] == pytest.approx((expected == plain["test"][1]).mean(), abs=0.02)
    still = start(settings, tmp_path / "still", loss="fixmatch", learning_rate=1e-12, keep="numbers")
    assert still["test_accuracy"] == pytest.approx(found["test_accuracy"], abs=1e-6)


def test_neighbours_are_rows_without_a_model(settings: dict, network: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="leave no model"):
        start(settings, tmp_path / "refused", loss="neighbours")
    found = start(settings, tmp_path / "run", loss="neighbours", keep="numbers")
    train, labels = plain_features(network, "labeled")
    test, truth = plain_features(network, "test")
    expected = (fit_neighbours(train, labels, 6).predict(test) == truth).mean()
    assert found["test_accuracy"] == pytest.approx(expected, abs=0.02)  # ties by float16
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_labeled_only_heads_and_baselines_never_look_at_the_pile(settings: dict, tmp_path: Path) -> None:
    answers = []
    for zeta in (0, 100):
        for loss in ("supervised", "probe"):
            folder = tmp_path / f"{loss}{zeta}"
            start(settings | {"zeta": zeta}, folder, loss=loss, keep="numbers", learning_rate=0.01)
            answers.append(predictions(folder))
    np.testing.assert_array_equal(answers[0], answers[2])
    np.testing.assert_array_equal(answers[1], answers[3])


def test_heads_of_a_sweep_share_a_process_and_its_features(
    settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {
        name: settings | {"loss": loss, "keep": "numbers"}
        for name, loss in (("a", "supervised"), ("b", "fixmatch"), ("c", "probe"))
    }
    other = {"d": settings | {"zeta": 0, "loss": "fixmatch"}, "e": settings | {"trainable": "all"}}
    batches = {name: sweep.batch_of(name, each) for name, each in (runs | other).items()}
    assert batches["a"] == batches["b"] == batches["c"]
    assert len(set(batches.values())) == 3

    heads.LAST.clear()
    embedded = []
    embed = heads.embed
    monkeypatch.setattr(heads, "embed", lambda *args, **kwargs: embedded.append(1) or embed(*args, **kwargs))
    for name, each in runs.items():
        start(each, tmp_path / name)
    assert len(embedded) == 4  # the splits, once
    heads.LAST.clear()
    start(runs["b"], tmp_path / "alone")
    np.testing.assert_array_equal(predictions(tmp_path / "alone"), predictions(tmp_path / "b"))
