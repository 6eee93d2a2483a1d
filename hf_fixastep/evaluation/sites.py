"""What models are worth at each site, such as a hospital or a machine, with intervals over patients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_fixastep.evaluation.calibration import Calibration, probabilities
from hf_fixastep.evaluation.intervals import Estimate, confusions, estimate
from hf_fixastep.evaluation.metrics import balanced_accuracy, calibration_error


LEVEL = 0.95


@dataclass
class Answers:
    """What one model says about the images of one site.

    Args:
        logits: [N, K].
    """

    logits: NDArray
    labels: NDArray
    patients: NDArray

    def select(self, rows: NDArray) -> Answers:
        return Answers(self.logits[rows], self.labels[rows], self.patients[rows])


@dataclass
class SiteResult:
    """What all runs found at one site.

    Args:
        images: how many each run saw.
        counts: confusion of each run, [R, K, K].
        calibration_error: before and after the temperature, means over the runs.
        decided: share of images that are decided, and balanced accuracy on these.
        unit: what the intervals are over.
    """

    name: str
    title: str
    images: list[int]
    patients: int
    counts: NDArray
    estimate: Estimate
    calibration_error: list[float]
    decided: list[float] | None
    unit: str = "patients"

    def percent(self, name: str, index: Any = ()) -> list[float]:
        """A rate and the two ends of its interval."""
        parts = (self.estimate.value, self.estimate.low, self.estimate.high)
        return [100 * float(getattr(rates, name)[index]) for rates in parts]

    def interval(self, name: str, index: Any = ()) -> str:
        """Percent with its interval, such as 93.1 (90.2 to 95.4)."""
        return in_words(*self.percent(name, index))

    def of_runs(self, name: str, index: Any = ()) -> NDArray:
        return getattr(self.estimate.runs, name)[(slice(None), *np.atleast_1d(index))]


def in_words(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return "none"
    return f"{value:.1f}" if math.isnan(low) else f"{value:.1f} ({low:.1f} to {high:.1f})"


def summarize(
    name: str,
    title: str,
    answers: Sequence[Answers],
    calibrations: Sequence[Calibration | None],
    *,
    present_only: bool = False,
    draws: int = 2000,
    seed: int = 0,
    unit: str = "patients",
) -> SiteResult:
    """Numbers of one site, from the answers of each run.

    Args:
        present_only: predict only classes that the site has.
        draws: bootstrap samples of patients.
    """
    classes = answers[0].logits.shape[1]
    patients, numbers = np.unique(np.concatenate([each.patients for each in answers]), return_inverse=True)
    groups = np.split(numbers, np.cumsum([len(each.labels) for each in answers])[:-1])
    counts = []
    for each, group in zip(answers, groups, strict=True):
        found = confusions(predict_classes(each, present_only), each.labels, group, classes)
        # patients that this run did not see may be missing at the end
        counts.append(np.pad(found, ((0, len(patients) - len(found)), (0, 0), (0, 0))))
    errors, decided = calibration_numbers(answers, calibrations, present_only)
    return SiteResult(
        name,
        title,
        [len(each.labels) for each in answers],
        len(patients),
        np.stack([own.sum(0) for own in counts]),
        estimate(counts, draws, LEVEL, seed),
        errors,
        decided,
        unit,
    )


def predict_classes(answers: Answers, present_only: bool) -> NDArray:
    present = np.isin(np.arange(answers.logits.shape[1]), answers.labels)
    return np.where(present | (not present_only), answers.logits, -np.inf).argmax(-1)


def calibration_numbers(
    answers: Sequence[Answers], calibrations: Sequence[Calibration | None], present_only: bool
) -> tuple[list[float], list[float] | None]:
    """Calibration error before and after the temperature; share of images decided, and accuracy on these."""
    errors, decided = [], []
    for each, calibration in zip(answers, calibrations, strict=True):
        plain = probabilities(each.logits)
        scaled = probabilities(each.logits, calibration.temperature) if calibration else plain
        errors.append([calibration_error(shares, each.labels) for shares in (plain, scaled)])
        if calibration is not None:
            kept = scaled.max(-1) >= calibration.abstain_below
            chosen = predict_classes(each, present_only)[kept]
            right = balanced_accuracy(chosen, each.labels[kept]) if kept.any() else math.nan
            decided.append([kept.mean(), right])
    means = [float(value) for value in np.mean(errors, 0)]
    complete = len(decided) == len(calibrations)
    return means, [float(value) for value in np.mean(decided, 0)] if complete else None
