from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss, check_not_negative
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.mixing import mix_with_each_other


class Supervised(SemiSupervisedLoss):
    """Cross-entropy of the labeled images and nothing else: labeled-only, the baseline to beat.

    Args:
        mixup: shape of the Beta distribution by which a batch's images are mixed with each other; 0 is off.
        class_weights: one per class; only ratios count, for the loss is divided by the batch's weights.
    """

    name = "supervised"
    title = "labeled-only"
    settings = {
        "paper": {"learning_rate": 3e-3, "weight_decay": 2e-3},
        "upstream": {"lr_cycle_steps": 390600.0},
    }
    mixable = False

    def __init__(self, mixup: float = 0.0, class_weights: Sequence[float] | None = None) -> None:
        super().__init__()
        check_not_negative(mixup=mixup)
        self.mixup = mixup
        self.class_weights = None if class_weights is None else torch.tensor(class_weights)
        self.weighted_mean = class_weights is not None

    def prepare(self, model: nn.Module, num_labels: int, unlabeled_rows: int, validation_rows: int) -> None:
        if self.class_weights is not None and len(self.class_weights) != num_labels:
            raise ValueError(f"There are {len(self.class_weights)} class_weights, but {num_labels} classes.")

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        if self.mixup:
            x, y = mix_with_each_other(batch.x, batch.y, self.mixup, self.generator(batch))
            batch = replace(batch, x=x, y=y)
        (labeled,) = self.logits(model, batch)
        return Losses(self.labeled_loss(labeled, batch.y), None)
