"""Cached features of images: plain ones, and those of a few weak and strong views, as rows to train on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from hf_fixastep.data.images import Images
from hf_fixastep.data.store import map_tensor
from hf_fixastep.data.views import VIEWS


AT_ONCE = 4096  # rows that are converted at a time


@dataclass(frozen=True)
class CachedViews:
    """Draws views from the cached versions of each image, as `Views` makes them from pixels.

    Args:
        weak: versions of the weak view.
        strong: versions of the strong view, which lie behind the weak ones.
    """

    weak: int
    strong: int

    def __call__(self, names: Iterable[str], rows: Rows, generator: torch.Generator) -> dict[str, Tensor]:
        """The named views, drawn in the order of VIEWS, whatever the order of the names.

        The second weak view is another version than the first, unless there is only one.
        """
        names, drawn, first = set(names), {}, None
        for name in (name for name in VIEWS if name in names):
            if name == "strong":
                version = self.weak + self._draw(self.strong, rows, generator)
            elif name == "weak_2" and first is not None and self.weak > 1:
                version = (first + 1 + self._draw(self.weak - 1, rows, generator)) % self.weak
            else:
                version = first = self._draw(self.weak, rows, generator)
            drawn[name] = rows.version(1 + version)
        return drawn

    def _draw(self, count: int, rows: Rows, generator: torch.Generator) -> Tensor:
        if count == 0:
            raise ValueError(
                f"The cache holds {self.weak} weak and {self.strong} strong views of an image, but this loss "
                "needs both kinds; embed the images with more views."
            )
        return torch.randint(count, (len(rows),), generator=generator)

    def plain(self, rows: Rows) -> Tensor:
        return rows.version(0)


class Rows:
    """The images of a batch, whose features are read once it is known which version of each is wanted.

    What goes to another process or device has all versions, for that cannot be known there.

    Args:
        parts: [N, versions, D] each.
        places: part and row of each image, int64 [n, 2], in the memory of the host.
    """

    def __init__(self, parts: Sequence[Tensor], places: Tensor) -> None:
        self.parts, self.places = parts, places

    @classmethod
    def of(cls, values: Tensor) -> Rows:
        """All rows of [n, versions, D]."""
        at = torch.arange(len(values))
        return cls([values], torch.stack([torch.zeros_like(at), at], 1))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, some: slice) -> Rows:
        return Rows(self.parts, self.places[some])

    def __reduce__(self) -> Any:
        return Rows.of, (self.read(),)

    def pin_memory(self) -> Rows:
        return Rows.of(self.read().pin_memory())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Rows:
        if torch.device(device) == self.parts[0].device:
            return self
        return Rows.of(self.read().to(device, non_blocking=non_blocking))

    def read(self) -> Tensor:
        """All versions, [n, versions, D]."""
        return self._take(self.parts, self.places[:, 1])

    def version(self, version: Tensor | int) -> Tensor:
        """One version of each image, float32 [n, D]."""
        at = self.places[:, 1] * self.parts[0].shape[1] + version
        return self._take([part.flatten(0, 1) for part in self.parts], at).float()

    def _take(self, parts: Sequence[Tensor], at: Tensor) -> Tensor:
        first = parts[0]
        if len(parts) == 1:
            return first.index_select(0, at.to(first.device))
        found = torch.empty(len(at), *first.shape[1:], dtype=first.dtype)
        for number, part in enumerate(parts):
            chosen = (self.places[:, 0] == number).nonzero()[:, 0]
            if len(chosen):
                found[chosen] = part.index_select(0, at[chosen])
        return found


class Features(Dataset):
    """Features of images, and their labels if there are any, read from the disk when they are used.

    Args:
        parts: float16 [N, 1 + weak + strong, D] each, mapped from files.
        places: part and row of each image, int64 [N, 2].
        weak: versions of the weak view.
        fingerprint: changes with the images and with what made the features of them.
    """

    def __init__(
        self,
        parts: Sequence[Tensor],
        places: Tensor,
        weak: int,
        fingerprint: str,
        labels: Tensor | None = None,
        class_names: list[str] | None = None,
    ) -> None:
        self.parts, self.places, self.weak = list(parts), places, weak
        self.labels, self.class_names = labels, class_names
        own = b"unlabeled" if labels is None else labels.numpy().tobytes()
        self.fingerprint = hashlib.sha256(fingerprint.encode() + own).hexdigest()[:16]
        self.files: list[Path] = []  # that the parts are mapped from
        self.skipped: list[str] = []  # images that could not be read

    @classmethod
    def of(
        cls,
        values: Tensor,
        labels: Tensor | None = None,
        class_names: list[str] | None = None,
        weak: int = 0,
    ) -> Features:
        """Features in memory, [N, D] or [N, 1 + weak + strong, D]."""
        values = values[:, None] if values.ndim == 2 else values
        values = values.contiguous()
        fingerprint = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        return cls([values], Rows.of(values).places, weak, fingerprint, labels, class_names)

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes, which map the files themselves."""
        return {**self.__dict__, "parts": None} if self.files else self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.files:
            self.parts = [map_part(path) for path in self.files]

    @property
    def versions(self) -> tuple[int, int]:
        """Of the weak and of the strong view."""
        return self.weak, self.parts[0].shape[1] - 1 - self.weak

    @property
    def row_shape(self) -> list[int]:
        """Of what a model gets of one image."""
        return [self.parts[0].shape[2]]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = self.__getitems__([index])
        batch["pixel_values"] = batch["pixel_values"].read()
        return {name: values[0] for name, values in batch.items()}

    def __getitems__(self, indices: Sequence[int] | Tensor) -> dict[str, Any]:
        rows = torch.as_tensor(indices, dtype=torch.int64)
        batch = {"pixel_values": Rows(self.parts, self.places.index_select(0, rows))}
        return batch if self.labels is None else {**batch, "labels": self.labels.index_select(0, rows)}

    def plain(self) -> NDArray:
        """The features of the images as they are, float32 [N, D]."""
        found = np.empty((len(self), *self.row_shape), np.float32)
        for start in range(0, len(self), AT_ONCE):
            rows = Rows(self.parts, self.places[start : start + AT_ONCE])
            found[start : start + AT_ONCE] = rows.version(0).numpy()
        return found

    def weak_versions(self) -> NDArray:
        """The plain images and their weak views, float32 [N, 1 + weak, D]."""
        return Rows(self.parts, self.places).read()[:, : 1 + self.weak].float().numpy()

    def spaced(self, most: int) -> Features:
        """At most so many of the images, evenly spaced."""
        return self.select(np.unique(np.linspace(0, len(self) - 1, min(len(self), most)).astype(int)))

    def select(self, rows: Sequence[int] | NDArray, labels: Tensor | None = None) -> Features:
        """Some of the images, with their labels or with the given ones."""
        at = torch.as_tensor(np.asarray(rows), dtype=torch.int64)
        if labels is None and self.labels is not None:
            labels = self.labels[at]
        name = f"{self.fingerprint} {at.tolist()}"
        some = Features(self.parts, self.places[at], self.weak, name, labels, self.class_names)
        some.files = self.files
        return some


Examples = Images | Features  # what a training takes


def map_part(path: Path) -> Tensor:
    """The features of a finished file."""
    with open(path, "rb") as file:
        np.lib.format.read_magic(file)
        shape, _, kind = np.lib.format.read_array_header_1_0(file)
        return map_tensor(path, getattr(torch, kind.name), file.tell(), shape)
