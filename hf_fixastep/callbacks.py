"""What happens between steps."""

from __future__ import annotations

import csv
import logging
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from hf_fixastep.checkpoints import newest_complete
from hf_fixastep.disk import write_atomically
from hf_fixastep.runs.folder import LOG
from hf_fixastep.step.gate import is_distributed
from hf_fixastep.step.schedules import ramp_length, unlabeled_ramp
from hf_fixastep.step.teacher import own_parts


if TYPE_CHECKING:
    from hf_fixastep.trainer import FixAStepTrainer


logger = logging.getLogger(__name__)

LARGEST_WEIGHT = torch.finfo(torch.float16).max


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

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer.set_up()

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
            # Significant digits, so that a small cosine keeps its sign: the gate opens for those above 0.
            entry["gate/cosines"] = " ".join(f"{cosine:.4g}" for cosine in cosines)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            write_log(state.log_history, os.path.join(args.output_dir, LOG))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.on_save(args, state, control)


class ProgressBarCallback(ProgressCallback):
    """One bar with the few numbers to watch, instead of a line of all numbers at each log."""

    shown = {"loss": "loss", "gate/open": "gate open", "eval_accuracy": "validation accuracy"}

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, str] = {}

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if self.training_bar is not None:
            self.numbers |= {self.shown[name]: f"{logs[name]:.3f}" for name in self.shown if name in logs}
            self.training_bar.set_postfix(self.numbers, refresh=False)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """No second bar: evaluations are short."""


class NonFiniteCallback(TrainerCallback):
    """Stop a run that has diverged, and save nothing of it, which would push good checkpoints out.

    A step is bad if its labeled gradient was not finite; `patience` of them in a row end the run, as do
    weights that no half-precision number can hold: they grow long before gradients overflow.
    """

    def __init__(self, trainer: FixAStepTrainer, patience: int = 5) -> None:
        self.trainer = trainer
        self.patience = patience

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        window = self.trainer.window.pop("nonfinite/labeled", [])
        self.trainer.bad_steps = self._bad_steps(args, state, window)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        chooses_best = control.should_evaluate and args.save_strategy == SaveStrategy.BEST
        if not (control.should_save or chooses_best):
            return
        window = self.trainer.values.get("nonfinite/labeled", [])
        if self._bad_steps(args, state, [float(value) for value in window]):
            # Not evaluated either: a step that was not saved cannot be the best one.
            control.should_save = control.should_evaluate = False
        elif not (largest := largest_weight(self.trainer.core_model)) <= LARGEST_WEIGHT:
            cause = f"A weight has grown to {largest:.1e} by step {state.global_step}"
            raise FloatingPointError(self._message(args, cause, state.global_step))

    on_evaluate = on_step_end  # a signal during the evaluation asks for a save

    def _bad_steps(self, args: Any, state: TrainerState, window: list[float]) -> int:
        """Bad steps in a row up to this one, the last of those of the window."""
        count = self.trainer.bad_steps
        for step, bad in enumerate(window, state.global_step - len(window) + 1):
            count = count + 1 if bad else 0
            if count >= self.patience:
                cause = f"The labeled gradient was not finite in {count} steps in a row up to step {step}"
                raise FloatingPointError(self._message(args, cause, step - count + 1))
        return count

    def _message(self, args: Any, cause: str, first: int) -> str:
        last, _ = newest_complete(args.output_dir, before=first)
        remedy = (
            f"resume {last}, the last one before, with it and ignore_changed_settings learning_rate"
            if last
            else "start again, for there is no checkpoint from before"
        )
        return f"{cause}, so the run has diverged; lower the learning rate and {remedy}."


class SignalCallback(TrainerCallback):
    """On SIGTERM or SIGINT finish the step, save and exit; a second signal ends the process at once."""

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer = trainer
        self.received = 0
        self.stopping = 0  # the signal that all processes have agreed on
        self.earlier: dict[signal.Signals, Any] = {}
        self.group: Any = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.received = self.stopping = 0
        if args.world_size > 1 and self.group is None:
            # On the CPU, so that no device is waited for.
            self.group = dist.new_group(backend="gloo", timeout=args.ddp_timeout_delta)
        if threading.current_thread() is threading.main_thread():
            self.earlier = {number: signal.signal(number, self._receive) for number in self.signals}

    def _receive(self, number: int, frame: Any) -> None:
        self.received = number
        # Not by a handler of ours, which would wait for a collective call to return.
        for each in self.signals:
            signal.signal(each, signal.SIG_DFL)

    def restore(self) -> None:
        """Called at the end of `train`, however it ends."""
        for number, handler in self.earlier.items():
            signal.signal(number, handler)
        self.earlier = {}

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.stopping = self.received
        if self.group is not None:  # another process may have got it, or this one after the others
            number = torch.tensor(self.received)
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self.group)
            self.stopping = int(number)
        control.should_save |= self.stopping > 0

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.trainer.is_in_train:  # a long one is over, and what is saved next is this step still
            self.on_step_end(args, state, control)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stopping:
            if self.group is not None:
                dist.barrier(self.group)
            if state.is_world_process_zero:
                logger.warning(
                    "Stopped by %s after step %d, which is saved in %s; to go on, run it again with "
                    "resume_from_checkpoint true.",
                    *(signal.Signals(self.stopping).name, state.global_step, args.output_dir),
                )
            raise SystemExit(128 + self.stopping)


def largest_weight(model: nn.Module) -> float:
    """The largest absolute value of any parameter, NaN if one is; the same on all processes."""
    parts = [part.detach() for part in own_parts(model.parameters()) if part.numel()]
    largest = torch.stack([part.abs().max().float() for part in parts]).max()
    if is_distributed():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def write_log(history: list[dict[str, Any]], path: str | Path) -> None:
    """One row per logging or evaluation step; the columns are all names that ever occurred."""
    rows = [row for row in history if "loss" in row or any(name.startswith("eval_") for name in row)]
    columns = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    with write_atomically(path) as partial, open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


# Made by the trainer for itself, in this order.
BETWEEN_STEPS = (UnlabeledWeightCallback, TeacherCallback, GateMonitorCallback)
