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

from hf_fixastep.data.files import to_grey_or_rgb
from hf_fixastep.data.processing import with_size
from hf_fixastep.data.views import Views
from hf_fixastep.models.head import put_head
from hf_fixastep.step.forwards import classification_head, head_inputs


# Of a config: what says nothing about the features.
NOT_OF_FEATURES = ("id2label", "label2id", "architectures", "transformers_version", "dtype", "torch_dtype")


class Backbone:
    """What the classification head of a network gets to see: one vector per image.

    Args:
        model: an image classifier with a linear head; it is put into eval mode and not changed otherwise.
        processor: its image processor, which says size, mean and deviation.
        image_size: side of the images, if not that of the processor.
    """

    def __init__(self, model: Any, processor: Any, image_size: int | None = None) -> None:
        self.processor = processor if image_size is None else with_size(processor, image_size)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.eval().to(self.device, memory_format=torch.channels_last)
        self.head: nn.Linear = classification_head(model, model.config.num_labels)
        if not getattr(self.processor, "do_rescale", True) or not is_eighth_bit(self.processor):
            raise ValueError(
                f"{type(self.processor).__name__} does not scale pixels by 1/255, but views are made of "
                "8-bit images; use an image processor with do_rescale true and rescale_factor 1/255."
            )
        self.pixels([PIL.Image.new("RGB", (48, 64))])  # a processor that does not work is found here

    @property
    def size(self) -> int:
        """Numbers per image."""
        return self.head.in_features

    def pixels(self, images: Sequence[PIL.Image.Image]) -> Tensor:
        """uint8 [N, C, H, W] as the processor cuts and scales images, before it normalizes them."""
        mode = "L" if getattr(self.model.config, "num_channels", 3) == 1 else "RGB"
        plain = [to_grey_or_rgb(image).convert(mode) for image in images]
        made = self.processor(plain, do_rescale=False, do_normalize=False, return_tensors="pt")
        return made["pixel_values"].round().clamp(0, 255).to(torch.uint8)

    def views(self, **settings: Any) -> Views:
        """Views that end as the processor's images do."""
        mean, std = ((0.0,) * 3, (1.0,) * 3)
        if self.processor.do_normalize:
            mean, std = tuple(self.processor.image_mean), tuple(self.processor.image_std)
        return Views(mean=mean, std=std, **settings)

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
        own = {id(tensor) for tensor in (*self.head.parameters(), *self.head.buffers())}
        config = self.model.config.to_dict()
        shape = {k: v for k, v in config.items() if k not in NOT_OF_FEATURES and not k.startswith("_")}
        weights = hashlib.sha256(f"{type(self.model).__name__} {json.dumps(shape, default=str)}".encode())
        for name, tensor in sorted(self.model.state_dict(keep_vars=True).items()):
            if id(tensor) not in own:
                weights.update(name.encode())
                weights.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data)
        processor = json.dumps(self.processor.to_dict(), sort_keys=True, default=str)
        return {
            "weights": weights.hexdigest()[:16],
            "processor": hashlib.sha256(processor.encode()).hexdigest()[:16],
        }


def is_eighth_bit(processor: Any) -> bool:
    return abs(getattr(processor, "rescale_factor", 1 / 255) * 255 - 1) < 1e-6
