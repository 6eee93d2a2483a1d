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
@pytest.mark.parametrize(
    ("arguments", "of_student", "of_teacher"),
    [({}, "weak", "weak_2"), ({"student_view": "strong"}, "strong", "weak")],
)
def test_losses_and_gradients_are_those_of_the_formula(arguments, of_student, of_teacher, mode, model, batch):
    teacher, loss = make_model(seed=1).eval(), in_mode(MeanTeacher(**arguments), mode)
    assert set(loss.views) == {of_student, of_teacher}
    batch.views = {name: batch.views[name] for name in loss.views}
    labeled, student = predict(mode, model, batch.x, batch.views[of_student])
    target = teacher(pixel_values=batch.views[of_teacher]).logits.detach().softmax(-1)
    losses = loss(model, batch, teacher)
    assert_same(losses, cross_entropy(batch.y, labeled), squared_distance(student, target), model)


def test_equal_predictions_cost_nothing():
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=[[1, 2], [3, 0]], weak_2=[[11, 12], [2, -1]])
    assert MeanTeacher()(PixelModel(), batch, PixelModel()).unlabeled < 1e-30


def test_another_view_for_the_student_is_refused():
    with pytest.raises(ValueError, match=r"student_view.*'stong'.*Did you mean strong"):
        MeanTeacher(student_view="stong")
