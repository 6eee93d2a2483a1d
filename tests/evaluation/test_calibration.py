from __future__ import annotations

import dataclasses
import hashlib
import json
import logging

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from transformers import AutoConfig

from hf_fixastep import WideResNetConfig
from hf_fixastep.evaluation.calibration import (
    Calibration,
    abstain_threshold,
    calibrate,
    fit_temperature,
    probabilities,
    write_calibration,
)


def noisy_logits(scale: float, count: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, count)
    logits = random.normal(size=(count, 4))
    logits[np.arange(count), labels] += 1.5
    return scale * logits, labels


def likelihood_loss(temperature: float, logits: np.ndarray, labels: np.ndarray) -> float:
    return -log_softmax(logits / temperature, axis=-1)[np.arange(len(labels)), labels].mean()


@pytest.mark.parametrize("scale", [1e-6, 0.2, 1.0, 7.0, 1e5])
def test_the_temperature_is_that_of_scipy(scale):
    logits, labels = noisy_logits(scale)
    loss = lambda log: likelihood_loss(np.exp(log), logits, labels)  # noqa: E731
    bounds = (np.log(scale) - 4, np.log(scale) + 4)
    expected = np.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-9}).x)
    assert fit_temperature(logits, labels) == pytest.approx(expected, rel=1e-5)


def test_scaled_logits_give_a_scaled_temperature():
    logits, labels = noisy_logits(1.0)
    assert fit_temperature(13 * logits, labels) == pytest.approx(
        13 * fit_temperature(logits, labels), rel=1e-9
    )


def test_float32_logits_are_fitted_in_float64():
    logits, labels = noisy_logits(1.0)
    single = logits.astype(np.float32)
    assert fit_temperature(single, labels) == fit_temperature(single.astype(np.float64), labels)


def test_one_wrong_image_among_many_still_has_a_temperature():
    logits = np.tile([9.0, 0.0, 0.0, 0.0], (300, 1))
    labels = np.zeros(300, int)
    labels[0] = 1
    # 299 / 300 = 1 / (1 + 3 exp(-9 / T))
    assert fit_temperature(logits, labels) == pytest.approx(9 / np.log(3 * 299), rel=1e-9)


def test_nothing_to_improve_leaves_the_temperature_at_one(caplog):
    with caplog.at_level(logging.WARNING):
        assert fit_temperature([[3.0, 1.0], [0.0, 5.0]], [0, 1]) == 1.0
    assert "classified right" in caplog.text


def test_logits_no_better_than_chance_become_equal_probabilities(caplog):
    logits, labels = noisy_logits(1.0)
    with caplog.at_level(logging.WARNING):
        temperature = fit_temperature(-logits, labels)
    assert "no more than chance" in caplog.text
    np.testing.assert_allclose(probabilities(-logits, temperature), 0.25, atol=1e-3)


@pytest.mark.parametrize(
    ("logits", "labels", "sentence"),
    [
        (np.zeros((0, 4)), np.zeros(0, int), "at least one image"),
        (np.zeros((2, 4)), np.zeros(3, int), r"\[2, 4\] and labels \[3\]"),
        ([[1.0, np.nan]], [0], "not finite"),
        ([[1.0, 2.0]], [2], "from 0 to 1"),
        ([[1.0, 2.0]], [-1], "from 0 to 1"),
        ([[1.0, 2.0]], [0.5], "whole numbers"),
    ],
)
def test_logits_that_cannot_be_fitted_are_an_error(logits, labels, sentence):
    with pytest.raises(ValueError, match=sentence):
        fit_temperature(logits, labels)


def test_probabilities_stay_finite_for_huge_logits():
    np.testing.assert_array_equal(probabilities([[1e300, 0.0, -1e300]], 0.5), [[1.0, 0.0, 0.0]])


@pytest.mark.parametrize("coverage", [0.01, 0.3, 0.5, 0.9, 0.95, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 10, 200])
def test_the_threshold_is_the_highest_that_covers_enough(coverage, count):
    confidence = np.random.default_rng(count).choice(np.linspace(0.3, 1, 40), count)  # with ties
    enough = [value for value in confidence if np.mean(confidence >= value) >= coverage - 1e-12]
    assert abstain_threshold(confidence, coverage) == max(enough)


@pytest.mark.parametrize("coverage", [0, -0.1, 1.1, float("nan")])
def test_a_coverage_that_is_no_share_is_an_error(coverage):
    with pytest.raises(ValueError, match="coverage is"):
        abstain_threshold([0.5], coverage)


@pytest.mark.parametrize("confidence", [[], [0.5, np.nan]])
def test_a_threshold_needs_finite_confidences(confidence):
    with pytest.raises(ValueError, match="expected at least one, and all of them finite"):
        abstain_threshold(confidence, 0.9)


def test_a_calibration_is_kept_in_the_config_and_leaves_the_rest(tmp_path):
    WideResNetConfig(num_labels=4, depth=10).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = json.loads((tmp_path / "config.json").read_text())
    logits, labels = noisy_logits(3.0)
    calibration = calibrate(logits, labels, 0.8)
    written = write_calibration(tmp_path, calibration)
    calibration = dataclasses.replace(calibration, weights=hashlib.sha256(b"weights").hexdigest())
    assert written == calibration
    after = json.loads((tmp_path / "config.json").read_text())
    assert after == before | {"calibration": dataclasses.asdict(calibration)}
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.calibration == dataclasses.asdict(calibration)
    assert Calibration.of(config) == calibration
    config.save_pretrained(tmp_path / "again")
    assert Calibration.of(AutoConfig.from_pretrained(tmp_path / "again")) == calibration


def test_calibration_has_the_stated_shape_and_coverage():
    logits, labels = noisy_logits(3.0)
    calibration = calibrate(logits, labels, 0.8)
    assert calibration.coverage == 0.8
    confidence = probabilities(logits, calibration.temperature).max(-1)
    assert np.mean(confidence >= calibration.abstain_below) == 0.8
