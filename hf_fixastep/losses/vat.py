from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_fixastep._compat.mixed_precision import plain_forwards
from hf_fixastep.losses.base import Losses, SemiSupervisedLoss, check_positive
from hf_fixastep.losses.presets import ADAM
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.forwards import frozen_batchnorm


class VAT(SemiSupervisedLoss):
    """Divergence between the predictions for an image and for its neighbour where they change most.

    With one power iteration. The official Fix-A-Step code, after Oliver et al., 2018, arXiv 1804.09170, swaps
    the two arguments of the divergence; its `xi` of 1e-6 moves most pixels by less than float32 resolves. In
    joint mode the labeled images are perturbed as well, for the batch statistics alone.

    Args:
        xi: length of the trial step that measures the direction, in normalized pixels.
        eps: length of the perturbation, in normalized pixels.
        reverse_kl: KL(perturbed || clean) as in the official code; False for the paper's
            KL(clean || perturbed).
        safe_normalization: unit vectors to rounding, and no step for an image without gradient; False for the
            additive constants of the official code, which shorten the step where the gradient is small.
    """

    name = "vat"
    title = "VAT"
    paper = "Miyato et al., 2018, arXiv 1704.03976"
    citation = """
    @article{miyato2018virtual,
      title = {Virtual Adversarial Training: A Regularization Method for Supervised and Semi-Supervised
               Learning},
      author = {Miyato, Takeru and Maeda, Shin-ichi and Koyama, Masanori and Ishii, Shin},
      journal = {IEEE Transactions on Pattern Analysis and Machine Intelligence},
      year = {2018},
      note = {arXiv:1704.03976}
    }"""
    settings = {
        "paper": {**ADAM, "unlabeled_weight": 0.3, "lr_cycle_steps": 0.0},
        "upstream": {"loss_kwargs": {"xi": 1e-6, "safe_normalization": False}},
    }
    views = ("weak",)
    separable = True
    upstream_divides_by_all = ("labeled", "unlabeled")

    def __init__(
        self, xi: float = 1e-2, eps: float = 6.0, reverse_kl: bool = True, safe_normalization: bool = True
    ) -> None:
        super().__init__()
        check_positive(xi=xi, eps=eps)
        self.xi = xi
        self.eps = eps
        self.reverse_kl = reverse_kl
        self.safe_normalization = safe_normalization

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        images, count = batch.views["weak"], len(batch.views["weak"])
        labeled, clean = self.logits(model, batch, targets=("weak",))
        if self.batchnorm == "joint":
            images, clean = torch.cat([batch.x, images]), torch.cat([labeled.detach(), clean])

        with frozen_batchnorm(model), full_precision(model, images.device.type) as was_mixed:
            if was_mixed:  # mixed precision rounds the logits by more than xi changes them
                with torch.no_grad():
                    clean = model(pixel_values=images).logits
            direction = self.direction(model, images, clean, self.generator(batch))
            perturbed = model(pixel_values=images + self.eps * direction).logits

        clean, perturbed = clean[-count:], perturbed[-count:]
        unlabeled = divergence(perturbed, clean) if self.reverse_kl else divergence(clean, perturbed)
        return Losses(self.labeled_loss(labeled, batch.y), unlabeled)

    def direction(
        self, model: nn.Module, images: Tensor, clean: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Unit vectors along which the prediction for each image changes most, by one power iteration."""
        normalize = unit if self.safe_normalization else almost_unit
        trial = normalize(torch.empty_like(images).normal_(generator=generator)).requires_grad_()
        change = divergence(clean, model(pixel_values=images + self.xi * trial).logits)
        (gradient,) = torch.autograd.grad(change, trial)
        return normalize(gradient)


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of the predictions from two sets of logits, mean over rows."""
    return F.kl_div(second.log_softmax(-1), first.log_softmax(-1), reduction="batchmean", log_target=True)


def unit(images: Tensor) -> Tensor:
    """Each image divided by its L2 norm; an image of zeros stays."""
    dims = tuple(range(1, images.ndim))
    peak = images.abs().amax(dims, keepdim=True)
    images = images / peak.masked_fill(peak == 0, 1)  # squares of tiny gradients would underflow
    return images / images.square().sum(dims, keepdim=True).sqrt().clamp_min(1)  # at least 1 unless all zeros


def almost_unit(images: Tensor) -> Tensor:
    """The same as the official code computes it."""
    dims = tuple(range(1, images.ndim))
    images = images / (1e-12 + images.abs().amax(dims, keepdim=True))
    return images / (1e-6 + images.square().sum(dims, keepdim=True)).sqrt()


@contextlib.contextmanager
def full_precision(model: nn.Module, device_type: str) -> Iterator[bool]:
    """Forwards inside run without autocast and TF32; gives whether they would have run with one of them."""
    backends: Any = torch.backends
    kernels = (backends.cudnn.conv, backends.cuda.matmul) if device_type == "cuda" else ()
    kept = [kernel.fp32_precision for kernel in kernels]
    was_mixed = torch.is_autocast_enabled(device_type) or "tf32" in kept
    try:
        for kernel in kernels:
            kernel.fp32_precision = "ieee"
        with plain_forwards(model) as was_wrapped, torch.autocast(device_type, enabled=False):
            yield was_mixed or was_wrapped
    finally:
        for kernel, precision in zip(kernels, kept, strict=True):
            kernel.fp32_precision = precision
