"""Private names of torch, and a setting of the C library."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch._functorch import config as functorch_config


def standard_gamma(concentration: Tensor, generator: torch.Generator) -> Tensor:
    """Gamma draws from a generator of ours.

    torch 2.9 to 2.15: `torch.distributions.Gamma` calls the same function and takes no generator. It can go
    when that class does.
    """
    return torch._standard_gamma(concentration, generator=generator)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy many tensors in one launch.

    torch 2.9 to 2.15: a loop over `Tensor.copy_` is a kernel for each of a hundred buffers. It can go when
    torch has a public form of its multi-tensor copy.
    """
    torch._foreach_copy_(targets, sources)


def allow_second_backward() -> None:
    """Let a compiled graph be walked twice.

    torch 2.9 to 2.15: the compiler gives the memory of saved tensors away in the first backward pass although
    the caller asked to retain the graph. It can go when `retain_graph` is enough.
    """
    functorch_config.donated_buffer = False


def tune_cpu(threads: int | None = None) -> None:
    """Set the number of threads, and let the C library keep large blocks that are freed.

    Getting them again from the system, page by page, takes a tenth of a step of a training, and more than
    half of a forward of MobileNetV2 over 64 images.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc
        trim_threshold, mmap_max = -1, -4
        mallopt(trim_threshold, -1)
        mallopt(mmap_max, 0)
