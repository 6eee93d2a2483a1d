from __future__ import annotations

import re

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier

from hf_fixastep.features.probe import (
    DEFAULT_STRENGTH,
    STRENGTHS,
    TEMPERATURES,
    fit_neighbours,
    fit_probe,
    split,
    standardisation,
)


def clusters(
    images: int = 60, dimensions: int = 8, classes: int = 3, apart: float = 1.0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Features of unequal scale and place, and labels in turn."""
    random = np.random.default_rng(seed)
    labels = np.arange(images) % classes
    centres = apart * random.normal(size=(classes, dimensions))
    features = centres[labels] + random.normal(size=(images, dimensions))
    return features * random.uniform(0.1, 9, dimensions) + random.normal(0, 20, dimensions), labels


def standardised(features: np.ndarray, by: np.ndarray) -> np.ndarray:
    return (features - by.mean(0)) / by.std(0)


def naive(features: np.ndarray, labels: np.ndarray, strength: float) -> LogisticRegression:
    return LogisticRegression(C=strength, tol=1e-10, max_iter=10_000).fit(features, labels)


def naive_held_out(features: np.ndarray, labels: np.ndarray, strength: float, parts: list) -> np.ndarray:
    """Log-probabilities of each image by a regression of the other folds."""
    found = np.empty((len(labels), labels.max() + 1))
    for seen, unseen in parts:
        found[unseen] = naive(features[seen], labels[seen], strength).predict_log_proba(features[unseen])
    return found


def naive_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    def loss(log_temperature: float) -> float:
        return log_loss(labels, softmax(logits / np.exp(log_temperature), axis=1))

    return float(np.exp(minimize_scalar(loss, (-1, 1), tol=1e-10).x))


def folds_of(labels: np.ndarray, folds: int = 5, seed: int = 0) -> list:
    return list(StratifiedKFold(folds, shuffle=True, random_state=seed).split(labels, labels))


# ---- the probe

SHAPES = [(60, 8), (30, 80)]


@pytest.mark.parametrize(("images", "dimensions"), SHAPES, ids=["tall", "wide"])
def test_the_probe_is_the_regression_of_scikit_learn_on_standardised_features(images, dimensions) -> None:
    """Also where it is solved in the span of the images, which are fewer than the dimensions."""
    features, labels = clusters(images, dimensions, apart=0.25)
    others = clusters(20, dimensions, seed=1)[0]
    probe = fit_probe(features, labels, 3, strengths=[0.2])
    rows = standardised(features, features)
    temperature = naive_temperature(naive_held_out(rows, labels, 0.2, folds_of(labels)), labels)
    assert probe.temperature == pytest.approx(temperature, rel=1e-4)
    expected = naive(rows, labels, 0.2).decision_function(standardised(others, features)) / temperature
    np.testing.assert_allclose(
        log_softmax(probe.logits(others), axis=1), log_softmax(expected, axis=1), rtol=1e-5, atol=1e-4
    )
    np.testing.assert_allclose(probe.probabilities(others), softmax(expected, axis=1), atol=1e-4)
    assert (probe.weight.shape, probe.bias.shape, probe.weight.dtype) == ((3, dimensions), (3,), np.float64)


def test_two_classes_have_a_logit_each() -> None:
    features, labels = clusters(classes=2, apart=0.5)
    probe = fit_probe(features, labels, 2, strengths=[0.1])
    rows = standardised(features, features)
    expected = naive(rows, labels, 0.1).decision_function(rows) / probe.temperature
    assert probe.weight.shape == (2, 8)
    np.testing.assert_allclose(np.diff(probe.logits(features))[:, 0], expected, atol=1e-4)


@pytest.mark.parametrize(("images", "dimensions"), SHAPES, ids=["tall", "wide"])
def test_held_out_logits_are_those_of_a_probe_of_the_other_folds(images, dimensions) -> None:
    features, labels = clusters(images, dimensions, apart=0.25)
    probe = fit_probe(features, labels, 3, seed=4, folds=3)
    rows, parts = standardised(features, features), folds_of(labels, 3, 4)
    expected = naive_held_out(rows, labels, probe.strength, parts) / probe.temperature
    np.testing.assert_allclose(log_softmax(probe.held_out, axis=1), log_softmax(expected, axis=1), atol=1e-3)


@pytest.mark.parametrize("apart", [0.2, 1.0, 4.0])
def test_the_strength_is_the_one_of_lowest_held_out_log_loss(apart: float) -> None:
    features, labels = clusters(90, 20, apart=apart)
    rows = standardised(features, features)
    losses = [
        log_loss(labels, np.exp(naive_held_out(rows, labels, strength, folds_of(labels))))
        for strength in STRENGTHS
    ]
    assert fit_probe(features, labels, 3).strength == STRENGTHS[np.argmin(losses)]


def test_the_order_of_the_strengths_does_not_matter() -> None:
    features, labels = clusters(apart=0.5)
    found = fit_probe(features, labels, 3, strengths=[0.1, 1e-3, 10, 0.01])
    expected = fit_probe(features, labels, 3, strengths=[1e-3, 0.01, 0.1, 10])
    np.testing.assert_array_equal(found.weight, expected.weight)


def test_of_equal_strengths_the_strongest_regularisation_is_taken() -> None:
    probe = fit_probe(np.ones((30, 4)), np.arange(30) % 3, 3, strengths=[1.0, 0.1, 0.5])
    assert probe.strength == 0.1
    np.testing.assert_allclose(probe.probabilities(np.ones((1, 4))), np.full((1, 3), 1 / 3))


def test_a_pile_of_many_parts_in_half_precision_is_measured_in_double(tmp_path) -> None:
    values = np.random.default_rng(0).normal(300, 0.5, (9001, 3)).astype(np.float16)
    np.save(tmp_path / "pile.npy", values)
    mean, scale = standardisation(np.load(tmp_path / "pile.npy", mmap_mode="r"))
    np.testing.assert_allclose(mean, values.astype(float).mean(0), rtol=1e-12)
    np.testing.assert_allclose(scale, values.astype(float).std(0), rtol=1e-12)


def test_a_dimension_that_does_not_vary_changes_nothing() -> None:
    features, labels = clusters(apart=0.5)
    expected = fit_probe(features, labels, 3)
    found = fit_probe(np.insert(features, 2, 0.1, axis=1), labels, 3)
    np.testing.assert_allclose(np.delete(found.weight, 2, axis=1), expected.weight, atol=1e-6)
    np.testing.assert_allclose(found.weight[:, 2], 0, atol=1e-9)


def test_the_temperature_is_bounded() -> None:
    random = np.random.default_rng(2)
    probe = fit_probe(random.normal(size=(40, 10)), random.permutation(40) % 2, 2, strengths=[100.0])
    assert probe.temperature == TEMPERATURES[1]


# ---- folds


def test_no_group_is_in_two_folds_and_each_image_is_held_out_once() -> None:
    labels = np.arange(120) % 3
    patients = np.array([f"patient {number}" for number in np.arange(120) // 7])
    parts = split(labels, patients, 5, 0)
    assert len(parts) == 5
    assert sorted(np.concatenate([unseen for _, unseen in parts])) == list(range(120))
    assert all(not set(patients[seen]) & set(patients[unseen]) for seen, unseen in parts)


def test_held_out_logits_of_groups_are_those_of_a_probe_of_other_groups() -> None:
    features, labels = clusters(90, 8, apart=0.5)
    patients = np.arange(90) // 6
    probe = fit_probe(features, labels, 3, groups=patients)
    splitter = StratifiedGroupKFold(5, shuffle=True, random_state=0)
    parts = list(splitter.split(labels, labels, patients))
    rows = standardised(features, features)
    expected = naive_held_out(rows, labels, probe.strength, parts) / probe.temperature
    np.testing.assert_allclose(log_softmax(probe.held_out, axis=1), log_softmax(expected, axis=1), atol=1e-3)


@pytest.mark.parametrize(
    ("counts", "groups", "folds"),
    [
        ([9, 9], None, 5),
        ([9, 3], None, 3),
        ([9, 9, 1], None, 2),
        ([6, 6], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], 3),
        ([1, 1, 1], None, 0),
        ([9, 1], None, 0),  # one fold would have a single class to learn
        ([4, 4], [0, 0, 0, 0, 1, 1, 1, 1], 0),
        ([4, 4], [0] * 8, 0),
    ],
    ids=str,
)
def test_there_are_as_many_folds_as_the_smallest_class_allows(counts, groups, folds) -> None:
    assert len(split(np.repeat(np.arange(len(counts)), counts), groups, 5, 0)) == folds


def test_one_image_per_class_has_the_default_strength_and_nothing_held_out() -> None:
    features, labels = clusters(3, 8)
    probe = fit_probe(features, labels, 3)
    assert (probe.strength, probe.temperature, probe.held_out) == (DEFAULT_STRENGTH, 1, None)
    assert probe.logits(features).argmax(1).tolist() == [0, 1, 2]


def test_a_class_that_a_fold_has_not_seen_is_as_likely_as_the_least_likely() -> None:
    features, labels = clusters(21, 8, classes=2)
    labels[-1] = 2
    logits = fit_probe(features, labels, 3).held_out[-1]
    assert logits[2] == logits[:2].min()


# ---- nearest neighbours


def cosine(features: np.ndarray, labels: np.ndarray, count: int) -> KNeighborsClassifier:
    return KNeighborsClassifier(count, metric="cosine").fit(features, labels)


def test_shares_are_those_of_scikit_learn_with_cosines() -> None:
    features, labels = clusters(apart=0.5)
    others = clusters(40, seed=1)[0]
    found = fit_neighbours(features, labels, 3, counts=[5])
    assert found.count in (1, 5)
    expected = cosine(standardised(features, features), labels, found.count)
    np.testing.assert_allclose(
        found.probabilities(others), expected.predict_proba(standardised(others, features)), atol=1e-12
    )


def test_the_count_is_the_largest_of_highest_held_out_accuracy() -> None:
    features, labels = clusters(90, 20, apart=0.4)
    features, labels = features[labels < 2], labels[labels < 2]
    rows, right = standardised(features, features), {}
    for count in (1, 5):  # odd and of two classes, so that no votes are tied
        right[count] = 0
        for seen, unseen in folds_of(labels):
            model = cosine(rows[seen], labels[seen], count)
            right[count] += (model.predict(rows[unseen]) == labels[unseen]).sum()
    assert right[1] < right[5]
    found = fit_neighbours(features, labels, 2, counts=[1, 5])
    assert found.count == 5
    assert (found.held_out.argmax(1) == labels).sum() == right[5]


def test_no_more_neighbours_vote_than_there_are_images_to_learn_from() -> None:
    features, labels = clusters(8, classes=2, apart=9)
    found = fit_neighbours(features, labels, 2, counts=[3, 5, 7, 20])  # folds of two, so six are left
    assert found.count in (1, 3, 5)
    assert fit_neighbours(features[:2], labels[:2], 2).count == 1


def test_tied_votes_go_to_the_nearer_images() -> None:
    features = np.array([[-1.0, 0.1], [1.0, 0.2], [0.1, 1.0], [0.2, -1.3]])
    found = fit_neighbours(features, [1, 0, 1, 0], 2)
    found = type(found)(**{**vars(found), "count": 2, "mean": np.zeros(2), "scale": np.ones(2)})
    # The query is nearest to image 2, of class 1, then to image 1, of class 0.
    assert found.probabilities([[0.4, 1.0]]).tolist() == [[0.5, 0.5]]
    assert found.predict([[0.4, 1.0]]).tolist() == [1]


# ---- mistakes

FEATURES, LABELS = clusters(12, 4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"labels": np.zeros(12, int)}, "All labels are of class 0; label images of at least two classes"),
        ({"labels": LABELS + 1}, "Labels are from 1 to 3, but expected 0 to 2"),
        ({"labels": LABELS - 1}, "Labels are from -1 to 1, but expected 0 to 2"),
        ({"labels": LABELS[:5]}, "of shape [5], but expected whole numbers [12]"),
        ({"labels": LABELS / 2}, "Labels are float64"),
        ({"num_classes": 5}, "No image is labeled as class 3, 4; label at least one"),
        ({"features": FEATURES[:, 0]}, "Features are of shape [12], but expected [N, D]"),
        (
            {"features": np.insert(FEATURES[1:], 3, np.nan, axis=0)},
            "1 of 12 images have features",
        ),
        ({"groups": [1, 2]}, "Found groups of shape [2] for 12 labels"),
        ({"folds": 1}, "folds is 1, but expected at least 2"),
    ],
)
@pytest.mark.parametrize("fit", [fit_probe, fit_neighbours])
def test_mistakes_are_one_sentence(fit, change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        fit(**({"features": FEATURES, "labels": LABELS, "num_classes": 3} | change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("strengths", [[], [0.0, 1.0], [float("nan")]])
def test_strengths_have_to_be_above_zero(strengths: list[float]) -> None:
    with pytest.raises(ValueError, match="strengths are"):
        fit_probe(FEATURES, LABELS, 3, strengths=strengths)


def test_features_of_another_network_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[12, 3\], but expected \[N, 4\]"):
        fit_probe(FEATURES, LABELS, 3).logits(FEATURES[:, :3])
