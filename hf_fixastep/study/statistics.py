"""What chance allows: means over seeds and paired differences, each with a 95 % interval."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats


DRAWS, SEED, TAIL = 4000, 0, 0.025


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval, in shares; the ends are NaN where nothing can be said.

    Args:
        over: what the interval is about: seeds, test images or patients, or two of these.
    """

    mean: float
    low: float
    high: float
    seeds: int
    over: str

    @property
    def answer(self) -> str:
        if self.low > 0:
            return "yes"
        return "no" if self.high < 0 else "cannot tell"

    def __str__(self) -> str:
        ends = "no interval"
        if np.isfinite(self.low):
            ends = f"95 % interval {100 * self.low:+.1f} to {100 * self.high:+.1f} over {self.over}"
        return f"{100 * self.mean:+.1f} points ({ends}; {count(self.seeds, 'seed')})"


def mean_interval(runs: pd.DataFrame, metric: str) -> Interval:
    """Student's t over seeds; of a single seed the bootstrap over test images or patients."""
    values = runs[metric].to_numpy(dtype=float)
    if len(values) > 1:
        return Interval(values.mean(), *t_ends(values), len(values), "seeds")
    over, weights = sampled(runs)
    draws = image_draws(*answers(runs), metric, weights)[:, 0]
    return Interval(values[0], *ends(draws), 1, over)


def difference(first: pd.DataFrame, second: pd.DataFrame, metric: str, tail: float = TAIL) -> Interval:
    """Mean of the paired differences, with an interval from a bootstrap over seeds and test images.

    Resampled seeds alone would say too little of the chance in training: three seeds have a third less
    variance than the truth, and no tails. So their deviations are stretched as much as Student's t is wider
    than the normal distribution. Test images are resampled where all runs share them, the same images for
    all, and those of one patient together where patients are known; where each seed has images of its own,
    resampling seeds has resampled these as well.

    Args:
        first: runs whose rows fit those of `second`.
        tail: chance beyond each end of the interval.
    """
    by_seed = first[metric].to_numpy(dtype=float) - second[metric].to_numpy(dtype=float)
    mean, seeds = by_seed.mean(), len(by_seed)
    shared = same_images(first, second) and first["hash_test"].nunique() == 1
    if seeds == 1 and not shared:
        return Interval(mean, np.nan, np.nan, 1, "nothing")
    draws, over = np.full(DRAWS, mean), []
    if seeds > 1:
        over.append("seeds")
        draws += stretch(seeds, tail) * (seed_weights(seeds) @ by_seed - mean)
    if shared:
        what, weights = sampled(first)
        over.append(what)
        scores = image_draws(*answers(pd.concat([first, second])), metric, weights)
        draws += (scores[:, :seeds] - scores[:, seeds:]).mean(1) - mean
    return Interval(mean, *ends(draws, tail), seeds, " and ".join(over))


def paired_runs(first: pd.DataFrame, second: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of the seeds that both have, in the same order."""
    common = first.index.intersection(second.index).sort_values()
    return first.loc[common], second.loc[common]


def same_images(first: pd.DataFrame, second: pd.DataFrame) -> bool:
    """Whether the two runs of each pair were tested on the same images."""
    known = first["hash_test"].notna()
    return bool((known & (first["hash_test"].to_numpy() == second["hash_test"].to_numpy())).all())


def answers(runs: pd.DataFrame) -> tuple[NDArray, NDArray]:
    """Labels [N] and predictions [R, N] of runs with the same test images."""
    predictions = [np.asarray(row) for row in runs["test_predictions"]]
    return np.asarray(runs["test_labels"].iloc[0]), np.stack(predictions)


def sampled(runs: pd.DataFrame) -> tuple[str, NDArray]:
    """What is resampled, and how often each test image is in each sample, [DRAWS, images].

    Images of one patient are alike, so that a sample has all of them or none.
    """
    row = runs.iloc[0]
    if not isinstance(patients := row.get("test_patients"), list | np.ndarray):
        return "test images", image_weights(len(row["test_labels"]))
    found, numbers = np.unique(patients, return_inverse=True)
    return "patients", image_weights(len(found))[:, numbers]


def image_draws(
    labels: NDArray, predictions: NDArray, metric: str, weights: NDArray | None = None
) -> NDArray:
    """The metric of R runs on each bootstrap sample of test images, [DRAWS, R].

    Args:
        weights: as `sampled` gives them; by default of single images.
    """
    members: list[Any] = [slice(None)]  # accuracy is that of all images
    if metric == "test_balanced_accuracy":
        members = [labels == name for name in np.unique(labels)]
    weights, found = image_weights(len(labels)) if weights is None else weights, []
    for chosen in members:
        correct = (predictions == labels)[:, chosen].T.astype(np.float32)
        part = weights[:, chosen].astype(np.float32)  # sums of so few ones are exact
        with np.errstate(invalid="ignore"):  # a sample without images of a rare class
            found.append((part @ correct).astype(float) / part.sum(1, keepdims=True, dtype=float))
    return np.nanmean(found, axis=0)


@lru_cache(maxsize=2)
def image_weights(images: int) -> NDArray:
    """How often each image, or patient, is in each sample, [DRAWS, images]; the same for every comparison."""
    random = np.random.default_rng(SEED)
    counts = [np.bincount(random.integers(images, size=images), minlength=images) for _ in range(DRAWS)]
    return np.array(counts, dtype=np.uint16)


@lru_cache(maxsize=64)
def seed_weights(seeds: int) -> NDArray:
    """The share of each seed in each sample, [DRAWS, seeds]."""
    return np.random.default_rng([SEED, 1]).multinomial(seeds, np.full(seeds, 1 / seeds), size=DRAWS) / seeds


def stretch(seeds: int, tail: float = TAIL) -> float:
    """How much wider Student's interval is than that of resampled seeds."""
    wider = stats.t.ppf(1 - tail, seeds - 1) / stats.norm.ppf(1 - tail)
    return float(wider * np.sqrt(seeds / (seeds - 1)))


def t_ends(values: NDArray) -> tuple[float, float]:
    half = stats.t.ppf(1 - TAIL, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def ends(draws: NDArray, tail: float = TAIL) -> tuple[float, float]:
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


def count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
