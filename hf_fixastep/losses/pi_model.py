from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss
from hf_fixastep.step.batch import SemiBatch


class PiModel(SemiSupervisedLoss):
    """Squared distance between the predictions for two weak views.

    Algorithm 1 of the paper; the mean is over rows and classes. The paper stops no gradient there; the
    official Fix-A-Step code takes the first view as a fixed target, and so do we. As in that code the second
    view has a forward of its own in both batch-norm modes.
    """

    name = "pi_model"
    title = "Pi-model"
    paper = "Laine and Aila, 2017, arXiv 1610.02242"
    citation = """
    @inproceedings{laine2017temporal,
      title = {Temporal Ensembling for Semi-Supervised Learning},
      author = {Laine, Samuli and Aila, Timo},
      booktitle = {International Conference on Learning Representations},
      year = {2017},
      note = {arXiv:1610.02242}
    }"""
    settings = {"paper": {"unlabeled_weight": 10.0}}
    views = ("weak", "weak_2")
    separable = True
    upstream_divides_by_all = ("labeled",)

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        labeled, first = self.logits(model, batch, targets=("weak",))
        second = self.view_logits(model, batch, "weak_2")
        return Losses(self.labeled_loss(labeled, batch.y), F.mse_loss(second.softmax(-1), first.softmax(-1)))
