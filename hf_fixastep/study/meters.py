"""Instruments of the benchmark: steps without a loop, who takes turns, what a step multiplies and reads."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry
from transformers import TrainerCallback

from hf_fixastep._compat.dispatch import HOST_READS, TorchDispatchMode
from hf_fixastep.trainer import FixAStepTrainer


Job = Callable[[], Any]
Clock = Callable[[], float]


def interleave(jobs: dict[str, Job], rounds: int, now: Clock) -> dict[str, list[float]]:
    """Seconds of every job in every round; the jobs take turns, and a round before the first warms up."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds + 1):
        for name, job in jobs.items():
            start = now()
            job()
            times[name].append(now() - start)
    return {name: seconds[1:] for name, seconds in times.items()}


def over(above: Sequence[float], below: Sequence[float], factor: float = 1.0) -> list[float]:
    """Ratios, round by round."""
    return [factor * a / b for a, b in zip(above, below, strict=True)]


class Convolutions(TorchDispatchMode):
    """Notes every convolution and matrix product inside, forward and backward; a call repeats them.

    Repeated are their order, the shapes, strides and types of the operands, and which gradients are computed.
    Operands of one shape share their memory, which can only make the repetition faster than the step was.
    """

    aten = torch.ops.aten
    operations = {
        *(aten.convolution.default, aten.convolution_backward.default),
        *(aten.addmm.default, aten.mm.default),
    }

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any], bool]] = []  # operation, arguments, gradient mode
        self.operands: dict[tuple, Tensor] = {}
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in self.operations:
            arguments = [self.operand(at, a) if isinstance(a, Tensor) else a for at, a in enumerate(args)]
            self.calls.append((func, arguments, torch.is_grad_enabled()))
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=output)
        return output

    def operand(self, position: int, tensor: Tensor) -> Tensor:
        """Random values that lie in memory as `tensor` does."""
        shape, stride = tensor.shape, tensor.stride()
        key = (position, shape, stride, tensor.dtype)
        if key not in self.operands:
            extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
            values = torch.randn(extent, device=tensor.device, dtype=tensor.dtype)
            self.operands[key] = values.as_strided(shape, stride)
        return self.operands[key]

    def __call__(self) -> None:
        for operation, arguments, graded in self.calls:
            with torch.set_grad_enabled(graded):
                operation(*arguments)


class HostReads(TorchDispatchMode):
    """Counts how often a value is fetched from a tensor, such as by `.item()` or `if tensor:`."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in HOST_READS
        return func(*args, **(kwargs or {}))


def count_device_waits(job: Job) -> int:
    """How often the host waits for a CUDA device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            job()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Processes inside do not talk: collectives return at once and change nothing."""
    done = type("Done", (), {"wait": lambda self: None})()
    collectives = {name: getattr(dist, name) for name in ("all_reduce", "broadcast")}
    try:
        for name in collectives:
            setattr(dist, name, lambda *args, **kwargs: done)
        yield
    finally:
        for name, collective in collectives.items():
            setattr(dist, name, collective)


# ---- steps


class Caught(Exception):
    """The Trainer's loop has come to its first step."""


class Ready:
    """A trainer that is ready to step, and a batch to step on, without the Trainer's loop."""

    model: Any  # as the loop has it, maybe wrapped
    inputs: dict[str, Any]

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        trainer.training_step = self.catch
        with contextlib.suppress(Caught):
            trainer.train()
        del trainer.training_step
        trainer.unlabeled_weight = trainer.args.unlabeled_weight

    def catch(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> None:
        """Stands in for the first step: by now everything has been made."""
        self.model, self.inputs = model, send_to_device(inputs, self.trainer.args.device)
        raise Caught

    def step(self) -> None:
        self.trainer.training_step(self.model, self.inputs)
        self.update()

    def base_step(self) -> None:
        """The base method as one would write it alone: one backward pass of the weighted sum."""
        trainer = self.trainer
        self.model.train()
        losses = trainer.loss(self.model, trainer.make_batch(self.inputs), trainer.teacher.model)
        trainer.accelerator.backward(losses.labeled + trainer.unlabeled_weight * losses.unlabeled)
        self.update()

    def update(self) -> None:
        self.trainer.optimizer.step()
        self.trainer.lr_scheduler.step()
        self.model.zero_grad()
        self.trainer.teacher.update(self.trainer.core_model)


class Idle(FixAStepTrainer):
    """Its steps compute nothing: what is left is the loop."""

    zeros: dict[nn.Parameter, Tensor]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        if not hasattr(self, "zeros"):
            self.zeros = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
        for parameter, gradient in self.zeros.items():
            parameter.grad = gradient
        return torch.zeros((), device=self.args.device)


class Alternate(TrainerCallback):
    """Runs a job after every step of the Trainer's loop and times both; the first of each warms up."""

    def __init__(self, job: Job, now: Clock) -> None:
        self.job, self.now = job, now
        self.start: float | None = None
        self.times: dict[str, list[float]] = {"loop": [], "job": []}

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        before = self.now()
        self.job()
        after = self.now()
        if self.start is not None:
            self.times["loop"].append(before - self.start)
            self.times["job"].append(after - before)
        self.start = self.now()
