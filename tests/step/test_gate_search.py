"""The gate against a float64 reference, on models, losses and gradients that a search makes up.

`<update, labeled gradient> > 0` means that a small step along the update lowers the labeled loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_fixastep.step.gate import GATES, LABELED, UNLABELED, Gate, GradientSlots


SEARCH = settings(
    max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
POLICY = pytest.mark.parametrize("policy", GATES)
DESCENDING = ("drop", "project")
LARGEST = 2.0**64  # a gradient of this norm or more counts as not finite
WEIGHTS = st.sampled_from([0.0, 1e-6, 1.0, 7.0, 75.0])
SCALES = st.sampled_from([0.0, 1e-20, 1e-15, 1e-7, 1.0, 1e7, 1e15])
SPOILS = st.sampled_from([None, None, torch.nan, torch.inf, -torch.inf, 3e38, -1e30, 1e-44])


# ---- the reference


@dataclass
class Expected:
    update: list[Tensor]  # float64
    rounding: list[Tensor]  # how far from it the update of each value may be
    open: float
    dot: float
    norms: tuple[float, float]
    finite: tuple[bool, bool]
    undecidable: bool  # the inner product is smaller than its own rounding


def inner(first: list[Tensor], second: list[Tensor]) -> float:
    """In float64, without overflow or underflow on the way for anything that float32 can hold."""
    return float(
        sum(((a * b).sum() for a, b in zip(first, second, strict=True)), torch.zeros((), dtype=torch.float64))
    )


def norm(tensors: list[Tensor]) -> float:
    return inner(tensors, tensors) ** 0.5


def reference(policy: str, weight: float, labeled: list[Tensor], unlabeled: list[Tensor]) -> Expected:
    """The gate as the paper words it; gradients may have any dtype."""
    precisions = [torch.finfo(gradient.dtype) for gradient in labeled]
    first, second = [g.double() for g in labeled], [g.double() for g in unlabeled]
    norms, dot = (norm(first), norm(second)), inner(first, second)
    finite = (norms[0] < LARGEST, norms[1] < LARGEST)
    products = [(a * b).sum() for a, b in zip(first, second, strict=True)]
    bounds = [4e-15 * float((a * b).abs().sum()) for a, b in zip(first, second, strict=True)]
    if policy == "layerwise":
        keep = [bool(product > 0) and finite[1] for product in products]
        undecidable = any(bound > 0 and abs(p) <= bound for p, bound in zip(products, bounds, strict=True))
    else:
        always = policy in ("off", "per_example")
        keep = [finite[1] and (always or dot > 0 or (policy == "project" and dot >= 0))] * len(first)
        undecidable = not always and sum(bounds) > 0 and abs(dot) <= sum(bounds)
    removed = dot / norms[0] ** 2 if policy == "project" and all(finite) and dot < 0 else 0.0
    update, rounding = [], []
    for a, b, kept, precision in zip(first, second, keep, precisions, strict=True):
        added = b - removed * a if kept or (removed and finite[1]) else torch.zeros_like(a)
        update.append(a + weight * added if finite[0] else torch.zeros_like(a))
        sizes = a.abs() + weight * (b.abs() + abs(removed) * a.abs()).nan_to_num(0, 0, 0)
        rounding.append(
            8 * precision.eps * sizes + 4 * (1 + weight) * precision.smallest_normal * precision.eps
        )
    opened = sum(keep) / len(keep)
    return Expected(update, rounding, opened, dot, norms, finite, undecidable)


# ---- what has to hold, always


def check(
    policy: str,
    weight: float,
    labeled: list[Tensor],
    unlabeled: list[Tensor],
    update: list[Tensor],
    seen: Gate,
) -> None:
    expected = reference(policy, weight, labeled, unlabeled)
    if expected.finite[0]:
        assert all(bool(u.isfinite().all()) for u in update), "finite labeled gradient, but not the update"
    check_statistics(expected, seen)
    if not expected.undecidable:
        assert seen.open.item() == pytest.approx(expected.open)
        for found, wanted, rounding in zip(update, expected.update, expected.rounding, strict=True):
            wrong = (found.double() - wanted).abs() - rounding
            assert wrong.max() <= 0, f"off by {wrong.max()} more than rounding"
    if policy in DESCENDING and expected.finite[0]:
        check_descent([g.double() for g in labeled], [u.double() for u in update], expected)


def check_descent(labeled: list[Tensor], update: list[Tensor], expected: Expected) -> None:
    """Rounding the values of the update moves the product by no more than the labeled gradient times that."""
    slack = inner([g.abs() for g in labeled], expected.rounding)
    slope, promised = inner(update, labeled), inner(labeled, labeled)
    assert slope >= promised - slack, f"slope {slope}, but {promised} expected"
    if promised > slack:
        assert slope > 0


def check_statistics(expected: Expected, seen: Gate) -> None:
    assert (seen.labeled_nonfinite, seen.unlabeled_nonfinite) == tuple(
        float(not ok) for ok in expected.finite
    )
    for found, wanted, finite in zip(
        (seen.labeled_norm, seen.unlabeled_norm), expected.norms, expected.finite, strict=True
    ):
        if finite:
            assert found.item() == pytest.approx(wanted, rel=1e-5, abs=0)
    if not all(expected.finite) or 0 in expected.norms:
        assert seen.cosine == 0
        return
    product = expected.norms[0] * expected.norms[1]
    assert seen.dot.item() == pytest.approx(expected.dot, rel=1e-5, abs=1e-6 * product)
    assert seen.cosine.item() == pytest.approx(expected.dot / product, abs=1e-6)


# ---- gradients drawn value by value


DTYPES = st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16])
ORDINARY = st.floats(-1e3, 1e3, width=32)
FINITE = st.floats(-(2.0**60), 2.0**60, width=32)  # subnormal numbers included
ANY = st.floats(width=32)


@st.composite
def gradients(draw: st.DrawFn) -> tuple[list[Tensor], list[Tensor]]:
    """Up to four tensors of up to five values each; the second list may hold anything, the first may not."""
    first, second = draw(
        st.sampled_from([(ORDINARY, ORDINARY), (FINITE, FINITE), (ORDINARY, ANY), (FINITE, ANY)])
    )
    labeled, unlabeled = [], []
    for _ in range(draw(st.integers(1, 4))):
        dtype, size = draw(DTYPES), draw(st.integers(1, 5))
        for gradient, values in ((labeled, first), (unlabeled, second)):
            numbers = draw(st.lists(values, min_size=size, max_size=size))
            gradient.append(torch.tensor(numbers, dtype=torch.float64).to(dtype))
    return labeled, unlabeled


def gated(
    labeled: list[Tensor], unlabeled: list[Tensor], weight: float, policy: str
) -> tuple[list[Tensor], Gate]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in labeled]
    slots = GradientSlots(parameters)
    for row, gradient in ((LABELED, labeled), (UNLABELED, unlabeled)):
        with slots.fill(row):
            torch.autograd.backward(parameters, gradient)
    seen = slots.gate(weight, policy)
    return [p.grad for p in parameters], seen


@POLICY
@SEARCH
@given(pair=gradients(), weight=WEIGHTS)
def test_any_gradients_are_gated_as_in_float64(policy: str, pair: tuple, weight: float) -> None:
    labeled, unlabeled = pair
    check(policy, weight, labeled, unlabeled, *gated(labeled, unlabeled, weight, policy))


@pytest.mark.parametrize("policy", DESCENDING)
@SEARCH
@given(pair=gradients(), weight=WEIGHTS)
def test_exactly_opposing_gradients_leave_a_descent(policy: str, pair: tuple, weight: float) -> None:
    labeled = pair[0]
    unlabeled = [-7 * gradient for gradient in labeled]
    check(policy, weight, labeled, unlabeled, *gated(labeled, unlabeled, weight, policy))


# ---- models and losses


class Network(nn.Module):
    """Layers of several kinds and dtypes one after another, and a parameter that nothing uses."""

    def __init__(self, kinds: list[str], dtypes: list[torch.dtype], frozen: list[bool]) -> None:
        super().__init__()
        make = {"conv": lambda: nn.Conv2d(2, 2, 3, padding=1), "linear": lambda: nn.Linear(4, 4)}
        self.layers = nn.ModuleList(make[kind]() for kind in kinds)
        for layer, dtype, is_frozen in zip(self.layers, dtypes, frozen, strict=True):
            layer.to(dtype).requires_grad_(not is_frozen)
        self.head = nn.Linear(32, 3)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x.to(layer.weight.dtype)).float())
        return self.head(x.flatten(1))


@st.composite
def networks(draw: st.DrawFn) -> Network:
    count = draw(st.integers(1, 3))

    def some(choices: Any) -> list[Any]:
        return draw(st.lists(choices, min_size=count, max_size=count))

    kinds, dtypes, frozen = some(st.sampled_from(["conv", "linear"])), some(DTYPES), some(st.booleans())
    torch.manual_seed(draw(st.integers(0, 10**6)))
    return Network(kinds, dtypes, frozen)


def consistency(network: Network, x: Tensor) -> Tensor:
    return F.mse_loss(network(x).softmax(-1), network(x.flip(-1)).softmax(-1).detach())


def pseudo_labels(network: Network, x: Tensor) -> Tensor:
    logits = network(x)
    return F.cross_entropy(logits, logits.detach().argmin(-1))


def ascent(network: Network, x: Tensor) -> Tensor:
    """Opposes the labeled loss nearly, or exactly where the images are the same."""
    return -supervised(network, x)


def supervised(network: Network, x: Tensor) -> Tensor:
    return F.cross_entropy(network(x), torch.arange(len(x)) % 3)


def part(network: Network, x: Tensor) -> Tensor:
    """Leaves all parameters but the head alone."""
    return network.head(x.flatten(1)).square().mean()


def losses(
    network: Network, kind: Any, scales: tuple[float, float], spoil: float | None
) -> tuple[Tensor, Tensor]:
    images = torch.randn(5, 2, 4, 4)
    unlabeled = scales[1] * kind(network, images if kind is ascent else torch.randn(6, 2, 4, 4))
    if spoil is not None:
        unlabeled = unlabeled + spoil * network.head.weight[0, 0]
    return scales[0] * supervised(network, images), unlabeled


@POLICY
@SEARCH
@given(
    network=networks(),
    kind=st.sampled_from([consistency, pseudo_labels, ascent, supervised, part]),
    scales=st.tuples(SCALES, SCALES),
    spoil=SPOILS,
    weight=WEIGHTS,
)
def test_any_model_is_updated_as_in_float64(
    policy: str, network: Network, kind: Any, scales: tuple[float, float], spoil: float | None, weight: float
) -> None:
    trained = [p for p in network.parameters() if p.requires_grad]
    pair = losses(network, kind, scales, spoil)
    labeled, unlabeled = (
        [torch.zeros_like(p) if g is None else g for p, g in zip(trained, gradients, strict=True)]
        for gradients in (
            torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True) for loss in pair
        )
    )
    slots = GradientSlots(network.parameters())
    for row, loss in enumerate(pair):
        with slots.fill(row):
            loss.backward(retain_graph=True)
    seen = slots.gate(weight, policy)
    check(policy, weight, labeled, unlabeled, [p.grad for p in trained], seen)
    assert all(p.grad is None for p in network.parameters() if not p.requires_grad)
    assert not network.unused.grad.any()
