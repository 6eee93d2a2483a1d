from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.integrate import quad
from torch import Tensor, nn
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
)

from hf_fixastep import WideResNetForImageClassification
from hf_fixastep.losses.functional import masked_mean, mean_of_repeats, rows_of_all
from hf_fixastep.step.forwards import batchnorm_layers, classification_head, frozen_batchnorm, head_inputs
from hf_fixastep.step.mixing import average_guess, mixing_shares, mixup, sharpen
from tests.short_runs import tiny_vit, tiny_wide_resnet


def draws(alpha: float, count: int = 20_000, seed: int = 0) -> Tensor:
    return mixing_shares(count, alpha, torch.Generator().manual_seed(seed))


def share_below(alpha: float, x: ArrayLike) -> NDArray:
    """Distribution function of max(b, 1 - b): b has to lie between 1 - x and x."""
    return stats.beta.cdf(x, alpha, alpha) - stats.beta.cdf(1 - np.asarray(x), alpha, alpha)


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


def test_a_head_that_sees_more_than_a_vector_per_image_is_refused() -> None:
    refused = pytest.raises(
        ValueError, match=r"^The classification head of Linear got features of shape \[2, 5, 4\]"
    )
    with refused, head_inputs(nn.Linear(4, 3), 3) as seen:
        seen.append(torch.zeros(2, 5, 4))


def test_a_head_that_is_not_used_is_refused() -> None:
    refused = pytest.raises(
        ValueError, match=r"^The classification head of Linear got no features, but one vector"
    )
    with refused, head_inputs(nn.Linear(4, 3), 3):
        pass


# ---- per-example state


def test_repeats_get_their_mean_and_others_stay() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 8.0], [0.5, 0.5]])
    found = mean_of_repeats(torch.tensor([7, 2, 7, 0]), values, rows=8)
    torch.testing.assert_close(found, torch.tensor([[3.0, 5.0], [3.0, 4.0], [3.0, 5.0], [0.5, 0.5]]))


def test_on_one_process_rows_are_its_own_without_what_is_not_finite() -> None:
    index, values = rows_of_all(torch.tensor([2, 1]), torch.tensor([[1.0, torch.nan], [torch.inf, 3.0]]))
    assert index.tolist() == [2, 1]
    assert values.tolist() == [[1, 0], [0, 3]]


def test_a_masked_mean_is_that_of_the_kept_and_zero_without_any() -> None:
    values = torch.tensor([1.0, 2.0, 6.0])
    assert masked_mean(values, torch.tensor([1.0, 0.0, 1.0])) == 3.5
    assert masked_mean(values, torch.zeros(3)) == 0


# ---- frozen batch norm


def test_frozen_batchnorm_leaves_every_buffer_as_it_is(tiny_model: WideResNetForImageClassification) -> None:
    before = copy.deepcopy(dict(tiny_model.named_buffers()))
    with frozen_batchnorm(tiny_model.train()):
        tiny_model(pixel_values=torch.randn(4, 3, 8, 8))
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in tiny_model.named_buffers())


def test_frozen_batchnorm_normalizes_with_the_batch() -> None:
    layer, x = nn.BatchNorm1d(2).train(), torch.tensor([[1.0, 10.0], [3.0, 50.0]])
    with frozen_batchnorm(layer):
        found = layer(x)
    torch.testing.assert_close(found, torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), rtol=0, atol=1e-4)


def test_frozen_batchnorm_lets_gradients_through() -> None:
    layer = nn.BatchNorm1d(2).train()
    with frozen_batchnorm(layer):
        layer(torch.randn(4, 2)).square().sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_after_frozen_batchnorm_statistics_move_again() -> None:
    layer = nn.BatchNorm1d(2).train()
    with frozen_batchnorm(layer):
        layer(torch.randn(4, 2))
    layer(torch.ones(4, 2))
    assert layer.num_batches_tracked == 1
    torch.testing.assert_close(layer.running_mean, torch.full((2,), 0.1))


def test_frozen_batchnorm_ends_also_after_an_exception() -> None:
    layer = nn.BatchNorm1d(2)
    with pytest.raises(ZeroDivisionError), frozen_batchnorm(layer):
        raise ZeroDivisionError
    assert layer.track_running_stats


def test_the_inner_of_two_frozen_contexts_does_not_end_the_outer() -> None:
    layer = nn.BatchNorm1d(2).train()
    with frozen_batchnorm(layer):
        with frozen_batchnorm(layer):
            pass
        layer(torch.ones(4, 2))
    assert layer.num_batches_tracked == 0
    assert layer.track_running_stats


