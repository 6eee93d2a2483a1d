from __future__ import annotations

import pytest

from hf_fixastep.losses import PiModel
from tests.losses.conftest import (
    MODES,
    PixelModel,
    assert_same,
    cross_entropy,
    forward,
    in_mode,
    pixel_batch,
    predict,
    squared_distance,
)


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradients_are_those_of_the_formula(mode, model, batch):
    labeled, first = predict(mode, model, batch.x, batch.views["weak"])
    (second,) = forward(model, batch.views["weak_2"])
    losses = in_mode(PiModel(), mode)(model, batch, None)
    distance = squared_distance(second, first.detach().softmax(-1))
    assert_same(losses, cross_entropy(batch.y, labeled), distance, model)


def test_equal_predictions_cost_nothing():
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=[[1, 2], [3, 0]], weak_2=[[11, 12], [2, -1]])
    assert PiModel()(PixelModel(), batch, None).unlabeled < 1e-30
