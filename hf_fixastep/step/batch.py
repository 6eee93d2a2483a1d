"""What a loss gets: a labeled batch and the views of an unlabeled one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


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
    # Of views that a loss has forwarded apart, no gradient.
    logits: dict[str, Tensor] = field(default_factory=dict)

    def unlabeled_part(self) -> SemiBatch:
        """The same batch for a loss that shall leave the labeled images, None here, for later."""
        return replace(self, x=None)  # type: ignore[arg-type]
