"""Baselines on the features of a frozen network: logistic regression (the probe) and nearest neighbours.

Both see labeled images alone, but for the mean and deviation of the features, and choose their one setting by
cross-validation over the labels.

Each dimension of the features is standardised, which was compared with one scale for all dimensions on the
six animals of CIFAR-10 (MobileNetV2 at 96 px, split 7, 2,000 validation images), with 5, 25, 50 and 400
labels per class, drawn 10, 6, 6 times and once. The probe does not decide: 49.7, 64.3, 68.7 and 75.8 against
50.0, 64.3, 68.7 and 76.0 % (standard errors of the differences 0.3, 0.2, 0.2, unknown; with one label per
class, at strength 0.1, a common scale is 0.5 +- 0.1 better). Neighbours do: 1.2, 0.9, 0.6 and 1.0 points more
(0.7, 0.3, 0.2, unknown). The strengths of lowest log loss were 0.003 to 0.3, inside the grid.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

from hf_fixastep.evaluation.calibration import fit_temperature, probabilities


STRENGTHS = tuple(10 ** (power / 2) for power in range(-10, 5))  # 1e-5 to 100
DEFAULT_STRENGTH = 0.01  # without cross-validation; it had the lowest log loss with one label per class
COUNTS = (1, 3, 5, 10, 20)
TEMPERATURES = 0.2, 5.0  # beyond them the labels are too few to tell
PATIENCE = 2  # settings that are worse than the best, after which no further ones are tried
ROWS = 4096  # that are read at once

Fold = tuple[NDArray, NDArray]  # rows to learn from, rows held out


@dataclass(frozen=True)
class Choice:
    """Settings of a probe.

    Args:
        strength: C of the logistic regression, the inverse of its regularisation.
        temperature: that the logits are divided by; 1 without cross-validation.
        held_out: [N, K] logits of each labeled image by a probe that has not seen it, divided by the same
            temperature; None where the labels are too few for a cross-validation.
    """

    strength: float
    temperature: float
    held_out: NDArray | None


@dataclass(frozen=True)
class Probe:
    """A linear classifier of raw features; their standardisation and the temperature are folded in.

    Args:
        weight: [K, D].
        bias: [K].
        strength: as in `Choice`, like temperature and held_out.
    """

    weight: NDArray
    bias: NDArray
    strength: float
    temperature: float
    held_out: NDArray | None

    def logits(self, features: ArrayLike) -> NDArray:
        """Of features [M, D]: [M, K]."""
        return check_features(features, self.weight.shape[1]) @ self.weight.T + self.bias

    def probabilities(self, features: ArrayLike) -> NDArray:
        """Of features [M, D]: [M, K]."""
        return probabilities(self.logits(features))


@dataclass(frozen=True)
class Neighbours:
    """The vote of the labeled images with the highest cosine similarity.

    Args:
        directions: [N, D] of the standardised labeled features, each of length 1.
        labels: [N].
        mean: [D], taken from features.
        scale: [D], which features are then divided by.
        count: how many neighbours vote.
        held_out: [N, K] shares of votes for each labeled image without those of its fold, or None.
    """

    directions: NDArray
    labels: NDArray
    num_classes: int
    mean: NDArray
    scale: NDArray
    count: int
    held_out: NDArray | None

    def probabilities(self, features: ArrayLike) -> NDArray:
        """Shares of the votes, [M, K]."""
        return self._votes(features)[0]

    def predict(self, features: ArrayLike) -> NDArray:
        """Class ids [M]; of classes with as many votes the one whose voters are nearer."""
        shares, nearness = self._votes(features)
        return winners(shares, nearness)

    def _votes(self, features: ArrayLike) -> tuple[NDArray, NDArray]:
        raw = check_features(features, len(self.mean))
        similarity = directions((raw - self.mean) / self.scale) @ self.directions.T
        return votes(similarity, self.labels, self.num_classes, self.count)


# ---- logistic regression


def fit_probe(
    features: ArrayLike,
    labels: ArrayLike,
    num_classes: int,
    *,
    groups: ArrayLike | None = None,
    folds: int = 5,
    seed: int = 0,
    strengths: Sequence[float] = STRENGTHS,
) -> Probe:
    """Multinomial logistic regression, with the strength of lowest cross-validated log loss.

    Of equal strengths the one that regularises more is taken. Strengths are tried from the smallest on, each
    from the solution before, until two are worse than the best. Where there are fewer images than dimensions,
    the features are rotated into the span of the images: the solution lies there, as anything beside it would
    cost regularisation and change no logit, so that this is exact. One temperature for the logits is fitted
    on the held-out ones.

    Args:
        features: [N, D] of the labeled images.
        labels: [N] class ids.
        groups: [N], such as patients; no group is in two folds.
        folds: at most; fewer where the smallest class has fewer images, or groups.
        seed: of the folds.
        strengths: to choose from.
    """
    rows, labels = check(features, labels, num_classes)
    choice = choose(rows, labels, num_classes, groups, folds, seed, strengths)
    weight, bias = solve(rows, labels, choice.strength)
    return Probe(weight / choice.temperature, bias / choice.temperature, **vars(choice))


def choose(
    rows: NDArray,
    labels: NDArray,
    num_classes: int,
    groups: ArrayLike | None = None,
    folds: int = 5,
    seed: int = 0,
    strengths: Sequence[float] = STRENGTHS,
) -> Choice:
    """What cross-validation says of a probe; the arguments are those of `fit_probe`."""
    strengths = sorted(check_strengths(strengths))
    parts = split(labels, groups, folds, seed)
    if not parts:
        return Choice(DEFAULT_STRENGTH, 1.0, None)
    inside, *_ = in_span(rows)
    strength, held_out = choose_strength(inside, labels, num_classes, parts, strengths)
    temperature = float(np.clip(fit_temperature(held_out, labels), *TEMPERATURES))
    return Choice(strength, temperature, held_out / temperature)


def in_span(rows: NDArray) -> tuple[NDArray, NDArray | None, NDArray, NDArray]:
    """Rows standardised and rotated into their span, the basis of that, mean and scale."""
    mean, scale = standardisation(rows)
    rows = (rows - mean) / scale
    if len(rows) >= rows.shape[1]:
        return rows, None, mean, scale
    left, lengths, basis = np.linalg.svd(rows, full_matrices=False)
    return left * lengths, basis, mean, scale


def solve(rows: NDArray, labels: NDArray, strength: float) -> tuple[NDArray, NDArray]:
    """Weight [K, D] and bias [K] of logistic regression, for features as they are given."""
    inside, basis, mean, scale = in_span(rows)
    weight, bias = coefficients(regression(strength).fit(inside, labels))
    weight = (weight if basis is None else weight @ basis) / scale
    return weight, bias - weight @ mean


def choose_strength(
    rows: NDArray, labels: NDArray, num_classes: int, parts: Sequence[Fold], strengths: Sequence[float]
) -> tuple[float, NDArray]:
    """The best one, and the logits of all images when they are held out."""
    models = [regression(strengths[0]) for _ in parts]
    best, chosen, held_out, worse = math.inf, strengths[0], np.empty((0, num_classes)), 0
    for strength in strengths:
        logits = np.empty((len(labels), num_classes))
        for model, (seen, unseen) in zip(models, parts, strict=True):
            model.set_params(C=strength).fit(rows[seen], labels[seen])
            weight, bias = coefficients(model)
            scores = rows[unseen] @ weight.T + bias
            # A class that the fold has not seen is as likely as the least likely one.
            logits[unseen] = scores.min(1, keepdims=True)
            logits[np.ix_(unseen, model.classes_)] = scores
        loss = -log_softmax(logits, axis=1)[np.arange(len(labels)), labels].mean()
        if loss < best - 1e-9:  # less than that is rounding
            best, chosen, held_out, worse = loss, strength, logits, 0
        elif loss > best + 1e-4 and (worse := worse + 1) == PATIENCE:
            break
    return chosen, held_out


def regression(strength: float) -> LogisticRegression:
    """Newton's method, as lbfgs takes three times as long for the same precision with 300 images."""
    return LogisticRegression(C=strength, solver="newton-cg", tol=1e-6, max_iter=1000, warm_start=True)


