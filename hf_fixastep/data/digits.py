"""scikit-learn's 8x8 digits as an open-set task; small, and on every disk that has scikit-learn."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import PIL.Image
from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from sklearn.datasets import load_digits

from hf_fixastep.data.open_set import OpenSet, OpenSetConfig, Rows


DESCRIPTION = """
scikit-learn's digits as an open-set semi-supervised task: the digits 0 to 5 are labeled; the unlabeled images
come from four digits, of which the share zeta is foreign. Small and quick, for examples and tests.

| config | unlabeled digits |
| --- | --- |
| zeta0 | 2, 3, 4, 5 |
| zeta25 | 6, 3, 4, 5 |
| zeta50 | 6, 7, 4, 5 |
| zeta75 | 6, 7, 8, 5 |
| zeta100 | 6, 7, 8, 9 |

The 1,797 images, 8x8 and grey (0 to 16 in the original, here 0 to 255), are permuted by numpy's
`RandomState(seed)`. Of each digit, the first 60 are for the test, the next 20 for validation, the next
`labels_per_class` are labeled, and the rest is unlabeled. The order of the unlabeled images is shuffled once
more, so that it tells nothing about the digit.
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


class DigitsOpenSet(OpenSet):
    """Labeled digits 0 to 5; unlabeled images of four digits, of which 0 to 4 are foreign."""

    BUILDER_CONFIGS = [
        OpenSetConfig(f"zeta{zeta}", datasets.Version("1.0.0")) for zeta in (0, 25, 50, 75, 100)
    ]
    DEFAULT_CONFIG_NAME = "zeta50"

    title = "the digits"
    smallest_class = 174  # images of the digit 8
    labeled_classes = range(6)
    unlabeled_classes = {  # the share of foreign digits grows from none to all
        "zeta0": (2, 3, 4, 5),
        "zeta25": (6, 3, 4, 5),
        "zeta50": (6, 7, 4, 5),
        "zeta75": (6, 7, 8, 5),
        "zeta100": (6, 7, 8, 9),
    }
    per_class = {"test": 60, "validation": 20}

    shareable = True
    terms = "Creative Commons Attribution 4.0 (CC BY 4.0), as the UCI Machine Learning Repository states."

    def _info(self) -> datasets.DatasetInfo:
        names = [str(digit) for digit in self.labeled_classes]
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
        return datasets.DatasetInfo(
            description=DESCRIPTION.strip(),
            homepage="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
            license="cc-by-4.0",
            citation=CITATION.strip(),
            features=datasets.Features(features),
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

    def read(self) -> tuple[Rows, None]:
        return read_digits(), None

    def to_image(self, pixels: np.ndarray) -> PIL.Image.Image:
        return PIL.Image.fromarray(pixels)


def read_digits() -> Rows:
    """The 1,797 images as uint8 [N, 8, 8], and their digits."""
    digits = load_digits()
    return Rows(np.rint(digits.images * 255 / 16).astype(np.uint8), digits.target)
