from __future__ import annotations

import torch

from hf_fixastep.losses import Supervised
from tests.losses.conftest import (
    PixelModel,
    assert_buffers,
    buffers_after,
    cross_entropy,
    forward,
    gradient,
    pixel_batch,
)


def test_the_labeled_loss_is_the_mean_cross_entropy_of_the_labeled_images(model, batch):
    expected = cross_entropy(batch.y, *forward(model, batch.x))
    labeled = Supervised()(model, batch, None).labeled
    torch.testing.assert_close(labeled, expected)
    torch.testing.assert_close(gradient(labeled, model), gradient(expected, model))


def test_there_is_no_unlabeled_loss(model, batch):
    assert Supervised()(model, batch, None).unlabeled is None


def test_certain_and_right_predictions_cost_nothing():
    batch = pixel_batch(x=[[1000, 0], [0, 1000]], y=[[1, 0], [0, 1]])
    assert Supervised()(PixelModel(), batch, None).labeled == 0


def test_the_labeled_images_update_the_running_statistics(model, batch):
    expected = buffers_after(model, batch.x)
    Supervised()(model, batch, None)
    assert_buffers(model, expected)
