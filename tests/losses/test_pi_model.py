from __future__ import annotations

import pytest
import torch

from hf_fixastep.losses import PiModel
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
def test_losses_and_gradients_are_those_of_the_formula(mode, model, batch):
    weak, weak_2 = batch.views["weak"], batch.views["weak_2"]
    if mode == "joint":
        labeled, first = forward(model, batch.x, weak)
    else:
        (labeled,), (first,) = forward(model, batch.x), forward(model, weak)
    (second,) = forward(model, weak_2)
    target, prediction = first.detach().softmax(-1), second.softmax(-1)
    distance = sum((p - t) ** 2 for p, t in zip(prediction.flatten(), target.flatten(), strict=True))

    losses = in_mode(PiModel(), mode)(model, batch, None)
    for value, expected in [
        (losses.labeled, cross_entropy(batch.y, labeled)),
        (losses.unlabeled, distance / (6 * 3)),
    ]:
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient(value, model), gradient(expected, model))


def test_equal_predictions_cost_nothing():
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=[[1, 2], [3, 0]], weak_2=[[11, 12], [2, -1]])
    assert PiModel()(PixelModel(), batch, None).unlabeled < 1e-30


@pytest.mark.parametrize("mode", MODES)
def test_only_the_second_view_carries_gradient(mode, plain_model, batch):
    views = [batch.views[name].requires_grad_() for name in PiModel.views]
    unlabeled = in_mode(PiModel(), mode)(plain_model, batch, None).unlabeled
    first, second = torch.autograd.grad(unlabeled, views, allow_unused=True)
    assert first is None or not first.any()
    assert second.any()


def test_joint_mode_updates_the_running_statistics_with_labeled_and_first_view_together(model, batch):
    expected = buffers_after(model, torch.cat([batch.x, batch.views["weak"]]))
    PiModel()(model, batch, None)
    assert_buffers(model, expected)
