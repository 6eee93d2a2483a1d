from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss, check_positive, check_probability
from hf_fixastep.step.batch import SemiBatch


class PseudoLabel(SemiSupervisedLoss):
    """Cross-entropy of the weak view against its own confident predictions.

    The threshold is that of Oliver et al., 2018, arXiv 1804.09170. The mean is over all rows, confident or
    not. The official Fix-A-Step code multiplies the pseudo-label by the number of classes; its soft target
    for the other rows has no gradient and is left out.

    Args:
        threshold: confidence that a prediction must exceed to count.
        multiplier: factor on the loss; None for the number of classes, as in the official code.
    """

    name = "pseudo_label"
    title = "Pseudo-label"
    paper = "Lee, 2013, ICML workshop on challenges in representation learning"
    citation = """
    @inproceedings{lee2013pseudo,
      title = {Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method for Deep Neural
               Networks},
      author = {Lee, Dong-Hyun},
      booktitle = {ICML Workshop on Challenges in Representation Learning},
      year = {2013}
    }"""
    settings = {"upstream": {"loss_kwargs": {"multiplier": None}}}
    views = ("weak",)
    separable = True
    upstream_divides_by_all = ("labeled", "unlabeled")

    def __init__(self, threshold: float = 0.95, multiplier: float | None = 1.0) -> None:
        super().__init__()
        check_probability(threshold=threshold)
        if multiplier is not None:
            check_positive(multiplier=multiplier)
        self.threshold = threshold
        self.multiplier = multiplier

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        labeled, weak = self.logits(model, batch, "weak")
        confidence, pseudo_labels = weak.detach().softmax(-1).max(-1)
        mask = (confidence > self.threshold).to(weak.dtype)
        multiplier = weak.shape[-1] if self.multiplier is None else self.multiplier
        unlabeled = multiplier * (F.cross_entropy(weak, pseudo_labels, reduction="none") * mask).mean()
        return Losses(self.labeled_loss(labeled, batch.y), unlabeled, {"mask_rate": mask.mean()})
