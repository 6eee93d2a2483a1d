"""fixastep evaluate: test a finished run on its own test split, on other data, or among foreign images.

Data with patients and machines get a report: per machine, with intervals over patients.
"""

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
from hf_fixastep.runs.folder import RECIPE, as_saved
from hf_fixastep.runs.recipe import read_mapping, read_yaml
from hf_fixastep.runs.sites import ask_run, has_machines, report
from hf_fixastep.runs.training import load_data


@dataclass
class EvaluateArguments:
    """Which images of the data to test on."""

    split: str = option("test", "labeled, validation or test.")
    open_set: bool = option(False, "Test on foreign images too; split is test then.")
    batch_size: int = option(512, "Images per forward.")
    out: str | None = option(None, "Machines: folder to write to; by default RUN/report.")
    coverage: float = option(0.9, "Machines: share of validation images that should be decided.")
    write_calibration: bool = option(True, "Machines: write to each run what predict needs.")
    draws: int = option(2000, "Machines: bootstrap samples of patients.")
    bootstrap_seed: int = option(0, "Machines: seed of the bootstrap.")


OPTIONS = {"test": EvaluateArguments, "data": DataArguments}


def prepare(argv: list[str]) -> tuple[list[Path], EvaluateArguments, list[Any]]:
    """The runs, and the data that each names unless the command line names others."""
    words, options = positional(argv)
    if not words:
        raise ValueError(
            "The first argument has to be the folder of a finished run, such as runs/quickstart."
        )
    found = [prepare_run(Path(word), options) for word in words]
    args, data = found[0]
    if len(found) > 1 and not by_machines(args, data):
        raise ValueError(
            f"Found {len(found)} runs, but expected one: several are compared only on test images of data "
            "with patients and machines."
        )
    return [Path(word) for word in words], args, [own for _, own in found]


def by_machines(args: EvaluateArguments, data: Any) -> bool:
    """Whether there is a report over machines."""
    return not args.open_set and args.split == "test" and has_machines(data["test"])


def prepare_run(run: Path, options: list[str]) -> tuple[EvaluateArguments, Any]:
    names = {f.name for f in dataclasses.fields(DataArguments)}
    recipe = {name: value for name, value in read_yaml(run / RECIPE).items() if name in names}
    known = [word for name, value in recipe.items() for word in (f"--{name}", *as_words(value))]
    data_args, args, _ = parse((DataArguments, EvaluateArguments), [*known, *options])
    if args.draws < 100:
        raise ValueError(f"draws is {args.draws}, but an interval needs at least 100.")
    if not 0 < args.coverage <= 1:
        raise ValueError(f"coverage is {args.coverage}, but expected a share of images above 0 and up to 1.")
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
    return args, data


def main(argv: list[str]) -> None:
    try:
        folders, args, sets = prepare(argv)
        folder, data = folders[0], sets[0]
        if by_machines(args, data):
            settings = (args.batch_size, args.coverage, args.write_calibration)
            runs = [ask_run(run, own, *settings) for run, own in zip(folders, sets, strict=True)]
            out = Path(args.out or folder / "report")
            report(runs, data, out, args.draws, args.bootstrap_seed, Console())
            return
        classifier = Classifier(folder, batch_size=args.batch_size, calibrated=False)  # ranks and classes
        if (count := data[args.split].features["label"].num_classes) != len(classifier.classes):
            raise ValueError(
                f"The model of {folder} tells {len(classifier.classes)} classes, but the data have {count}: "
                "expected the same."
            )
        if args.open_set:
            splits = ["test", *(split for split in FOREIGN if split in data)]
            with as_saved(folder):
                metrics = evaluate_open_set(classifier, data, folder)
        else:
            splits = [args.split]
            metrics = evaluate_split(classifier, data[args.split])
        write_metrics(metrics, folder, "open_set" if args.open_set else args.split)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    counts = ", ".join(f"{len(data[split])} {split}" for split in splits)
    table = Table("metric", "value", title=f"{folder}, images: {counts}")
    for name, value in metrics.items():
        table.add_row(name.replace("_", " "), f"{100 * value:.1f} %")
    Console().print(table)
