"""Guesses, and the shares of mixed images. Numbers in brackets are the checks of the specification."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.integrate import quad
from torch import Tensor

from hf_fixastep.step.mixing import average_guess, mixing_shares, mixup, sharpen


def draws(alpha: float, count: int = 20_000, seed: int = 0) -> Tensor:
    return mixing_shares(count, alpha, torch.Generator().manual_seed(seed))


def share_below(alpha: float, x: ArrayLike) -> NDArray:
    """Distribution function of max(b, 1 - b): b has to lie between 1 - x and x."""
    return stats.beta.cdf(x, alpha, alpha) - stats.beta.cdf(1 - np.asarray(x), alpha, alpha)


# ---- guesses [1]


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, [0.7, 0.3]), (0.5, [0.49 / 0.58, 0.09 / 0.58])])
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
