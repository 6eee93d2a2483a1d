from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss, check_positive, check_probability
from hf_fixastep.losses.functional import rows_of_all
from hf_fixastep.step.batch import SemiBatch


TINY = 1e-6  # as in the official code, for a class that is never predicted


class SoftMatch(SemiSupervisedLoss):
    """FixMatch with weights instead of a threshold: 1 above the mean confidence, a Gaussian below it.

    The confidence is that of the prediction after uniform alignment, which lifts the classes that are rarely
    predicted; the pseudo-label is that of the prediction itself. Mean and variance are running averages over
    the unlabeled images of all processes. The paper's Gaussian has their variance; the official code, which
    we follow, divides it by `deviations` squared. That code begins its mean prediction with the first batch,
    we with a uniform one.

    Args:
        momentum: share of the old in the new running averages.
        deviations: below the mean, at one deviation, the weight is that of a Gaussian at so many.
    """

    name = "softmatch"
    title = "SoftMatch"
    paper = "Chen et al., 2023, arXiv 2301.10921"
    citation = """
    @inproceedings{chen2023softmatch,
      title = {SoftMatch: Addressing the Quantity-Quality Trade-off in Semi-supervised Learning},
      author = {Chen, Hao and Tao, Ran and Fan, Yue and Wang, Yidong and Wang, Jindong and Schiele, Bernt and
                Xie, Xing and Raj, Bhiksha and Savvides, Marios},
      booktitle = {International Conference on Learning Representations},
      year = {2023},
      note = {arXiv:2301.10921}
    }"""
    settings = {"paper": {"unlabeled_ratio": 7.0, "unlabeled_warmup_steps": 0.0}}
    views = ("weak", "strong")
    separable = True
    average_buffers = False
    prediction: Tensor  # [K] the running mean
    mean: Tensor  # of the aligned confidences
    variance: Tensor  # the same

    def __init__(self, momentum: float = 0.999, deviations: float = 2.0) -> None:
        super().__init__()
        check_probability(momentum=momentum)
        check_positive(deviations=deviations)
        self.momentum = momentum
        self.deviations = deviations

    def prepare(self, model: nn.Module, num_labels: int, unlabeled_rows: int, validation_rows: int) -> None:
        self.register_buffer("prediction", torch.full((num_labels,), 1 / num_labels))
        self.register_buffer("mean", torch.tensor(1 / num_labels))
        self.register_buffer("variance", torch.tensor(1.0))

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        labeled, strong, weak = self.logits(model, batch, "strong", targets=("weak",))
        predictions = weak.softmax(-1)
        self.update(rows_of_all(batch.index, predictions)[1])  # type: ignore[arg-type]
        weights = self.weights(predictions).to(strong.dtype)
        unlabeled = (F.cross_entropy(strong, predictions.argmax(-1), reduction="none") * weights).mean()
        return Losses(self.labeled_loss(labeled, batch.y), unlabeled, {"mask_rate": weights.mean()})

    def update(self, predictions: Tensor) -> None:
        """Move the running averages towards these predictions [N, K] of all processes."""
        new = 1 - self.momentum
        predictions = predictions.to(self.prediction.dtype)
        self.prediction.lerp_(predictions.mean(0), new)
        confidence = self.confidence(predictions)
        mean = confidence.mean()
        self.mean.lerp_(mean, new)
        self.variance.lerp_((confidence - mean).square().sum() / max(1, len(confidence) - 1), new)

    def confidence(self, predictions: Tensor) -> Tensor:
        """Of each prediction, after it is divided by the running mean prediction."""
        aligned = predictions / (self.prediction + TINY)
        return aligned.amax(-1) / aligned.sum(-1).clamp_min(TINY)

    def weights(self, predictions: Tensor) -> Tensor:
        below = (self.confidence(predictions) - self.mean).clamp_max(0)
        return (-0.5 * (self.deviations * below).square() / self.variance.clamp_min(TINY**2)).exp()
