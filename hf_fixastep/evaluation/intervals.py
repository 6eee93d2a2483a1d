"""95 % intervals: of shares of independent images in closed form, of patients' rates by a bootstrap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest


# ---- independent images


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of `count` trials. Wilson, 1927."""
    found = binomtest(round(share * count), count).proportion_ci(method="wilson")
    return float(found.low), float(found.high)


def mean_interval(shares: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """95 % interval of the mean of independent shares, from the interval of each. Zou and Donner, 2008."""
    mean = sum(shares) / len(shares)
    ends = [wilson(share, count) for share, count in zip(shares, counts, strict=True)]
    below = math.hypot(*(share - low for share, (low, _) in zip(shares, ends, strict=True)))
    above = math.hypot(*(high - share for share, (_, high) in zip(shares, ends, strict=True)))
    return mean - below / len(shares), mean + above / len(shares)


def split_intervals(
    metrics: Mapping[str, Any], support: Mapping[str, Sequence[int]]
) -> dict[str, tuple[float, float]]:
    """95 % intervals of accuracy and balanced accuracy of every split.

    Args:
        metrics: as `classification_metrics` gives them, with the split and `_` in front.
        support: images of each class, by split.
    """
    found = {}
    for split, counts in support.items():
        recalls = recalls_of(metrics, split)
        counts = [count for count in counts if count]
        if len(recalls) == len(counts) > 0:
            found[f"{split}_accuracy"] = wilson(metrics[f"{split}_accuracy"], sum(counts))
            found[f"{split}_balanced_accuracy"] = mean_interval(recalls, counts)
    return found


def recalls_of(metrics: Mapping[str, Any], split: str) -> list[float]:
    """The recalls of a split, in the order of the classes that it has."""
    return [value for name, value in metrics.items() if name.startswith(f"{split}_recall_")]


# ---- images of patients, those of one patient being alike


@dataclass(frozen=True)
class Rates:
    """What confusion matrices [..., K, K] say; NaN where the images that a rate is about are missing.

    Args:
        sensitivity: [..., K] share of a class that is found.
        specificity: [..., K] share of all other classes that is not taken for it.
        balanced_accuracy: [...] mean sensitivity over the classes present.
    """

    sensitivity: NDArray
    specificity: NDArray
    balanced_accuracy: NDArray


def rates(confusion: ArrayLike) -> Rates:
    """Rates of one confusion matrix, or of many at once; rows are true classes."""
    counts = np.asarray(confusion, dtype=np.float64)
    found = np.diagonal(counts, axis1=-2, axis2=-1)
    support, predicted, total = counts.sum(-1), counts.sum(-2), counts.sum((-2, -1))[..., None]
    with np.errstate(invalid="ignore"):  # 0 / 0
        sensitivity = found / support
        specificity = 1 - (predicted - found) / (total - support)
    present = support > 0
    with np.errstate(invalid="ignore"):
        balanced = np.where(present, sensitivity, 0).sum(-1) / present.sum(-1)
    return Rates(sensitivity, specificity, balanced)


def confusions(predictions: ArrayLike, references: ArrayLike, groups: ArrayLike, num_classes: int) -> NDArray:
    """Confusion counts [G, K, K] of groups 0..G-1, rows are true classes."""
    groups, references = np.asarray(groups), np.asarray(references)
    size = int(groups.max()) + 1
    cells = (groups * num_classes + references) * num_classes + np.asarray(predictions)
    return np.bincount(cells, minlength=size * num_classes**2).reshape(size, num_classes, num_classes)


def draw_groups(support: NDArray, draws: int, seed: int) -> NDArray:
    """How often each group is in each of `draws` bootstrap samples: [draws, G], rows sum to G.

    Groups hold several classes each, so that samples cannot be stratified by class. Instead those in which a
    class of the data is missing are drawn again: the rates of all samples are then over the same classes.

    Args:
        support: images of each class in every group, [R, G, K] for R sets of images of the same groups.
    """
    count = support.shape[1]
    random = np.random.default_rng(seed)
    present = support.sum(1) > 0  # [R, K]
    accepted: list[NDArray] = []
    while sum(map(len, accepted)) < draws:
        weights = random.multinomial(count, np.full(count, 1 / count), size=draws)
        images = np.einsum("dg,rgk->drk", weights.astype(np.float64), support, optimize=True)
        accepted.append(weights[np.all((images > 0) | ~present, axis=(1, 2))])
    return np.concatenate(accepted)[:draws]


@dataclass(frozen=True)
class Estimate:
    """Rates of a classifier and their intervals; with several runs the means over these.

    Args:
        value: the rates.
        low: lower ends; NaN where fewer than two groups show what a rate is about.
        high: upper ends.
        runs: the rates of each run, with a first axis for these.
    """

    value: Rates
    low: Rates
    high: Rates
    runs: Rates


def estimate(counts: Sequence[NDArray], draws: int = 2000, level: float = 0.95, seed: int = 0) -> Estimate:
    """Rates with percentile intervals of a bootstrap over groups, i.e. patients.

    Several runs are resampled together: a patient is in all of them or in none, each run gives its own rates,
    and the intervals are those of the mean over the runs. They tell the chance in patients, not that in
    training. Rates of 0 and 1, for which the samples have no width, get the exact binomial bound, with groups
    as the trials.

    Args:
        counts: of each run the confusion counts [G, K, K] of the same groups, zero where a run has no image
            of one.
        draws: bootstrap samples.
        level: coverage of the intervals.
        seed: of the samples; the same seed gives the same intervals.
    """
    stacked = np.stack(counts)  # [R, G, K, K]
    support = stacked.sum(-1)
    weights = draw_groups(support, draws, seed).astype(np.float64)  # whose products are the fast ones
    samples = rates(np.einsum("dg,rgij->drij", weights, stacked, optimize=True))
    runs = rates(stacked.sum(1))
    # groups that a rate is about, in the run that has fewest
    shown, others = ((part > 0).sum(1).min(0) for part in (support, support.sum(-1, keepdims=True) - support))
    tail = (1 - level) / 2
    sensitivity = ends(runs.sensitivity, samples.sensitivity, shown, tail)
    specificity = ends(runs.specificity, samples.specificity, others, tail)
    means, present = samples.balanced_accuracy.mean(1), shown > 0
    balanced = np.quantile(means, [tail, 1 - tail])
    if np.ptp(means) == 0:  # every class is found always or never
        balanced = sensitivity[:, present].mean(-1)
    if np.any(shown[present] < 2):
        balanced = np.full(2, np.nan)
    value = Rates(runs.sensitivity.mean(0), runs.specificity.mean(0), runs.balanced_accuracy.mean(0))
    low, high = (Rates(sensitivity[end], specificity[end], balanced[end]) for end in (0, 1))
    return Estimate(value, low, high, runs)


def ends(runs: NDArray, samples: NDArray, groups: NDArray, tail: float) -> NDArray:
    """Lower and upper ends [2, K] of the mean over the runs.

    Args:
        runs: rates [R, K].
        samples: rates [draws, R, K].
        groups: how many the rate is about, [K].
    """
    value = runs.mean(0)
    low, high = np.quantile(samples.mean(1), [tail, 1 - tail], axis=0)
    bound = tail ** (1 / np.maximum(groups, 1))
    low, high = np.where(value == 1, bound, low), np.where(value == 0, 1 - bound, high)
    return np.where(groups >= 2, [low, high], np.nan)
