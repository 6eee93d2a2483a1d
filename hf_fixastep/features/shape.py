"""What a pile says about features: along which directions images that look alike agree.

A probe of few labels cannot tell which of a thousand directions matter. The pile can, without a label: where
an image differs from its nearest neighbours as much as from any other image, a direction is noise; where
neighbours agree, it says what kind of image it is. The shaped probe is logistic regression on features that
are scaled by this. How strongly is chosen by cross-validation over the labels, so that a pile that tells
nothing about them is left alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array
from scipy.special import log_softmax

from hf_fixastep.features.probe import (
    PATIENCE,
    STRENGTHS,
    Probe,
    check,
    check_features,
    choose,
    directions,
    solve,
    standardisation,
)


IMAGES = 6_000  # of the pile, at most, that a shape is taken from
NEIGHBOURS = 20
POWERS = (0.0, 0.125, 0.25, 0.5, 0.75)  # to choose from; 0 leaves the features as they are
FLAT = 1e-4  # of the usual variance: a direction with less of it is left alone
LEAST = 1e-3  # ratios below are taken for this
ROWS = 2_000  # that are compared with all others at once


@dataclass(frozen=True)
class Shape:
    """Directions in which a pile varies alike, and how much neighbours differ along each.

    Args:
        mean: [D] of the pile.
        deviation: [D].
        into: [D, R], from standardised features to R directions with variance 1 in the pile.
        back: [R, D], the other way.
        ratios: [R], the squared difference of neighbours along each direction over the mean of all.
    """

    mean: NDArray
    deviation: NDArray
    into: NDArray
    back: NDArray
    ratios: NDArray

    def matrix(self, power: float) -> NDArray:
        """[D, D] that divides each direction of standardised features by its ratio to the power."""
        change = self.ratios**-power - 1
        return np.eye(len(self.mean)) + (self.into * change) @ self.back

    def apply(self, features: ArrayLike, matrix: NDArray) -> NDArray:
        """Features [N, D] in that scale."""
        return ((check_features(features, len(self.mean)) - self.mean) / self.deviation) @ matrix

    def fold(self, weight: NDArray, bias: NDArray, matrix: NDArray) -> tuple[NDArray, NDArray]:
        """Weight [K, D] and bias [K] for raw features of a linear classifier of scaled ones."""
        raw = (weight @ matrix.T) / self.deviation
        return raw, bias - raw @ self.mean


def fit_shape(pile: ArrayLike, neighbours: int = NEIGHBOURS) -> Shape:
    """Of features [N, D] of the pile, in which an image has the highest cosines with its neighbours."""
    rows = check_features(pile)
    if len(rows) < 3:
        raise ValueError(f"The pile has {len(rows)} images, but expected at least 3.")
    mean, deviation = standardisation(rows)
    near = nearest(directions(rows).astype(np.float32), min(neighbours, len(rows) - 1))
    rows = (rows - mean) / deviation
    variance, axes = np.linalg.eigh(rows.T @ rows / len(rows))
    kept = variance > FLAT * variance.mean()
    lengths, axes = np.sqrt(variance[kept]), axes[:, kept]
    white = (rows @ axes) / lengths
    apart = between_neighbours(white, near)
    ratios, turn = np.linalg.eigh(apart / np.trace(apart) * len(apart))
    # Back into the axes of the features, so that a power of 0 changes nothing.
    return Shape(
        mean, deviation, (axes / lengths) @ turn, turn.T @ (axes * lengths).T, np.maximum(ratios, LEAST)
    )


def nearest(rows: NDArray, count: int) -> NDArray:
    """Of each row [N, D] of length 1 those with the highest cosines but for itself, [N, count]."""
    found = np.empty((len(rows), count), np.int64)
    for start in range(0, len(rows), ROWS):
        cosines = rows[start : start + ROWS] @ rows.T
        at = np.arange(len(cosines))
        cosines[at, start + at] = -np.inf
        found[start : start + ROWS] = np.argpartition(-cosines, count - 1, axis=1)[:, :count]
    return found


def between_neighbours(rows: NDArray, near: NDArray) -> NDArray:
    """[R, R], the sum of (a - b)(a - b)^T over all rows a and their neighbours b.

    Multiplied out, it needs no single pairs: every image counts as often as it is in one, minus the products
    of neighbours.
    """
    images, count = near.shape
    ones, starts = np.ones(near.size), np.arange(0, near.size + 1, count)
    links = csr_array((ones, near.reshape(-1), starts), shape=(images, images))
    pairs = count + np.bincount(near.reshape(-1), minlength=images)
    shared = rows.T @ (links @ rows)
    return (rows * pairs[:, None]).T @ rows - shared - shared.T


def fit_shaped_probe(
    features: ArrayLike,
    labels: ArrayLike,
    num_classes: int,
    shape: Shape,
    *,
    groups: ArrayLike | None = None,
    seed: int = 0,
) -> Probe:
    """A probe on features that are scaled as the pile says, of all versions of the labeled images.

    Power and strength have the lowest cross-validated log loss on the plain images; of equal powers the
    smallest is taken, and 0 where the labels are too few for a cross-validation. Powers are tried from 0 on,
    until two are worse than the best.

    Args:
        features: [N, V, D], of each labeled image first the plain one and then weak views of it.
        labels: [N] class ids.
        groups: as in `fit_probe`.
        seed: of the folds.
    """
    versions, labels = np.asarray(features, np.float64), np.asarray(labels)
    best, chosen, matrix, first, worse = math.inf, None, shape.matrix(0), 0, 0
    check(versions[:, 0], labels, num_classes)
    for power in POWERS:
        tried = shape.matrix(power)
        plain = shape.apply(versions[:, 0], tried)
        cross_validate = partial(choose, plain, labels, num_classes, groups, seed=seed)
        choice = cross_validate(strengths=STRENGTHS[first:])
        if first and choice.strength == STRENGTHS[first]:  # the best one may be below
            choice = cross_validate()
        if choice.held_out is None:
            chosen = choice
            break
        loss = -log_softmax(choice.held_out, axis=1)[np.arange(len(labels)), labels].mean()
        if loss < best - 1e-9:  # less than that is rounding
            best, chosen, matrix, worse = loss, choice, tried, 0
        elif loss > best + 1e-4 and (worse := worse + 1) == PATIENCE:
            break
        # The next power needs about the same strength; those far below it are not tried again.
        first = max(0, STRENGTHS.index(choice.strength) - 1)
    assert chosen is not None
    count = versions.shape[1]
    every = shape.apply(versions.reshape(-1, versions.shape[2]), matrix)
    weight, bias = solve(every, np.repeat(labels, count), chosen.strength / count)
    weight, bias = shape.fold(weight / chosen.temperature, bias / chosen.temperature, matrix)
    return Probe(weight, bias, **vars(chosen))
