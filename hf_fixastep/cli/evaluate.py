"""fixastep evaluate: test a finished run on its own test split, on other data, or among foreign images."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.runs.arguments import DataArguments, as_words, option, parse, positional
from hf_fixastep.runs.evaluation import FOREIGN, evaluate_open_set, evaluate_split, write_metrics
from hf_fixastep.runs.folder import RECIPE
from hf_fixastep.runs.recipe import read_mapping, read_yaml
from hf_fixastep.runs.training import load_data


@dataclass
class EvaluateArguments:
    """Which images of the data to test on."""

    split: str = option("test", "labeled, validation or test.")
    open_set: bool = option(False, "Test on foreign images too; split is test then.")
    batch_size: int = option(512, "Images per forward.")


OPTIONS = {"test": EvaluateArguments, "data": DataArguments}


def prepare(argv: list[str]) -> tuple[Path, EvaluateArguments, Any]:
    """The run, and the data it names unless the command line names others."""
    words, options = positional(argv)
    if len(words) != 1:
        raise ValueError(
            "The first argument has to be the folder of a finished run, such as runs/quickstart."
        )
    run, names = Path(words[0]), {f.name for f in dataclasses.fields(DataArguments)}
    recipe = {name: value for name, value in read_yaml(run / RECIPE).items() if name in names}
    known = [word for name, value in recipe.items() for word in (f"--{name}", *as_words(value))]
    data_args, args, _ = parse((DataArguments, EvaluateArguments), [*known, *options])
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


def main(argv: list[str]) -> None:
    try:
        folder, args, data = prepare(argv)
        classifier = Classifier(folder, batch_size=args.batch_size, calibrated=False)  # ranks and classes
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    if args.open_set:
        splits = ["test", *(split for split in FOREIGN if split in data)]
        metrics = evaluate_open_set(classifier, data, folder)
    else:
        splits = [args.split]
        metrics = evaluate_split(classifier, data[args.split])
    write_metrics(metrics, folder, "open_set" if args.open_set else args.split)
    counts = ", ".join(f"{len(data[split])} {split}" for split in splits)
    table = Table("metric", "value", title=f"{folder}, images: {counts}")
    for name, value in metrics.items():
        table.add_row(name.replace("_", " "), f"{100 * value:.1f} %")
    Console().print(table)
