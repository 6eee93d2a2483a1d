"""A finished run, tested again: on a split of its data, of other data, or among foreign images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from hf_fixastep.data.images import Images
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.evaluation.metrics import evaluate_classifier
from hf_fixastep.evaluation.open_set import (
    energy,
    max_probability,
    open_set_metrics,
    risk_coverage,
    with_foreign,
)
from hf_fixastep.losses import get_loss
from hf_fixastep.losses.base import SemiSupervisedLoss
from hf_fixastep.plots import RESOLUTION, plot_risk_coverage
from hf_fixastep.runs.folder import LOSS_STATE, RECIPE
from hf_fixastep.runs.recipe import read_mapping, read_yaml


SCORES = {"max_probability": max_probability, "energy": energy}
FOREIGN = ("seen_foreign", "unseen_foreign")


def evaluate_split(classifier: Classifier, split: Any) -> dict[str, float]:
    images = Images.from_dataset(split, classifier.size)
    assert images.labels is not None
    logits = classifier.logits(images.pixels).astype(np.float32)  # as the trainer has them
    return evaluate_classifier(logits, images.labels.numpy(), classifier.classes)


def evaluate_open_set(classifier: Classifier, data: Any, folder: Path) -> dict[str, float]:
    """Numbers, and the figure of risk and coverage by the largest probability."""
    loss = own_loss(classifier, data, folder)
    images = {
        name: Images.from_dataset(data[name], classifier.size) for name in ("test", *FOREIGN) if name in data
    }
    logits = {name: classifier.logits(split.pixels) for name, split in images.items()}
    scores = {
        name: {split: score(of_split) for split, of_split in logits.items()} for name, score in SCORES.items()
    }
    if loss is not None:
        scores["own_score"] = {name: own_score(classifier, loss, split) for name, split in images.items()}
    correct = logits["test"].argmax(-1) == images["test"].labels.numpy()  # type: ignore[union-attr]
    by_split = scores["max_probability"]
    curves = {
        "known images": risk_coverage(by_split["test"], correct),
        "with foreign images, all wrong": risk_coverage(*with_foreign(by_split, correct)),
    }
    plot_risk_coverage(curves).savefig(folder / "risk_coverage.png", dpi=RESOLUTION)
    return open_set_metrics(scores, correct)


def own_loss(classifier: Classifier, data: Any, folder: Path) -> SemiSupervisedLoss | None:
    """The loss of the run, if it has a score of its own for foreign images."""
    if not (folder / LOSS_STATE).is_file():
        return None
    recipe = read_yaml(folder / RECIPE)
    loss = get_loss(recipe["loss"], **read_mapping("loss_kwargs", recipe.get("loss_kwargs")))
    loss.prepare(classifier.model, len(classifier.classes), len(data["unlabeled"]), len(data["validation"]))
    loss.load_state_dict(load_file(folder / LOSS_STATE))
    return loss.to(classifier.device)


@torch.inference_mode()
def own_score(classifier: Classifier, loss: SemiSupervisedLoss, images: Images) -> NDArray:
    """How known each image looks to the loss."""
    batches = classifier.batches(images.pixels)
    foreign = [loss.outlier_score(classifier.model, batch) for batch in batches]
    return -torch.cat(foreign).cpu().numpy()  # type: ignore[arg-type]


def write_metrics(metrics: dict[str, float], folder: Path, name: str) -> None:
    (folder / f"evaluation_{name}.json").write_text(json.dumps(metrics, indent=2))
