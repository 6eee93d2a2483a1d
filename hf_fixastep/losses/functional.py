"""Small pure helpers that several losses share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def class_weights(counts: Tensor, keep_scale: bool = False) -> Tensor:
    """Inverse to the images of each class.

    Args:
        keep_scale: the mean over the images is 1, so that a loss keeps its scale; otherwise the sum is 1.
    """
    if len(absent := (counts == 0).nonzero()):
        raise ValueError(
            f"Class {int(absent[0])} has no labeled image, so it has no weight: label one, or set "
            "class_weights to none."
        )
    inverse = counts.double().reciprocal()
    weights = (inverse / inverse.sum()).float()
    return weights * (counts.sum() / (weights * counts).sum()) if keep_scale else weights


def rows_of_all(index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of per-example state and what to write there [N, ...], those of all processes one after another.

    Values are float32, and 0 where they are not finite, for state outlives a bad step.
    """
    values = values.detach().float().nan_to_num(0.0, 0.0, 0.0)
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return index, values
    # Index and values travel as bits, in one collective.
    packed = torch.cat([index[:, None].view(torch.int32), values.view(torch.int32)], 1)
    gathered = packed.new_empty(dist.get_world_size() * len(packed), packed.shape[1])
    dist.all_gather_into_tensor(gathered, packed)
    index, values = (part.contiguous() for part in gathered.tensor_split([2], 1))
    return index.view(torch.int64).squeeze(1), values.view(torch.float32)


def mean_of_repeats(index: Tensor, values: Tensor, rows: int) -> Tensor:
    """Each value [N, C] replaced by the mean of those with its index: it is the same which one is written."""
    counted = torch.cat([values, torch.ones_like(values[:, :1])], 1)
    totals = counted.new_zeros(rows, counted.shape[1]).index_put_((index,), counted, accumulate=True)[index]
    return totals[:, :-1] / totals[:, -1:]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values where the mask is 1; 0 if it is nowhere."""
    return (values * mask).sum() / mask.sum().clamp_min(1)