def coefficients(model: LogisticRegression) -> tuple[NDArray, NDArray]:
    """Weight and bias of each class; of two classes scikit-learn has the difference alone."""
    weight, bias = model.coef_, model.intercept_
    if len(weight) == 1:
        return np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
    return weight, bias


# ---- nearest neighbours


def fit_neighbours(
    features: ArrayLike,
    labels: ArrayLike,
    num_classes: int,
    *,
    groups: ArrayLike | None = None,
    folds: int = 5,
    seed: int = 0,
    counts: Sequence[int] = COUNTS,
) -> Neighbours:
    """Nearest neighbours on standardised features, as many as give the best cross-validated accuracy.

    Of equal counts the largest is taken, and none that is larger than the images to learn from. Without a
    cross-validation one neighbour decides. The other arguments are those of `fit_probe`.
    """
    rows, labels = check(features, labels, num_classes)
    mean, scale = standardisation(rows)
    rows = directions((rows - mean) / scale)
    parts = split(labels, groups, folds, seed)
    best, count, held_out = -1.0, 1, None
    most = min((len(seen) for seen, _ in parts), default=1)
    for tried in sorted(each for each in {1, *counts} if each <= most) if parts else ():
        shares, nearness = np.empty((2, len(labels), num_classes))
        for seen, unseen in parts:
            similarity = rows[unseen] @ rows[seen].T
            shares[unseen], nearness[unseen] = votes(similarity, labels[seen], num_classes, tried)
        right = float(np.mean(winners(shares, nearness) == labels))
        if right >= best:
            best, count, held_out = right, tried, shares
    return Neighbours(rows, labels, num_classes, mean, scale, count, held_out)


