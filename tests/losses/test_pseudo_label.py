from __future__ import annotations

import math

import pytest
import torch

from hf_fixastep.losses import PseudoLabel
from tests.losses.conftest import (
    CLASSES,
    MODES,
    PixelModel,
    assert_same,
    cross_entropy,
    gradient,
    in_mode,
    pixel_batch,
    predict,
)


THRESHOLD = 0.6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("multiplier", [1.0, 2.5])
def test_losses_and_gradients_are_those_of_the_formula(mode, multiplier, model, batch):
    labeled, weak = predict(mode, model, batch.x, batch.views["weak"])
    rows = [row.log_softmax(-1).max() for row in weak]  # log-probability of the likeliest class
    kept = [row for row in rows if row.exp() > THRESHOLD]
    assert 0 < len(kept) < len(rows)

    losses = in_mode(PseudoLabel(THRESHOLD, multiplier), mode)(model, batch, None)
    assert_same(losses, cross_entropy(batch.y, labeled), -multiplier * sum(kept) / 6, model)
    assert losses.stats["mask_rate"] == len(kept) / 6


@pytest.mark.parametrize("mode", MODES)
def test_the_official_target_has_the_same_gradient(mode, model, batch):
    _, weak = predict(mode, model, batch.x, batch.views["weak"])
    official = torch.zeros((), dtype=weak.dtype)
    for row in weak:
        target = row.softmax(-1).detach()
        if target.max() > THRESHOLD:
            target = CLASSES * torch.eye(CLASSES, dtype=weak.dtype)[target.argmax()]
        official = official - (target * row.log_softmax(-1)).sum() / len(weak)

    unlabeled = in_mode(PseudoLabel(THRESHOLD, multiplier=None), mode)(model, batch, None).unlabeled
    torch.testing.assert_close(gradient(unlabeled, model), gradient(official, model))


def test_rows_below_the_threshold_cost_nothing_and_have_no_gradient(model, batch):
    unlabeled = PseudoLabel(threshold=1.0)(model, batch, None).unlabeled
    assert unlabeled == 0
    assert not gradient(unlabeled, model).any()


@pytest.mark.parametrize(
    ("threshold", "weak", "mask_rate", "expected"),
    [
        (0.95, [[1000, 0], [0, 1000]], 1, 0),  # certain
        (0.5, [[0, 0], [0, math.log(3)]], 0.5, math.log(4 / 3) / 2),  # equal to the threshold does not count
    ],
)
def test_cases_worked_out_by_hand(threshold, weak, mask_rate, expected):
    losses = PseudoLabel(threshold)(PixelModel(), pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=weak), None)
    assert losses.stats["mask_rate"] == mask_rate
    assert losses.unlabeled.item() == pytest.approx(expected)
