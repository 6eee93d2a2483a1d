"""Strips of pixels, of which a processor that scales the shorter side would make gigabytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch import Tensor
from transformers import CLIPImageProcessor

from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.hub.loading import load_network
from tests.attack.plants import save_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = save_run(tmp_path)
    sizes = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    CLIPImageProcessor(**sizes).save_pretrained(folder)
    return folder


def of_classifier(run: Path, image: PIL.Image.Image) -> Tensor:
    return Classifier(run).pixels(image)


def of_backbone(run: Path, image: PIL.Image.Image) -> Tensor:
    return Backbone(*load_network(run, 3)).pixels([image])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("way", [of_classifier, of_backbone])
def test_of_a_strip_the_middle_is_seen(
    way: Callable[[Path, PIL.Image.Image], Tensor], turned: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    preprocess = CLIPImageProcessor.preprocess

    def watch(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend([image.size for image in ([images] if isinstance(images, PIL.Image.Image) else images)])
        return preprocess(self, images, *args, **kwargs)

    monkeypatch.setattr(CLIPImageProcessor, "preprocess", watch)
    values = np.random.default_rng(0).integers(0, 256, (2, 100_000, 3), dtype=np.uint8)
    middle = values[:, 49_990:50_010]
    if turned:
        values, middle = values.transpose(1, 0, 2), middle.transpose(1, 0, 2)
    found = way(run, PIL.Image.fromarray(np.ascontiguousarray(values)))
    assert max(seen[-1]) == 64  # 32 times its shorter side
    assert torch.equal(found, way(run, PIL.Image.fromarray(np.ascontiguousarray(middle))))
