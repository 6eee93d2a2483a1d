from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hf_fixastep.checks import check_choice
from hf_fixastep.losses.base import Losses, SemiSupervisedLoss
from hf_fixastep.step.batch import SemiBatch


class MeanTeacher(SemiSupervisedLoss):
    """Squared distance between the model's and the averaged model's predictions for two views of an image.

    The mean is over rows and classes. The authors' code runs the teacher in train mode; the official
    Fix-A-Step code, which we follow, in eval mode: pass it so.

    Args:
        student_view: what the model sees: weak, as in the paper, and the teacher another weak view; or
            strong, and the teacher the weak one.
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
    views: tuple[str, str] = ("weak", "weak_2")  # of the model and of the teacher
    separable = True
    upstream_divides_by_all = ("labeled",)

    def __init__(self, student_view: str = "weak") -> None:
        super().__init__()
        if check_choice("student_view", student_view, ("weak", "strong")) == "strong":
            self.views = ("strong", "weak")

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        if teacher is None:
            raise ValueError("MeanTeacher needs a teacher, the averaged model in eval mode, got None.")
        of_student, of_teacher = self.views
        labeled, student = self.logits(model, batch, of_student)
        with torch.no_grad():
            target = teacher(pixel_values=batch.views[of_teacher]).logits.softmax(-1)
        return Losses(self.labeled_loss(labeled, batch.y), F.mse_loss(student.softmax(-1), target))
