from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_fixastep.losses.base import check_not_negative, check_positive
from hf_fixastep.losses.presets import SGD
from hf_fixastep.procedures.base import Procedure


if TYPE_CHECKING:
    from hf_fixastep.procedures.rounds import Round, Rounds


@dataclass
class CurriculumLabeling(Procedure):
    """Train anew, round by round, on the labeled images and a growing share of pseudo-labeled ones.

    The first round is labeled-only, the last one has all images; the outcome is the round that is best on the
    validation images. The official code, with batches of 512 images, averages weights by SWA; here it is the
    teacher as everywhere. Its augmentation is RandAugment and Cutout in another variant.

    With another loss than `supervised` the pseudo-labeled images join the labeled ones, and stay unlabeled
    ones too.

    Args:
        percent: how much larger the share gets from round to round.
        mixup: shape of the Beta distribution of MixUp, for the loss `supervised`.
    """

    name = "curriculum_labeling"
    title = "Curriculum Labeling"
    paper = "Cascante-Bonilla et al., 2021, arXiv 2001.06001"
    citation = """
    @inproceedings{cascante2021curriculum,
      title = {Curriculum Labeling: Revisiting Pseudo-Labeling for Semi-Supervised Learning},
      author = {Cascante-Bonilla, Paola and Tan, Fuwen and Qi, Yanjun and Ordonez, Vicente},
      booktitle = {AAAI Conference on Artificial Intelligence},
      year = {2021}
    }"""
    settings = {
        "paper": {
            **SGD,
            "learning_rate": 0.1,
            "lr_cycle_steps": 0.0,
            "lr_scheduler_type": "cosine",
            "labeled_view": "strong",
        }
    }
    rival = True
    percent: float = 20.0
    mixup: float = 1.0

    def __post_init__(self) -> None:
        check_positive(percent=self.percent)
        check_not_negative(mixup=self.mixup)

    def __call__(self, rounds: Rounds) -> Round:
        done = [rounds.train("round-0", loss_kwargs=self.loss_kwargs(rounds))]
        for number in range(1, math.ceil(100 / self.percent) + 1):
            choose = partial(self.choose, rounds, done[-1], 100 - number * self.percent)
            chosen = rounds.keep(f"round-{number}/pseudo_labels.safetensors", choose)
            labeled = rounds.pseudo_labeled(**chosen)
            kwargs = self.loss_kwargs(rounds, labeled.labels)
            done.append(rounds.train(f"round-{number}", labeled=labeled, loss_kwargs=kwargs))
        return max(done, key=lambda each: each.score)  # the earliest of equals

    def loss_kwargs(self, rounds: Rounds, labels: Tensor | None = None) -> dict[str, Any]:
        """What the loss of a round gets, class weights from these labels among it."""
        kwargs = dict(rounds.trainer.args.loss_kwargs)  # type: ignore[arg-type]
        if rounds.trainer.args.loss == "supervised":
            weights = None if labels is None else class_weights(labels, len(rounds.trainer.class_names))
            kwargs |= {"mixup": self.mixup, "class_weights": weights}
        return kwargs

    def choose(self, rounds: Rounds, last: Round, percentile: float) -> dict[str, Tensor]:
        return confident_rows(rounds.predict(last), percentile)


def confident_rows(logits: NDArray, percentile: float) -> dict[str, Tensor]:
    """Rows whose confidence is at or above that percentile of all, and their predicted classes."""
    logits = logits.astype(np.float64)
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    confidence = 1 / powers.sum(-1)  # the largest probability; in float32 many would be 1
    rows = np.flatnonzero(confidence >= np.percentile(confidence, max(percentile, 0.0)))
    return {"rows": torch.from_numpy(rows), "pseudo_labels": torch.from_numpy(logits[rows].argmax(-1))}


def class_weights(labels: Tensor, num_labels: int) -> list[float]:
    """Images of other classes per image of the class; the official code's division by 100 changes nothing."""
    counts = torch.bincount(labels, minlength=num_labels)
    return ((len(labels) - counts) / counts.clamp_min(1)).tolist()
