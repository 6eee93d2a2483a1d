"""The gate per example against a loop over the rows, each with a gradient of its own, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_fixastep.losses import get_loss
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.examples import ExampleGate
from hf_fixastep.step.gate import LABELED, UNLABELED, GradientSlots
from tests.losses.conftest import (
    CLASSES,
    MODES,
    TinyNet,
    cross_entropy,
    forward,
    in_mode,
    make_batch,
    make_model,
    mix_by_hand,
    predict,
)
from tests.losses.test_vat import exact_unit, kl, same_noise


Terms = tuple[Tensor, list[Tensor]]  # the labeled loss, and what each row adds to the unlabeled one
Term = Callable[[str, TinyNet, SemiBatch, nn.Module], Terms]


# ---- the losses, row by row


def squares(logits: Tensor, targets: Tensor) -> list[Tensor]:
    pairs = zip(logits.softmax(-1), targets, strict=True)
    return [(row - target).square().sum() / targets.numel() for row, target in pairs]


def fixmatch(mode: str, model: TinyNet, batch: SemiBatch, teacher: nn.Module) -> Terms:
    labeled, weak, strong = predict(mode, model, batch.x, batch.views["weak"], batch.views["strong"])
    terms = []
    for target, row in zip(weak.detach().softmax(-1), strong, strict=True):
        terms.append(-row.log_softmax(-1)[target.argmax()] * float(target.max() >= 0.5) / len(strong))
    return cross_entropy(batch.y, labeled), terms


def mean_teacher(mode: str, model: TinyNet, batch: SemiBatch, teacher: nn.Module) -> Terms:
    labeled, student = predict(mode, model, batch.x, batch.views["weak"])
    target = teacher(pixel_values=batch.views["weak_2"]).logits.detach().softmax(-1)
    return cross_entropy(batch.y, labeled), squares(student, target)


def pi_model(mode: str, model: TinyNet, batch: SemiBatch, teacher: nn.Module) -> Terms:
    labeled, first = predict(mode, model, batch.x, batch.views["weak"])
    (second,) = forward(model, batch.views["weak_2"])
    return cross_entropy(batch.y, labeled), squares(second, first.detach().softmax(-1))


def vat(mode: str, model: TinyNet, batch: SemiBatch, teacher: nn.Module) -> Terms:
    weak = batch.views["weak"]
    images = torch.cat([batch.x, weak]) if mode == "joint" else weak
    clean = forward(model, images)[0].detach().softmax(-1)
    noise = exact_unit(same_noise(images)).requires_grad_()
    moved = forward(model, images + noise)[0].softmax(-1)
    change = sum(kl(c, m) for c, m in zip(clean, moved, strict=True)) / len(images)
    direction = exact_unit(torch.autograd.grad(change, noise)[0])
    perturbed = forward(model, images + 2.0 * direction)[0].softmax(-1)
    pairs = list(zip(perturbed, clean, strict=True))[-len(weak) :]
    labeled, _ = predict(mode, model, batch.x, weak)
    return cross_entropy(batch.y, labeled), [kl(*pair) / len(weak) for pair in pairs]


def mixmatch(mode: str, model: TinyNet, batch: SemiBatch, teacher: nn.Module) -> Terms:
    images, y = mix_by_hand(model, batch, 0.5, 0.75)
    labeled, unlabeled = predict(mode, model, images[:4], images[4:])
    return cross_entropy(y[:4], labeled), squares(unlabeled, y[4:])


ARGUMENTS: dict[Term, dict[str, Any]] = {
    fixmatch: {"threshold": 0.5},
    mean_teacher: {},
    pi_model: {},
    vat: {"xi": 1.0, "eps": 2.0},
    mixmatch: {},
}


def loop(model: TinyNet, labeled: Tensor, terms: list[Tensor]) -> tuple[list[Tensor], list[bool]]:
    """The unlabeled gradient of what is kept, and for each row that has a gradient whether it is kept."""
    head = list(model.head.parameters())
    judge = torch.autograd.grad(labeled, head, retain_graph=True)
    kept, decisions = [], []
    for term in terms:
        own = torch.autograd.grad(term, head, retain_graph=True)
        product = sum((a * b).sum() for a, b in zip(own, judge, strict=True))
        if product > 0:
            kept.append(term)
        if any(g.any() for g in own):
            decisions.append(bool(product > 0))
    return list(torch.autograd.grad(sum(kept), list(model.parameters()))), decisions


@contextmanager
def chosen(slots: GradientSlots, examples: ExampleGate, labeled: Tensor) -> Iterator[None]:
    """The backward inside is the unlabeled one."""
    with slots.fill(LABELED):
        labeled.backward(retain_graph=True)
    examples.learn(slots)
    with examples.choosing(), slots.fill(UNLABELED):
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("term", ARGUMENTS)
@pytest.mark.parametrize("batchnorm", [True, False])
def test_what_is_kept_is_what_a_loop_over_the_rows_keeps(batchnorm: bool, term: Term, mode: str) -> None:
    model, teacher = make_model(batchnorm), make_model(batchnorm, seed=1).eval()
    expected, decisions = loop(model, *term(mode, model, make_batch(unlabeled=9), teacher))
    assert set(decisions) == {True, False}  # else the seed proves too little

    slots, examples = GradientSlots(model.parameters()), ExampleGate(model, CLASSES)
    loss = in_mode(get_loss(term.__name__, **ARGUMENTS[term]), mode)
    with examples.watching():
        losses = loss(model, make_batch(unlabeled=9), teacher)
        with chosen(slots, examples, losses.labeled):
            losses.unlabeled.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        found = slots.gradients[parameter][UNLABELED]
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-10)
    assert float(examples.share()) == pytest.approx(sum(decisions) / len(decisions))


# ---- single rows of a head alone


class Head(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2, bias=bias).double()


def judged(deltas: list, features: list, weight: list, bias: list | None) -> tuple[Tensor, float]:
    """What is left of the deltas, and the share kept, under labeled gradients of weight and bias."""
    model = Head(bias is not None)
    slots, examples = GradientSlots(model.parameters()), ExampleGate(model, 2)
    rows = torch.tensor(features, dtype=torch.float64, requires_grad=True)
    with examples.watching():
        logits = model.head(rows)
        seen: list[Tensor] = []
        with slots.fill(LABELED):
            for parameter, gradient in zip(model.head.parameters(), (weight, bias), strict=False):
                parameter.grad.copy_(torch.tensor(gradient))  # type: ignore[union-attr]
        examples.learn(slots)
        logits.register_hook(seen.append)  # behind the gate's own
        with examples.choosing(), slots.fill(UNLABELED):
            logits.backward(torch.tensor(deltas, dtype=torch.float64))
    return seen[0], float(examples.share())


@pytest.mark.parametrize(
    ("delta", "kept"),
    [
        ([1.0, 0.0], True),  # 1 * (1 * 3 + 0 * 5) = 3
        ([-1.0, 0.0], False),
        ([0.0, 1.0], False),  # 1 * (-2 * 3 + 1 * 5) = -1
        ([0.0, -1.0], True),
        ([1.0, 3.0], False),  # 0
    ],
)
def test_a_row_worked_out_by_hand_without_a_bias(delta: list[float], kept: bool) -> None:
    found, share = judged([delta], [[3.0, 5.0]], [[1.0, 0.0], [-2.0, 1.0]], None)
    assert found.tolist() == [delta if kept else [0.0, 0.0]]
    assert share == kept


def test_the_bias_has_its_say() -> None:
    found, share = judged([[1.0, 0.0], [0.0, 1.0]], [[3.0, 5.0]] * 2, [[1.0, 0.0], [-2.0, 1.0]], [-3.5, 1.5])
    assert found.tolist() == [[0.0, 0.0], [0.0, 1.0]]  # 3 - 3.5 and -1 + 1.5
    assert share == 0.5


def test_rows_without_a_gradient_do_not_count_in_the_share() -> None:
    _, share = judged([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]], [[1.0, 0.0]] * 3, [[1.0, 0.0], [0.0, 0.0]], None)
    assert share == 0.5
    _, share = judged([[0.0, 0.0]], [[1.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]], None)
    assert share == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_product_of_nan_keeps_nothing(value: float) -> None:
    found, share = judged([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0]] * 2, [[value, value]] * 2, None)
    assert (found.tolist(), share) == ([[0.0, 0.0]] * 2, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_makes_the_slots_reject_the_gradient(value: float) -> None:
    model = Head()
    slots, examples = GradientSlots(model.parameters()), ExampleGate(model, 2)
    rows = torch.ones(3, 2, dtype=torch.float64)
    with examples.watching():
        logits = model.head(rows)
        with chosen(slots, examples, logits.sum()):
            logits.backward(torch.tensor([[1.0, 1.0], [value, 0.0], [1.0, 1.0]], dtype=torch.float64))
    gate = slots.gate(1.0, "per_example")
    assert (float(gate.open), float(gate.unlabeled_nonfinite)) == (0, 1)
    assert model.head.weight.grad.tolist() == [[3.0, 3.0]] * 2  # the labeled one


def test_forwards_and_backwards_outside_are_left_alone() -> None:
    model, batch = make_model(), make_batch()
    slots, examples = GradientSlots(model.parameters()), ExampleGate(model, CLASSES)
    with examples.watching():
        logits = model(pixel_values=batch.x).logits
        with slots.fill(LABELED):
            (-logits.sum()).backward(retain_graph=True)  # against which every row of the next would be
        examples.learn(slots)
        (found,) = torch.autograd.grad(logits.sum(), model.head.bias, retain_graph=True)
        with torch.no_grad():
            model(pixel_values=batch.x)
        with examples.choosing():
            (stopped,) = torch.autograd.grad(logits.sum(), model.head.bias)
    assert found.tolist() == [4.0] * CLASSES
    assert stopped.tolist() == [0.0] * CLASSES
    assert not model.head._forward_hooks


def test_a_head_on_tokens_is_refused() -> None:
    model = Head()
    examples = ExampleGate(model, 2)
    refusal = r"shape \[5, 7, 2\], but the gate per_example needs one vector"
    with pytest.raises(ValueError, match=refusal), examples.watching():
        model.head(torch.zeros(5, 7, 2, dtype=torch.float64))


def test_half_precision_is_judged_in_float64() -> None:
    """The products are 1 + 2^-30 - 1 and 1 - 2^-30 - 1, which a sum in float32 would lose."""
    model = nn.Module()
    model.head = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    slots, examples = GradientSlots(model.parameters()), ExampleGate(model, 2)
    rows = torch.tensor([[1.0, 2.0**-30, 1.0], [1.0, -(2.0**-30), 1.0]], dtype=torch.bfloat16)
    with examples.watching():
        logits = model.head(rows)
        with slots.fill(LABELED):
            model.head.weight.grad.copy_(torch.tensor([[1.0, 1.0, -1.0], [0.0, 0.0, 0.0]]))
        examples.learn(slots)
        with examples.choosing(), slots.fill(UNLABELED):
            logits.backward(torch.tensor([[1.0, 0.0]] * 2, dtype=torch.bfloat16))
    assert slots.gradients[model.head.weight][UNLABELED][0].tolist() == [1.0, 2.0**-30, 1.0]
