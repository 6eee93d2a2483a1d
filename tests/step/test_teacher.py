"""The averaged model. Numbers in brackets are the checks of the specification."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hf_fixastep import WideResNetForImageClassification
from hf_fixastep.step.teacher import Teacher


LAYOUT = pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])


@pytest.fixture
def model(tiny_model: WideResNetForImageClassification) -> WideResNetForImageClassification:
    return tiny_model.train()


def train(model: nn.Module, seed: int) -> list[Tensor]:
    """Give the model other parameters and, by a forward, other buffers; returns copies of the parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator))
    model(pixel_values=torch.randn(4, 3, 8, 8, generator=generator))
    return copies(model)


def copies(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- the average [11]


def test_the_teacher_starts_as_a_copy(model: WideResNetForImageClassification) -> None:
    teacher = Teacher(model, 0.999)
    assert_same(state(teacher.model), state(model))
    train(model, 0)
    assert not torch.equal(teacher.model.classifier.weight, model.classifier.weight)


@LAYOUT
def test_after_one_step_a_thousandth_is_new(
    model: WideResNetForImageClassification, layout: torch.memory_format
) -> None:
    """[11]"""
    model.to(memory_format=layout)
    teacher, start = Teacher(model, 0.999), copies(model)
    now = train(model, 0)
    teacher.update(model)
    for average, w0, w1 in zip(teacher.model.parameters(), start, now, strict=True):
        expected = 0.999 * w0.double() + 0.001 * w1.double()
        torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)
        assert not torch.equal(average, w0)


@LAYOUT
def test_after_three_steps_older_weights_fade_by_the_decay(
    model: WideResNetForImageClassification, layout: torch.memory_format
) -> None:
    """[11]"""
    model.to(memory_format=layout)
    teacher, weights = Teacher(model, 0.9), [copies(model)]
    for seed in range(3):
        weights.append(train(model, seed))
        teacher.update(model)
    for average, w0, w1, w2, w3 in zip(teacher.model.parameters(), *weights, strict=True):
        expected = 0.729 * w0.double() + 0.081 * w1.double() + 0.09 * w2.double() + 0.1 * w3.double()
        torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-6)


def test_buffers_are_copied_and_not_averaged(model: WideResNetForImageClassification) -> None:
    """[11]"""
    teacher = Teacher(model, 0.999)
    train(model, 0)
    before = dict(teacher.model.named_buffers())["bn.running_mean"].clone()
    teacher.update(model)
    buffers = dict(teacher.model.named_buffers())
    assert not torch.equal(buffers["bn.running_mean"], before)
    assert_same(buffers, dict(model.named_buffers()))


def test_a_model_without_buffers_has_a_teacher_too() -> None:
    model = nn.Linear(2, 1)
    teacher, start = Teacher(model, 0.5), model.weight.detach().clone()
    model.weight.data += 2
    teacher.update(model)
    torch.testing.assert_close(teacher.model.weight, start + 1)


def test_an_update_leaves_the_model_as_it_is(model: WideResNetForImageClassification) -> None:
    teacher = Teacher(model, 0.9)
    train(model, 0)
    before = state(model)
    teacher.update(model)
    assert_same(state(model), before)


# ---- how it is used


def test_the_teacher_is_in_eval_mode_and_the_model_stays_in_train_mode(
    model: WideResNetForImageClassification,
) -> None:
    teacher = Teacher(model, 0.999)
    assert not any(module.training for module in teacher.model.modules())
    assert all(module.training for module in model.modules())


def test_the_teacher_gets_no_gradient_and_the_model_does(model: WideResNetForImageClassification) -> None:
    """[11]"""
    teacher = Teacher(model, 0.999)
    images = torch.randn(4, 3, 8, 8)
    target = teacher.model(pixel_values=images).logits
    assert not target.requires_grad
    (model(pixel_values=images).logits - target).square().sum().backward()
    assert all(p.grad is None and not p.requires_grad for p in teacher.model.parameters())
    assert all(p.grad is not None for p in model.parameters())


def test_the_teacher_keeps_the_memory_order(model: WideResNetForImageClassification) -> None:
    model.to(memory_format=torch.channels_last)
    teacher = Teacher(model, 0.999)
    strides = [p.stride() for p in model.parameters()]
    train(model, 0)
    teacher.update(model)
    with teacher.applied(model):
        pass
    assert [p.stride() for p in teacher.model.parameters()] == strides
    assert [p.stride() for p in model.parameters()] == strides
    assert any(not p.is_contiguous() for p in teacher.model.parameters())


# ---- in place of the model


@pytest.fixture
def teacher(model: WideResNetForImageClassification) -> Teacher:
    """An average after one update, unlike the model, which has moved on."""
    teacher = Teacher(model, 0.9)
    train(model, 0)
    teacher.update(model)
    return teacher


@LAYOUT
def test_applied_swaps_parameters_and_restores_both_bit_for_bit(
    model: WideResNetForImageClassification, layout: torch.memory_format
) -> None:
    model.to(memory_format=layout)
    teacher = Teacher(model, 0.9)
    train(model, 0)
    teacher.update(model)
    raw, average = state(model), state(teacher.model)
    with teacher.applied(model):
        assert_same(state(model), average)
        assert_same(state(teacher.model), raw)
    assert_same(state(model), raw)
    assert_same(state(teacher.model), average)
    assert not torch.equal(raw["stem.weight"], average["stem.weight"])


def test_applied_keeps_parameters_the_same_objects(
    model: WideResNetForImageClassification, teacher: Teacher
) -> None:
    """An optimizer holds on to them."""
    before = [(id(p), p.data_ptr()) for p in model.parameters()]
    with teacher.applied(model):
        assert [(id(p), p.data_ptr()) for p in model.parameters()] == before
        assert all(p.requires_grad for p in model.parameters())
        assert not any(p.requires_grad for p in teacher.model.parameters())


def test_nested_use_changes_nothing(model: WideResNetForImageClassification, teacher: Teacher) -> None:
    raw, average = state(model), state(teacher.model)
    with teacher.applied(model):
        with teacher.applied(model):
            assert_same(state(model), average)
        assert_same(state(model), average)
    assert_same(state(model), raw)


def test_applied_restores_after_an_exception(
    model: WideResNetForImageClassification, teacher: Teacher
) -> None:
    raw, average = state(model), state(teacher.model)
    with pytest.raises(ZeroDivisionError), teacher.applied(model), teacher.applied(model):
        raise ZeroDivisionError
    assert_same(state(model), raw)
    assert_same(state(teacher.model), average)
    with teacher.applied(model):
        assert_same(state(model), average)


def test_the_average_does_not_depend_on_how_often_it_was_applied(
    model: WideResNetForImageClassification,
) -> None:
    twin = copy.deepcopy(model)
    teacher, untouched = Teacher(model, 0.9), Teacher(twin, 0.9)
    for seed in range(3):
        train(model, seed)
        train(twin, seed)
        teacher.update(model)
        untouched.update(twin)
        with teacher.applied(model):
            pass
    assert_same(state(teacher.model), state(untouched.model))
