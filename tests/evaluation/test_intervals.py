from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, recall_score

from hf_fixastep.evaluation.intervals import (
    confusions,
    draw_groups,
    estimate,
    mean_interval,
    rates,
    split_intervals,
    wilson,
)


CLASSES = 4


@pytest.mark.parametrize(("hits", "count"), [(0, 5), (5, 5), (3, 7), (812, 1000), (1, 1)])
def test_the_interval_of_a_share_is_wilsons(hits, count):
    """His formula, with the quantile of the normal distribution at 97.5 %."""
    z, share = 1.959963984540054, hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * np.sqrt(share * (1 - share) / count + z * z / (4 * count**2)) / (1 + z * z / count)
    expected = (max(0, middle - half), min(1, middle + half))
    assert wilson(share, count) == pytest.approx(expected, abs=1e-12)
    assert mean_interval([share], [count]) == pytest.approx(expected, abs=1e-12)


def test_the_interval_of_a_mean_of_shares_holds_it_in_95_of_100_cases():
    random, shares, counts = np.random.default_rng(0), np.array([0.95, 0.8, 0.6, 0.99]), [60, 25, 40, 15]
    draws = random.binomial(counts, shares, size=(300, 4)) / counts
    ends = np.array([mean_interval(draw, counts) for draw in draws])
    held = np.mean((ends[:, 0] <= shares.mean()) & (shares.mean() <= ends[:, 1]))
    assert 0.92 <= held <= 0.99


def test_a_split_has_intervals_if_all_its_recalls_are_known():
    metrics = {"test_accuracy": 0.875, "test_recall_cat": 0.9, "test_recall_owl": 0.8, "other_accuracy": 1.0}
    found = split_intervals(metrics, {"test": [30, 0, 10], "other": [4, 0, 0]})
    expected = {
        "test_accuracy": wilson(0.875, 40),
        "test_balanced_accuracy": mean_interval([0.9, 0.8], [30, 10]),
    }
    assert found == expected


