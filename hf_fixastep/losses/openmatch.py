from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss, check_not_negative, check_probability
from hf_fixastep.losses.functional import masked_mean
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.forwards import classification_head, head_inputs


class OpenMatch(SemiSupervisedLoss):
    """FixMatch on the images that one-vs-all classifiers, one per class, take for inliers.

    The terms of labeled images (cross-entropy, one-vs-all) are the labeled loss, those of unlabeled images
    the unlabeled one. Labeled images have one view here, not two, and may be mixed: a term of a label counts
    by its share. The official code chooses inliers of the whole set once per epoch, with the averaged
    network; here the same network looks at each batch. That code gives labeled images strong views in the
    first epochs by accident, which is not copied.

    Args:
        entropy_weight: of the one-vs-all classifiers' entropy on unlabeled images.
        consistency_weight: of the squared distance between their answers for two weak views.
        threshold: confidence that the pseudo-label of an inlier needs to count.
        warmup_steps: steps before inliers are chosen.
        decay: share of the old in the new averaged one-vs-all layer; the same as the run's teacher_decay.
    """

    name = "openmatch"
    title = "OpenMatch"
    paper = "Saito et al., 2021, arXiv 2105.14148"
    citation = """
    @inproceedings{saito2021openmatch,
      title = {OpenMatch: Open-Set Semi-supervised Learning with Open-set Consistency Regularization},
      author = {Saito, Kuniaki and Kim, Donghyun and Saenko, Kate},
      booktitle = {Advances in Neural Information Processing Systems},
      year = {2021},
      note = {arXiv:2105.14148}
    }"""
    settings = {"paper": {"unlabeled_ratio": 2.0, "unlabeled_warmup_steps": 0.0}}
    rival = True
    views = ("weak", "weak_2", "strong")
    separable = True
    average_buffers = False
    averaged: Tensor  # the averaged weight of the one-vs-all layer

    def __init__(
        self,
        entropy_weight: float = 0.1,
        consistency_weight: float = 0.5,
        threshold: float = 0.0,
        warmup_steps: int = 10_240,
        decay: float = 0.999,
    ) -> None:
        super().__init__()
        check_not_negative(entropy_weight=entropy_weight, consistency_weight=consistency_weight)
        check_not_negative(warmup_steps=warmup_steps)
        check_probability(threshold=threshold, decay=decay)
        self.entropy_weight = entropy_weight
        self.consistency_weight = consistency_weight
        self.threshold = threshold
        self.warmup_steps = warmup_steps
        self.decay = decay

    def prepare(self, model: nn.Module, num_labels: int, unlabeled_rows: int, validation_rows: int) -> None:
        if num_labels < 2:
            raise ValueError(
                "OpenMatch sets each class against the nearest other one, but the labeled images have one "
                "class; choose another loss, or give images of two."
            )
        self.one_vs_all = nn.Linear(
            classification_head(model, num_labels).in_features, 2 * num_labels, bias=False
        )
        self.register_buffer("averaged", self.one_vs_all.weight.detach().clone())

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        if teacher is None:
            raise ValueError("OpenMatch needs a teacher, the averaged model in eval mode, got None.")
        self.averaged.lerp_(self.one_vs_all.weight.detach(), 1 - self.decay)
        chooses = batch.step >= self.warmup_steps
        logits, features = self.outputs(model, batch, *self.views[: None if chooses else 2])
        first, second = (log_answers(self.one_vs_all(rows)) for rows in features[1:3])
        unlabeled = self.entropy_weight * (entropy(first) + entropy(second)) / 2
        unlabeled = (
            unlabeled + self.consistency_weight * (first.exp() - second.exp()).square().sum((1, 2)).mean()
        )
        stats = {}
        if chooses:
            fixmatch, stats["mask_rate"] = self.fixmatch(
                logits[1].detach(), logits[3], teacher, batch.views["weak"]
            )
            unlabeled = unlabeled + fixmatch
        return Losses(self.labeled_terms(logits[0], features[0], batch.y), unlabeled, stats)

    def fixmatch(
        self, weak: Tensor, strong: Tensor, teacher: nn.Module, images: Tensor
    ) -> tuple[Tensor, Tensor]:
        """FixMatch's loss as a mean over inliers, and the share of all rows that counted."""
        inlier = self.outlier_score(teacher, images) < 0.5
        confidence, pseudo_labels = weak.softmax(-1).max(-1)
        losses = F.cross_entropy(strong, pseudo_labels, reduction="none")
        confident = confidence >= self.threshold
        return masked_mean(losses * confident, inlier.to(strong.dtype)), (inlier & confident).float().mean()

    def labeled_part(self, model: nn.Module, batch: SemiBatch) -> Tensor:
        (logits,), (features,) = self.outputs(model, batch)
        return self.labeled_terms(logits, features, batch.y)

    def labeled_terms(self, logits: Tensor | None, features: Tensor | None, y: Tensor) -> Tensor:
        """Cross-entropy, and each label's own one-vs-all loss plus that of the most mistaken other one."""
        if logits is None or features is None:
            return None  # type: ignore[return-value]
        outlier, inlier = (-log_answers(self.one_vs_all(features))).unbind(1)  # [B, K] each
        worst, second_worst = outlier.topk(2).values.split(1, dim=1)
        # For each label the worst of the other classes.
        others = torch.where(outlier == worst, second_worst, worst)
        return self.labeled_loss(logits, y) + (y * (inlier + others)).sum(-1).mean()

    @torch.no_grad()
    def outlier_score(self, model: nn.Module, images: Tensor) -> Tensor:
        """Probability of "outlier" by the classifier of the predicted class, both averaged."""
        with head_inputs(model, self.averaged.shape[0] // 2) as seen:
            predicted = model(pixel_values=images).logits.argmax(-1, keepdim=True)
        outlier = log_answers(F.linear(seen[0].to(self.averaged.dtype), self.averaged))[:, 0].exp()
        return outlier.gather(1, predicted).squeeze(1)


def log_answers(values: Tensor) -> Tensor:
    """Log-probabilities [N, 2, K] of "outlier" and "inlier" for each class."""
    return values.view(len(values), 2, -1).log_softmax(1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Of each classifier's answer, mean over images and classes."""
    return -(log_probabilities.exp() * log_probabilities).sum(1).mean()
