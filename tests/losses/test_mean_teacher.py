from __future__ import annotations

import pytest

from hf_fixastep.losses import MeanTeacher
from tests.losses.conftest import (
    MODES,
    PixelModel,
    assert_same,
    cross_entropy,
    in_mode,
    make_model,
    pixel_batch,
    predict,
    squared_distance,
)


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradients_are_those_of_the_formula(mode, model, batch):
    teacher = make_model(seed=1).eval()
    labeled, student = predict(mode, model, batch.x, batch.views["weak"])
    target = teacher(pixel_values=batch.views["weak_2"]).logits.detach().softmax(-1)
    losses = in_mode(MeanTeacher(), mode)(model, batch, teacher)
    assert_same(losses, cross_entropy(batch.y, labeled), squared_distance(student, target), model)


def test_equal_predictions_cost_nothing():
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=[[1, 2], [3, 0]], weak_2=[[11, 12], [2, -1]])
    assert MeanTeacher()(PixelModel(), batch, PixelModel()).unlabeled < 1e-30
