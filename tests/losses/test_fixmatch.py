from __future__ import annotations

import math

import pytest
import torch

from hf_fixastep.losses import FixMatch
from tests.losses.conftest import (
    MODES,
    PixelModel,
    assert_same,
    cross_entropy,
    gradient,
    in_mode,
    pixel_batch,
    predict,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_losses_and_gradients_are_those_of_the_formula(mode, temperature, model, batch):
    labeled, weak, strong = predict(mode, model, batch.x, batch.views["weak"], batch.views["strong"])
    total, confident = torch.zeros((), dtype=weak.dtype), 0
    for target, row in zip(weak.detach(), strong, strict=True):
        confidence, pseudo_label = (target / temperature).softmax(-1).max(-1)
        if confidence >= 0.7:
            total = total - (row / temperature).log_softmax(-1)[pseudo_label]
            confident += 1
    assert 0 < confident < 6

    losses = in_mode(FixMatch(0.7, temperature), mode)(model, batch, None)
    assert_same(losses, cross_entropy(batch.y, labeled), total / 6, model)
    assert losses.stats["mask_rate"] == confident / 6


def test_without_a_confident_row_the_loss_and_its_gradient_are_zero(model, batch):
    unlabeled = FixMatch(threshold=1.0)(model, batch, None).unlabeled
    assert unlabeled == 0
    assert not gradient(unlabeled, model).any()


@pytest.mark.parametrize(
    ("threshold", "weak", "strong", "mask_rate", "expected"),
    [
        (0.95, [[1000, 0], [0, 0], [0, 0], [0, 0]], [[0, 0]] * 4, 0.25, math.log(2) / 4),  # over all rows
        (0.5, [[0, 0]], [[0, 0]], 1, math.log(2)),  # a confidence equal to the threshold counts
        (0.95, [[1000, 0]], [[2000, 0]], 1, 0),  # certain and agreeing
    ],
)
def test_cases_worked_out_by_hand(threshold, weak, strong, mask_rate, expected):
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=weak, strong=strong)
    losses = FixMatch(threshold)(PixelModel(), batch, None)
    assert losses.stats["mask_rate"] == mask_rate
    assert losses.unlabeled.item() == pytest.approx(expected)


def test_separate_mode_keeps_no_graph_of_the_weak_view(model, batch):
    in_mode(FixMatch(), "separate")(model, batch, None)
    graded = {
        name: kept
        for name in FixMatch.views
        for seen, kept in zip(model.seen, model.graded, strict=True)
        if torch.equal(seen, batch.views[name])
    }
    assert graded == {"weak": False, "strong": True}
