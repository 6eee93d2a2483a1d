"""What launches the gate can do with, and the averaged model under FSDP2."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import FSDPModule


def check_launch(accelerator: Accelerator, loss: nn.Module, procedure: str | None) -> None:
    """Refuse what would step before the gate has decided, and what FSDP2 cannot do here."""
    kind = accelerator.distributed_type
    if kind not in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.FSDP):
        return
    if not accelerator.is_fsdp2:
        raise ValueError(
            f"The launch uses {'FSDP1' if kind == DistributedType.FSDP else kind.value}, but the gate needs "
            "two gradients per parameter before the optimizer runs. Launch with plain data parallelism, or "
            "with FSDP and fsdp_version: 2."
        )
    plugin: Any = accelerator.state.fsdp_plugin
    if plugin.cpu_ram_efficient_loading:
        raise ValueError(
            "FSDP2 would load the weights on one process only; set fsdp_cpu_ram_efficient_loading to false."
        )
    if "FULL" not in str(plugin.state_dict_type):
        raise ValueError(
            "FSDP2 would save the weights in shards, which from_pretrained cannot load; set "
            "fsdp_state_dict_type to FULL_STATE_DICT."
        )
    if any(p.requires_grad for p in loss.parameters()):
        raise ValueError(
            f"{type(loss).__name__} has parameters of its own, which FSDP2 would not train; launch it with "
            "plain data parallelism."
        )
    if procedure:
        check_procedure(accelerator)


def check_procedure(accelerator: Accelerator) -> None:
    """Refuse FSDP2: Accelerate (1.15) prepares no model without its optimizer, so none that only predicts."""
    if accelerator.is_fsdp2:
        raise ValueError(
            "A procedure predicts between its trainings, which FSDP2 cannot do with a model that is not "
            "trained; launch it with plain data parallelism."
        )


def reduction_by_gate(accelerator: Accelerator, model: Any) -> contextlib.AbstractContextManager[None]:
    """Forwards and backwards inside leave the gate two gradients as it expects them."""
    if accelerator.is_fsdp2:
        # Undo the Trainer's no_sync around inner micro-batches: FSDP2 would add up both gradients in one
        # place.
        model.set_requires_gradient_sync(True)
        return contextlib.nullcontext()
    # DDP decides in the forward whether to reduce, and broadcasts buffers there. Everything stays local
    # instead: the gate reduces both gradients once, at the end of the window.
    return accelerator.no_sync(model)


class Twin:
    """A copy of the model from before FSDP2 shards it, to average in; nothing can copy the model after that.

    Made before `accelerator.prepare` and sharded after it. Until then both models hide their input
    embeddings: Accelerate (1.15) would shard these apart, but image models have none, or have them in a block
    that is sharded as a whole. That can go when `fsdp2_prepare_model` leaves out what it has sharded already.
    """

    def __init__(self, model: Any) -> None:
        if isinstance(model, FSDPModule):
            raise ValueError(
                "FSDP2 has sharded this model already, so it has no copy to average in; build a new one."
            )
        model.to(memory_format=torch.contiguous_format)  # FSDP2 shards no other order
        self.model, self.copy = model, copy.deepcopy(model)
        for each in (self.model, self.copy):
            each.get_input_embeddings = lambda: None

    def shard(self, accelerator: Accelerator) -> nn.Module:
        fsdp2_prepare_model(accelerator, self.copy)
        for each in (self.model, self.copy):
            del each.get_input_embeddings
        return self.copy
