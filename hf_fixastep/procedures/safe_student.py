from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fixastep.losses.base import (
    Losses,
    SemiSupervisedLoss,
    check_not_negative,
    check_positive,
    check_probability,
)
from hf_fixastep.losses.functional import masked_mean
from hf_fixastep.losses.presets import SGD
from hf_fixastep.procedures.base import Procedure
from hf_fixastep.step.batch import SemiBatch


if TYPE_CHECKING:
    from hf_fixastep.procedures.rounds import Round, Rounds


@dataclass
class SafeStudent(Procedure):
    """A teacher tells its student what images show if it knows them, and to be unsure if it does not.

    After the official code. The first teacher is trained with the loss of the settings, which is `supervised`
    in the method; then the student of every iteration is the teacher of the next one. A student goes on from
    the weights of its teacher with a new optimizer. The official code, with batches of 256 + 256 images,
    continues from the last weights instead of the best ones, and lowers its learning rate by 3 percent every
    five epochs.

    Args:
        iterations: how often a student is trained.
        teacher_steps: steps of the first teacher; as many as those of each student if not given.
        seen_share: images above this quantile of a batch's energy discrepancies count as known classes.
        unseen_share: images below this one count as foreign.
        temperature: of the energies.
        seen_weight: of the loss of known images.
        unseen_weight: of the loss of foreign images.
    """

    name = "safe_student"
    title = "Safe-Student"
    paper = "He et al., 2022, CVPR"
    citation = """
    @inproceedings{he2022safestudent,
      title = {Safe-Student for Safe Deep Semi-Supervised Learning with Unseen-Class Unlabeled Data},
      author = {He, Rundong and Han, Zhongyi and Lu, Xiankai and Yin, Yilong},
      booktitle = {IEEE/CVF Conference on Computer Vision and Pattern Recognition},
      year = {2022}
    }"""
    settings = {
        "paper": {
            **SGD,
            "learning_rate": 0.128,
            "unlabeled_warmup_steps": 0.0,
            "labeled_view": "strong",
        }
    }
    rival = True
    iterations: int = 3
    teacher_steps: int | None = None
    seen_share: float = 0.6
    unseen_share: float = 0.1
    temperature: float = 10.0
    seen_weight: float = 0.3
    unseen_weight: float = 0.05

    def __post_init__(self) -> None:
        check_positive(iterations=self.iterations, temperature=self.temperature)
        check_positive(teacher_steps=1 if self.teacher_steps is None else self.teacher_steps)
        check_probability(seen_share=self.seen_share, unseen_share=self.unseen_share)
        check_not_negative(seen_weight=self.seen_weight, unseen_weight=self.unseen_weight)

    def __call__(self, rounds: Rounds) -> Round:
        teacher = rounds.train("teacher", max_steps=self.teacher_steps or rounds.trainer.args.max_steps)
        for number in range(1, self.iterations + 1):
            answers = rounds.keep(f"student-{number}/teacher.safetensors", partial(self.ask, rounds, teacher))
            loss = SafeStudentLoss(
                answers["logits"],
                seen_share=self.seen_share,
                unseen_share=self.unseen_share,
                temperature=self.temperature,
                seen_weight=self.seen_weight,
                unseen_weight=self.unseen_weight,
            )
            teacher = rounds.train(f"student-{number}", model=rounds.load(teacher), loss=loss)
        return teacher

    def ask(self, rounds: Rounds, teacher: Round) -> dict[str, Tensor]:
        return {"logits": torch.from_numpy(rounds.predict(teacher))}


class SafeStudentLoss(SemiSupervisedLoss):
    """Agree with the teacher on images of known classes, and be undecided on foreign ones.

    The official code multiplies masks [B, 1] by losses [B], which selects nothing; here each image has its
    own mask.

    Args:
        teacher_logits: the teacher's answers for all unlabeled images [N, K], without augmentation; the rest
            is as in `SafeStudent`.
    """

    views = ("strong",)
    separable = True
    average_buffers = False
    teacher_logits: Tensor

    def __init__(
        self,
        teacher_logits: Tensor,
        seen_share: float = 0.6,
        unseen_share: float = 0.1,
        temperature: float = 10.0,
        seen_weight: float = 0.3,
        unseen_weight: float = 0.05,
    ) -> None:
        super().__init__()
        # The round has them in a file.
        self.register_buffer("teacher_logits", teacher_logits, persistent=False)
        self.seen_share = seen_share
        self.unseen_share = unseen_share
        self.temperature = temperature
        self.seen_weight = seen_weight
        self.unseen_weight = unseen_weight

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        labeled, student = self.logits(model, batch, "strong")
        answers = self.teacher_logits[batch.index]
        seen, unseen = (mask.to(student.dtype) for mask in self.masks(answers))
        known = F.cross_entropy(student, answers.argmax(-1), reduction="none")
        log_student, log_answers = student.log_softmax(-1), answers.log_softmax(-1)
        known = known + F.kl_div(log_student, log_answers, reduction="none", log_target=True).sum(-1)
        foreign = -log_student.mean(-1) - math.log(student.shape[1])  # KL(uniform || student)
        unlabeled = self.seen_weight * masked_mean(known, seen) + self.unseen_weight * masked_mean(
            foreign, unseen
        )
        return Losses(self.labeled_loss(labeled, batch.y), unlabeled)

    def masks(self, answers: Tensor) -> tuple[Tensor, Tensor]:
        """Which images of a batch count as known, and which as foreign."""
        discrepancy = energy_discrepancy(answers, self.temperature)
        seen_from, unseen_to = discrepancy.quantile(
            discrepancy.new_tensor([self.seen_share, self.unseen_share])
        )
        return discrepancy > seen_from, discrepancy < unseen_to


def energy_discrepancy(logits: Tensor, temperature: float) -> Tensor:
    """How much the energy changes without the largest logit: large for images that the network knows."""
    scaled = logits / temperature
    others = scaled.scatter(1, scaled.argmax(1, keepdim=True), -torch.inf)
    return temperature * (scaled.logsumexp(1) - others.logsumexp(1))
