"""Run a frozen network once over images and views of them, and keep the features on the disk.

A folder of the cache belongs to one network, one image processor and one choice of views. It holds parts: a
`.npy` file of float16 [images, 1 + weak + strong, numbers], and beside it the hashes of these images. An
image is looked up by the hash of its bytes, so that a pile which has grown costs only the new images. The
views of an image are drawn from a generator seeded by its hash: its features depend on nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from datasets.fingerprint import Hasher
from huggingface_hub import constants
from numpy.typing import NDArray
from torch import Tensor

from hf_fixastep.checks import harmless
from hf_fixastep.data.features import Features, map_part
from hf_fixastep.data.files import printable
from hf_fixastep.data.images import read_labels
from hf_fixastep.data.store import content_of, state_of_files
from hf_fixastep.disk import write_atomically
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.features.part import CHUNK, HASH_BYTES, HASHES, Part, Work
from hf_fixastep.features.processes import together


AT_ONCE = 4096  # rows of a file that are looked through at a time
ABOUT, UNREADABLE = "about.json", ".unreadable.npy"

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
    check_versions(weak, strong)
    work = Work(backbone, backbone.views(flip=flip, cutout=cutout), weak, strong)
    pictures = split.with_format(None).select_columns(image).cast_column(image, datasets.Image(decode=False))
    # What the first process finds counts, as other runs may fill the same cache meanwhile.
    folder = together(lambda: open_folder(Path(cache_dir or default_cache()), work), first_only=True)
    hashes = together(lambda: image_hashes(pictures, image, folder), first_only=True)
    missing = together(lambda: lookup(folder, hashes)[1], first_only=True)
    if len(missing):
        Part(folder, work, hashes[missing]).build(pictures.select(missing), image)
    places, missing, files = lookup(folder, hashes)
    if len(missing):
        raise OSError(f"{folder} has lost features while they were looked up; run the same command again.")
    labels, names = read_labels(split, label)
    fingerprint = hashlib.sha256(folder.name.encode() + hashes.tobytes()).hexdigest()
    found = Features([map_part(file) for file in files], places, weak, fingerprint, labels, names)
    found.files = files
    return without_unreadable(found, pictures, image, skip_unreadable)


def check_versions(weak: int, strong: int) -> None:
    for name, number in (("weak", weak), ("strong", strong)):
        if number < 0:
            raise ValueError(f"{name} is {number}, but an image has 0 or more of these views.")


def without_unreadable(found: Features, pictures: datasets.Dataset, image: str, skip: bool) -> Features:
    bad = np.zeros(len(found), bool)
    for number, file in enumerate(found.files):
        rows = found.places[:, 1].numpy()
        bad |= (found.places[:, 0].numpy() == number) & np.isin(rows, unreadable_rows(file))
    if not bad.any():
        return found
    at = np.flatnonzero(bad)
    names = [printable(str((pictures[int(row)][image] or {}).get("path") or f"row {row}")) for row in at]
    if not skip:
        raise ValueError(
            f"{len(at)} of {len(found)} images cannot be read, the first is {names[0]}: replace or remove "
            "them."
        )
    if len(at) == len(found):
        raise ValueError(f"None of the {len(found)} images can be read, the first is {names[0]}.")
    logger.warning("Skipped %d images that cannot be read: %s.", len(at), harmless(", ".join(names[:10])))
    kept = found.select(np.flatnonzero(~bad))
    kept.skipped = names
    return kept


def unreadable_rows(file: Path) -> NDArray:
    """Rows of a part that are NaN, for their images cannot be read; noted beside it when it is first used."""
    note = file.with_name(f"{file.stem}{UNREADABLE}")
    if note.is_file():
        return np.load(note)
    found = []
    for start in range(0, np.load(file, mmap_mode="r").shape[0], AT_ONCE):
        values = np.load(file, mmap_mode="r")[start : start + AT_ONCE, 0, 0]  # mapped anew: memory is freed
        found.append(start + np.flatnonzero(np.isnan(values)))
    with write_atomically(note) as partial, open(partial, "wb") as opened:
        np.save(opened, np.concatenate(found))
    return np.concatenate(found)


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
