"""A frozen network up to its head, and how it wants its images."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import PIL.Image
import torch
from torch import Tensor, nn

from hf_fixastep._compat.patches import tune_cpu
from hf_fixastep.data.files import for_processor
from hf_fixastep.data.processing import views_of, with_size
from hf_fixastep.data.views import Views
from hf_fixastep.features.processes import processes
from hf_fixastep.hub.loading import head_names
from hf_fixastep.models.head import put_head
from hf_fixastep.step.forwards import classification_head, head_inputs


# Of a config, or a config inside it: what says nothing about the features.
NOT_OF_FEATURES = {
    *("id2label", "label2id", "num_labels", "num_classes", "label_names"),
    *("architectures", "transformers_version", "dtype", "torch_dtype"),
}


class Backbone:
    """What the classification head of a network gets to see: one vector per image.

    Args:
        model: an image classifier with a linear head; it is put into eval mode and not changed otherwise.
        processor: its image processor, which says size, mean and deviation.
        image_size: side of the images, if not that of the processor.
    """

    def __init__(self, model: Any, processor: Any, image_size: int | None = None) -> None:
        self.processor = processor if image_size is None else with_size(processor, image_size)
        device = processes().device  # of this process
        self.device = device if device.type == "cuda" else torch.device("cpu")
        if self.device.type == "cpu":
            tune_cpu()
        self.model = model.eval().to(self.device, memory_format=torch.channels_last)
        self.head: nn.Linear = classification_head(model, model.config.num_labels)
        if not getattr(self.processor, "do_rescale", True) or not is_eighth_bit(self.processor):
            raise ValueError(
                f"{type(self.processor).__name__} does not scale pixels by 1/255, but views are made of "
                "8-bit images; use an image processor with do_rescale true and rescale_factor 1/255."
            )
        shapes = {self.pixels([PIL.Image.new("RGB", size)]).shape for size in ((48, 64), (64, 48))}
        if len(shapes) > 1:
            raise ValueError(
                f"{type(self.processor).__name__} gives images of different shapes different sizes, but the "
                "network needs one: give image_size, the side that images are to have."
            )

    @property
    def size(self) -> int:
        """Numbers per image."""
        return self.head.in_features

    def pixels(self, images: Sequence[PIL.Image.Image]) -> Tensor:
        """uint8 [N, C, H, W] as the processor cuts and scales images, before it normalizes them."""
        timm = getattr(self.processor, "data_config", None)
        channels = timm["input_size"][0] if timm else getattr(self.model.config, "num_channels", 3)
        plain = [for_processor(image, channels) for image in images]
        if timm:  # its processor does not leave out anything, so that is undone
            mean, std = torch.tensor([timm["mean"], timm["std"]])[:, :, None, None]
            made = (self.processor(plain)["pixel_values"] * std + mean) * 255
        else:
            options = {"do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
            made = self.processor(plain, **options)["pixel_values"]
        return made.round().clamp(0, 255).to(torch.uint8)

    def views(self, **settings: Any) -> Views:
        """Views that end as the processor's images do."""
        return views_of(self.processor, **settings)[1]

    @torch.inference_mode()
    def features(self, images: Tensor) -> Tensor:
        """float32 [N, size] of normalized images."""
        images = images.to(self.device, memory_format=torch.channels_last)
        mixed = torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")
        with mixed, head_inputs(self.model, self.model.config.num_labels) as seen:
            self.model(pixel_values=images)
        return seen[0].float()

    def save(
        self, weight: Tensor, bias: Tensor, class_names: Sequence[str], folder: str | os.PathLike[str]
    ) -> None:
        """Write the network with another head, and its image processor, as `from_pretrained` reads them."""
        self.head = put_head(self.model, self.head, weight, bias, class_names)
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)

    @cached_property
    def identity(self) -> dict[str, str]:
        """Hashes of all that the features depend on besides images and views."""
        heads = head_names(self.model)
        shape = json.dumps(of_features(self.model.config.to_dict()), default=str)
        weights = hashlib.sha256(f"{type(self.model).__name__} {shape}".encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            if name not in heads:
                weights.update(name.encode())
                weights.update(tensor.cpu().flatten().contiguous().view(torch.uint8).numpy().data)
        processor = json.dumps(self.processor.to_dict(), sort_keys=True, default=str)
        return {
            "weights": weights.hexdigest()[:16],
            "processor": hashlib.sha256(processor.encode()).hexdigest()[:16],
        }


def of_features(config: Any) -> Any:
    """A config without what the features do not depend on."""
    if not isinstance(config, dict):
        return config
    kept = {name for name in config if name not in NOT_OF_FEATURES and not name.startswith("_")}
    return {name: of_features(value) for name, value in config.items() if name in kept}


def is_eighth_bit(processor: Any) -> bool:
    return abs(getattr(processor, "rescale_factor", 1 / 255) * 255 - 1) < 1e-6
