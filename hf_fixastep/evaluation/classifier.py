"""A saved model as a classifier: the one way to load it and to ask it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_fixastep.data.files import one_line, to_grey_or_rgb
from hf_fixastep.data.processing import views_of
from hf_fixastep.data.views import Views
from hf_fixastep.evaluation import calibration
from hf_fixastep.hub.client import pull, reason


class Classifier:
    """A trained model with all that its images need; no code of it is run and no pickle is read.

    Args:
        source: folder of a finished run, or a name on the Hub.
        revision: branch, tag or commit of a model on the Hub.
        batch_size: images per forward.
    """

    def __init__(
        self, source: str | os.PathLike[str], revision: str | None = None, batch_size: int = 256
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, but it has to be at least 1.")
        self.model, self.processor = load(source, revision)
        self.calibration = calibration.Calibration.of(self.model.config)  # a wrong one is found here
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.eval().to(self.device, memory_format=torch.channels_last)
        self.batch_size = batch_size
        self.classes = [str(self.model.config.id2label[at]) for at in range(self.model.config.num_labels)]
        try:
            self.logits([PIL.Image.new("RGB", (64, 48))])
        except Exception as error:
            raise ValueError(
                f"The image processor of {source} does not fit its model: {reason(error)}."
            ) from error

    @cached_property
    def _size_and_views(self) -> tuple[tuple[int, int], Views]:
        return views_of(self.processor)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width that the model sees."""
        return self._size_and_views[0]

    def pixels(self, image: PIL.Image.Image) -> Tensor:
        """One image of any mode and size as the model gets it, [1, C, H, W], by its image processor."""
        mode = "L" if getattr(self.model.config, "num_channels", 3) == 1 else "RGB"
        return self.processor(to_grey_or_rgb(image).convert(mode), return_tensors="pt")["pixel_values"]

    def batches(self, images: Tensor | Iterable[PIL.Image.Image]) -> Iterator[Tensor]:
        """What the model gets, on its device.

        Args:
            images: uint8 [N, C, H, W] in any size, or PIL images of any modes and sizes.
        """
        for batch in self._scaled(images) if isinstance(images, Tensor) else self._processed(images):
            yield batch.to(self.device, self.model.dtype)

    def _scaled(self, images: Tensor) -> Iterator[Tensor]:
        size, views = self._size_and_views
        if images.shape[2:] != size:
            images = resize(images, list(size), InterpolationMode.BILINEAR, antialias=True)
        for batch in images.split(self.batch_size):
            yield views.plain(batch.to(self.device))

    def _processed(self, images: Iterable[PIL.Image.Image]) -> Iterator[Tensor]:
        rows: list[Tensor] = []
        for image in images:
            rows.append(self.pixels(image))
            if len(rows) == self.batch_size:
                yield torch.cat(rows)
                rows.clear()
        if rows:
            yield torch.cat(rows)

    @torch.inference_mode()
    def logits(self, images: Tensor | Iterable[PIL.Image.Image]) -> NDArray:
        """float64 [N, K], of uint8 [N, C, H, W] in any size or of PIL images."""
        answers = [
            self.model(pixel_values=batch).logits.double().cpu().numpy() for batch in self.batches(images)
        ]
        return np.concatenate([np.empty((0, len(self.classes))), *answers])

    def probabilities(self, images: Tensor | Iterable[PIL.Image.Image]) -> NDArray:
        """float64 [N, K], after the temperature of the model if it has one."""
        temperature = self.calibration.temperature if self.calibration else 1.0
        return calibration.probabilities(self.logits(images), temperature)


def load(source: str | os.PathLike[str], revision: str | None) -> tuple[Any, Any]:
    """Model and image processor."""
    folder = find_folder(source, revision)
    try:
        model, loaded = AutoModelForImageClassification.from_pretrained(
            folder, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
        processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the files of a model can be wrong in any way
        raise ValueError(f"No classifier could be loaded from {source}: {reason(error)}.") from error
    if loaded["missing_keys"]:
        missing = one_line(", ".join(sorted(loaded["missing_keys"])))
        raise ValueError(f"{source} is no trained classifier, as it lacks {missing}: give one that is.")
    return model, processor


def find_folder(source: str | os.PathLike[str], revision: str | None = None) -> str | os.PathLike[str]:
    """The folder itself, or that of the copy of a model on the Hub."""
    if os.path.isdir(source):
        if revision is not None:
            raise ValueError(
                f"revision is {revision}, but {source} is a folder, which has no revisions: leave it out."
            )
        return source
    try:
        return pull(str(source), revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no folder {source}; as a model on the Hub: {error}") from error
