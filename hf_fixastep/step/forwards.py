"""Forwards through a network: its batch norm, and the features that its head gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


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
            f"The classification head of {type(model).__name__} got {found}, but one vector per image is needed; "
            "choose a model with a linear head on pooled features, and do not compile it."
        )
