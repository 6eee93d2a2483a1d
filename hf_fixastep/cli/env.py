"""fixastep env: versions and devices for a bug report; no names of users, no paths, no secrets."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata


PACKAGES = (
    *("hf_fixastep", "torch", "torchvision", "transformers", "accelerate", "datasets", "huggingface_hub"),
    *("evaluate", "safetensors", "numpy", "pillow", "peft", "optuna", "gradio", "pydicom"),
)


def facts() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"
    yield "platform", platform.platform()
    yield "processors", str(os.cpu_count())
    if hasattr(os, "sysconf"):
        yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    yield "devices", devices()


def devices() -> str:
    try:
        import torch
    except Exception as error:  # what the report may be about
        return f"torch cannot be imported ({type(error).__name__})"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
        return f"{', '.join(names)}; CUDA or ROCm {torch.version.cuda or torch.version.hip}"
    return "MPS" if torch.backends.mps.is_available() else "CPU only"


def main(argv: list[str]) -> None:
    if argv:
        sys.exit(f"error: fixastep env takes no arguments, but found {argv[0]!r}.")
    print("\n".join(f"{name + ':':<17}{value}" for name, value in facts()))
