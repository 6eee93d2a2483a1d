"""The forwards that Accelerate wraps mixed precision around."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def plain_forwards(model: nn.Module) -> Iterator[bool]:
    """Forwards inside run as if Accelerate had not wrapped the model; gives whether it had.

    `_original_forward`, Accelerate 1.15: it wraps autocast around `forward` itself, where no context reaches
    it, and keeps the plain one in this attribute. Can go once an inner `torch.autocast(enabled=False)` wins.
    """
    wrapped = {module: module.forward for module in model.modules() if "_original_forward" in vars(module)}
    for module in wrapped:
        module.forward = vars(module)["_original_forward"]
    try:
        yield bool(wrapped)
    finally:
        for module, forward in wrapped.items():
            module.forward = forward
