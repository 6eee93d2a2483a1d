"""Files of echocardiograms, and what is done to their pixels.

No message contains a text from a file, which may be a name.

Not part of `heart2heart.py`, because `datasets` replaces `open` and `os.path` in modules with a builder.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F

from hf_fixastep.data.files import UnreadableImage
from hf_fixastep.data.trees import LIMIT


ECHO_VIEWS = ("PLAX", "PSAX", "A4C", "A2C")  # the classes of all three sets
SIDE = 112  # of the images of TMED-2
FRAME_LIMIT = 2**24  # pixels; an eighth of a gigabyte where they are worked on as numbers
MARKER = "PHANTOM.txt"


def is_phantom(folder: str | os.PathLike[str] | None) -> bool:
    """Whether the data in a folder are a phantom, drawn by `phantom.py`."""
    return folder is not None and (Path(folder) / MARKER).is_file()


def import_reader(module: str, formats: str) -> Any:
    """A library of the extra [echo]; without it the files that need it count as unreadable."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnreadableImage(f"{formats} files need {module}: pip install 'hf_fixastep[echo]'") from error


# Pixels


def square_height(height: int, spacing: tuple[float, float]) -> int:
    return max(1, round(height * spacing[0] / spacing[1]))


def check_pixels(frames: int, height: int, width: int, spacing: tuple[float, float]) -> None:
    """Refuse what would not fit into memory, as it is stored or with square pixels."""
    pixels = max(height, square_height(height, spacing)) * width
    if min(frames, height, width) < 1 or pixels > FRAME_LIMIT or pixels * frames > LIMIT:
        raise UnreadableImage(
            f"its frames have no pixels, or more than {FRAME_LIMIT:,} square ones each or {LIMIT:,} together"
        )


def square_pixels(frame: np.ndarray, spacing: tuple[float, float]) -> np.ndarray:
    """Resize the height so that pixels are as high as wide; bilinear, as the official code does it."""
    height = square_height(frame.shape[0], spacing)
    if height == frame.shape[0]:
        return frame
    values = torch.from_numpy(frame.astype(np.float64))[None, None]
    return F.interpolate(values, (height, frame.shape[1]), mode="bilinear", align_corners=False)[0, 0].numpy()


def stretch(values: np.ndarray) -> np.ndarray:
    """uint8 from 0, for the smallest value of the image, to 255, for the largest."""
    if not np.isfinite(values).all():
        raise UnreadableImage("some of its pixels are not numbers")
    low, high = float(values.min()), float(values.max())
    if low == high:
        raise UnreadableImage("all its pixels are equal")
    return np.rint((values.astype(np.float64) - low) * (255 / (high - low))).astype(np.uint8)


def fit(pixels: np.ndarray) -> np.ndarray:
    """Scale the longer side to 112 pixels, and fill up with black below or on the right; uint8 [112, 112]."""
    height, width = pixels.shape
    longer = max(height, width)
    canvas = np.zeros((SIDE, SIDE), np.uint8)
    size = max(1, width * SIDE // longer), max(1, height * SIDE // longer)
    image = PIL.Image.fromarray(pixels)
    resized = image if image.size == size else image.resize(size, PIL.Image.Resampling.BICUBIC)
    canvas[: size[1], : size[0]] = np.asarray(resized)
    return canvas


def count_pixels(pixels: np.ndarray) -> np.ndarray:
    """How many pixels have each of the values 0 to 255."""
    return np.bincount(pixels.ravel(), minlength=256)


def quantile_table(counts: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """uint8 [256]: for every value the one with the same quantile in `reference`.

    `table[image]` then has the intensities of the reference, if the pixels of many images were counted. The
    quantile of a value is the middle of its pixels' ranks: with the last one black would turn grey wherever
    the reference has less of it, and more than half of an echo image is black.
    """
    wanted = (np.cumsum(counts) - counts / 2) / np.sum(counts)
    return np.searchsorted(np.cumsum(reference) / np.sum(reference), wanted).clip(max=255).astype(np.uint8)
