"""Small pure helpers that mixing and losses share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass
class SemiBatch:
    """One labeled batch and the views of one unlabeled batch, normalized, on the device."""

    x: Tensor  # [B, C, H, W]
    y: Tensor  # [B, K] probabilities, one-hot unless mixed
    views: dict[str, Tensor]  # name -> [ratio * B, C, H, W]
    index: Tensor | None = None  # [ratio * B] rows of the unlabeled set, the key of per-example state
    generator: torch.Generator | None = None  # on the images' device, for a loss that draws
    logits: dict[str, Tensor] = field(default_factory=dict)  # of views that a loss has forwarded apart, no gradient

    def unlabeled_part(self) -> SemiBatch:
        """The same batch for a loss that shall leave the labeled images, None here, for later."""
        return replace(self, x=None)  # type: ignore[arg-type]


def batchnorm_layers(model: nn.Module) -> list[_BatchNorm]:
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


@contextlib.contextmanager
def frozen_batchnorm(model: nn.Module) -> Iterator[None]:
    """Normalize with the statistics of the batch, but leave the running statistics as they are."""
    layers = batchnorm_layers(model)
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


def class_weights(counts: Tensor) -> Tensor:
    """Inverse to the images of each class, with the sum 1."""
    if len(absent := (counts == 0).nonzero()):
        raise ValueError(
            f"Class {int(absent[0])} has no labeled image, so it has no weight: label one, or set class_weights to "
            "none."
        )
    inverse = counts.double().reciprocal()
    return (inverse / inverse.sum()).float()


def sharpen(probabilities: Tensor, temperature: float) -> Tensor:
    """Raise to 1 / temperature and renormalize; below 1 the largest class gains."""
    peak = probabilities.amax(-1, keepdim=True)  # else all powers underflow at low temperatures
    powered = (probabilities / peak) ** (1 / temperature)
    return powered / powered.sum(-1, keepdim=True)


def average_guess(logits: list[Tensor], temperature: float) -> Tensor:
    """Sharpened mean prediction of several views of the same images."""
    return sharpen(torch.stack([view.softmax(-1) for view in logits]).mean(0), temperature)


def mixing_shares(count: int, alpha: float, generator: torch.Generator) -> Tensor:
    """`count` draws of max(b, 1 - b) with b from Beta(alpha, alpha), on the generator's device."""
    # torch.distributions.Beta takes no generator; a Beta draw is the share of one of two Gamma draws.
    concentration = torch.full((2, count), alpha, dtype=torch.float64, device=generator.device)
    first, second = torch._standard_gamma(concentration, generator=generator)
    total = first + second
    underflow = total <= 2 * torch.finfo(total.dtype).tiny  # of both draws, at tiny alpha, where shares are nearly 1
    return (torch.maximum(first, second) / total).masked_fill(underflow, 1.0).float()


def mixup(first: Tensor, second: Tensor, shares: Tensor) -> Tensor:
    """`shares` of the first and the rest of the second, row by row."""
    shares = shares.to(first.dtype).view(-1, *[1] * (first.ndim - 1))
    return shares * first + (1 - shares) * second
