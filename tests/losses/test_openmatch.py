from __future__ import annotations

import math

import pytest
import torch

from hf_fixastep.losses import OpenMatch
from hf_fixastep.losses.openmatch import entropy, log_answers
from tests.losses.conftest import (
    CLASSES,
    MODES,
    assert_same,
    cross_entropy,
    features,
    gradient,
    in_mode,
    make_batch,
    make_model,
    predict,
    prepared,
)


def probabilities(weight, rows):
    """[N, 2, K]: first outlier, then inlier, each class by itself."""
    values = rows @ weight.T
    answers = []
    for row in values:
        pairs = [torch.stack([row[c], row[CLASSES + c]]).softmax(0) for c in range(CLASSES)]
        answers.append(torch.stack(pairs, 1))
    return torch.stack(answers)


def one_vs_all_by_hand(y, answers):
    total = 0.0
    for target, (outlier, inlier) in zip(y, answers, strict=True):
        for k in range(CLASSES):
            worst = max(-outlier[c].log() for c in range(CLASSES) if c != k)
            total = total + target[k] * (-inlier[k].log() + worst)
    return total / len(y)


def entropy_by_hand(answers):
    return -sum(p * p.log() for p in answers.flatten()) / (len(answers) * CLASSES)


def inliers_by_hand(loss, teacher, images):
    predicted = teacher(pixel_values=images).logits.argmax(1)
    (rows,) = features(teacher, images)
    answers = probabilities(loss.averaged, rows.detach())
    return [float(answers[i, 0, predicted[i]]) < 0.5 for i in range(len(images))]


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradients_are_those_of_the_formula(mode, model, batch):
    teacher = make_model(seed=1).eval()
    loss = in_mode(prepared(OpenMatch(0.3, 0.7, threshold=0.7, warmup_steps=0, decay=1.0), model), mode)
    loss.averaged.copy_(torch.randn(loss.averaged.shape, generator=torch.Generator().manual_seed(5)))
    images = [batch.x, *(batch.views[name] for name in OpenMatch.views)]
    logits = predict(mode, model, *images)
    rows = features(model, *images) if mode == "joint" else [features(model, part)[0] for part in images]
    answers = [probabilities(loss.one_vs_all.weight, part) for part in rows]
    labeled = cross_entropy(batch.y, logits[0]) + one_vs_all_by_hand(batch.y, answers[0])
    consistency = (
        sum((a - b) ** 2 for a, b in zip(answers[1].flatten(), answers[2].flatten(), strict=True)) / 6
    )
    inliers = inliers_by_hand(loss, teacher, batch.views["weak"])
    counted = 0
    fixmatch = torch.zeros((), dtype=torch.float64)
    for inlier, weak, strong in zip(inliers, logits[1].detach(), logits[3], strict=True):
        confidence, pseudo_label = weak.softmax(-1).max(-1)
        if inlier and confidence >= 0.7:
            fixmatch = fixmatch - strong.log_softmax(-1)[pseudo_label]
            counted += 1
    assert 0 < counted < sum(inliers) < 6
    unlabeled = 0.3 * (entropy_by_hand(answers[1]) + entropy_by_hand(answers[2])) / 2 + 0.7 * consistency
    unlabeled = unlabeled + fixmatch / sum(inliers)

    losses = loss(model, batch, teacher)
    assert_same(losses, labeled, unlabeled, model, loss)
    assert losses.stats["mask_rate"].item() == pytest.approx(counted / 6)


def head(outlier_and_inlier):
    """A loss whose features are the answers' logits, which makes probabilities easy to write down."""
    loss = OpenMatch()
    loss.one_vs_all = torch.nn.Linear(2 * CLASSES, 2 * CLASSES, bias=False).double()
    loss.one_vs_all.weight.data = torch.eye(2 * CLASSES).double()
    outlier, inlier = outlier_and_inlier
    return loss, torch.tensor([[*outlier, *inlier]], dtype=torch.float64).log().requires_grad_()


