"""Small pure helpers that mixing and losses share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
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
    step: int = 0  # optimizer steps so far, for a loss with phases
    weight: float = 1.0  # what the unlabeled loss is going to be multiplied by
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


def classification_head(model: nn.Module, num_labels: int) -> nn.Linear:
    """The last linear layer with one output per class."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == num_labels]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no linear layer with {num_labels} outputs, one per class, so its features "
            "cannot be read; choose a model with a linear classification head."
        )
    return layers[-1]


@contextlib.contextmanager
def head_inputs(model: nn.Module, num_labels: int) -> Iterator[list[Tensor]]:
    """Collects the features [N, D] that the classification head gets, one entry per forward inside."""
    seen: list[Tensor] = []
    hook = classification_head(model, num_labels).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        hook.remove()
    if not seen or seen[0].ndim != 2:
        found = f"features of shape {list(seen[0].shape)}" if seen else "no features"
        raise ValueError(
            f"The classification head of {type(model).__name__} got {found}, but one vector per image is needed; "
            "choose a model with a linear head on pooled features, and do not compile it."
        )


def rows_of_all(index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of per-example state and what to write there [N, ...], those of all processes one after another.

    Values are float32, and 0 where they are not finite, for state outlives a bad step.
    """
    values = values.detach().float().nan_to_num(0.0, 0.0, 0.0)
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return index, values
    packed = torch.cat([index[:, None].view(torch.int32), values.view(torch.int32)], 1)  # bits, for one collective
    gathered = packed.new_empty(dist.get_world_size() * len(packed), packed.shape[1])
    dist.all_gather_into_tensor(gathered, packed)
    return gathered[:, :2].contiguous().view(torch.int64).squeeze(1), gathered[:, 2:].contiguous().view(torch.float32)


def mean_of_repeats(index: Tensor, values: Tensor, rows: int) -> Tensor:
    """Each value [N, C] replaced by the mean of those with its index, so that it does not matter which is written."""
    counted = torch.cat([values, torch.ones_like(values[:, :1])], 1)
    totals = counted.new_zeros(rows, counted.shape[1]).index_put_((index,), counted, accumulate=True)[index]
    return totals[:, :-1] / totals[:, -1:]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values where the mask is 1; 0 if it is nowhere."""
    return (values * mask).sum() / mask.sum().clamp_min(1)


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


def mix_with_each_other(
    images: Tensor, y: Tensor, alpha: float, generator: torch.Generator, per_example: bool = True
) -> tuple[Tensor, Tensor]:
    """All images and labels, each mixed with that of another row, as MixMatch does it; half or more stays."""
    partners = torch.randperm(len(images), generator=generator, device=generator.device)
    shares = mixing_shares(len(images) if per_example else 1, alpha, generator)
    return mixup(images, images[partners], shares), mixup(y, y[partners], shares)
