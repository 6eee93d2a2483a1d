"""Honest probabilities: a temperature for the logits, and a confidence below which a model should not decide.

Both are fitted on validation images and kept in the model's config, as
`config.calibration = {"temperature": T, "abstain_below": p, "coverage": c, "weights": hash}`, with the hash
of the weights they were fitted for.
"""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from hf_fixastep.disk import digest, write_atomically


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Calibration:
    """What `calibration` in the config of a model says about its probabilities, chosen on validation images.

    Args:
        temperature: divides the logits.
        abstain_below: the model is not sure of an image whose highest probability is below it.
        coverage: share of the validation images that it was sure of.
        weights: SHA-256 of the file of weights it is for, once it is written beside them.
    """

    temperature: float
    abstain_below: float = 0.0
    coverage: float = 1.0
    weights: str | None = None

    @classmethod
    def of(cls, config: Any) -> Calibration | None:
        """None for a model that was not calibrated."""
        found = getattr(config, "calibration", None)
        if found is None:
            return None
        try:
            numbers = {name: float(value) for name, value in found.items() if name != "weights"}
            calibration = cls(**numbers, weights=found.get("weights"))
        except (AttributeError, TypeError, ValueError):
            calibration = cls(math.nan)
        shares = (calibration.abstain_below, calibration.coverage)
        if not 0 < calibration.temperature < math.inf or not all(0 <= share <= 1 for share in shares):
            raise ValueError(
                f"calibration in the model's config is {str(found)[:200]!r}, but expected a temperature "
                "above 0, and abstain_below and coverage between 0 and 1: correct or remove it."
            )
        return calibration


def probabilities(logits: ArrayLike, temperature: float = 1.0) -> NDArray:
    """Softmax of the logits [N, K] over the temperature, in float64."""
    return softmax(np.asarray(logits, dtype=np.float64) / temperature, axis=-1)


def fit_temperature(logits: ArrayLike, labels: ArrayLike) -> float:
    """The temperature that gives the labels the highest likelihood.

    Guo et al., 2017, arXiv 1706.04599, section 4.2. The loss is convex in the inverse temperature, so its
    slope has one zero, which is found by halving. There is none where every image is classified right, as the
    likelihood then grows without end: the temperature stays 1, with a warning. Logits that say no more than
    chance get a temperature so high that all classes are equally likely.

    Args:
        logits: [N, K].
        labels: [N] class ids.
    """
    logits, labels = check(logits, labels)
    of_labels = logits[np.arange(len(labels)), labels]
    if np.all(of_labels == logits.max(-1)):
        logger.warning(
            "All %d images are classified right, which no temperature can improve: it stays 1.", len(labels)
        )
        return 1.0

    def slope(inverse: float) -> float:
        return float(np.mean((probabilities(logits, 1 / inverse) * logits).sum(-1) - of_labels))

    spread = float(np.mean(np.ptp(logits, axis=-1)))
    low, high = 1e-4 / spread, 1e4 / spread
    if slope(low) >= 0:
        logger.warning("The logits of %d images say no more than chance about their labels.", len(labels))
        return 1 / low
    while math.log(high / low) > 1e-12:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    return 1 / math.sqrt(low * high)


def check(logits: ArrayLike, labels: ArrayLike) -> tuple[NDArray, NDArray]:
    logits, labels = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise ValueError(
            f"Logits are of shape {list(logits.shape)} and labels {list(labels.shape)}, but expected [N, K] "
            "and [N] with at least one image."
        )
    if not np.isfinite(logits).all():
        raise ValueError("Some logits are not finite, so the model is broken: train it anew.")
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"Labels have to be whole numbers from 0 to {logits.shape[1] - 1}, one class of the logits."
        )
    return logits, labels


def abstain_threshold(confidence: ArrayLike, coverage: float) -> float:
    """The highest threshold that at least the share `coverage` of the images reach; the rest is left open."""
    values = np.sort(np.asarray(confidence, dtype=np.float64))[::-1]
    if not 0 < coverage <= 1:
        raise ValueError(
            f"coverage is {coverage}, but expected a share of images above 0 and up to 1, such as 0.9."
        )
    if not len(values) or not np.isfinite(values).all():
        raise ValueError(
            f"Found {len(values)} confidences, but expected at least one, and all of them finite."
        )
    # 0.9 of 10 is 9, although 0.9 is a little more than that.
    decided = math.ceil(coverage * len(values) - 1e-9)
    return float(values[max(decided, 1) - 1])


def calibrate(logits: ArrayLike, labels: ArrayLike, coverage: float) -> Calibration:
    """Temperature and threshold for a model's config, from its logits of validation images."""
    temperature = fit_temperature(logits, labels)
    confidence = probabilities(logits, temperature).max(-1)
    return Calibration(temperature, abstain_threshold(confidence, coverage), float(coverage))


def write_calibration(folder: str | os.PathLike[str], calibration: Calibration) -> Calibration:
    """Put a calibration into the config.json of a saved model, and leave the rest of the file as it is;
    returns it with the hash of the weights.
    """
    calibration = replace(calibration, weights=digest(Path(folder) / "model.safetensors"))
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | {"calibration": asdict(calibration)}
    with write_atomically(path) as partial:
        partial.write_text(json.dumps(config, indent=2) + "\n")
    return calibration
