"""Test a finished run on its own test split, or on other data by name.

python recipes/evaluate.py runs/quickstart [--split validation] [--dataset NAME --zeta 100 ...]
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # else this file hides the library of its name

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageClassification, EvalPrediction

from hf_fixastep import Images
from hf_fixastep.cards import RECIPE
from hf_fixastep.config import parse, read_yaml
from hf_fixastep.metrics import classification_metrics
from hf_fixastep.trainer import views_of
from recipes.train import DataArguments, load_data


@dataclass
class EvaluateArguments:
    """Which images of the data to test on."""

    split: str = field(default="test", metadata={"help": "labeled, validation or test."})
    batch_size: int = field(default=512, metadata={"help": "Images per forward."})


def prepare(argv: list[str]) -> tuple[Path, EvaluateArguments, Any]:
    """The run, and the data it names unless the command line names others."""
    if not argv or argv[0].startswith("--"):
        raise ValueError("The first argument has to be the folder of a finished run, such as runs/quickstart.")
    run, names = Path(argv[0]), {f.name for f in dataclasses.fields(DataArguments)}
    recipe = [(f"--{name}", str(value)) for name, value in read_yaml(run / RECIPE).items() if name in names]
    data_args, args, _ = parse((DataArguments, EvaluateArguments), [*sum(recipe, ()), *argv[1:]])
    data = load_data(data_args)
    if args.split not in data or "label" not in data[args.split].column_names:
        raise ValueError(f"split is {args.split}, but labels are in labeled, validation and test. Choose one of them.")
    return run, args, data[args.split]


@torch.inference_mode()
def predict(run: Path, split: Any, batch_size: int) -> tuple[Tensor, Tensor, list[str]]:
    """Logits, labels and class names."""
    model = AutoModelForImageClassification.from_pretrained(run).eval().to(memory_format=torch.channels_last)
    size, views = views_of(AutoImageProcessor.from_pretrained(run))
    images = Images.from_dataset(split, size)
    logits = [model(pixel_values=views.plain(pixels)).logits for pixels in images.pixels.split(batch_size)]
    assert images.labels is not None
    return torch.cat(logits), images.labels, list(model.config.id2label.values())


def main(argv: list[str]) -> None:
    try:
        run, args, split = prepare(argv)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    logits, labels, names = predict(run, split, args.batch_size)
    metrics = classification_metrics(names)(EvalPrediction(logits.numpy(), labels.numpy()))
    (run / f"evaluation_{args.split}.json").write_text(json.dumps(metrics, indent=2))
    table = Table("metric", "value", title=f"{run}, {len(labels)} images of {args.split}")
    for name, value in metrics.items():
        table.add_row(name.replace("_", " "), f"{100 * value:.1f} %")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
