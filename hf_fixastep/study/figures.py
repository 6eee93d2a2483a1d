"""Figures of a study as in the paper, each from the runs of one data set and label count."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hf_fixastep.methods import FITTED, METHODS, RIVALS
from hf_fixastep.plots import BLACK, BLUE, GREEN, ORANGE, RESOLUTION, THOUSANDS, WIDTH, percent, tidy
from hf_fixastep.study.comparison import (
    BASE,
    FIX_A_STEP,
    LABELED_ONLY,
    MIXING,
    VARIANTS,
    Group,
    group_runs,
    is_full,
    own_base,
)
from hf_fixastep.study.statistics import Interval, count, mean_interval


# The rest of Okabe and Ito's colours but yellow, which is too light for lines, and a purple for it.
SKY, AMBER, PINK, GREY, PURPLE = "#56B4E9", "#E69F00", "#CC79A7", "#8C8C8C", "#6A3D9A"
COLOURS = (SKY, ORANGE, GREEN, PINK, AMBER, BLUE, GREY, PURPLE)
MARKERS = "osD^vPX<"
BARS = {BASE: GREY, "+G": SKY, "+A": AMBER, FIX_A_STEP: BLUE}
PANELS = ("base", "Fix-A-Step", "perfect filtering", "rivals")
AXIS_TITLES = {"test_accuracy": "Test accuracy", "test_balanced_accuracy": "Balanced test accuracy"}


def plot_zeta(runs: pd.DataFrame, metric: str = "test_accuracy") -> Figure:
    """Accuracy over the share of foreign classes: base, Fix-A-Step, perfect filtering and rivals."""
    groups = main_groups(group_runs(runs))
    lines = [group for group in groups if group.settings["zeta"] is not None and panel_of(group)]
    zetas = sorted({group.settings["zeta"] for group in lines})
    if len(zetas) < 2:
        raise ValueError("accuracy over zeta needs runs of at least two zeta")
    names = [name for name in PANELS if any(panel_of(group) == name for group in lines)]
    figure, panels = beside(len(names), 3.1)
    for axes, name in zip(panels, names, strict=True):
        draw_labeled_only(axes, groups, metric)
        for method, chosen in by_method([group for group in lines if panel_of(group) == name]):
            points = [(group.settings["zeta"], group.runs[metric]) for group in chosen]
            draw_band(axes, points, **style(method))
        axes.set(title=name, xticks=zetas, xlim=widened(zetas))
        shown = zetas if len(names) < 3 else (0, 50, 100)
        axes.set_xticklabels([f"{zeta:g}" if zeta in shown else "" for zeta in zetas])
    panels[0].set_ylabel(AXIS_TITLES[metric])
    panels[0].yaxis.set_major_formatter(percent)
    note = f"Lines: mean over {seeds_of(groups)}; bands: lowest to highest seed."
    finish(figure, panels, "zeta, percent of unlabeled classes that are foreign", note)
    return figure


def plot_ablation(runs: pd.DataFrame, metric: str = "test_accuracy") -> Figure:
    """What mixing and gate do alone and together, a panel for each zeta; bars stand on labeled-only."""
    groups = main_groups(group_runs(runs))
    bars = [group for group in groups if group.variant in BARS and not group.settings["oracle"]]
    variants = {
        group.method: {each.variant for each in bars if each.method == group.method} for group in bars
    }
    bars = [group for group in bars if len(variants[group.method]) > 1]
    if not bars:
        raise ValueError("the ablation needs a loss with at least two of base, +G, +A and Fix-A-Step")
    zetas = sorted({group.settings["zeta"] for group in bars}, key=lambda zeta: -1 if zeta is None else zeta)
    methods = [method for method, _ in by_method(bars)]
    figure = Figure((WIDTH, 1.9 * len(zetas) + 1.3), facecolor="white", layout="constrained")
    panels = list(figure.subplots(len(zetas), sharex=True, sharey=True, squeeze=False)[:, 0])
    for axes, zeta in zip(panels, zetas, strict=True):
        tidy(axes)
        floor = draw_labeled_only(axes, groups, metric, band=False)
        chosen = [group for group in bars if group.settings["zeta"] == zeta]
        draw_bars(axes, chosen, methods, floor or 0.0, metric)
        axes.set_title("" if zeta is None else f"zeta {zeta:g}", loc="left", size=10)
        axes.yaxis.set_major_formatter(percent)
    between = "\n" if len(methods) > 4 else " "
    names = [METHODS.get(method, method).replace(" ", between) for method in methods]
    panels[-1].set_xticks(range(len(names)), names)
    panels[-1].set_xlim(-0.6, len(names) - 0.4)
    figure.supylabel(AXIS_TITLES[metric], size=10)
    note = "Bars stand on labeled-only. " if any(map(is_labeled_only, groups)) else ""
    note += f"Whiskers: 95 % intervals over {what_over(bars, metric)}."
    finish(figure, panels, "", note, ncols=5)
    return figure


def plot_sensitivity(runs: pd.DataFrame, metric: str = "test_accuracy") -> Figure:
    """Accuracy for each temperature and alpha of the mixing, with base and labeled-only as lines."""
    groups = group_runs(runs)
    found = list(mixing_families(groups))
    if not found:
        raise ValueError("the sensitivity needs runs that differ in mix_alpha or mix_temperature")
    figure, panels = beside(len(found), 3.4)
    for axes, (title, family) in zip(panels, found, strict=True):
        draw_labeled_only(axes, groups, metric, band=False)
        base = own_base(family[0], groups)
        if base is not None:
            axes.axhline(base.runs[metric].mean(), color=GREY, linewidth=1.8, label="base")
        values = [mean_interval(group.runs, metric) for group in family]
        whiskers(axes, range(len(family)), values, "o", color=BLUE, markersize=7, label=family[0].variant)
        pairs = [f"{g.settings['mix_temperature']:g}\n{g.settings['mix_alpha']:g}" for g in family]
        axes.set_xticks(range(len(family)), pairs)
        axes.set(xlim=(-0.6, len(family) - 0.4))
        axes.set_title(title, size=10)
    panels[0].set_ylabel(AXIS_TITLES[metric])
    panels[0].yaxis.set_major_formatter(percent)
    everything = [group for _, family in found for group in family]
    note = f"Whiskers: 95 % intervals over {what_over(everything, metric)}."
    finish(figure, panels, "temperature (above) and alpha (below) of the mixing", note)
    return figure


def plot_gate_over_time(runs: pd.DataFrame, metric: str = "test_accuracy") -> Figure:
    """How much the gate kept and the cosine of the gradients; a line for each loss, or each zeta."""
    groups = [group for group in main_groups(group_runs(runs)) if has_log(group)]
    gated = [group for group in groups if group.variant == "+G"]
    full = [group for group in groups if is_full(group)] or gated
    if not full:
        raise ValueError("the gate over time needs runs with the gate on and their log")
    methods = {group.method for group in full}
    zetas = sorted({group.settings["zeta"] for group in full}, key=str)
    if len(methods) > 1 and len(zetas) > 3:
        zetas = sorted(zetas, key=float)
        zetas = [zetas[0], zetas[len(zetas) // 2], zetas[-1]]
    columns: list[Any] = zetas if len(methods) > 1 else [None]
    figure = Figure((WIDTH, 5.2), facecolor="white", layout="constrained")
    grid = figure.subplots(2, len(columns), sharex=True, sharey="row", squeeze=False)
    for column, zeta in enumerate(columns):
        chosen = full if len(methods) == 1 else [group for group in full if group.settings["zeta"] == zeta]
        for number, group in enumerate(chosen):
            look = style(group.method)
            if len(methods) == 1:
                look = style_of(number, f"zeta {group.settings['zeta']}")
            for axes, name in zip(grid[:, column], ("log_gate_open", "log_cosine"), strict=True):
                draw_over_time(axes, group, name, **look)
        if zeta is not None:
            grid[0, column].set_title(f"zeta {zeta:g}", size=10)
    for axes in grid.flat:
        tidy(axes)
    for axes in grid[1]:
        axes.axhline(0, color=BLACK, linewidth=1)
        ticks = {1: 6, 2: 4}.get(len(columns), 3)
        axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(THOUSANDS)
    of_images = any(group.settings["gate"] == "per_example" for group in full)
    grid[0, 0].set(ylabel="Kept by the gate" if of_images else "Steps with an open gate")
    grid[0, 0].yaxis.set_major_formatter(percent)
    grid[1, 0].set(ylabel="Cosine of the gradients")
    note = f"Lines: mean over {seeds_of(full)}, smoothed; bands: lowest to highest seed."
    finish(figure, list(grid.flat), "Training step", note)
    return figure


STUDY_FIGURES: dict[str, Callable[[pd.DataFrame, str], Figure]] = {
    "accuracy_over_zeta": plot_zeta,
    "ablation": plot_ablation,
    "sensitivity": plot_sensitivity,
    "gate_over_time": plot_gate_over_time,
}


def save(figure: Figure, path: Path) -> list[Path]:
    """As PNG and SVG, which have the name of `path` and no date."""
    files = [path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.svg")]
    with rc_context({"svg.hashsalt": "hf_fixastep"}):
        figure.savefig(files[0], dpi=RESOLUTION)
        figure.savefig(files[1], metadata={"Date": None})
    return files


# ---- which groups


def main_groups(groups: Sequence[Group], kind: Callable[[Group], Hashable] | None = None) -> list[Group]:
    """Of the settings of each kind (method and variant) those with most runs: a figure has one of each."""
    families: dict[Hashable, dict[str, list[Group]]] = {}
    for group in groups:
        usual = group.method, group.variant, bool(group.settings["oracle"])
        family = families.setdefault(kind(group) if kind else usual, {})
        family.setdefault(group.key(without=("zeta",)), []).append(group)
    chosen = [max(family.values(), key=number_of_runs) for family in families.values()]
    return [group for group in groups if any(group is other for each in chosen for other in each)]


def number_of_runs(groups: Sequence[Group]) -> int:
    return sum(len(group.runs) for group in groups)


def left_out(runs: pd.DataFrame) -> int:
    """How many kinds of runs the figures leave out, as they show one of each; but for the sensitivity, and
    that against the probe, which has all gates.
    """
    groups = group_runs(runs)
    return len(groups) - len(main_groups(groups))


def panel_of(group: Group) -> str | None:
    if group.settings["oracle"]:
        return "perfect filtering" if group.variant == BASE else None
    if group.method in RIVALS:
        return "rivals" if group.variant == BASE else None
    return "base" if group.variant == BASE else "Fix-A-Step" if is_full(group) else None


def by_method(groups: Sequence[Group]) -> Iterator[tuple[str, list[Group]]]:
    known = [*METHODS, *sorted({group.method for group in groups} - {*METHODS})]
    for method in known:
        if chosen := [group for group in groups if group.method == method]:
            yield method, chosen


def mixing_families(groups: Sequence[Group]) -> Iterator[tuple[str, list[Group]]]:
    """Groups that differ in the mixing only, at least two, in the order of temperature and alpha."""
    families: dict[str, list[Group]] = {}
    for group in groups:
        if group.settings["mix_labeled"]:
            families.setdefault(group.key(without=MIXING[:2]), []).append(group)
    for family in families.values():
        if len(family) > 1:
            first = family[0]
            zeta = "" if first.settings["zeta"] is None else f"\nzeta {first.settings['zeta']:g}"
            order = sorted(family, key=lambda g: (g.settings["mix_temperature"], g.settings["mix_alpha"]))
            yield METHODS.get(first.method, first.method) + zeta, order


def is_labeled_only(group: Group) -> bool:
    return group.variant == LABELED_ONLY


def has_log(group: Group) -> bool:
    runs = group.runs
    return group.settings["gate"] != "off" and "log_step" in runs and len(runs["log_step"].iloc[0]) > 0


def seeds_of(groups: Sequence[Group]) -> str:
    numbers = [len(group.runs) for group in groups]
    few, many = min(numbers), max(numbers)
    return count(many, "seed") if few == many else f"{few} to {count(many, 'seed')}"


def what_over(groups: Sequence[Group], metric: str) -> str:
    """What the intervals of some groups are about."""
    kinds = sorted({mean_interval(group.runs, metric).over for group in groups})
    text = " or, for single seeds, ".join(kinds)
    return text.replace("seeds", f"{seeds_of([g for g in groups if len(g.runs) > 1] or groups)}", 1)


# ---- drawing


def beside(count: int, height: float) -> tuple[Figure, list[Axes]]:
    figure = Figure((WIDTH, height + 0.9), facecolor="white", layout="constrained")
    panels = list(figure.subplots(1, count, sharey=True, squeeze=False)[0])
    for axes in panels:
        tidy(axes)
    return figure, panels


def style(method: str) -> dict[str, Any]:
    """Colour and marker of a method, the same in all figures."""
    ours = [name for name in METHODS if name not in (*RIVALS, "supervised")]
    place = RIVALS.index(method) if method in RIVALS else ours.index(method) if method in ours else len(ours)
    return style_of(place, METHODS.get(method, method), dashed=method in RIVALS)


def style_of(place: int, label: str, dashed: bool = False) -> dict[str, Any]:
    turn = place // len(COLOURS)  # of the colours: in the second one each has another marker
    marker = MARKERS[(place + turn) % len(MARKERS)]
    look = {"color": COLOURS[place % len(COLOURS)], "marker": marker, "label": label}
    return look | ({"linestyle": (0, (3, 1)), "markerfacecolor": "white"} if dashed else {})


def draw_labeled_only(axes: Axes, groups: Sequence[Group], metric: str, band: bool = True) -> float | None:
    """A dashed line over the whole width; returns its height, if there are such runs."""
    found = [group.runs[metric] for group in groups if is_labeled_only(group)]
    if not found:
        return None
    look: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.6, "zorder": 1.5}
    axes.axhline(found[0].mean(), label=LABELED_ONLY, **look)
    if band:
        axes.axhspan(found[0].min(), found[0].max(), color="black", alpha=0.08, linewidth=0)
    return float(found[0].mean())


def draw_band(axes: Axes, points: Sequence[tuple[float, pd.Series]], **look: Any) -> None:
    points = sorted(points, key=lambda point: point[0])
    x = [place for place, _ in points]
    axes.plot(x, [values.mean() for _, values in points], linewidth=1.8, markersize=6, **look)
    low, high = [values.min() for _, values in points], [values.max() for _, values in points]
    axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def draw_bars(axes: Axes, groups: Sequence[Group], methods: Sequence[str], floor: float, metric: str) -> None:
    width = 0.8 / len(BARS)
    for method, chosen in by_method(groups):
        chosen = sorted(chosen, key=lambda group: VARIANTS.index(group.variant))
        for number, group in enumerate(chosen):
            value = mean_interval(group.runs, metric)
            place = methods.index(method) + width * (number - (len(chosen) - 1) / 2)
            height, colour = value.mean - floor, BARS[group.variant]
            axes.bar(place, height, 0.92 * width, bottom=floor, color=colour, label=group.variant)
            whiskers(axes, [place], [value], "none", ecolor=BLACK)


def whiskers(axes: Axes, x: Any, values: Sequence[Interval], fmt: str, **look: Any) -> None:
    means = np.array([value.mean for value in values])
    ends = np.array([[value.mean - value.low, value.high - value.mean] for value in values]).T
    axes.errorbar(x, means, np.maximum(ends, 0), fmt=fmt, capsize=3, elinewidth=1.3, zorder=3, **look)


def draw_over_time(axes: Axes, group: Group, name: str, **look: Any) -> None:
    """Mean over seeds and the range of them, each smoothed over a tenth of the run."""
    logs = zip(group.runs["log_step"], group.runs[name], strict=True)
    table = pd.concat([pd.Series(values, steps, dtype=float) for steps, values in logs], axis=1).sort_index()
    table = table.rolling(max(1, len(table) // 10), center=True, min_periods=1).mean()
    every = max(1, len(table) // 6)
    axes.plot(table.index, table.mean(axis=1), linewidth=1.6, markevery=every, markersize=5, **look)
    low, high = table.min(axis=1), table.max(axis=1)
    axes.fill_between(table.index, low, high, color=look["color"], alpha=0.12, linewidth=0)


def finish(figure: Figure, panels: Sequence[Axes], label: str, note: str, ncols: int = 4) -> None:
    """One legend for all panels, above them; below them what the axis shows and what lines and bands mean."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    last = (*BARS, LABELED_ONLY, *FITTED.values())
    order = [name for name in handles if name not in last] + [name for name in last if name in handles]
    looks = {"ncols": ncols, "frameon": False, "columnspacing": 1.2, "handlelength": 2.4}
    figure.legend([handles[name] for name in order], order, loc="outside upper left", **looks)
    figure.supxlabel(f"{label}\n{note}".strip(), size=9.5)


def widened(values: Sequence[float]) -> tuple[float, float]:
    margin = 0.08 * (values[-1] - values[0])
    return values[0] - margin, values[-1] + margin
