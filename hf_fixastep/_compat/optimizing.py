"""Optimizer and schedule through the Trainer.

Private names, looked at in transformers 5.20 to 5.23: `_created_lr_scheduler`, by which the Trainer knows
that a second `train()` needs a new schedule. It can go when `create_scheduler` of a subclass is enough for
that. The key `_last_lr` in the state of torch's schedules (2.9 to 2.15) is what the log shows; it can go when
they compute it on loading.
"""

from __future__ import annotations

import functools
from typing import Any

import accelerate.optimizer
import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer

from hf_fixastep._compat.distributed import Twin
from hf_fixastep.config import FixAStepConfig
from hf_fixastep.losses.base import SemiSupervisedLoss
from hf_fixastep.step.forwards import classification_head
from hf_fixastep.step.schedules import cosine_7_16, ramp_length


class OptimizingTrainer(Trainer):
    """A Trainer that knows plain Adam, the 7/16 cosine, a rate of the head, and the parameters of a loss."""

    args: FixAStepConfig
    model: Any
    optimizer: Any
    lr_scheduler: Any
    loss: SemiSupervisedLoss
    class_names: list[str]
    twin: Twin
    group_settings: list[dict[str, Any]]  # of the optimizer, before a checkpoint is loaded

    unwrapped: tuple[Any, nn.Module] | None = None  # a model, and what is inside it

    @property
    def core_model(self) -> nn.Module:
        # Remembered, for Accelerate (1.15) looks on the disk for DeepSpeed each time.
        if self.unwrapped is None or self.unwrapped[0] is not self.model:
            inner = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            self.unwrapped = self.model, inner
        return self.unwrapped[1]

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        # Accelerate (1.15) does not see a GradScaler skip a fused step; torch (2.15) has no fused SGD for
        # shards.
        sharded = args.distributed_state.distributed_type == DistributedType.FSDP
        fused = args.mixed_precision != "fp16" and not sharded
        if args.optim == "adam":
            betas = (args.adam_beta1, args.adam_beta2)
            kwargs = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
            return torch.optim.Adam, {**kwargs, "fused": fused}
        kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return kind, {**kwargs, "fused": fused} if kind in (torch.optim.SGD, torch.optim.AdamW) else kwargs

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """All but norm layers and biases; all for Adam, whose decay in this field is plain L2."""
        return [name for name, p in model.named_parameters() if p.ndim > 1 or self.args.optim == "adam"]

    def create_optimizer(self, model: Any = None) -> Any:
        if self.accelerator.is_fsdp2:
            self.twin = Twin(self.core_model)  # the last moment before Accelerate shards the model
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            factor = self.args.head_rate_factor
            if factor != 1:
                set_apart(optimizer, classification_head(self.core_model, len(self.class_names)), factor)
            decayed = self.get_decay_parameter_names(self.loss)
            rate = self.args.learning_rate * factor * self.loss.learning_rate_factor
            own = {name: p for name, p in self.loss.named_parameters() if p.requires_grad}
            decays = ((own.keys() & decayed, self.args.weight_decay), (own.keys() - set(decayed), 0.0))
            for names, decay in decays:
                if group := [p for name, p in own.items() if name in names]:
                    optimizer.add_param_group({"params": group, "weight_decay": decay, "lr": rate})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None and self.args.lr_cycle_steps:
            cycle = ramp_length(self.args.lr_cycle_steps, num_training_steps)
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: cosine_7_16(step, cycle))
            self._created_lr_scheduler = True
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        self.group_settings = [
            {name: value for name, value in group.items() if name != "params"}
            for group in (optimizer or self.optimizer).param_groups
        ]
        return scheduler

    def change_settings(self) -> None:
        """Leave the settings of a checkpoint for those given; the rate keeps its place in the schedule."""
        for group, new in zip(self.optimizer.param_groups, self.group_settings, strict=True):
            group |= new | {"lr": group["lr"] / group["initial_lr"] * new["initial_lr"]}
        keys = {"base_lrs": "initial_lr", "_last_lr": "lr"}
        rates = {name: [group[key] for group in self.optimizer.param_groups] for name, key in keys.items()}
        self.lr_scheduler.load_state_dict(self.lr_scheduler.state_dict() | rates)


def remember_lomo() -> None:
    """Look for the package lomo_optim once, not twice in every step.

    Accelerate 1.15: `AcceleratedOptimizer.step` searches the disk for it, in a twentieth of a step on cached
    features. It can go when `is_lomo_available` remembers.
    """
    if not hasattr(accelerate.optimizer.is_lomo_available, "cache_info"):
        accelerate.optimizer.is_lomo_available = functools.cache(accelerate.optimizer.is_lomo_available)


def set_apart(optimizer: torch.optim.Optimizer, module: nn.Module, rate_factor: float) -> None:
    """Move the parameters of a module to groups of their own, whose rate is a multiple of the others'."""
    wanted = set(map(id, module.parameters()))
    for group in list(optimizer.param_groups):
        if apart := [p for p in group["params"] if id(p) in wanted]:
            group["params"] = [p for p in group["params"] if id(p) not in wanted]
            optimizer.add_param_group({**group, "params": apart, "lr": group["lr"] * rate_factor})
