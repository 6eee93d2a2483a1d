"""The folder that a run leaves behind: the names of its files, and how to read it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fixastep.runs.recipe import read_yaml


FIGURES = {
    "losses.png": "Losses and validation accuracy over the training",
    "gate.png": "How much the gate kept, and the cosine of the two gradients",
    "cosines.png": "The cosines of all steps",
    "confusion.png": "True and predicted classes of the test images",
}
WEIGHTS, METRICS, LOG = "model.safetensors", "metrics.json", "log.csv"
RECIPE, CARD = "recipe.yaml", "README.md"
CONFIGS = ("config.json", "preprocessor_config.json")
PREDICTIONS = "test_predictions.csv"  # class numbers, and patients if known, one row per test image
# In a checkpoint, beside model.safetensors, which holds the averaged weights.
RAW_WEIGHTS = "training_weights.safetensors"  # what the optimizer updates
LORA_STATE = "lora.safetensors"  # the average as it is trained; model.safetensors has the changes added in
LOSS_STATE = "loss.safetensors"  # parameters and buffers of a loss that has any
LOG_WINDOW = "log_window_{}.safetensors"  # what each process has seen since the last log


@dataclass
class RunFolder:
    """A trained model and what is known about it.

    Args:
        folder: holds weights, config and image processor, and maybe figures and the log.
        metrics: results and facts, as `metrics.json` has them.
        recipe: the settings given.
        log: where the log is, if not in the folder.
    """

    folder: Path
    metrics: dict[str, Any]
    recipe: dict[str, Any]
    log: Path | None = None

    @classmethod
    def read(cls, folder: str | Path) -> RunFolder:
        folder = Path(folder)
        missing = [name for name in (WEIGHTS, *CONFIGS, METRICS, RECIPE) if not (folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{folder} holds no {' and no '.join(missing)}, so it is no finished run: give the folder of "
                "one, such as runs/quickstart."
            )
        with as_saved(folder):
            metrics = json.loads((folder / METRICS).read_text())
            return cls(folder, metrics, read_yaml(folder / RECIPE))

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    @property
    def class_names(self) -> list[str]:
        return list(self.config.get("id2label", {}).values())

    @property
    def medical(self) -> bool:
        return bool(self.metrics.get("dataset", {}).get("medical"))


def is_medical(folder: str | Path) -> bool:
    """Whether the metrics beside a model say that it is of medical data; False where there are none."""
    path = Path(folder) / METRICS
    with as_saved(folder):
        facts = json.loads(path.read_text()) if path.is_file() else {}
        return bool(facts.get("dataset", {}).get("medical"))


@contextlib.contextmanager
def as_saved(folder: str | Path) -> Iterator[None]:
    """Inside, files of a run are read, which can be wrong in any way: that ends in one sentence."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) or type(error) is ValueError:  # which say it themselves
            raise
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"The files of {folder} are not as a run leaves them ({what}): give the folder of another, or "
            "run it again."
        ) from error
