"""A part of the cache of features while it is made: by several processes, and in spite of kills."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import datasets
import numpy as np
import PIL.Image
import torch
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from hf_fixastep.data.views import StrongPlan, Views, WeakPlan
from hf_fixastep.disk import write_atomically
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.features.processes import processes, together


VERSION = 1  # to be raised when the same images give other features
CHUNK = 64  # images per forward; the same for any number of processes, so that these give the same bits
DECODED = 8  # images that a thread holds in their full size
HASH_BYTES, NOTE_BYTES = 16, 4
HASHES = ".hashes.npy"
# Errors of the machine, which say nothing about the image.
PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)

T = TypeVar("T")
R = TypeVar("R")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """What is done with every image."""

    backbone: Backbone
    views: Views
    weak: int
    strong: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the features of one image."""
        return 1 + self.weak + self.strong, self.backbone.size

    def identity(self) -> dict[str, str]:
        views = f"{self.views}, {self.weak} weak, {self.strong} strong"
        return {**self.backbone.identity, "views": views, "version": str(VERSION)}

    def features(self, pixels: Tensor, seeds: Sequence[int]) -> NDArray:
        """float16 [N, *shape] of uint8 images; the views of one depend on its seed alone."""
        count, pixels = len(pixels), pixels.to(self.backbone.device)
        # The network always gets whole chunks, as other sizes may take other ways to sum up.
        pixels = torch.cat([pixels, pixels[:1].expand(CHUNK - count, -1, -1, -1)])
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        generators += [torch.Generator().manual_seed(0)] * (CHUNK - count)
        shape = torch.Size([1, *pixels.shape[1:]])
        made = [self.views.plain(pixels)]
        for _ in range(self.weak):
            plan = join([self.views.draw_weak(shape, generator) for generator in generators])
            made.append(self.views.carry_out_weak(pixels, plan))
        for _ in range(self.strong):
            plan = join([self.views.draw_strong(shape, generator) for generator in generators])
            made.append(self.views.carry_out_strong(pixels, plan))
        rows = torch.stack([self.backbone.features(view).cpu() for view in made], 1)[:count]
        found = rows.half()
        if not found.isfinite().all():
            raise ValueError(
                f"The features reach {rows.abs().max():.3g}, which float16 cannot hold; this network cannot "
                "be cached, fine-tune it instead."
            )
        return found.numpy()


def join(plans: Sequence[Any]) -> Any:
    """One plan for a batch from the plans of its images."""
    first = plans[0]
    if isinstance(first, Tensor):
        return torch.cat(list(plans), dim=-1)
    names = [field.name for field in fields(first)]
    joined = {name: join([getattr(plan, name) for plan in plans]) for name in names}
    if isinstance(first, StrongPlan):
        joined["centers"] = torch.cat([plan.centers for plan in plans])
    return (StrongPlan if isinstance(first, StrongPlan) else WeakPlan)(**joined)


