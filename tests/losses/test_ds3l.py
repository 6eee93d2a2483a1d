from __future__ import annotations

import copy

import pytest
import torch

from hf_fixastep import WideResNetConfig, WideResNetForImageClassification
from hf_fixastep.losses import DS3L
from hf_fixastep.losses.ds3l import weighted_mean
from tests.losses.conftest import (
    MODES,
    assert_same,
    cross_entropy,
    forward,
    gradient,
    in_mode,
    make_batch,
    make_model,
    predict,
    prepared,
)
from tests.short_runs import tiny_vit


WEIGHT = 3.0


def net_by_hand(loss, probabilities):
    first, last = loss.net[0], loss.net[2]
    hidden = (probabilities @ first.weight.T + first.bias).clamp_min(0)
    return (1 / (1 + (-(hidden @ last.weight.T + last.bias)).exp()))[:, 0]


def terms(loss, model, batch, mode):
    """Logits of the labeled rows, the change of each unlabeled row, and its weight, in this model."""
    labeled, first = predict(mode, model, batch.x, batch.views["weak"])
    _, second = predict(mode, model, batch.x, batch.views["weak_2"])
    change = ((second.softmax(1) - first.detach().softmax(1)) ** 2).sum(1) / first.shape[1]
    return labeled, change, net_by_hand(loss, first.softmax(1))


def loss_ahead(loss, model, batch, mode):
    """The labeled loss after one step of SGD, on a copy of the model; a plain number."""
    model = copy.deepcopy(model)
    labeled, change, weights = terms(loss, model, batch, mode)
    inner = cross_entropy(batch.y, labeled) * 4 / 10 + WEIGHT * (weights * change).sum() / weights.sum()
    slopes = torch.autograd.grad(inner, list(model.parameters()))
    with torch.no_grad():
        for parameter, slope in zip(model.parameters(), slopes, strict=True):
            parameter -= loss.virtual_rate * slope
        (logits,) = forward(model, batch.x)
        return float(cross_entropy(batch.y, logits))


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_of_the_net_is_that_of_finite_differences(mode, model, batch):
    batch.weight = WEIGHT
    loss = in_mode(prepared(DS3L(virtual_rate=0.5, hidden=4), model), mode)
    losses = loss(model, batch, None)
    assert losses.stats["loss/ahead"].item() == pytest.approx(loss_ahead(loss, model, batch, mode), rel=1e-10)
    found = torch.autograd.grad(losses.labeled, list(loss.parameters()), retain_graph=True)
    size = 1e-5
    for parameter, slopes in zip(loss.parameters(), found, strict=True):
        for position in range(parameter.numel()):
            values = []
            for sign in (1, -1):
                moved = copy.deepcopy(loss)
                dict(moved.named_parameters())[name_of(loss, parameter)].data.view(-1)[position] += (
                    sign * size
                )
                values.append(loss_ahead(moved, model, batch, mode))
            numeric = (values[0] - values[1]) / (2 * size)
            assert slopes.view(-1)[position].item() == pytest.approx(numeric, rel=1e-4, abs=1e-9)
    assert max(float(slopes.abs().max()) for slopes in found) > 1e-5


def name_of(loss, parameter):
    return next(name for name, p in loss.named_parameters() if p is parameter)


@pytest.mark.parametrize("mode", MODES)
def test_losses_and_gradients_of_the_model_are_those_of_the_formula(mode, model, batch):
    loss = in_mode(prepared(DS3L(), model), mode)
    labeled, change, weights = terms(loss, model, batch, mode)
    weights = weights.detach()
    losses = loss(model, batch, None)
    consistency = sum(w * c for w, c in zip(weights, change, strict=True)) / sum(weights)
    assert_same(losses, cross_entropy(batch.y, labeled), consistency, model)


def test_the_net_learns_nothing_from_the_unlabeled_loss(model, batch):
    loss = prepared(DS3L(), model)
    assert not gradient(loss(model, batch, None).unlabeled, loss).any()


def test_the_net_learns_nothing_while_the_unlabeled_loss_has_no_weight(model, batch):
    batch.weight = 0.0
    loss = prepared(DS3L(), model)
    assert not gradient(loss(model, batch, None).labeled, loss).any()


def test_equal_views_cost_nothing(model, batch):
    batch.views["weak_2"] = batch.views["weak"]
    assert in_mode(prepared(DS3L(), model), "separate")(model, batch, None).unlabeled == 0


def test_weights_of_zero_give_zero():
    assert weighted_mean(torch.ones(3), torch.zeros(3)) == 0


@pytest.mark.parametrize(
    "build",
    [
        tiny_vit,  # attention has to have a second derivative
        lambda: WideResNetForImageClassification(
            WideResNetConfig(depth=10, width=1, image_size=8, num_labels=3, upstream_block=True)
        ),  # some of its parameters are in no forward
    ],
    ids=["vit", "upstream"],
)
def test_networks_of_any_kind_can_be_looked_ahead_in(build):
    model, batch = build().double().train(), make_batch()
    loss = prepared(DS3L(), make_model())
    assert gradient(loss(model, batch, None).labeled, loss).any()
