"""Batches that pair labeled with unlabeled images, a pure function of the seed and the number of the draw."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from hf_fixastep.data.features import Examples


@dataclass(frozen=True)
class Draw:
    """The rows that one rank loads for one batch.

    Args:
        number: of the draw, counted over all ranks; it never repeats, so it can seed whatever the draw needs.
            It is not the step of the optimizer, which several draws may share.
        labeled: rows of the labeled set.
        unlabeled: rows of the unlabeled set.
    """

    number: int
    labeled: list[int]
    unlabeled: list[int]


class PairedSampler(Sampler[Draw]):
    """Draws from two endless shuffled streams; draw number n is a pure function of (seed, n).

    Every image of a set comes once before any comes again. Rank r of n takes the draws r, r + n, ..., so that
    n ranks see together what one rank sees with n times the batch sizes.

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
        for turn in range(first, first + self.steps_per_epoch):
            number = turn * self.world + self.rank
            yield Draw(number, self._take(0, number), self._take(1, number))

    def _take(self, stream: int, number: int) -> list[int]:
        size, batch_size = self.sizes[stream], self.batch_sizes[stream]
        taken: list[int] = []
        while len(taken) < batch_size:
            turn, offset = divmod(number * batch_size + len(taken), size)
            taken += self._permutation(stream, turn)[offset : offset + batch_size - len(taken)].tolist()
        return taken

    def _permutation(self, stream: int, turn: int) -> np.ndarray:
        if stream not in self._permutations or self._permutations[stream][0] != turn:
            order = np.random.default_rng([self.seed, stream, turn]).permutation(self.sizes[stream])
            self._permutations[stream] = (turn, order)
        return self._permutations[stream][1]


def _check_streams(sizes: tuple[int, int], batch_sizes: tuple[int, int], steps_per_epoch: int) -> None:
    if steps_per_epoch < 1:
        raise ValueError(
            f"There are {steps_per_epoch} steps per epoch, but expected 1 or more: raise the number."
        )
    for name, size, batch_size, least in zip(
        ("labeled", "unlabeled"), sizes, batch_sizes, (1, 0), strict=True
    ):
        if batch_size < least:
            raise ValueError(
                f"The {name} batch size is {batch_size}, but expected {least} or more: raise it."
            )
        if batch_size > 0 and size < 1:
            remedy = "add images" if name == "labeled" else "add images or set the unlabeled batch size to 0"
            raise ValueError(
                f"The {name} set is empty, but each batch takes {batch_size} of its images: {remedy}."
            )


class PairedDataset(Dataset):
    """Labeled and unlabeled images, fetched together by a `Draw`; labels of unlabeled images stay inside."""

    def __init__(self, labeled: Examples, unlabeled: Examples | None = None) -> None:
        if labeled.labels is None:
            raise ValueError("The labeled images have no labels, but each needs one: give labels to Images.")
        if unlabeled is not None and unlabeled.row_shape != labeled.row_shape:
            raise ValueError(
                f"Unlabeled images are {unlabeled.row_shape} and labeled ones {labeled.row_shape}, but "
                "expected the same: build both by Images.from_dataset with the same size, or embed both with "
                "the same network."
            )
        self.labeled, self.unlabeled = labeled, unlabeled

    def __len__(self) -> int:
        return len(self.labeled)

    def __getitems__(self, draw: Draw) -> dict[str, Any]:  # torch passes on whatever the batch sampler yields
        batch: dict[str, Any] = {**self.labeled.__getitems__(draw.labeled), "step": draw.number}
        if self.unlabeled is not None:
            rows = torch.tensor(draw.unlabeled, dtype=torch.int64)
            batch["unlabeled"] = self.unlabeled.__getitems__(rows)["pixel_values"]
            batch["unlabeled_index"] = rows
        return batch


class PairedLoader(DataLoader):
    """Batches of labeled and unlabeled images.

    It knows its rank, so it must not pass through `accelerator.prepare`.

    Args:
        batch_sizes: labeled and unlabeled images per batch; the second may be 0.
        steps_per_epoch: batches of one rank in one epoch.
    """

    def __init__(
        self,
        labeled: Examples,
        unlabeled: Examples | None,
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
            worker_init_fn=outlive_signal,
            generator=torch.Generator(),  # else every epoch takes a number from the global generator
        )

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def outlive_signal(worker: int) -> None:
    """Let a worker pass over the first signal to end, which supervisors send to all processes.

    The step in progress is saved meanwhile, and torch takes a dead worker for an error. Not more than one:
    `terminate` of its own has to work when the interpreter ends.
    """
    signals = (signal.SIGTERM, signal.SIGINT)

    def pass_over(*_: Any) -> None:
        for number in signals:
            signal.signal(number, lambda *_: os._exit(0))  # as torch's own handler does

    for number in signals:
        signal.signal(number, pass_over)


def as_is(batch: Any) -> Any:
    """Collate function for datasets whose `__getitems__` gives whole batches."""
    return batch


def generator_for(
    seed: int, rank: int, draw: int, purpose: str, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A generator whose numbers are a pure function of (seed, rank, draw, purpose)."""
    keys = np.random.SeedSequence([seed, rank, draw, zlib.crc32(purpose.encode())])
    return torch.Generator(device).manual_seed(int(keys.generate_state(1, np.uint64)[0]))
