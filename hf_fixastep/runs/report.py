"""What a run tells about itself when it is over; nothing here needs a client of the Hub."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from hf_fixastep.checkpoints import as_json
from hf_fixastep.disk import digest
from hf_fixastep.evaluation.intervals import split_intervals
from hf_fixastep.losses import LOSSES
from hf_fixastep.runs.folder import CARD, METRICS, RECIPE, WEIGHTS, RunFolder


if TYPE_CHECKING:
    from hf_fixastep.trainer import FixAStepTrainer


class RunReport:
    """The facts of a run, and the files that hold them beside the saved model."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer = trainer
        self.dataset: dict[str, Any] = {}  # name, config and whether it is medical, where someone knows
        self.loss: str | None = None  # its name, if not that of the trainer's loss
        self.recipe: dict[str, Any] | None = None  # the settings given, where someone knows
        self.patients: Sequence[str] | None = None  # of the test images, where someone knows
        # "probe" and "labeled-only", each with its test_accuracy and the like, where they were measured
        self.baselines: dict[str, dict[str, float]] = {}

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
        classes = len(trainer.class_names)
        support = {name: label.bincount(minlength=classes).tolist() for name, label in labels.items()}
        hashes = {name: images.fingerprint for name, images in splits.items()}
        timing = ("_second", "_time", "_runtime")
        return {
            "procedure": trainer.args.procedure,
            "loss": self.loss or losses.get(type(trainer.loss), type(trainer.loss).__name__),
            "gate": trainer.args.gate,
            "mix_labeled": trainer.mix_labeled,
            "teacher_decay": trainer.teacher_decay,
            "steps": state.global_step,
            "in_progress": trainer.is_in_train,
            "best_step": state.best_global_step if self.is_best() else None,
            "images": {name: len(images) for name, images in splits.items()},
            "gate_open_rate": sum(opened) / len(opened) if opened else None,
            **{name: value for name, value in results.items() if not name.endswith(timing)},
            "support": support,
            "intervals": split_intervals(results, support),
            "dataset": self.dataset | {"hashes": hashes},
            "parameters": sum(p.numel() for p in trainer.saved_network.parameters()),
            "started_from": getattr(trainer.core_model.config, "name_or_path", None) or None,
            **({"baselines": self.baselines} if self.baselines else {}),
            "speed": self.speed(),
            "versions": versions(),
        }

    def is_best(self) -> bool:
        """Whether the model is that of the best step; during a training it is that of the last one."""
        return self.trainer.args.load_best_model_at_end and not self.trainer.is_in_train

    def splits(self) -> dict[str, Any]:
        """All images that the trainer has."""
        tested = self.trainer.eval_dataset
        found: dict[str, Any] = {"labeled": self.trainer.train_dataset, "unlabeled": self.trainer.unlabeled}
        if isinstance(tested, dict) and tested:
            found |= {f"validation_{name}": images for name, images in tested.items()}
        else:
            found["validation"] = tested
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
        """Leave facts and settings, and beside a saved model its card."""
        from hf_fixastep.hub.cards import model_card  # here, as facts need no card

        if saved := self.trainer.args.keep == "model":
            # So that no other model gets this card.
            facts = facts | {"weights": digest(self.folder / WEIGHTS)}
        (self.folder / METRICS).write_text(json.dumps(facts, indent=2))
        (self.folder / RECIPE).write_text(yaml.safe_dump(self.settings()))
        if not saved:
            return
        args, run = self.trainer.args, RunFolder.read(self.folder)
        card = model_card(run, args.hub_model_id, args.hub_license, args.hub_intended_use)
        (self.folder / CARD).write_text(card, encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        """The settings that were given, without tokens."""
        given = self.trainer.args.given if self.recipe is None else self.recipe
        return {name: as_json(value) for name, value in given.items() if not name.endswith("_token")}


@functools.cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("hf_fixastep", "torch", "transformers", "accelerate", "datasets"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
            found[name] = "not installed"
    return found
