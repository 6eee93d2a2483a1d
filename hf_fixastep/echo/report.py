"""What Heart2Heart reports besides the numbers of each hospital: which data are phantoms, and grey levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hf_fixastep import plots
from hf_fixastep.evaluation.report import Wording, make_figures, save, set_title
from hf_fixastep.evaluation.sites import SiteResult


TITLES = {"tmed2": "TMED-2", "unity": "Unity", "camus": "CAMUS", "camus_matched": "CAMUS matched"}
UNITS = {"unity": "clips"}  # whose patients are not known
COLOURS = {"tmed2": plots.BLACK, "unity": plots.BLUE, "camus": plots.ORANGE, "camus_matched": plots.GREEN}
PHANTOM = "PHANTOM DATA, drawn by a program: the numbers say nothing about hearts or hospitals."


@dataclass
class HospitalResult(SiteResult):
    """What all runs found in one hospital.

    Args:
        intensities: pixels of each grey level, [256].
    """

    phantom: bool = False
    intensities: np.ndarray | None = None


def any_phantom(results: Sequence[HospitalResult]) -> bool:
    return any(result.phantom for result in results)


def wording(results: Sequence[HospitalResult]) -> Wording:
    return Wording("hospital", "view", "View classification", "PHANTOM DATA" * any_phantom(results))


def save_figures(results: Sequence[HospitalResult], classes: Sequence[str], folder: Path) -> list[Path]:
    figures = make_figures(results, classes, wording(results))
    return save(figures | {"intensities": plot_intensities(results)}, folder)


def plot_intensities(results: Sequence[HospitalResult]) -> Figure:
    """Share of the pixels at every grey level, on a logarithmic scale, as the network sees them."""
    figure = Figure((plots.WIDTH, 4.0), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    plots.tidy(axes)
    for result in results:
        assert result.intensities is not None
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
    set_title(figure, "Intensities", wording(results))
    return figure