def draw_images(
    patients: int, seed: int, classes: int = CLASSES
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predictions, labels and patients; some patients are harder than others."""
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(patients), random.integers(3, 12, patients))
    labels = random.integers(0, classes, len(groups))
    right = random.random(len(groups)) < random.beta(4, 1, patients)[groups]
    return np.where(right, labels, random.integers(0, CLASSES, len(groups))), labels, groups


def naive_specificity(predictions: np.ndarray, labels: np.ndarray, kind: int) -> float:
    return recall_score(labels != kind, predictions != kind)


def test_rates_are_those_of_scikit_learn():
    predictions, labels, _ = draw_images(30, seed=1)
    found = rates(confusion_matrix(labels, predictions))
    np.testing.assert_allclose(found.sensitivity, recall_score(labels, predictions, average=None))
    expected = [naive_specificity(predictions, labels, kind) for kind in range(CLASSES)]
    np.testing.assert_allclose(found.specificity, expected)
    assert found.balanced_accuracy == pytest.approx(balanced_accuracy_score(labels, predictions))


def test_a_class_without_images_has_a_specificity_but_no_sensitivity():
    predictions, labels, _ = draw_images(30, seed=2)
    kept = labels != 1
    predictions, labels = predictions[kept], labels[kept]
    found = rates(confusion_matrix(labels, predictions, labels=range(CLASSES)))
    assert np.isnan(found.sensitivity[1])
    assert found.specificity[1] == pytest.approx(naive_specificity(predictions, labels, 1))
    assert found.balanced_accuracy == pytest.approx(
        recall_score(labels, predictions, labels=[0, 2, 3], average="macro")
    )


def test_a_single_class_has_no_specificity():
    found = rates([[3, 1], [0, 0]])
    np.testing.assert_array_equal(found.sensitivity, [0.75, np.nan])
    np.testing.assert_array_equal(found.specificity, [np.nan, 0.75])
    assert found.balanced_accuracy == 0.75


def test_confusions_of_groups_are_those_of_scikit_learn():
    predictions, labels, groups = draw_images(9, seed=3)
    found = confusions(predictions, labels, groups, CLASSES)
    for group in range(9):
        own = groups == group
        expected = confusion_matrix(labels[own], predictions[own], labels=range(CLASSES))
        np.testing.assert_array_equal(found[group], expected)


def test_intervals_are_the_quantiles_of_a_loop_over_the_same_samples():
    predictions, labels, groups = draw_images(12, seed=4)
    counts = confusions(predictions, labels, groups, CLASSES)
    found = estimate([counts], draws=40, seed=5)
    members = [np.flatnonzero(groups == group) for group in range(12)]
    rows = []
    for weights in draw_groups(counts.sum(-1)[None], 40, seed=5):
        images = np.concatenate([members[group] for group in np.repeat(np.arange(12), weights)])
        y, guess = labels[images], predictions[images]
        specificity = [naive_specificity(guess, y, kind) for kind in range(CLASSES)]
        rows.append([balanced_accuracy_score(y, guess), *recall_score(y, guess, average=None), *specificity])
    for end, quantile in ((found.low, 0.025), (found.high, 0.975)):
        expected = np.quantile(rows, quantile, axis=0)
        assert end.balanced_accuracy == pytest.approx(expected[0])
        np.testing.assert_allclose(end.sensitivity, expected[1:5])
        np.testing.assert_allclose(end.specificity, expected[5:])


def test_intervals_agree_with_an_independent_loop():
    predictions, labels, groups = draw_images(25, seed=6)
    found = estimate([confusions(predictions, labels, groups, CLASSES)], draws=4000, seed=0)
    random = np.random.default_rng(77)
    members = [np.flatnonzero(groups == group) for group in range(25)]
    values = []
    for _ in range(2000):
        images = np.concatenate([members[group] for group in random.integers(0, 25, 25)])
        recalls = [
            np.mean(predictions[own] == labels[own])
            for own in (images[labels[images] == k] for k in range(4))
        ]
        values.append(np.mean(recalls))
    expected = np.quantile(values, [0.025, 0.975])
    assert [found.low.balanced_accuracy, found.high.balanced_accuracy] == pytest.approx(expected, abs=0.012)


def test_images_of_one_patient_count_as_alike():
    """Each image ten times is no further evidence; ten times as many patients narrow the interval."""
    predictions, labels, groups = draw_images(20, seed=7)
    width = lambda found: found.high.balanced_accuracy - found.low.balanced_accuracy  # noqa: E731
    once = confusions(predictions, labels, groups, CLASSES)
    more = np.concatenate([once] * 10)
    assert width(estimate([10 * once])) == pytest.approx(width(estimate([once])))
    assert width(estimate([more])) < 0.5 * width(estimate([once]))


def test_the_seed_decides_the_interval():
    counts = confusions(*draw_images(20, seed=8), CLASSES)
    first, again, other = (
        estimate([counts], draws=300, seed=seed).low.balanced_accuracy for seed in (1, 1, 2)
    )
    assert first == again != other


def test_every_sample_has_every_class_of_the_data():
    """Class 3 is in two of ten patients: one of nine unrestricted samples would lack it."""
    support = np.ones((1, 10, 4), int)
    support[0, 2:, 3] = 0
    support[0, :, 1] = 0
    weights = draw_groups(support, 500, seed=0)
    assert weights.shape == (500, 10)
    assert np.all(weights.sum(1) == 10)
    assert np.all(weights[:, :2].sum(1) > 0)


def test_what_one_patient_shows_has_no_interval():
    counts = confusions(*draw_images(10, seed=9), CLASSES)
    counts[1:, 2] = 0
    counts[0, 2] = [0, 1, 4, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = estimate([counts], draws=200)
    assert found.value.sensitivity[2] == 0.8
    assert np.isnan([found.low.sensitivity[2], found.high.sensitivity[2], found.low.balanced_accuracy]).all()
    assert np.isfinite(found.low.sensitivity[[0, 1, 3]]).all()


def test_a_perfect_class_has_the_exact_bound_over_patients():
    """All of 13 patients right: 0.025 ** (1 / 13), as Clopper and Pearson have it; none: its mirror image."""
    counts = np.tile([[4, 0], [4, 0]], (13, 1, 1))
    found = estimate([counts], draws=200)
    bound = 0.025 ** (1 / 13)
    np.testing.assert_allclose([found.low.sensitivity, found.high.sensitivity], [[bound, 0], [1, 1 - bound]])
    assert [found.low.balanced_accuracy, found.high.balanced_accuracy] == pytest.approx(
        [bound / 2, 1 - bound / 2]
    )


def test_runs_are_averaged_and_resampled_together():
    """Two equal runs are as sure as one; runs on other patients than each other are independent."""
    first = confusions(*draw_images(20, seed=10), CLASSES)
    second = confusions(*draw_images(20, seed=11), CLASSES)
    one, two = estimate([first], seed=3), estimate([first, first], seed=3)
    assert two.low.balanced_accuracy == pytest.approx(one.low.balanced_accuracy)
    mixed = estimate([first, second])
    expected = [rates(counts.sum(0)).balanced_accuracy for counts in (first, second)]
    np.testing.assert_allclose(mixed.runs.balanced_accuracy, expected)
    assert mixed.value.balanced_accuracy == pytest.approx(np.mean(expected))
    empty = np.zeros_like(first)
    apart = estimate([np.concatenate([first, empty]), np.concatenate([empty, first])])
    width = lambda found: found.high.balanced_accuracy - found.low.balanced_accuracy  # noqa: E731
    assert width(apart) < 0.85 * width(one)
