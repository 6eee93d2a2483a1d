from __future__ import annotations

import math

import pytest
import torch

from hf_fixastep.losses import TOOR
from hf_fixastep.losses.toor import transfer_weights
from tests.losses.conftest import (
    MODES,
    assert_same,
    cross_entropy,
    features,
    forward,
    gradient,
    in_mode,
    make_batch,
    make_model,
    predict,
    prepared,
)


AVERAGES = [
    [0.9, 0.0, 0.1],
    [0.3, 0.2, 0.2],
    [0.1, 0.7, 0.1],
    [0.4, 0.4, 0.2],
    [0.2, 0.2, 0.2],
    [0.0, 0.0, 0.61],
]


class Reversal(torch.autograd.Function):
    """Written apart from the loss's own, for the gradients of the whole."""

    @staticmethod
    def forward(ctx, rows, strength):
        ctx.strength = strength
        return rows.clone()

    @staticmethod
    def backward(ctx, slope):
        return slope * -ctx.strength, None


def discriminator_by_hand(loss, rows, generator):
    for layer in (loss.discriminator[0], loss.discriminator[1]):
        rows = (rows @ layer.weight.T + layer.bias).clamp_min(0)
        rows = rows * torch.empty_like(rows).bernoulli_(0.5, generator=generator) / 0.5
    return (rows @ loss.discriminator[2].weight.T + loss.discriminator[2].bias)[:, 0].sigmoid()


def weights_by_hand(domain, scores, known, recycling=0.5):
    domain = [d - min(domain) for d in domain]
    d, c = ([value / (sum(values) / len(values)) for value in values] for values in (domain, scores))
    var_d, var_c = (sum((v - sum(vs) / len(vs)) ** 2 for v in vs) / (len(vs) - 1) for vs in (d, c))
    weights = []
    for i in range(len(d)):
        weight = 1.0 if known[i] else (var_d * d[i] + var_c * c[i]) / (var_d + var_c)
        weights.append(0.0 if weight < recycling else weight)
    return weights


def make_loss(model, mode="joint", **settings):
    loss = in_mode(prepared(TOOR(hidden=16, **settings), model), mode)
    loss.averages.copy_(torch.tensor(AVERAGES))
    return loss


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradients_are_those_of_the_formula(mode, model, batch):
    batch.step = 99
    lengths = {"ramp_steps": 400, "adversarial_start": 50, "adversarial_steps": 100, "reversal_start": 90}
    loss = make_loss(model, mode, weight=3.0, reversal_steps=50, **lengths)
    logits, weak = predict(mode, model, batch.x, batch.views["weak"])
    _, second = predict(mode, model, batch.x, batch.views["weak_2"])
    if mode == "joint":
        labeled_rows, rows = features(model, batch.x, batch.views["weak"])
    else:
        (labeled_rows,), (rows,) = features(model, batch.x), features(model, batch.views["weak"])

    scores = [max(AVERAGES[row]) for row in batch.index]
    known = [score > 0.6 for score in scores]
    pi = (
        sum(((second[i].softmax(0) - weak[i].detach().softmax(0)) ** 2).mean() for i in range(6) if known[i])
        / 6
    )
    strength = 2 / (1 + math.exp(-10 * 9 / 50)) - 1
    generator = make_batch().generator
    unlabeled = discriminator_by_hand(loss, Reversal.apply(rows, strength), generator)
    labeled = discriminator_by_hand(loss, Reversal.apply(labeled_rows, strength), generator)
    weights = weights_by_hand(unlabeled.tolist(), scores, known)
    assert 0 in weights
    assert any(weight not in (0, 1) for weight in weights)
    adversarial = sum(-w * (1 - d).log() for w, d in zip(weights, unlabeled, strict=True)) / 6
    adversarial = adversarial + sum(-d.log() for d in labeled) / 4
    ramps = math.exp(-5 * (1 - 100 / 400) ** 2), math.exp(-5 * (1 - 50 / 100) ** 2)
    expected = 3.0 * ramps[0] * pi + ramps[1] * adversarial

    losses = loss(model, batch, None)
    assert_same(losses, cross_entropy(batch.y, logits), expected, model, loss)
    assert losses.stats["mask_rate"].item() == pytest.approx(sum(known) / 6)


