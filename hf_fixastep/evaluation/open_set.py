"""How well a classifier tells images of known classes from foreign ones, and right answers from wrong ones.

Scores are large for images that look known.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import logsumexp
from sklearn.metrics import roc_auc_score


def max_probability(logits: ArrayLike) -> NDArray:
    """Log-odds of the largest probability: the same order as the probability itself, but no ties at 1."""
    ordered = np.sort(np.asarray(logits, dtype=np.float64), axis=-1)
    return ordered[:, -1] - energy(ordered[:, :-1])


def energy(logits: ArrayLike) -> NDArray:
    """Logarithm of the summed exponentials, the negative free energy. Liu et al., 2020, arXiv 2010.03759."""
    return logsumexp(np.asarray(logits, dtype=np.float64), axis=-1)


def auroc(known: ArrayLike, foreign: ArrayLike) -> float:
    """How often a known image scores above a foreign one; ties count half."""
    known, foreign = np.asarray(known), np.asarray(foreign)
    return float(roc_auc_score(np.repeat([1, 0], [len(known), len(foreign)]), np.append(known, foreign)))


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
