from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from hf_fixastep import plots
from hf_fixastep.plots import plot_confusion, plot_cosines, plot_gate, plot_losses


CLASS_NAMES = ["bird", "cat", "deer"]
CONFUSION = np.array([[8, 2, 0], [1, 7, 2], [0, 0, 10]])


def training_log(rows: int = 30, mask_rate: bool = True) -> pd.DataFrame:
    """A log of windows of five steps, with an evaluation after every tenth."""
    random = np.random.default_rng(0)
    log = []
    for i in range(rows):
        cosines = random.normal(0.05, 0.1, 5)
        row = {
            "step": 5 * (i + 1),
            "loss/labeled": 1 / (i + 1) + random.random(),
            "loss/unlabeled": random.random(),
            "unlabeled_weight": 1.0,
            "gate/open": np.mean(cosines > 0),
            "gate/cosine": np.mean(cosines),
            "gate/cosines": " ".join(f"{cosine:.6f}" for cosine in cosines),
            "learning_rate": 0.03,
        }
        log.append(row | ({"mask_rate": random.random()} if mask_rate else {}))
        if i % 10 == 9:
            log.append({"step": 5 * (i + 1), "eval_accuracy": 0.5 + 0.001 * i})
    return pd.DataFrame(log)


def labeled_only(log: pd.DataFrame) -> pd.DataFrame:
    return log[["step", "loss/labeled", "learning_rate", "eval_accuracy"]]


def assert_plotted(line, log: pd.DataFrame, name: str) -> None:
    rows = log[log[name].notna()]
    np.testing.assert_array_equal(line.get_xdata(), rows["step"])
    np.testing.assert_array_equal(line.get_ydata(), rows[name])


def bar_heights(figure: Figure, label: str) -> np.ndarray:
    (bars,) = (bars for bars in figure.axes[0].containers if bars.get_label().startswith(label))
    return np.array([bar.get_height() for bar in bars])


def empty_gate(log: pd.DataFrame) -> pd.DataFrame:
    return labeled_only(log).assign(**{"gate/open": np.nan, "gate/cosine": np.nan, "gate/cosines": None})


@pytest.mark.parametrize(
    ("change", "confusion", "names"),
    [
        (lambda log: log, CONFUSION, ["losses.png", "gate.png", "cosines.png", "confusion.png"]),
        (lambda log: log, None, ["losses.png", "gate.png", "cosines.png"]),
        (labeled_only, CONFUSION, ["losses.png", "confusion.png"]),
        (empty_gate, CONFUSION, ["losses.png", "confusion.png"]),
    ],
)
def test_a_log_gives_the_pictures_that_it_has_data_for(
    tmp_path, monkeypatch, change, confusion, names
) -> None:
    monkeypatch.setattr(plots, "RESOLUTION", 20)  # quick
    folder = tmp_path / "new" / "figures"
    paths = plots.save_figures(change(training_log()), confusion, CLASS_NAMES, folder)
    assert [path.name for path in paths] == names
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_drawing_a_gate_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values of gate/open"):
        plot_gate(labeled_only(training_log()))


@pytest.mark.parametrize("rows", [30, 500])
def test_losses_and_accuracy_are_the_columns_of_the_log(rows: int) -> None:
    log = training_log(rows)
    for axes, name in zip(
        plot_losses(log).axes, ["loss/labeled", "loss/unlabeled", "eval_accuracy"], strict=True
    ):
        assert_plotted(axes.lines[0], log, name)


def test_a_long_log_is_drawn_with_its_running_mean() -> None:
    log = training_log(500, mask_rate=False)
    dots, average = plot_gate(log).axes[0].lines
    assert_plotted(dots, log, "gate/open")
    windows = log["gate/open"].dropna().to_numpy()
    # 500 rows: the mean of 20 around each, shorter at the ends
    assert average.get_ydata()[250] == pytest.approx(windows[240:260].mean())
    assert average.get_ydata()[0] == pytest.approx(windows[:10].mean())


