from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss, check_positive, check_probability
from hf_fixastep.step.batch import SemiBatch


class FixMatch(SemiSupervisedLoss):
    """Cross-entropy of the strong view against confident pseudo-labels of the weak view.

    Equation 4 of the paper; the mean is over all rows, confident or not.

    Args:
        threshold: confidence that a pseudo-label needs to count.
        temperature: divides the logits of both views, before the confidence is read and in the cross-entropy;
            below 1 where the softmax of a pretrained head is flat.
    """

    name = "fixmatch"
    title = "FixMatch"
    paper = "Sohn et al., 2020, arXiv 2001.07685"
    citation = """
    @inproceedings{sohn2020fixmatch,
      title = {FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence},
      author = {Sohn, Kihyuk and Berthelot, David and Li, Chun-Liang and Zhang, Zizhao and Carlini, Nicholas
                and Cubuk, Ekin D. and Kurakin, Alex and Zhang, Han and Raffel, Colin},
      booktitle = {Advances in Neural Information Processing Systems},
      year = {2020},
      note = {arXiv:2001.07685}
    }"""
    settings = {
        "paper": {"unlabeled_ratio": 7.0, "unlabeled_warmup_steps": 0.0},
        "upstream": {"lr_cycle_steps": 390600.0},
    }
    views = ("weak", "strong")
    separable = True

    def __init__(self, threshold: float = 0.95, temperature: float = 1.0) -> None:
        super().__init__()
        check_probability(threshold=threshold)
        check_positive(temperature=temperature)
        self.threshold = threshold
        self.temperature = temperature

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        labeled, strong, weak = self.logits(model, batch, "strong", targets=("weak",))
        confidence, pseudo_labels = (weak / self.temperature).softmax(-1).max(-1)
        mask = (confidence >= self.threshold).to(strong.dtype)
        unlabeled = F.cross_entropy(strong / self.temperature, pseudo_labels, reduction="none")
        unlabeled = (unlabeled * mask).mean()
        return Losses(self.labeled_loss(labeled, batch.y), unlabeled, {"mask_rate": mask.mean()})
