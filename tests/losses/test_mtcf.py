from __future__ import annotations

import pytest
import torch

from hf_fixastep.losses import MTCF
from hf_fixastep.losses.mtcf import otsu
from tests.losses.conftest import (
    MODES,
    assert_buffers,
    assert_same,
    buffers_after,
    cross_entropy,
    features,
    gradient,
    in_mode,
    make_batch,
    mix_by_hand,
    predict,
    prepared,
    squared_distance,
)


SCORES = [0.1, 0.9, 0.2, 0.8, 0.15, 0.7]  # by row of the unlabeled set; Otsu's upper group is 0.7, 0.8, 0.9


def with_scores(loss, scores):
    loss.history.copy_(torch.tensor(scores)[:, None].expand_as(loss.history))
    loss.visited.fill_(loss.visits)
    return loss


def domain_by_hand(loss, model, batch, mode, scores):
    images = [batch.x, batch.views["weak"]]
    rows = features(model, *images) if mode == "joint" else [features(model, part)[0] for part in images]
    targets = [1.0] * len(batch.x) + [scores[row] for row in batch.index]
    probabilities = [
        (row @ loss.domain.weight[0] + loss.domain.bias[0]).sigmoid() for part in rows for row in part
    ]
    terms = [-t * p.log() - (1 - t) * (1 - p).log() for t, p in zip(targets, probabilities, strict=True)]
    return sum(terms) / len(terms), probabilities[len(batch.x) :]


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradients_are_those_of_the_formula(mode, model, batch):
    loss = with_scores(in_mode(prepared(MTCF(0.6, 0.8, 7, ramp_steps=10), model), mode), SCORES)
    batch.step = 7
    domain, _ = domain_by_hand(loss, model, batch, mode, SCORES)
    # The batch has the rows 5, 4, 3, 2, 1, 0; the three best, from the top, are those of the rows 1, 3 and 5.
    images, y = mix_by_hand(model, batch, 0.6, 0.8, rows=[4, 2, 0, 4, 2, 0])
    labeled, unlabeled = predict(mode, model, images[:4], images[4:])
    losses = loss(model, batch, None)
    expected = cross_entropy(y[:4], labeled) + domain, squared_distance(unlabeled, y[4:]) / 10
    assert_same(losses, *expected, model, loss)
    assert losses.stats["mask_rate"] == 0.5


@pytest.mark.parametrize("mode", MODES)
def test_the_first_stage_trains_the_domain_head_and_the_features_alone(mode, model, batch):
    loss = in_mode(prepared(MTCF(warmup_steps=1), model), mode)
    domain, probabilities = domain_by_hand(loss, model, batch, mode, [0.0] * 6)
    losses = loss(model, batch, None)
    assert losses.unlabeled is None
    torch.testing.assert_close(losses.labeled, domain)
    torch.testing.assert_close(gradient(losses.labeled, model), gradient(domain, model))
    assert not gradient(losses.labeled, model.head).any()
    recorded = loss.history[batch.index, 0]
    torch.testing.assert_close(recorded, torch.stack(probabilities).detach(), atol=1e-6, rtol=0)
    assert loss.visited.tolist() == [1] * 6


def test_a_score_is_the_mean_of_the_last_visits_and_zero_before(model):
    loss = prepared(MTCF(visits=3), model, unlabeled_rows=2)
    seen = []
    for value in (0.1, 0.9, 0.5, 0.7, 0.3):
        loss.record(torch.tensor([1]), torch.tensor([value]))
        seen.append(loss.scores().tolist())
    assert [score for _, score in seen] == pytest.approx([0, 0, 0.5, 0.7, 0.5])
    assert [score for score, _ in seen] == [0] * 5  # an image that was not visited keeps its score


def test_an_unvisited_score_does_not_change(model, batch):
    loss = with_scores(prepared(MTCF(warmup_steps=0), model, unlabeled_rows=8), [0.2, 0.9] * 4)
    before = loss.scores().clone()
    loss(model, batch, None)
    assert torch.equal(loss.scores()[6:], before[6:])
    assert (loss.scores()[:6] != before[:6]).all()


def test_an_image_that_comes_twice_in_a_step_is_one_visit_with_the_mean(model):
    loss = prepared(MTCF(visits=2), model, unlabeled_rows=3)
    loss.record(torch.tensor([2, 0, 2]), torch.tensor([0.2, 0.5, 0.6]))
    torch.testing.assert_close(loss.history[:, 0], torch.tensor([0.5, 0.0, 0.4], dtype=torch.float64))
    assert loss.visited.tolist() == [1, 0, 1]


def brute_force(scores):
    """The smallest score of the upper group, over every way to cut the set in two; all if there is none."""
    best, cut = 0.0, min(scores)
    for threshold in sorted(set(scores))[1:]:
        upper, lower = [s for s in scores if s >= threshold], [s for s in scores if s < threshold]
        means = sum(upper) / len(upper), sum(lower) / len(lower)
        between = len(upper) * len(lower) * (means[0] - means[1]) ** 2
        if between > best:
            best, cut = between, threshold
    return cut


@pytest.mark.parametrize("seed", range(20))
def test_otsu_is_what_a_search_over_all_cuts_finds(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(50, generator=generator, dtype=torch.float64)
    scores[: 5 * (seed % 5)] *= 0.1
    if seed % 2:
        scores = (scores * 8).round() / 8  # many equal ones
    assert otsu(scores).item() == brute_force(scores.tolist())


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_otsu_keeps_everything_if_all_scores_are_equal(value):
    scores = torch.full((7,), value)
    assert (scores >= otsu(scores)).all()


def test_otsu_of_a_single_score_keeps_it():
    assert otsu(torch.tensor([0.4])) == 0.4


def test_the_threshold_is_chosen_at_the_start_of_each_epoch(model, batch):
    loss = with_scores(prepared(MTCF(warmup_steps=2, epoch_steps=3), model), SCORES)
    found = []
    for step in range(2, 9):
        with_scores(loss, [score / step for score in SCORES])
        batch.step, batch.generator = step, make_batch().generator
        loss(model, batch, None)
        found.append(loss.threshold.item())
    assert found == pytest.approx([0.7 / 2] * 3 + [0.7 / 5] * 3 + [0.7 / 8], abs=1e-6)


@pytest.mark.parametrize(
    ("threshold", "rows"),
    [(0.75, [1, 3, 1, 3, 1, 3]), (0.0, [1, 3, 5, 2, 4, 0]), (0.95, [1] * 6)],
    ids=["two chosen", "all chosen", "none chosen: the best"],
)
def test_the_unlabeled_batch_is_filled_with_chosen_rows(threshold, rows, model):
    loss = prepared(MTCF(), model)
    loss.threshold.fill_(threshold)
    assert loss.chosen(torch.tensor(SCORES, dtype=torch.float64)).tolist() == rows


def test_the_domain_forward_leaves_every_buffer_as_it_was(model, batch):
    expected = buffers_after(model)
    prepared(MTCF(), model)(model, batch, None)
    assert_buffers(model, expected)


def test_the_outlier_score_is_what_the_domain_head_does_not_believe(model, batch):
    loss = prepared(MTCF(), model)
    model.eval()
    (rows,) = features(model, batch.x)
    expected = 1 / (1 + (rows @ loss.domain.weight[0] + loss.domain.bias).exp())
    torch.testing.assert_close(loss.outlier_score(model, batch.x), expected.detach())
