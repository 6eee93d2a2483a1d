from __future__ import annotations

import math

import pytest
import torch

from hf_fixastep.losses import Supervised
from hf_fixastep.step.mixing import mixing_shares
from tests.losses.conftest import PixelModel, cross_entropy, forward, gradient, pixel_batch


def test_the_labeled_loss_is_the_mean_cross_entropy_and_there_is_no_other(model, batch):
    expected = cross_entropy(batch.y, *forward(model, batch.x))
    losses = Supervised()(model, batch, None)
    torch.testing.assert_close(losses.labeled, expected)
    torch.testing.assert_close(gradient(losses.labeled, model), gradient(expected, model))
    assert losses.unlabeled is None


def test_certain_and_right_predictions_cost_nothing():
    batch = pixel_batch(x=[[1000, 0], [0, 1000]], y=[[1, 0], [0, 1]])
    assert Supervised()(PixelModel(), batch, None).labeled == 0


def test_mixup_mixes_images_and_labels_of_the_batch_with_each_other():
    batch = pixel_batch(x=[[0.0, 1, 2], [3, 5, 1], [2, 0, 0]], y=[[1, 0, 0], [0, 1, 0], [0, 0, 1]])
    generator = torch.Generator().manual_seed(2)
    partners = torch.randperm(3, generator=generator)
    shares = mixing_shares(3, 1.0, generator).double()[:, None]
    x, y = (shares * each + (1 - shares) * each[partners] for each in (batch.x.flatten(1), batch.y))
    torch.testing.assert_close(Supervised(mixup=1.0)(PixelModel(), batch, None).labeled, cross_entropy(y, x))
    assert len(set(shares.flatten().tolist())) == 3


def test_class_weights_weigh_the_classes_and_their_scale_does_not_matter():
    logits, y = [[0.0, 1, 2], [3, 5, 1], [2, 0, 0]], [[1, 0, 0], [0.25, 0.75, 0], [0, 0, 1]]
    batch, ratio = pixel_batch(x=logits, y=y), [0.5, 2.0, 4.0]
    total, weight = 0.0, 0.0
    for row, target in zip(logits, y, strict=True):
        for c in range(3):
            total -= ratio[c] * target[c] * (row[c] - math.log(sum(math.exp(value) for value in row)))
            weight += ratio[c] * target[c]
    for scale in (1, 100):
        loss = Supervised(class_weights=[scale * each for each in ratio]).double()
        assert loss(PixelModel(), batch, None).labeled.item() == pytest.approx(total / weight, abs=1e-6)
