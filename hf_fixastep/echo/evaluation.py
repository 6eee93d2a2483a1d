"""Test a view classifier, or one of each split, on three hospitals: TMED-2, Unity and CAMUS.

fixastep heart2heart RUN [RUN RUN] --tmed2 FOLDER --unity FOLDER --camus FOLDER

Temperature and threshold of abstention are fitted on the validation images of TMED-2 and written to the
config.json of each run, for `fixastep predict`. Table, numbers and figures go to --out, by default the folder
heart2heart in the first run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers.utils import logging

from hf_fixastep.data.base import REPORT
from hf_fixastep.data.images import Images
from hf_fixastep.data.registry import load_dataset
from hf_fixastep.echo.files import is_phantom
from hf_fixastep.echo.report import (
    PHANTOM,
    TITLES,
    UNITS,
    HospitalResult,
    any_phantom,
    save_figures,
    wording,
)
from hf_fixastep.evaluation.calibration import Calibration, calibrate, write_calibration
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.evaluation.report import as_numbers, print_tables
from hf_fixastep.evaluation.sites import LEVEL, Answers, summarize
from hf_fixastep.runs.arguments import parse
from hf_fixastep.runs.folder import RECIPE
from hf_fixastep.runs.recipe import read_mapping, read_yaml


@dataclass
class Heart2HeartArguments:
    """Where the data are, and what to do with them."""

    tmed2: str | None = field(default=None, metadata={"help": "Folder of TMED-2."})
    unity: str | None = field(default=None, metadata={"help": "Folder of Unity."})
    camus: str | None = field(
        default=None, metadata={"help": "Folder of CAMUS; quantile-matched if TMED-2 is given."}
    )
    out: str | None = field(
        default=None, metadata={"help": "Folder to write to; by default RUN/heart2heart."}
    )
    coverage: float = field(
        default=0.9, metadata={"help": "Share of validation images that should be decided."}
    )
    write_calibration: bool = field(default=True, metadata={"help": "Write the calibration to each run."})
    present_only: bool = field(default=False, metadata={"help": "Predict only classes that a hospital has."})
    draws: int = field(default=2000, metadata={"help": "Bootstrap samples of patients."})
    seed: int = field(default=0, metadata={"help": "Seed of the bootstrap."})


@dataclass
class EvaluatedRun:
    """A trained model, and the TMED-2 split it belongs to."""

    folder: Path
    classifier: Classifier
    split: dict[str, Any]  # arguments of load_dataset
    calibration: Calibration | None = None


@dataclass
class SiteLogits(Answers):
    """What one model says about the images of one hospital, and their grey levels."""

    intensities: np.ndarray  # [256] pixels of each value


def open_runs(argv: list[str]) -> tuple[list[EvaluatedRun], Heart2HeartArguments]:
    """Everything that can be wrong with the command line is found in here."""
    first_option = next((at for at, word in enumerate(argv) if word.startswith("--")), len(argv))
    folders = argv[:first_option]
    args, _ = parse((Heart2HeartArguments,), argv[first_option:])
    if not 1 <= len(folders) <= 3:
        raise ValueError(f"Found {len(folders)} runs, but expected one, or one of each of the three splits.")
    if not (args.tmed2 or args.unity or args.camus):
        raise ValueError(
            "No data were given; give --tmed2, --unity or --camus with the folder of your download."
        )
    if args.draws < 100:
        raise ValueError(f"draws is {args.draws}, but an interval needs at least 100.")
    if not 0 < args.coverage <= 1:
        raise ValueError(f"coverage is {args.coverage}, but expected a share of images above 0 and up to 1.")
    return [open_run(Path(folder), calibrated=not args.tmed2) for folder in folders], args


def open_run(folder: Path, calibrated: bool = True) -> EvaluatedRun:
    """A run of TMED-2, with its calibration unless that is to be fitted anew."""
    recipe = read_yaml(folder / RECIPE)
    if recipe.get("dataset") != "tmed2":
        raise ValueError(f"{folder} was trained on {recipe.get('dataset')}, but expected tmed2.")
    settings = read_mapping("dataset_kwargs", recipe.get("dataset_kwargs"))
    classifier = Classifier(folder, calibrated=calibrated)
    split = {"config": recipe.get("dataset_config"), **settings}
    return EvaluatedRun(folder, classifier, split, classifier.calibration)


def load_split(name: str, split: str, data_dir: str, classifier: Classifier, **settings: Any) -> Any:
    data = load_dataset(name, split=split, data_dir=data_dir, **settings)
    names = data.features["label"].names
    if names != classifier.classes:
        known = ", ".join(classifier.classes)
        raise ValueError(f"The model knows {known}, but {name} has {', '.join(names)}: expected the same.")
    return data


def load_sites(run: EvaluatedRun, args: Heart2HeartArguments) -> Iterator[tuple[str, Any]]:
    """Name and test images of every hospital that was given."""
    if args.tmed2:
        tmed2 = load_split("tmed2", "test", args.tmed2, run.classifier, **run.split)
        yield "tmed2", tmed2
    if args.unity:
        yield "unity", load_split("unity", "test", args.unity, run.classifier)
    if args.camus:
        yield "camus", load_split("camus", "test", args.camus, run.classifier)
    if args.camus and args.tmed2:
        report = os.path.join(os.path.dirname(tmed2.cache_files[0]["filename"]), REPORT)
        matched = {"quantile_match": True, "reference": report}
        yield "camus_matched", load_split("camus", "test", args.camus, run.classifier, **matched)


def ask(classifier: Classifier, data: Any) -> SiteLogits:
    images = Images.from_dataset(data, classifier.size)
    assert images.labels is not None
    intensities = np.bincount(images.pixels[:, 0].numpy().ravel(), minlength=256)
    logits = classifier.logits(images.pixels)
    return SiteLogits(logits, images.labels.numpy(), np.array(data["patient"][:]), intensities)


def evaluate_sites(runs: Sequence[EvaluatedRun], args: Heart2HeartArguments) -> list[HospitalResult]:
    if args.tmed2:
        for run in runs:
            data = load_split("tmed2", "validation", args.tmed2, run.classifier, **run.split)
            validation = ask(run.classifier, data)
            run.calibration = calibrate(validation.logits, validation.labels, args.coverage)
            if args.write_calibration:
                run.calibration = write_calibration(run.folder, run.calibration)
    answers: dict[str, list[SiteLogits]] = {}
    for run in runs:
        for name, data in load_sites(run, args):
            answers.setdefault(name, []).append(ask(run.classifier, data))
    return [summarize_hospital(name, found, runs, args) for name, found in answers.items()]


def summarize_hospital(
    name: str, answers: Sequence[SiteLogits], runs: Sequence[EvaluatedRun], args: Heart2HeartArguments
) -> HospitalResult:
    phantom = is_phantom(getattr(args, name.removesuffix("_matched")))
    found = summarize(
        name,
        TITLES[name] + " (phantom)" * phantom,
        answers,
        [run.calibration for run in runs],
        present_only=args.present_only,
        draws=args.draws,
        seed=args.seed,
        unit=UNITS.get(name, "patients"),
    )
    return HospitalResult(**vars(found), phantom=phantom, intensities=answers[0].intensities)


def describe(
    results: Sequence[HospitalResult], runs: Sequence[EvaluatedRun], args: Heart2HeartArguments
) -> dict[str, Any]:
    """Everything that goes into heart2heart.json."""
    classes = runs[0].classifier.classes
    return {
        "phantom": any_phantom(results),
        "note": PHANTOM if any_phantom(results) else None,
        "runs": [str(run.folder) for run in runs],
        "classes": classes,
        "present_only": args.present_only,
        "bootstrap": {"over": "patients", "draws": args.draws, "level": LEVEL, "seed": args.seed},
        "calibration": {str(run.folder): run.calibration and asdict(run.calibration) for run in runs},
        "sites": {
            result.name: as_numbers(result, classes) | {"phantom": result.phantom} for result in results
        },
    }


def main(argv: list[str]) -> None:
    logging.disable_progress_bar()
    try:
        runs, args = open_runs(argv)
        out = Path(args.out or runs[0].folder / "heart2heart")
        results = evaluate_sites(runs, args)
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    numbers = describe(results, runs, args)
    (out / "heart2heart.json").write_text(json.dumps(numbers, indent=2, allow_nan=False))
    figures = save_figures(results, numbers["classes"], out)
    console = Console()
    source = f"mean of {len(runs)} runs" if len(runs) > 1 else str(runs[0].folder)
    print_tables(results, source, numbers["classes"], console, wording(results))
    if any_phantom(results):
        console.print(PHANTOM, soft_wrap=True)
    console.print(f"{out}: heart2heart.json, {', '.join(figure.name for figure in figures)}", soft_wrap=True)
