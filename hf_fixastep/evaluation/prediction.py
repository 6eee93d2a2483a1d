"""The classes of image files: one row per file, and those that could not be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import PIL.Image
from numpy.typing import NDArray
from tqdm import tqdm

from hf_fixastep.data.files import UnreadableImage, read_picture
from hf_fixastep.data.listings import Listing, is_table, list_unlabeled
from hf_fixastep.evaluation.calibration import probabilities
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.evaluation.foreign import KnownImages


RESEARCH = "For research only: not a medical device."
File = tuple[str, Callable[[], Sequence[PIL.Image.Image]]]  # its name, and what reads its frames


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


def picture_files(listing: Listing) -> list[File]:
    return [(listing.shown(row), partial(read_still, listing.path(row))) for row in range(len(listing))]


def read_still(path: str) -> list[PIL.Image.Image]:
    return [read_picture(path).image]


def predict(classifier: Classifier, files: Sequence[File], known: KnownImages | None = None) -> Predictions:
    """Class and probabilities of each file, or of each frame where a file has several.

    `abstain` says where the calibration of the model makes it not sure, and `foreign` how foreign an image
    looks, as `KnownImages.foreignness` has it.
    """
    found, names = Predictions(), list[tuple[str, int]]()

    def pictures() -> Iterator[PIL.Image.Image]:  # one at a time: photographs are large
        for name, read in tqdm(files, "Reading files", unit="file"):
            try:
                frames = read()
            except UnreadableImage as error:
                found.skipped.append({"file": name, "reason": str(error)})
                continue
            for number, frame in enumerate(frames):
                names.append((name, number))
                yield frame

    shares, foreign = judge(classifier, pictures(), known)
    several = any(number for _, number in names)
    for at, (name, number) in enumerate(names):
        start = {"file": name, **({"frame": number} if several else {})}
        look = None if foreign is None else float(foreign[at])
        found.images.append(start | answer(classifier, shares[at], look))
    return found


def judge(
    classifier: Classifier, images: Iterable[PIL.Image.Image], known: KnownImages | None
) -> tuple[NDArray, NDArray | None]:
    """Probabilities [N, K] after the model's temperature, and how foreign each image looks, [N]."""
    if known is None:
        return classifier.probabilities(images), None
    logits, features = classifier.logits_and_features(images)
    temperature = classifier.calibration.temperature if classifier.calibration else 1.0
    return probabilities(logits, temperature), known.foreignness(features)


def answer(classifier: Classifier, shares: NDArray, foreign: float | None) -> dict[str, Any]:
    best = int(shares.argmax())
    row = {"class": classifier.classes[best], "probability": shares[best]}
    if classifier.calibration is not None:
        row["abstain"] = bool(shares[best] < classifier.calibration.abstain_below)
    if foreign is not None:
        row["foreign"] = foreign
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
