"""Figures from a run's log and predictions, for the model card. No pyplot, so nothing global is touched.

A log is a data frame with one row per logging step, `pandas.DataFrame(trainer.state.log_history)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray


# Okabe and Ito's colours, which differ for colour-blind readers too
BLUE, ORANGE, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#333333"
WIDTH = 6.8  # inches, 816 pixels at the resolution below
RESOLUTION = 120
THOUSANDS = "{x:,.0f}"


def plot_losses(log: pd.DataFrame) -> Figure:
    """Labeled loss, unlabeled loss and validation accuracy over training, those that the log has."""
    check_values(log, "loss/labeled")
    rows = [
        ("loss/labeled", "Labeled loss", BLUE),
        ("loss/unlabeled", "Unlabeled loss", ORANGE),
        ("eval_accuracy", "Validation accuracy", GREEN),
    ]
    rows = [row for row in rows if has_values(log, row[0])]
    figure, panels = stacked_panels(len(rows))
    for axes, (name, title, colour) in zip(panels, rows, strict=True):
        draw(axes, log, name, colour)
        axes.set_ylabel(title)
        if name == "eval_accuracy":
            axes.yaxis.set_major_formatter(percent)
        else:
            axes.set_ylim(bottom=0)
    return figure


def plot_gate(log: pd.DataFrame) -> Figure:
    """How much the gate kept, with the mask rate if there is one, and the cosine of the gradients."""
    check_values(log, "gate/open")
    figure, (shares, cosine) = stacked_panels(2)
    draw(shares, log, "gate/open", BLUE, "kept by the gate")
    if has_values(log, "mask_rate"):
        draw(shares, log, "mask_rate", ORANGE, "mask rate, share of unlabeled images")
    shares.set(ylabel="Share", ylim=(-0.03, 1.03))
    shares.yaxis.set_major_formatter(percent)
    legend_above(shares)
    draw(cosine, log, "gate/cosine", GREEN)
    cosine.axhline(0, color=BLACK, linewidth=1)
    cosine.set_ylabel("Cosine of the gradients")
    cosine.margins(y=0.15)
    return figure


def plot_cosines(log: pd.DataFrame) -> Figure:
    """Histogram of the cosine of every step, with the share above zero: what the gate `drop` accepts.

    Steps without a cosine, where a gradient is zero or not finite, are left out.
    """
    check_values(log, "gate/cosines")
    cosines = step_cosines(log)
    positive = np.mean(cosines > 0)
    edges = symmetric_edges(cosines)
    # mirrored, so that bins hold their upper edge and a cosine of zero counts as not positive
    counts = np.histogram(-cosines, edges)[0][::-1]

    figure = Figure((WIDTH, 4.0), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    tidy(axes)
    for chosen, colour, word, share in (
        (edges[:-1] >= 0, BLUE, "positive", positive),
        (edges[:-1] < 0, ORANGE, "not positive", 1 - positive),
    ):
        left, width = edges[:-1][chosen], np.diff(edges)[chosen]
        axes.bar(left, counts[chosen], width, align="edge", color=colour, label=f"{word}, {share:.1%}")
    axes.axvline(0, color=BLACK, linewidth=1)
    axes.set(xlim=(edges[0], edges[-1]), ylabel="Number of steps")
    axes.set_xlabel(f"Cosine of the labeled and the unlabeled gradient in {len(cosines):,} steps")
    axes.yaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(THOUSANDS)
    legend_above(axes)
    return figure


def plot_confusion(confusion: ArrayLike, class_names: Sequence[str]) -> Figure:
    """Counts of true against predicted classes, coloured by the share of the true class; zeros stay blank.

    Args:
        confusion: counts `[K, K]`, rows are true classes.
    """
    counts = np.asarray(confusion)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    digits = len(str(counts.max()))
    # inches; many classes or large counts make a larger figure, not smaller digits
    cell = max(4.6 / len(counts), 0.08 * digits, 0.2)
    figure = Figure(
        (cell * len(counts) + 2.2, cell * len(counts) + 1.1), facecolor="white", layout="constrained"
    )
    axes = figure.add_subplot()
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    size = min(11, 72 * cell * min(0.55, 1.4 / digits))
    for row, column in np.argwhere(counts):
        colour = "white" if shares[row, column] > 0.5 else BLACK
        text = axes.text(
            column, row, str(counts[row, column]), ha="center", va="center", color=colour, size=size
        )
        # the layout need not measure thousands of numbers that lie inside the axes anyway
        text.set_in_layout(False)
    name_classes(axes, class_names, cell)
    bar = figure.colorbar(picture, fraction=0.03, label="Share of the true class")
    bar.ax.yaxis.set_major_formatter(percent)
    bar.outline.set_visible(False)
    return figure


def plot_differences(differences: Mapping[str, tuple[float, float, float]], label: str) -> Figure:
    """Differences in points with their 95 % intervals, one below the other.

    Args:
        differences: mean and both ends, in shares; NaN for ends that are not known.
        label: of the axis.
    """
    figure = Figure((WIDTH, 0.45 * len(differences) + 1.2), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    tidy(axes)
    for row, (mean, low, high) in enumerate(differences.values()):
        axes.plot([100 * low, 100 * high], [row, row], color=BLUE, linewidth=1.8)
        axes.plot(100 * mean, row, color=BLUE, marker="o")
    axes.axvline(0, color=BLACK, linewidth=1)
    axes.set_yticks(range(len(differences)), list(differences))
    axes.set_ylim(len(differences) - 0.5, -0.5)
    axes.set_xlabel(label)
    return figure


def plot_risk_coverage(curves: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """Share of wrong answers over the share of images answered, those of the highest scores first.

    Args:
        curves: coverage and risk, by what the legend says.
    """
    figure = Figure((WIDTH, 4.0), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    tidy(axes)
    for (name, (coverage, risk)), colour in zip(curves.items(), (BLUE, ORANGE, GREEN, BLACK), strict=False):
        axes.plot(coverage, risk, color=colour, linewidth=1.8, label=name, drawstyle="steps-pre")
    axes.set(xlabel="Share of images answered", ylabel="Share of wrong answers", xlim=(0, 1), ylim=(0, None))
    axes.xaxis.set_major_formatter(percent)
    axes.yaxis.set_major_formatter(percent)
    legend_above(axes)
    return figure


def name_classes(axes: Axes, class_names: Sequence[str], cell: float) -> None:
    """Label rows and columns, the columns slanted where a name is wider than its cell."""
    names = [name if len(name) <= 24 else f"{name[:23]}…" for name in class_names]
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    if max(map(len, names)) * 0.1 > cell:
        for label in axes.get_xticklabels():
            label.set(rotation=45, ha="right", rotation_mode="anchor")
    axes.set(xlabel="Predicted class", ylabel="True class")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def save_figures(
    log: pd.DataFrame, confusion: ArrayLike | None, class_names: Sequence[str], folder: str | Path
) -> list[Path]:
    """Write `losses.png`, `gate.png`, `cosines.png` and `confusion.png`, those that have data."""
    figures = {}
    if has_values(log, "loss/labeled"):
        figures["losses"] = plot_losses(log)
    if has_values(log, "gate/open"):
        figures["gate"] = plot_gate(log)
    if len(step_cosines(log)):
        figures["cosines"] = plot_cosines(log)
    if confusion is not None:
        figures["confusion"] = plot_confusion(confusion, class_names)
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder) / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=RESOLUTION)
    return paths


def has_values(log: pd.DataFrame, name: str) -> bool:
    return name in log and bool(log[name].notna().any())


def check_values(log: pd.DataFrame, name: str) -> None:
    if not has_values(log, name):
        raise ValueError(
            f"The log has no values of {name}, so there is nothing to draw. Labeled-only runs have no gate."
        )


def step_cosines(log: pd.DataFrame) -> NDArray:
    """The cosine of every step, from the windows of the log."""
    if not has_values(log, "gate/cosines"):
        return np.array([])
    # a window of one step comes back from a CSV file as a number
    cosines = np.array(" ".join(log["gate/cosines"].dropna().astype(str)).split(), dtype=float)
    return cosines[np.isfinite(cosines)]


def symmetric_edges(cosines: NDArray) -> NDArray:
    """Edges of an even number of bins around zero, more of them for more cosines."""
    limit = np.abs(cosines).max() or 1.0
    half = int(np.clip(np.sqrt(len(cosines)) / 2, 5, 30))
    right = np.linspace(0, limit, half + 1)
    # zero is an edge exactly, which linspace over both sides would not give
    return np.concatenate([-right[:0:-1], right])


def stacked_panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure of equally wide panels over one axis of training steps."""
    figure = Figure((WIDTH, 2.2 * count + 0.4), facecolor="white", layout="constrained")
    panels = list(figure.subplots(count, sharex=True, squeeze=False)[:, 0])
    for axes in panels:
        tidy(axes)
    panels[-1].set_xlabel("Training step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(7, integer=True, steps=[1, 2, 5, 10]))
    panels[-1].xaxis.set_major_formatter(THOUSANDS)
    figure.align_ylabels(panels)
    return figure, panels


def tidy(axes: Axes) -> None:
    axes.set_facecolor("white")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)


def draw(axes: Axes, log: pd.DataFrame, name: str, colour: str, label: str | None = None) -> None:
    """A column of the log over the steps; a long one as dots under its running mean."""
    column = log.set_index("step")[name].dropna().astype(float)
    window = len(column) // 25
    if window < 4:
        axes.plot(column.index, column, color=colour, marker="." if len(column) < 60 else None, label=label)
        return
    axes.plot(
        column.index, column, color=colour, linestyle="none", marker=".", markersize=3, alpha=0.25, mew=0
    )
    average = column.rolling(window, center=True, min_periods=1).mean()
    axes.plot(column.index, average, color=colour, linewidth=1.8, label=label)


def legend_above(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0)


def percent(share: float, position: float = 0) -> str:
    return f"{100 * share:g}%"
