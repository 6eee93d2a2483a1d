"""Metrics of a classifier: plain functions for the Trainer, and a metric of `evaluate` for what is reported.

Both give the same numbers. The Trainer, which evaluates often, is spared the way through Arrow.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence

import datasets
import evaluate
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax
from transformers import EvalPrediction


def accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """Share of class ids that are right."""
    return float(np.mean(np.asarray(predictions) == np.asarray(references)))


def per_class_recall(
    predictions: ArrayLike, references: ArrayLike, num_classes: int | None = None
) -> NDArray:
    """Share of each class that is found, by class id; NaN for classes absent from the references.

    Args:
        num_classes: needed when the last classes may be absent; else the highest reference plus one.
    """
    references = np.asarray(references)
    found = references[np.asarray(predictions) == references]
    support = np.bincount(references, minlength=num_classes or 0)
    return np.where(support > 0, np.bincount(found, minlength=len(support)) / np.maximum(support, 1), np.nan)


def balanced_accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """Mean recall over the classes present in the references."""
    return float(np.nanmean(per_class_recall(predictions, references)))


def calibration_error(probabilities: ArrayLike, references: ArrayLike, bins: int = 15) -> float:
    """Expected calibration error: the distance of accuracy and confidence, averaged over the images.

    Guo et al., 2017, arXiv 1706.04599, equation 3. Bins are of equal width and hold their upper edges.
    """
    probabilities = np.asarray(probabilities)  # [N, K]
    confidence = probabilities.max(-1)
    correct = probabilities.argmax(-1) == np.asarray(references)
    bin_ids = np.digitize(confidence, np.linspace(0, 1, bins + 1)[1:-1], right=True)
    return float(np.abs(np.bincount(bin_ids, weights=correct - confidence)).sum() / len(confidence))


def classification_metrics(class_names: Sequence[str]) -> Callable[[EvalPrediction], dict[str, float]]:
    """All metrics of this module as flat scalars, for `Trainer(compute_metrics=...)`.

    The recall of each class in the references is `recall_<class name>`, with `_` for characters that
    loggers refuse.
    """
    names = [re.sub(r"[^A-Za-z0-9_-]", "_", name) for name in class_names]
    names = [name if names.count(name) == 1 else f"{name}_{i}" for i, name in enumerate(names)]

    def compute(evaluation: EvalPrediction) -> dict[str, float]:
        logits, references = np.asarray(evaluation.predictions, dtype=float), evaluation.label_ids
        predictions = logits.argmax(-1)
        recalls = per_class_recall(predictions, references, len(names))
        return {
            "accuracy": accuracy(predictions, references),
            "balanced_accuracy": float(np.nanmean(recalls)),
            "calibration_error": calibration_error(softmax(logits, axis=-1), references),
            **{f"recall_{n}": float(r) for n, r in zip(names, recalls, strict=True) if not np.isnan(r)},
        }

    return compute


class ClassifierMetric(evaluate.Metric):
    """Accuracy, balanced accuracy, calibration error and the recall of each class, from logits."""

    def _info(self) -> evaluate.MetricInfo:
        logits, labels = datasets.List(datasets.Value("float64")), datasets.Value("int64")
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description="Logits of each image as predictions, class ids as references.",
            features=datasets.Features({"predictions": logits, "references": labels}),
        )

    def _compute(
        self, predictions: ArrayLike, references: ArrayLike, class_names: Sequence[str]
    ) -> dict[str, float]:
        evaluation = EvalPrediction(np.asarray(predictions), np.asarray(references))
        return classification_metrics(class_names)(evaluation)


def evaluate_classifier(
    logits: ArrayLike, labels: ArrayLike, class_names: Sequence[str], prefix: str = ""
) -> dict[str, float]:
    """The metrics of a finished model, as `evaluate` computes them.

    Args:
        logits: [N, K].
        labels: [N] class ids.
        prefix: goes before each name, such as "test_".
    """
    with tempfile.TemporaryDirectory() as folder:  # made by `evaluate` even where it keeps all in memory
        metric = ClassifierMetric(keep_in_memory=True, cache_dir=folder)
        found = metric.compute(
            predictions=np.asarray(logits), references=np.asarray(labels), class_names=class_names
        )
    return {f"{prefix}{name}": value for name, value in found.items()}
