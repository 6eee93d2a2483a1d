from __future__ import annotations

from pathlib import Path

import evaluate
import numpy as np
import pytest
from scipy.special import softmax
from sklearn.metrics import accuracy_score, balanced_accuracy_score, recall_score
from transformers import EvalPrediction

from hf_fixastep.evaluation.metrics import (
    ClassifierMetric,
    accuracy,
    balanced_accuracy,
    calibration_error,
    classification_metrics,
    evaluate_classifier,
    per_class_recall,
)


CLASSES = 7


@pytest.fixture
def ids() -> tuple[np.ndarray, np.ndarray]:
    """Predictions that are right more often than by chance, and unbalanced references."""
    random = np.random.default_rng(0)
    references = random.choice(CLASSES, 500, p=np.arange(1, CLASSES + 1) / 28)
    return np.where(random.random(500) < 0.4, references, random.integers(0, CLASSES, 500)), references


@pytest.fixture
def logits(ids: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    random = np.random.default_rng(1)
    return (random.normal(size=(500, CLASSES)) + 2 * np.eye(CLASSES)[ids[1]]).astype(np.float32)


def calibration_error_by_a_loop(probabilities: np.ndarray, references: np.ndarray) -> float:
    error = 0.0
    for i in range(15):
        inside = [
            (max(row), np.argmax(row) == y)
            for row, y in zip(probabilities, references, strict=True)
            if i / 15 < max(row) <= (i + 1) / 15
        ]
        if inside:
            confidence = sum(c for c, _ in inside) / len(inside)
            right = sum(r for _, r in inside) / len(inside)
            error += len(inside) / len(references) * abs(right - confidence)
    return error


def test_single_metrics_equal_scikit_learn(ids: tuple) -> None:
    predictions, references = ids
    assert accuracy(predictions, references) == pytest.approx(accuracy_score(references, predictions))
    expected = balanced_accuracy_score(references, predictions)
    assert balanced_accuracy(predictions, references) == pytest.approx(expected)
    recalls = per_class_recall(predictions, references)
    assert recalls == pytest.approx(recall_score(references, predictions, average=None))
    assert balanced_accuracy(np.full(500, 3), references) == pytest.approx(1 / CLASSES)


def test_calibration_error_by_hand() -> None:
    # two rows near 0.9, one of them wrong: |1/2 - 0.9|; one row at 0.6, right: |1 - 0.6|
    probabilities = [[0.89, 0.11], [0.09, 0.91], [0.6, 0.4]]
    assert calibration_error(probabilities, [0, 0, 0]) == pytest.approx(2 / 3 * 0.4 + 1 / 3 * 0.4)


def test_absent_classes_have_no_recall_and_no_share_in_the_balance() -> None:
    recalls = per_class_recall([0, 2, 2, 1], [0, 0, 2, 2], num_classes=4)
    assert recalls == pytest.approx([0.5, np.nan, 0.5, np.nan], nan_ok=True)
    assert balanced_accuracy([0, 2, 2, 1], [0, 0, 2, 2]) == 0.5


@pytest.fixture
def no_cache(tmp_path, monkeypatch) -> Path:
    """Where `evaluate` keeps its files, unless it is told otherwise."""
    monkeypatch.setattr(evaluate.config, "HF_METRICS_CACHE", str(tmp_path))
    return tmp_path


def test_what_is_reported_is_what_the_trainer_gets_and_leaves_no_files(ids, logits, no_cache) -> None:
    names = [f"class {i}" for i in range(CLASSES)]
    plain = classification_metrics(names)(EvalPrediction(logits, ids[1]))
    assert evaluate_classifier(logits, ids[1], names) == plain
    named = evaluate_classifier(logits, ids[1], names, prefix="test_")
    assert named == {f"test_{name}": value for name, value in plain.items()}
    assert list(no_cache.iterdir()) == []


def test_batches_add_up_to_the_whole(ids: tuple, logits: np.ndarray, tmp_path) -> None:
    metric = ClassifierMetric(cache_dir=str(tmp_path), keep_in_memory=True)
    for rows in (slice(0, 200), slice(200, 350), slice(350, 500)):
        metric.add_batch(predictions=logits[rows], references=ids[1][rows])
    names = [f"class {i}" for i in range(CLASSES)]
    assert metric.compute(class_names=names) == evaluate_classifier(logits, ids[1], names)


def test_the_trainer_gets_every_metric_as_a_number(ids: tuple, logits: np.ndarray) -> None:
    references = ids[1]
    result = classification_metrics([f"class {i}" for i in range(CLASSES)])(
        EvalPrediction(logits, references)
    )
    recalls = recall_score(references, logits.argmax(-1), average=None)
    assert result == pytest.approx(
        {
            "accuracy": accuracy_score(references, logits.argmax(-1)),
            "balanced_accuracy": balanced_accuracy_score(references, logits.argmax(-1)),
            "calibration_error": calibration_error_by_a_loop(softmax(logits.astype(float), -1), references),
            **{f"recall_class_{i}": recall for i, recall in enumerate(recalls)},
        }
    )
    assert {type(value) for value in result.values()} == {float}


def test_large_logits_do_not_overflow() -> None:
    result = classification_metrics(["a", "b"])(
        EvalPrediction(np.array([[1e4, 0.0], [0.0, 1e4]]), np.array([0, 1]))
    )
    assert result == {
        "accuracy": 1.0,
        "balanced_accuracy": 1.0,
        "calibration_error": 0.0,
        "recall_a": 1.0,
        "recall_b": 1.0,
    }


def test_absent_classes_are_left_out_of_the_trainer_metrics() -> None:
    result = classification_metrics(["a", "b", "c"])(
        EvalPrediction(np.eye(3)[[0, 1, 1]], np.array([0, 0, 1]))
    )
    assert {name for name in result if name.startswith("recall_")} == {"recall_a", "recall_b"}
    assert result["balanced_accuracy"] == 0.75


def test_class_names_become_keys_that_loggers_accept_and_stay_apart() -> None:
    names = ["A4C", "A4C/A2C", "other view", "other_view", "猫"]
    result = classification_metrics(names)(EvalPrediction(np.eye(5), np.arange(5)))
    assert [name for name in result if name.startswith("recall_")] == [
        "recall_A4C",
        "recall_A4C_A2C",
        "recall_other_view_2",
        "recall_other_view_3",
        "recall__",
    ]
