"""What every test may use; no network, no downloads."""

from __future__ import annotations

import os
import tempfile


# Before any Hugging Face library is imported: no network, and nothing left in the user's caches.
HOME = tempfile.TemporaryDirectory(prefix="hf_fixastep-tests-")
os.environ["HF_HOME"] = HOME.name
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads on a busy machine are slower than one

import pytest
import torch

from hf_fixastep import WideResNetConfig, WideResNetForImageClassification


@pytest.fixture(autouse=True)
def one_thread_and_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def tiny_model() -> WideResNetForImageClassification:
    """A Wide ResNet of 16 channels and one block per stage, three classes."""
    return WideResNetForImageClassification(WideResNetConfig(depth=10, width=1, image_size=8, num_labels=3))
