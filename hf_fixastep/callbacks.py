"""What happens between steps."""

from __future__ import annotations

import csv
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from hf_fixastep.schedules import ramp_length, unlabeled_ramp


if TYPE_CHECKING:
    from hf_fixastep.trainer import FixAStepTrainer


logger = logging.getLogger(__name__)

LOG_NAME = "log.csv"


class UnlabeledWeightCallback(TrainerCallback):
    """Ramp the unlabeled weight; a pure function of the step, so resuming needs no state."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        length = ramp_length(args.unlabeled_warmup_steps, state.max_steps)
        share = unlabeled_ramp(args.unlabeled_ramp, state.global_step + 1, length)
        self.trainer.unlabeled_weight = args.unlabeled_weight * share


class TeacherCallback(TrainerCallback):
    """Average the model after every optimizer step that was taken."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.trainer.teacher is not None and not self.trainer.accelerator.optimizer_step_was_skipped:
            self.trainer.teacher.update(self.trainer.core_model)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer.keep_average()


class GateMonitorCallback(TrainerCallback):
    """Keep the cosine of every step in the log, and the log on disk as one CSV file."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer = trainer

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if cosines := self.trainer.window.pop("gate/cosine", None):
            # Only here and not in the logs that other callbacks get: a tracker wants numbers.
            entry: dict[str, Any] = state.log_history[-1]
            entry["gate/cosines"] = " ".join(f"{cosine:.3f}" for cosine in cosines)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            write_log(state.log_history, os.path.join(args.output_dir, LOG_NAME))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.on_save(args, state, control)


class ProgressBarCallback(ProgressCallback):
    """One bar with the few numbers to watch, instead of a line of all numbers at each log."""

    shown = {"loss": "loss", "gate/open": "gate open", "eval_accuracy": "validation accuracy"}

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, str] = {}

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.numbers |= {self.shown[name]: f"{logs[name]:.3f}" for name in self.shown if name in logs}
            self.training_bar.set_postfix(self.numbers, refresh=False)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """No second bar: evaluations are short."""


class NonFiniteCallback(TrainerCallback):
    """Stop a run whose labeled gradient was not finite in `patience` steps in a row."""

    def __init__(self, trainer: FixAStepTrainer, patience: int = 5) -> None:
        self.trainer = trainer
        self.patience = patience
        self.in_a_row = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.in_a_row = 0

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        window = self.trainer.window.pop("nonfinite/labeled", [])
        for step, skipped in enumerate(window, state.global_step - len(window) + 1):
            self.in_a_row = self.in_a_row + 1 if skipped else 0
            if self.in_a_row >= self.patience:
                raise FloatingPointError(self._message(args, step))

    def _message(self, args: Any, step: int) -> str:
        last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
        found = f"The labeled gradient was not finite in {self.patience} steps in a row up to step {step}"
        return f"{found}; none of them reached the weights. Lower the learning rate; last good checkpoint: {last}."


def write_log(history: list[dict[str, Any]], path: str | Path) -> None:
    """One row per logging or evaluation step; the columns are all names that ever occurred."""
    rows = [row for row in history if "loss" in row or any(name.startswith("eval_") for name in row)]
    columns = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
