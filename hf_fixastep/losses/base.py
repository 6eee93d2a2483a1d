"""What every loss is: two numbers from a model, a batch and a teacher."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fixastep.functional import SemiBatch, frozen_batchnorm


@dataclass
class Losses:
    """The two losses of one step, unweighted, with whatever is worth logging."""

    labeled: Tensor
    unlabeled: Tensor | None  # None: the loss has no unlabeled part
    stats: dict[str, Tensor] = field(default_factory=dict)


class SemiSupervisedLoss(nn.Module):
    """Base of all losses. Subclasses state the views they need and implement `forward`.

    A loss never calls backward, never logs, never reads the config and never knows about the gate. On several
    processes the trainer averages its floating buffers after every step.
    """

    views: tuple[str, ...] = ()
    mixable = True  # False where mixing the labeled images (phase 1) does not apply
    batchnorm = "joint"  # or "separate"; the trainer sets it
    # Which of the two losses the official base code divides by labeled + unlabeled rows instead of its own.
    upstream_divides_by_all: tuple[str, ...] = ()

    def labeled_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y)

    def logits(
        self, model: nn.Module, x: Tensor, *views: Tensor, targets: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        """Logits of the labeled images, of each view, and of each target, the last without gradient.

        Joint: one forward, all rows share their batch statistics, which update the running ones.
        Separate: one forward each; only the labeled images update the running statistics.
        """
        if self.batchnorm == "joint":
            images = (x, *views, *targets)
            logits = model(pixel_values=torch.cat(images)).logits.split([len(i) for i in images])
            return *logits[: 1 + len(views)], *(t.detach() for t in logits[1 + len(views) :])
        labeled = model(pixel_values=x).logits
        with frozen_batchnorm(model):
            graded = [model(pixel_values=view).logits for view in views]
            with torch.no_grad():
                return labeled, *graded, *(model(pixel_values=target).logits for target in targets)

    def generator(self, batch: SemiBatch) -> torch.Generator:
        if batch.generator is None:  # torch would silently fall back on the global one
            raise ValueError(f"{type(self).__name__} draws at random and needs a batch with a generator, got None.")
        return batch.generator

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        raise NotImplementedError


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise ValueError(f"{name} must be a positive number, not {value!r}.")


def check_probability(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, (int, float)) and 0 <= value <= 1):
            raise ValueError(f"{name} must be a number from 0 to 1, not {value!r}.")
