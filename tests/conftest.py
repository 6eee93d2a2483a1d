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

MARKED = {
    # What must also pass with the oldest versions of the libraries: step, gate, losses, save and load,
    # resume, two processes, and whatever relies on private names.
    "core": (
        "compat",
        "losses",
        "models/test_wide_resnet.py",
        "slow/test_two_processes.py",
        "step",
        "test_checkpoints.py",
        "test_resume.py",
    ),
    # What hostile or damaged input, signals, kills and long runs may do; also all that SECURITY.md names.
    "attack": (
        "attack",
        "cli/test_demo.py",
        "data/test_cifar.py",
        "data/test_fetal_files.py",
        "data/test_malformed.py",
        "echo/test_dicom.py",
        "echo/test_files.py",
        "echo/test_malformed.py",
        "hub/test_client.py",
        "hub/test_push.py",
        "hub/test_push_data.py",
        "slow/test_embed.py",
        "slow/test_fit.py",
        "slow/test_kill.py",
        "slow/test_long_run.py",
        "slow/test_search.py",
        "slow/test_sweep_kill.py",
        "test_bad_input.py",
        "test_callbacks.py",
        "test_checkpoints.py",
    ),
}


def is_marked(path: Path, mark: str) -> bool:
    return any(path.is_relative_to(Path(__file__).parent / part) for part in MARKED[mark])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m core` or `-m attack` the other files are not even imported."""
    mark = config.option.markexpr
    skipped = mark in MARKED and collection_path.suffix == ".py" and not is_marked(collection_path, mark)
    return True if skipped else None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in MARKED:
            if is_marked(item.path, mark):
                item.add_marker(mark)


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
