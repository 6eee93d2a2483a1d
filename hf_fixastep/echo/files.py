"""Files of echocardiograms: in folders or in zip files read in place, as images, MetaImage or NIfTI.

No message contains a text from a file, which may be a name.

Apart from `heart2heart.py`, because `datasets` replaces `open` and `os.path` in modules that hold a builder.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import itertools
import math
import os
import posixpath
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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
)


SIDE = 112  # of the images of TMED-2
MARKER = "PHANTOM.txt"
LIMIT = 2**29  # bytes of one file, packed or not; the largest of the three sets have a tenth of it
META_TYPES = {"MET_UCHAR": "u1", "MET_USHORT": "u2", "MET_UINT": "u4", "MET_FLOAT": "f4"}
META_TYPES |= {"MET_CHAR": "i1", "MET_SHORT": "i2", "MET_INT": "i4", "MET_DOUBLE": "f8"}
NIFTI_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}


class Tree:
    """Files below a folder. A zip file stands for the folder that it would be extracted to, and is read in
    place.

    Names are relative to the folder, with slashes. Hidden files are passed over.

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
            found = sorted(_walk(str(self.root)))
        else:
            self.root = self.root.parent
        for name, state in found:
            (self._archives if name.lower().endswith(".zip") else self._files).append(name)
            digest.update(
                f"{name}\0{state and (state.st_size, state.st_mtime_ns)}\n".encode(errors="surrogateescape")
            )
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
                    f"{printable(str(self.root / archive))} cannot be read as a zip file ({one_line(error)}): "
                    "download it again, or remove it."
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


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result | None]]:
    """Files at any depth, and their state. Links are followed, except back to a folder above them."""
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while waiting:
        below, above = waiting.pop()
        try:
            here, entries = (
                os.stat(os.path.join(folder, below)),
                list(os.scandir(os.path.join(folder, below))),
            )
        except OSError:
            if not below:
                raise
            yield below, None  # a folder that cannot be opened counts as a file that cannot be read
            continue
        identity = (here.st_dev, here.st_ino)
        if identity in above:
            continue
        for entry in entries:
            name = f"{below}/{entry.name}" if below else entry.name
            if _is_hidden(entry.name):
                continue
            if entry.is_dir():
                waiting.append((name, above | {identity}))
            else:
                yield name, entry.stat() if entry.is_file() else None


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))


def is_phantom(folder: str | os.PathLike[str] | None) -> bool:
    """Whether the data in a folder are a phantom, drawn by `phantom.py`."""
    return folder is not None and (Path(folder) / MARKER).is_file()


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
    """Resize the height so that pixels are as high as they are wide; bilinear, as the official code does it."""
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


