from __future__ import annotations

import math

import pytest
import torch

from hf_fixastep.losses import FixMatch
from tests.losses.conftest import (
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_losses_and_gradients_are_those_of_the_formula(mode, temperature, model, batch):
    weak, strong = batch.views["weak"], batch.views["strong"]
    if mode == "joint":
        labeled, weak, strong = forward(model, batch.x, weak, strong)
    else:
        (labeled,), (weak,), (strong,) = forward(model, batch.x), forward(model, weak), forward(model, strong)
    total, confident = torch.zeros((), dtype=weak.dtype), 0
    for target, row in zip(weak.detach(), strong, strict=True):
        confidence, pseudo_label = (target / temperature).softmax(-1).max(-1)
        if confidence >= 0.7:
            total = total - row.log_softmax(-1)[pseudo_label]
            confident += 1
    assert 0 < confident < 6

    losses = in_mode(FixMatch(0.7, temperature), mode)(model, batch, None)
    for value, expected in [(losses.labeled, cross_entropy(batch.y, labeled)), (losses.unlabeled, total / 6)]:
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient(value, model), gradient(expected, model))
    assert losses.stats["mask_rate"] == confident / 6


def test_without_a_confident_row_the_loss_and_its_gradient_are_zero(model, batch):
    unlabeled = FixMatch(threshold=1.0)(model, batch, None).unlabeled
    assert unlabeled == 0
    assert not gradient(unlabeled, model).any()


def test_the_divisor_is_the_number_of_unlabeled_rows():
    weak = [[1000, 0], [0, 0], [0, 0], [0, 0]]  # one confident row of four
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=weak, strong=[[0, 0]] * 4)
    assert FixMatch()(PixelModel(), batch, None).unlabeled.item() == pytest.approx(math.log(2) / 4)


def test_a_confidence_equal_to_the_threshold_counts():
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=[[0, 0]], strong=[[0, 0]])
    assert FixMatch(threshold=0.5)(PixelModel(), batch, None).stats["mask_rate"] == 1


def test_certain_and_agreeing_predictions_cost_nothing():
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=[[1000, 0]], strong=[[2000, 0]])
    losses = FixMatch()(PixelModel(), batch, None)
    assert losses.stats["mask_rate"] == 1
    assert losses.unlabeled == 0


@pytest.mark.parametrize("mode", MODES)
def test_only_the_strong_view_carries_gradient(mode, plain_model, batch):
    views = [batch.views[name].requires_grad_() for name in FixMatch.views]
    unlabeled = in_mode(FixMatch(threshold=0), mode)(plain_model, batch, None).unlabeled
    weak, strong = torch.autograd.grad(unlabeled, views, allow_unused=True)
    assert weak is None or not weak.any()
    assert strong.any()


def test_separate_mode_keeps_no_graph_of_the_weak_view(model, batch):
    in_mode(FixMatch(), "separate")(model, batch, None)
    graded = {
        name: kept
        for name in FixMatch.views
        for seen, kept in zip(model.seen, model.graded, strict=True)
        if torch.equal(seen, batch.views[name])
    }
    assert graded == {"weak": False, "strong": True}


def test_joint_mode_updates_the_running_statistics_with_all_rows_together(model, batch):
    expected = buffers_after(model, torch.cat([batch.x, batch.views["strong"], batch.views["weak"]]))
    FixMatch()(model, batch, None)
    assert_buffers(model, expected)
