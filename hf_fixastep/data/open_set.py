"""Open-set tasks: some classes have labels, and the unlabeled images show foreign ones too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import datasets
import numpy as np

from hf_fixastep.data.base import WITHOUT_LABELS, ImageSet


class Rows(NamedTuple):
    """Images as their source holds them, and their class numbers."""

    pixels: np.ndarray  # uint8 [N, ...]
    labels: np.ndarray  # [N]


@dataclass
class OpenSetConfig(datasets.BuilderConfig):
    """One choice of unlabeled classes.

    Args:
        labels_per_class: labeled images of each labeled class.
        seed: seed of the split.
        foreign: add the test images of foreign classes, as splits seen_foreign (classes that the unlabeled
            images show) and unseen_foreign, those of the two that there are.
    """

    labels_per_class: int = 5
    seed: int = 0
    foreign: bool = False


class OpenSet(ImageSet):
    """What open-set tasks share; a subclass states the classes and reads the images."""

    BUILDER_CONFIG_CLASS = OpenSetConfig
    config: OpenSetConfig

    title: ClassVar[str]  # of the images, in messages
    smallest_class: ClassVar[int]  # images of the smallest class that is split
    labeled_classes: ClassVar[range]
    unlabeled_classes: ClassVar[Mapping[str, Sequence[int]]]  # by name of the config
    per_class: ClassVar[Mapping[str, int]]  # images of each class for other splits than the labeled one

    def read(self) -> tuple[Rows, Rows | None]:
        """The images to split, and those of an official test split if there is one."""
        raise NotImplementedError

    def to_image(self, pixels: np.ndarray) -> Any:
        """One row of pixels as what `datasets.Image` takes."""
        raise NotImplementedError

    def shown_classes(self) -> Sequence[int]:
        """The classes of the unlabeled images."""
        return self.unlabeled_classes[self.config.name]

    def check_settings(self) -> None:
        """Refuse what cannot be before the files are read, which takes a while."""
        count = self.config.labels_per_class
        # One image of every class stays unlabeled.
        largest = self.smallest_class - sum(self.per_class.values()) - 1
        if not 1 <= count <= largest:
            raise ValueError(
                f"labels_per_class is {count}, but {self.title} suffice for 1 to {largest}: choose a number "
                "in that range."
            )

    def _split_generators(self, dl_manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        self.check_settings()
        images, official_test = self.read()
        known, shown = self.labeled_classes, self.shown_classes()
        sizes = {**self.per_class, "labeled": self.config.labels_per_class}
        rows = split_rows(images.labels, known, shown, sizes, self.config.seed)
        parts = {name: take(images, rows[name]) for name in ("labeled", "unlabeled", "validation")}
        test = take(images, rows["test"]) if official_test is None else official_test
        places = split_test(test.labels, known, shown)
        for name in places if self.config.foreign else ["test"]:
            parts[name] = take(test, places[name])
        for name, part in parts.items():
            part.labels[:] = -1 if name in WITHOUT_LABELS else part.labels - known.start
        return [
            datasets.SplitGenerator(name=name, gen_kwargs=part._asdict())
            for name, part in parts.items()
            if len(part.labels)
        ]

    def _generate_examples(
        self, pixels: np.ndarray, labels: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for row, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            yield row, {"image": self.to_image(image), "label": int(label)}


def take(images: Rows, rows: np.ndarray) -> Rows:
    return Rows(images.pixels[rows], images.labels[rows])


def split_rows(
    labels: np.ndarray,
    labeled_classes: Sequence[int],
    unlabeled_classes: Sequence[int],
    sizes: Mapping[str, int],
    seed: int,
) -> dict[str, np.ndarray]:
    """Rows of every split, in shuffled order.

    In that order, the first images of each class go to the splits in `sizes`, and the rest is unlabeled.
    Foreign classes are in the splits unlabeled and test alone; `split_test` takes the latter apart.

    Args:
        sizes: images of each class in every split but the unlabeled one.
    """
    random = np.random.RandomState(seed)
    order = random.permutation(len(labels))
    labels = labels[order]
    ranks = np.empty(len(labels), dtype=np.int64)  # place of an image among those of its class
    for label in np.unique(labels):
        ranks[labels == label] = np.arange(np.sum(labels == label))
    parts = np.searchsorted(np.cumsum(list(sizes.values())), ranks, side="right")
    known, shown = np.isin(labels, labeled_classes), np.isin(labels, unlabeled_classes)
    rows = {name: order[(parts == n) & (known | (name == "test"))] for n, name in enumerate(sizes)}
    # Shuffled again: a class that fills its other splits early comes early here, which would tell the label.
    return rows | {"unlabeled": random.permutation(order[shown & (parts == len(sizes))])}


def split_test(
    labels: np.ndarray, labeled_classes: Sequence[int], unlabeled_classes: Sequence[int]
) -> dict[str, np.ndarray]:
    """Places of the test images whose class has labels, is only shown by unlabeled images, or is new."""
    known, shown = np.isin(labels, labeled_classes), np.isin(labels, unlabeled_classes)
    parts = {"test": known, "seen_foreign": shown & ~known, "unseen_foreign": ~shown & ~known}
    return {name: np.flatnonzero(part) for name, part in parts.items()}
