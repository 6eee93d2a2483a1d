from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from hf_fixastep.study.probe_figures import plot_against_probe, plot_over_labels
from tests.study.tables import probes, run, study


def runs_of(labels: int) -> pd.DataFrame:
    """Probe, shaped probe, labeled-only and two methods with and without gate, better with more labels."""
    rows = [
        run(loss, variant, 0.6 + labels / 500 + 0.02 * number + 0.01 * seed, seed, None)
        for seed in range(3)
        for number, loss in enumerate(("vat", "fixmatch"))
        for variant in ("base", "+G")
    ]
    rows += [run("supervised", "labeled-only", 0.61 + 0.01 * seed, seed, None) for seed in range(3)]
    fitted = [probes(zeta=None), probes(loss="shaped_probe", accuracy=0.7 - labels / 1000, zeta=None)]
    return pd.concat([pd.DataFrame(rows), *fitted]).assign(labels_per_class=labels)


def names_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_figure_against_the_probe_has_a_panel_per_gate_and_a_line_per_method() -> None:
    gated = study(losses=("vat", "fixmatch"), variants=("+G",)).assign(gate="per_example")
    gated["test_accuracy"] += 0.01
    parts = [study(losses=("vat", "fixmatch"), variants=("labeled-only", "base", "+G")), gated]
    runs = pd.concat([*parts, probes(), probes(loss="neighbours", accuracy=0.55)])
    figure = plot_against_probe(runs)
    assert [axes.get_title() for axes in figure.axes] == ["base", "+G", "+G per example"]
    assert names_of(figure) == ["VAT", "FixMatch", "labeled-only", "probe", "k nearest neighbours"]
    chosen = runs[(runs.loss == "fixmatch") & (runs.gate == "per_example")].groupby("zeta")["test_accuracy"]
    expected = chosen.mean() - runs[runs.loss == "probe"]["test_accuracy"].mean()
    (drawn,) = (each for each in figure.axes[2].containers if each.get_label() == "FixMatch")
    np.testing.assert_allclose(drawn[0].get_ydata(), expected)
    alone = (
        runs[runs.variant == "labeled-only"]["test_accuracy"] - runs[runs.loss == "probe"]["test_accuracy"]
    )
    (drawn,) = (each for each in figure.axes[0].get_lines() if each.get_label() == "labeled-only")
    assert drawn.get_ydata()[0] == pytest.approx(alone.mean())


def test_the_shaped_probe_is_a_line_over_zeta_in_every_panel() -> None:
    shaped = [probes(loss="shaped_probe", accuracy=0.7 - zeta / 1000, zeta=zeta) for zeta in (0, 50)]
    figure = plot_against_probe(pd.concat([study(losses=("vat",)), probes(), *shaped]))
    assert len(figure.axes) == 4
    for axes in figure.axes:
        (drawn,) = (each for each in axes.get_lines() if each.get_label() == "shaped probe")
        np.testing.assert_allclose(drawn.get_xydata(), [[0, 0.07], [50, 0.02]])


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        (study(), "needs probe runs"),
        (pd.concat([study(zetas=(50,)), probes()]), "others of at least two zeta"),
    ],
)
def test_without_probes_or_two_zeta_there_is_no_figure_over_zeta(runs: pd.DataFrame, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plot_against_probe(runs)


def test_over_labels_there_is_a_panel_per_gate_and_a_line_per_method() -> None:
    runs = pd.concat([runs_of(labels) for labels in (5, 20, 50)], ignore_index=True)
    figure = plot_over_labels(runs)
    assert [axes.get_title() for axes in figure.axes] == ["base", "+G"]
    assert names_of(figure) == ["VAT", "FixMatch", "labeled-only", "probe", "shaped probe"]
    of_probe = runs[runs.loss == "probe"]["test_accuracy"].mean()
    for axes, variant in zip(figure.axes, ("base", "+G"), strict=True):
        chosen = runs[(runs.loss == "fixmatch") & (runs.variant == variant)].groupby("labels_per_class")
        (drawn,) = (each for each in axes.containers if each.get_label() == "FixMatch")
        np.testing.assert_allclose(drawn[0].get_ydata(), chosen["test_accuracy"].mean() - of_probe)
        (shaped,) = (each for each in axes.get_lines() if each.get_label() == "shaped probe")
        np.testing.assert_allclose(shaped.get_xydata(), [[0, 0.065], [1, 0.05], [2, 0.02]])


@pytest.mark.parametrize(
    "runs", [runs_of(5), pd.concat([study(), study().assign(labels_per_class=5), probes()])]
)
def test_without_two_label_counts_of_one_pile_there_is_no_figure_over_labels(runs: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="of one zeta with two label counts"):
        plot_over_labels(runs)
