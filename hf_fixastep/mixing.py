"""Phase 1 of Fix-A-Step: mix labeled images with unlabeled ones and their sharpened guesses."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from hf_fixastep.functional import SemiBatch, average_guess, frozen_batchnorm, mixing_shares, mixup


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
    """Replace every labeled image by a mixture with a partner from the pool [x; weak; weak_2]; half or more stays.

    Partners are the head of one permutation of the pool.

    Args:
        generator: on the CPU, so that which rows need a guess is known without asking the device.
        alpha: shape of the Beta distribution of the shares.
        temperature: of the sharpening, below 1 makes guesses more certain.
        per_batch: one share for the whole batch, as the official code draws it, instead of one per image.
        pool_rows: how many rows of each view are in the pool, if not all of `weak_2`.
        guess_all: forward each view on its own and whole, as the official code does; otherwise only the chosen
            partners, both views at once, which is the same where rows do not meet in batch norm.
    """
    rows, count = len(batch.x), len(batch.views["weak_2"][:pool_rows])
    first, second = batch.views["weak"][:count], batch.views["weak_2"][:count]
    partners = torch.randperm(rows + 2 * count, generator=generator)[:rows]
    shares = mixing_shares(1 if per_batch else rows, alpha, generator).expand(rows)
    chosen = torch.arange(count) if guess_all else ((partners[partners >= rows] - rows) % count).unique()
    guesses = batch.y.new_zeros(count, batch.y.shape[1])
    if len(chosen):
        rows_chosen = chosen.to(batch.x.device, non_blocking=True)
        views = (first, second) if guess_all else (first[rows_chosen], second[rows_chosen])
        guesses[rows_chosen] = guess_labels(model, *views, temperature=temperature, together=not guess_all)
    partners = partners.to(batch.x.device, non_blocking=True)
    shares = shares.to(batch.x.device, non_blocking=True)
    x = mixup(batch.x, torch.cat([batch.x, first, second])[partners], shares)
    y = mixup(batch.y, torch.cat([batch.y, guesses, guesses])[partners], shares)
    return replace(batch, x=x, y=y)


@torch.no_grad()
def guess_labels(model: nn.Module, *views: Tensor, temperature: float, together: bool = False) -> Tensor:
    """Sharpened mean prediction over views, with batch statistics but without touching the running ones."""
    with frozen_batchnorm(model):
        if together:
            logits = list(model(pixel_values=torch.cat(views)).logits.chunk(len(views)))
        else:
            logits = [model(pixel_values=view).logits for view in views]
    return average_guess(logits, temperature)
