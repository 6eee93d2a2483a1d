"""Decoded images in a file beside the Arrow cache: built once, by one process, and mapped from then on."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import logging
import math
import mmap
import os
import secrets
import shutil
import sys
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import datasets
import numpy as np
import torch
from datasets.fingerprint import Hasher
from filelock import FileLock
from torch import Tensor

from hf_fixastep._compat.datasets_private import row_numbers


# Of the decoding: to be raised when the same images give other pixels, or the file another layout.
VERSION = 2
BLOCKS = 64  # parts of a file that have a checksum each
HEADER_BYTES = 4096  # a page
BLOCK_BYTES = 2**20  # what is held in memory while rows are rearranged
# The kernel need not set memory aside in case all is written to. Python names this flag from 3.13 on.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PixelFile:
    """A file of one page of JSON and, raw, uint8 pixels [N, C, H, W].

    Args:
        key: what is decoded, and how.
        source: state of the files that the images are read from.
    """

    path: Path
    key: str
    source: str
    shape: tuple[int, int, int, int]

    @property
    def size(self) -> int:
        """In bytes."""
        return HEADER_BYTES + math.prod(self.shape)

    def header(self, checksums: list[int]) -> bytes:
        fields = {
            "version": VERSION,
            "key": self.key,
            "source": self.source,
            "dtype": "uint8",
            "shape": self.shape,
            "checksums": checksums,
        }
        return json.dumps(fields).encode().ljust(HEADER_BYTES)

    def is_finished(self) -> bool:
        """The file is there, of these images, and one of its parts, another one each time, is unharmed."""
        try:
            with open(self.path, "rb") as file:
                header = file.read(HEADER_BYTES)
                checksums = json.loads(header)["checksums"]
                if header != self.header(checksums) or os.fstat(file.fileno()).st_size != self.size:
                    return False
                block = secrets.randbelow(BLOCKS)
                return self.checksum(file, block) == checksums[block]
        except (FileNotFoundError, ValueError, TypeError, LookupError):
            return False

    def checksum(self, file: BinaryIO, block: int) -> int:
        start, end = (math.prod(self.shape) * at // BLOCKS for at in (block, block + 1))
        file.seek(HEADER_BYTES + start)
        value = 0
        for at in range(start, end, BLOCK_BYTES):
            value = zlib.crc32(file.read(min(BLOCK_BYTES, end - at)), value)
        return value

    def map(self) -> Tensor:
        """The pixels, read from the disk when they are used.

        They can be changed neither for others, as the mapping is private, nor unnoticed: in-place operations
        on inference tensors are errors. A mapping that is only readable would end the process instead.
        """
        return map_tensor(self.path, torch.uint8, HEADER_BYTES, self.shape)


def map_tensor(path: Path, dtype: torch.dtype, offset: int, shape: Sequence[int]) -> Tensor:
    """What a file holds behind its first `offset` bytes, to be read only; see `PixelFile.map`."""
    flags, protection = mmap.MAP_PRIVATE | NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    size = offset + math.prod(shape) * dtype.itemsize
    with open(path, "rb") as file, torch.inference_mode():
        mapping = mmap.mmap(file.fileno(), size, flags=flags, prot=protection)
        # Else the system reads megabytes around every row, and soon forgets them.
        if size > memory() / 2:
            mapping.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(mapping, dtype=dtype, offset=offset).view(tuple(shape))


def memory() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def possible_files(
    split: datasets.Dataset, image: str, size: tuple[int, int], channels: int | None
) -> dict[int, PixelFile]:
    """What the decoded images of a split may be stored as, by the number of channels; all have the same path.

    Args:
        split: unformatted, and without other columns than `image`.
        channels: as in `Images.from_dataset`.
    """
    content = content_of(split)
    key = Hasher.hash((content, image, tuple(size), channels, VERSION))
    caches = split.cache_files
    folder = os.path.dirname(caches[0]["filename"]) if caches else datasets.config.HF_DATASETS_CACHE
    path = Path(folder).absolute() / f"pixels-{size[0]}x{size[1]}-{key}.uint8"
    source = state_of_files(split, image)
    return {
        c: PixelFile(path, key, source, (len(split), c, *size)) for c in ([channels] if channels else [1, 3])
    }


def content_of(split: datasets.Dataset) -> str:
    """Changes with the rows of a split; its fingerprint changes with every transform too, even at random."""
    return Hasher.hash((split.data, row_numbers(split), split.features))


def state_of_files(split: datasets.Dataset, image: str) -> str:
    """Changes when the Arrow files, or images that these only name, are written."""
    digest = hashlib.sha256()
    caches = (entry["filename"] for entry in split.cache_files)
    named = (column.filter(column.field("bytes").is_null()) for column in split.data.column(image).chunks)
    pictures = (path for column in named for path in column.field("path").to_pylist() if path is not None)
    for path in itertools.chain(caches, pictures):
        with contextlib.suppress(OSError, ValueError):  # a URL, or missing, which decoding will tell
            state = os.stat(path)
            digest.update(f"{state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def build_once(files: dict[int, PixelFile], rows: Iterator[Tensor]) -> PixelFile:
    """The finished one of `possible_files`, after building it if there is none.

    Of several processes that need it at the same time one builds it, and the others wait.

    Args:
        rows: the images, uint8 [C, H, W] where C may rise from 1 to 3; not touched if the file is there.
    """
    path = next(iter(files.values())).path
    with _explained(*files.values()):
        finished = _finished(files)
        if finished is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(path.with_name("pixels.lock")):  # released by the system if the holder dies
                finished = _finished(files) or _build(path, files, rows)
    return finished


def _finished(files: dict[int, PixelFile]) -> PixelFile | None:
    return next((file for file in files.values() if file.is_finished()), None)


def _build(path: Path, files: dict[int, PixelFile], rows: Iterable[Tensor]) -> PixelFile:
    """Under the lock: write to a file of another name, which gets its own once it is safely on the disk."""
    if path.exists():
        logger.warning("%s is damaged or of older images, and is built again.", path)
    for leftover in path.parent.glob("pixels-*.partial"):  # of processes that died
        leftover.unlink()
    partial = path.with_suffix(f".{uuid.uuid4().hex[:8]}.partial")
    out = open(partial, "w+b")  # noqa: SIM115, closed below
    try:
        file = _write_rows(out, files, rows)
        with _explained(file):
            out.flush()
            checksums = [file.checksum(out, block) for block in range(BLOCKS)]
            out.seek(0)
            out.write(file.header(checksums))
            out.flush()
            os.fsync(out.fileno())
            partial.replace(path)
        return file
    finally:
        # On a full disk it fails once more, like the write that was reported.
        with contextlib.suppress(OSError):
            out.close()
        partial.unlink(missing_ok=True)


def _write_rows(out: BinaryIO, files: dict[int, PixelFile], rows: Iterable[Tensor]) -> PixelFile:
    file = next(iter(files.values()))
    for row, pixels in enumerate(rows):
        before, file = file, files[len(pixels)]
        with _explained(file):
            if row == 0:
                _check_space(file)
                out.seek(HEADER_BYTES)
            elif file is not before:
                _repeat_grey(out, row, pixels[0].numel())
            out.write(pixels.numpy().data)
    return file


def _check_space(file: PixelFile) -> None:
    if shutil.disk_usage(file.path.parent).free < file.size:  # better now than after an hour
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _repeat_grey(out: BinaryIO, count: int, area: int) -> None:
    """Turn the rows written so far from one channel into three, last row first, as they grow in place."""
    at_once = max(1, BLOCK_BYTES // area)
    for first in reversed(range(0, count, at_once)):
        out.seek(HEADER_BYTES + first * area)
        grey = np.frombuffer(out.read(min(at_once, count - first) * area), np.uint8)
        out.seek(HEADER_BYTES + 3 * first * area)
        out.write(grey.reshape(-1, 1, area).repeat(3, axis=1).data)
    out.seek(HEADER_BYTES + 3 * count * area)


@contextlib.contextmanager
def _explained(*files: PixelFile) -> Iterator[None]:
    """Say of an error of the disk which file was to be written there."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # explained already
            raise
        needed = f"{'up to ' if len(files) > 1 else ''}{max(file.size for file in files):,}"
        raise OSError(
            f"The decoded images need {needed} bytes in {files[0].path.parent}, which failed "
            f"({error.strerror}): make room and allow writing there, or load the data set with another "
            "cache_dir."
        ) from error
