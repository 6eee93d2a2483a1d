"""CIFAR-10 and CIFAR-100 as open-set tasks, with the splits of the Fix-A-Step paper (Huang et al., 2023)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import datasets
import numpy as np

from hf_fixastep.data import cifar_files
from hf_fixastep.data.cifar_files import CIFAR10, CIFAR100, HOMEPAGE, Cifar, read_cifar, to_png
from hf_fixastep.data.open_set import OpenSet, OpenSetConfig, Rows


PROCEDURE = """
The splits are those of Huang et al. (2023). The 50,000 training images, in the order of the official files,
are permuted by numpy's `RandomState(seed)`. Of each class, the first {validation} are for validation, the
next `labels_per_class` are labeled, and the rest is unlabeled. So labeled, unlabeled and validation images
are disjoint, the labeled and validation images do not depend on zeta, and a smaller labeled set is part of
every larger one. Labeled, validation and test images are of the labeled classes alone; the latter are the
official test images.

Unlabeled images carry neither a label nor their file name, and their order is shuffled once more, so that it
tells nothing about the class. `oracle=True` drops the foreign ones among them ("perfect filtering").

Images are 32x32 RGB, the original pixels as PNG. Whatever the source (the official archive, its extracted
folder, or the parquet files of the Hub, where CIFAR-10 is in another order), the rows are checked by checksum
and put into the official order before they are split.
"""

CITATION = """
@techreport{krizhevsky2009learning,
  title = {Learning Multiple Layers of Features from Tiny Images},
  author = {Alex Krizhevsky},
  institution = {University of Toronto},
  year = {2009}
}
@inproceedings{huang2023fixastep,
  title = {Fix-A-Step: Semi-supervised Learning from Uncurated Unlabeled Data},
  author = {Zhe Huang and Mary-Joy Sidhom and Benjamin S. Wessler and Michael C. Hughes},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year = {2023}
}
"""


@dataclass
class CifarConfig(OpenSetConfig):
    """One choice of unlabeled classes.

    Args:
        oracle: drop the unlabeled images whose true class is not a labeled one.
    """

    labels_per_class: int = 400
    oracle: bool = False


class CifarOpenSet(OpenSet):
    """What the two tasks share; a subclass states the classes."""

    BUILDER_CONFIG_CLASS = CifarConfig
    config: CifarConfig
    sources = (cifar_files,)

    cifar: ClassVar[Cifar]
    about: ClassVar[str]

    shareable = True
    terms = (
        "The authors state no licence (the Hub lists it as unknown) and ask users to cite Krizhevsky (2009); "
        "the set is freely downloadable and widely passed on."
    )

    def _info(self) -> datasets.DatasetInfo:
        names = [self.cifar.class_names[label] for label in self.labeled_classes]
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
        procedure = PROCEDURE.format(validation=self.per_class["validation"])
        return datasets.DatasetInfo(
            description=inspect.cleandoc(self.about) + "\n\n" + procedure.strip(),
            homepage=HOMEPAGE,
            license="unknown",
            citation=CITATION.strip(),
            features=datasets.Features(features),
        )

    def shown_classes(self) -> Sequence[int]:
        shown = self.unlabeled_classes[self.config.name]
        return [label for label in shown if label in self.labeled_classes or not self.config.oracle]

    def check_settings(self) -> None:
        super().check_settings()
        if not self.shown_classes():
            raise ValueError(
                f"oracle=True drops every unlabeled image of {self.config.name}, which leaves labeled-only "
                "training: use loss=supervised, without the oracle."
            )

    def read(self) -> tuple[Rows, Rows]:
        return read_cifar(self.cifar, self.config.data_dir)

    def to_image(self, pixels: np.ndarray) -> dict[str, Any]:
        return {"bytes": to_png(pixels), "path": None}  # no path: the original file names tell the class


class Cifar10SixAnimal(CifarOpenSet):
    """CIFAR-10: six labeled animals; unlabeled images of four classes, of which zeta percent are vehicles."""

    BUILDER_CONFIGS = [CifarConfig(f"zeta{zeta}", datasets.Version("1.0.0")) for zeta in (0, 25, 50, 75, 100)]
    DEFAULT_CONFIG_NAME = "zeta50"

    cifar = CIFAR10
    title = "the images of CIFAR-10"
    smallest_class = 5000
    labeled_classes = range(2, 8)
    unlabeled_classes = {
        "zeta0": (4, 5, 6, 7),
        "zeta25": (0, 5, 6, 7),
        "zeta50": (0, 1, 6, 7),
        "zeta75": (0, 1, 8, 7),
        "zeta100": (0, 1, 8, 9),
    }
    per_class = {"validation": 500}
    about = """
        CIFAR-10 as an open-set semi-supervised task: the six animals bird, cat, deer, dog, frog and horse are
        labeled (0 to 5); the unlabeled images come from four classes, and zeta percent of them are foreign,
        i.e. vehicles.

        | config | unlabeled classes |
        | --- | --- |
        | zeta0 | deer, dog, frog, horse |
        | zeta25 | airplane, dog, frog, horse |
        | zeta50 | airplane, automobile, frog, horse |
        | zeta75 | airplane, automobile, ship, horse |
        | zeta100 | airplane, automobile, ship, truck |

        With n labels per class there are 6n labeled and 4(4,500 - n) unlabeled images; Huang et al. (2023)
        use n = 400 and 50, and seeds 0 to 4.
        """


class Cifar100FiftyClass(CifarOpenSet):
    """CIFAR-100: fifty labeled classes; unlabeled images of fifty, of which zeta percent are foreign."""

    BUILDER_CONFIGS = [
        CifarConfig(f"zeta{zeta}", datasets.Version("1.0.0"), labels_per_class=100) for zeta in (50, 100)
    ]
    DEFAULT_CONFIG_NAME = "zeta50"

    cifar = CIFAR100
    title = "the images of CIFAR-100"
    smallest_class = 500
    labeled_classes = range(50)
    unlabeled_classes = {"zeta50": range(25, 75), "zeta100": range(50, 100)}
    per_class = {"validation": 50}
    about = """
        CIFAR-100 as an open-set semi-supervised task: the classes 0 to 49 (fine labels, in alphabetical
        order) are labeled; the unlabeled images come from fifty classes, and zeta percent of these are
        foreign.

        | config | unlabeled classes |
        | --- | --- |
        | zeta50 | 25 (couch) to 74 (shrew) |
        | zeta100 | 50 (mouse) to 99 (worm) |

        With n labels per class there are 50n labeled and 50(450 - n) unlabeled images; Huang et al. (2023)
        use n = 100 and seed 0.
        """