def fit(pixels: np.ndarray, side: int = SIDE) -> np.ndarray:
    """Scale the longer side to `side`, and fill up with black below or on the right; uint8 [side, side]."""
    height, width = pixels.shape
    longer = max(height, width)
    canvas = np.zeros((side, side), np.uint8)
    size = max(1, width * side // longer), max(1, height * side // longer)
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


# Formats


@dataclass
class Echo:
    """A still image or a clip.

    Args:
        frames: [T, H, W], upright, as stored.
        spacing: height and width of a pixel.
    """

    frames: np.ndarray
    spacing: tuple[float, float]


def read_echo(tree: Tree, name: str) -> Echo:
    """A MetaImage (.mhd with its .raw or .zraw, .mha) or NIfTI (.nii, .nii.gz) file."""
    try:
        echo = (
            read_meta_image(tree, name) if name.lower().endswith((".mhd", ".mha")) else read_nifti(tree, name)
        )
    except UnreadableImage:
        raise
    except Exception as error:  # damaged in another way, such as a gz file that is cut short
        raise UnreadableImage(f"it is damaged ({type(error).__name__})") from error
    height, width = echo.spacing
    if not (0 < height < math.inf and 0 < width < math.inf and 0.1 <= height / width <= 10):
        raise UnreadableImage(f"its pixels are {width:g} wide and {height:g} high")
    return echo


def read_meta_image(tree: Tree, name: str) -> Echo:
    header, rest = _meta_header(tree.read(name))
    if (
        header.get("ElementNumberOfChannels", "1") != "1"
        or header.get("BinaryData", "True").lower() != "true"
    ):
        raise UnreadableImage("it holds colours, or pixels as text; expected binary grey pixels")
    dims, spacing = _numbers(header, "DimSize", int), _numbers(header, "ElementSpacing", float)
    kind = header.get("ElementType", "")
    if kind not in META_TYPES:
        raise UnreadableImage(f"its ElementType is missing or none of {', '.join(META_TYPES)}")
    big = "true" in (header.get(f"{key}ByteOrderMSB", "").lower() for key in ("BinaryData", "Element"))
    dtype = np.dtype(f"{'>' if big else '<'}{META_TYPES[kind]}")
    size = _size(dims, dtype)
    data = (
        rest
        if header["ElementDataFile"] == "LOCAL"
        else tree.read(_beside(tree, name, header["ElementDataFile"]))
    )
    if header.get("CompressedData", "").lower() == "true":
        data = zlib.decompressobj().decompress(data, size + 1)
    if len(data) != size:
        raise UnreadableImage(f"it holds {len(data):,} bytes of pixels, but its header speaks of {size:,}")
    width, height, *times = dims
    return Echo(np.frombuffer(data, dtype).reshape(*(times or [1]), height, width), (spacing[1], spacing[0]))


def _meta_header(content: bytes) -> tuple[dict[str, str], bytes]:
    """The entries, of which ElementDataFile is the last, and the bytes behind them."""
    file, header = io.BytesIO(content), {}
    for line in itertools.islice(file, 200):
        key, _, value = line.decode("latin-1").partition("=")
        header[key.strip()] = value.strip()
        if key.strip() == "ElementDataFile":
            return header, file.read()
    raise UnreadableImage("it is no MetaImage header: ElementDataFile is missing")


def _numbers(header: dict[str, str], key: str, kind: type) -> list:
    try:
        numbers = [kind(number) for number in header.get(key, "").split()]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not all(number > 0 for number in numbers):
        raise UnreadableImage(f"its {key} is missing or not two or three positive numbers")
    return numbers


def _beside(tree: Tree, name: str, file: str) -> str:
    """A file in the folder of another; no way leads out of it."""
    place = posixpath.join(posixpath.dirname(name), file)
    if "/" in file or "\\" in file or place not in tree:
        raise UnreadableImage("the file of its pixels is not beside it")
    return place


def _size(dims: Sequence[int], dtype: np.dtype) -> int:
    size = math.prod(dims) * dtype.itemsize
    if size > LIMIT:
        raise UnreadableImage(f"its pixels take {size:,} bytes, and the limit is {LIMIT:,}")
    return size


def read_nifti(tree: Tree, name: str) -> Echo:
    """Columns, rows, time become [T, H, W]. The directions in the header are not used: CAMUS is upright as it
    is.
    """
    data = tree.read(name)
    if data.startswith(b"\x1f\x8b"):
        with gzip.open(io.BytesIO(data)) as file:
            data = file.read(LIMIT + 1)
    order = next((order for order in "<>" if data[:4] == struct.pack(f"{order}i", 348)), None)
    if order is None or len(data) < 352 or data[344:348] != b"n+1\0":
        raise UnreadableImage("it is no complete NIfTI-1 file")
    count, *dims = struct.unpack(f"{order}8h", data[40:56])
    (kind,) = struct.unpack(f"{order}h", data[70:72])
    _, *spacing = struct.unpack(f"{order}8f", data[76:108])
    offset, slope, intercept = struct.unpack(f"{order}3f", data[108:120])
    dims = dims[: max(count, 0)]
    if not 2 <= count <= 7 or min(dims) < 1 or math.prod(dims[3:]) != 1:
        raise UnreadableImage(f"its dimensions are {dims}, expected columns, rows and at most a time")
    if kind not in NIFTI_TYPES:
        raise UnreadableImage(f"its data type has the number {kind}, expected one of {sorted(NIFTI_TYPES)}")
    dtype = np.dtype(f"{order}{NIFTI_TYPES[kind]}")
    size, pixels = _size(dims, dtype), data[int(offset) :]
    if int(offset) < 352 or len(pixels) < size:
        raise UnreadableImage(f"it holds {len(pixels):,} bytes of pixels, but its header speaks of {size:,}")
    frames = np.frombuffer(pixels[:size], dtype).reshape(math.prod(dims[2:3]), dims[1], dims[0])
    if slope and math.isfinite(slope) and (slope, intercept) != (1, 0):
        frames = frames * slope + intercept
    return Echo(frames, (spacing[1], spacing[0]))
