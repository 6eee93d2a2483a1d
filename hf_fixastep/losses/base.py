"""What every loss is: two numbers from a model, a batch and a teacher."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.forwards import frozen_batchnorm, head_inputs


@dataclass
class Losses:
    """The two losses of one step, unweighted, with whatever is worth logging."""

    labeled: Tensor  # None if the batch is only its unlabeled part
    unlabeled: Tensor | None  # None: the loss has no unlabeled part
    stats: dict[str, Tensor] = field(default_factory=dict)


class Method:
    """What a loss or a procedure states about itself; tables, cards and presets are made from it."""

    name: str  # its key in `LOSSES` or `PROCEDURES`
    title: str  # in tables and cards
    paper: str | None = None  # who, when, where
    citation: str | None = None  # the same as BibTeX
    settings: dict[str, dict[str, Any]] = {}  # by preset, where they depart from `presets.SHARED`
    rival = False  # made for foreign classes in the unlabeled images, so that Fix-A-Step is compared with it


class SemiSupervisedLoss(Method, nn.Module):
    """Base of all losses. Subclasses state the views they need and implement `forward`.

    A loss never calls backward, never logs, never reads the config and never knows about the gate.
    """

    views: tuple[str, ...] = ()
    mixable = True  # False where mixing the labeled images (phase 1) does not apply
    # True where `forward` also takes a batch without labeled images, if batch norm is separate, and leaves
    # them to `labeled_part`: the trainer then keeps one graph at a time, and phase 1 guesses from the logits
    # of the views.
    separable = False
    batchnorm = "joint"  # or "separate"; the trainer sets it
    class_weights: Tensor | None = None  # [K]; the trainer sets it, and the next line
    # Divide by the weights of the batch, as the official base code does, not by its rows.
    weighted_mean = False
    learning_rate_factor = 1.0  # of the loss's own parameters, to the model's learning rate
    # On several processes the trainer averages floating buffers after every step; False where they are equal
    # without that.
    average_buffers = True
    # Which of the two losses the official base code divides by labeled + unlabeled rows instead of its own.
    upstream_divides_by_all: tuple[str, ...] = ()

    def prepare(self, model: nn.Module, num_labels: int, unlabeled_rows: int, validation_rows: int) -> None:
        """Make own layers and per-example state, anew for every training.

        Args:
            model: on the CPU or its device.
            validation_rows: images that `validated` is going to see; 0 if there are none.
        """

    def validated(self, logits: Tensor) -> None:
        """Called after every evaluation in training, with the averaged model's validation logits."""

    def outlier_score(self, model: nn.Module, images: Tensor) -> Tensor | None:
        """How foreign each image is, 0 to 1, by the loss's own measure, if any; the model is in eval mode."""
        return None

    def labeled_loss(self, logits: Any, y: Tensor) -> Any:
        if logits is None:
            return None
        loss = F.cross_entropy(logits, y, weight=self.class_weights)
        if self.weighted_mean and self.class_weights is not None:
            return loss / (y @ self.class_weights.to(y.dtype)).mean()
        return loss

    @property
    def in_parts(self) -> bool:
        """Whether the two losses can be had one after the other, with one graph at a time."""
        return self.separable and self.batchnorm == "separate"

    def labeled_part(self, model: nn.Module, batch: SemiBatch) -> Tensor:
        """The labeled loss alone, for a separable loss whose batch norm is separate."""
        return self.labeled_loss(model(pixel_values=batch.x).logits, batch.y)

    def logits(
        self, model: nn.Module, batch: SemiBatch, *views: str, targets: tuple[str, ...] = ()
    ) -> tuple[Any, ...]:
        """Logits of the labeled images, of each view, and of each target, the last without gradient.

        Joint: one forward, all rows share their batch statistics, which update the running ones.
        Separate: one forward each; only the labeled images, if there are any, update the running statistics.
        """
        if self.batchnorm == "joint":
            images = (batch.x, *(batch.views[name] for name in (*views, *targets)))
            logits = model(pixel_values=torch.cat(images)).logits.split([len(i) for i in images])
            return *logits[: 1 + len(views)], *(t.detach() for t in logits[1 + len(views) :])
        labeled = None if batch.x is None else model(pixel_values=batch.x).logits
        graded = [self.view_logits(model, batch, name) for name in views]
        with torch.no_grad():
            return labeled, *graded, *(self.view_logits(model, batch, name) for name in targets)

    def view_logits(self, model: nn.Module, batch: SemiBatch, view: str) -> Tensor:
        """Logits of one view from a forward of its own, which phase 1 may then take as guesses."""
        with frozen_batchnorm(model):
            logits = model(pixel_values=batch.views[view]).logits
        batch.logits[view] = logits.detach()
        return logits

    def logits_again(self, model: nn.Module, batch: SemiBatch, view: str) -> Tensor:
        """Logits of one view from a second forward: joint, beside the labeled images, as in the first."""
        if self.batchnorm == "separate":
            return self.view_logits(model, batch, view)
        with frozen_batchnorm(model):
            return self.logits(model, batch, view)[1]

    def outputs(self, model: nn.Module, batch: SemiBatch, *views: str) -> tuple[tuple[Any, ...], list[Any]]:
        """`logits`, and the features that they come from: what the classification head sees."""
        with head_inputs(model, batch.y.shape[1]) as seen:
            logits = self.logits(model, batch, *views)
        if self.batchnorm == "joint":
            features: list[Any] = list(seen[0].split([len(rows) for rows in logits]))
        else:
            features = [None, *seen] if batch.x is None else seen
        pairs = zip(features, logits, strict=True)  # autocast leaves features in half precision
        return logits, [None if rows is None else rows.to(answers.dtype) for rows, answers in pairs]

    def generator(self, batch: SemiBatch) -> torch.Generator:
        if batch.generator is None:  # torch would silently fall back on the global one
            raise ValueError(
                f"{type(self).__name__} draws at random and needs a batch with a generator, got None."
            )
        return batch.generator

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        raise NotImplementedError


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, (int, float)) and 0 < value < math.inf):
            raise ValueError(f"{name} must be a positive number, not {value!r}.")


def check_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
            raise ValueError(f"{name} must be a number of at least 0, not {value!r}.")


def check_probability(**values: float) -> None:
    for name, value in values.items():
        if not (isinstance(value, (int, float)) and 0 <= value <= 1):
            raise ValueError(f"{name} must be a number from 0 to 1, not {value!r}.")
