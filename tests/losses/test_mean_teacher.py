from __future__ import annotations

import pytest
import torch

from hf_fixastep.losses import MeanTeacher
from tests.losses.conftest import (
    MODES,
    PixelModel,
    assert_buffers,
    buffers_after,
    cross_entropy,
    forward,
    gradient,
    in_mode,
    make_model,
    pixel_batch,
)


@pytest.fixture
def teacher():
    return make_model(seed=1).eval()


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradients_are_those_of_the_formula(mode, model, teacher, batch):
    weak, weak_2 = batch.views["weak"], batch.views["weak_2"]
    if mode == "joint":
        labeled, student = forward(model, batch.x, weak)
    else:
        (labeled,), (student,) = forward(model, batch.x), forward(model, weak)
    target, prediction = teacher(pixel_values=weak_2).logits.detach().softmax(-1), student.softmax(-1)
    distance = sum((p - t) ** 2 for p, t in zip(prediction.flatten(), target.flatten(), strict=True))

    losses = in_mode(MeanTeacher(), mode)(model, batch, teacher)
    for value, expected in [
        (losses.labeled, cross_entropy(batch.y, labeled)),
        (losses.unlabeled, distance / (6 * 3)),
    ]:
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient(value, model), gradient(expected, model))


def test_equal_predictions_cost_nothing():
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=[[1, 2], [3, 0]], weak_2=[[11, 12], [2, -1]])
    assert MeanTeacher()(PixelModel(), batch, PixelModel()).unlabeled < 1e-30


@pytest.mark.parametrize("mode", MODES)
def test_the_teacher_gets_no_gradient(mode, model, teacher, batch):
    losses = in_mode(MeanTeacher(), mode)(model, batch, teacher)
    (losses.labeled + losses.unlabeled).backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("mode", MODES)
def test_the_teacher_keeps_its_buffers(mode, model, teacher, batch):
    expected = {name: buffer.clone() for name, buffer in teacher.named_buffers()}
    in_mode(MeanTeacher(), mode)(model, batch, teacher)
    assert_buffers(teacher, expected)


def test_joint_mode_updates_the_running_statistics_with_labeled_and_first_view_together(
    model, teacher, batch
):
    expected = buffers_after(model, torch.cat([batch.x, batch.views["weak"]]))
    MeanTeacher()(model, batch, teacher)
    assert_buffers(model, expected)


def test_a_missing_teacher_is_refused(model, batch):
    with pytest.raises(ValueError, match="MeanTeacher needs a teacher"):
        MeanTeacher()(model, batch, None)
