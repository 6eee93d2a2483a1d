"""What happens between steps."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import logging
import os
import platform
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import yaml
from huggingface_hub import CommitInfo
from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import HubStrategy

from hf_fixastep.checkpoints import as_json, digest, newest_complete
from hf_fixastep.hub import cards, client
from hf_fixastep.losses import LOSSES
from hf_fixastep.step.schedules import ramp_length, unlabeled_ramp


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
            # Significant digits, so that a small cosine keeps its sign: the gate opens for those above 0.
            entry["gate/cosines"] = " ".join(f"{cosine:.4g}" for cosine in cosines)

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

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
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

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer.bad_steps = 0

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        window = self.trainer.window.pop("nonfinite/labeled", [])
        for step, skipped in enumerate(window, state.global_step - len(window) + 1):
            self.trainer.bad_steps = self.trainer.bad_steps + 1 if skipped else 0
            if self.trainer.bad_steps >= self.patience:
                raise FloatingPointError(self._message(args, step))

    def _message(self, args: Any, step: int) -> str:
        last, _ = newest_complete(args.output_dir)
        found = f"The labeled gradient was not finite in {self.patience} steps in a row up to step {step}"
        return f"{found}; none of them reached the weights. Lower the learning rate; last good checkpoint: {last}."


class LogResumeCallback(TrainerCallback):
    """Go on with the log where the checkpoint stopped; the Trainer sets its sums to zero just before."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.trainer.resume_log()


