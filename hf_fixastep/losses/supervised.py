from __future__ import annotations

from torch import nn

from hf_fixastep.functional import SemiBatch
from hf_fixastep.losses.base import Losses, SemiSupervisedLoss


class Supervised(SemiSupervisedLoss):
    """Cross-entropy of the labeled images alone: the baseline that every other loss has to beat."""

    mixable = False

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        (labeled,) = self.logits(model, batch)
        return Losses(self.labeled_loss(labeled, batch.y), None)
