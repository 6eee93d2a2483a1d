from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from hf_fixastep.methods import RIVALS
from hf_fixastep.study.figures import (
    COLOURS,
    MARKERS,
    STUDY_FIGURES,
    left_out,
    plot_ablation,
    plot_gate_over_time,
    plot_sensitivity,
    plot_zeta,
    save,
    style,
)
from tests.study.tables import run, study


def line(axes, label: str):
    (found,) = (each for each in axes.get_lines() if each.get_label() == label)
    return found


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def sensitivity() -> pd.DataFrame:
    rows = [run("supervised", "labeled-only", 0.6), run("vat", "base", 0.62)]
    for temperature in (0.95, 0.5):
        for alpha in (0.75, 0.5):
            changes = {"mix_alpha": alpha, "mix_temperature": temperature}
            rows += [
                run("vat", "Fix-A-Step", 0.6 + temperature / 10 + alpha / 20 + s / 100, s, **changes)
                for s in (0, 1)
            ]
    return pd.DataFrame(rows)


def test_accuracy_over_zeta_has_a_column_for_each_kind_of_run() -> None:
    runs = study(rivals=("uasd",), oracle=True)
    figure = plot_zeta(runs)
    assert [axes.get_title() for axes in figure.axes] == ["base", "Fix-A-Step", "perfect filtering", "rivals"]
    assert legend(figure) == ["Mean Teacher", "FixMatch", "UASD", "labeled-only"]
    chosen = runs[(runs.loss == "fixmatch") & (runs.variant == "Fix-A-Step")].groupby("zeta")["test_accuracy"]
    drawn = line(figure.axes[1], "FixMatch")
    np.testing.assert_allclose(drawn.get_xdata(), [0, 50, 100])
    np.testing.assert_allclose(drawn.get_ydata(), chosen.mean())
    alone = runs[runs.variant == "labeled-only"]["test_accuracy"].mean()
    assert all(line(axes, "labeled-only").get_ydata()[0] == pytest.approx(alone) for axes in figure.axes)


def test_bands_reach_from_the_lowest_to_the_highest_seed() -> None:
    runs = study(losses=("vat",), variants=("base",), zetas=(0, 100))
    (band,) = plot_zeta(runs).axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx(
        (runs["test_accuracy"].min(), runs["test_accuracy"].max())
    )


def test_columns_without_runs_are_left_out() -> None:
    assert [axes.get_title() for axes in plot_zeta(study(variants=("base",))).axes] == ["base"]


def test_mixmatch_with_the_gate_is_in_the_column_of_fix_a_step() -> None:
    figure = plot_zeta(study(losses=("mixmatch",), variants=("base", "+G")))
    assert [axes.get_title() for axes in figure.axes] == ["base", "Fix-A-Step"]


def test_ablation_bars_end_at_the_means_and_stand_on_labeled_only() -> None:
    runs = study(zetas=(0, 100))
    figure = plot_ablation(runs)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["zeta 0", "zeta 100"]
    assert legend(figure) == ["base", "+G", "+A", "Fix-A-Step", "labeled-only"]
    alone = runs[runs.variant == "labeled-only"]["test_accuracy"].mean()
    bars = figure.axes[1].patches
    assert {round(bar.get_y(), 9) for bar in bars} == {round(alone, 9)}
    means = runs[runs.zeta == 100].groupby(["loss", "variant"])["test_accuracy"].mean()
    expected = [
        means[loss, v] for loss in ("mean_teacher", "fixmatch") for v in ("base", "+G", "+A", "Fix-A-Step")
    ]
    by_place = sorted(bars, key=lambda bar: bar.get_x())
    np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in by_place], expected)


def test_sensitivity_shows_every_pair_in_order_with_its_base() -> None:
    runs = sensitivity()
    figure = plot_sensitivity(runs)
    (axes,) = figure.axes
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert ticks == ["0.5\n0.5", "0.5\n0.75", "0.95\n0.5", "0.95\n0.75"]
    means = (
        runs[runs.variant == "Fix-A-Step"].groupby(["mix_temperature", "mix_alpha"])["test_accuracy"].mean()
    )
    (points,) = axes.containers
    np.testing.assert_allclose(points[0].get_ydata(), means.sort_index())
    assert line(axes, "base").get_ydata()[0] == pytest.approx(0.62)
    assert left_out(runs) == 3


def test_the_gate_over_time_has_a_line_per_loss_or_per_zeta() -> None:
    assert legend(plot_gate_over_time(study(zetas=(0, 100)))) == ["Mean Teacher", "FixMatch"]
    runs = study(losses=("vat",), zetas=(0, 100), seeds=2)
    figure = plot_gate_over_time(runs)
    assert legend(figure) == ["zeta 0", "zeta 100"]
    chosen = runs[(runs.variant == "Fix-A-Step") & (runs.zeta == 100)]
    expected = (
        pd.DataFrame(np.mean(chosen["log_cosine"].tolist(), axis=0))
        .rolling(3, center=True, min_periods=1)
        .mean()
    )
    np.testing.assert_allclose(line(figure.axes[1], "zeta 100").get_ydata(), expected[0])


@pytest.mark.parametrize(
    ("gate", "words"), [("drop", "Steps with an open gate"), ("per_example", "Kept by the gate")]
)
def test_the_gate_over_time_says_steps_only_where_steps_are_counted(gate: str, words: str) -> None:
    runs = study(losses=("vat",))
    runs.loc[runs.gate != "off", "gate"] = gate
    assert plot_gate_over_time(runs).axes[0].get_ylabel() == words


def test_no_two_methods_of_a_column_look_alike() -> None:
    assert len(COLOURS) == len(MARKERS) == len(set(COLOURS)) == len(set(MARKERS)) > len(RIVALS)
    looks = [
        (style(m)["color"], style(m)["marker"], style(m).get("linestyle"))
        for m in (*RIVALS, "vat", "fixmatch")
    ]
    assert len(set(looks)) == len(looks)


@pytest.mark.parametrize(
    ("name", "runs", "reason"),
    [
        ("accuracy_over_zeta", study(zetas=(50,)), "at least two zeta"),
        ("ablation", study(variants=("labeled-only", "base")), "at least two of base"),
        ("sensitivity", study(), "mix_alpha or mix_temperature"),
        ("gate_over_time", study(variants=("labeled-only", "base")), "the gate on"),
    ],
)
def test_a_figure_that_lacks_runs_says_which(name: str, runs: pd.DataFrame, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        STUDY_FIGURES[name](runs, "test_accuracy")


def test_one_seed_and_balanced_accuracy_are_drawn_too() -> None:
    runs = study(seeds=1)
    assert "over test images" in plot_ablation(runs, "test_balanced_accuracy").get_supxlabel()
    assert "mean over 1 seed;" in plot_zeta(runs, "test_balanced_accuracy").get_supxlabel()


def test_figures_are_saved_as_png_and_svg_and_the_same_each_time(tmp_path) -> None:
    files = [save(plot_zeta(study(seeds=2)), tmp_path / name) for name in ("one", "two")]
    assert [file.name for file in files[0]] == ["one.png", "one.svg"]
    assert files[0][0].read_bytes().startswith(b"\x89PNG")
    assert files[0][1].read_bytes() == files[1][1].read_bytes()
