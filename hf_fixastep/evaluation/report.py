"""What was found at each site, as tables, numbers and figures that show numbers only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from hf_fixastep.evaluation.open_set import Area
from hf_fixastep.evaluation.sites import LEVEL, SiteResult, in_words


EXPLANATION = (
    "calibration error: before → after the temperature; decided: images above the threshold, and balanced "
    "accuracy on these"
)


@dataclass(frozen=True)
class Wording:
    """What a benchmark calls its things.

    Args:
        site: such as hospital.
        kind: of a class, such as view.
        task: title of the figure of all sites.
        warning: in the title of every table and figure.
    """

    site: str
    kind: str
    task: str
    warning: str = ""


# Tables and numbers


def print_tables(
    results: Sequence[SiteResult], source: str, classes: Sequence[str], console: Console, words: Wording
) -> None:
    warning = f"{words.warning}, " if words.warning else ""
    columns = (words.site, "images", "patients", "balanced accuracy", "calibration error", "decided")
    table = Table(*columns, title=f"{warning}{source}: percent, with {LEVEL:.0%} intervals over patients")
    for result in results:
        images = " ".join(f"{count:,}" for count in sorted(set(result.images)))
        patients = f"{result.patients:,}" + f" {result.unit}" * (result.unit != "patients")
        errors = " → ".join(f"{100 * error:.1f}" for error in result.calibration_error)
        decided = " %, ".join(f"{100 * share:.1f}" for share in result.decided or ())
        table.add_row(result.title, images, patients, result.interval("balanced_accuracy"), errors, decided)
    console.print(table)
    table = Table(words.site, words.kind, "sensitivity", "specificity", title=words.warning or None)
    for result in results:
        for index, kind in enumerate(classes):
            rates = (result.interval(name, index) for name in ("sensitivity", "specificity"))
            last = index == len(classes) - 1
            table.add_row("" if index else result.title, kind, *rates, end_section=last)
    console.print(table)
    console.print(EXPLANATION, soft_wrap=True)


def as_numbers(result: SiteResult, classes: Sequence[str]) -> dict[str, Any]:
    """Everything about a site for JSON; None where there is no number."""
    shares = zip(("share", "balanced_accuracy"), map(number, result.decided or ()), strict=False)
    return {
        "title": result.title,
        "images": result.images,
        result.unit: result.patients,
        "balanced_accuracy": entry(result, "balanced_accuracy"),
        **{
            name: {kind: entry(result, name, index) for index, kind in enumerate(classes)}
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


def make_figures(results: Sequence[SiteResult], classes: Sequence[str], words: Wording) -> dict[str, Figure]:
    """The forest of all sites, and the confusion at each, by the names of their files."""
    figures = {"forest": plot_forest(results, classes, words)}
    for result in results:
        figure = figures[f"confusion_{result.name}"] = plots.plot_confusion(result.counts.sum(0), classes)
        set_title(figure, result.title, words)
    return figures


def save(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=plots.RESOLUTION)
    return paths


def set_title(figure: Figure, title: str, words: Wording) -> None:
    figure.suptitle(f"{title}, {words.warning}" if words.warning else title)


def plot_forest(results: Sequence[SiteResult], classes: Sequence[str], words: Wording) -> Figure:
    """Balanced accuracy and sensitivities of every site, with intervals; runs as small dots."""
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
    set_title(figure, words.task, words)
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


def plot_methods(
    methods: Mapping[str, Mapping[str, Estimate]], words: Wording, titles: Mapping[str, str] | None = None
) -> Figure:
    """Balanced accuracy of every method at each site, with intervals over patients.

    Args:
        methods: by method, then by site, all with the same sites.
        titles: of the sites, if not their names.
    """
    sites = list(next(iter(methods.values())))
    step = 0.8 / len(methods)
    figure = Figure(
        (plots.WIDTH, 0.26 * len(sites) * len(methods) + 0.4 * len(sites) + 1.2),
        facecolor="white",
        layout="constrained",
    )
    axes = figure.add_subplot()
    plots.tidy(axes)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#E5E5E5", linewidth=0.8)
    colours = (plots.BLACK, plots.BLUE, plots.ORANGE, plots.GREEN)
    for number, (method, by_site) in enumerate(methods.items()):
        heights = np.arange(len(sites)) - 0.4 + step * (number + 0.5)
        parts = ("value", "low", "high")
        value, low, high = (
            [100 * float(getattr(by_site[site], part).balanced_accuracy) for site in sites] for part in parts
        )
        look: dict[str, Any] = {"color": colours[number % 4], "marker": "osD^v"[number // 4 % 5]}
        axes.hlines(heights, low, high, color=look["color"], linewidth=1.8)
        axes.plot(value, heights, linestyle="none", markersize=5, label=method, **look)
    axes.set_yticks(range(len(sites)), [(titles or {}).get(site, site) for site in sites])
    axes.set_ylim(len(sites) - 0.5, -0.5)
    axes.set_xlabel(f"Balanced accuracy in percent, {LEVEL:.0%} intervals over patients")
    plots.legend_above(axes)
    set_title(figure, f"Per {words.site} and method", words)
    return figure


# Known against foreign images


def print_open_set(areas: Mapping[str, Mapping[str, Area]], console: Console, words: Wording) -> None:
    """AUROC of each score, over all pairs and over those of one site.

    Args:
        areas: by score, then "all" and "same_site" and the sites.
    """
    title = f"AUROC of known against foreign images in percent, with {LEVEL:.0%} intervals over patients"
    table = Table("score", "all pairs", f"pairs of one {words.site}", title=title)
    for name, found in areas.items():
        ends = (found[part] for part in ("all", "same_site"))
        table.add_row(
            name.replace("_", " "),
            *(in_words(100 * area.value, 100 * area.low, 100 * area.high) for area in ends),
        )
    console.print(table)


def area_numbers(area: Area) -> dict[str, Any]:
    ends = {name: number(getattr(area, name)) for name in ("value", "low", "high")}
    return ends | {"runs": [number(value) for value in area.runs]}
