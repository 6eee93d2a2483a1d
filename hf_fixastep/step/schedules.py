"""The 7/16 cosine of the learning rate, ramps of the unlabeled weight, and the decay of the teacher."""

from __future__ import annotations

import math


RAMPS = ("linear", "staircase", "sigmoid")


def cosine_7_16(step: int, cycle: float) -> float:
    """Factor of the learning rate: 1 at step 0, cos(7 pi / 16) at `cycle`, 0 from 8/7 of it on."""
    return max(0.0, math.cos(7 * math.pi * min(step, 8 * cycle / 7) / (16 * cycle)))


def unlabeled_ramp(kind: str, step: int, length: float) -> float:
    """Share of the final unlabeled weight at `step`, counted from 1; a length of 0 means no ramp."""
    if length <= 0:
        return 1.0
    if kind == "staircase":  # MixMatch's official code counts whole epochs of 1,024 steps
        step = step // 1024 * 1024
    share = min(step / length, 1.0)
    return math.exp(-5 * (1 - share) ** 2) if kind == "sigmoid" else share


def ramp_length(setting: float, max_steps: int) -> float:
    """Steps of a ramp: a setting up to 1 is a share of the run, a larger one is a number of steps."""
    return setting * max_steps if setting <= 1 else setting


def fitted_decay(max_steps: int) -> float:
    """Of a teacher that averages about the last twentieth of a run, and at most a thousand steps."""
    return min(0.999, max(0.0, 1 - 20 / max_steps))
