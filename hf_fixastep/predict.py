"""Class probabilities from a saved model, for images of any kind."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import PIL.Image
import torch
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageClassification

from hf_fixastep.data.files import one_line, to_grey_or_rgb
from hf_fixastep.hub import pull, reason


@dataclass(frozen=True)
class Calibration:
    """What `calibration` in the config of a model says about its probabilities, chosen on validation images.

    Args:
        temperature: divides the logits.
        abstain_below: the model is not sure of an image whose highest probability is below it.
        coverage: share of the validation images that it was sure of.
    """

    temperature: float
    abstain_below: float = 0.0
    coverage: float = 1.0

    @classmethod
    def of(cls, config: Any) -> Calibration | None:
        """None for a model that was not calibrated."""
        found = getattr(config, "calibration", None)
        if found is None:
            return None
        try:
            calibration = cls(**{name: float(value) for name, value in found.items()})
        except (AttributeError, TypeError, ValueError):
            calibration = cls(math.nan)
        shares = (calibration.abstain_below, calibration.coverage)
        if not 0 < calibration.temperature < math.inf or not all(0 <= share <= 1 for share in shares):
            raise ValueError(
                f"calibration in the model's config is {one_line(found)}, but expected a temperature above 0, and "
                "abstain_below and coverage between 0 and 1: correct or remove it."
            )
        return calibration


def load_classifier(source: str | os.PathLike[str], revision: str | None = None) -> tuple[Any, Any]:
    """Model and image processor from a folder, or from the Hub; no code of theirs is run and no pickle is read."""
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
        raise ValueError(f"The image processor of {source} does not fit its model: {reason(error)}.") from error
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
    pixels = processor([to_grey_or_rgb(image).convert(mode) for image in images], return_tensors="pt")["pixel_values"]
    logits = model(pixel_values=pixels.to(model.device, model.dtype)).logits.float()
    calibration = Calibration.of(model.config)
    return (logits / (calibration.temperature if calibration else 1.0)).softmax(-1)
