"""Backbones of all kinds of pretrained networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor
from transformers import ConvNextImageProcessor, ViTImageProcessor

from hf_fixastep.features.backbone import Backbone, with_size
from hf_fixastep.hub.loading import load_network
from tests.features.networks import tiny_network
from tests.hub.pretrained import NETWORKS, save_network


def photo() -> PIL.Image.Image:
    return PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (12, 20, 3), dtype=np.uint8))


def features_by_hand(model: Any, pixels: Tensor) -> Tensor:
    """What the head gets, by each network's own parts."""
    if hasattr(model, "timm_model"):
        return model.timm_model.forward_head(model.timm_model.forward_features(pixels), pre_logits=True)
    body = getattr(model, "dinov2", None) or model.vision_model
    tokens = body(pixel_values=pixels).last_hidden_state
    if hasattr(model, "dinov2"):
        return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1)
    return tokens[:, 1:].mean(1) if type(model).__name__.startswith("CLIP") else tokens.mean(1)


@pytest.mark.parametrize("name", NETWORKS)
def test_features_are_what_the_head_gets_of_the_processed_image(name: str, tmp_path: Path) -> None:
    save_network(name, tmp_path)
    model, processor = load_network(tmp_path, 3)
    backbone = Backbone(model, processor)
    found = backbone.features(backbone.views().plain(backbone.pixels([photo()])))
    with torch.no_grad():
        expected = features_by_hand(model, processor(photo(), return_tensors="pt")["pixel_values"])
    assert found.shape == (1, backbone.size)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_classes_of_the_head_are_no_part_of_the_key(name: str, tmp_path: Path) -> None:
    save_network(name, tmp_path)
    three, four = (Backbone(*load_network(tmp_path, number)).identity for number in (3, 4))
    assert three == four


def test_another_size_of_timm_keeps_the_share_of_the_centre_crop(tmp_path: Path) -> None:
    save_network("timm", tmp_path)
    _, processor = load_network(tmp_path, 3)
    processor = type(processor)(pretrained_cfg={**processor.data_config, "crop_pct": 0.5}, architecture="")
    changed = with_size(processor, 16)
    assert changed.data_config == {**processor.data_config, "input_size": (3, 16, 16)}
    resized = photo().resize(
        (53, 32), PIL.Image.Resampling.BICUBIC
    )  # 20 x 12 with 16 / 0.5 at the short edge
    expected = torch.from_numpy(np.array(resized.crop((18, 8, 34, 24)))).permute(2, 0, 1)
    mean, std = torch.tensor([processor.data_config["mean"], processor.data_config["std"]])[:, :, None, None]
    found = changed(photo())["pixel_values"][0]
    torch.testing.assert_close(found, (expected / 255 - mean) / std, rtol=0, atol=1e-5)


def test_a_processor_that_leaves_images_of_different_sizes_is_refused() -> None:
    processor = ViTImageProcessor(size={"shortest_edge": 32})
    with pytest.raises(
        ValueError, match=r"gives images of different shapes different sizes.*give image_size"
    ):
        Backbone(tiny_network(), processor)
    assert Backbone(tiny_network(), processor, 32).pixels([photo()]).shape == (1, 3, 32, 32)


def test_a_processor_that_crops_by_a_share_has_one_size() -> None:
    backbone = Backbone(tiny_network(), ConvNextImageProcessor(size={"shortest_edge": 32}))
    assert backbone.pixels([photo()]).shape == (1, 3, 32, 32)
