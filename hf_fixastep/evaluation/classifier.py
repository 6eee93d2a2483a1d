"""Class probabilities from a saved model, for images of any kind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import PIL.Image
import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_fixastep.data.files import one_line, to_grey_or_rgb
from hf_fixastep.evaluation.calibration import Calibration
from hf_fixastep.hub.client import pull, reason


def load_classifier(source: str | os.PathLike[str], revision: str | None = None) -> tuple[Any, Any]:
    """Model and image processor from a folder, or from the Hub; no code of theirs is run and no pickle is
    read.
    """
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
    Calibration.of(model.config)  # a wrong one is found here
    model.eval()
    try:
        probabilities(model, processor, [PIL.Image.new("RGB", (64, 48))])
    except Exception as error:
        raise ValueError(
            f"The image processor of {source} does not fit its model: {reason(error)}."
        ) from error
    return model, processor


def find_folder(source: str | os.PathLike[str], revision: str | None) -> str | os.PathLike[str]:
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


@torch.inference_mode()
def probabilities(model: Any, processor: Any, images: Sequence[PIL.Image.Image]) -> Tensor:
    """Probabilities [N, K] of images of any mode and size, after the temperature of the model if it has one."""
    mode = "L" if getattr(model.config, "num_channels", 3) == 1 else "RGB"
    pixels = processor([to_grey_or_rgb(image).convert(mode) for image in images], return_tensors="pt")[
        "pixel_values"
    ]
    logits = model(pixel_values=pixels.to(model.device, model.dtype)).logits.float()
    calibration = Calibration.of(model.config)
    return (logits / (calibration.temperature if calibration else 1.0)).softmax(-1)
