"""A saved model as a classifier: the one way to load it and to ask it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize

from hf_fixastep._compat.patches import tune_cpu
from hf_fixastep.data.files import for_processor
from hf_fixastep.data.processing import views_of
from hf_fixastep.data.views import Views
from hf_fixastep.evaluation import calibration
from hf_fixastep.hub.client import reason
from hf_fixastep.hub.loading import load_network
from hf_fixastep.step.forwards import head_inputs


class Classifier:
    """A trained model with all that its images need; no code of it is run and no pickle is read.

    Args:
        source: folder of a finished run, or a name on the Hub.
        revision: branch, tag or commit of a model on the Hub.
        batch_size: images per forward.
        calibrated: use the calibration in its config, if there is one, which has to be for its weights.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        revision: str | None = None,
        batch_size: int = 256,
        calibrated: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, but it has to be at least 1.")
        self.model, self.processor = load_network(source, revision=revision, calibrated=calibrated)
        self.calibration = calibration.Calibration.of(self.model.config)  # a wrong one is found here
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu":
            tune_cpu()
        self.model.eval().to(self.device, memory_format=torch.channels_last)
        self.batch_size = batch_size
        self.classes = [str(self.model.config.id2label[at]) for at in range(self.model.config.num_labels)]
        try:
            answer = self.logits([PIL.Image.new("RGB", (64, 48))])
        except Exception as error:
            raise ValueError(
                f"The image processor of {source} does not fit its model: {reason(error)}."
            ) from error
        if not np.isfinite(answer).all():
            raise ValueError(
                f"The model of {source} answers with numbers that are infinite or NaN: train it again, or "
                "give another."
            )

    @cached_property
    def _size_and_views(self) -> tuple[tuple[int, int], Views]:
        return views_of(self.processor)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width that the model sees."""
        return self._size_and_views[0]

    def pixels(self, image: PIL.Image.Image) -> Tensor:
        """One image of any mode and size as the model gets it, [1, C, H, W], by its image processor."""
        channels = getattr(self.model.config, "num_channels", 3)
        return self.processor(for_processor(image, channels), return_tensors="pt")["pixel_values"]

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

    @torch.inference_mode()
    def logits_and_features(self, images: Tensor | Iterable[PIL.Image.Image]) -> tuple[NDArray, NDArray]:
        """float64 [N, K], and float32 [N, D] that the classification head gets, in one forward."""
        logits: list[NDArray] = [np.empty((0, len(self.classes)))]
        features: list[NDArray] = []
        for batch in self.batches(images):
            with head_inputs(self.model, len(self.classes)) as seen:
                logits.append(self.model(pixel_values=batch).logits.double().cpu().numpy())
            features.append(seen[0].float().cpu().numpy())
        return np.concatenate(logits), np.concatenate(features) if features else np.empty((0, 0))

    def probabilities(self, images: Tensor | Iterable[PIL.Image.Image]) -> NDArray:
        """float64 [N, K], after the temperature of the model if it has one."""
        temperature = self.calibration.temperature if self.calibration else 1.0
        return calibration.probabilities(self.logits(images), temperature)
