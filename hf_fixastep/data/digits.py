"""scikit-learn's 8x8 digits as an open-set task; small, and on every disk that has scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import PIL.Image
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from sklearn.datasets import load_digits


LABELED_DIGITS = 6  # the digits 0 to 5
UNLABELED_DIGITS = {  # the share of foreign digits grows from none to all
    "zeta0": (2, 3, 4, 5),
    "zeta25": (6, 3, 4, 5),
    "zeta50": (6, 7, 4, 5),
    "zeta75": (6, 7, 8, 5),
    "zeta100": (6, 7, 8, 9),
}
TEST_PER_CLASS, VALIDATION_PER_CLASS = 60, 20

DESCRIPTION = """
scikit-learn's digits as an open-set semi-supervised task: the digits 0 to 5 are labeled; the unlabeled images come
from four digits, of which the share zeta is foreign. Small and quick, for examples and tests.

| config | unlabeled digits |
| --- | --- |
| zeta0 | 2, 3, 4, 5 |
| zeta25 | 6, 3, 4, 5 |
| zeta50 | 6, 7, 4, 5 |
| zeta75 | 6, 7, 8, 5 |
| zeta100 | 6, 7, 8, 9 |

The 1,797 images, 8x8 and grey (0 to 16 in the original, here 0 to 255), are permuted by numpy's `RandomState(seed)`.
Of each digit, the first 60 are for the test, the next 20 for validation, the next `labels_per_class` are labeled, and
the rest is unlabeled. The order of the unlabeled images is shuffled once more, so that it tells nothing about the
digit.
"""

CITATION = """
@misc{alpaydin1998optical,
  title = {Optical Recognition of Handwritten Digits},
  author = {E. Alpaydin and C. Kaynak},
  howpublished = {UCI Machine Learning Repository},
  year = {1998},
  doi = {10.24432/C50P49}
}
"""


@dataclass
class DigitsConfig(datasets.BuilderConfig):
    """One share of foreign digits.

    Args:
        labels_per_class: labeled images of each digit from 0 to 5.
        seed: seed of the split.
        foreign: add the test images of foreign digits, as splits seen_foreign (digits that the unlabeled
            images show) and unseen_foreign, those of the two that there are.
    """

    labels_per_class: int = 5
    seed: int = 0
    foreign: bool = False


class DigitsOpenSet(datasets.GeneratorBasedBuilder):
    """Labeled digits 0 to 5; unlabeled images of four digits, of which 0 to 4 are foreign. Split as the CIFAR
    task.
    """

    BUILDER_CONFIG_CLASS = DigitsConfig
    BUILDER_CONFIGS = [DigitsConfig(name, datasets.Version("1.0.0")) for name in UNLABELED_DIGITS]
    DEFAULT_CONFIG_NAME = "zeta50"

    shareable = True
    terms = "Creative Commons Attribution 4.0 (CC BY 4.0), as the UCI Machine Learning Repository states."

    def _info(self) -> datasets.DatasetInfo:
        names = [str(digit) for digit in range(LABELED_DIGITS)]
        return datasets.DatasetInfo(
            description=DESCRIPTION.strip(),
            homepage="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
            license="cc-by-4.0",
            citation=CITATION.strip(),
            features=datasets.Features(
                {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
            ),
        )

    def download_and_prepare(self, *args: Any, **kwargs: Any) -> None:
        """Build the set without progress bars: it takes a second."""
        shown = not are_progress_bars_disabled()
        disable_progress_bars()
        try:
            super().download_and_prepare(*args, **kwargs)
        finally:
            if shown:
                enable_progress_bars()

    def _split_generators(self, dl_manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        pixels, labels = read_digits()
        config = self.config
        digits = UNLABELED_DIGITS[config.name]
        parts = split_digits(labels, digits, config.labels_per_class, config.seed, config.foreign)
        # All splits of a builder share their columns: unlabeled rows are stored with -1, and the registry
        # drops it.
        return [
            datasets.SplitGenerator(
                name=name,
                gen_kwargs={
                    "pixels": pixels[rows],
                    "labels": labels[rows]
                    if name in ("labeled", "validation", "test")
                    else np.full_like(rows, -1),
                },
            )
            for name, rows in parts.items()
            if len(rows)
        ]

    def _generate_examples(
        self, pixels: np.ndarray, labels: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for row, (image, label) in enumerate(zip(pixels, labels, strict=True)):
            yield row, {"image": PIL.Image.fromarray(image), "label": int(label)}


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """The 1,797 images as uint8 [N, 8, 8], and their digits."""
    digits = load_digits()
    return np.rint(digits.images * 255 / 16).astype(np.uint8), digits.target


def split_digits(
    labels: np.ndarray,
    unlabeled_digits: tuple[int, ...],
    labels_per_class: int,
    seed: int,
    foreign: bool = False,
) -> dict[str, np.ndarray]:
    """Rows of every split, in shuffled order, the foreign ones among them if asked for."""
    used = TEST_PER_CLASS + VALIDATION_PER_CLASS
    largest = np.bincount(labels).min() - used - 1  # one image of every digit stays unlabeled
    if not 1 <= labels_per_class <= largest:
        raise ValueError(
            f"labels_per_class is {labels_per_class}, but the digits suffice for 1 to {largest}: choose a number "
            "in that range."
        )
    random = np.random.RandomState(seed)
    order = random.permutation(len(labels))
    labels = labels[order]
    ranks = np.empty(len(labels), dtype=np.int64)  # place of an image among those of its digit
    for digit in np.unique(labels):
        ranks[labels == digit] = np.arange(np.sum(labels == digit))
    parts = np.searchsorted([TEST_PER_CLASS, used, used + labels_per_class], ranks, side="right")
    known, seen = labels < LABELED_DIGITS, np.isin(labels, unlabeled_digits)
    unlabeled = order[seen & (parts == 3)]
    splits = {
        "labeled": order[known & (parts == 2)],
        # Shuffled again: a digit that fills its other splits early comes early here, which would tell the
        # label.
        "unlabeled": random.permutation(unlabeled),
        "validation": order[known & (parts == 1)],
        "test": order[known & (parts == 0)],
    }
    if foreign:
        splits["seen_foreign"] = order[~known & seen & (parts == 0)]
        splits["unseen_foreign"] = order[~known & ~seen & (parts == 0)]
    return splits
