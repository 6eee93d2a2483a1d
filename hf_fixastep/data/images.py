"""Images decoded once into uint8 tensors, in memory or mapped from a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import PIL.Image
import torch
from datasets.utils import tqdm
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize

from hf_fixastep.data.store import PixelFile, build_once, possible_files


IN_MEMORY_BYTES = 2**30  # decoded images that may take more are mapped from a file
GREY_MODES = ("1", "L", "LA")
# More than 8 bits: PIL clips them at 255 without a word.
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


class Images(Dataset):
    """Decoded images, and their labels if there are any, as tensors.

    Args:
        pixels: uint8 [N, C, H, W].
        labels: int64 [N].
        class_names: names of the labels 0..K-1.
    """

    def __init__(
        self, pixels: Tensor, labels: Tensor | None = None, class_names: list[str] | None = None
    ) -> None:
        if pixels.dtype != torch.uint8 or pixels.ndim != 4:
            raise ValueError(
                f"Pixels are {pixels.dtype} of shape {list(pixels.shape)}, but expected torch.uint8 of shape "
                "[N, C, H, W]: scale them to 0..255 and convert them with .to(torch.uint8)."
            )
        if labels is not None:
            _check_labels(labels, len(pixels), class_names)
        self.pixels, self.labels, self.class_names = pixels, labels, class_names
        self.file: PixelFile | None = None  # that the pixels are mapped from

    @classmethod
    def from_dataset(
        cls,
        split: datasets.Dataset,
        size: tuple[int, int],
        image: str = "image",
        label: str = "label",
        channels: int | None = None,
    ) -> Images:
        """Decode every image of a split once, whatever its format or transform.

        The pixels are kept in memory, or, if they are many, in a file beside the Arrow cache, which the next
        call maps.

        Args:
            size: height and width; images of another size are resized.
            image: name of the image column.
            label: name of the label column, which may be missing.
            channels: 1 for grey, 3 for RGB; by default grey if all images are.
        """
        split = split.with_format(None)
        pictures = split.select_columns(image)
        if not isinstance(pictures.features[image], datasets.Image):
            raise ValueError(
                f"Column {image!r} holds {pictures.features[image]}, but expected images: convert it with "
                f"split.cast_column({image!r}, datasets.Image())."
            )
        labels, names = read_labels(split, label)
        rows, file = _decode(pictures, image, size, channels), None
        if len(split) * (channels or 3) * size[0] * size[1] > IN_MEMORY_BYTES:
            file = build_once(possible_files(pictures, image, size, channels), rows)
        pixels = file.map() if file else _collect(rows, (len(split), channels or 1, *size))
        images = cls(pixels, labels, names)
        images.file = file
        return images

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes, which map the file themselves."""
        return self.__dict__ if self.file is None else {**self.__dict__, "pixels": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.file is not None:
            self.pixels = self.file.map()

    @property
    def row_shape(self) -> list[int]:
        """Height and width."""
        return list(self.pixels.shape[2:])

    @property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with the shape, the labels and the pixels of up to 1,024 rows."""
        count = min(len(self), 1024)
        rows = torch.arange(count) * len(self) // max(count, 1)
        digest = hashlib.sha256(f"{list(self.pixels.shape)} {self.pixels.dtype}".encode())
        digest.update(b"unlabeled" if self.labels is None else self.labels.numpy().tobytes())
        digest.update(self.pixels.index_select(0, rows).numpy().tobytes())
        return digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        # index_select takes 448 rows of 32x32 about twenty times faster than pixels[rows]
        batch = {"pixel_values": self.pixels.index_select(0, rows)}
        return batch if self.labels is None else {**batch, "labels": self.labels.index_select(0, rows)}


def _check_labels(labels: Tensor, count: int, class_names: list[str] | None) -> None:
    if labels.dtype != torch.int64 or labels.shape != (count,):
        raise ValueError(
            f"Labels are {labels.dtype} of shape {list(labels.shape)}, but expected torch.int64 of shape "
            f"[{count}]: give one class number per image."
        )
    if class_names is None:
        return
    outside = ((labels < 0) | (labels >= len(class_names))).nonzero()
    if len(outside):
        row = int(outside[0])
        raise ValueError(
            f"Label {labels[row]} in row {row} is outside 0..{len(class_names) - 1}, the range of the "
            f"{len(class_names)} class names: correct the label or the names."
        )


def read_labels(split: datasets.Dataset, label: str = "label") -> tuple[Tensor | None, list[str] | None]:
    """The labels of a split and the names of the classes, if it has any."""
    if label not in split.column_names:
        return None, None
    feature = split.features[label]
    labels = np.asarray(split.with_format(None)[label][:])
    if len(labels) and labels.dtype.kind not in "iu":
        raise ValueError(
            f"Column {label!r} holds {feature}, but expected class numbers: convert it with "
            f"split.class_encode_column({label!r})."
        )
    names = feature.names if isinstance(feature, datasets.ClassLabel) else None
    return torch.from_numpy(labels.astype(np.int64)), names


def _decode(
    pictures: datasets.Dataset, image: str, size: tuple[int, int], channels: int | None
) -> Iterator[Tensor]:
    """Every image as uint8 [C, *size], one at a time; without `channels`, C is 1 until one is not grey."""
    encoded = pictures.cast_column(image, datasets.Image(decode=False)).iter(batch_size=16)
    values, mode = (value for batch in encoded for value in batch[image]), pictures.features[image].mode
    bar = tqdm(values, "Decoding images", total=len(pictures), disable=len(pictures) <= 2000)
    for row, value in enumerate(bar):
        picture = _open(value, mode, row)
        if channels is None and picture.mode not in GREY_MODES:
            channels = 3
        yield _to_tensor(picture, channels or 1, size, row)


def _open(value: dict[str, Any] | None, mode: str | None, row: int) -> PIL.Image.Image:
    try:
        if value is None:
            raise ValueError("the row is empty")
        return datasets.Image(mode).decode_example(value)
    except Exception as error:  # decoders raise nearly anything on a broken image
        raise ValueError(
            f"The image in row {row} cannot be read ({error}): replace it or remove the row."
        ) from error


def _to_tensor(picture: PIL.Image.Image, channels: int, size: tuple[int, int], row: int) -> Tensor:
    """uint8 [channels, *size], resized as the torchvision image processors of transformers do it."""
    if picture.mode in DEEP_MODES:
        raise ValueError(
            f"The image in row {row} has mode {picture.mode!r}, but expected 8 bits per channel: "
            "scale it to 0..255 and save it as mode 'L'."
        )
    array = np.array(picture.convert("L" if channels == 1 else "RGB"))
    pixels = (
        torch.from_numpy(array).view(picture.height, picture.width, channels).permute(2, 0, 1).contiguous()
    )
    if pixels.shape[1:] == size:
        return pixels
    return resize(pixels, list(size), InterpolationMode.BILINEAR, antialias=True)


def _collect(rows: Iterator[Tensor], shape: tuple[int, int, int, int]) -> Tensor:
    """uint8 of `shape`, with three equal channels for one once a row has three."""
    pixels = torch.empty(shape, dtype=torch.uint8)
    for row, picture in enumerate(rows):
        if len(picture) > pixels.shape[1]:
            pixels = pixels.repeat(1, 3, 1, 1) if row else pixels.new_empty(shape[0], *picture.shape)
        pixels[row] = picture
    return pixels
