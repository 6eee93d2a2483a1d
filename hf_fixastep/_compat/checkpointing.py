"""Checkpoints through the Trainer: the averaged model is what is saved, and a resumed run goes on to the bit.

Private names of transformers' Trainer, all looked at in 5.20 to 5.23. Overridden:

- `_save_checkpoint`: older checkpoints may go only after the new one is complete, and an error of the disk is
  one sentence. It can go when the Trainer writes checkpoints aside, or when pruning is a callback.
- `_load_from_checkpoint`, `_load_best_model`: the Trainer loads model.safetensors without the renaming that
  `save_pretrained` did, and leaves what it does not find, for a ViT all attention weights, as it was; it also
  knows no second set of weights. They can go when it loads through `from_pretrained` and has a hook for more.
- `_push_from_checkpoint`: the stock way pushes the optimizer's state and a pickle of all settings, token
  included. It can go when what is pushed can be chosen.
- `_get_grad_norm`: the Trainer computes a norm that nobody here asks for, in 2 ms of each step. It can go
  when that can be switched off.

Read and written: `_tr_loss`, `_total_loss_scalar`, `_globalstep_last_logged`, the sums of the log, which the
Trainer does not save; they can go when it does.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.trainer import TRAINER_STATE_NAME

from hf_fixastep._compat.optimizing import OptimizingTrainer
from hf_fixastep.checkpoints import (
    OPTIMIZER_SETTINGS,
    RUN,
    SETTINGS,
    check_run,
    complete,
    damage,
    find_checkpoint,
    only_run,
    prune,
    remove,
    saving,
)
from hf_fixastep.losses.base import SemiSupervisedLoss
from hf_fixastep.models.trainable import plain_state, with_lora
from hf_fixastep.runs.folder import LOG_WINDOW, LORA_STATE, LOSS_STATE, RAW_WEIGHTS
from hf_fixastep.step.teacher import Teacher, load_whole, reshard, whole_parameters
from hf_fixastep.step.values import Values


@dataclass
class Resume:
    """A checkpoint that a training goes on from.

    Args:
        changed: settings that the training has otherwise, and that the user said to ignore.
        average: the averaged weights, until there is a teacher to hold them.
    """

    folder: Path
    changed: set[str]
    average: dict[str, Tensor] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return json.loads((self.folder / TRAINER_STATE_NAME).read_text())["global_step"]


class CheckpointingTrainer(OptimizingTrainer):
    """A Trainer with an averaged model, whose checkpoints are complete or not there."""

    signals: Any
    teacher: Teacher | None = None
    resume: Resume | None = None
    values: Values  # of every step since the last log
    class_names: list[str]
    train_dataset: Any
    unlabeled: Any
    bad_steps = 0  # in a row, up to the last log; of a checkpoint none, for such steps are not saved

    def identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued."""
        count = sum(p.numel() for p in self.core_model.parameters())
        return {
            "loss": type(self.loss).__name__,
            "labeled data": self.train_dataset.fingerprint,
            "unlabeled data": None if self.unlabeled is None else self.unlabeled.fingerprint,
            "classes": self.class_names,
            "model": f"{type(self.core_model).__name__.removeprefix('FSDP')} of {count} parameters",
            # Groups of a checkpoint cannot become others.
            "optim": self.args.optim + ", the head apart" * (self.args.head_rate_factor != 1),
            "settings": {name: getattr(self.args, name) for name in SETTINGS},
        }

    # ---- training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        folder, evaluates_first = str(self.args.output_dir), self.args.eval_on_start
        vars(self.core_model.config).pop("calibration", None)  # of the weights before the training
        with only_run(folder) if self.args.should_save else contextlib.nullcontext():
            if resume_from_checkpoint is True:
                resume_from_checkpoint = find_checkpoint(folder)
            self.resume = None
            if resume_from_checkpoint:
                changed = self.check_checkpoint(str(resume_from_checkpoint))
                self.resume = Resume(Path(str(resume_from_checkpoint)), changed)
                self.args.eval_on_start = False  # it did so when it started
            try:
                output = super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self.args.eval_on_start = evaluates_first
                self.signals.restore()
            if self.signals.received:  # after the last step: whoever comes next should know
                signal.raise_signal(self.signals.received)
            return output._replace(training_loss=output.metrics["train_loss"])

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        epochs, *values, max_steps = super().set_initial_training_values(*args, **kwargs)
        if self.resume is not None and self.resume.step >= max_steps:
            epochs = 0  # killed after its last step; the Trainer would take one more
        return epochs, *values, max_steps

    def check_checkpoint(self, folder: str | Path) -> set[str]:
        """Refuse to continue a checkpoint of another run; return the changed settings to be ignored."""
        return check_run(folder, self.identity(), self.args.ignore_changed_settings or [])

    # ---- the average: what is evaluated and saved

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model has the averaged weights."""
        return contextlib.nullcontext() if self.teacher is None else self.teacher.applied(self.core_model)

    def keep_average(self) -> None:
        """The run is over: from now on the model is what was evaluated."""
        if self.teacher is not None:
            reshard(self.core_model)
            reshard(self.teacher.model)
            self.core_model.load_state_dict(self.teacher.model.state_dict())
            self.teacher = None

    def averaged_weights(self, folder: str | Path) -> dict[str, Tensor]:
        if self.args.trainable == "lora":
            return load_file(Path(folder) / LORA_STATE)
        return self._saved_weights(folder)

    def load_plain(self, folder: str | Path) -> None:
        """Take the weights of a saved model of the same kind."""
        state = self._saved_weights(folder)
        lora = self.args.trainable == "lora"
        load_whole(self.core_model, with_lora(self.core_model.state_dict(), state) if lora else state)

    def _saved_weights(self, folder: str | Path) -> dict[str, Tensor]:
        from hf_fixastep.hub.loading import load_saved  # here, as it needs the client of the Hub

        return load_saved(type(self.core_model), folder).state_dict()

    @property
    def raw_weights_file(self) -> Path | None:
        """Of the best step, whose average is the model after the training."""
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        file = Path(best) / RAW_WEIGHTS if best else None
        return file if file and file.is_file() else None

    @contextlib.contextmanager
    def raw_weights(self) -> Iterator[None]:
        """Inside, the model has the raw weights of the best step; after it, their average again."""
        file = cast(Path, self.raw_weights_file)
        load_whole(self.core_model, self.averaged_weights(file.parent))
        load_whole(self.core_model, load_file(file), strict=False)
        try:
            yield
        finally:
            self._load_best_model()

    # ---- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what `from_pretrained` reads and, while training, what resuming needs; on all processes."""
        folder = Path(output_dir or str(self.args.output_dir))
        with self.averaged():  # the teacher holds the raw weights meanwhile
            raw = {} if self.teacher is None else whole_parameters(self.teacher.model)
            state = self.accelerator.get_state_dict(self.model) if self.accelerator.is_fsdp2 else None
            if self.args.should_save:
                folder.mkdir(parents=True, exist_ok=True)
                self._write_model(folder, state)
                if raw and self.is_in_train:
                    save_file(contiguous(raw), folder / RAW_WEIGHTS, metadata={"format": "pt"})
                    (folder / RUN).write_text(json.dumps(self.identity(), indent=2))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_model(self, folder: Path, state: dict[str, Tensor] | None) -> None:
        core: Any = self.core_model
        if self.args.trainable == "lora":
            whole = state or core.state_dict()
            state = plain_state(core, whole)
            if self.is_in_train:
                save_file(contiguous(whole), folder / LORA_STATE)
        core.save_pretrained(folder, state_dict=state)
        cast(Any, self.processing_class).save_pretrained(folder)
        tells_foreign = type(self.loss).outlier_score is not SemiSupervisedLoss.outlier_score
        if (own := self.loss.state_dict()) and (self.is_in_train or tells_foreign):
            save_file(contiguous(own), folder / LOSS_STATE)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        checkpoint = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        limit, is_main = self.args.save_total_limit, self.args.should_save
        with saving(checkpoint):
            if is_main:
                remove(checkpoint)  # of a run that was given up, or that was killed while it was written
            self.accelerator.wait_for_everyone()
            self.args.save_total_limit = None  # else the Trainer prunes before this one is complete
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.save_total_limit = limit
            self._save_log(checkpoint)
            self.accelerator.wait_for_everyone()
            if is_main:
                complete(checkpoint)
        if is_main:
            prune(checkpoint, limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()

    def _save_log(self, folder: Path) -> None:
        state = {f"values/{name}": torch.stack(values) for name, values in self.values.items()}
        state["loss"] = self._tr_loss
        state["total_loss"] = torch.tensor(self._total_loss_scalar, dtype=torch.float64)
        state["last_logged"] = torch.tensor(self._globalstep_last_logged)
        save_file(state, folder / LOG_WINDOW.format(self.args.process_index))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Left to the callback of the Hub."""

    # ---- loading

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if reason := damage(best):
            raise ValueError(
                f"The best checkpoint {best} is damaged: {reason}. Choose the model of another one."
            )
        load_whole(self.core_model, self.averaged_weights(best))
        self._load_loss(best)
        self.teacher = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        resume = cast(Resume, self.resume)
        resume.average = self.averaged_weights(resume.folder)
        load_whole(self.core_model, resume.average)
        # After it, for of weights that are tied it has one name, and the average has them all.
        load_whole(self.core_model, load_file(resume.folder / RAW_WEIGHTS), strict=False)
        self._load_loss(resume.folder)

    def _load_loss(self, folder: Path) -> None:
        if (folder / LOSS_STATE).is_file():
            self.loss.load_state_dict(load_file(folder / LOSS_STATE))

    def finish_resuming(self) -> None:
        """Take what only a training that is about to begin can: the average, the log, changed settings."""
        self.bad_steps = 0
        if (resume := self.resume) is None:
            return
        load_whole(cast(Teacher, self.teacher).model, resume.average)
        resume.average = {}
        if resume.changed & set(OPTIMIZER_SETTINGS):
            self.change_settings()
        if "world_size" not in resume.changed:
            self._load_log(resume.folder)

    def _load_log(self, folder: Path) -> None:
        state = load_file(folder / LOG_WINDOW.format(self.args.process_index))
        for name, values in state.items():
            if name.startswith("values/"):
                self.values[name.removeprefix("values/")] = list(values.to(self.args.device).unbind())
        self._tr_loss = state["loss"].to(self.args.device)
        self._total_loss_scalar = state["total_loss"].item()
        self._globalstep_last_logged = int(state["last_logged"])

    # ---- logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            self._tr_loss.zero_()  # the Trainer subtracts it from itself, which leaves NaN as NaN for ever
        if "train_loss" in logs:  # of the whole run, also where this is only the end of it
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # the Trainer would guess it from the length of a text

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm  # that of clipping, if there was any; the gate logs the norms of its two parts


def contiguous(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.contiguous() for name, value in state.items()}
