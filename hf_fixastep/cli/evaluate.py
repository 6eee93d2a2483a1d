"""Test a finished run on its own test split, or on other data by name; or tell how it does among foreign
images.

fixastep evaluate runs/quickstart [--split validation] [--dataset NAME --zeta 100 ...]
fixastep evaluate runs/quickstart --open_set true
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageClassification, EvalPrediction

from hf_fixastep import Images, SemiSupervisedLoss, get_loss
from hf_fixastep._compat.checkpointing import LOSS_STATE
from hf_fixastep.data.processing import views_of
from hf_fixastep.evaluation.metrics import classification_metrics
from hf_fixastep.evaluation.open_set import (
    energy,
    max_probability,
    open_set_metrics,
    risk_coverage,
    with_foreign,
)
from hf_fixastep.plots import RESOLUTION, plot_risk_coverage
from hf_fixastep.runs.arguments import DataArguments, parse
from hf_fixastep.runs.folder import RECIPE
from hf_fixastep.runs.recipe import read_mapping, read_yaml
from hf_fixastep.runs.training import load_data


FOREIGN = ("seen_foreign", "unseen_foreign")


@dataclass
class EvaluateArguments:
    """Which images of the data to test on."""

    split: str = field(default="test", metadata={"help": "labeled, validation or test."})
    open_set: bool = field(
        default=False, metadata={"help": "Test on foreign images too; split is test then."}
    )
    batch_size: int = field(default=512, metadata={"help": "Images per forward."})


def prepare(argv: list[str]) -> tuple[Path, EvaluateArguments, Any]:
    """The run, and the data it names unless the command line names others."""
    if not argv or argv[0].startswith("--"):
        raise ValueError(
            "The first argument has to be the folder of a finished run, such as runs/quickstart."
        )
    run, names = Path(argv[0]), {f.name for f in dataclasses.fields(DataArguments)}
    recipe = [(f"--{name}", str(value)) for name, value in read_yaml(run / RECIPE).items() if name in names]
    data_args, args, _ = parse((DataArguments, EvaluateArguments), [*sum(recipe, ()), *argv[1:]])
    if args.open_set:
        data_args.dataset_kwargs = {
            **read_mapping("dataset_kwargs", data_args.dataset_kwargs),
            "foreign": True,
        }
    data = load_data(data_args)
    if args.split not in data or "label" not in data[args.split].column_names:
        raise ValueError(
            f"split is {args.split}, but labels are in labeled, validation and test. Choose one of them."
        )
    return run, args, data


class Run:
    """The model of a finished run, and its loss if that has a score of its own for foreign images."""

    def __init__(self, folder: Path, data: Any, batch_size: int) -> None:
        self.model = AutoModelForImageClassification.from_pretrained(folder).eval()
        self.model.to(memory_format=torch.channels_last)
        self.size, self.views = views_of(AutoImageProcessor.from_pretrained(folder))
        self.names, self.batch_size = list(self.model.config.id2label.values()), batch_size
        self.loss: SemiSupervisedLoss | None = None
        if (folder / LOSS_STATE).is_file():
            recipe, state = read_yaml(folder / RECIPE), load_file(folder / LOSS_STATE)
            self.loss = get_loss(recipe["loss"], **read_mapping("loss_kwargs", recipe.get("loss_kwargs")))
            self.loss.prepare(self.model, len(self.names), len(data["unlabeled"]), len(data["validation"]))
            self.loss.load_state_dict(state)

    @torch.inference_mode()
    def predict(self, split: Any) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Logits and labels, and how known each image looks by each score."""
        images = Images.from_dataset(split, self.size)
        batches = [self.views.plain(pixels) for pixels in images.pixels.split(self.batch_size)]
        logits = torch.cat([self.model(pixel_values=batch).logits for batch in batches])
        scores = {name: torch.from_numpy(score(logits)) for name, score in SCORES.items()}
        if self.loss is not None:
            foreign = torch.cat([self.loss.outlier_score(self.model, batch) for batch in batches])  # type: ignore[misc]
            scores["own_score"] = -foreign
        return logits, images.labels, scores


SCORES = {"max_probability": max_probability, "energy": energy}


def evaluate_split(run: Run, split: Any) -> dict[str, float]:
    logits, labels, _ = run.predict(split)
    assert labels is not None
    return classification_metrics(run.names)(EvalPrediction(logits.numpy(), labels.numpy()))


def evaluate_open_set(run: Run, data: Any, folder: Path) -> dict[str, float]:
    """Numbers, and the figure of risk and coverage by the largest probability."""
    predicted = {name: run.predict(data[name]) for name in ("test", *FOREIGN) if name in data}
    logits, labels, known = predicted["test"]
    correct = (logits.argmax(-1) == labels).numpy()
    scores = {name: {split: each[2][name].numpy() for split, each in predicted.items()} for name in known}
    by_split = scores["max_probability"]
    curves = {
        "known images": risk_coverage(by_split["test"], correct),
        "with foreign images, all wrong": risk_coverage(*with_foreign(by_split, correct)),
    }
    plot_risk_coverage(curves).savefig(folder / "risk_coverage.png", dpi=RESOLUTION)
    return open_set_metrics(scores, correct)


def main(argv: list[str]) -> None:
    try:
        folder, args, data = prepare(argv)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    run = Run(folder, data, args.batch_size)
    metrics = evaluate_open_set(run, data, folder) if args.open_set else evaluate_split(run, data[args.split])
    name = "open_set" if args.open_set else args.split
    (folder / f"evaluation_{name}.json").write_text(json.dumps(metrics, indent=2))
    splits = ["test", *(split for split in FOREIGN if split in data)] if args.open_set else [args.split]
    counts = ", ".join(f"{len(data[split])} {split}" for split in splits)
    table = Table("metric", "value", title=f"{folder}, images: {counts}")
    for name, value in metrics.items():
        table.add_row(name.replace("_", " "), f"{100 * value:.1f} %")
    Console().print(table)
