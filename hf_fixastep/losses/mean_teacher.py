from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss
from hf_fixastep.step.batch import SemiBatch


class MeanTeacher(SemiSupervisedLoss):
    """Squared distance between the model's and the averaged model's predictions for two weak views.

    Tarvainen and Valpola, 2017, arXiv 1703.01780; the mean is over rows and classes. The authors' code runs
    the teacher in train mode; the official Fix-A-Step code, which we follow, in eval mode: pass it so.
    """

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