def test_the_one_vs_all_loss_has_the_label_and_only_the_worst_other_class():
    loss, rows = head([(0.1, 0.7, 0.4), (0.9, 0.3, 0.6)])
    y = torch.tensor([[1.0, 0, 0]], dtype=torch.float64)
    logits = torch.tensor([[1000.0, 0, 0]], dtype=torch.float64)  # costs nothing
    value = loss.labeled_terms(logits, rows, y)
    # Class 2 is surer to be an inlier than 1.
    assert value.item() == pytest.approx(-math.log(0.9) - math.log(0.4))
    (slope,) = torch.autograd.grad(value, rows)
    assert (slope != 0).tolist() == [[True, False, True] * 2]


def test_a_mixed_label_counts_by_its_shares():
    loss, rows = head([(0.1, 0.7, 0.4), (0.9, 0.3, 0.6)])
    y = torch.tensor([[0.75, 0, 0.25]], dtype=torch.float64)
    value = loss.labeled_terms(torch.zeros(1, 3, dtype=torch.float64), rows, y).item() - math.log(3)
    first, last = -math.log(0.9) - math.log(0.4), -math.log(0.6) - math.log(0.1)
    assert value == pytest.approx(0.75 * first + 0.25 * last)


def test_the_entropy_is_that_of_each_answer():
    rows = torch.tensor([[0.5, 0.9, 0.5, 0.1]]).log()
    expected = (math.log(2) - 0.9 * math.log(0.9) - 0.1 * math.log(0.1)) / 2
    assert entropy(log_answers(rows)).item() == pytest.approx(expected)


def test_an_inlier_is_chosen_by_the_answer_of_the_predicted_class_alone(model):
    model.eval()
    images = make_batch(unlabeled=40).views["weak"]
    loss = prepared(OpenMatch(), model)
    predicted = model(pixel_values=images).logits.argmax(1)
    assert len(predicted.unique()) > 1
    # The classifier of class c says inlier, the others outlier; features are positive.
    for c in range(CLASSES):
        loss.averaged.zero_()
        loss.averaged[:CLASSES] = 1
        loss.averaged[c], loss.averaged[CLASSES + c] = 0, 1
        assert torch.equal(loss.outlier_score(model, images) < 0.5, predicted == c)


def test_without_an_inlier_there_is_no_fixmatch_term(model, batch):
    loss = prepared(OpenMatch(0.0, 0.0, warmup_steps=0, decay=1.0), model)
    loss.averaged.zero_()
    loss.averaged[:CLASSES] = 9
    losses = loss(model, batch, make_model(seed=1).eval())
    assert losses.unlabeled == 0
    assert losses.stats["mask_rate"] == 0
    assert not gradient(losses.unlabeled, model).any()


@pytest.mark.parametrize(("step", "forwards"), [(4, 3), (5, 4)])
def test_the_strong_view_waits_for_the_end_of_the_warmup(step, forwards, model, batch):
    batch.step = step
    losses = in_mode(prepared(OpenMatch(warmup_steps=5), model), "separate")(
        model, batch, make_model(seed=1).eval()
    )
    assert len(model.seen) == forwards
    assert ("mask_rate" in losses.stats) == (step >= 5)
    assert losses.unlabeled > 0


def test_answers_that_agree_and_are_certain_cost_nothing(model, batch):
    batch.views["weak_2"] = batch.views["weak"]
    loss = in_mode(prepared(OpenMatch(warmup_steps=9), model), "separate")
    loss.one_vs_all.weight.data[:CLASSES] = 0
    loss.one_vs_all.weight.data[CLASSES:] = 1e4  # features are positive
    assert loss(model, batch, make_model(seed=1).eval()).unlabeled.item() == pytest.approx(0, abs=1e-9)


def test_the_averaged_layer_follows_the_trained_one(model, batch):
    loss = prepared(OpenMatch(decay=0.75), model)
    old, new = loss.averaged.clone(), torch.ones_like(loss.averaged)
    loss.one_vs_all.weight.data.copy_(new)
    loss(model, batch, make_model(seed=1).eval())
    torch.testing.assert_close(loss.averaged, 0.75 * old + 0.25 * new)
