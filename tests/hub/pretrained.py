"""Folders of tiny networks with random weights, as others save theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BitImageProcessor,
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    TimmWrapperModel,
)


SIZE = {"height": 8, "width": 8}
BODY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
VISION = {**BODY, "image_size": 8, "patch_size": 4}
TEXT = {**BODY, "vocab_size": 99, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2}
DINOV2 = {"mlp_ratio": 2, **{name: value for name, value in VISION.items() if name != "intermediate_size"}}
TIMM = {
    "architecture": "test_resnet",
    "num_labels": 5,
    "pretrained_cfg": {"input_size": [3, 8, 8], "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 1.0},
    "label_names": ["a", "b", "c", "d", "e"],
}

# By name: how it is built, its image processor, and the class that it is to be trained as.
NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "DINOv2": (
        lambda: Dinov2Model(Dinov2Config(**DINOV2)),
        lambda: BitImageProcessor(size={"shortest_edge": 8}, crop_size=SIZE),
        "Dinov2ForImageClassification",
    ),
    "DINOv2 with a head": (
        lambda: Dinov2ForImageClassification(Dinov2Config(**DINOV2, num_labels=5)),
        lambda: BitImageProcessor(size={"shortest_edge": 8}, crop_size=SIZE),
        "Dinov2ForImageClassification",
    ),
    "CLIP": (
        lambda: CLIPModel(CLIPConfig(vision_config=VISION, text_config=TEXT)),
        lambda: CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=SIZE),
        "CLIPForImageClassification",
    ),
    "CLIP tower": (
        lambda: CLIPVisionModel(CLIPVisionConfig(**VISION)),
        lambda: CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=SIZE),
        "CLIPForImageClassification",
    ),
    "CLIP tower with projection": (
        lambda: CLIPVisionModelWithProjection(CLIPVisionConfig(**VISION)),
        lambda: CLIPImageProcessor(size={"shortest_edge": 8}, crop_size=SIZE),
        "CLIPForImageClassification",
    ),
    "SigLIP": (
        lambda: SiglipModel(SiglipConfig(vision_config=VISION, text_config=TEXT)),
        lambda: SiglipImageProcessor(size=SIZE),
        "SiglipForImageClassification",
    ),
    "SigLIP tower": (
        lambda: SiglipVisionModel(SiglipVisionConfig(**VISION)),
        lambda: SiglipImageProcessor(size=SIZE),
        "SiglipForImageClassification",
    ),
    "timm": (
        lambda: TimmWrapperForImageClassification(TimmWrapperConfig(**TIMM)),
        lambda: None,  # its config says it
        "TimmWrapperForImageClassification",
    ),
    "timm without a head": (
        lambda: TimmWrapperModel(TimmWrapperConfig(**TIMM)),
        lambda: None,
        "TimmWrapperForImageClassification",
    ),
}


def save_network(name: str, folder: Path) -> Any:
    """Write the network of this name with its image processor, and return it."""
    build, build_processor, _ = NETWORKS[name]
    if name.startswith("timm"):
        pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(0)
    model = build().eval()
    model.save_pretrained(folder)
    if (processor := build_processor()) is not None:
        processor.save_pretrained(folder)
    return model
