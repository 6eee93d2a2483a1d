"""Trainings one after another, each in a folder of its own; one that is over is not repeated."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import pandas as pd
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import set_seed

from hf_fixastep._compat.distributed import check_procedure
from hf_fixastep.checkpoints import as_json, checkpoints, describe, find_checkpoint, only_run
from hf_fixastep.data.images import Images
from hf_fixastep.disk import write_atomically
from hf_fixastep.hub.loading import load_saved
from hf_fixastep.losses.base import SemiSupervisedLoss
from hf_fixastep.procedures.base import Procedure
from hf_fixastep.runs.folder import LOG
from hf_fixastep.trainer import FixAStepTrainer


PROCEDURE = "procedure.json"  # what a procedure may be resumed with
ROUND = "round.json"  # in the folder of a round that is over
ROUNDS = "rounds.json"  # all of them, when all are over

T = TypeVar("T")


@dataclass(frozen=True)
class Round:
    """A training that is over; its model, the best one if the settings ask for it, is in its folder."""

    name: str
    score: float  # on the validation images, larger is better
    steps: int
    best_step: int | None


def run_procedure(
    procedure: Procedure,
    trainer: FixAStepTrainer,
    unlabeled_dataset: datasets.Dataset | Images,
    make_model: Callable[[], nn.Module],
    resume: bool = False,
) -> None:
    """Run all trainings of a procedure, and leave its model, log and numbers of steps with the trainer.

    Args:
        trainer: not trained yet; its settings, labeled and validation images are those of every round. Rounds
            write to folders in its output_dir.
        make_model: a new model, from scratch or pretrained, for each round that starts anew.
        resume: go on where an interrupted run with the same settings stopped, to the bit.
    """
    rounds = Rounds(trainer, unlabeled_dataset, make_model)
    with only_run(rounds.folder) if trainer.args.should_save else contextlib.nullcontext():
        rounds.check(procedure, resume)
        rounds.report(procedure(rounds))


class Rounds:
    """What a procedure works with; see `run_procedure` for the arguments."""

    def __init__(
        self,
        trainer: FixAStepTrainer,
        unlabeled_dataset: datasets.Dataset | Images,
        make_model: Callable[[], nn.Module],
    ) -> None:
        if not isinstance(trainer.eval_dataset, Images):
            raise ValueError(
                "A procedure chooses by validation images, but the trainer has not one eval_dataset."
            )
        unlabeled = trainer.images(unlabeled_dataset)
        if not isinstance(trainer.train_dataset, Images) or not isinstance(unlabeled, Images):
            raise ValueError(
                "A procedure trains on images, but the trainer has cached features; choose another trainable."
            )
        check_procedure(trainer.accelerator)
        self.trainer, self.make_model = trainer, make_model
        self.folder = Path(str(trainer.args.output_dir))
        self.labeled = trainer.train_dataset
        self.unlabeled = Images(unlabeled.pixels)
        self.done: list[Round] = []

    def check(self, procedure: Procedure, resume: bool) -> None:
        """Refuse to write over a run, or to continue one with other settings or data."""
        path, settings = self.folder / PROCEDURE, self.trainer.identity()
        new = settings.pop("settings") | settings | {"unlabeled data": self.unlabeled.fingerprint}
        new = as_json(new | {"procedure": type(procedure).__name__, "procedure_kwargs": vars(procedure)})
        old = from_main(lambda: json.loads(path.read_text()) if path.is_file() else None)
        if resume is not (old is not None):
            found = "holds no procedure to resume" if resume else "holds a procedure already"
            raise ValueError(
                f"{self.folder} {found}; choose another output_dir, or set resume to {not resume}."
            )
        if old is None:
            if self.trainer.args.should_save:
                write_json(path, new)
            return
        changed = {name for name in new if old.get(name) != new[name]}
        if refused := changed - set(self.trainer.args.ignore_changed_settings or []):
            raise ValueError(
                f"{describe(self.folder, old, new, refused)} Resume it with the same, or start a new run in "
                "another output_dir."
            )

    def train(
        self,
        name: str,
        *,
        model: nn.Module | None = None,
        labeled: Images | None = None,
        loss: SemiSupervisedLoss | None = None,
        **settings: Any,
    ) -> Round:
        """One training, unless it is over already.

        Args:
            name: of its folder.
            model: where to start from; a new model by default.
            labeled: the labeled set, if it is not the one of all rounds.
            loss: if it is not the one that the settings name.
            settings: that differ from those of all rounds.
        """
        path = self.folder / name / ROUND
        if not from_main(path.is_file):
            trainer = self._trainer(self.folder / name, model, labeled, loss, settings)
            begun = from_main(lambda: bool(checkpoints(path.parent)))
            trainer.train(resume_from_checkpoint=find_checkpoint(path.parent) if begun else None)
            score = self._score(trainer.evaluate())
            trainer.save_model()
            if trainer.args.should_save:
                state = trainer.state
                write_json(path, asdict(Round(name, score, state.global_step, state.best_global_step)))
        PartialState().wait_for_everyone()
        self.done.append(Round(**from_main(lambda: json.loads(path.read_text()))))
        return self.done[-1]

    def _trainer(
        self,
        folder: Path,
        model: nn.Module | None,
        labeled: Images | None,
        loss: SemiSupervisedLoss | None,
        settings: dict[str, Any],
    ) -> FixAStepTrainer:
        args = copy.copy(self.trainer.args)
        own = {"output_dir": str(folder), "seed": args.seed + len(self.done), "push_to_hub": False}
        for name, value in {**own, **settings}.items():
            setattr(args, name, value)
        set_seed(args.seed)
        return type(self.trainer)(
            model or self.make_model(),
            args,
            train_dataset=labeled or self.labeled,
            unlabeled_dataset=self.unlabeled,
            eval_dataset=self.trainer.eval_dataset,
            processing_class=self.trainer.processing_class,
            loss=loss,
        )

    def _score(self, metrics: dict[str, float]) -> float:
        args = self.trainer.args
        score = metrics[f"eval_{(args.metric_for_best_model or 'accuracy').removeprefix('eval_')}"]
        return -score if args.greater_is_better is False else score

    def load(self, done: Round) -> nn.Module:
        """The model of a round."""
        return load_saved(type(self.trainer.core_model), self.folder / done.name)

    def predict(self, done: Round) -> NDArray:
        """Logits [N, K] of the unlabeled images as they are, by the model of a round."""
        self.trainer.load_plain(self.folder / done.name)
        return np.asarray(self.trainer.predict(self.unlabeled).predictions)

    def keep(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors in a file, read if it is there, otherwise made now and written: the same if resumed."""
        path = self.folder / name
        if not from_main(path.is_file):
            tensors = make()
            if self.trainer.args.should_save:
                path.parent.mkdir(parents=True, exist_ok=True)
                with write_atomically(path) as partial:
                    save_file(tensors, partial)
        PartialState().wait_for_everyone()
        return load_file(path)

    def pseudo_labeled(self, rows: Tensor, pseudo_labels: Tensor) -> Images:
        """The labeled images, and those rows of the unlabeled ones as if they were labeled."""
        assert self.labeled.labels is not None
        labels = torch.cat([self.labeled.labels, pseudo_labels])
        pixels = [self.labeled.pixels, self.unlabeled.pixels.index_select(0, rows)]
        channels = max(each.shape[1] for each in pixels)  # one of the two may be grey
        pixels = [each.expand(-1, channels, -1, -1) for each in pixels]
        return Images(torch.cat(pixels), labels, self.labeled.class_names)

    def report(self, outcome: Round) -> None:
        """Give the trainer the model of the outcome, and the steps and log of all rounds as if of one."""
        self.trainer.load_plain(self.folder / outcome.name)
        before = sum(each.steps for each in self.done[: self.done.index(outcome)])
        self.trainer.state.global_step = sum(each.steps for each in self.done)
        self.trainer.state.best_global_step = (
            None if outcome.best_step is None else before + outcome.best_step
        )
        if self.trainer.args.should_save:
            logs, step = [], 0
            for each in self.done:
                log = pd.read_csv(self.folder / each.name / LOG)
                logs.append(log.assign(step=log["step"] + step, round=each.name))
                step += each.steps
            with write_atomically(self.folder / LOG) as partial:
                pd.concat(logs).to_csv(partial, index=False)
            write_json(self.folder / ROUNDS, [asdict(each) for each in self.done])


def from_main(make: Callable[[], T]) -> T:
    """What the main process finds or reads, on all processes."""
    return broadcast_object_list([make() if PartialState().is_main_process else None])[0]


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as partial:
        partial.write_text(json.dumps(content, indent=2))
