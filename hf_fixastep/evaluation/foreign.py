"""How foreign an image looks to a model that keeps the features of its labeled images in a file beside it.

`known.safetensors` has `labeled`, the features of these images in float16, each of length 1, and `held_out`,
the scores of held-out images of known classes, sorted. It stays on the machine: a push leaves it out, for
features may tell something about the images.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors.numpy import load_file, save_file

from hf_fixastep.disk import write_atomically
from hf_fixastep.evaluation.open_set import nearest_labeled, unit_rows


KNOWN = "known.safetensors"


@dataclass(frozen=True)
class KnownImages:
    """What a model remembers of images of known classes.

    Args:
        labeled: features [L, D] of the labeled images.
        held_out: scores [V] of held-out images of known classes, by `nearest_labeled`, sorted.
    """

    labeled: NDArray
    held_out: NDArray

    @classmethod
    def fit(cls, labeled: ArrayLike, held_out: ArrayLike) -> KnownImages:
        """From features of labeled and of held-out images."""
        kept = unit_rows(labeled).astype(np.float16)
        return cls(kept, np.sort(nearest_labeled(held_out, kept)))

    @classmethod
    def of(cls, folder: str | os.PathLike[str]) -> KnownImages | None:
        """None for a model that has none."""
        path = Path(folder) / KNOWN
        if not path.is_file():
            return None
        try:
            found = load_file(path)
            known = cls(found["labeled"], found["held_out"])
        except Exception as error:  # a file can be wrong in any way
            raise ValueError(f"{path} cannot be read: remove it, or run fixastep evaluate again.") from error
        if (
            known.labeled.ndim != 2
            or known.held_out.ndim != 1
            or not known.labeled.size * len(known.held_out)
        ):
            raise ValueError(f"{path} is incomplete: remove it, or run fixastep evaluate again.")
        return known

    def write(self, folder: str | os.PathLike[str]) -> None:
        with write_atomically(Path(folder) / KNOWN) as partial:
            save_file({"labeled": self.labeled, "held_out": self.held_out}, partial)

    def foreignness(self, features: ArrayLike) -> NDArray:
        """Share of the held-out known images that are more like the labeled ones than each image, in [0, 1].

        It is 0.95 for an image that looks more foreign than 95 % of known images do. That is not the
        probability that it is foreign, which depends on how many foreign images there are.

        Args:
            features: [N, D].
        """
        rows = np.asarray(features)
        if not len(rows):
            return np.empty(0)
        if rows.shape[-1] != self.labeled.shape[1]:
            raise ValueError(
                f"{KNOWN} is of features of {self.labeled.shape[1]} numbers, but the model has "
                f"{rows.shape[-1]}: it is of another model, so remove it, or run fixastep evaluate again."
            )
        above = np.searchsorted(self.held_out, nearest_labeled(rows, self.labeled), side="right")
        return 1 - above / len(self.held_out)
