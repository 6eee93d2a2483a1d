from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

from hf_fixastep import WideResNetForImageClassification
from hf_fixastep.step.forwards import batchnorm_layers, classification_head, frozen_batchnorm, head_inputs
from tests.short_runs import tiny_vit, tiny_wide_resnet


def tiny_convnext() -> ConvNextForImageClassification:
    return ConvNextForImageClassification(
        ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3)
    )


def tiny_resnet() -> ResNetForImageClassification:
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    )


# ---- features


@pytest.mark.parametrize("build", [tiny_wide_resnet, tiny_vit, tiny_convnext, tiny_resnet])
def test_features_are_what_the_head_makes_the_logits_of(build: Callable[[], nn.Module]) -> None:
    model, images = build().train(), torch.randn(5, 3, 8, 8)
    with head_inputs(model, 3) as seen:
        logits = model(pixel_values=images).logits
        model(pixel_values=images[:2])
    head = classification_head(model, 3)
    assert [len(rows) for rows in seen] == [5, 2]
    torch.testing.assert_close(seen[0] @ head.weight.T + head.bias, logits)
    first = next(model.parameters())
    assert torch.autograd.grad(seen[0].square().sum(), first)[0].any()  # with the graph
    assert not head._forward_pre_hooks


def test_features_are_seen_in_mixed_precision() -> None:
    model = tiny_vit()
    with torch.autocast("cpu", dtype=torch.bfloat16), head_inputs(model, 3) as seen:
        model(pixel_values=torch.randn(5, 3, 8, 8))
    assert seen[0].shape == (5, 16)


def test_features_are_seen_through_a_wrapper() -> None:
    class Wrapper(nn.Module):  # as DDP does it
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **inputs: Tensor) -> Any:
            return self.module(**inputs)

    model = tiny_wide_resnet()
    with head_inputs(Wrapper(model), 3) as seen:
        Wrapper(model)(pixel_values=torch.randn(5, 3, 8, 8))
    assert seen[0].shape == (5, 64)


def test_a_model_without_a_linear_head_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^Conv2d has no linear layer with 3 outputs, "):
        classification_head(nn.Conv2d(1, 3, 1), 3)


@pytest.mark.parametrize(
    ("features", "found"),
    [([torch.zeros(2, 5, 4)], r"features of shape \[2, 5, 4\]"), ([], "no features, but one vector")],
)
def test_a_head_that_does_not_see_a_vector_per_image_is_refused(features: list[Tensor], found: str) -> None:
    refused = pytest.raises(ValueError, match=f"^The classification head of Linear got {found}")
    with refused, head_inputs(nn.Linear(4, 3), 3) as seen:
        seen.extend(features)


# ---- frozen batch norm


def test_frozen_batchnorm_leaves_every_buffer_as_it_is(tiny_model: WideResNetForImageClassification) -> None:
    before = copy.deepcopy(dict(tiny_model.named_buffers()))
    with frozen_batchnorm(tiny_model.train()):
        tiny_model(pixel_values=torch.randn(4, 3, 8, 8))
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in tiny_model.named_buffers())


def test_frozen_batchnorm_normalizes_with_the_batch_and_lets_gradients_through() -> None:
    layer, x = nn.BatchNorm1d(2).train(), torch.tensor([[1.0, 10.0], [3.0, 50.0]])
    with frozen_batchnorm(layer):
        found = layer(x)
    torch.testing.assert_close(found, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), rtol=0, atol=1e-4)
    found[0].sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_after_the_outer_of_two_frozen_contexts_statistics_move_again() -> None:
    layer = nn.BatchNorm1d(2).train()
    with frozen_batchnorm(layer):
        with frozen_batchnorm(layer):
            pass
        layer(torch.randn(4, 2))
    layer(torch.ones(4, 2))
    assert layer.num_batches_tracked == 1
    torch.testing.assert_close(layer.running_mean, torch.full((2,), 0.1))


def test_frozen_batchnorm_ends_also_after_an_exception() -> None:
    layer = nn.BatchNorm1d(2)
    with pytest.raises(ZeroDivisionError), frozen_batchnorm(layer):
        raise ZeroDivisionError
    assert layer.track_running_stats


def test_batchnorm_layers_are_found_at_any_depth() -> None:
    inner, outer = nn.BatchNorm2d(3), nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(inner)), "b": outer})
    model["c"], model["d"] = nn.GroupNorm(1, 3), nn.BatchNorm1d(3, track_running_stats=False)
    assert batchnorm_layers(model) == [inner, outer]
    with frozen_batchnorm(model):
        pass
    assert not model["d"].track_running_stats
