"""Metrics of a classifier: plain numpy functions, the same as `evaluate.Metric`, and all of them for the
Trainer.

The Trainer gets the plain functions: the Arrow round trip of `evaluate` costs 20 times as much.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import datasets
import evaluate
import numpy as np
from numpy.typing import ArrayLike, NDArray
from transformers import EvalPrediction


def accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """Share of class ids that are right."""
    return float(np.mean(np.asarray(predictions) == np.asarray(references)))


def per_class_recall(
    predictions: ArrayLike, references: ArrayLike, num_classes: int | None = None
) -> NDArray:
    """Share of each class that is found, by class id; NaN for classes absent from the references.

    Args:
        num_classes: needed when the last classes may be absent; the default is the highest reference plus
            one.
    """
    references = np.asarray(references)
    found = references[np.asarray(predictions) == references]
    support = np.bincount(references, minlength=num_classes or 0)
    return np.where(support > 0, np.bincount(found, minlength=len(support)) / np.maximum(support, 1), np.nan)


def balanced_accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """Mean recall over the classes present in the references."""
    return float(np.nanmean(per_class_recall(predictions, references)))


def calibration_error(probabilities: ArrayLike, references: ArrayLike, bins: int = 15) -> float:
    """Expected calibration error: distance of accuracy and confidence, over bins of equal width, weighted by
    size.

    Guo et al., 2017, arXiv 1706.04599, equation 3. A bin holds its upper edge.
    """
    probabilities = np.asarray(probabilities)  # [N, K]
    confidence = probabilities.max(-1)
    correct = probabilities.argmax(-1) == np.asarray(references)
    bin_ids = np.digitize(confidence, np.linspace(0, 1, bins + 1)[1:-1], right=True)
    return float(np.abs(np.bincount(bin_ids, weights=correct - confidence)).sum() / len(confidence))


class LocalMetric(evaluate.Metric):
    """Base of our metrics: description from the docstring, class ids as inputs, nothing on disk.

    Args:
        keep_in_memory: turn off to gather over processes by files, as `evaluate` does with `num_process`.
    """

    inputs = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}

    def __init__(self, keep_in_memory: bool = True, **kwargs: object) -> None:
        super().__init__(keep_in_memory=keep_in_memory, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description=" and ".join(self.inputs),
            features=datasets.Features(self.inputs),
        )

    def _build_data_dir(self) -> str:
        # evaluate 0.4.6 makes a folder in the user's cache even if it keeps everything in memory
        return self._data_dir_root if self.keep_in_memory else super()._build_data_dir()


class Accuracy(LocalMetric):
    """Share of class ids that are right."""

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": accuracy(predictions, references)}


class BalancedAccuracy(LocalMetric):
    """Mean recall over the classes present in the references."""

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"balanced_accuracy": balanced_accuracy(predictions, references)}


class PerClassRecall(LocalMetric):
    """Share of each class that is found, by class id; NaN for classes absent from the references."""

    def _compute(
        self, predictions: list[int], references: list[int], num_classes: int | None = None
    ) -> dict[str, list[float]]:
        return {"per_class_recall": per_class_recall(predictions, references, num_classes).tolist()}


class CalibrationError(LocalMetric):
    """Expected calibration error of class probabilities, over bins of equal width."""

    inputs = {
        "probabilities": datasets.List(datasets.Value("float64")),
        "references": datasets.Value("int64"),
    }

    def _compute(
        self, probabilities: list[list[float]], references: list[int], bins: int = 15
    ) -> dict[str, float]:
        return {"calibration_error": calibration_error(probabilities, references, bins)}


def classification_metrics(class_names: Sequence[str]) -> Callable[[EvalPrediction], dict[str, float]]:
    """All metrics of this module as flat scalars, for `Trainer(compute_metrics=...)`.

    The recall of each class in the references is `recall_<class name>`, with `_` for characters that loggers
    refuse.
    """
    names = [re.sub(r"[^A-Za-z0-9_-]", "_", name) for name in class_names]
    names = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]

    def compute(evaluation: EvalPrediction) -> dict[str, float]:
        logits, references = np.asarray(evaluation.predictions, dtype=float), evaluation.label_ids
        probabilities = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        predictions = logits.argmax(-1)
        recalls = per_class_recall(predictions, references, len(names))
        return {
            "accuracy": accuracy(predictions, references),
            "balanced_accuracy": float(np.nanmean(recalls)),
            "calibration_error": calibration_error(probabilities, references),
            **{f"recall_{n}": float(r) for n, r in zip(names, recalls, strict=True) if not np.isnan(r)},
        }

    return compute
