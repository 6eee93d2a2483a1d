"""The images that a fit is made of: loaded, looked at, embedded, and parted into seen and held out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray

from hf_fixastep.data.base import folder_report
from hf_fixastep.data.doctor import imbalance
from hf_fixastep.data.features import Features
from hf_fixastep.data.folders import findings
from hf_fixastep.data.images import read_labels
from hf_fixastep.data.listings import list_sides, passed_over
from hf_fixastep.data.registry import load_dataset
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.features.embed import embed
from hf_fixastep.features.probe import check, split, standardisation
from hf_fixastep.features.shape import IMAGES, Shape, fit_shape


SPLITS = ("labeled", "unlabeled", "validation", "test")
FOLDS = 5
SCALED_BY = 20_000  # images of the pile, at most, that mean and deviation of the features are taken from

Say = Callable[[str], None]


@dataclass
class FitData:
    """Images as they were loaded.

    Args:
        name: of the data set.
        splits: labeled, unlabeled, and validation and test where they are given.
        groups: of the labeled images, such as patients.
    """

    name: str
    splits: dict[str, datasets.Dataset]
    groups: NDArray | None = None
    class_names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        labels, names = read_labels(self.splits["labeled"])
        if labels is None or not len(labels):
            raise ValueError(
                f"{self.name} has no labeled image, but at least two classes of them are needed."
            )
        self.class_names = names or [str(number) for number in range(int(labels.max()) + 1)]
        # Here, and not after an hour of embedding.
        check(np.zeros((len(labels), 1)), labels.numpy(), len(self.class_names))
        if not len(self.splits["unlabeled"]):
            raise ValueError(f"{self.name} has no unlabeled image; give a pile of at least one.")


def load_sides(sides: dict[str, Any], group: str | None, say: Say) -> FitData:
    """Folders or tables of one's own, of which no label is cut off, with what deserves a look."""
    listings = list_sides(**sides, group=group)
    given = {name: source for name, source in sides.items() if source is not None}
    data = load_dataset("folders", **given, group=group, validation_share=0.0, test_share=0.0)
    remarks = findings(folder_report(data)) + imbalance(listings["labeled"])
    for side, listing in listings.items():
        if listing.passed_over:
            remarks.append(f"Passed over in {side}: {passed_over(listing)}.")
    for sentence in remarks:
        say(f"Worth a look: {sentence}")
    labeled, groups = listings["labeled"], None
    if labeled.groups:
        by_name = {labeled.shown(row): group for row, group in enumerate(labeled.groups)}
        groups = np.array([by_name[name] for name in data["labeled"]["file_name"]])
    return FitData("folders", dict(data), groups)


def load_named(name: str, config: str | None, settings: dict[str, Any]) -> FitData:
    data = load_dataset(name, config, **settings)
    if missing := {"labeled", "unlabeled"} - set(data):
        raise ValueError(
            f"{name} has the splits {', '.join(data)}, but a fit needs {' and '.join(sorted(missing))} "
            "images: choose another data set."
        )
    return FitData(name, {split: data[split] for split in data if split in SPLITS})


@dataclass(frozen=True)
class Part:
    """Labeled images to learn from, and images that are held out from it.

    Args:
        name: "all", or that of a fold.
        seen: rows of the labeled images.
        features: [M, D] of the held-out images.
        labels: [M].
        rows: [M], of the split that the held-out images are in.
    """

    name: str
    seen: NDArray
    features: NDArray
    labels: NDArray
    rows: NDArray