class Part:
    """A part of the cache while it is made.

    Chunks of images are numbered; process r of n makes those with number % n = r, and notes each once it is
    on the disk. Whoever goes on after a kill, with however many processes, leaves these out.
    """

    def __init__(self, folder: Path, work: Work, hashes: NDArray) -> None:
        self.work, self.hashes = work, hashes
        self.stem = f"part-{hashlib.sha256(hashes.tobytes()).hexdigest()[:16]}"
        self.folder, self.file = folder, folder / f"{self.stem}.npy"
        self.index, self.partial = folder / f"{self.stem}{HASHES}", folder / f"{self.stem}.partial"
        self.failed = folder / f"{self.stem}.failed"  # there once one of the processes has failed
        self.shape = (len(hashes), *work.shape)

    def build(self, pictures: datasets.Dataset, image: str) -> None:
        with self._alone():
            if together(self._reserve, first_only=True):
                done = together(self._done, first_only=True)
                together(lambda: self._fill(pictures, image, done))
                together(self._finish, first_only=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other run makes this part; the first process sees to that for all."""
        if not processes().is_main_process:
            yield
            return
        lock = FileLock(self.folder / f"{self.stem}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.warning("Another run embeds the same images: waiting for it.")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _reserve(self) -> bool:
        """Make the file in its full size, unless an earlier call did; whether there is anything to do."""
        if self.index.exists():  # another run has made it meanwhile
            return False
        needed = int(np.prod(self.shape)) * 2
        free = shutil.disk_usage(self.folder).free + (self._used() if self.partial.exists() else 0)
        if free < needed:
            raise OSError(
                f"The features of {len(self.hashes):,} images need {needed:,} bytes in {self.folder}, but "
                f"{free:,} are free: make room, give another --cache_dir, or embed fewer views."
            )
        if self.file.exists():  # killed between the first two lines of _finish
            self.file.replace(self.partial)
        self.failed.unlink(missing_ok=True)
        if not self.partial.exists():
            self._forget_notes()
            with write_atomically(self.partial) as partial:
                np.lib.format.open_memmap(partial, "w+", np.float16, self.shape)
        return True

    def _used(self) -> int:
        return self.partial.stat().st_blocks * 512

    def _done(self) -> set[int]:
        """Numbers of the chunks that are on the disk."""
        found: set[int] = set()
        for note in self.folder.glob(f"{self.stem}.done-*"):
            os.truncate(note, note.stat().st_size // NOTE_BYTES * NOTE_BYTES)  # a number may be cut off
            found.update(np.fromfile(note, np.uint32).tolist())
        return found

    def _fill(self, pictures: datasets.Dataset, image: str, done: set[int]) -> None:
        state = processes()
        rank, world = state.process_index, state.num_processes
        count = (len(self.hashes) + CHUNK - 1) // CHUNK
        left = [number for number in range(count) if number not in done]
        mine = left[rank::world]
        seeds = np.frombuffer(self.hashes.tobytes(), np.int64).reshape(-1, HASH_BYTES // 8)[:, 0] & (
            2**62 - 1
        )
        offset = np.load(self.partial, mmap_mode="r").offset
        row_bytes = int(np.prod(self.work.shape)) * 2
        chunks = (pictures[number * CHUNK : (number + 1) * CHUNK][image] for number in mine)
        with (
            tqdm(
                total=len(self.hashes),
                initial=min(len(done) * CHUNK, len(self.hashes)),
                desc="Embedding",
                unit=" images",
                disable=rank > 0 or len(left) < 4,
            ) as bar,
            open(self.partial, "r+b") as file,
            open(self.folder / f"{self.stem}.done-{rank}", "ab", buffering=0) as notes,
            self._telling_others(),
        ):
            for number, (readable, pixels) in zip(mine, ahead(self._read, chunks), strict=True):
                if self.failed.exists():
                    return
                start = number * CHUNK
                found = np.full((len(readable), *self.work.shape), np.nan, np.float16)
                if len(pixels):
                    found[readable] = self.work.features(pixels, seeds[start:][readable.nonzero()].tolist())
                file.seek(offset + start * row_bytes)
                file.write(found.tobytes())
                file.flush()
                os.fsync(file.fileno())
                notes.write(np.uint32(number).tobytes())
                bar.update(min(len(readable) * world, bar.total - bar.n))

    @contextlib.contextmanager
    def _telling_others(self) -> Iterator[None]:
        """An error makes the other processes end their work too."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(OSError):
                self.failed.touch()
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(f"No room is left in {self.folder}: make room and run it again.") from error
            raise

    def _read(self, values: Sequence[dict[str, Any] | None]) -> tuple[NDArray, Tensor]:
        """Which images can be read, and the pixels of these; few are held in their full size."""
        readable, pixels = np.zeros(len(values), bool), []
        for start in range(0, len(values), DECODED):
            images = [picture(value) for value in values[start : start + DECODED]]
            readable[start : start + DECODED] = [image is not None for image in images]
            if opened := [image for image in images if image is not None]:
                pixels.append(self.work.backbone.pixels(opened))
        return readable, torch.cat(pixels) if pixels else torch.empty(0)

    def _finish(self) -> None:
        self.partial.replace(self.file)
        with write_atomically(self.index) as partial, open(partial, "wb") as file:
            np.save(file, self.hashes)
            file.flush()
            os.fsync(file.fileno())
        self._forget_notes()

    def _forget_notes(self) -> None:
        for note in self.folder.glob(f"{self.stem}.done-*"):
            note.unlink()


def ahead(read: Callable[[T], R], values: Iterable[T]) -> Iterator[R]:
    """read(value) of each value, in their order, by threads that are a little ahead of who uses it."""
    threads = torch.get_num_threads()
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for value in values:
                waiting.append(pool.submit(read, value))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def picture(value: dict[str, Any] | None) -> PIL.Image.Image | None:
    """None if it cannot be read."""
    try:
        image = datasets.Image().decode_example(value)
        image.load()
        return image
    except Exception as error:  # decoders raise nearly anything on a broken image
        if isinstance(error, MemoryError) or getattr(error, "errno", None) in PASSING:
            raise
        return None
