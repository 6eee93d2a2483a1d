"""Phase 1 of Fix-A-Step: mix labeled images with unlabeled ones and their sharpened guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_fixastep._compat.patches import standard_gamma
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.forwards import frozen_batchnorm


POOL = ("weak", "weak_2")  # views whose images can be partners


def mix_labeled(
    model: nn.Module,
    batch: SemiBatch,
    generator: torch.Generator,
    *,
    alpha: float = 0.5,
    temperature: float = 0.5,
    per_batch: bool = False,
    pool_rows: int | None = None,
    guess_all: bool = True,
) -> SemiBatch:
    """Replace every labeled image by a mixture with a partner from the pool [x; weak; weak_2]; half or more
    stays.

    Partners are the head of one permutation of the pool.

    Args:
        generator: on the CPU, so that which rows need a guess is known without asking the device.
        alpha: shape of the Beta distribution of the shares.
        temperature: of the sharpening, below 1 makes guesses more certain.
        per_batch: one share for the whole batch, as the official code draws it, instead of one per image.
        pool_rows: how many rows of each view are in the pool, if not all of `weak_2`.
        guess_all: forward each view on its own and whole, as the official code does; otherwise only the
            chosen partners, all views at once, which is the same where rows do not meet in batch norm, and no
            view whose logits the batch has already.
    """
    rows, count = len(batch.x), len(batch.views["weak_2"][:pool_rows])
    first, second = batch.views["weak"][:count], batch.views["weak_2"][:count]
    partners, shares = draw_partners(rows, count, generator, alpha=alpha, per_batch=per_batch)
    guesses = batch.y.new_zeros(count, batch.y.shape[1])
    if guess_all:
        guesses = guess_labels(model, first, second, temperature=temperature).to(batch.y.dtype)
    elif len(chosen := ((partners[partners >= rows] - rows) % count).unique()):
        missing = [name for name in POOL if name not in batch.logits]
        if len(chosen) * len(missing) == 1 < count:  # batch norm may not do with one row
            chosen = torch.cat([chosen, (chosen + 1) % count])
        chosen = chosen.to(batch.x.device, non_blocking=True)
        views = [batch.views[name][chosen] for name in missing]
        known = [batch.logits[name][chosen] for name in POOL if name in batch.logits]
        guesses[chosen] = guess_labels(model, *views, known=known, temperature=temperature, together=True)
    partners = partners.to(batch.x.device, non_blocking=True)
    shares = shares.to(batch.x.device, non_blocking=True)
    x = mixup(batch.x, torch.cat([batch.x, first, second])[partners], shares)
    y = mixup(batch.y, torch.cat([batch.y, guesses, guesses])[partners], shares)
    return replace(batch, x=x, y=y)


def draw_partners(
    rows: int, count: int, generator: torch.Generator, *, alpha: float, per_batch: bool
) -> tuple[Tensor, Tensor]:
    """All chance of the mixing: for each labeled image a row of the pool, and the share that it keeps."""
    partners = torch.randperm(rows + 2 * count, generator=generator)[:rows]
    return partners, mixing_shares(1 if per_batch else rows, alpha, generator).expand(rows)


@torch.no_grad()
def guess_labels(
    model: nn.Module, *views: Tensor, temperature: float, known: Sequence[Tensor] = (), together: bool = False
) -> Tensor:
    """Sharpened mean prediction over views, with batch statistics but without touching the running ones.

    `known` are logits of further views.
    """
    with frozen_batchnorm(model):
        if together and views:
            logits = model(pixel_values=torch.cat(views)).logits.chunk(len(views))
        else:
            logits = [model(pixel_values=view).logits for view in views]
    return average_guess([*known, *logits], temperature)


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
    first, second = standard_gamma(concentration, generator)
    total = first + second
    # Of both draws, at tiny alpha, where shares are nearly 1.
    underflow = total <= 2 * torch.finfo(total.dtype).tiny
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
