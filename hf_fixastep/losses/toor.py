from __future__ import annotations

import itertools
import math
from typing import Any

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
from hf_fixastep.losses.functional import mean_of_repeats, rows_of_all
from hf_fixastep.losses.presets import OLIVER
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.forwards import classification_head, frozen_batchnorm, head_inputs
from hf_fixastep.step.schedules import unlabeled_ramp


TINY = 1e-12


class TOOR(SemiSupervisedLoss):
    """Pi-model on confident images; a discriminator draws those of the others that are near to the labeled.

    Transferable OOD recycling. Both terms have weights of their own, so the unlabeled weight of a run stays
    1. The adversarial term belongs to the unlabeled loss, with its labeled images. In the official code it
    has no gradient, the discriminator's output is shifted before the loss, and the classifier ends in two
    softmaxes; here it has a gradient, no shift, and one softmax.

    Args:
        weight: final weight of the Pi-model's term.
        ramp_steps: of its sigmoid ramp.
        threshold: running confidence above which an image counts as of a known class.
        recycling: transfer weight below which another image is left out.
        adversarial_start: steps before the adversarial term's weight, until then near 0, ramps up to 1.
        adversarial_steps: of this ramp, a sigmoid one.
        reversal_start: steps before the reversed gradient reaches the model.
        reversal_steps: in which it grows, to nearly its full strength in half of them.
        hidden: units in each of the discriminator's two hidden layers.
    """

    name = "toor"
    title = "TOOR"
    paper = "Huang et al., 2020, arXiv 2011.13529"
    citation = """
    @article{huang2022recycling,
      title = {They Are Not Completely Useless: Towards Recycling Transferable Unlabeled Data for
               Class-Mismatched Semi-Supervised Learning},
      author = {Huang, Zhuo and Yang, Jian and Gong, Chen},
      journal = {IEEE Transactions on Multimedia},
      year = {2022},
      note = {arXiv:2011.13529}
    }"""
    settings = {"paper": {**OLIVER, "unlabeled_warmup_steps": 0.0}}
    rival = True
    views = ("weak", "weak_2")
    average_buffers = False
    averages: Tensor  # [unlabeled rows, K] running predictions

    def __init__(
        self,
        weight: float = 20.0,
        ramp_steps: int = 40_000,
        threshold: float = 0.6,
        recycling: float = 0.5,
        adversarial_start: int = 50_000,
        adversarial_steps: int = 500_000,
        reversal_start: int = 25_000,
        reversal_steps: int = 10_000,
        hidden: int = 1024,
    ) -> None:
        super().__init__()
        check_not_negative(weight=weight, recycling=recycling, ramp_steps=ramp_steps)
        check_not_negative(adversarial_start=adversarial_start, reversal_start=reversal_start)
        check_positive(adversarial_steps=adversarial_steps, reversal_steps=reversal_steps, hidden=hidden)
        check_probability(threshold=threshold)
        self.weight, self.ramp_steps = weight, ramp_steps
        self.threshold, self.recycling = threshold, recycling
        self.adversarial_start, self.adversarial_steps = adversarial_start, adversarial_steps
        self.reversal_start, self.reversal_steps = reversal_start, reversal_steps
        self.hidden = hidden

    def prepare(self, model: nn.Module, num_labels: int, unlabeled_rows: int, validation_rows: int) -> None:
        sizes = [classification_head(model, num_labels).in_features, self.hidden, self.hidden, 1]
        self.discriminator = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.register_buffer("averages", torch.zeros(unlabeled_rows, num_labels))

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        (labeled, first), (labeled_features, features) = self.outputs(model, batch, "weak")
        second = self.logits_again(model, batch, "weak_2")
        if self.batchnorm == "separate":  # the unlabeled loss has a graph of its own
            with frozen_batchnorm(model), head_inputs(model, batch.y.shape[1]) as seen:
                model(pixel_values=batch.x)
            labeled_features = seen[0].to(labeled.dtype)
        score = self.averages[batch.index].amax(-1).to(first.dtype)
        known = (score > self.threshold).to(first.dtype)
        first = first.detach().softmax(-1)
        pi = ((second.softmax(-1) - first).square().mean(-1) * known).mean()
        adversarial = self.adversarial(features, labeled_features, score, known, batch)
        self.record(batch.index, first)  # type: ignore[arg-type]
        unlabeled = self.weight * unlabeled_ramp("sigmoid", batch.step + 1, self.ramp_steps) * pi
        ramp = unlabeled_ramp("sigmoid", batch.step + 1 - self.adversarial_start, self.adversarial_steps)
        return Losses(
            self.labeled_loss(labeled, batch.y), unlabeled + ramp * adversarial, {"mask_rate": known.mean()}
        )

    def adversarial(
        self, features: Tensor, labeled_features: Tensor, score: Tensor, known: Tensor, batch: SemiBatch
    ) -> Tensor:
        """Binary cross-entropy of the discriminator, labeled 1 and unlabeled 0, with the model against it."""
        strength = self.reversal(batch.step)
        unlabeled, labeled = (
            self.discriminate(ReverseGradient.apply(rows, strength), self.generator(batch))
            for rows in (features, labeled_features)
        )
        weights = torch.where(known > 0, 1.0, transfer_weights(unlabeled.detach().sigmoid(), score))
        weights = torch.where(weights < self.recycling, 0.0, weights)
        return (weights * F.softplus(unlabeled)).mean() + F.softplus(-labeled).mean()

    def discriminate(self, features: Tensor, generator: torch.Generator) -> Tensor:
        """One logit per row, with dropout of half of the hidden units."""
        for layer in self.discriminator[:-1]:
            features = layer(features).relu()
            features = 2 * features * torch.empty_like(features).bernoulli_(0.5, generator=generator)
        return self.discriminator[-1](features).squeeze(1)

    def reversal(self, step: int) -> float:
        since = max(0, step - self.reversal_start)
        return 2 / (1 + math.exp(-10 * since / self.reversal_steps)) - 1

    def record(self, index: Tensor, predictions: Tensor) -> None:
        index, predictions = rows_of_all(index, predictions)
        predictions = mean_of_repeats(index, predictions, len(self.averages)).to(self.averages.dtype)
        self.averages[index] = (predictions + self.averages[index]) / 2


def transfer_weights(domain: Tensor, score: Tensor) -> Tensor:
    """How near each row is to the labeled images: two relative scores, each weighed by its variance."""
    domain = domain - domain.min()
    domain, score = (values / values.mean().clamp_min(TINY) for values in (domain, score))
    spread, other_spread = (values.var(correction=0) for values in (domain, score))
    return (spread * domain + other_spread * score) / (spread + other_spread).clamp_min(TINY)


class ReverseGradient(torch.autograd.Function):
    """The identity, whose gradient is turned around and multiplied by `strength`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None
