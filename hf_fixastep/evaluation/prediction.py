"""The classes of image files: one row per file, and those that could not be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import PIL.Image
from numpy.typing import NDArray
from tqdm import tqdm

from hf_fixastep.data.files import UnreadableImage, read_picture
from hf_fixastep.data.listings import Listing, is_table, list_unlabeled
from hf_fixastep.evaluation.classifier import Classifier


@dataclass
class Predictions:
    """Rows of the two files that a prediction writes."""

    images: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)


def find_images(source: str) -> Listing:
    """The image files of a folder of any depth, a glob or a table, or one file."""
    path = Path(source).expanduser()
    if path.is_file() and not is_table(str(path)):
        return Listing(str(path.parent), [path.name])
    return list_unlabeled("input", source, None)


def predict(classifier: Classifier, listing: Listing) -> Predictions:
    """Class and probabilities of each file; `abstain` where the calibration of the model says so."""
    found, names = Predictions(), list[str]()

    def pictures() -> Iterator[PIL.Image.Image]:  # one at a time: photographs are large
        for row in tqdm(range(len(listing)), "Reading files", unit="file"):
            try:
                image = read_picture(listing.path(row)).image
            except UnreadableImage as error:
                found.skipped.append({"file": listing.shown(row), "reason": str(error)})
            else:
                names.append(listing.shown(row))
                yield image

    shares = classifier.probabilities(pictures())
    found.images = [answer(classifier, name, row) for name, row in zip(names, shares, strict=True)]
    return found


def answer(classifier: Classifier, name: str, shares: NDArray) -> dict[str, Any]:
    best = int(shares.argmax())
    row = {"file": name, "class": classifier.classes[best], "probability": shares[best]}
    if classifier.calibration is not None:
        row["abstain"] = bool(shares[best] < classifier.calibration.abstain_below)
    return row | {
        f"probability_{name}": share for name, share in zip(classifier.classes, shares, strict=True)
    }


def write(found: Predictions, out: Path) -> list[Path]:
    """The table of all images, and beside it, with `_skipped` in its name, that of the other files."""
    out.parent.mkdir(parents=True, exist_ok=True)
    skipped = out.with_name(f"{out.stem}_skipped{out.suffix}")
    for path, rows, columns in (
        (out, found.images, ["file", "class"]),
        (skipped, found.skipped, ["file", "reason"]),
    ):
        frame = pd.DataFrame(rows, columns=list(rows[0]) if rows else columns)
        frame.to_csv(path, index=False, float_format="%.6g")
    return [out, skipped]
