"""Numbers worth logging, kept on the device until somebody reads them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class Values(defaultdict[str, list[Tensor]]):
    """Every recorded value by its name, in the order of the steps."""

    def __init__(self) -> None:
        super().__init__(list)

    def record(self, values: Mapping[str, Tensor | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self[name].append(value.detach())

    def read(self) -> dict[str, list[float]]:
        """All values, each as its mean over the processes."""
        if not self:
            return {}
        flat = torch.cat([torch.stack(values).float() for values in self.values()])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
        steps = flat.split([len(values) for values in self.values()])
        return {name: values.tolist() for name, values in zip(self, steps, strict=True)}
