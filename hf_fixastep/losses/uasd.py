from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss, check_not_negative, check_probability
from hf_fixastep.losses.functional import masked_mean, rows_of_all
from hf_fixastep.losses.presets import OLIVER
from hf_fixastep.step.batch import SemiBatch


class UASD(SemiSupervisedLoss):
    """Cross-entropy against the mean of all earlier predictions for an image, where that mean is confident.

    Uncertainty-aware self-distillation. The official code forwards validation images along with the batch,
    where they move its batch statistics; here the threshold comes from the evaluations. It also distills
    labeled images; here only unlabeled ones.

    Args:
        threshold: confidence that a mean prediction needs to count, until the first evaluation.
        calibrate: from then on the mean confidence of the validation images' own mean predictions.
        warmup_steps: steps that only collect predictions.
    """

    name = "uasd"
    title = "UASD"
    paper = "Chen et al., 2020, AAAI"
    citation = """
    @inproceedings{chen2020mismatch,
      title = {Semi-Supervised Learning under Class Distribution Mismatch},
      author = {Chen, Yanbei and Zhu, Xiatian and Li, Wei and Gong, Shaogang},
      booktitle = {AAAI Conference on Artificial Intelligence},
      year = {2020}
    }"""
    settings = {"paper": {**OLIVER, "learning_rate": 1e-3}}
    rival = True
    views = ("weak",)
    separable = True
    average_buffers = False
    sums: Tensor  # [unlabeled rows, K] of all predictions so far
    validation: Tensor  # [validation rows, K] the same
    limit: Tensor  # the threshold of now

    def __init__(self, threshold: float = 0.9, calibrate: bool = True, warmup_steps: int = 100_000) -> None:
        super().__init__()
        check_probability(threshold=threshold)
        check_not_negative(warmup_steps=warmup_steps)
        self.threshold = threshold
        self.calibrate = calibrate
        self.warmup_steps = warmup_steps

    def prepare(self, model: nn.Module, num_labels: int, unlabeled_rows: int, validation_rows: int) -> None:
        self.register_buffer("sums", torch.zeros(unlabeled_rows, num_labels))
        self.register_buffer("validation", torch.zeros(validation_rows, num_labels))
        self.register_buffer("limit", torch.tensor(float(self.threshold)))

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        labeled, weak = self.logits(model, batch, "weak")
        target = ensemble(self.sums[batch.index]).to(weak.dtype)
        mask = (target.amax(-1) >= self.limit).to(weak.dtype) * (batch.step >= self.warmup_steps)
        unlabeled = masked_mean(F.cross_entropy(weak, target, reduction="none"), mask)
        index, predictions = rows_of_all(batch.index, weak.softmax(-1))  # type: ignore[arg-type]
        self.sums.index_put_((index,), predictions.to(self.sums.dtype), accumulate=True)
        return Losses(self.labeled_loss(labeled, batch.y), unlabeled, {"mask_rate": mask.mean()})

    def validated(self, logits: Tensor) -> None:
        if self.calibrate:
            self.validation += logits.float().softmax(-1)
            self.limit.copy_(ensemble(self.validation).amax(-1).mean())


def ensemble(sums: Tensor) -> Tensor:
    """The mean prediction from the sum of some; zeros where there was none."""
    return sums / sums.sum(-1, keepdim=True).clamp_min(1)
