"""The gate against known gradients. Numbers in brackets are the checks of the specification."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from hf_fixastep import WideResNetForImageClassification
from hf_fixastep.step import gate
from hf_fixastep.step.gate import GATES, LABELED, UNLABELED, Gate, GradientSlots


BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
POLICY = pytest.mark.parametrize("policy", GATES)
NO_GRADIENT = [0.0, 0.0, 0.0]


def parameter(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def linear_loss(parameters: list[nn.Parameter], gradients: list[Tensor]) -> Tensor:
    """A loss whose gradient is `gradients`, whatever the parameters are."""
    return sum((p * g.to(p.dtype)).sum() for p, g in zip(parameters, gradients, strict=True))


def filled(parameters: list[nn.Parameter], labeled: list[Tensor], unlabeled: list[Tensor]) -> GradientSlots:
    slots = GradientSlots(parameters)
    for row, gradients in ((LABELED, labeled), (UNLABELED, unlabeled)):
        with slots.fill(row):
            linear_loss(parameters, gradients).backward()
    return slots


def gated(
    labeled: list[float],
    unlabeled: list[float],
    weight: float = 2.0,
    policy: str = "drop",
    dtype: torch.dtype = torch.float32,
    **kwargs: bool,
) -> tuple[list[float], Gate]:
    """The update for one parameter of three values, and what the gate saw."""
    weights = parameter(*NO_GRADIENT, dtype=dtype)
    slots = filled([weights], [torch.tensor(labeled)], [torch.tensor(unlabeled)])
    seen = slots.gate(weight, policy, **kwargs)
    return weights.grad.tolist(), seen


def random_gradients(seed: int, shapes: tuple[tuple[int, ...], ...] = ((4, 3), (4,), (2, 4))) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


# ---- the decision [4]


@pytest.mark.parametrize(
    ("policy", "labeled", "unlabeled", "update", "opened"),
    [
        ("drop", [1.0, 2.0, 0.0], [3.0, -1.0, 5.0], [7.0, 0.0, 10.0], 1),  # inner product 1
        ("drop", [1.0, 2.0, 0.0], [-3.0, 1.0, 5.0], [1.0, 2.0, 0.0], 0),  # -1
        ("drop", [1.0, 2.0, 0.0], [2.0, -1.0, 5.0], [1.0, 2.0, 0.0], 0),  # 0
        ("drop", NO_GRADIENT, [1.0, 2.0, 3.0], NO_GRADIENT, 0),
        ("off", [1.0, 2.0, 0.0], [-3.0, 1.0, 5.0], [-5.0, 4.0, 10.0], 1),
        ("project", [1.0, 0.0, 0.0], [2.0, 1.0, 0.0], [5.0, 2.0, 0.0], 1),
        ("project", [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 2.0, 0.0], 1),
        ("project", [1.0, 0.0, 0.0], [-2.0, 1.0, 0.0], [1.0, 2.0, 0.0], 0),  # without what opposes
        ("project", NO_GRADIENT, [1.0, 2.0, 3.0], [2.0, 4.0, 6.0], 1),
    ],
)
def test_the_sign_of_the_inner_product_decides(
    policy: str, labeled: list[float], unlabeled: list[float], update: list[float], opened: int
) -> None:
    """[4]; that every update of drop and project descends on the labeled loss [5] is in test_gate_search."""
    found, seen = gated(labeled, unlabeled, weight=2.0, policy=policy)
    assert found == update
    assert seen.open == opened


@POLICY
def test_without_an_unlabeled_gradient_every_policy_leaves_the_labeled_one(policy: str) -> None:
    update, _ = gated([1.0, 2.0, -3.0], NO_GRADIENT, policy=policy)
    assert update == [1.0, 2.0, -3.0]


@POLICY
@pytest.mark.parametrize(
    "unlabeled", [[3.0, -1.0, 5.0], [-3.0, 1.0, 5.0], [torch.nan, 0.0, 0.0], [torch.inf] * 3]
)
def test_weight_zero_leaves_the_labeled_gradient_whatever_the_gate_says(
    policy: str, unlabeled: list[float]
) -> None:
    """[7]"""
    assert gated([1.0, 2.0, 0.0], unlabeled, weight=0.0, policy=policy)[0] == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("weight", [0.0, 1e-6, 50.0])
def test_the_weight_has_no_part_in_the_decision(weight: float) -> None:
    seen = gated([1.0, 2.0, 0.0], [3.0, -1.0, 5.0], weight=weight)[1]
    assert (seen.open, seen.dot, seen.unlabeled_norm) == (1, 1, pytest.approx(35**0.5))


# ---- the other policies


def test_layerwise_decides_tensor_by_tensor() -> None:
    shares = []
    for seed in range(30):
        labeled, unlabeled = random_gradients(2 * seed), random_gradients(2 * seed + 1)
        parameters = [nn.Parameter(torch.zeros_like(g)) for g in labeled]
        seen = filled(parameters, labeled, unlabeled).gate(3.0, "layerwise")
        opened = 0
        for p, first, second in zip(parameters, labeled, unlabeled, strict=True):
            keep = float((first.double() * second.double()).sum()) > 0
            opened += keep
            torch.testing.assert_close(p.grad, first + 3.0 * second if keep else first)
        assert seen.open == pytest.approx(opened / 3)
        shares.append(opened)
    assert {0, 1, 2, 3} == set(shares)


@pytest.mark.parametrize("policy", ["drop", "layerwise"])
def test_the_decision_is_made_in_float32_also_for_half_precision(policy: str) -> None:
    gradient = [1e-4, 0.0, 0.0]  # its square is 0 in float16
    update, seen = gated(gradient, gradient, weight=1.0, policy=policy, dtype=torch.float16)
    assert seen.open == 1
    assert update[0] == pytest.approx(2e-4, rel=1e-2)


def test_an_unknown_policy_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"dorp.*drop, project, layerwise, per_example, off"):
        gated([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], policy="dorp")


# ---- values that are not finite [4]


@BAD
@POLICY
def test_an_unlabeled_gradient_that_is_not_finite_is_rejected_and_counted(policy: str, bad: float) -> None:
    update, seen = gated([1.0, 2.0, -3.0], [1.0, bad, 1.0], policy=policy)
    assert update == [1.0, 2.0, -3.0]
    assert (seen.open, seen.unlabeled_nonfinite, seen.labeled_nonfinite) == (0, 1, 0)


@BAD
@POLICY
def test_a_labeled_gradient_that_is_not_finite_contributes_nothing_and_is_counted(
    policy: str, bad: float
) -> None:
    update, seen = gated([1.0, bad, -3.0], [1.0, 2.0, 3.0], policy=policy)
    assert update == NO_GRADIENT
    assert (seen.unlabeled_nonfinite, seen.labeled_nonfinite) == (0, 1)


@POLICY
def test_two_gradients_that_are_not_finite_contribute_nothing(policy: str) -> None:
    update, seen = gated([1.0, torch.nan, -3.0], [torch.inf, 2.0, 3.0], policy=policy)
    assert update == NO_GRADIENT
    assert (seen.unlabeled_nonfinite, seen.labeled_nonfinite) == (1, 1)


@POLICY
def test_one_tensor_that_is_not_finite_silences_all_tensors(policy: str) -> None:
    labeled, unlabeled = random_gradients(0), random_gradients(1)
    labeled[1][0] = torch.nan
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in labeled]
    filled(parameters, labeled, unlabeled).gate(1.0, policy)
    assert not any(p.grad.any() for p in parameters)


@BAD
@POLICY
@pytest.mark.parametrize("row", [LABELED, UNLABELED])
def test_passing_an_overflow_on_writes_nan_everywhere(row: int, policy: str, bad: float) -> None:
    gradients = [random_gradients(0), random_gradients(1)]
    gradients[row][2][1, 1] = bad
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients[0]]
    filled(parameters, *gradients).gate(1.0, policy, pass_overflow=True)
    assert all(p.grad.isnan().all() for p in parameters)


@POLICY
def test_passing_overflows_on_changes_nothing_without_one(policy: str) -> None:
    case = [1.0, 2.0, 0.0], [-3.0, 1.0, 5.0]
    assert gated(*case, policy=policy, pass_overflow=True)[0] == gated(*case, policy=policy)[0]


# ---- what it reports


@POLICY
def test_all_policies_report_the_same_dot_norms_and_cosine(policy: str) -> None:
    seen = gated([3.0, 0.0, 4.0], [0.0, 1.0, -1.0], policy=policy)[1]
    assert (seen.dot, seen.labeled_norm, seen.unlabeled_norm) == (-4, 5, pytest.approx(2**0.5))
    assert seen.cosine.item() == pytest.approx(-4 / 5 / 2**0.5)


@pytest.mark.parametrize("other", [NO_GRADIENT, [1.0, torch.nan, 1.0], [1.0, torch.inf, 1.0]])
def test_the_cosine_with_no_gradient_or_one_that_is_not_finite_is_zero(other: list[float]) -> None:
    assert gated([1.0, 2.0, 3.0], other)[1].cosine == gated(other, [1.0, 2.0, 3.0])[1].cosine == 0


# ---- two backwards instead of three [6]


def joint_losses(model: nn.Module, sign: float) -> tuple[Tensor, Tensor]:
    """Both losses from one train-mode forward over labeled and unlabeled rows."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(10, 3, 8, 8, generator=generator)
    labeled, unlabeled = model(pixel_values=images).logits.split([4, 6])
    targets = torch.rand(6, 3, generator=generator).softmax(-1)
    consistency = 10 * mse_loss(unlabeled.softmax(-1), targets)
    return cross_entropy(labeled, torch.tensor([0, 1, 2, 0])), sign * consistency


