"""What every test may use; no network, no downloads."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest


if TYPE_CHECKING:
    from hf_fixastep import WideResNetForImageClassification

# Before any Hugging Face library is imported: no network, and nothing left in the user's caches. Each worker
# of pytest-xdist has a folder of its own; its controller imports no library, which would only cost time.
HOME = tempfile.TemporaryDirectory(prefix="hf_fixastep-tests-")
os.environ["HF_HOME"] = HOME.name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads on a busy machine are slower than one

# What must also pass with the oldest versions of the libraries: step, gate, losses, save and load, resume,
# two processes, and whatever relies on private names.
CORE = (
    "compat",
    "losses",
    "models/test_wide_resnet.py",
    "slow/test_two_processes.py",
    "step",
    "test_checkpoints.py",
    "test_resume.py",
)


def is_core(path: Path) -> bool:
    return any(path.is_relative_to(Path(__file__).parent / part) for part in CORE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m core` the other files are not even imported."""
    others = collection_path.suffix == ".py" and not is_core(collection_path)
    return True if config.option.markexpr == "core" and others else None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_core(item.path):
            item.add_marker("core")


@pytest.fixture(autouse=True)
def one_thread_and_seed() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def tiny_model() -> WideResNetForImageClassification:
    """A Wide ResNet of 16 channels and one block per stage, three classes."""
    from tests.short_runs import tiny_wide_resnet

    return tiny_wide_resnet()
