"""Instruments of benchmark.py: what takes turns, what convolutions a step runs, what it reads and what it
keeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


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
    """Notes every convolution and matrix product that runs inside, forward and backward; called, repeats
    them.

    Repeated are their order, the shapes, strides and types of the operands, and which gradients are computed.
    Operands of one shape share their memory, which can only make the repetition faster than the step was.
    """

    aten = torch.ops.aten
    operations = {
        aten.convolution.default,
        aten.convolution_backward.default,
        aten.addmm.default,
        aten.mm.default,
    }

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any], bool]] = []  # operation, arguments, gradient mode
        self.operands: dict[tuple, Tensor] = {}
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.operations:
            arguments = [self._operand(at, a) if isinstance(a, Tensor) else a for at, a in enumerate(args)]
            self.calls.append((func, arguments, torch.is_grad_enabled()))
        output = func(*args, **(kwargs or {}))
        if func in self.operations:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=output)
        return output

    def _operand(self, position: int, tensor: Tensor) -> Tensor:
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
    """Counts how often a value is fetched from a tensor: `.item()`, `if tensor:`, `float(tensor)`,
    `torch.equal`.
    """

    operations = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.operations
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


class Activations(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd keeps for backward passes, now and at most; a storage counts once, parameters
    never.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self.users: Counter[int] = Counter()
        self.now = self.peak = 0
        super().__init__(lambda tensor: Kept(tensor, self), lambda kept: kept.tensor)

    def change(self, tensor: Tensor, users: int) -> None:
        storage = tensor.untyped_storage()
        before = self.users[storage.data_ptr()]
        self.users[storage.data_ptr()] += users
        if storage.data_ptr() not in self.parameters and 0 in (before, before + users):
            self.now += users * storage.nbytes()
            self.peak = max(self.peak, self.now)


class Kept:
    """A tensor that a graph holds; gone when the graph is, or its backward pass is over."""

    def __init__(self, tensor: Tensor, meter: Activations) -> None:
        self.tensor, self.meter = tensor, meter
        meter.change(tensor, 1)

    def __del__(self) -> None:
        self.meter.change(self.tensor, -1)


def peak_memory(job: Job, device: str) -> float | None:
    """Bytes by which the memory of the device, or of this process, grows at most; None where the system is
    silent.
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        job()
        return torch.cuda.max_memory_allocated() - before
    if not Path("/proc/self/clear_refs").exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)  # else the job starts with what others have freed
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = read_status("VmRSS")
    job()
    return read_status("VmHWM") - before


def read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


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