def test_missing_losses_get_no_panel() -> None:
    assert [axes.get_ylabel() for axes in plot_losses(labeled_only(training_log())).axes] == [
        "Labeled loss",
        "Validation accuracy",
    ]


def test_the_gate_is_drawn_with_mask_rate_and_cosine() -> None:
    log = training_log()
    shares, cosine = plot_gate(log).axes
    for line, name in zip(shares.lines, ["gate/open", "mask_rate"], strict=True):
        assert_plotted(line, log, name)
    assert_plotted(cosine.lines[0], log, "gate/cosine")


@pytest.mark.parametrize("log", [training_log(mask_rate=False), training_log().assign(mask_rate=np.nan)])
def test_the_gate_is_drawn_without_a_mask_rate(log: pd.DataFrame) -> None:
    assert len(plot_gate(log).axes[0].lines) == 1


def test_every_cosine_is_counted_on_its_side_of_zero() -> None:
    log = training_log()
    cosines = [float(word) for window in log["gate/cosines"].dropna() for word in window.split()]
    figure = plot_cosines(log)
    positive = sum(cosine > 0 for cosine in cosines)
    assert bar_heights(figure, "positive").sum() == positive
    assert bar_heights(figure, "not positive").sum() == len(cosines) - positive == 150 - positive
    assert f"positive, {100 * positive / 150:.1f}%" in figure.axes[0].get_legend_handles_labels()[1]


def test_a_cosine_of_zero_is_rejected_and_an_undefined_one_left_out() -> None:
    figure = plot_cosines(pd.DataFrame({"step": [4], "gate/cosines": ["0.000000 nan 0.7 -0.7"]}))
    assert bar_heights(figure, "positive").sum() == 1
    assert bar_heights(figure, "not positive").sum() == 2


def test_a_log_read_from_a_csv_file_with_windows_of_one_step_has_its_cosines(tmp_path) -> None:
    pd.DataFrame({"step": [1, 2, 3], "gate/cosines": ["0.5", "-0.25", None]}).to_csv(tmp_path / "log.csv")
    figure = plot_cosines(pd.read_csv(tmp_path / "log.csv"))
    assert bar_heights(figure, "positive").sum() == bar_heights(figure, "not positive").sum() == 1


def test_confusion_cells_show_the_counts_and_zeros_stay_blank() -> None:
    axes = plot_confusion(CONFUSION, CLASS_NAMES).axes[0]
    shown = np.zeros_like(CONFUSION)
    for text in axes.texts:
        column, row = text.get_position()
        shown[row, column] = int(text.get_text())
    np.testing.assert_array_equal(shown, CONFUSION)
    assert len(axes.texts) == np.count_nonzero(CONFUSION)
    assert [label.get_text() for label in axes.get_yticklabels()] == CLASS_NAMES


def test_confusion_colours_are_shares_of_the_true_class() -> None:
    axes = plot_confusion([[8, 2, 0], [1, 3, 0], [0, 0, 0]], CLASS_NAMES).axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), [[0.8, 0.2, 0], [0.25, 0.75, 0], [0, 0, 0]])


@pytest.mark.parametrize("classes", [2, 50])
def test_confusion_digits_fit_their_cells(classes: int) -> None:
    figure = plot_confusion(np.full((classes, classes), 100), ["class"] * classes)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    box = axes.texts[0].get_window_extent()
    cell = axes.get_window_extent().width / classes, axes.get_window_extent().height / classes
    assert box.width < cell[0]
    assert box.height < cell[1]
    assert axes.texts[0].get_fontsize() >= 6


def test_differences_are_drawn_in_points_from_top_to_bottom() -> None:
    axes = plots.plot_differences({"one": (0.1, 0.05, 0.2), "two": (-0.02, np.nan, np.nan)}, "points").axes[0]
    bars = [line.get_xdata() for line in axes.lines if len(line.get_xdata()) == 2][:1]
    np.testing.assert_allclose(bars[0], [5, 20])
    dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"]
    np.testing.assert_allclose(dots, [(10, 0), (-2, 1)])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]
