from __future__ import annotations

import math

import pytest
import torch

from hf_fixastep.losses import PseudoLabel
from tests.losses.conftest import (
    CLASSES,
    MODES,
    PixelModel,
    assert_buffers,
    buffers_after,
    cross_entropy,
    forward,
    gradient,
    in_mode,
    pixel_batch,
)


THRESHOLD = 0.6


def main_forward(mode, model, batch):
    if mode == "joint":
        return forward(model, batch.x, batch.views["weak"])
    return *forward(model, batch.x), *forward(model, batch.views["weak"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("multiplier", [1.0, 2.5])
def test_losses_and_gradients_are_those_of_the_formula(mode, multiplier, model, batch):
    labeled, weak = main_forward(mode, model, batch)
    rows = [row.log_softmax(-1).max() for row in weak]  # log-probability of the likeliest class
    kept = [row for row in rows if row.exp() > THRESHOLD]
    assert 0 < len(kept) < len(rows)

    losses = in_mode(PseudoLabel(THRESHOLD, multiplier), mode)(model, batch, None)
    pairs = [
        (losses.labeled, cross_entropy(batch.y, labeled)),
        (losses.unlabeled, -multiplier * sum(kept) / 6),
    ]
    for value, expected in pairs:
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient(value, model), gradient(expected, model))
    assert losses.stats["mask_rate"] == len(kept) / 6


@pytest.mark.parametrize("mode", MODES)
def test_the_official_target_has_the_same_gradient(mode, model, batch):
    _, weak = main_forward(mode, model, batch)
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


def test_certain_predictions_cost_nothing():
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=[[1000, 0], [0, 1000]])
    losses = PseudoLabel()(PixelModel(), batch, None)
    assert losses.stats["mask_rate"] == 1
    assert losses.unlabeled == 0


def test_a_confidence_equal_to_the_threshold_does_not_count():
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=[[0, 0], [0, math.log(3)]])
    assert PseudoLabel(threshold=0.5)(PixelModel(), batch, None).stats["mask_rate"] == 0.5


def test_joint_mode_updates_the_running_statistics_with_labeled_and_weak_together(model, batch):
    expected = buffers_after(model, torch.cat([batch.x, batch.views["weak"]]))
    PseudoLabel()(model, batch, None)
    assert_buffers(model, expected)
