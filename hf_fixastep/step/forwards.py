"""Forwards through a network: its batch norm, and the features that its head gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_fixastep._compat.patches import copy_all


BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def batchnorm_layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, BATCH_NORM) and m.track_running_stats]


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


def average_buffers(buffers: Iterable[Tensor]) -> None:
    """Make running statistics equal on all processes; DDP does not while its own synchronization is off."""
    if buffers := [buffer for buffer in buffers if buffer.is_floating_point()]:
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        dist.all_reduce(flat)
        averages = (flat / dist.get_world_size()).split([buffer.numel() for buffer in buffers])
        copy_all(buffers, [average.view_as(b) for average, b in zip(averages, buffers, strict=True)])


def restore_buffers(model: nn.Module, last: nn.Module) -> None:
    """Put back running statistics that are not finite, for they would stay so, to what `last` has."""
    new, old = ([buffer for buffer in m.buffers() if buffer.is_floating_point()] for m in (model, last))
    if new:
        flat, spare = (torch.cat([buffer.flatten() for buffer in buffers]) for buffers in (new, old))
        kept = torch.where(flat.isfinite(), flat, spare).split([buffer.numel() for buffer in new])
        copy_all(new, [values.view_as(b) for values, b in zip(kept, new, strict=True)])


def classification_head(model: nn.Module, num_labels: int) -> nn.Linear:
    """The last linear layer with one output per class."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == num_labels]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no linear layer with {num_labels} outputs, one per class, so its "
            "features cannot be read; choose a model with a linear classification head."
        )
    return layers[-1]


@contextlib.contextmanager
def head_inputs(model: nn.Module, num_labels: int) -> Iterator[list[Tensor]]:
    """Collects the features [N, D] that the classification head gets, one entry per forward inside."""
    seen: list[Tensor] = []
    hook = classification_head(model, num_labels).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    try:
        yield seen
    finally:
        hook.remove()
    if not seen or seen[0].ndim != 2:
        found = f"features of shape {list(seen[0].shape)}" if seen else "no features"
        raise ValueError(
            f"The classification head of {type(model).__name__} got {found}, but one vector per image is "
            "needed; choose a model with a linear head on pooled features, and do not compile it."
        )
