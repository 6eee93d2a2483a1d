from __future__ import annotations

import copy

import pytest
import torch

from hf_fixastep.losses import MixMatch
from hf_fixastep.losses.mixmatch import interleave
from tests.losses.conftest import (
    MODES,
    PixelModel,
    assert_buffers,
    assert_same,
    buffers_after,
    cross_entropy,
    forward,
    guess_by_hand,
    in_mode,
    make_batch,
    mix_by_hand,
    pixel_batch,
    predict,
    squared_distance,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("per_example", [True, False])
@pytest.mark.parametrize("unlabeled_rows", [4, 7])
def test_losses_and_gradients_are_those_of_the_formula(mode, per_example, unlabeled_rows, model):
    batch = make_batch(unlabeled=unlabeled_rows)
    images, y = mix_by_hand(model, batch, 0.6, 0.8, per_example)
    labeled, unlabeled = predict(mode, model, images[:4], images[4:])
    losses = in_mode(MixMatch(0.6, 0.8, per_example), mode)(model, batch, None)
    assert_same(losses, cross_entropy(y[:4], labeled), squared_distance(unlabeled, y[4:]), model)


def test_equal_images_with_certain_and_right_predictions_cost_nothing():
    batch = pixel_batch(x=[[1000, 0]] * 2, y=[[1, 0]] * 2, weak=[[1000, 0]] * 2, weak_2=[[1000, 0]] * 2)
    losses = MixMatch()(PixelModel(), batch, None)
    assert losses.labeled == 0
    assert losses.unlabeled == 0


def test_guesses_use_the_statistics_of_their_batch(model, batch):
    views = [batch.views["weak"], batch.views["weak_2"]]
    guess = MixMatch().guess(model, views)
    torch.testing.assert_close(guess, guess_by_hand(model, *views, 0.5))
    assert (guess - MixMatch().guess(copy.deepcopy(model).eval(), views)).abs().max() > 1e-3


def test_the_official_guesses_update_the_running_statistics_one_view_after_the_other(model, batch):
    views = [batch.views["weak"], batch.views["weak_2"]]
    expected = buffers_after(model, *views)
    MixMatch(update_statistics=True).guess(model, views)
    assert_buffers(model, expected)


def test_separate_mode_keeps_guesses_out_of_the_running_statistics_whatever_the_setting(model, batch):
    expected = buffers_after(model)
    loss = in_mode(MixMatch(update_statistics=True), "separate")
    loss.guess(model, [batch.views["weak"], batch.views["weak_2"]])
    assert_buffers(model, expected)


def test_interleaving_swaps_the_parts_of_the_first_chunk_with_those_of_the_others():
    chunks = [torch.arange(7) + start for start in (0, 10, 20)]
    assert [chunk.tolist() for chunk in interleave(chunks)] == [
        [0, 1, 12, 13, 24, 25, 26],
        [10, 11, 2, 3, 14, 15, 16],
        [20, 21, 22, 23, 4, 5, 6],
    ]


@pytest.mark.parametrize(("count", "rows"), [(3, 7), (3, 2), (5, 8), (1, 4)])
def test_interleaving_twice_changes_nothing(count, rows):
    chunks = [torch.rand(rows, 2, generator=torch.Generator().manual_seed(k)) for k in range(count)]
    for chunk, restored in zip(chunks, interleave(interleave(chunks)), strict=True):
        assert torch.equal(chunk, restored)


def test_the_interleaved_loss_is_that_of_three_forwards_of_swapped_rows(model):
    batch = make_batch(labeled=4, unlabeled=4)
    images, y = mix_by_hand(model, batch, 0.5, 0.75, per_example=True)
    # Parts of 1, 1 and 2 rows: what each forward gets, as rows of the pool, worked out on paper.
    forwards = [[0, 5, 10, 11], [4, 1, 6, 7], [8, 9, 2, 3]]
    expected_buffers = buffers_after(model, *(images[rows] for rows in forwards))
    logits = {}
    for rows in forwards:
        logits.update(zip(rows, forward(model, images[rows])[0], strict=True))
    pooled = torch.stack([logits[row] for row in range(12)])

    losses = MixMatch(interleave=True)(model, batch, None)
    assert_same(losses, cross_entropy(y[:4], pooled[:4]), squared_distance(pooled[4:], y[4:]), model)
    for name, value in expected_buffers.items():
        torch.testing.assert_close(dict(model.named_buffers())[name], value)


def test_interleaving_changes_nothing_in_separate_mode(model, batch):
    values = []
    for setting in (False, True):
        losses = in_mode(MixMatch(interleave=setting), "separate")(model, make_batch(), None)
        values.append(torch.stack([losses.labeled, losses.unlabeled]))
    assert torch.equal(*values)


def test_interleaving_refuses_rows_that_do_not_fill_the_chunks(model):
    with pytest.raises(ValueError, match="Interleaving 14 rows needs a multiple of the labeled batch's 4"):
        MixMatch(interleave=True)(model, make_batch(labeled=4, unlabeled=5), None)
