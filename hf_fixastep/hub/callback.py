"""Describe a run for its card, and push both."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from huggingface_hub import CommitInfo
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import HubStrategy

from hf_fixastep.checkpoints import as_json
from hf_fixastep.disk import digest
from hf_fixastep.hub import cards, client
from hf_fixastep.losses import LOSSES
from hf_fixastep.runs.folder import CARD, LOG, METRICS, RECIPE, WEIGHTS, RunFolder


if TYPE_CHECKING:
    from hf_fixastep.trainer import FixAStepTrainer


logger = logging.getLogger(__name__)


class HubCardCallback(TrainerCallback):
    """Describe the run for its card, and push both: when the trainer is told to, and at every save if so set."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer = trainer
        self.dataset: dict[str, Any] = {}  # name, config and whether it is medical, where someone knows
        self.recipe: dict[str, Any] | None = None  # the settings given, where someone knows
        self.pushing: threading.Thread | None = None

    def create_repo(self, token: str | None = None) -> str:
        """Make the repository before the training, so that nothing is missed after it."""
        args = self.trainer.args
        args.check_push()
        where: dict[str, Any] = {"private": args.hub_private_repo, "token": token or args.hub_token}
        return client.create_repo(str(args.hub_model_id), **where)

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
        weights = {"weights": digest(self.folder / WEIGHTS)}  # so that no other model gets this card
        (self.folder / METRICS).write_text(json.dumps(facts | weights, indent=2))
        (self.folder / RECIPE).write_text(yaml.safe_dump(self.settings()))
        self.write_card()

    def write_card(self) -> None:
        args = self.trainer.args
        card = cards.model_card(
            RunFolder.read(self.folder), args.hub_model_id, args.hub_license, args.hub_intended_use
        )
        (self.folder / CARD).write_text(card, encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        given = self.trainer.args.given if self.recipe is None else self.recipe
        return {name: as_json(value) for name, value in given.items() if not name.endswith("_token")}

    def push(self, message: str = "End of training", **where: Any) -> CommitInfo:
        """Push the model in the output folder, where it stays whatever happens.

        Args:
            where: token and revision, if other than those of the settings.
        """
        try:
            return self._push(self._files(RunFolder.read(self.folder)), message, **where)
        except (OSError, ValueError) as error:
            raise OSError(f"{error} The model is saved; to push it: fixastep push {self.folder}") from error

    def _files(self, run: RunFolder) -> dict[str, bytes | Path]:
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
        files[WEIGHTS] = Path(str(files[WEIGHTS])).read_bytes()
        self.pushing = threading.Thread(target=self._push_aside, args=(files, state.global_step), daemon=True)
        self.pushing.start()

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.pushing is not None:
            self.pushing.join()

    def _checkpoint(self) -> RunFolder:
        """The checkpoint that was just saved, with the results of this very step, if it has some."""
        state = self.trainer.state
        results: dict[str, float] = {}
        for row in state.log_history:
            if row.get("step") == state.global_step:
                results |= {f"validation_{name[5:]}": row[name] for name in row if name.startswith("eval_")}
        folder = self.folder / f"checkpoint-{state.global_step}"
        facts = self.facts(results) | {"weights": digest(folder / WEIGHTS)}
        return RunFolder(folder, facts, self.settings(), self.folder / LOG)

    def _push_aside(self, files: dict[str, bytes | Path], step: int) -> None:
        try:
            self._push(files, f"Training in progress, step {step}")
        except OSError as error:
            logger.warning("%s The training goes on.", error)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("hf_fixastep", "torch", "transformers", "accelerate", "datasets"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
            found[name] = "not installed"
    return found
