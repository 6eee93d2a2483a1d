"""Run a frozen network once over images and views of them, and keep the features on the disk.

A folder of the cache belongs to one network, one image processor and one choice of views. It holds parts: a
`.npy` file of float16 [images, 1 + weak + strong, numbers], and beside it the hashes of these images. An
image is looked up by the hash of its bytes, so that a pile which has grown costs only the new images. The
views of an image are drawn from a generator seeded by its hash: its features depend on nothing else.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import torch
from accelerate import PartialState
from datasets.fingerprint import Hasher
from filelock import FileLock
from huggingface_hub import constants
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from hf_fixastep.data.features import Features, map_part
from hf_fixastep.data.files import printable
from hf_fixastep.data.images import read_labels
from hf_fixastep.data.store import content_of, state_of_files
from hf_fixastep.data.views import StrongPlan, Views, WeakPlan
from hf_fixastep.disk import write_atomically
from hf_fixastep.features.backbone import Backbone


VERSION = 1  # to be raised when the same images give other features
CHUNK = 64  # images per forward; the same for any number of processes, so that these give the same bits
HASH_BYTES = 16
ABOUT, HASHES = "about.json", ".hashes.npy"

logger = logging.getLogger(__name__)


def default_cache() -> Path:
    return Path(constants.HF_HOME) / "fixastep" / "features"


def embed(
    split: datasets.Dataset,
    backbone: Backbone,
    *,
    weak: int = 4,
    strong: int = 2,
    flip: bool = True,
    cutout: float = 0.5,
    cache_dir: str | os.PathLike[str] | None = None,
    skip_unreadable: bool = False,
    image: str = "image",
    label: str = "label",
) -> Features:
    """The features of all images of a split, computed where the cache does not have them.

    On several processes each takes its share of the images. A call that was killed goes on where it was.

    Args:
        weak: versions of the weak view.
        strong: versions of the strong view.
        flip: mirror half of the views.
        cutout: box of the strong view, as in `Views`.
        cache_dir: where the features of all networks are kept, by default with the other files of Hugging
            Face.
        skip_unreadable: leave out images that cannot be read, instead of raising an error.
    """
    for name, number in (("weak", weak), ("strong", strong)):
        if number < 0:
            raise ValueError(f"{name} is {number}, but an image has 0 or more of these views.")
    work = Work(backbone, backbone.views(flip=flip, cutout=cutout), weak, strong)
    folder = open_folder(Path(cache_dir or default_cache()), work)
    pictures = split.with_format(None).select_columns(image).cast_column(image, datasets.Image(decode=False))
    hashes = image_hashes(pictures, image, folder)
    state = PartialState()
    missing = lookup(folder, hashes)[1]
    state.wait_for_everyone()  # all have looked before one finishes a part
    if len(missing):
        Part(folder, work, hashes[missing]).build(pictures.select(missing), image, state)
    places, missing, files = lookup(folder, hashes)
    if len(missing):
        raise OSError(f"{folder} has lost features while they were looked up; run the same command again.")
    labels, names = read_labels(split, label)
    fingerprint = hashlib.sha256(folder.name.encode() + hashes.tobytes()).hexdigest()
    found = Features([map_part(file) for file in files], places, weak, fingerprint, labels, names)
    found.files = files
    return without_unreadable(found, pictures, image, skip_unreadable)


def without_unreadable(found: Features, pictures: datasets.Dataset, image: str, skip: bool) -> Features:
    """Features of images that cannot be read are NaN."""
    bad = [at for at, row in enumerate(first_numbers(found)) if row != row]
    if not bad:
        return found
    names = [printable(str(pictures[at][image].get("path") or f"row {at}")) for at in bad]
    if not skip:
        raise ValueError(
            f"{len(bad)} of {len(found)} images cannot be read, the first is {names[0]}: replace or remove "
            "them."
        )
    if len(bad) == len(found):
        raise ValueError(f"None of the {len(found)} images can be read, the first is {names[0]}.")
    logger.warning("Skipped %d images that cannot be read: %s.", len(bad), ", ".join(names[:10]))
    kept = found.select(np.setdiff1d(np.arange(len(found)), bad))
    kept.skipped = names
    return kept


def first_numbers(found: Features) -> NDArray:
    """One number of each image."""
    numbers = np.empty(len(found), np.float16)
    for at, part in enumerate(found.parts):
        chosen = found.places[:, 0] == at
        numbers[chosen.numpy()] = part[:, 0, 0].numpy()[found.places[chosen, 1].numpy()]
    return numbers


# ---- what the cache has


def open_folder(cache: Path, work: Work) -> Path:
    """The folder of this network, processor and views; it tells for whom it is."""
    about = work.identity()
    folder = cache / Hasher.hash(about)
    if (folder / ABOUT).is_file():
        found = json.loads((folder / ABOUT).read_text())
        if changed := [name for name in about if found.get(name) != about[name]]:
            raise ValueError(
                f"{folder} holds features of another {' and another '.join(changed)}: it was moved or "
                "changed by hand; delete it."
            )
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with write_atomically(folder / ABOUT) as partial:
        partial.write_text(json.dumps(about, indent=1))
    return folder


def image_hashes(pictures: datasets.Dataset, image: str, folder: Path) -> NDArray:
    """One hash per image, [N] of 16 bytes; of images that were hashed before, as they were then."""
    state = state_of_files(pictures, image)
    known = folder / f"split-{Hasher.hash((content_of(pictures), state))}.npy"
    if known.is_file():
        return np.load(known)
    digests = b"".join(
        hashlib.blake2b(encoded(value), digest_size=HASH_BYTES).digest()
        for value in values_of(pictures, image)
    )
    hashes = np.frombuffer(digests, f"V{HASH_BYTES}")
    with write_atomically(known) as partial, open(partial, "wb") as file:
        np.save(file, hashes)
    return hashes


def values_of(pictures: datasets.Dataset, image: str) -> Iterator[dict[str, Any] | None]:
    return (value for batch in pictures.iter(batch_size=CHUNK) for value in batch[image])


def encoded(value: dict[str, Any] | None) -> bytes:
    """The bytes of an image; of one that is not there those of its name."""
    if value is None:
        return b""
    if value["bytes"] is not None:
        return value["bytes"]
    try:
        return Path(value["path"]).read_bytes()
    except OSError:
        return str(value["path"]).encode()


def lookup(folder: Path, hashes: NDArray) -> tuple[Tensor, NDArray, list[Path]]:
    """Part and row of each image, -1 where there is none; rows that stand for all missing ones; the parts."""
    names, first, back = np.unique(hashes.view(f"S{HASH_BYTES}"), return_index=True, return_inverse=True)
    files: list[Path] = []
    places = np.full((len(names), 2), -1, np.int64)
    for index in sorted(folder.glob(f"part-*{HASHES}")):
        known = np.load(index).view(f"S{HASH_BYTES}")
        _, ours, theirs = np.intersect1d(names, known, assume_unique=True, return_indices=True)
        new = places[ours, 0] < 0
        if new.any():
            places[ours[new]] = np.stack([np.full(new.sum(), len(files)), theirs[new]], 1)
            files.append(index.with_name(index.name.removesuffix(HASHES) + ".npy"))
    missing = np.sort(first[places[:, 0] < 0])
    return torch.from_numpy(places[back]), missing, files


# ---- what it has not


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

    def features(self, images: Sequence[PIL.Image.Image], seeds: Sequence[int]) -> NDArray:
        """float16 [N, *shape]; an image's views depend on its seed alone."""
        pixels = self.backbone.pixels(images)
        count = len(pixels)
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
        self.partial = folder / f"{self.stem}.partial"
        self.shape = (len(hashes), *work.shape)

    def build(self, pictures: datasets.Dataset, image: str, state: PartialState) -> None:
        if not state.is_main_process:
            state.wait_for_everyone()
            self._fill(pictures, image, state)
            state.wait_for_everyone()
            state.wait_for_everyone()
            return
        with FileLock(self.folder / f"{self.stem}.lock"):
            self._reserve()
            state.wait_for_everyone()
            self._fill(pictures, image, state)
            state.wait_for_everyone()
            self._finish()
            state.wait_for_everyone()

    def _reserve(self) -> None:
        """Make the file in its full size, unless an earlier call did."""
        needed = int(np.prod(self.shape)) * 2
        free = shutil.disk_usage(self.folder).free + (self._used() if self.partial.exists() else 0)
        if free < needed:
            raise OSError(
                f"The features of {len(self.hashes):,} images need {needed:,} bytes in {self.folder}, but "
                f"{free:,} are free: make room, give another --cache_dir, or embed fewer views."
            )
        if self.file.exists():  # killed between the last two lines of an earlier call
            self.file.replace(self.partial)
        if not self.partial.exists():
            self._forget_notes()
            np.lib.format.open_memmap(self.partial, "w+", np.float16, self.shape)

    def _used(self) -> int:
        return self.partial.stat().st_blocks * 512

    def _done(self) -> set[int]:
        notes = (path.read_bytes() for path in self.folder.glob(f"{self.stem}.done-*"))
        return {n for note in notes for n in np.frombuffer(note[: len(note) // 4 * 4], np.uint32).tolist()}

    def _fill(self, pictures: datasets.Dataset, image: str, state: PartialState) -> None:
        done, rank, world = self._done(), state.process_index, state.num_processes
        state.wait_for_everyone()  # all have read the notes before one writes another
        chunks = range((len(self.hashes) + CHUNK - 1) // CHUNK)
        mine = [number for number in chunks if number not in done and number % world == rank]
        seeds = np.frombuffer(self.hashes.tobytes(), np.int64).reshape(-1, HASH_BYTES // 8)[:, 0] & (
            2**62 - 1
        )
        offset = np.load(self.partial, mmap_mode="r").offset
        row_bytes = int(np.prod(self.work.shape)) * 2
        with (
            tqdm(
                total=len(self.hashes),
                initial=min(len(done) * CHUNK, len(self.hashes)),
                desc="Embedding",
                unit=" images",
                disable=rank > 0 or len(mine) < 4,
            ) as bar,
            open(self.partial, "r+b", buffering=0) as file,
            open(self.folder / f"{self.stem}.done-{rank}", "ab", buffering=0) as notes,
        ):
            for number in mine:
                rows = slice(number * CHUNK, (number + 1) * CHUNK)
                values = pictures[rows][image]
                found = self._features(values, seeds[rows].tolist())
                try:
                    os.pwrite(file.fileno(), found.tobytes(), offset + rows.start * row_bytes)
                    os.fsync(file.fileno())
                    notes.write(np.uint32(number).tobytes())
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    raise OSError(f"No room is left in {self.folder}: make room and run it again.") from error
                bar.update(min(len(values) * world, bar.total - bar.n))

    def _features(self, values: Sequence[dict[str, Any] | None], seeds: Sequence[int]) -> NDArray:
        """NaN for images that cannot be read."""
        opened = enumerate(map(picture, values))
        images = {at: image for at, image in opened if image is not None}
        found = np.full((len(values), *self.work.shape), np.nan, np.float16)
        if images:
            found[list(images)] = self.work.features(list(images.values()), [seeds[at] for at in images])
        return found

    def _finish(self) -> None:
        self.partial.replace(self.file)
        with write_atomically(self.folder / f"{self.stem}{HASHES}") as partial, open(partial, "wb") as file:
            np.save(file, self.hashes)
            file.flush()
            os.fsync(file.fileno())
        self._forget_notes()

    def _forget_notes(self) -> None:
        for note in self.folder.glob(f"{self.stem}.done-*"):
            note.unlink()


def picture(value: dict[str, Any] | None) -> PIL.Image.Image | None:
    try:
        image = datasets.Image().decode_example(value)
        image.load()
        return image
    except Exception:  # decoders raise nearly anything on a broken image
        return None