def directions(rows: NDArray) -> NDArray:
    """Each row with length 1; one of zeros stays as it is."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def votes(similarity: NDArray, labels: NDArray, num_classes: int, count: int) -> tuple[NDArray, NDArray]:
    """The share of each class among the nearest images, and the sum of its similarities, both [M, K].

    Args:
        similarity: [M, N] to images of these labels; of equally near ones the first count.
    """
    nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :count]
    chosen = np.eye(num_classes)[labels[nearest]]  # [M, count, K]
    near = np.take_along_axis(similarity, nearest, axis=1)
    return chosen.mean(1), (chosen * near[..., None]).sum(1)


def winners(shares: NDArray, nearness: NDArray) -> NDArray:
    """The class with most votes; of several the one with the highest similarity."""
    tied = shares == shares.max(1, keepdims=True)
    return np.where(tied, nearness, -np.inf).argmax(1)


# ---- what both share


def standardisation(rows: NDArray) -> tuple[NDArray, NDArray]:
    """Mean and deviation of each dimension of [N, D]; one that does not vary only loses its mean.

    In double precision, a part at a time.
    """
    starts = range(0, len(rows), ROWS)
    mean = sum(check_features(rows[at : at + ROWS], rows.shape[1]).sum(0) for at in starts) / len(rows)
    squares = sum(((rows[at : at + ROWS].astype(np.float64) - mean) ** 2).sum(0) for at in starts)
    deviation = np.sqrt(squares / len(rows))
    return mean, np.where(deviation > 1e-6 * deviation.mean(), deviation, 1.0)  # what is less is rounding


def split(labels: NDArray, groups: ArrayLike | None, folds: int, seed: int) -> list[Fold]:
    """Folds with all classes alike, as many as the smallest class allows; none where that cannot be done."""
    if folds < 2:
        raise ValueError(f"folds is {folds}, but expected at least 2.")
    units = (
        np.arange(len(labels)) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    )
    if units.shape != labels.shape:
        raise ValueError(
            f"Found groups of shape {list(units.shape)} for {len(labels)} labels; give one each."
        )
    sizes = [len(np.unique(units[labels == label])) for label in np.unique(labels)]
    if max(sizes) < 2:
        return []
    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    splitter = kind(max(2, min(folds, *sizes)), shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a class with fewer images than folds
        parts = [part for part in splitter.split(labels, labels, units) if all(map(len, part))]
    enough = all(len(np.unique(labels[seen])) > 1 for seen, _ in parts)
    return parts if enough and len(parts) > 1 else []


def check(features: ArrayLike, labels: ArrayLike, num_classes: int) -> tuple[NDArray, NDArray]:
    rows, labels = check_features(features), np.asarray(labels)
    if labels.shape != rows.shape[:1] or labels.dtype.kind not in "iu" or not len(labels):
        raise ValueError(
            f"Labels are {labels.dtype} of shape {list(labels.shape)}, but expected whole numbers "
            f"[{len(rows)}], one for each row of the features, and at least one."
        )
    if labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(
            f"Labels are from {labels.min()} to {labels.max()}, but expected 0 to {num_classes - 1}, as "
            f"there are {num_classes} classes."
        )
    found = np.unique(labels)
    if len(found) < 2:
        raise ValueError(f"All labels are of class {found[0]}; label images of at least two classes.")
    if missing := sorted({*range(num_classes)} - {*found.tolist()}):
        names = ", ".join(map(str, missing[:10])) + ", ..." * (len(missing) > 10)
        raise ValueError(f"No image is labeled as class {names}; label at least one, or leave the class out.")
    return rows, labels.astype(np.int64)


def check_features(features: ArrayLike, dimensions: int | None = None) -> NDArray:
    rows = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2 or not rows.shape[1] or dimensions not in (None, rows.shape[1]):
        raise ValueError(
            f"Features are of shape {list(rows.shape)}, but expected [N, {dimensions or 'D'}]: one row for "
            "each image."
        )
    if bad := np.count_nonzero(~np.isfinite(rows).all(1)):
        raise ValueError(
            f"{bad} of {len(rows)} images have features that are not finite; embed them again, in float32."
        )
    return rows


def check_strengths(strengths: Sequence[float]) -> Sequence[float]:
    if not len(strengths) or not all(0 < strength < math.inf for strength in strengths):
        raise ValueError(
            f"strengths are {list(strengths)}, but expected at least one, all finite and above 0."
        )
    return strengths
