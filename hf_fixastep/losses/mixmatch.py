from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss, check_positive
from hf_fixastep.losses.presets import ADAM
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.forwards import frozen_batchnorm
from hf_fixastep.step.mixing import average_guess, mix_with_each_other


class MixMatch(SemiSupervisedLoss):
    """Labeled and unlabeled images mixed with each other, and trained on their mixed labels and guesses.

    Algorithm 1 of the paper, equations 3 and 4. The official Fix-A-Step code differs in the last three
    settings; the defaults are the paper's mixing and the batch norm of our other losses.

    Args:
        temperature: exponent 1 / temperature sharpens the guesses.
        alpha: shape of the Beta distribution of the mixing shares.
        per_example: one mixing share per image, as in the paper; False for the official code's one per batch.
        update_statistics: guess forwards update the running statistics, as in the official code, if batch
            norm is joint.
        interleave: one forward per chunk of the labeled batch's size, after swapping rows between the chunks,
            as in the official code; joint mode only.
    """

    name = "mixmatch"
    title = "MixMatch"
    paper = "Berthelot et al., 2019, arXiv 1905.02249"
    citation = """
    @inproceedings{berthelot2019mixmatch,
      title = {MixMatch: A Holistic Approach to Semi-Supervised Learning},
      author = {Berthelot, David and Carlini, Nicholas and Goodfellow, Ian and Papernot, Nicolas and Oliver,
                Avital and Raffel, Colin},
      booktitle = {Advances in Neural Information Processing Systems},
      year = {2019},
      note = {arXiv:1905.02249}
    }"""
    settings = {
        "paper": {**ADAM, "unlabeled_weight": 75.0, "unlabeled_warmup_steps": 1.0, "lr_cycle_steps": 0.0},
        "upstream": {
            "unlabeled_ramp": "staircase",
            "unlabeled_warmup_steps": 1048576.0,
            "loss_kwargs": {"per_example": False, "update_statistics": True, "interleave": True},
        },
    }
    views = ("weak", "weak_2")
    mixable = False  # it mixes by itself

    def __init__(
        self,
        temperature: float = 0.5,
        alpha: float = 0.75,
        per_example: bool = True,
        update_statistics: bool = False,
        interleave: bool = False,
    ) -> None:
        super().__init__()
        check_positive(temperature=temperature, alpha=alpha)
        self.temperature = temperature
        self.alpha = alpha
        self.per_example = per_example
        self.update_statistics = update_statistics
        self.interleave = interleave

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        views = [batch.views[name] for name in self.views]
        guess = self.guess(model, views)
        images, y = torch.cat([batch.x, *views]), torch.cat([batch.y, guess, guess])
        images, y = mix_with_each_other(images, y, self.alpha, self.generator(batch), self.per_example)

        count = len(batch.x)
        if self.interleave and self.batchnorm == "joint":
            labeled, unlabeled = interleaved_logits(model, images, count)
        else:
            mixed = replace(batch, x=images[:count], views={"mixed": images[count:]})
            labeled, unlabeled = self.logits(model, mixed, "mixed")
        return Losses(self.labeled_loss(labeled, y[:count]), F.mse_loss(unlabeled.softmax(-1), y[count:]))

    @torch.no_grad()
    def guess(self, model: nn.Module, views: list[Tensor]) -> Tensor:
        """Soft labels [ratio * B, K] of the unlabeled images, from all their views."""
        update = self.update_statistics and self.batchnorm == "joint"
        with contextlib.nullcontext() if update else frozen_batchnorm(model):
            return average_guess([model(pixel_values=view).logits for view in views], self.temperature)


def interleaved_logits(model: nn.Module, images: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Logits of the first `count` images and of the rest, from a forward per interleaved chunk of `count`."""
    if len(images) % count:
        raise ValueError(f"Interleaving {len(images)} rows needs a multiple of the labeled batch's {count}.")
    chunks = [model(pixel_values=chunk).logits for chunk in interleave(list(images.split(count)))]
    labeled, *unlabeled = interleave(chunks)
    return labeled, torch.cat(unlabeled)


def interleave(chunks: list[Tensor]) -> list[Tensor]:
    """Cut each of n chunks into n parts, and swap part k of the first with part k of chunk k.

    Twice is the identity.
    """
    # The last parts get the remainder.
    sizes = [(len(chunks[0]) + part) // len(chunks) for part in range(len(chunks))]
    parts = [list(chunk.split(sizes)) for chunk in chunks]
    for k in range(1, len(chunks)):
        parts[0][k], parts[k][k] = parts[k][k], parts[0][k]
    return [torch.cat(chunk) for chunk in parts]
