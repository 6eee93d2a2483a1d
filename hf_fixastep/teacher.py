"""The teacher: an exponential moving average of the model, which is also what gets evaluated and saved."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn


class Teacher:
    """Averages parameters, copies buffers; starts as a copy and is always in eval mode.

    Args:
        model: the unwrapped model to follow.
        decay: share of the old average in the new one.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.applied_now = False

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        torch._foreach_lerp_(list(self.model.parameters()), list(model.parameters()), 1 - self.decay)
        if buffers := list(self.model.buffers()):
            torch._foreach_copy_(buffers, list(model.buffers()))

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside, `model` holds the averaged parameters and the teacher the raw ones; nested use changes nothing."""
        if self.applied_now:
            yield
            return
        self._swap(model)
        try:
            yield
        finally:
            self._swap(model)

    @torch.no_grad()
    def _swap(self, model: nn.Module) -> None:
        for averaged, raw in zip(self.model.parameters(), model.parameters(), strict=True):
            kept = averaged.clone()
            averaged.copy_(raw)
            raw.copy_(kept)
        self.applied_now = not self.applied_now
