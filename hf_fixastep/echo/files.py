"""Files of echocardiograms, in folders or in zip files read in place, and what is done to their pixels.

No message contains a text from a file, which may be a name.

Not part of `heart2heart.py`, because `datasets` replaces `open` and `os.path` in modules with a builder.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import io
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F

from hf_fixastep.data.files import (
    FORMATS,
    Source,
    UnreadableImage,
    one_line,
    printable,
    reason,
    strict_decoding,
    to_grey_or_rgb,
    walk,
)


ECHO_VIEWS = ("PLAX", "PSAX", "A4C", "A2C")  # the classes of all three sets
SIDE = 112  # of the images of TMED-2
MARKER = "PHANTOM.txt"
LIMIT = 2**29  # bytes of one file, packed or not; the largest of the three sets have a tenth of it


class Tree:
    """Files below a folder, where a zip file stands for the folder that it would be extracted to.

    Names are relative to the folder, with slashes. Hidden files are passed over. Nothing is extracted.

    Args:
        root: a folder, or one file.
    """

    def __init__(self, root: Source) -> None:
        self.root = Path(root).expanduser().absolute()
        if not self.root.exists():
            raise FileNotFoundError(
                f"There is no folder {printable(str(self.root))}: give the one of your download."
            )
        self._files: list[str] = []
        self._archives: list[str] = []
        digest = hashlib.sha256(os.fsencode(self.root))
        found: list[tuple[str, os.stat_result | None]] = [(self.root.name, self.root.stat())]
        if self.root.is_dir():
            found = [(name.replace(os.sep, "/"), state) for name, state in walk(self.root)]
        else:
            self.root = self.root.parent
        for name, state in found:
            if not _is_hidden(name):
                (self._archives if name.lower().endswith(".zip") else self._files).append(name)
                version = state and (state.st_size, state.st_mtime_ns)
                digest.update(f"{name}\0{version}\n".encode(errors="surrogateescape"))
        self.fingerprint = digest.hexdigest()  # changes when a file is added, removed or written

    @functools.cached_property
    def _places(self) -> dict[str, tuple[zipfile.ZipFile, str] | None]:
        """Archive and name in it of every file, None for files on the disk, which come first."""
        places: dict[str, tuple[zipfile.ZipFile, str] | None] = dict.fromkeys(self._files)
        for archive in self._archives:
            try:
                opened = zipfile.ZipFile(self.root / archive)
            except (zipfile.BadZipFile, OSError) as error:
                raise ValueError(
                    f"{printable(str(self.root / archive))} cannot be read as a zip file "
                    f"({one_line(error)}): download it again, or remove it."
                ) from error
            for member in opened.namelist():
                name = member.replace("\\", "/").removeprefix("./")  # as some programs write them
                if not name.endswith("/") and not _is_hidden(name):
                    places.setdefault(f"{archive[: -len('.zip')]}/{name}", (opened, member))
        return places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def find(self, *endings: str) -> str | None:
        """The first file whose last parts are one of these."""
        wanted = tuple(f"/{ending}" for ending in endings)
        return next((name for name in self if f"/{name}".endswith(wanted)), None)

    def read(self, name: str) -> bytes:
        """The content; whatever is wrong with the file becomes an `UnreadableImage`."""
        path = str(self.root / name)
        try:
            place = self._places[name]
            if place is None and not stat.S_ISREG(os.stat(path).st_mode):
                raise UnreadableImage("it is not a file")  # reading a pipe would never end
            size = os.path.getsize(path) if place is None else place[0].getinfo(place[1]).file_size
            if size > LIMIT:
                raise UnreadableImage(f"it has {size:,} bytes, and the limit is {LIMIT:,}")
            return Path(path).read_bytes() if place is None else place[0].read(place[1])
        except UnreadableImage:
            raise
        except KeyError as error:
            raise UnreadableImage("it does not exist") from error
        except Exception as error:  # zip files are damaged, encrypted or packed in many ways
            raise UnreadableImage(reason(path, error)) from error


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


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


def read_grey(data: bytes) -> np.ndarray:
    """An image file, such as PNG, as uint8 [H, W]."""
    try:
        with strict_decoding(), PIL.Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return np.asarray(to_grey_or_rgb(image).convert("L"))
    except PIL.UnidentifiedImageError as error:
        raise UnreadableImage("it is no image of a known format" if data else "it is empty") from error
    except Exception as error:  # decoders raise nearly anything on a broken file
        raise UnreadableImage(reason("", error)) from error


def square_pixels(frame: np.ndarray, spacing: tuple[float, float]) -> np.ndarray:
    """Resize the height so that pixels are as high as wide; bilinear, as the official code does it."""
    height = max(1, round(frame.shape[0] * spacing[0] / spacing[1]))
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
