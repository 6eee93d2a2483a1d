"""Test a view classifier, or one of each split, on three hospitals: TMED-2, Unity and CAMUS.

fixastep heart2heart RUN [RUN RUN] --tmed2 FOLDER --unity FOLDER --camus FOLDER

Temperature and threshold of abstention are fitted on the validation images of TMED-2 and written to the
config.json of each run, for predict.py. Table, numbers and figures go to --out, by default the folder
heart2heart in the first run.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from hf_fixastep.data.folders import REPORT
from hf_fixastep.data.images import Images
from hf_fixastep.data.registry import load_dataset
from hf_fixastep.echo.files import is_phantom
from hf_fixastep.evaluation.calibration import Calibration, calibrate, probabilities, write_calibration
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.evaluation.intervals import Estimate, confusions, estimate
from hf_fixastep.evaluation.metrics import balanced_accuracy, calibration_error
from hf_fixastep.plots import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    RESOLUTION,
    WIDTH,
    legend_above,
    plot_confusion,
    tidy,
)
from hf_fixastep.runs.arguments import parse
from hf_fixastep.runs.folder import RECIPE
from hf_fixastep.runs.recipe import read_mapping, read_yaml


TITLES = {"tmed2": "TMED-2", "unity": "Unity", "camus": "CAMUS", "camus_matched": "CAMUS matched"}
UNITS = {"unity": "clips"}  # whose patients are not known
LEVEL = 0.95
PHANTOM = "PHANTOM DATA, drawn by a program: the numbers say nothing about hearts or hospitals."


@dataclass
class EvaluateArguments:
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
class Run:
    """A trained model, and the TMED-2 split it belongs to."""

    folder: Path
    classifier: Classifier
    split: dict[str, Any]  # arguments of load_dataset
    calibration: Calibration | None = None


@dataclass
class Answers:
    """What one model says about the images of one hospital."""

    logits: np.ndarray  # [N, K]
    labels: np.ndarray
    patients: np.ndarray
    intensities: np.ndarray  # [256] pixels of each value


def prepare(argv: list[str]) -> tuple[list[Run], EvaluateArguments]:
    first_option = next((at for at, word in enumerate(argv) if word.startswith("--")), len(argv))
    folders = argv[:first_option]
    args, _ = parse((EvaluateArguments,), argv[first_option:])
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
    return [open_run(Path(folder)) for folder in folders], args


def open_run(folder: Path) -> Run:
    recipe = read_yaml(folder / RECIPE)
    if recipe.get("dataset") != "tmed2":
        raise ValueError(f"{folder} was trained on {recipe.get('dataset')}, but expected tmed2.")
    split = {
        "config": recipe.get("dataset_config"),
        **read_mapping("dataset_kwargs", recipe.get("dataset_kwargs")),
    }
    classifier = Classifier(folder)
    return Run(folder, classifier, split, Calibration.of(classifier.model.config))


def load_split(name: str, split: str, data_dir: str, classifier: Classifier, **settings: Any) -> Any:
    data = load_dataset(name, split=split, data_dir=data_dir, **settings)
    names = data.features["label"].names
    if names != classifier.classes:
        raise ValueError(
            f"The model knows {', '.join(classifier.classes)}, but {name} has {', '.join(names)}: expected the same."
        )
    return data


def sites(run: Run, args: EvaluateArguments) -> Iterator[tuple[str, Any]]:
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


def ask(classifier: Classifier, data: Any) -> Answers:
    images = Images.from_dataset(data, classifier.size)
    assert images.labels is not None
    intensities = np.bincount(images.pixels[:, 0].numpy().ravel(), minlength=256)
    return Answers(
        classifier.logits(images.pixels), images.labels.numpy(), np.array(data["patient"][:]), intensities
    )


@dataclass
class Result:
    """One hospital: what the runs found there."""

    name: str
    phantom: bool
    images: list[int]
    patients: int
    counts: np.ndarray  # [R, K, K] confusion
    estimate: Estimate
    calibration_error: list[float]  # before and after the temperature, means over the runs
    decided: list[float] | None  # share of images, and balanced accuracy on these
    intensities: np.ndarray

    @property
    def title(self) -> str:
        return TITLES[self.name] + " (phantom)" * self.phantom

    @property
    def unit(self) -> str:
        return UNITS.get(self.name, "patients")


def summarize(name: str, answers: Sequence[Answers], runs: Sequence[Run], args: EvaluateArguments) -> Result:
    classes = answers[0].logits.shape[1]
    patients, numbers = np.unique(np.concatenate([each.patients for each in answers]), return_inverse=True)
    groups = np.split(numbers, np.cumsum([len(each.labels) for each in answers])[:-1])
    counts = []
    for each, group in zip(answers, groups, strict=True):
        own = np.zeros((len(patients), classes, classes), np.int64)
        found = confusions(predictions(each, args.present_only), each.labels, group, classes)
        own[: len(found)] = found
        counts.append(own)
    return Result(
        name,
        is_phantom(getattr(args, name.removesuffix("_matched"))),
        [len(each.labels) for each in answers],
        len(patients),
        np.stack([own.sum(0) for own in counts]),
        estimate(counts, args.draws, LEVEL, args.seed),
        *calibration_numbers(answers, runs, args.present_only),
        answers[0].intensities,
    )


def predictions(answers: Answers, present_only: bool) -> np.ndarray:
    present = np.isin(np.arange(answers.logits.shape[1]), answers.labels)
    return np.where(present | (not present_only), answers.logits, -np.inf).argmax(-1)


def calibration_numbers(
    answers: Sequence[Answers], runs: Sequence[Run], present_only: bool
) -> tuple[list[float], list[float] | None]:
    """Calibration error before and after the temperature; share of images decided, and accuracy on these."""
    errors, decided = [], []
    for each, run in zip(answers, runs, strict=True):
        scaled = probabilities(each.logits, (run.calibration or Calibration(1.0)).temperature)
        errors.append(
            [
                calibration_error(probabilities(each.logits), each.labels),
                calibration_error(scaled, each.labels),
            ]
        )
        if run.calibration is not None:
            kept = scaled.max(-1) >= run.calibration.abstain_below
            right = predictions(each, present_only)[kept]
            decided.append(
                [kept.mean(), balanced_accuracy(right, each.labels[kept]) if kept.any() else math.nan]
            )
    means = [float(value) for value in np.mean(errors, 0)]
    return means, [float(value) for value in np.mean(decided, 0)] if len(decided) == len(runs) else None


# Table and numbers


def interval(result: Result, name: str, index: Any = ()) -> str:
    """Percent with its interval, such as 93.1 (90.2 to 95.4)."""
    value, low, high = (
        100 * float(getattr(rates, name)[index])
        for rates in (result.estimate.value, result.estimate.low, result.estimate.high)
    )
    if math.isnan(value):
        return "none"
    return f"{value:.1f}" if math.isnan(low) else f"{value:.1f} ({low:.1f} to {high:.1f})"


def print_tables(
    results: Sequence[Result], runs: Sequence[Run], classes: Sequence[str], console: Console
) -> None:
    phantom = any(result.phantom for result in results)
    mean = f"mean of {len(runs)} runs" if len(runs) > 1 else str(runs[0].folder)
    title = f"{'PHANTOM DATA, ' * phantom}{mean}: percent, with {LEVEL:.0%} intervals over patients"
    table = Table(
        "hospital", "images", "patients", "balanced accuracy", "calibration error", "decided", title=title
    )
    for result in results:
        decided = (
            ""
            if result.decided is None
            else f"{100 * result.decided[0]:.1f} %, {100 * result.decided[1]:.1f}"
        )
        errors = " → ".join(f"{100 * error:.1f}" for error in result.calibration_error)
        images = " ".join(f"{count:,}" for count in sorted(set(result.images)))
        people = f"{result.patients:,}" + f" {result.unit}" * (result.unit != "patients")
        table.add_row(result.title, images, people, interval(result, "balanced_accuracy"), errors, decided)
    console.print(table)
    table = Table("hospital", "view", "sensitivity", "specificity", title="PHANTOM DATA" if phantom else None)
    for result in results:
        for index, view in enumerate(classes):
            rows = interval(result, "sensitivity", index), interval(result, "specificity", index)
            table.add_row(
                result.title if index == 0 else "", view, *rows, end_section=index == len(classes) - 1
            )
    console.print(table)
    explanation = (
        "before → after the temperature; decided: images above the threshold, and balanced accuracy on these"
    )
    console.print(f"calibration error: {explanation}", soft_wrap=True)
    if phantom:
        console.print(PHANTOM, soft_wrap=True)


def as_numbers(
    results: Sequence[Result], runs: Sequence[Run], classes: Sequence[str], args: EvaluateArguments
) -> dict[str, Any]:
    """Everything for JSON; None where there is no number."""
    return {
        "phantom": any(result.phantom for result in results),
        "note": PHANTOM if any(result.phantom for result in results) else None,
        "runs": [str(run.folder) for run in runs],
        "classes": list(classes),
        "present_only": args.present_only,
        "bootstrap": {"over": "patients", "draws": args.draws, "level": LEVEL, "seed": args.seed},
        "calibration": {str(run.folder): run.calibration and asdict(run.calibration) for run in runs},
        "sites": {
            result.name: {
                "title": result.title,
                "phantom": result.phantom,
                "images": result.images,
                result.unit: result.patients,
                "balanced_accuracy": entry(result.estimate, "balanced_accuracy"),
                "sensitivity": {n: entry(result.estimate, "sensitivity", i) for i, n in enumerate(classes)},
                "specificity": {n: entry(result.estimate, "specificity", i) for i, n in enumerate(classes)},
                "calibration_error": dict(zip(("before", "after"), result.calibration_error, strict=True)),
                "decided": result.decided
                and dict(zip(("share", "balanced_accuracy"), map(number, result.decided), strict=True)),
                "confusion": result.counts.tolist(),
            }
            for result in results
        },
    }


def entry(found: Estimate, name: str, index: Any = ()) -> dict[str, Any]:
    ends = {end: number(getattr(getattr(found, end), name)[index]) for end in ("value", "low", "high")}
    return ends | {
        "runs": [number(value) for value in getattr(found.runs, name)[(slice(None), *np.atleast_1d(index))]]
    }


def number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


# Figures


def plot_forest(results: Sequence[Result], classes: Sequence[str]) -> Figure:
    """Balanced accuracy and sensitivities of every hospital, with intervals; runs as small dots."""
    rows: list[tuple[Result, str, Any, str]] = []
    for result in results:
        rows.append((result, "balanced_accuracy", (), "balanced accuracy"))
        shown = [
            (i, name) for i, name in enumerate(classes) if not np.isnan(result.estimate.value.sensitivity[i])
        ]
        rows += [(result, "sensitivity", index, name) for index, name in shown]
    figure = Figure(
        (WIDTH, 0.27 * len(rows) + 0.3 * len(results) + 1.1), facecolor="white", layout="constrained"
    )
    axes = figure.add_subplot()
    tidy(axes)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    height, ticks = 0.0, []
    for at, (result, name, index, label) in enumerate(rows):
        if name == "balanced_accuracy":
            height += 1.3 if at else 0.0
            axes.text(
                0.0,
                height - 0.75,
                result.title,
                transform=axes.get_yaxis_transform(),
                weight="bold",
                va="center",
            )
        ticks.append((height, label))
        draw_interval(axes, result.estimate, name, index, height)
        text = interval(result, name, index)
        axes.text(1.02, height, text, transform=axes.get_yaxis_transform(), va="center", size=9)
        height += 1
    axes.set_yticks([tick for tick, _ in ticks], [label for _, label in ticks])
    dots = "; dots are single runs" if len(results[0].images) > 1 else ""
    axes.set(
        ylim=(height - 0.4, -1.2), xlim=forest_limits(results), xlabel=f"Percent, {LEVEL:.0%} intervals{dots}"
    )
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    set_title(figure, "View classification", results)
    return figure


def draw_interval(axes: Axes, found: Estimate, name: str, index: Any, height: float) -> None:
    value, low, high = (
        100 * float(getattr(rates, name)[index]) for rates in (found.value, found.low, found.high)
    )
    overall = name == "balanced_accuracy"
    colour = BLACK if overall else BLUE
    axes.plot(
        [low, high], [height, height], color=colour, linewidth=2.2 if overall else 1.6, solid_capstyle="butt"
    )
    axes.plot(value, height, color=colour, marker="D" if overall else "s", markersize=6 if overall else 5)
    runs = 100 * getattr(found.runs, name)[(slice(None), *np.atleast_1d(index))]
    if len(runs) > 1:
        axes.plot(runs, [height + 0.28] * len(runs), color=ORANGE, linestyle="none", marker=".", markersize=5)


def forest_limits(results: Sequence[Result]) -> tuple[float, float]:
    """From a round number below everything that is drawn to 100, with room for the markers."""
    values = [
        np.concatenate([np.ravel(rates.sensitivity), np.ravel(rates.balanced_accuracy)])
        for result in results
        for rates in (result.estimate.value, result.estimate.low, result.estimate.runs)
    ]
    return max(0, 10 * math.floor(10 * float(np.nanmin(np.concatenate(values))) - 0.2)) - 1.5, 101.5


def plot_intensities(results: Sequence[Result]) -> Figure:
    """Share of the pixels at every grey level, on a logarithmic scale, as the network sees them."""
    figure = Figure((WIDTH, 4.0), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    tidy(axes)
    styles = {
        "tmed2": (BLACK, "-"),
        "unity": (BLUE, "-"),
        "camus": (ORANGE, "-"),
        "camus_matched": (GREEN, "--"),
    }
    edges = np.arange(0, 257, 4)
    for result in results:
        shares = result.intensities.reshape(-1, 4).sum(1) / result.intensities.sum()
        colour, line = styles[result.name]
        label = f"{TITLES[result.name]}, {result.intensities[0] / result.intensities.sum():.0%} black"
        axes.stairs(shares, edges, baseline=None, color=colour, linestyle=line, linewidth=1.6, label=label)
    axes.set(yscale="log", xlim=(0, 256), xlabel="Grey level", ylabel="Share of pixels, per four levels")
    axes.set_xticks(range(0, 257, 32))
    legend_above(axes)
    set_title(figure, "Intensities", results)
    return figure


def set_title(figure: Figure, title: str, results: Sequence[Result]) -> None:
    figure.suptitle(f"{title}, PHANTOM DATA" if any(result.phantom for result in results) else title)


def save_figures(results: Sequence[Result], classes: Sequence[str], folder: Path) -> list[Path]:
    figures = {"forest": plot_forest(results, classes), "intensities": plot_intensities(results)}
    for result in results:
        figure = plot_confusion(result.counts.sum(0), classes)
        figure.suptitle(f"{TITLES[result.name]}{', PHANTOM DATA' * result.phantom}")
        figures[f"confusion_{result.name}"] = figure
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=RESOLUTION)
    return paths


def evaluate(runs: Sequence[Run], args: EvaluateArguments) -> list[Result]:
    for run in runs if args.tmed2 else ():
        validation = ask(
            run.classifier, load_split("tmed2", "validation", args.tmed2, run.classifier, **run.split)
        )
        run.calibration = calibrate(validation.logits, validation.labels, args.coverage)
        if args.write_calibration:
            write_calibration(run.folder, run.calibration)
    answers: dict[str, list[Answers]] = {}
    for run in runs:
        for name, data in sites(run, args):
            answers.setdefault(name, []).append(ask(run.classifier, data))
    return [summarize(name, found, runs, args) for name, found in answers.items()]


def main(argv: list[str]) -> None:
    logging.disable_progress_bar()
    try:
        runs, args = prepare(argv)
        out = Path(args.out or runs[0].folder / "heart2heart")
        results = evaluate(runs, args)
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    classes = runs[0].classifier.classes
    numbers = as_numbers(results, runs, classes, args)
    (out / "heart2heart.json").write_text(json.dumps(numbers, indent=2, allow_nan=False))
    figures = save_figures(results, classes, out)
    console = Console()
    print_tables(results, runs, classes, console)
    console.print(f"{out}: heart2heart.json, {', '.join(figure.name for figure in figures)}", soft_wrap=True)
