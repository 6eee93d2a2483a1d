"""A user's own images: class folders or a table for the labeled ones, any pile of files for the others."""

from __future__ import annotations

import hashlib
import itertools
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from datasets.utils import tqdm

from hf_fixastep.checks import check_choice
from hf_fixastep.data import cutting, files, listings
from hf_fixastep.data.base import ImageSet
from hf_fixastep.data.cutting import cut
from hf_fixastep.data.files import Source, UnreadableImage, digest, encode, printable, read_picture
from hf_fixastep.data.listings import Listing, duplicates, list_sides


@dataclass
class FoldersConfig(datasets.BuilderConfig):
    """Where the images are, and how to cut off the splits that are missing.

    Args:
        labeled: a folder with one sub-folder per class, or a .csv or .parquet table with the columns
            file_name and label, file names relative to the table.
        unlabeled: a folder of any depth, a glob, a table with the column file_name, or a list of these.
        validation: as `labeled`; if not given, cut from the labeled images.
        test: as `validation`.
        image_size: side, or height and width, to resize to; by default images keep theirs.
        seed: seed of the cut.
        group: a column of the table, or a regular expression whose first parentheses match the group, such as
            the patient, in file names relative to the folder. No group is cut in two.
        validation_share: share of the labeled images, of each class, for validation; 0 for no such split.
        test_share: the same for the test.
    """

    labeled: Source | None = None
    unlabeled: Source | Sequence[Source] | None = None
    validation: Source | None = None
    test: Source | None = None
    image_size: int | Sequence[int] | None = None
    seed: int = 0
    group: str | None = None
    validation_share: float = 0.1
    test_share: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.size = check_size(self.image_size)
        check_cut(self.seed, self.validation_share, self.test_share)
        # not a field, which would be a setting
        self.listings = list_sides(self.labeled, self.unlabeled, self.validation, self.test, self.group)
        check_classes(self.listings)

    def create_config_id(self, config_kwargs: dict, custom_features: datasets.Features | None = None) -> str:
        """The name of the cache folder; changes with the settings and the files."""
        settings = (self.size, self.seed, self.validation_share, self.test_share)
        content = hashlib.sha256(repr(settings).encode())
        for side, listing in self.listings.items():
            content.update(side.encode() + listing.fingerprint())
        return f"{self.name}-{content.hexdigest()[:16]}"

    @property
    def shares(self) -> dict[str, float]:
        """The splits to cut off, with their shares."""
        shares = {"validation": self.validation_share, "test": self.test_share}
        return {name: share for name, share in shares.items() if share and name not in self.listings}


def check_size(size: Any) -> tuple[int, int] | None:
    """Height and width."""
    if size is None:
        return None
    sides = size if isinstance(size, (list, tuple)) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(
            f"image_size is {size!r}, but expected a number of pixels, or two: height and width."
        )
    return sides[0], sides[1]


def check_cut(seed: int, validation_share: float, test_share: float) -> None:
    if not (isinstance(seed, int) and 0 <= seed < 2**32):
        raise ValueError(f"seed is {seed!r}, but expected a whole number from 0 to {2**32 - 1}.")
    numbers = all(isinstance(share, (int, float)) for share in (validation_share, test_share))
    if not (numbers and validation_share >= 0 and test_share >= 0 and validation_share + test_share < 1):
        raise ValueError(
            f"validation_share is {validation_share!r} and test_share {test_share!r}, but expected two "
            "numbers of at least 0 that leave something of 1."
        )


def class_names(labels: Sequence[str]) -> list[str]:
    """Every class once, sorted; by number if all are numbers."""
    names = set(labels)
    return sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)


def check_classes(listings: Mapping[str, Listing]) -> None:
    names = class_names(listings["labeled"].labels)
    if len(names) < 2:
        raise ValueError(
            f"labeled has one class, {names[0]}, but expected at least two: add a folder for another."
        )
    seen: dict[str, str] = {}
    for name in names:
        known = seen.setdefault(unicodedata.normalize("NFKC", name).casefold().strip(), name)
        if known != name:
            raise ValueError(
                f"labeled has the classes {known!r} and {name!r}, which differ only in writing: merge them."
            )
    for side in [side for side in listings if side in ("validation", "test")]:
        for name in class_names(listings[side].labels):
            check_choice(f"class in {side}, which labeled does not have:", name, names)