def three_backwards(model: nn.Module, sign: float, weight: float) -> tuple[bool, list[Tensor]]:
    """The way of the official code: a gradient for each loss, and a third one for the chosen sum."""
    labeled, unlabeled = joint_losses(model, sign)
    rows = []
    for loss in (labeled, unlabeled):
        loss.backward(retain_graph=True)
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        model.zero_grad()
    opened = bool(rows[0] @ rows[1] > 0)
    (labeled + weight * unlabeled if opened else labeled).backward()
    return opened, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("channels_last", [False, True])
def test_two_backwards_give_the_gradient_of_the_chosen_sum(
    tiny_model: WideResNetForImageClassification, channels_last: bool
) -> None:
    """[6] on a network with batch norm; of the two signs one opens the gate and one closes it."""
    decisions = set()
    for sign in (1.0, -1.0):
        model = copy.deepcopy(tiny_model).train()
        if channels_last:
            model.to(memory_format=torch.channels_last)
        opened, expected = three_backwards(copy.deepcopy(model), sign, weight=3.0)
        slots = GradientSlots(model.parameters())
        labeled, unlabeled = joint_losses(model, sign)
        with slots.fill(LABELED):
            labeled.backward(retain_graph=True)
        with slots.fill(UNLABELED):
            unlabeled.backward()
        assert slots.gate(3.0).open == opened
        decisions.add(opened)
        for p, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-5, atol=1e-6)
    assert decisions == {True, False}


