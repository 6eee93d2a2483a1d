from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss
from hf_fixastep.step.batch import SemiBatch


class MeanTeacher(SemiSupervisedLoss):
    """Squared distance between the model's and the averaged model's predictions for two weak views.

    The mean is over rows and classes. The authors' code runs the teacher in train mode; the official
    Fix-A-Step code, which we follow, in eval mode: pass it so.
    """

    name = "mean_teacher"
    title = "Mean Teacher"
    paper = "Tarvainen and Valpola, 2017, arXiv 1703.01780"
    citation = """
    @inproceedings{tarvainen2017mean,
      title = {Mean Teachers Are Better Role Models: Weight-Averaged Consistency Targets Improve
               Semi-Supervised Deep Learning Results},
      author = {Tarvainen, Antti and Valpola, Harri},
      booktitle = {Advances in Neural Information Processing Systems},
      year = {2017},
      note = {arXiv:1703.01780}
    }"""
    settings = {"paper": {"unlabeled_weight": 50.0}}
    views = ("weak", "weak_2")
    separable = True
    upstream_divides_by_all = ("labeled",)

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        if teacher is None:
            raise ValueError("MeanTeacher needs a teacher, the averaged model in eval mode, got None.")
        labeled, student = self.logits(model, batch, "weak")
        with torch.no_grad():
            target = teacher(pixel_values=batch.views["weak_2"]).logits.softmax(-1)
        return Losses(self.labeled_loss(labeled, batch.y), F.mse_loss(student.softmax(-1), target))