class Folders(ImageSet):
    """Your own images: class folders or a table, and any pile of unlabeled files.

    Stored upright with 8 bits, as mode L or RGB: `to_grey_or_rgb` says how other modes become these.
    """

    terms = "the images are yours, and their licence is not known here."
    sources = (cutting, files, listings)
    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = FoldersConfig
    DEFAULT_WRITER_BATCH_SIZE = 32  # images held in memory: photographs of 12 megapixels may come unresized
    config: FoldersConfig

    def _info(self) -> datasets.DatasetInfo:
        names = class_names(self.config.listings["labeled"].labels)
        features = {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=names),
            "file_name": datasets.Value("string"),
        }
        return datasets.DatasetInfo(description="Images from folders.", features=datasets.Features(features))

    def _split_generators(self, dl_manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        listings = self.config.listings
        # Labeled images are decoded twice: broken ones shall stop the build before an hour goes into the
        # unlabeled ones, and the cut keeps equal images together.
        digests = {
            side: read_digests(side, listing) if side != "unlabeled" else np.zeros(len(listing), np.uint64)
            for side, listing in listings.items()
        }
        self.splits, self.digests = split_sides(listings, digests, self.config.shares, self.config.seed)
        self.skipped: dict[str, str] = {}
        generators = [datasets.SplitGenerator(name=name, gen_kwargs={"split": name}) for name in self.splits]
        for generator in generators:
            generator.split_info.num_examples = len(self.splits[generator.name])  # for the progress bar
        return generators

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        listing, digests = self.splits[split], self.digests[split]
        numbers = {
            name: number for number, name in enumerate(class_names(self.config.listings["labeled"].labels))
        }
        for row in range(len(listing)):
            try:
                picture = read_picture(listing.path(row))
            except UnreadableImage as error:
                if split != "unlabeled":
                    raise
                self.skipped[listing.shown(row)] = str(error)
                continue
            digests[row] = digest(picture.image)
            yield (
                row,
                {
                    "image": {"bytes": encode(picture, self.config.size), "path": None},
                    # The registry drops the -1.
                    "label": numbers[listing.labels[row]] if listing.labels else -1,
                    "file_name": listing.shown(row),
                },
            )

    def make_report(self) -> dict[str, Any]:
        if len(self.skipped) == len(self.splits["unlabeled"]):
            name, why = next(iter(self.skipped.items()))
            raise ValueError(
                f"None of the {len(self.skipped):,} unlabeled files can be read, such as {name}: {why}."
            )
        return make_report(self.splits, self.digests, self.skipped)

    def findings(self, report: dict[str, Any]) -> list[str]:
        return findings(report)


def read_digests(side: str, listing: Listing) -> np.ndarray:
    """Digests of all images of a labeled side."""
    digests = np.zeros(len(listing), np.uint64)
    for row in tqdm(range(len(listing)), f"Reading {side} images", disable=len(listing) <= 2000):
        try:
            digests[row] = digest(read_picture(listing.path(row)).image)
        except UnreadableImage as error:
            raise ValueError(
                f"The {side} image {printable(listing.path(row))} cannot be read: {error}. Repair or remove "
                "it; fixastep doctor lists all such files."
            ) from error
    return digests


def split_sides(
    listings: Mapping[str, Listing], digests: Mapping[str, np.ndarray], shares: Mapping[str, float], seed: int
) -> tuple[dict[str, Listing], dict[str, np.ndarray]]:
    """Listings and digests of the splits, those in `shares` cut from the labeled side."""
    splits, contents = dict(listings), dict(digests)
    if shares:
        labeled = listings["labeled"]
        # without groups, images with the same pixels are one
        groups = labeled.groups or digests["labeled"].tolist()
        unit = "groups" if labeled.groups else "different images"
        for name, rows in cut(labeled.labels, groups, shares, seed, unit).items():
            splits[name], contents[name] = labeled.select(rows), digests["labeled"][rows]
        splits["labeled"].passed_over = labeled.passed_over
    names = [name for name in ("labeled", "unlabeled", "validation", "test") if name in splits]
    return {name: splits[name] for name in names}, {name: contents[name] for name in names}


def make_report(
    splits: Mapping[str, Listing], digests: Mapping[str, np.ndarray], skipped: Mapping[str, str]
) -> dict[str, Any]:
    """What was found in the folders, ready for JSON."""
    sets = duplicates(dict(digests))
    return {
        "roots": {split: printable(os.path.abspath(listing.root)) for split, listing in splits.items()},
        "images": {split: int(np.count_nonzero(digests[split])) for split in splits},
        "classes": {
            split: dict(sorted(Counter(part.labels).items())) for split, part in splits.items() if part.labels
        },
        "passed_over": {split: dict(listing.passed_over) for split, listing in splits.items()},
        "outside_root": {split: listing.outside for split, listing in splits.items()},
        "skipped": dict(skipped),
        "duplicates": [
            {split: [splits[split].shown(row) for row in rows] for split, rows in same.items()}
            for same in sets
            if len(same) > 1
        ],
        "two_classes": [
            by_class for by_class in (files_by_class(splits, same) for same in sets) if len(by_class) > 1
        ],
        "shared_groups": shared_groups(splits),
    }


def files_by_class(splits: Mapping[str, Listing], same: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for split in same.keys() - {"unlabeled"}:
        for row in same[split]:
            found[splits[split].labels[row]].append(splits[split].shown(row))
    return dict(sorted(found.items()))


def shared_groups(splits: Mapping[str, Listing]) -> dict[str, list[str]]:
    """Groups that two splits have, by "one and other"."""
    shared = {
        f"{one} and {other}": sorted(set(splits[one].groups) & set(splits[other].groups) - {""})
        for one, other in itertools.combinations(splits, 2)
    }
    return {pair: groups for pair, groups in shared.items() if groups}


def findings(report: Mapping[str, Any]) -> list[str]:
    """One sentence for everything in a report that a user may want to act on."""
    sentences = []
    if report["skipped"]:
        name, why = next(iter(report["skipped"].items()))
        sentences.append(
            f"Unlabeled files that cannot be read: {len(report['skipped']):,}, such as {name} ({why})."
        )
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for same in report["duplicates"]:
        for one, other in itertools.combinations(same, 2):
            pairs[one, other].append((same[one][0], same[other][0]))
    for (one, other), examples in pairs.items():
        first, second = examples[0]
        sentences.append(
            f"Images in both {one} and {other}: {len(examples):,}, such as {first} and {second}."
        )
    if report["two_classes"]:
        first, second, *_ = (names[0] for names in report["two_classes"][0].values())
        sentences.append(
            f"Images in two classes: {len(report['two_classes']):,}, such as {first} and {second}."
        )
    for pair, groups in report["shared_groups"].items():
        sentences.append(f"Groups in both {pair}: {len(groups):,}, such as {groups[0]}.")
    return sentences
