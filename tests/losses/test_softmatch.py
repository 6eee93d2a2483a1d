from __future__ import annotations

import math

import pytest
import torch

from hf_fixastep.losses import SoftMatch
from tests.losses.conftest import (
    CLASSES,
    MODES,
    PixelModel,
    cross_entropy,
    gradient,
    in_mode,
    make_batch,
    make_model,
    pixel_batch,
    predict,
    prepared,
)


@pytest.mark.parametrize("mode", MODES)
def test_three_steps_are_those_of_a_literal_loop(mode):
    loss = in_mode(prepared(SoftMatch(momentum=0.25, deviations=3.0), make_model()), mode)
    average, mean, variance = [1 / CLASSES] * CLASSES, 1 / CLASSES, 1.0
    for seed in range(3):
        model, batch = make_model(seed=seed), make_batch()
        labeled, weak, strong = predict(mode, model, batch.x, batch.views["weak"], batch.views["strong"])
        rows = weak.detach().softmax(-1).tolist()
        for c in range(CLASSES):
            average[c] = 0.25 * average[c] + 0.75 * sum(row[c] for row in rows) / 6
        aligned = [[row[c] * (1 / CLASSES) / average[c] for c in range(CLASSES)] for row in rows]
        confidence = [max(row) / sum(row) for row in aligned]
        center = sum(confidence) / 6
        mean = 0.25 * mean + 0.75 * center
        variance = 0.25 * variance + 0.75 * sum((each - center) ** 2 for each in confidence) / 5
        weights = [1.0 if c > mean else math.exp(-((c - mean) ** 2) / (2 * variance / 9)) for c in confidence]
        total = torch.zeros((), dtype=torch.float64)
        for weight, row, target in zip(weights, strong, rows, strict=True):
            total = total - weight * row.log_softmax(-1)[target.index(max(target))]
        losses = loss(model, batch, None)
        for value, expected in [
            (losses.labeled, cross_entropy(batch.y, labeled)),
            (losses.unlabeled, total / 6),
        ]:
            # The running averages come from float32 and have a tiny constant.
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(
                gradient(value, model), gradient(expected, model), rtol=1e-4, atol=1e-5
            )
        assert losses.stats["mask_rate"].item() == pytest.approx(sum(weights) / 6, abs=1e-5)
        assert loss.prediction.tolist() == pytest.approx(average, abs=1e-6)
        assert (loss.mean.item(), loss.variance.item()) == pytest.approx((mean, variance), abs=1e-5)
    assert min(weights) < 0.5
    assert max(weights) == 1


def test_certain_and_agreeing_predictions_cost_nothing():
    rows = [[1000, 0, 0], [0, 1000, 0], [0, 0, 1000]]
    batch = pixel_batch(x=[[0, 0, 0]], y=[[1, 0, 0]], weak=rows, strong=rows)
    batch.index = torch.arange(3)
    losses = prepared(SoftMatch(), make_model())(PixelModel(), batch, None)
    assert losses.unlabeled == 0
    assert losses.stats["mask_rate"] == 1


def test_weights_of_a_case_worked_out_by_hand():
    loss = prepared(SoftMatch(), make_model())
    loss.mean.fill_(0.8)
    loss.variance.fill_(0.04)
    rows = torch.tensor([[0.9, 0.1, 0.0], [0.6, 0.2, 0.2], [0.4, 0.4, 0.2]], dtype=torch.float64)
    # One and two deviations of 0.2 below the mean, each of which counts as two.
    assert loss.weights(rows).tolist() == pytest.approx([1, math.exp(-2), math.exp(-8)], abs=1e-6)


def test_alignment_lifts_the_confidence_in_rare_classes_and_leaves_the_pseudo_label():
    loss = prepared(SoftMatch(momentum=1.0), make_model())  # nothing moves
    loss.prediction.copy_(torch.tensor([0.6, 0.3, 0.1]))
    rows = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.0, 0.4]], dtype=torch.float64)
    # Divided by the mean prediction: 1, 1, 1 and 1, 0, 4.
    assert loss.confidence(rows).tolist() == pytest.approx([1 / 3, 4 / 5], abs=1e-4)
    weak = rows.clamp_min(1e-9).log().tolist()
    batch = pixel_batch(x=[[0, 0, 0]], y=[[1, 0, 0]], weak=weak, strong=[[1000, 0, 0]] * 2)
    batch.index = torch.arange(2)
    assert loss(PixelModel(), batch, None).unlabeled == 0  # class 0 is the pseudo-label of both


def test_a_single_image_has_no_variance():
    loss = prepared(SoftMatch(momentum=0.75), make_model())
    loss.update(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64))
    assert loss.variance.item() == pytest.approx(0.75)


def test_confidences_that_are_all_equal_have_the_weight_one():
    loss = prepared(SoftMatch(momentum=0.0), make_model())
    rows = torch.tensor([[0.5, 0.3, 0.2]] * 4, dtype=torch.float64)
    loss.update(rows)
    assert loss.weights(rows).tolist() == [1] * 4
