"""Tiny networks with random weights, and images for them."""

from __future__ import annotations

import io
from typing import Any

import datasets
import numpy as np
import PIL.Image
import torch
from transformers import MobileNetV2ImageProcessor

from hf_fixastep import WideResNetConfig, WideResNetForImageClassification
from hf_fixastep.features.backbone import Backbone


def tiny_network(seed: int = 0, num_labels: int = 10) -> Any:
    torch.manual_seed(seed)
    config = WideResNetConfig(depth=10, width=1, num_labels=num_labels)
    return WideResNetForImageClassification(config).eval()


def tiny_processor() -> Any:
    return MobileNetV2ImageProcessor(size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32})


def tiny_backbone(seed: int = 0) -> Backbone:
    return Backbone(tiny_network(seed), tiny_processor())


def pictures(count: int, seed: int = 0, classes: int | None = None) -> datasets.Dataset:
    """Noise of several sizes as PNG, with labels if there are classes."""
    random = np.random.default_rng(seed)
    values = []
    for at in range(count):
        buffer = io.BytesIO()
        noise = random.integers(0, 255, (24 + at % 3 * 16, 40, 3), dtype=np.uint8)
        PIL.Image.fromarray(noise).save(buffer, "PNG")
        values.append({"bytes": buffer.getvalue(), "path": None})
    features: dict[str, Any] = {"image": datasets.Image()}
    columns: dict[str, Any] = {"image": values}
    if classes:
        features["label"] = datasets.ClassLabel(names=[f"class {n}" for n in range(classes)])
        columns["label"] = [at % classes for at in range(count)]
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))
