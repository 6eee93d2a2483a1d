"""What every method adds to the probe, over the share of foreign classes and over the number of labels."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_fixastep.methods import FITTED
from hf_fixastep.plots import BLACK, WIDTH, tidy
from hf_fixastep.study.comparison import (
    LABELED_ONLY,
    PROBE,
    VARIANTS,
    Comparison,
    Difference,
    compare_with_probe,
    group_runs,
    name_of,
    switches_of,
)
from hf_fixastep.study.figures import (
    AXIS_TITLES,
    by_method,
    finish,
    is_labeled_only,
    main_groups,
    seeds_of,
    style,
    whiskers,
    widened,
)


# Of lines that every panel has; neighbours are so far below that nothing else could be seen.
DASHES = {LABELED_ONLY: "--", "shaped_probe": "-."}


def plot_against_probe(runs: pd.DataFrame, metric: str = "test_accuracy") -> Figure:
    """Accuracy minus that of the probe over zeta, a line per method and a panel per variant and gate."""
    found = Comparison(metric, group_runs(runs), [])
    kept = [group for group in main_groups(found.groups, name_of) if not group.settings["oracle"]]
    compare_with_probe(found, kept)
    lines = [each for each in found.beats if each.first.settings["zeta"] is not None]
    zetas = sorted({each.first.settings["zeta"] for each in lines})
    if len(zetas) < 2:
        raise ValueError("accuracy against the probe needs probe runs, and others of at least two zeta")
    shaped = sorted(
        (each.first.settings["zeta"], each.interval.mean) for each in lines if each.first.variant in FITTED
    )
    lines = [each for each in lines if each.first.variant not in FITTED]
    order = {(VARIANTS.index(each.first.variant), switches_of(each.first)) for each in lines}
    names = [name for _, name in sorted(order)]
    columns = len(names) if len(names) < 5 else 3
    rows = -(-len(names) // columns)
    figure = Figure((WIDTH, max(2.4 * rows + 1.4, 4.8)), facecolor="white", layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)[: len(names)]
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels, names, strict=True):
        tidy(axes)
        inside = [each for each in lines if switches_of(each.first) == name]
        methods = [method for method, _ in by_method([each.first for each in inside])]
        for number, method in enumerate(methods):
            points = [each for each in inside if each.first.method == method]
            apart = 0.02 * (zetas[-1] - zetas[0]) * (number - (len(methods) - 1) / 2)  # so that whiskers show
            x = [each.first.settings["zeta"] + apart for each in points]
            whiskers(axes, x, [each.interval for each in points], "", **style(method), markersize=5)
        axes.axhline(0, color=BLACK, linewidth=1.6, label=PROBE, zorder=1.5)
        if shaped:
            axes.plot(*zip(*shaped, strict=True), "-.", color="black", linewidth=1.6, label="shaped probe")
        for each in found.beats:
            if each.first.settings["zeta"] is None:
                dashes = "--" if is_labeled_only(each.first) else ":"
                axes.axhline(each.interval.mean, color="black", linestyle=dashes, label=name_of(each.first))
        axes.set_title(name, size=10)
        axes.set(xticks=zetas, xlim=widened(zetas))
        axes.set_xticklabels([f"{zeta:g}" if columns < 3 or zeta in (0, 50, 100) else "" for zeta in zetas])
        axes.tick_params(labelbottom=True)
    finish_points(figure, panels, metric, lines, "zeta, percent of unlabeled classes that are foreign")
    return figure


def plot_over_labels(runs: pd.DataFrame, metric: str = "test_accuracy") -> Figure:
    """Accuracy minus that of the probe over labels per class, a panel per variant and gate."""
    found = Comparison(metric, group_runs(runs), [])
    kept = main_groups(found.groups, lambda group: (name_of(group), group.settings["labels_per_class"]))
    compare_with_probe(found, [group for group in kept if not group.settings["oracle"]])
    shared = [each for each in found.beats if each.first.variant in DASHES]
    lines = [each for each in found.beats if each.first.variant not in (*FITTED, LABELED_ONLY)]
    counts = sorted({labels_of(each) for each in lines})
    if len(counts) < 2 or len({each.first.settings["zeta"] for each in lines}) > 1:
        raise ValueError(
            "accuracy over labels needs probe runs, and others of one zeta with two label counts"
        )
    order = {(VARIANTS.index(each.first.variant), switches_of(each.first)) for each in lines}
    figure = Figure((WIDTH, 5.4), facecolor="white", layout="constrained")
    panels = list(figure.subplots(1, len(order), sharex=True, sharey=True, squeeze=False)[0])
    for axes, (_, name) in zip(panels, sorted(order), strict=True):
        tidy(axes)
        draw_methods(axes, [each for each in lines if switches_of(each.first) == name], counts)
        axes.axhline(0, color=BLACK, linewidth=1.6, label=PROBE, zorder=1.5)
        for variant, dashes in DASHES.items():
            draw_shared(axes, [each for each in shared if each.first.variant == variant], counts, dashes)
        axes.set_title(name, size=10)
        axes.set_xticks(range(len(counts)), [f"{count:g}" for count in counts])
    finish_points(figure, panels, metric, lines, "labels per class")
    return figure


def finish_points(
    figure: Figure, panels: Sequence[Axes], metric: str, lines: Sequence[Difference], label: str
) -> None:
    """Axes in points, and below them what lines and whiskers mean."""
    for axes in panels:
        axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:+.3g}" if share else "0")
    figure.supylabel(f"{AXIS_TITLES[metric]} minus the probe's, points", size=10)
    over = " or ".join(sorted({each.interval.over for each in lines}))
    seeds = seeds_of([each.first for each in lines])
    finish(figure, panels, label, f"Lines: mean over {seeds}; whiskers: 95 % intervals over {over}.")


def labels_of(each: Difference) -> float:
    return each.first.settings["labels_per_class"]


def draw_methods(axes: Axes, lines: Sequence[Difference], counts: Sequence[float]) -> None:
    methods = [method for method, _ in by_method([each.first for each in lines])]
    for number, method in enumerate(methods):
        points = sorted((each for each in lines if each.first.method == method), key=labels_of)
        apart = 0.07 * (number - (len(methods) - 1) / 2)  # so that whiskers show
        x = [counts.index(labels_of(each)) + apart for each in points]
        whiskers(axes, x, [each.interval for each in points], "", **style(method), markersize=5)


def draw_shared(axes: Axes, points: Sequence[Difference], counts: Sequence[float], dashes: str) -> None:
    """A line without whiskers, of what needs no gate."""
    known = {labels_of(each): each.interval.mean for each in points if labels_of(each) in counts}
    if known:
        x, y = zip(*sorted((counts.index(count), mean) for count, mean in known.items()), strict=True)
        axes.plot(x, y, dashes, color="black", linewidth=1.6, label=name_of(points[0].first))
