"""From image sets to batches: a uint8 store, and a loader that pairs labeled with unlabeled images."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import PIL.Image
import torch
from datasets.utils import tqdm
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2.functional import resize

from .store import PixelFile, build_once, possible_files


IN_MEMORY_BYTES = 2**30  # decoded images that may take more are mapped from a file
GREY_MODES = ("1", "L", "LA")
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # more than 8 bits: PIL clips them at 255 without a word


class Images(Dataset):
    """Decoded images, and their labels if there are any, as tensors.

    Args:
        pixels: uint8 [N, C, H, W].
        labels: int64 [N].
        class_names: names of the labels 0..K-1.
    """

    def __init__(self, pixels: Tensor, labels: Tensor | None = None, class_names: list[str] | None = None) -> None:
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

        The outcome is kept in memory, or, if large, in a file beside the Arrow cache, which the next call maps.

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
        labels = _read_labels(split, label)
        rows, file = _decode(pictures, image, size, channels), None
        if len(split) * (channels or 3) * size[0] * size[1] > IN_MEMORY_BYTES:
            file = build_once(possible_files(pictures, image, size, channels), rows)
        pixels = file.map() if file else _collect(rows, (len(split), channels or 1, *size))
        feature = split.features.get(label)
        names = feature.names if isinstance(feature, datasets.ClassLabel) else None
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
    def fingerprint(self) -> str:
        """Sixteen hex digits that change with the shape, the labels and the pixels (of 1,024 rows at most)."""
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

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        # index_select takes 448 rows of 32x32 about twenty times faster than pixels[rows]
        batch = {"pixel_values": self.pixels.index_select(0, rows)}
        return batch if self.labels is None else {**batch, "labels": self.labels.index_select(0, rows)}


def _check_labels(labels: Tensor, count: int, class_names: list[str] | None) -> None:
    if labels.dtype != torch.int64 or labels.shape != (count,):
        raise ValueError(
            f"Labels are {labels.dtype} of shape {list(labels.shape)}, but expected torch.int64 of shape [{count}]: "
            "give one class number per image."
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


def _read_labels(split: datasets.Dataset, label: str) -> Tensor | None:
    if label not in split.column_names:
        return None
    labels = np.asarray(split[label][:])
    if len(labels) and labels.dtype.kind not in "iu":
        raise ValueError(
            f"Column {label!r} holds {split.features[label]}, but expected class numbers: convert it with "
            f"split.class_encode_column({label!r})."
        )
    return torch.from_numpy(labels.astype(np.int64))


def _decode(pictures: datasets.Dataset, image: str, size: tuple[int, int], channels: int | None) -> Iterator[Tensor]:
    """Every image as uint8 [C, *size]; if `channels` is None, C is 1 up to the first image that is not grey."""
    encoded = pictures.cast_column(image, datasets.Image(decode=False)).iter(batch_size=16)  # decoded one at a time
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
        raise ValueError(f"The image in row {row} cannot be read ({error}): replace it or remove the row.") from error


def _to_tensor(picture: PIL.Image.Image, channels: int, size: tuple[int, int], row: int) -> Tensor:
    """uint8 [channels, *size], resized as the torchvision image processors of transformers do it."""
    if picture.mode in DEEP_MODES:
        raise ValueError(
            f"The image in row {row} has mode {picture.mode!r}, but expected 8 bits per channel: "
            "scale it to 0..255 and save it as mode 'L'."
        )
    array = np.array(picture.convert("L" if channels == 1 else "RGB"))
    pixels = torch.from_numpy(array).view(picture.height, picture.width, channels).permute(2, 0, 1).contiguous()
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


@dataclass(frozen=True)
class Draw:
    """The rows that one rank loads for one batch.

    Args:
        step: number of the draw, counted over all ranks; it never repeats, so it can seed whatever the draw needs.
        labeled: rows of the labeled set.
        unlabeled: rows of the unlabeled set.
    """

    step: int
    labeled: list[int]
    unlabeled: list[int]


class PairedSampler(Sampler[Draw]):
    """Draws from two endless shuffled streams; draw number `step` is a pure function of (seed, step).

    Every image of a set comes once before any comes again. Rank r of n takes the draws r, r + n, ..., so that n ranks
    see together what one rank sees with n times the batch sizes.

    Args:
        sizes: images in the labeled and in the unlabeled set.
        batch_sizes: labeled and unlabeled images per draw; the second may be 0.
        steps_per_epoch: draws of one rank in one epoch.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        batch_sizes: tuple[int, int],
        steps_per_epoch: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        _check_streams(sizes, batch_sizes, steps_per_epoch)
        self.sizes, self.batch_sizes, self.steps_per_epoch = sizes, batch_sizes, steps_per_epoch
        self.seed, self.rank, self.world, self.epoch = seed, rank, world, 0
        self._permutations: dict[int, tuple[int, np.ndarray]] = {}  # stream -> its current turn and order

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.steps_per_epoch

    def __iter__(self) -> Iterator[Draw]:
        first = self.epoch * self.steps_per_epoch
        for local_step in range(first, first + self.steps_per_epoch):
            step = local_step * self.world + self.rank
            yield Draw(step, self._take(0, step), self._take(1, step))

    def _take(self, stream: int, step: int) -> list[int]:
        size, batch_size = self.sizes[stream], self.batch_sizes[stream]
        taken: list[int] = []
        while len(taken) < batch_size:
            turn, offset = divmod(step * batch_size + len(taken), size)
            taken += self._permutation(stream, turn)[offset : offset + batch_size - len(taken)].tolist()
        return taken

    def _permutation(self, stream: int, turn: int) -> np.ndarray:
        if stream not in self._permutations or self._permutations[stream][0] != turn:
            order = np.random.default_rng([self.seed, stream, turn]).permutation(self.sizes[stream])
            self._permutations[stream] = (turn, order)
        return self._permutations[stream][1]


