"""Tiny models and data that every test may use; no network, no downloads."""

from __future__ import annotations

import os


os.environ["HF_HUB_OFFLINE"] = "1"  # before any Hugging Face library is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # spinning threads on a busy machine are slower than one

import pytest
import torch
from transformers import ViTImageProcessor

from hf_fixastep import Images, WideResNetConfig, WideResNetForImageClassification


@pytest.fixture(autouse=True)
def one_thread_and_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def processor() -> ViTImageProcessor:
    """For 8x8 images."""
    return ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.5] * 3, image_std=[0.25] * 3)


@pytest.fixture
def tiny_model() -> WideResNetForImageClassification:
    """A Wide ResNet of 16 channels and one block per stage, three classes."""
    return WideResNetForImageClassification(WideResNetConfig(depth=10, width=1, image_size=8, num_labels=3))


@pytest.fixture
def labeled() -> Images:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (24, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return Images(pixels, torch.arange(24) % 3, ["cat", "dog", "owl"])


@pytest.fixture
def unlabeled() -> Images:
    generator = torch.Generator().manual_seed(2)
    return Images(torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8, generator=generator))
