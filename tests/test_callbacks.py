from __future__ import annotations

import csv
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from hf_fixastep import FixAStepTrainer
from hf_fixastep.callbacks import GateMonitorCallback, UnlabeledWeightCallback, write_log
from hf_fixastep.checkpoints import checkpoints
from hf_fixastep.losses.base import Losses
from hf_fixastep.runs.folder import RAW_WEIGHTS
from hf_fixastep.step.gate import GATES
from tests.short_runs import (
    assert_equal,
    assert_near,
    largest_difference,
    logged,
    make_trainer,
    random_images,
    tiny_vit,
    tiny_wide_resnet,
    train,
    weights,
)


# ---- the ramp of the unlabeled weight


def test_the_unlabeled_weight_of_every_step_is_that_of_the_linear_ramp(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, unlabeled_weight=50.0, unlabeled_warmup_steps=0.4, max_steps=10)
    trainer.train()
    expected = [12.5, 25.0, 37.5, 50.0, 50.0, 50.0, 50.0, 50.0, 50.0, 50.0]
    assert logged(trainer, "unlabeled_weight") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ramp", "warmup", "formula"),
    [
        ("linear", 419430.0, lambda i: min(i / 419430, 1)),
        ("linear", 1.0, lambda i: min(i / 500_000, 1)),
        ("linear", 0.0, lambda i: 1),
        ("sigmoid", 200_000.0, lambda i: math.exp(-5 * (1 - min(i / 200_000, 1)) ** 2)),
        ("staircase", 1048576.0, lambda i: min(math.floor(i / 1024) / 1024, 1)),
    ],
)
def test_ramps_are_those_of_the_papers(ramp: str, warmup: float, formula: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, unlabeled_weight=3.0, unlabeled_ramp=ramp, unlabeled_warmup_steps=warmup)
    callback = UnlabeledWeightCallback(trainer)
    for step in (1, 2, 1023, 1024, 1500, 2048, 200_000, 419_430, 500_000):
        state = TrainerState(global_step=step - 1, max_steps=500_000)
        callback.on_step_begin(trainer.args, state, TrainerControl())
        assert trainer.unlabeled_weight == pytest.approx(3 * formula(step), rel=1e-12)


# ---- the teacher


def test_the_teacher_after_a_step_is_decay_of_the_old_and_the_rest_of_the_new_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, teacher_decay=0.7, max_steps=3)
    run = train(trainer)
    assert_equal(run.averaged[0], run.raw[0])
    parameters = dict(trainer.model.named_parameters())
    for step in (1, 2, 3):
        expected = {}
        for name, new in run.raw[step].items():  # buffers are copied
            expected[name] = 0.7 * run.averaged[step - 1][name] + 0.3 * new if name in parameters else new
        assert_near(run.averaged[step], expected, within=5e-7)
    assert largest_difference(run.averaged[3], run.raw[3]) > 1e-3


def test_the_teacher_moves_once_per_optimizer_step_not_per_micro_batch(tmp_path: Path) -> None:
    run = train(make_trainer(tmp_path, teacher_decay=0.7, max_steps=1, gradient_accumulation_steps=3))
    name = "classifier.weight"
    torch.testing.assert_close(run.averaged[1][name], 0.7 * run.raw[0][name] + 0.3 * run.raw[1][name])


# ---- the log