class HubCardCallback(TrainerCallback):
    """Describe the run for its card, and push both: when the trainer is told to, and at every save if so set."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer = trainer
        self.dataset: dict[str, Any] = {}  # name, config and whether it is medical, where someone knows
        self.recipe: dict[str, Any] | None = None  # the settings given, where someone knows
        self.pushing: threading.Thread | None = None

    @property
    def folder(self) -> Path:
        return Path(str(self.trainer.args.output_dir))

    def facts(self, results: dict[str, float], splits: dict[str, Any] | None = None) -> dict[str, Any]:
        """What `metrics.json` holds and the card tells.

        Args:
            results: metrics with the name of their split and `_` in front.
            splits: further images that were tested on, as `Images`.
        """
        trainer, state, splits = self.trainer, self.trainer.state, self.splits() | (splits or {})
        opened = [row["gate/open"] for row in state.log_history if "gate/open" in row]
        losses = {kind: name for name, kind in LOSSES.items()}
        labels = {name: images.labels for name, images in splits.items() if f"{name}_accuracy" in results}
        support = {
            name: labels[name].bincount(minlength=len(trainer.class_names)).tolist() for name in labels
        }
        return {
            "procedure": trainer.args.procedure,
            "loss": losses.get(type(trainer.loss), type(trainer.loss).__name__),
            "gate": trainer.args.gate,
            "mix_labeled": trainer.mix_labeled,
            "steps": state.global_step,
            "in_progress": trainer.is_in_train,
            "best_step": state.best_global_step if self.is_best() else None,
            "images": {name: len(images) for name, images in splits.items()},
            "gate_open_rate": sum(opened) / len(opened) if opened else None,
            **{
                name: value
                for name, value in results.items()
                if not name.endswith(("_second", "_time", "_runtime"))
            },
            "support": support,
            "intervals": cards.intervals(results, support),
            "dataset": self.dataset
            | {"hashes": {name: images.fingerprint for name, images in splits.items()}},
            "parameters": sum(p.numel() for p in trainer.core_model.parameters()),
            "started_from": getattr(trainer.core_model.config, "name_or_path", None) or None,
            "speed": self.speed(),
            "versions": versions(),
        }

    def is_best(self) -> bool:
        """Whether the model is that of the best step; during a training it is that of the last one."""
        return self.trainer.args.load_best_model_at_end and not self.trainer.is_in_train

    def splits(self) -> dict[str, Any]:
        """All images that the trainer has."""
        tested = self.trainer.eval_dataset
        named = (
            {f"validation_{name}": images for name, images in tested.items()}
            if isinstance(tested, dict)
            else {}
        )
        found: dict[str, Any] = {"labeled": self.trainer.train_dataset, "unlabeled": self.trainer.unlabeled}
        found |= named or {"validation": tested}
        return {name: images for name, images in found.items() if images is not None}

    def speed(self) -> dict[str, Any] | None:
        """Of the whole training, once it is over."""
        args = self.trainer.args
        device = f"CPU (threads: {torch.get_num_threads()})"
        if args.device.type == "cuda":
            device = torch.cuda.get_device_name(args.device)
        for row in reversed(self.trainer.state.log_history):
            if "train_steps_per_second" in row:
                speed = row["train_steps_per_second"]
                return {"steps_per_second": speed, "device": device, "processes": args.world_size}
        return None

    def write(self, facts: dict[str, Any]) -> None:
        """Leave facts, settings and card beside the saved model."""
        weights = {"weights": digest(self.folder / cards.WEIGHTS)}  # so that no other model gets this card
        (self.folder / cards.METRICS).write_text(json.dumps(facts | weights, indent=2))
        (self.folder / cards.RECIPE).write_text(yaml.safe_dump(self.settings()))
        self.write_card()

    def write_card(self) -> None:
        args = self.trainer.args
        card = cards.model_card(
            cards.Run.read(self.folder), args.hub_model_id, args.hub_license, args.hub_intended_use
        )
        (self.folder / cards.CARD).write_text(card, encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        given = self.trainer.args.given if self.recipe is None else self.recipe
        return {name: as_json(value) for name, value in given.items() if not name.endswith("_token")}

    def push(self, message: str = "End of training", **where: Any) -> CommitInfo:
        """Push the model in the output folder, where it stays whatever happens.

        Args:
            where: token and revision, if other than those of the settings.
        """
        try:
            return self._push(self._files(cards.Run.read(self.folder)), message, **where)
        except (OSError, ValueError) as error:
            raise OSError(f"{error} The model is saved; to push it: fixastep push {self.folder}") from error

    def _files(self, run: cards.Run) -> dict[str, bytes | Path]:
        args = self.trainer.args
        return cards.prepare_model(run, args.hub_model_id, args.hub_license, args.hub_intended_use)

    def _push(self, files: dict[str, bytes | Path], message: str, **where: Any) -> CommitInfo:
        args = self.trainer.args
        usual = {"private": args.hub_private_repo, "revision": args.hub_revision, "token": args.hub_token}
        where = usual | {name: value for name, value in where.items() if value is not None}
        return client.push_files(files, str(args.hub_model_id), message=message, stale=cards.ALLOWED, **where)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        wanted = (
            args.push_to_hub and args.hub_strategy == HubStrategy.EVERY_SAVE and state.is_world_process_zero
        )
        if not wanted or (self.pushing is not None and self.pushing.is_alive()):
            return
        try:
            files = self._files(self._checkpoint())
        except ValueError as error:
            logger.warning("%s Nothing was pushed; the training goes on.", error)
            return
        # The checkpoint may be pruned meanwhile.
        files[cards.WEIGHTS] = Path(str(files[cards.WEIGHTS])).read_bytes()
        self.pushing = threading.Thread(target=self._push_aside, args=(files, state.global_step), daemon=True)
        self.pushing.start()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.pushing is not None:
            self.pushing.join()

    def _checkpoint(self) -> cards.Run:
        """The checkpoint that was just saved, with the results of this very step, if it has some."""
        state = self.trainer.state
        results: dict[str, float] = {}
        for row in state.log_history:
            if row.get("step") == state.global_step:
                results |= {f"validation_{name[5:]}": row[name] for name in row if name.startswith("eval_")}
        folder = self.folder / f"checkpoint-{state.global_step}"
        facts = self.facts(results) | {"weights": digest(folder / cards.WEIGHTS)}
        return cards.Run(folder, facts, self.settings(), self.folder / LOG_NAME)

    def _push_aside(self, files: dict[str, bytes | Path], step: int) -> None:
        try:
            self._push(files, f"Training in progress, step {step}")
        except OSError as error:
            logger.warning("%s The training goes on.", error)


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
            self.group = dist.new_group(backend="gloo")  # on the CPU, so that no device is waited for
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


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("hf_fixastep", "torch", "transformers", "accelerate", "datasets"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
            found[name] = "not installed"
    return found


def write_log(history: list[dict[str, Any]], path: str | Path) -> None:
    """One row per logging or evaluation step; the columns are all names that ever occurred."""
    rows = [row for row in history if "loss" in row or any(name.startswith("eval_") for name in row)]
    columns = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    partial = f"{path}.partial"
    with open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)  # a run that is killed now keeps the log it had
