from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss, check_probability
from hf_fixastep.losses.functional import rows_of_all
from hf_fixastep.step.batch import SemiBatch


class FlexMatch(SemiSupervisedLoss):
    """FixMatch with a threshold of its own for each class, which is lower where less has been learned.

    Algorithm 1 of the paper, with its warm-up of the thresholds and its convex mapping. The official code
    also counts a confidence that equals the threshold, and has a memory on each process; here all share one.

    Args:
        threshold: confidence that counts as learned, and threshold of the class that is learned best.
    """

    name = "flexmatch"
    title = "FlexMatch"
    paper = "Zhang et al., 2021, arXiv 2110.08263"
    citation = """
    @inproceedings{zhang2021flexmatch,
      title = {FlexMatch: Boosting Semi-Supervised Learning with Curriculum Pseudo Labeling},
      author = {Zhang, Bowen and Wang, Yidong and Hou, Wenxin and Wu, Hao and Wang, Jindong and
                Okumura, Manabu and Shinozaki, Takahiro},
      booktitle = {Advances in Neural Information Processing Systems},
      year = {2021},
      note = {arXiv:2110.08263}
    }"""
    settings = {"paper": {"unlabeled_ratio": 7.0, "unlabeled_warmup_steps": 0.0}}
    views = ("weak", "strong")
    separable = True
    average_buffers = False
    selected: Tensor  # [unlabeled rows] the last confident pseudo-label, or the number of classes before one

    def __init__(self, threshold: float = 0.95) -> None:
        super().__init__()
        check_probability(threshold=threshold)
        self.threshold = threshold

    def prepare(self, model: nn.Module, num_labels: int, unlabeled_rows: int, validation_rows: int) -> None:
        self.num_labels = num_labels
        self.register_buffer("selected", torch.full((unlabeled_rows,), num_labels))

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        labeled, strong, weak = self.logits(model, batch, "strong", targets=("weak",))
        confidence, pseudo_labels = weak.softmax(-1).max(-1)
        mask = (confidence > self.thresholds()[pseudo_labels]).to(strong.dtype)
        confident = torch.where(confidence > self.threshold, pseudo_labels, -1)
        self.record(batch.index, confident)  # type: ignore[arg-type]
        unlabeled = (F.cross_entropy(strong, pseudo_labels, reduction="none") * mask).mean()
        return Losses(self.labeled_loss(labeled, batch.y), unlabeled, {"mask_rate": mask.mean()})

    def thresholds(self) -> Tensor:
        """One for each class [K], from how many images were last taken for it."""
        counts = self.selected.new_zeros(self.num_labels + 1)
        counts.scatter_add_(0, self.selected, torch.ones_like(self.selected))
        # The images without a label yet are in the maximum: that is the warm-up.
        learned = counts[:-1] / counts.amax()
        return self.threshold * learned / (2 - learned)

    def record(self, index: Tensor, labels: Tensor) -> None:
        """Remember the labels that are not -1."""
        index, values = rows_of_all(index, labels[:, None])
        # Of an image that comes twice in a step any label would do, but all processes need the same one.
        latest = torch.full_like(self.selected, -1)
        latest.scatter_reduce_(0, index, values.squeeze(1).to(latest.dtype), "amax")
        self.selected.copy_(torch.where(latest < 0, self.selected, latest))