class Diary(FixAStepTrainer):
    """Writes down the losses of every micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.diary: list[dict[str, float]] = []

    def compute_losses(self, *args: Any) -> Losses:
        losses = super().compute_losses(*args)
        values = {"loss/labeled": losses.labeled, "loss/unlabeled": losses.unlabeled, **losses.stats}
        self.diary.append({name: float(value.detach()) for name, value in values.items()})
        return losses


def average(values: list[float]) -> float:
    return sum(values) / len(values)


def test_a_logging_step_shows_the_losses_the_weight_the_gate_and_the_learning_rate(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, loss="fixmatch", logging_steps=2)
    trainer.train()
    expected = {
        "loss",
        "loss/labeled",
        "loss/unlabeled",
        "mask_rate",
        "unlabeled_weight",
        "learning_rate",
        "epoch",
        "step",
    }
    expected |= {"gate/open", "gate/cosine", "gate/cosines", "gate/labeled_norm", "gate/unlabeled_norm"}
    expected |= {"nonfinite/labeled", "nonfinite/unlabeled"}
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [2, 4]
    assert all(row.keys() == expected for row in rows)


def test_losses_without_a_threshold_log_no_mask_rate(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, loss="mean_teacher", max_steps=1)
    trainer.train()
    assert "mask_rate" not in trainer.state.log_history[0]


def test_supervised_training_logs_no_gate_and_no_unlabeled_loss(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, loss="supervised", max_steps=2)
    trainer.train()
    names = {name for row in trainer.state.log_history for name in row}
    assert {"loss", "loss/labeled", "nonfinite/labeled"} <= names
    assert not [name for name in names if "gate" in name or "unlabeled" in name]
    assert "gate" not in (tmp_path / "log.csv").read_text()


@pytest.mark.parametrize("parts", [1, 2])
def test_a_logged_loss_is_the_mean_over_the_steps_since_the_last_log(parts: int, tmp_path: Path) -> None:
    settings = {"loss": "fixmatch", "loss_kwargs": {"threshold": 0.5}, "logging_steps": 3, "max_steps": 6}
    trainer = make_trainer(tmp_path, kind=Diary, gradient_accumulation_steps=parts, **settings)
    trainer.train()
    for name in ("loss/labeled", "loss/unlabeled", "mask_rate"):
        values = [entry[name] for entry in trainer.diary]
        windows = [average(values[: 3 * parts]), average(values[3 * parts :])]
        assert logged(trainer, name) == pytest.approx(windows, rel=1e-6)
    totals = [entry["loss/labeled"] + entry["loss/unlabeled"] for entry in trainer.diary]
    assert logged(trainer) == pytest.approx(
        [average(totals[: 3 * parts]), average(totals[3 * parts :])], rel=1e-6
    )


def test_logged_gate_values_are_the_means_of_those_of_single_steps(tmp_path: Path) -> None:
    single, window = (
        make_trainer(tmp_path / "1", max_steps=6),
        make_trainer(tmp_path / "3", max_steps=6, logging_steps=3),
    )
    single.train()
    window.train()
    for name in ("gate/open", "gate/cosine", "gate/labeled_norm", "gate/unlabeled_norm"):
        values = logged(single, name)
        assert logged(window, name) == pytest.approx([average(values[:3]), average(values[3:])], rel=1e-5)
    assert len(set(logged(single, "gate/open"))) == 2
    cosines = [f"{value:.4g}" for value in logged(single, "gate/cosine")]
    assert logged(window, "gate/cosines") == [" ".join(cosines[:3]), " ".join(cosines[3:])]


def test_a_small_cosine_keeps_its_sign_in_the_log(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.window = {"gate/cosine": [1.25e-5, -3e-9, 0.0, -0.123456]}
    trainer.state.log_history = [{"step": 4}]
    GateMonitorCallback(trainer).on_log(trainer.args, trainer.state, trainer.control)
    words = trainer.state.log_history[0]["gate/cosines"].split()
    assert [float(word) for word in words] == [1.25e-5, -3e-9, 0.0, -0.1235]


def test_a_second_training_logs_its_own_steps_only(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=4, logging_steps=3)
    for _ in range(2):  # the fourth step is in no log
        trainer.train()
        assert [len(cosines.split()) for cosines in logged(trainer, "gate/cosines")] == [3]


def test_trackers_get_numbers_only(tmp_path: Path) -> None:
    class Tracker(TrainerCallback):
        values: list[Any] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: dict, **kwargs: Any) -> None:
            self.values += logs.values()

    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.add_callback(Tracker())
    trainer.train()
    assert Tracker.values
    assert all(isinstance(value, (int, float)) for value in Tracker.values)


def test_the_csv_file_holds_the_rows_and_columns_of_the_log(tmp_path: Path) -> None:
    objects = {"eval_dataset": random_images(6, seed=3, labeled=True)}
    trainer = make_trainer(
        tmp_path, objects=objects, logging_steps=2, eval_strategy="steps", eval_steps=3, max_steps=6
    )
    trainer.train()
    history = [row for row in trainer.state.log_history if "train_runtime" not in row]
    assert [row["step"] for row in history] == [2, 3, 4, 6, 6]
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert next(iter(rows[0])) == "step"
    assert set(rows[0]) == {name for row in history for name in row}
    for found, row in zip(rows, history, strict=True):
        assert {name: value for name, value in found.items() if value} == {
            name: str(row[name]) for name in row
        }


def test_the_csv_file_is_as_new_as_the_last_checkpoint_when_a_run_breaks_off(tmp_path: Path) -> None:
    class Break(TrainerCallback):
        def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, objects={"callbacks": [Break()]}, save_strategy="steps", save_steps=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with open(tmp_path / "log.csv", newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2"]


def test_a_run_without_the_monitor_leaves_no_file(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.remove_callback(GateMonitorCallback)
    trainer.train()
    assert not (tmp_path / "log.csv").exists()


def test_an_empty_log_is_a_file_with_a_header(tmp_path: Path) -> None:
    write_log([], tmp_path / "log.csv")
    assert (tmp_path / "log.csv").read_text().split() == ["step"]


def test_the_progress_bar_shows_loss_gate_and_accuracy_and_nothing_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = {"eval_dataset": random_images(6, seed=3, labeled=True)}
    settings = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2, "disable_tqdm": False}
    trainer = make_trainer(tmp_path, objects=objects, **settings)
    trainer.train()
    printed = capsys.readouterr()
    accuracy = next(row["eval_accuracy"] for row in trainer.state.log_history if "eval_accuracy" in row)
    shown = f"loss={logged(trainer)[-1]:.3f}, gate open={logged(trainer, 'gate/open')[-1]:.3f}"
    assert f"{shown}, validation accuracy={accuracy:.3f}" in printed.err
    assert printed.out == ""


# ---- values that are not finite


class Poisoned(FixAStepTrainer):
    """Spoils the gradient of one loss at the given steps, counted from 1."""

    loss_name = "unlabeled"
    value = math.nan
    steps: tuple[int, ...] = ()

    def compute_losses(self, *args: Any) -> Losses:
        losses = super().compute_losses(*args)
        if self.state.global_step + 1 in self.steps:
            setattr(losses, self.loss_name, getattr(losses, self.loss_name) * self.value)
        return losses


def poisoned(loss_name: str, *steps: int, value: float = math.nan) -> type[Poisoned]:
    return type("Poisoned", (Poisoned,), {"loss_name": loss_name, "steps": steps, "value": value})


def finite(state: dict[str, Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in state.values())


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_unlabeled_gradient_that_is_not_finite_is_rejected_and_counted(
    value: float, gate: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, kind=poisoned("unlabeled", 1, 3, value=value), gate=gate)
    run = train(trainer)
    assert logged(trainer, "nonfinite/unlabeled") == [1, 0, 1, 0]
    assert logged(trainer, "nonfinite/labeled") == [0, 0, 0, 0]
    assert [logged(trainer, "gate/open")[step] for step in (0, 2)] == [0, 0]
    assert finite(run.raw[-1])
    assert finite(run.averaged[-1])
    labeled_only = train(make_trainer(tmp_path, unlabeled_weight=0.0, max_steps=4))
    assert_equal(run.raw[1], labeled_only.raw[1])


def test_rejected_gradients_are_counted_not_averaged_over_the_steps_of_a_log(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kind=poisoned("unlabeled", 1, 3), logging_steps=4)
    trainer.train()
    assert logged(trainer, "nonfinite/unlabeled") == [2]


def test_a_labeled_gradient_that_is_not_finite_leaves_the_weights_alone_and_is_counted(
    tmp_path: Path,
) -> None:
    plain = {"optim": "sgd", "optim_args": "momentum=0", "weight_decay": 0.0}
    trainer = make_trainer(tmp_path, kind=poisoned("labeled", 2), **plain)
    run = train(trainer)
    parameters = [name for name, _ in trainer.model.named_parameters()]
    before, after = ({name: run.raw[step][name] for name in parameters} for step in (1, 2))
    assert_equal(after, before)
    assert logged(trainer, "nonfinite/labeled") == [0, 1, 0, 0]
    assert largest_difference(run.raw[2], run.raw[3]) > 1e-4
    assert finite(run.raw[-1])


def test_the_log_shows_a_loss_of_nan_in_its_window_and_not_in_the_next(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kind=poisoned("labeled", 2), logging_steps=2, max_steps=6)
    trainer.train()
    for name in ("loss", "loss/labeled"):
        assert [math.isnan(value) for value in logged(trainer, name)] == [True, False, False]
    with open(tmp_path / "log.csv", newline="") as file:
        assert [row["loss/labeled"] == "nan" for row in csv.DictReader(file)] == [True, False, False]


@pytest.mark.parametrize("logging_steps", [1, 2, 10])
def test_five_bad_steps_in_a_row_end_the_run_naming_step_and_checkpoint(
    logging_steps: int, tmp_path: Path
) -> None:
    bad = poisoned("labeled", 1, 2, 4, 5, 6, 7, 8)
    settings = {"max_steps": 20, "save_strategy": "steps", "save_steps": 3, "logging_steps": logging_steps}
    trainer = make_trainer(tmp_path, kind=bad, **settings)
    with pytest.raises(FloatingPointError) as error:
        trainer.train()
    message = str(error.value)
    assert "5 steps in a row up to step 8" in message
    assert f"resume {tmp_path / 'checkpoint-3'}, the last one before" in message  # step 6 was bad
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"]
    assert finite(dict(trainer.model.state_dict()))


def test_a_diverged_run_without_an_earlier_checkpoint_says_so(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kind=poisoned("labeled", *range(1, 9)), max_steps=8)
    with pytest.raises(FloatingPointError, match="start again, for there is no checkpoint from before"):
        trainer.train()


BEST = {
    "max_steps": 8,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "metric_for_best_model": "eval_loss",
    "save_total_limit": 1,
}


@pytest.mark.parametrize("save_strategy", ["steps", "best"])
def test_a_bad_step_is_neither_saved_nor_the_best(save_strategy: str, tmp_path: Path) -> None:
    objects = {"eval_dataset": random_images(6, seed=3, labeled=True)}
    bad = poisoned("labeled", 2, 6)
    trainer = make_trainer(
        tmp_path, kind=bad, objects=objects, save_strategy=save_strategy, **BEST, logging_steps=3
    )
    trainer.train()
    evaluated = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    assert evaluated == [4, 8]
    assert trainer.state.best_global_step in (4, 8)
    assert {path.name for path in checkpoints(tmp_path)} <= {"checkpoint-4", "checkpoint-8"}


def test_a_signal_in_a_bad_step_waits_for_a_good_one(tmp_path: Path) -> None:
    class Signal(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                signal.raise_signal(signal.SIGTERM)

    trainer = make_trainer(tmp_path, kind=poisoned("labeled", 2, 3), max_steps=8)
    trainer.add_callback(Signal())
    with pytest.raises(SystemExit) as stop:
        trainer.train()
    assert stop.value.code == 143
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-4"]


@pytest.mark.parametrize("model", [tiny_wide_resnet, tiny_vit])
def test_a_run_that_diverges_can_go_on_from_the_checkpoint_it_names(model: Any, tmp_path: Path) -> None:
    """Its weights grow to 1e15 before any gradient overflows."""
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "logging_steps": 5}
    settings |= {"loss": "fixmatch", "max_steps": 40}
    with pytest.raises(FloatingPointError, match="diverged") as error:
        make_trainer(tmp_path, model(), **settings, learning_rate=10.0).train()
    (left,) = checkpoints(tmp_path)
    assert f"resume {left}, the last one before" in str(error.value)
    assert max(float(value.abs().max()) for value in load_file(left / RAW_WEIGHTS).values()) < 65504
    calm = {"learning_rate": 1e-4, "ignore_changed_settings": ["learning_rate"]}
    trainer = make_trainer(tmp_path, model(), **settings, **calm)
    trainer.train(str(left))
    assert trainer.state.global_step == 40
    assert sum(logged(trainer, "nonfinite/labeled")) == 0
    assert finite(weights(trainer.model))


def test_four_bad_steps_in_a_row_do_not_end_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, kind=poisoned("labeled", 1, 2, 3, 4, 6, 7, 8, 9), max_steps=10, logging_steps=3
    )
    trainer.train()
    assert trainer.state.global_step == 10
    assert sum(logged(trainer, "nonfinite/labeled")) == 8


def test_a_second_training_counts_bad_steps_afresh(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, kind=poisoned("labeled", 1, 2, 3, 4), max_steps=4)
    for _ in range(2):
        trainer.train()
    assert trainer.state.global_step == 4