# ---- which parameters


def test_a_parameter_that_no_loss_touches_gets_a_zero_gradient() -> None:
    used, unused = parameter(1.0, 2.0), parameter(3.0)
    slots = GradientSlots([used, unused])
    for row in (LABELED, UNLABELED):
        with slots.fill(row):
            used.sum().backward()
    slots.gate(1.0)
    assert unused.grad.tolist() == [0.0]


def test_a_parameter_that_one_loss_does_not_touch_counts_as_zero_there() -> None:
    shared, labeled_only, unlabeled_only = parameter(0.0), parameter(0.0), parameter(0.0)
    slots = GradientSlots([shared, labeled_only, unlabeled_only])
    with slots.fill(LABELED):
        (2 * shared + 3 * labeled_only).sum().backward()
    with slots.fill(UNLABELED):
        (5 * shared + 7 * unlabeled_only).sum().backward()
    seen = slots.gate(1.0)
    assert seen.dot == 10
    assert [p.grad.item() for p in (shared, labeled_only, unlabeled_only)] == [7, 3, 7]


def test_frozen_parameters_are_left_alone() -> None:
    free, frozen = parameter(1.0), parameter(1.0).requires_grad_(False)
    slots = GradientSlots([free, frozen])
    with slots.fill(LABELED):
        (2 * free + 4 * frozen).sum().backward()
    with slots.fill(UNLABELED):
        (3 * free - 4 * frozen).sum().backward()
    assert slots.gate(1.0).dot == 6
    assert free.grad.tolist() == [5.0]
    assert frozen.grad is None


