"""The teacher: an exponential moving average of the model, which is also what gets evaluated and saved."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hf_fixastep._compat.patches import copy_all


class Teacher:
    """Averages parameters, copies buffers; starts as a copy and is always in eval mode.

    Args:
        model: the unwrapped model to follow.
        decay: share of the old average in the new one.
        twin: a copy of the model, sharded like it, if FSDP2 has sharded it; nothing can copy it then.
    """

    def __init__(self, model: nn.Module, decay: float, twin: nn.Module | None = None) -> None:
        self.decay = decay
        self.average = get_ema_multi_avg_fn(decay)
        self.model = (copy.deepcopy(model) if twin is None else twin).eval().requires_grad_(False)
        self.applied_now = False

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        reshard(self.model)
        self.average(own_parts(self.model.parameters()), own_parts(model.parameters()), None)
        if buffers := list(self.model.buffers()):
            copy_all(buffers, list(model.buffers()))

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside, `model` holds the averaged parameters and the teacher the raw ones; nested use changes
        nothing.
        """
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
        reshard(self.model)
        reshard(model)
        pairs = zip(own_parts(self.model.parameters()), own_parts(model.parameters()), strict=True)
        for averaged, raw in pairs:
            kept = averaged.clone()
            averaged.copy_(raw)
            raw.copy_(kept)
        self.applied_now = not self.applied_now


# ---- models that FSDP2 may have sharded


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process holds of each: its shard, or all of it."""
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def reshard(model: nn.Module) -> None:
    """Forget gathered weights, which a forward without a backward leaves; they would outlive a change."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All parameters by name, gathered where they are sharded; to be called on all processes."""
    reshard(model)
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}


def load_whole(model: nn.Module, state: dict[str, Tensor], strict: bool = True) -> None:
    """`load_state_dict` of whole tensors; to be called on all processes."""
    reshard(model)
    own = model.state_dict()
    shards = {
        name: distribute_tensor(value, own[name].device_mesh, own[name].placements)
        if isinstance(own.get(name), DTensor)
        else value
        for name, value in state.items()
    }
    model.load_state_dict(shards, strict)
