"""Values that are not finite, put in at every place where they can arise, in every precision."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_fixastep import FixAStepTrainer
from hf_fixastep.losses.base import Losses
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.gate import GATES, LABELED, UNLABELED
from tests.short_runs import EAGER, Recorder, assert_equal, largest_difference, logged, make_trainer, train


pytestmark = pytest.mark.slow

STEPS, BAD_STEPS = 10, (3, 4, 7)
# Where it happens -> which gradients, labeled and unlabeled, are not finite because of it, and which losses.
PLACES: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "labeled gradient": ((1, 0), (0, 0)),
    "unlabeled gradient": ((0, 1), (0, 0)),
    "both gradients": ((1, 1), (0, 0)),
    "labeled loss": ((1, 0), (1, 0)),
    "unlabeled loss": ((0, 1), (0, 1)),
    "both losses": ((1, 1), (1, 1)),
    "labeled pixels": ((1, 1), (1, 1)),  # batch norm hands them on to all rows
    "unlabeled pixels": ((1, 1), (1, 1)),
    "labeled pixels, separate": ((1, 0), (1, 0)),
    "unlabeled pixels, separate": ((0, 1), (0, 1)),
}
PLACE = pytest.mark.parametrize("place", PLACES)
PRECISION = pytest.mark.parametrize("precision", ["fp32", "bf16", "scaler"])
VALUE = pytest.mark.parametrize("value", [math.nan, math.inf])


class Overflowing(FixAStepTrainer):
    """Puts `value` in at `place`, in the steps of BAD_STEPS, counted from 1."""

    place: str
    value: float
    bad = False  # the current step

    def make_batch(self, inputs: dict[str, Any]) -> SemiBatch:
        self.bad = inputs["step"] + 1 in BAD_STEPS
        batch = super().make_batch(inputs)
        if self.bad and "labeled pixels" in self.place and "unlabeled" not in self.place:
            batch.x[0, 0, 0, 0] = self.value
        if self.bad and "unlabeled pixels" in self.place:
            batch.views["strong"][0, 0, 0, 0] = self.value
        return batch

    def compute_losses(self, *args: Any) -> Losses:
        losses = super().compute_losses(*args)
        for name in ("labeled", "unlabeled"):
            if self.bad and self.place in (f"{name} loss", "both losses"):
                setattr(losses, name, getattr(losses, name) * self.value)
        return losses

    def _gate(self) -> None:
        for row, name in ((LABELED, "labeled"), (UNLABELED, "unlabeled")):
            if self.bad and self.place in (f"{name} gradient", "both gradients"):
                self.slots.buffers[0][row, 5] = self.value
        super()._gate()


class Scaled(Overflowing):
    """With the scaler of fp16 training, on the CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)


def run(
    place: str, precision: str, value: float, folder: Path, **more: Any
) -> tuple[FixAStepTrainer, Recorder]:
    kind = type("Run", (Scaled if precision == "scaler" else Overflowing,), {"place": place, "value": value})
    settings = {
        "loss": "fixmatch",
        "loss_kwargs": EAGER,
        "mix_labeled": False,
        "max_steps": STEPS,
        "batchnorm": "separate" if place.endswith("separate") else "joint",
        "bf16": precision == "bf16",
    }
    trainer = make_trainer(folder, kind=kind, **settings | more)
    return trainer, train(trainer)


def parameters(trainer: FixAStepTrainer, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[name] for name, _ in trainer.model.named_parameters()}


def finite(state: dict[str, Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in state.values())


def bad_steps(happens: int) -> list[float]:
    return [float(happens and step in BAD_STEPS) for step in range(1, STEPS + 1)]


@VALUE
@PRECISION
@PLACE
def test_an_overflow_is_counted_and_shown_and_never_reaches_the_weights(
    place: str, precision: str, value: float, tmp_path: Path
) -> None:
    assert_harmless(place, precision, value, tmp_path)


@PRECISION
@PLACE
def test_the_gate_per_example_hides_no_overflow(place: str, precision: str, tmp_path: Path) -> None:
    """Not even of rows that it would not keep: a scaler has to learn of them."""
    assert_harmless(place, precision, -math.inf, tmp_path, gate="per_example")


def assert_harmless(place: str, precision: str, value: float, folder: Path, **more: Any) -> None:
    trainer, recorder = run(place, precision, value, folder, **more)
    gradients, losses = PLACES[place]
    assert trainer.state.global_step == STEPS
    for state in (*recorder.raw, *recorder.averaged):  # running statistics of batch norm included
        assert finite(state)
    for name, bad_gradient, bad_loss in zip(("labeled", "unlabeled"), gradients, losses, strict=True):
        assert logged(trainer, f"nonfinite/{name}") == bad_steps(bad_gradient)
        assert [not math.isfinite(loss) for loss in logged(trainer, f"loss/{name}")] == bad_steps(bad_loss)
    assert [not math.isfinite(loss) for loss in logged(trainer)] == bad_steps(max(losses))
    for step in range(1, STEPS + 1):
        before, after = (parameters(trainer, recorder.raw[number]) for number in (step - 1, step))
        if step not in BAD_STEPS:  # training goes on
            assert largest_difference(after, before) > 1e-5
        elif precision == "scaler":
            assert_equal(after, before)
    if precision == "scaler":
        assert trainer.accelerator.scaler.get_scale() == 1024 / 2 ** len(BAD_STEPS)


def test_without_overflow_the_scaler_changes_nothing(tmp_path: Path) -> None:
    runs = [run("nowhere", precision, math.nan, tmp_path)[1] for precision in ("fp32", "scaler")]
    assert largest_difference(runs[0].raw[STEPS], runs[1].raw[STEPS]) < 1e-5


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rejected_unlabeled_gradient_leaves_the_step_of_the_labeled_one(
    precision: str, gate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BAD_STEPS", (1,))
    _, spoiled = run("unlabeled gradient", precision, math.nan, tmp_path, gate=gate, max_steps=1)
    _, labeled_only = run(
        "nowhere", precision, math.nan, tmp_path, gate=gate, max_steps=1, unlabeled_weight=0.0
    )
    _, untouched = run("nowhere", precision, math.nan, tmp_path, gate="off", max_steps=1)
    assert_equal(spoiled.raw[1], labeled_only.raw[1])
    assert largest_difference(untouched.raw[1], labeled_only.raw[1]) > 1e-6


@pytest.mark.parametrize("place", ["labeled loss", "labeled pixels"])
def test_five_overflows_in_a_row_end_the_run(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "BAD_STEPS", (2, 3, 4, 5, 6))
    with pytest.raises(FloatingPointError, match="up to step 6"):
        run(place, "fp32", math.nan, tmp_path)


def test_the_csv_shows_the_losses_as_they_were(tmp_path: Path) -> None:
    trainer, _ = run("both losses", "fp32", math.nan, tmp_path)
    with open(tmp_path / "log.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("loss", "loss/labeled", "loss/unlabeled"):
        assert [int(row["step"]) for row in rows if row[name] == "nan"] == list(BAD_STEPS)
        assert [float(row[name]) for row in rows if row[name] != "nan"] == [
            x for x in logged(trainer, name) if x == x
        ]
