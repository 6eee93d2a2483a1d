"""Tables of runs that never took place, as `fixastep sweep` would leave them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd


SWITCHES = {"base": ("off", False), "+G": ("drop", False), "+A": ("off", True), "Fix-A-Step": ("drop", True)}
IMAGES, CLASSES, STEPS = 400, 4, 300


def run(
    loss: str, variant: str, accuracy: float, seed: int = 0, zeta: float | None = 50, **changes: Any
) -> dict[str, Any]:
    """One row; which images are right depends on the run, and on the image for all runs alike.

    Args:
        changes: columns that shall be otherwise; a `settings` adds to the settings.
    """
    random = np.random.default_rng(zlib.crc32(f"{loss} {variant} {seed} {zeta} {accuracy}".encode()))
    labels = np.arange(IMAGES) % CLASSES
    easy = np.random.default_rng(7).normal(size=IMAGES) + random.normal(0, 0.7, IMAGES)
    right = np.argsort(np.argsort(-easy)) < round(accuracy * IMAGES)
    predictions = np.where(right, labels, (labels + 1) % CLASSES)
    steps = [] if variant in ("labeled-only", "probe", "neighbours") else list(range(10, STEPS + 1, 10))
    cosines = [0.15 * np.exp(-step / 80) + 0.02 + random.normal(0, 0.02) for step in steps]
    gate, mixed = SWITCHES.get(variant, ("drop", False))
    shown = round(accuracy * IMAGES) / IMAGES
    row = {
        "run": f"{loss}-{variant}-zeta{zeta}-seed{seed}",
        "loss": loss,
        "procedure": None,
        "variant": variant,
        "gate": gate,
        "mix_labeled": mixed,
        "dataset": "pictures",
        "dataset_config": None if zeta is None else f"zeta{zeta:g}",
        "zeta": zeta,
        "labels_per_class": 50,
        "oracle": False,
        "batchnorm": "separate",
        "preset": "paper",
        "max_steps": STEPS,
        "mix_alpha": 0.5,
        "mix_temperature": 0.5,
        "mix_per_batch": False,
        "seed": seed,
        "split_seed": seed,
        "test_accuracy": shown,
        "test_balanced_accuracy": balanced(labels, predictions),
        "validation_accuracy": shown,
        "test_labels": labels.tolist(),
        "test_predictions": predictions.tolist(),
        "hash_test": "all the same",
        "gate_open_rate": float(np.mean(np.array(cosines) > 0)) if steps else None,
        "log_step": steps,
        "log_cosine": cosines,
        "log_gate_open": [
            float(np.clip(0.6 + 2 * cosine + random.normal(0, 0.05), 0, 1)) for cosine in cosines
        ],
    }
    settings = {
        "seed": seed,
        "split_seed": seed,
        "loss": loss,
        "model_kwargs": {"depth": 10},
        "output_dir": row["run"],
    }
    settings |= changes.pop("settings", {})
    number = zlib.crc32(json.dumps([settings, changes], sort_keys=True, default=str).encode())
    return {**row, "run": f"{row['run']}-{number:08x}", "settings": json.dumps(settings), **changes}


def balanced(labels: np.ndarray, predictions: np.ndarray) -> float:
    return float(np.mean([np.mean(predictions[labels == name] == name) for name in np.unique(labels)]))


def probes(seeds: int = 3, accuracy: float = 0.63, loss: str = "probe", **changes: Any) -> pd.DataFrame:
    """Runs of a baseline on frozen features, one for each seed of a study."""
    return pd.DataFrame(
        [run(loss, loss, accuracy + 0.01 * seed, seed, gate="off", **changes) for seed in range(seeds)]
    )


LEVELS = {"labeled-only": 0.60, "base": 0.62, "+G": 0.64, "+A": 0.65, "Fix-A-Step": 0.68}


def study(
    losses: Sequence[str] = ("mean_teacher", "fixmatch"),
    variants: Iterable[str] = tuple(LEVELS),
    zetas: Sequence[float] = (0, 50, 100),
    seeds: int = 3,
    rivals: Sequence[str] = (),
    oracle: bool = False,
) -> pd.DataFrame:
    """A study of known outcome: LEVELS, a point more for each loss, and less with more foreign images."""
    rows = []
    for seed in range(seeds):
        noise = 0.01 * seed
        for variant in variants:
            if variant == "labeled-only":
                rows.append(
                    run("supervised", variant, LEVELS[variant] + noise, seed, None, dataset_config="zeta50")
                )
                continue
            for number, loss in enumerate(losses):
                for zeta in zetas:
                    level = LEVELS[variant] + noise + 0.01 * number
                    level -= zeta * (0.0004 if variant == "Fix-A-Step" else 0.001) * (1 + 0.3 * number)
                    rows.append(run(loss, variant, level, seed, zeta))
                    if oracle and variant == "base" and zeta < 100:
                        rows.append(run(loss, variant, level + 0.0008 * zeta, seed, zeta, oracle=True))
        for number, loss in enumerate(rivals):
            rows += [run(loss, "base", 0.61 + noise - 0.0005 * zeta * number, seed, zeta) for zeta in zetas]
    return pd.DataFrame(rows)