def _check_streams(sizes: tuple[int, int], batch_sizes: tuple[int, int], steps_per_epoch: int) -> None:
    if steps_per_epoch < 1:
        raise ValueError(f"There are {steps_per_epoch} steps per epoch, but expected 1 or more: raise the number.")
    for name, size, batch_size, least in zip(("labeled", "unlabeled"), sizes, batch_sizes, (1, 0), strict=True):
        if batch_size < least:
            raise ValueError(f"The {name} batch size is {batch_size}, but expected {least} or more: raise it.")
        if batch_size > 0 and size < 1:
            remedy = "add images" if name == "labeled" else "add images or set the unlabeled batch size to 0"
            raise ValueError(f"The {name} set is empty, but each batch takes {batch_size} of its images: {remedy}.")


class PairedDataset(Dataset):
    """Labeled and unlabeled images, fetched together by a `Draw`; the labels of the unlabeled store stay inside."""

    def __init__(self, labeled: Images, unlabeled: Images | None = None) -> None:
        if labeled.labels is None:
            raise ValueError("The labeled images have no labels, but each needs one: give labels to Images.")
        if unlabeled is not None and unlabeled.pixels.shape[2:] != labeled.pixels.shape[2:]:
            raise ValueError(
                f"Unlabeled images are {list(unlabeled.pixels.shape[2:])} and labeled ones "
                f"{list(labeled.pixels.shape[2:])}, but expected the same [H, W]: "
                "build both by Images.from_dataset with the same size."
            )
        self.labeled, self.unlabeled = labeled, unlabeled

    def __len__(self) -> int:
        return len(self.labeled)

    def __getitems__(self, draw: Draw) -> dict[str, Any]:  # torch passes on whatever the batch sampler yields
        batch: dict[str, Any] = {**self.labeled.__getitems__(draw.labeled), "step": draw.step}
        if self.unlabeled is not None:
            batch["unlabeled"] = self.unlabeled.__getitems__(draw.unlabeled)["pixel_values"]
            batch["unlabeled_index"] = torch.tensor(draw.unlabeled, dtype=torch.int64)
        return batch


class PairedLoader(DataLoader):
    """Batches of labeled and unlabeled images; not to be passed through `accelerator.prepare`, for it knows its rank.

    Args:
        batch_sizes: labeled and unlabeled images per batch; the second may be 0.
        steps_per_epoch: batches of one rank in one epoch.
    """

    def __init__(
        self,
        labeled: Images,
        unlabeled: Images | None,
        batch_sizes: tuple[int, int],
        steps_per_epoch: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        sizes = (len(labeled), 0 if unlabeled is None else len(unlabeled))
        super().__init__(
            PairedDataset(labeled, unlabeled),
            batch_sampler=PairedSampler(sizes, batch_sizes, steps_per_epoch, seed, rank, world),  # type: ignore[arg-type]
            collate_fn=as_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            generator=torch.Generator(),  # else every epoch takes a number from the global generator
        )

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def as_is(batch: Any) -> Any:
    """Collate function for datasets whose `__getitems__` gives whole batches."""
    return batch


def generator_for(
    seed: int, rank: int, step: int, purpose: str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A generator whose numbers are a pure function of (seed, rank, step, purpose)."""
    keys = np.random.SeedSequence([seed, rank, step, zlib.crc32(purpose.encode())])
    return torch.Generator(device).manual_seed(int(keys.generate_state(1, np.uint64)[0]))