def test_parameters_of_several_dtypes_share_one_decision() -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    parameters = [parameter(0.0, 0.0, dtype=dtype) for dtype in dtypes]
    labeled = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), torch.tensor([4.0, 0.0])]
    unlabeled = [torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 1.0])]
    slots = filled(parameters, labeled, unlabeled)
    seen = slots.gate(2.0)
    assert len(slots.buffers) == 3
    assert seen.dot == 1 + 4 - 4
    assert [p.grad.tolist() for p in parameters] == [[3.0, 2.0], [2.0, 6.0], [2.0, 2.0]]
    assert [p.grad.dtype for p in parameters] == list(dtypes)


def test_small_gradients_count_in_bfloat16() -> None:
    """A sum in bfloat16 would stop growing at 256."""
    weights = nn.Parameter(torch.zeros(3000, dtype=torch.bfloat16))
    seen = filled([weights], [torch.ones(3000)], [torch.ones(3000)]).gate(1.0)
    assert seen.dot == 3000


def test_no_trainable_parameter_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match="parameter"):
        GradientSlots([parameter(1.0).requires_grad_(False)])


# ---- memory order


def two_steps(model: nn.Module, with_slots: bool) -> list[Tensor]:
    """Parameters after two steps of fused SGD on a loss, and on the same loss with weight 2."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    images = torch.randn(5, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    slots = GradientSlots(model.parameters())
    for _ in range(2):
        loss = model(images).square().mean()
        if with_slots:
            with slots.fill(LABELED):
                loss.backward(retain_graph=True)
            with slots.fill(UNLABELED):
                loss.backward()
            slots.gate(2.0)
        else:
            (3 * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_channels_last_parameters_get_the_update_of_contiguous_ones() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 5, 1), nn.Conv2d(5, 1, 2))
    expected = two_steps(copy.deepcopy(model), with_slots=False)
    found = two_steps(copy.deepcopy(model).to(memory_format=torch.channels_last), with_slots=True)
    for first, second in zip(found, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


def test_transposed_parameters_get_the_update_of_contiguous_ones() -> None:
    class Product(nn.Module):
        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :4] @ self.weight

    weight = torch.randn(3, 4).t()
    (expected,) = two_steps(Product(weight.clone(memory_format=torch.contiguous_format)), with_slots=False)
    (found,) = two_steps(Product(weight.clone()), with_slots=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_channels_last_parameters_have_their_strides() -> None:
    model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    slots = filled([model.weight], [torch.randn(6, 4, 3, 3)], [torch.randn(6, 4, 3, 3)])
    slots.gate(1.0)
    assert model.weight.grad.stride() == model.weight.stride() == (36, 1, 12, 4)


# ---- one step after another


def test_several_backwards_in_one_row_add_up() -> None:
    weights = parameter(0.0, 0.0)
    slots = GradientSlots([weights])
    for labeled, unlabeled in (([1.0, 2.0], [3.0, 0.0]), ([10.0, 20.0], [0.0, 4.0])):
        with slots.fill(LABELED):
            linear_loss([weights], [torch.tensor(labeled)]).backward()
        with slots.fill(UNLABELED):
            linear_loss([weights], [torch.tensor(unlabeled)]).backward()
    assert slots.gate(2.0).dot == 11 * 3 + 22 * 4
    assert weights.grad.tolist() == [17.0, 30.0]


def test_the_first_fill_after_a_decision_starts_from_zero() -> None:
    weights = parameter(0.0, 0.0)
    slots = filled([weights], [torch.tensor([1.0, 1.0])], [torch.tensor([1.0, 1.0])])
    slots.gate(1.0)
    with slots.fill(LABELED):
        linear_loss([weights], [torch.tensor([5.0, 7.0])]).backward()
    assert slots.gate(1.0).unlabeled_norm == 0
    assert weights.grad.tolist() == [5.0, 7.0]


def test_a_step_that_was_not_finite_leaves_no_trace_in_the_next() -> None:
    weights = parameter(0.0)
    slots = filled([weights], [torch.tensor([torch.nan])], [torch.tensor([torch.inf])])
    slots.gate(1.0)
    for row in (LABELED, UNLABELED):
        with slots.fill(row):
            weights.sum().backward()
    assert slots.gate(1.0).open == 1
    assert weights.grad.tolist() == [2.0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_gradients_between_steps_does_no_harm(set_to_none: bool) -> None:
    weights = parameter(1.0)
    optimizer = torch.optim.SGD([weights], lr=1.0)
    slots = GradientSlots([weights])
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        for row in (LABELED, UNLABELED):
            with slots.fill(row):
                weights.sum().backward()
        slots.gate(1.0)
        optimizer.step()
    assert weights.item() == 1 - 3 * 2


def test_gradients_are_out_of_sight_between_filling_and_the_decision() -> None:
    weights = parameter(0.0)
    filled([weights], [torch.tensor([1.0])], [torch.tensor([1.0])])
    assert weights.grad is None


def test_a_backward_after_an_exception_inside_a_fill_stays_out_of_the_slots() -> None:
    weights = parameter(0.0)
    slots = GradientSlots([weights])
    with pytest.raises(ZeroDivisionError), slots.fill(UNLABELED):
        raise ZeroDivisionError
    weights.sum().backward()
    assert slots.gate(1.0).unlabeled_norm == 0


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    "spoil",
    [lambda p: p.square().sum().backward(create_graph=True), lambda p: setattr(p, "grad", None)],
    ids=["replaced", "removed"],
)
def test_a_gradient_that_is_replaced_or_removed_inside_a_fill_is_a_clear_error(spoil: Callable) -> None:
    weights = parameter(1.0)
    slots = GradientSlots([weights])
    with pytest.raises(RuntimeError, match=r"replaced \.grad instead of adding"), slots.fill(LABELED):
        spoil(weights)


# ---- outside of the Trainer


def test_the_loop_in_the_module_docstring_works_as_printed() -> None:
    loop = textwrap.dedent(gate.__doc__.split("\n\n")[2])
    assert "slots.gate" in loop
    model = nn.Linear(3, 1, bias=False)
    model.weight.data.fill_(1.0)
    scope = {
        "GradientSlots": GradientSlots,
        "LABELED": LABELED,
        "UNLABELED": UNLABELED,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "main_loss": model(torch.tensor([1.0, 2.0, 0.0])).sum(),
        "auxiliary_loss": model(torch.tensor([3.0, -1.0, 5.0])).sum(),
    }
    exec(loop, scope)
    assert model.weight.tolist() == [[1 - 0.5 * 4, 1 - 0.5 * 1, 1 - 0.5 * 5]]
