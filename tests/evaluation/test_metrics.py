from __future__ import annotations

import evaluate
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, balanced_accuracy_score, recall_score
from transformers import EvalPrediction

from hf_fixastep.evaluation.metrics import (
    Accuracy,
    BalancedAccuracy,
    CalibrationError,
    PerClassRecall,
    classification_metrics,
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


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.stack([np.exp(row) / np.exp(row).sum() for row in logits.astype(float)])


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


def test_accuracy_equals_scikit_learn(ids: tuple) -> None:
    result = Accuracy().compute(predictions=ids[0], references=ids[1])
    assert result == {"accuracy": pytest.approx(accuracy_score(ids[1], ids[0]))}


def test_balanced_accuracy_equals_scikit_learn(ids: tuple) -> None:
    result = BalancedAccuracy().compute(predictions=ids[0], references=ids[1])
    assert result == {"balanced_accuracy": pytest.approx(balanced_accuracy_score(ids[1], ids[0]))}


def test_per_class_recall_equals_scikit_learn(ids: tuple) -> None:
    result = PerClassRecall().compute(predictions=ids[0], references=ids[1])
    assert result["per_class_recall"] == pytest.approx(recall_score(ids[1], ids[0], average=None))


def test_calibration_error_equals_a_literal_loop(ids: tuple, logits: np.ndarray) -> None:
    probabilities = softmax(logits)
    result = CalibrationError().compute(probabilities=probabilities, references=ids[1])
    assert result == {"calibration_error": pytest.approx(calibration_error_by_a_loop(probabilities, ids[1]))}


def test_calibration_error_by_hand() -> None:
    # two rows near 0.9, one of them wrong: |1/2 - 0.9|; one row at 0.6, right: |1 - 0.6|
    probabilities = [[0.89, 0.11], [0.09, 0.91], [0.6, 0.4]]
    result = CalibrationError().compute(probabilities=probabilities, references=[0, 0, 0])
    assert result["calibration_error"] == pytest.approx(2 / 3 * 0.4 + 1 / 3 * 0.4)


def test_batches_add_up_to_the_whole(ids: tuple, logits: np.ndarray) -> None:
    predictions, references = ids
    probabilities = softmax(logits)
    accuracy, calibration = Accuracy(), CalibrationError()
    for rows in (slice(0, 200), slice(200, 350), slice(350, 500)):
        accuracy.add_batch(predictions=predictions[rows], references=references[rows])
        calibration.add_batch(probabilities=probabilities[rows], references=references[rows])
    assert accuracy.compute()["accuracy"] == pytest.approx(accuracy_score(references, predictions))
    assert calibration.compute()["calibration_error"] == pytest.approx(
        calibration_error_by_a_loop(probabilities, references)
    )


def test_absent_classes_have_no_recall_and_no_share_in_the_balance() -> None:
    inputs = {"predictions": [0, 2, 2, 1], "references": [0, 0, 2, 2]}
    recall = PerClassRecall().compute(**inputs, num_classes=4)["per_class_recall"]
    assert recall == pytest.approx([0.5, np.nan, 0.5, np.nan], nan_ok=True)
    assert BalancedAccuracy().compute(**inputs)["balanced_accuracy"] == 0.5


def test_constant_predictions_have_chance_balance(ids: tuple) -> None:
    result = BalancedAccuracy().compute(predictions=np.full(500, 3), references=ids[1])
    assert result["balanced_accuracy"] == pytest.approx(1 / CLASSES)


def test_metrics_combine(ids: tuple) -> None:
    result = evaluate.combine([Accuracy(), BalancedAccuracy()]).compute(predictions=ids[1], references=ids[1])
    assert result == {"accuracy": 1.0, "balanced_accuracy": 1.0}


def test_metrics_leave_no_files_in_the_cache(tmp_path, ids: tuple) -> None:
    Accuracy(cache_dir=str(tmp_path)).compute(predictions=ids[0], references=ids[1])
    assert list(tmp_path.iterdir()) == []


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
            "calibration_error": calibration_error_by_a_loop(softmax(logits), references),
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