def test_layers_that_never_track_are_left_alone() -> None:
    layer = nn.BatchNorm1d(2, track_running_stats=False)
    with frozen_batchnorm(layer):
        pass
    assert not layer.track_running_stats
    assert batchnorm_layers(layer) == []


def test_batchnorm_layers_are_found_at_any_depth() -> None:
    inner, outer = nn.BatchNorm2d(3), nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(inner)), "b": outer})
    model["c"] = nn.GroupNorm(1, 3)
    assert batchnorm_layers(model) == [inner, outer]


# ---- guesses [1]


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [(1.0, [0.7, 0.3]), (0.5, [0.49 / 0.58, 0.09 / 0.58]), (0.5, [0.8448, 0.1552])],
)
def test_the_guess_is_the_sharpened_mean_prediction(temperature: float, expected: list[float]) -> None:
    """[1]"""
    logits = [torch.tensor([[0.6, 0.4]]).log(), torch.tensor([[0.8, 0.2]]).log() + 5]
    torch.testing.assert_close(
        average_guess(logits, temperature), torch.tensor([expected]), rtol=0, atol=5e-5
    )


def test_a_temperature_above_one_flattens() -> None:
    found = sharpen(torch.tensor([[0.64, 0.36]]), 2.0)
    torch.testing.assert_close(found, torch.tensor([[0.8 / 1.4, 0.6 / 1.4]]))


def test_sharpening_keeps_certain_predictions() -> None:
    assert sharpen(torch.tensor([[0.0, 1.0, 0.0]]), 0.5).tolist() == [[0.0, 1.0, 0.0]]


def test_a_very_low_temperature_gives_the_most_likely_class() -> None:
    probabilities = torch.full((1, 100), 0.98 / 99)
    probabilities[0, 7] = 0.02
    expected = torch.zeros(1, 100)
    expected[0, 7] = 1
    torch.testing.assert_close(sharpen(probabilities, 0.01), expected)


# ---- mixing shares [2]


@pytest.mark.parametrize("alpha", [0.5, 0.75, 1.0, 4.0])
def test_shares_are_distributed_as_the_larger_half_of_a_beta_draw(alpha: float) -> None:
    found = draws(alpha).double().numpy()
    distance = stats.kstest(found, lambda x: share_below(alpha, x)).statistic
    assert distance < 1.63 / len(found) ** 0.5  # exceeded by chance in one of a hundred seeds


@pytest.mark.parametrize(("alpha", "mean"), [(0.5, 0.818), (0.75, 0.778)])
def test_the_mean_share_is_that_of_the_paper(alpha: float, mean: float) -> None:
    above_half, _ = quad(lambda x: 1 - share_below(alpha, x), 0.5, 1)
    assert 0.5 + above_half == pytest.approx(mean, abs=5e-4)
    assert draws(alpha, 200_000).mean().item() == pytest.approx(mean, abs=2e-3)


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 0.01, 0.5, 1e3, 1e8])
def test_shares_are_finite_and_at_least_half(alpha: float) -> None:
    """[2]"""
    found = draws(alpha)
    assert found.min() >= 0.5
    assert found.max() <= 1


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 0.003])
def test_a_tiny_alpha_leaves_images_unmixed(alpha: float) -> None:
    expected = share_below(alpha, 0.999)
    assert expected < 0.05
    assert (draws(alpha) < 0.999).float().mean().item() == pytest.approx(expected, abs=5e-3)


def test_a_large_alpha_mixes_halves() -> None:
    assert draws(1e8).max() < 0.501


def test_shares_depend_on_the_generator_alone() -> None:
    first = draws(0.5, 10)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    assert torch.equal(draws(0.5, 10), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(draws(0.5, 10, seed=1), first)


def test_mixup_mixes_row_by_row() -> None:
    first, second = torch.arange(12.0).view(3, 2, 2), -torch.ones(3, 2, 2)
    shares = [1.0, 0.75, 0.5]
    rows = [share * a + (1 - share) * b for share, a, b in zip(shares, first, second, strict=True)]
    torch.testing.assert_close(mixup(first, second, torch.tensor(shares)), torch.stack(rows))


def test_mixup_keeps_the_dtype_of_the_images() -> None:
    images = torch.ones(2, 3, dtype=torch.bfloat16)
    assert mixup(images, images, torch.tensor([0.7, 0.8])).dtype == torch.bfloat16
