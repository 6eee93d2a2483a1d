"""What was found in each hospital, as tables, numbers and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from hf_fixastep import plots
from hf_fixastep.evaluation.intervals import Estimate


TITLES = {"tmed2": "TMED-2", "unity": "Unity", "camus": "CAMUS", "camus_matched": "CAMUS matched"}
UNITS = {"unity": "clips"}  # whose patients are not known
COLOURS = {"tmed2": plots.BLACK, "unity": plots.BLUE, "camus": plots.ORANGE, "camus_matched": plots.GREEN}
LEVEL = 0.95
PHANTOM = "PHANTOM DATA, drawn by a program: the numbers say nothing about hearts or hospitals."
EXPLANATION = (
    "calibration error: before → after the temperature; decided: images above the threshold, and balanced "
    "accuracy on these"
)


@dataclass
class SiteResult:
    """What all runs found in one hospital.

    Args:
        images: how many each run saw.
        counts: confusion of each run, [R, K, K].
        calibration_error: before and after the temperature, means over the runs.
        decided: share of images that are decided, and balanced accuracy on these.
        intensities: pixels of each grey level, [256].
    """

    name: str
    phantom: bool
    images: list[int]
    patients: int
    counts: np.ndarray
    estimate: Estimate
    calibration_error: list[float]
    decided: list[float] | None
    intensities: np.ndarray

    @property
    def title(self) -> str:
        return TITLES[self.name] + " (phantom)" * self.phantom

    @property
    def unit(self) -> str:
        return UNITS.get(self.name, "patients")

    def percent(self, name: str, index: Any = ()) -> list[float]:
        """A rate and the two ends of its interval."""
        parts = (self.estimate.value, self.estimate.low, self.estimate.high)
        return [100 * float(getattr(rates, name)[index]) for rates in parts]

    def interval(self, name: str, index: Any = ()) -> str:
        """Percent with its interval, such as 93.1 (90.2 to 95.4)."""
        value, low, high = self.percent(name, index)
        if math.isnan(value):
            return "none"
        return f"{value:.1f}" if math.isnan(low) else f"{value:.1f} ({low:.1f} to {high:.1f})"

    def of_runs(self, name: str, index: Any = ()) -> np.ndarray:
        return getattr(self.estimate.runs, name)[(slice(None), *np.atleast_1d(index))]


def any_phantom(results: Sequence[SiteResult]) -> bool:
    return any(result.phantom for result in results)


# Tables and numbers


def print_tables(
    results: Sequence[SiteResult], source: str, classes: Sequence[str], console: Console
) -> None:
    phantom = "PHANTOM DATA, " * any_phantom(results)
    columns = ("hospital", "images", "patients", "balanced accuracy", "calibration error", "decided")
    table = Table(*columns, title=f"{phantom}{source}: percent, with {LEVEL:.0%} intervals over patients")
    for result in results:
        images = " ".join(f"{count:,}" for count in sorted(set(result.images)))
        patients = f"{result.patients:,}" + f" {result.unit}" * (result.unit != "patients")
        errors = " → ".join(f"{100 * error:.1f}" for error in result.calibration_error)
        decided = " %, ".join(f"{100 * share:.1f}" for share in result.decided or ())
        table.add_row(result.title, images, patients, result.interval("balanced_accuracy"), errors, decided)
    console.print(table)
    table = Table("hospital", "view", "sensitivity", "specificity", title=phantom.strip(", ") or None)
    for result in results:
        for index, view in enumerate(classes):
            rates = (result.interval(name, index) for name in ("sensitivity", "specificity"))
            last = index == len(classes) - 1
            table.add_row("" if index else result.title, view, *rates, end_section=last)
    console.print(table)
    console.print(EXPLANATION, soft_wrap=True)
    if phantom:
        console.print(PHANTOM, soft_wrap=True)


def as_numbers(result: SiteResult, classes: Sequence[str]) -> dict[str, Any]:
    """Everything about a hospital for JSON; None where there is no number."""
    shares = zip(("share", "balanced_accuracy"), map(number, result.decided or ()), strict=False)
    return {
        "title": result.title,
        "phantom": result.phantom,
        "images": result.images,
        result.unit: result.patients,
        "balanced_accuracy": entry(result, "balanced_accuracy"),
        **{
            name: {view: entry(result, name, index) for index, view in enumerate(classes)}
            for name in ("sensitivity", "specificity")
        },
        "calibration_error": dict(zip(("before", "after"), result.calibration_error, strict=True)),
        "decided": dict(shares) or None,
        "confusion": result.counts.tolist(),
    }


def entry(result: SiteResult, name: str, index: Any = ()) -> dict[str, Any]:
    ends = ("value", "low", "high")
    rates = {end: number(getattr(getattr(result.estimate, end), name)[index]) for end in ends}
    return rates | {"runs": [number(value) for value in result.of_runs(name, index)]}


def number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


# Figures


def save_figures(results: Sequence[SiteResult], classes: Sequence[str], folder: Path) -> list[Path]:
    figures = {"forest": plot_forest(results, classes), "intensities": plot_intensities(results)}
    for result in results:
        figure = figures[f"confusion_{result.name}"] = plots.plot_confusion(result.counts.sum(0), classes)
        set_title(figure, TITLES[result.name], [result])
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=plots.RESOLUTION)
    return paths


def set_title(figure: Figure, title: str, results: Sequence[SiteResult]) -> None:
    figure.suptitle(title + ", PHANTOM DATA" * any_phantom(results))


def plot_forest(results: Sequence[SiteResult], classes: Sequence[str]) -> Figure:
    """Balanced accuracy and sensitivities of every hospital, with intervals; runs as small dots."""
    rows: list[tuple[SiteResult, str, Any, str]] = []
    for result in results:
        rows.append((result, "balanced_accuracy", (), "balanced accuracy"))
        present = np.flatnonzero(~np.isnan(result.estimate.value.sensitivity))
        rows += [(result, "sensitivity", index, classes[index]) for index in present.tolist()]
    size = plots.WIDTH, 0.27 * len(rows) + 0.3 * len(results) + 1.1
    figure = Figure(size, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    plots.tidy(axes)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    heights: list[float] = []
    for result, name, index, _ in rows:
        first = name == "balanced_accuracy"
        heights.append(heights[-1] + (2.3 if first else 1.0) if heights else 0.0)
        if first:
            axes.text(0.0, heights[-1] - 0.75, result.title, weight="bold", **beside)
        draw_interval(axes, result, name, index, heights[-1])
        axes.text(1.02, heights[-1], result.interval(name, index), size=9, **beside)
    axes.set_yticks(heights, [label for *_, label in rows])
    dots = "; dots are single runs" * (len(results[0].images) > 1)
    axes.set(ylim=(heights[-1] + 0.6, -1.2), xlim=forest_limits(results))
    axes.set_xlabel(f"Percent, {LEVEL:.0%} intervals{dots}")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    set_title(figure, "View classification", results)
    return figure


def draw_interval(axes: Axes, result: SiteResult, name: str, index: Any, height: float) -> None:
    value, low, high = result.percent(name, index)
    colour, marker, size = (plots.BLUE, "s", 5)
    if name == "balanced_accuracy":
        colour, marker, size = (plots.BLACK, "D", 6)
    axes.plot([low, high], [height, height], color=colour, linewidth=0.37 * size, solid_capstyle="butt")
    axes.plot(value, height, color=colour, marker=marker, markersize=size)
    runs = 100 * result.of_runs(name, index)
    if len(runs) > 1:
        heights = np.full(len(runs), height + 0.28)
        axes.plot(runs, heights, color=plots.ORANGE, linestyle="none", marker=".", markersize=5)


def forest_limits(results: Sequence[SiteResult]) -> tuple[float, float]:
    """From a round number below everything that is drawn to 100, with room for the markers."""
    values = [
        np.concatenate([np.ravel(rates.sensitivity), np.ravel(rates.balanced_accuracy)])
        for result in results
        for rates in (result.estimate.value, result.estimate.low, result.estimate.runs)
    ]
    return max(0, 10 * math.floor(10 * float(np.nanmin(np.concatenate(values))) - 0.2)) - 1.5, 101.5


def plot_intensities(results: Sequence[SiteResult]) -> Figure:
    """Share of the pixels at every grey level, on a logarithmic scale, as the network sees them."""
    figure = Figure((plots.WIDTH, 4.0), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    plots.tidy(axes)
    for result in results:
        shares = result.intensities.reshape(-1, 4).sum(1) / result.intensities.sum()
        label = f"{TITLES[result.name]}, {result.intensities[0] / result.intensities.sum():.0%} black"
        line: dict[str, Any] = {
            "color": COLOURS[result.name],
            "linestyle": "--" if "matched" in result.name else "-",
        }
        axes.stairs(shares, np.arange(0, 257, 4), baseline=None, linewidth=1.6, label=label, **line)
    axes.set(yscale="log", xlim=(0, 256), xlabel="Grey level", ylabel="Share of pixels, per four levels")
    axes.set_xticks(range(0, 257, 32))
    plots.legend_above(axes)
    set_title(figure, "Intensities", results)
    return figure