def adversarial_gradients(model, batch, step):
    """Of the discriminator and of the model, from the adversarial term alone."""
    batch.step, batch.generator = step, make_batch().generator
    settings = {"adversarial_start": 0, "adversarial_steps": 1, "reversal_start": 10, "reversal_steps": 10}
    loss = make_loss(model, weight=0.0, **settings)
    unlabeled = loss(model, batch, None).unlabeled
    return gradient(unlabeled, loss), gradient(unlabeled, model)


def test_the_discriminator_learns_and_the_model_gets_its_gradient_turned_around(model, batch, monkeypatch):
    before, none = adversarial_gradients(model, batch, step=10)
    assert before.any()
    assert not none.any()
    again, reversed_gradient = adversarial_gradients(model, batch, step=15)
    torch.testing.assert_close(again, before)
    monkeypatch.setattr("hf_fixastep.losses.toor.ReverseGradient.apply", lambda rows, strength: rows)
    _, plain = adversarial_gradients(model, batch, step=15)
    assert plain.any()
    torch.testing.assert_close(reversed_gradient, -(2 / (1 + math.exp(-5)) - 1) * plain)


@pytest.mark.parametrize(
    ("step", "strength"), [(0, 0), (25_000, 0), (26_000, 0.46211716), (35_000, 0.9999092)]
)
def test_the_reversal_grows_as_in_the_official_code(step, strength):
    assert TOOR().reversal(step) == pytest.approx(strength)


def test_transfer_weights_are_those_of_a_case_worked_out_by_hand():
    # Relative scores: (0, 1, 2) of variance 2/3 and (1.5, 1, 0.5) of variance 1/6.
    weights = transfer_weights(torch.tensor([0.2, 0.4, 0.6]), torch.tensor([0.6, 0.4, 0.2]))
    torch.testing.assert_close(weights, torch.tensor([0.3, 1.0, 1.7]))


@pytest.mark.parametrize(("domain", "score"), [([0.5, 0.5], [0.0, 0.0]), ([0.5], [0.3])])
def test_rows_without_any_difference_give_no_nan(domain, score):
    assert transfer_weights(torch.tensor(domain), torch.tensor(score)).isfinite().all()


def test_only_images_of_known_classes_are_in_the_consistency_term(model, batch):
    batch.views["weak_2"].requires_grad_()
    loss = make_loss(make_model(batchnorm=False), ramp_steps=0)
    unlabeled = loss(make_model(batchnorm=False), batch, None).unlabeled
    (slope,) = torch.autograd.grad(unlabeled, batch.views["weak_2"])
    assert slope.flatten(1).any(1).tolist() == [max(AVERAGES[row]) > 0.6 for row in batch.index]


def test_running_predictions_go_halfway_to_each_new_one(model, batch):
    loss = make_loss(model)
    _, weak = forward(model, batch.x, batch.views["weak"])
    expected = torch.tensor(AVERAGES, dtype=torch.float64)
    for row, logits in zip(batch.index, weak, strict=True):
        expected[row] = 0.5 * logits.softmax(0).detach() + 0.5 * expected[row]
    loss(model, batch, None)
    torch.testing.assert_close(loss.averages, expected, atol=1e-6, rtol=0)


def test_an_image_that_comes_twice_in_a_step_takes_the_mean(model):
    loss = prepared(TOOR(), model, unlabeled_rows=2)
    loss.record(torch.tensor([1, 1]), torch.tensor([[1.0, 0, 0], [0, 0, 1.0]]))
    torch.testing.assert_close(loss.averages, torch.tensor([[0.0] * 3, [0.25, 0, 0.25]], dtype=torch.float64))


def test_same_views_and_a_term_of_weight_zero_cost_nothing(model, batch):
    batch.views["weak_2"] = batch.views["weak"]
    batch.step = -(10**6)  # the adversarial weight is 0
    loss = make_loss(model, "separate", adversarial_steps=1)
    assert loss(model, batch, None).unlabeled == 0