@dataclass
class Embedded:
    """Features of all images of a fit.

    Args:
        test: None where there are no test images.
    """

    class_names: list[str]
    labeled: Features
    pile: Features
    validation: Features | None
    test: Features | None
    groups: NDArray | None = None

    @classmethod
    def make(
        cls, data: FitData, backbone: Backbone, cache_dir: str | os.PathLike[str] | None, say: Say
    ) -> Embedded:
        found: dict[str, Features] = {}
        for name, images in data.splits.items():
            views: dict[str, Any] = {} if name in ("labeled", "unlabeled") else {"weak": 0, "strong": 0}
            found[name] = embed(
                images, backbone, **views, cache_dir=cache_dir, skip_unreadable=name == "unlabeled"
            )
            if found[name].skipped:
                say(f"Skipped unlabeled images that cannot be read: {', '.join(found[name].skipped[:10])}.")
        return cls(
            data.class_names,
            found["labeled"],
            found["unlabeled"],
            found.get("validation"),
            found.get("test"),
            data.groups,
        )

    @property
    def splits(self) -> dict[str, Features]:
        named = {"labeled": self.labeled, "unlabeled": self.pile, "validation": self.validation}
        return {name: found for name, found in (*named.items(), ("test", self.test)) if found is not None}

    @property
    def hashes(self) -> dict[str, str]:
        """Of each split: its images in their order, what embedded them, and the labels."""
        return {name: found.fingerprint for name, found in self.splits.items()}

    @cached_property
    def plain(self) -> NDArray:
        """Features of the labeled images as they are."""
        return self.labeled.plain()

    @cached_property
    def labels(self) -> NDArray:
        return labels_of(self.labeled)

    @cached_property
    def around(self) -> NDArray:
        """Features of labeled and unlabeled images, for mean and deviation."""
        return np.concatenate([self.plain, self.pile.spaced(SCALED_BY).plain()])

    @cached_property
    def scale(self) -> tuple[NDArray, NDArray]:
        return standardisation(self.around)

    @cached_property
    def shape(self) -> Shape:
        """What the pile says about the features."""
        return fit_shape(self.pile.spaced(IMAGES).plain())

    @cached_property
    def spread(self) -> float:
        """The usual distance of features from their mean."""
        return float(np.sqrt(self.around.var(0, dtype=np.float64).sum()))

    @cached_property
    def parts(self) -> list[Part]:
        """What is measured: on the validation images, or by cross-validation over the labels; nothing where
        no class but one has two images.
        """
        everything = np.arange(len(self.labels))
        if self.validation is not None:
            rows = np.arange(len(self.validation))
            return [Part("all", everything, self.validation.plain(), labels_of(self.validation), rows)]
        return [
            Part(f"fold{number}", seen, self.plain[held], self.labels[held], held)
            for number, (seen, held) in enumerate(folds(self.labels, self._units()))
        ]

    def _units(self) -> NDArray | None:
        """What is never parted: groups, or else images that are the same; None where all stand alone."""
        if self.groups is not None:
            return np.unique(self.groups, return_inverse=True)[1]
        same = np.unique(self.labeled.places.numpy(), axis=0, return_inverse=True)[1].reshape(-1)
        return same if same.max() + 1 < len(same) else None


def labels_of(found: Features) -> NDArray:
    return np.empty(0, np.int64) if found.labels is None else found.labels.numpy()


def folds(labels: NDArray, units: NDArray | None, seed: int = 0) -> list[tuple[NDArray, NDArray]]:
    """Rows seen and rows held out, of each fold; no unit is parted, and every class is seen in every fold.

    Images of a class with a single unit are never held out.
    """
    each = np.arange(len(labels)) if units is None else units
    held_out = np.ones(len(labels), bool)
    while True:
        single = [
            label
            for label in np.unique(labels[held_out])
            if len(np.unique(each[held_out & (labels == label)])) < 2
        ]
        if not single:
            break
        held_out &= ~np.isin(each, each[held_out & np.isin(labels, single)])
    rows = np.flatnonzero(held_out)
    if len(np.unique(labels[rows])) < 2:
        return []
    found = []
    for _, at in split(labels[rows], None if units is None else units[rows], FOLDS, seed):
        held = rows[at]
        # Folds of groups can have all groups of a class: these are seen instead.
        lost = np.setdiff1d(labels, np.delete(labels, held))
        held = held[~np.isin(each[held], each[np.isin(labels, lost)])]
        if len(held):
            found.append((np.setdiff1d(np.arange(len(labels)), held), held))
    return found
