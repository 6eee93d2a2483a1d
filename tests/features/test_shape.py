"""What a pile says about features, and the probe that listens to it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import fractional_matrix_power
from scipy.special import log_softmax

from hf_fixastep.features.probe import fit_probe
from hf_fixastep.features.shape import (
    NEIGHBOURS,
    POWERS,
    Shape,
    between_neighbours,
    fit_shape,
    fit_shaped_probe,
    nearest,
)


def blobs(images: int, dimensions: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three classes that lie apart in two dimensions; the others are noise."""
    random = np.random.default_rng(seed)
    labels = np.arange(images) % 3
    rows = random.normal(size=(images, dimensions))
    rows[:, :2] += 6.0 * np.array([[1, 0], [-0.5, 0.9], [-0.5, -0.9]])[labels]
    return rows + 1, labels


def naive_matrix(rows: np.ndarray, power: float, neighbours: int) -> np.ndarray:
    """T^(-1/2) R^(-power) T^(1/2) by loops over pairs, with R the differences of neighbours."""
    z = (rows - rows.mean(0)) / rows.std(0)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    total = fractional_matrix_power(z.T @ z / len(z), 0.5)
    white = z @ np.linalg.inv(total)
    apart = np.zeros((rows.shape[1],) * 2)
    for image in range(len(rows)):
        order = sorted(set(range(len(rows))) - {image}, key=lambda other: -unit[image] @ unit[other])
        for other in order[:neighbours]:
            apart += np.outer(white[image] - white[other], white[image] - white[other])
    ratios = apart / np.trace(apart) * len(apart)
    return np.linalg.inv(total) @ fractional_matrix_power(ratios, -power) @ total


@pytest.mark.parametrize("power", [0.25, 0.5])
def test_a_shape_divides_directions_by_the_differences_of_neighbours(power: float) -> None:
    rows, _ = blobs(60)
    matrix = fit_shape(rows, neighbours=4).matrix(power)
    np.testing.assert_allclose(matrix, naive_matrix(rows, power, 4), atol=1e-10)


def test_directions_that_tell_images_apart_grow_and_noise_shrinks() -> None:
    rows, _ = blobs(300)
    shape = fit_shape(rows)
    scaled = shape.apply(rows, shape.matrix(0.5)).std(0)
    assert scaled[:2].min() > 1.5 > 1.1 > scaled[2:].max()


def test_a_power_of_zero_and_directions_that_the_pile_lacks_change_nothing() -> None:
    rows, _ = blobs(60)
    np.testing.assert_array_equal(fit_shape(rows).matrix(0), np.eye(12))
    flat = np.concatenate([rows, np.full((60, 1), 3.0), rows[:, :1]], 1)  # constant, and a copy
    shape = fit_shape(flat)
    assert len(shape.ratios) == 12
    lost = np.zeros(14)
    lost[12] = 1
    np.testing.assert_allclose(lost @ shape.matrix(0.5), lost, atol=1e-12)


def test_neighbours_have_the_highest_cosines() -> None:
    rows, _ = blobs(50)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = unit @ unit.T - 3 * np.eye(50)
    expected = [set(np.argsort(-row)[:5]) for row in cosines]
    assert [set(row) for row in nearest(unit, 5).tolist()] == expected


def test_differences_of_neighbours_are_those_of_single_pairs() -> None:
    rows = np.random.default_rng(0).normal(size=(30, 4))
    near = nearest(rows / np.linalg.norm(rows, axis=1, keepdims=True), 3)
    apart = sum(
        np.outer(rows[a] - rows[b], rows[a] - rows[b]) for a, others in enumerate(near) for b in others
    )
    np.testing.assert_allclose(between_neighbours(rows, near), apart, atol=1e-10)


def trivial(dimensions: int) -> Shape:
    ones, none = np.ones(dimensions), np.empty((dimensions, 0))
    return Shape(0 * ones, ones, none, none.T, np.empty(0))


def test_without_a_shape_and_views_it_is_the_probe() -> None:
    rows, labels = blobs(30)
    found = fit_shaped_probe(rows[:, None], labels, 3, trivial(12))
    expected = fit_probe(rows, labels, 3)
    assert found.strength == expected.strength
    np.testing.assert_allclose(found.weight, expected.weight, atol=1e-6)
    np.testing.assert_allclose(found.bias, expected.bias, atol=1e-6)


def test_views_count_as_images_with_the_same_label() -> None:
    rows, labels = blobs(30)
    twice = np.stack([rows, rows], 1)
    once = fit_shaped_probe(rows[:, None], labels, 3, trivial(12))
    found = fit_shaped_probe(twice, labels, 3, trivial(12))
    np.testing.assert_allclose(found.logits(rows), once.logits(rows), atol=1e-5)
    moved = fit_shaped_probe(np.stack([rows, -rows], 1), labels, 3, trivial(12))
    assert np.abs(moved.weight).max() < 0.5 * np.abs(once.weight).max()  # a view that contradicts is heard


def test_the_power_has_the_lowest_held_out_log_loss() -> None:
    rows, labels = blobs(18, dimensions=40)
    shape = fit_shape(blobs(400, dimensions=40, seed=1)[0])

    def loss(power: float) -> float:
        plain = shape.apply(rows, shape.matrix(power))
        held_out = fit_probe(plain, labels, 3).held_out
        assert held_out is not None
        return -log_softmax(held_out, axis=1)[np.arange(18), labels].mean()

    best = min(POWERS, key=loss)
    assert best > 0
    plain = shape.apply(rows, shape.matrix(best))
    expected = fit_probe(plain, labels, 3).logits(plain)
    found = fit_shaped_probe(rows[:, None], labels, 3, shape)
    np.testing.assert_allclose(found.logits(rows), expected, atol=1e-4)


def test_the_pile_lifts_a_probe_of_few_labels_and_one_of_noise_does_not_harm_it() -> None:
    test, truth = blobs(600, dimensions=40, seed=2)
    pile = blobs(400, dimensions=40, seed=1)[0]
    noise = np.random.default_rng(3).normal(size=(400, 40)) + 1
    gains = {"pile": [], "noise": []}
    for seed in range(5):
        rows, labels = blobs(12, dimensions=40, seed=10 + seed)
        alone = (fit_probe(rows, labels, 3).logits(test).argmax(1) == truth).mean()
        for name, each in (("pile", pile), ("noise", noise)):
            shaped = fit_shaped_probe(rows[:, None], labels, 3, fit_shape(each))
            gains[name].append((shaped.logits(test).argmax(1) == truth).mean() - alone)
    assert np.mean(gains["pile"]) > 0.05
    assert np.mean(gains["noise"]) > -0.03


def test_one_label_per_class_leaves_the_features_as_they_are() -> None:
    rows, labels = blobs(3)
    found = fit_shaped_probe(rows[:, None], labels, 3, fit_shape(blobs(100)[0]))
    assert found.held_out is None
    pile = blobs(100)[0]
    expected = fit_probe((rows - pile.mean(0)) / pile.std(0), labels, 3).logits(
        (pile - pile.mean(0)) / pile.std(0)
    )
    np.testing.assert_allclose(found.logits(pile), expected, atol=1e-6)


def test_a_pile_of_fewer_images_than_neighbours_has_a_shape_and_one_of_two_has_none() -> None:
    assert np.isfinite(fit_shape(blobs(NEIGHBOURS // 2)[0]).matrix(0.5)).all()
    with pytest.raises(ValueError, match="The pile has 2 images, but expected at least 3"):
        fit_shape(blobs(2)[0])
