"""How well a classifier tells images of known classes from foreign ones, and right answers from wrong ones.

Scores are large for images that look known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp
from sklearn.covariance import LedoitWolf
from sklearn.metrics import roc_auc_score

from hf_fixastep.evaluation.intervals import draw_groups


AT_ONCE = 100  # bootstrap samples


def max_probability(logits: ArrayLike) -> NDArray:
    """Log-odds of the largest probability: the same order as the probability itself, but no ties at 1."""
    ordered = np.sort(np.asarray(logits, dtype=np.float64), axis=-1)
    return ordered[:, -1] - energy(ordered[:, :-1])


def energy(logits: ArrayLike) -> NDArray:
    """Logarithm of the summed exponentials, the negative free energy. Liu et al., 2020, arXiv 2010.03759."""
    return logsumexp(np.asarray(logits, dtype=np.float64), axis=-1)


def nearest_labeled(features: ArrayLike, labeled: ArrayLike, count: int = 3) -> NDArray:
    """Mean cosine of an image's features with those of the `count` most similar labeled images.

    Sun et al., 2022, arXiv 2204.06507, have the distance to the last of them.

    Args:
        features: [N, D].
        labeled: [L, D] features of the labeled images.
    """
    cosines = np.sort(unit_rows(features) @ unit_rows(labeled).T, axis=-1)
    return cosines[:, -count:].mean(-1)


def unit_rows(features: ArrayLike) -> NDArray:
    """Rows of length 1, but for rows of zeros, in float64."""
    rows = np.asarray(features, dtype=np.float64)
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def nearest_class(features: ArrayLike, labeled: ArrayLike, labels: ArrayLike) -> NDArray:
    """Minus the squared Mahalanobis distance to the nearest mean of a class. Lee et al., 2018, arXiv
    1807.03888.

    Classes share one covariance, that of the labeled features around their means. It is shrunk as Ledoit and
    Wolf (2004) do, for there are fewer labels than numbers per image.

    Args:
        features: [N, D].
        labeled: [L, D] features of the labeled images.
        labels: [L] their classes.
    """
    rows, own = np.asarray(features, dtype=np.float64), np.asarray(labeled, dtype=np.float64)
    classes, places = np.unique(np.asarray(labels), return_inverse=True)
    means = np.stack([own[places == place].mean(0) for place in range(len(classes))])
    precision = LedoitWolf(assume_centered=True).fit(own - means[places]).precision_
    distances = [np.sum((rows - mean) @ precision * (rows - mean), axis=-1) for mean in means]
    return -np.min(distances, axis=0)


def auroc(known: ArrayLike, foreign: ArrayLike) -> float:
    """How often a known image scores above a foreign one; ties count half."""
    known, foreign = np.asarray(known), np.asarray(foreign)
    return float(roc_auc_score(np.repeat([1, 0], [len(known), len(foreign)]), np.append(known, foreign)))


@dataclass(frozen=True)
class Area:
    """An AUROC with its interval over patients; with several runs the mean over these.

    Args:
        low: NaN, as `high`, where fewer than two patients have known images, or foreign ones.
        runs: that of each run.
    """

    value: float
    low: float
    high: float
    runs: list[float]


@dataclass(frozen=True)
class Origins:
    """Patient and site of each image, [N].

    Args:
        sites: such as machines.
    """

    patients: NDArray
    sites: NDArray


def auroc_estimate(
    known: Sequence[ArrayLike],
    foreign: Sequence[ArrayLike],
    known_origins: Origins,
    foreign_origins: Origins,
    *,
    same_site: bool = False,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Area:
    """The AUROC with a percentile interval of a bootstrap over patients.

    A patient is drawn with all images, known and foreign, and in all runs alike.

    Args:
        known: scores of each run, all of the same images.
        foreign: likewise.
        same_site: compare images of one site with each other only. Where foreign images come from other
            machines than known ones, a score that tells machines apart does well without it.
    """
    patients = np.concatenate([known_origins.patients, foreign_origins.patients])
    names, places = np.unique(patients, return_inverse=True)
    own, others = np.split(places, [len(known_origins.patients)])
    support = np.stack([np.bincount(part, minlength=len(names)) for part in (own, others)], axis=-1)
    one_each = np.ones((1, len(names)), dtype=np.int64)
    blocks = [(slice(None), slice(None))]
    if same_site:
        both = np.intersect1d(known_origins.sites, foreign_origins.sites)
        blocks = [(known_origins.sites == site, foreign_origins.sites == site) for site in both]

    def areas(weights: NDArray) -> NDArray:
        """[draws, R]"""
        found = []
        for of_known, of_foreign in zip(known, foreign, strict=True):
            counts = [
                count_pairs(
                    np.asarray(of_known)[k],
                    np.asarray(of_foreign)[f],
                    weights[:, own[k]],
                    weights[:, others[f]],
                )
                for k, f in blocks
            ]
            won, pairs = np.sum(counts, axis=0) if counts else np.zeros((2, len(weights)))
            found.append(np.divide(won, pairs, out=np.full(len(won), np.nan), where=pairs > 0))
        return np.stack(found, axis=-1)

    runs = areas(one_each)[0]
    low = high = float("nan")
    if np.all((support > 0).sum(0) >= 2) and np.isfinite(runs).all():
        weights = draw_groups(support[None], draws, seed)
        samples = np.concatenate([areas(weights[at : at + AT_ONCE]) for at in range(0, draws, AT_ONCE)])
        low, high = np.nanquantile(samples.mean(-1), [(1 - level) / 2, (1 + level) / 2]).tolist()
    return Area(float(runs.mean()), low, high, runs.tolist())


def count_pairs(
    known: NDArray, foreign: NDArray, known_weights: NDArray, foreign_weights: NDArray
) -> tuple[NDArray, NDArray]:
    """Pairs of a known and a foreign image in which the known one scores higher, ties as halves, and all.

    Args:
        known: scores [N].
        foreign: scores [M].
        known_weights: how often each image counts, [draws, N].
        foreign_weights: [draws, M].
    """
    scores = np.concatenate([known, foreign])
    order = np.argsort(scores, kind="stable")
    if not len(order):
        return np.zeros(len(known_weights)), np.zeros(len(known_weights))
    first = np.flatnonzero(np.append(True, np.diff(scores[order]) != 0))  # of each group of equal scores
    parts = []
    for weights, place in ((known_weights, 0), (foreign_weights, len(known))):
        wide = np.zeros((len(weights), len(scores)))
        wide[:, place : place + weights.shape[1]] = weights
        parts.append(np.add.reduceat(wide[:, order], first, axis=1))
    above, below = parts
    foreign_below = np.cumsum(below, axis=1) - below / 2
    return (above * foreign_below).sum(1), above.sum(1) * below.sum(1)


def risk_coverage(scores: ArrayLike, correct: ArrayLike) -> tuple[NDArray, NDArray]:
    """Share of images answered and share of wrong answers among them, for every threshold on the scores.

    Images of equal score are answered together, so that their order does not matter.
    """
    scores, wrong = np.asarray(scores), 1 - np.asarray(correct, dtype=np.float64)
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.append(np.diff(scores[order]) != 0, True))  # of each group of equal scores
    answered = last + 1
    return answered / len(scores), np.cumsum(wrong[order])[last] / answered


def risk_coverage_area(scores: ArrayLike, correct: ArrayLike) -> float:
    """Mean risk over all images, each at the threshold that just answers it; small is good."""
    coverage, risk = risk_coverage(scores, correct)
    return float(np.sum(np.diff(coverage, prepend=0.0) * risk))


def open_set_metrics(scores: Mapping[str, Mapping[str, ArrayLike]], correct: ArrayLike) -> dict[str, float]:
    """Accuracy, AUROC of known against each kind of foreign images, and areas of risk and coverage.

    Args:
        scores: by name of the score, then by name of the images; those of known ones are "test".
        correct: whether each known image is classified right; answers for foreign images are all wrong.
    """
    metrics = {"accuracy": float(np.mean(np.asarray(correct)))}
    for name, by_split in scores.items():
        metrics |= {
            f"auroc_{s}_{name}": auroc(by_split["test"], by_split[s]) for s in by_split if s != "test"
        }
        metrics[f"risk_coverage_area_{name}"] = risk_coverage_area(by_split["test"], correct)
        every, right = with_foreign(by_split, correct)
        metrics[f"risk_coverage_area_with_foreign_{name}"] = risk_coverage_area(every, right)
    return metrics


def with_foreign(by_split: Mapping[str, ArrayLike], correct: ArrayLike) -> tuple[NDArray, NDArray]:
    """Scores of all images, known and foreign, and whether their answers are right."""
    every = np.concatenate([np.asarray(by_split["test"]), *(by_split[s] for s in by_split if s != "test")])
    return every, np.concatenate([correct, np.zeros(len(every) - len(np.asarray(correct)))])
