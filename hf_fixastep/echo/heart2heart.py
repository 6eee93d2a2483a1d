"""Heart2Heart: views of echocardiograms from three hospitals, read from the user's own downloads.

TMED-2 (Boston) for training and testing, Unity (United Kingdom) and CAMUS (France) for testing; all with the
same four classes, as grey images of 112x112 pixels. Preparation and splits are those of Huang et al. (2023).
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import datasets
import numpy as np
from datasets.utils import tqdm

from hf_fixastep.checks import check_choice
from hf_fixastep.data.files import Source, UnreadableImage, check_unique, printable, read_grey
from hf_fixastep.data.trees import Tree
from hf_fixastep.echo.base import EchoBuilder, EchoConfig, Frame, read_columns
from hf_fixastep.echo.files import (
    ECHO_VIEWS,
    count_pixels,
    fit,
    quantile_table,
    square_pixels,
    stretch,
)
from hf_fixastep.echo.volumes import read_volume


DEVS = ("DEV56", "DEV165", "DEV479")  # studies for training and validation
VERSION = datasets.Version("1.0.0")


# TMED-2


@dataclass
class Tmed2Config(EchoConfig):
    """One of the three official splits.

    Args:
        dev: development set, by its number of studies: DEV56, DEV165 or DEV479.
    """

    dev: str = "DEV56"


class Tmed2(EchoBuilder):
    """TMED-2: echocardiogram views of Boston, few labels, 353,500 unlabeled images. Needs an application."""

    BUILDER_CONFIG_CLASS = Tmed2Config
    BUILDER_CONFIGS = [Tmed2Config(f"split{number}", VERSION) for number in range(3)]
    DEFAULT_CONFIG_NAME = "split0"

    homepage = "https://tmed.cs.tufts.edu"
    terms = "TMED-2 is given to approved users alone, who may not pass it on."
    advice = (
        "apply for access at https://tmed.cs.tufts.edu, and put the CSV files and image folders of the "
        "release there, extracted or as zip files"
    )
    citation = """
@inproceedings{huang2022tmed2,
  title = {TMED 2: A Dataset for Semi-Supervised Classification of Echocardiograms},
  author = {Zhe Huang and Gary Long and Benjamin S. Wessler and Michael C. Hughes},
  booktitle = {DataPerf: Benchmarking Data for Data-Centric AI Workshop at ICML},
  year = {2022}
}
"""
    file_name = re.compile(r"(\d+)s\d+_\d+\.png", re.ASCII)
    splits_of_table = {"train": "labeled", "val": "validation", "test": "test"}

    def find_frames(self) -> dict[str, list[Frame]]:
        config, fold = self.config, self.config.name[-1]
        check_choice("dev", config.dev, DEVS)
        names = (
            f"{config.dev}/TMED2_fold{fold}_labeledpart.csv",
            f"fold{fold}/{config.dev}/labeledset_labeledpart.csv",
        )
        table = self.tree.find(*names)
        if table is None:
            raise FileNotFoundError(f"{self.tree.root} has neither {names[0]} nor {names[1]}: {self.advice}.")
        labeled = self.labeled_frames(table)
        self.check_images(labeled)
        unlabeled = self.unlabeled_frames({frame.patient for frames in labeled.values() for frame in frames})
        return {"labeled": labeled.pop("labeled"), "unlabeled": unlabeled, **labeled}

    def labeled_frames(self, table: str) -> dict[str, list[Frame]]:
        """The rows of the four views; all of their images have to be there."""
        columns = ("query_key", "view_label", "view_classifier_split", "SourceFolder")
        keys, views, parts, folders = read_columns(self.tree, table, columns).values()
        check_unique(table, keys)
        frames: dict[str, list[Frame]] = {split: [] for split in self.splits_of_table.values()}
        missing = []
        places = self.locate(keys, folders)
        for key, view, part, place in zip(keys, views, parts, places, strict=True):
            if view.upper() not in ECHO_VIEWS:
                self.passed_over[f"view {view}"] += 1
            elif part not in self.splits_of_table:
                self.passed_over[f"split {part}"] += 1
            elif place is None:
                missing.append(key)
            else:
                label = ECHO_VIEWS.index(view.upper())
                frames[self.splits_of_table[part]].append(Frame(place, self.patient(key, table), label))
        if missing:
            raise FileNotFoundError(
                f"{table} names {len(missing):,} images that are not in {self.tree.root}, such as "
                f"{printable(missing[0])}: put all folders or zip files of the release there."
            )
        for part, split in self.splits_of_table.items():
            if not frames[split]:
                raise ValueError(f"{table} has no image of the four views with view_classifier_split {part}.")
        return frames

    def locate(self, keys: Sequence[str], folders: Sequence[str]) -> list[str | None]:
        """Where the images are, at any depth below their folder: unpacking a zip file often doubles it."""
        wanted, found = set(keys), defaultdict(list)
        for name in self.tree:
            key = name.rpartition("/")[2]
            if key in wanted:
                found[key].append(name)
        inside = [f"/{folder.replace(chr(92), '/').strip('/')}/" for folder in folders]
        return [
            next((name for name in found[key] if folder in f"/{name}"), None)
            for key, folder in zip(keys, inside, strict=True)
        ]

    def patient(self, key: str, table: str) -> str:
        match = self.file_name.fullmatch(key)
        if match is None:
            raise ValueError(
                f"{table} names the image {printable(key)}, which does not tell the patient: expected names "
                "such as 4860s1_0.png for image 0 of study 1 of patient 4860."
            )
        return match[1]

    def check_images(self, labeled: Mapping[str, Sequence[Frame]]) -> None:
        """Before an hour goes into the unlabeled images."""
        for split, frames in labeled.items():
            for frame in tqdm(frames, f"Reading {split} images", disable=len(frames) <= 2000):
                try:
                    self.read_frame(frame)
                except UnreadableImage as error:
                    raise ValueError(
                        f"The {split} image {printable(frame.name)} cannot be read: {error}. "
                        "Download it again."
                    ) from error

    def unlabeled_frames(self, taken: set[str]) -> list[Frame]:
        """Those of a table, or of the folder unlabeled_set, but none of the patients in `taken`."""
        frames: dict[str, Frame] = {}
        for name in self.unlabeled_names():
            key = name.rpartition("/")[2]
            match = self.file_name.fullmatch(key)
            if match is None:
                self.skip(name, "its name does not tell the patient")
            elif match[1] in taken:
                self.passed_over["unlabeled, but of a labeled patient"] += 1
            else:
                frames.setdefault(key, Frame(name, match[1], -1))
        if not frames:
            raise FileNotFoundError(
                f"{self.tree.root} has no image of further patients in a folder unlabeled_set"
                f"{self.example()}: put that folder of the release there, or its zip file."
            )
        return [frames[key] for key in sorted(frames)]

    def unlabeled_names(self) -> Iterator[str]:
        table = self.tree.find("JACC_train_unlabeled_WithSourceFolder.csv")
        if table is None:
            yield from (
                name for name in self.tree if "/unlabeled_set/" in f"/{name}" and name.endswith(".png")
            )
            return
        keys, folders = read_columns(self.tree, table, ("query_key", "SourceFolder")).values()
        for key, place in zip(keys, self.locate(keys, folders), strict=True):
            if place is None:
                self.skip(key, "it does not exist")
            else:
                yield place


# Unity


class Unity(EchoBuilder):
    """Unity: echocardiogram views of British hospitals, PLAX, A4C and A2C, for testing. Needs a download.

    The public files do not tell patients apart: `patient` is the clip.
    """

    BUILDER_CONFIGS = [EchoConfig("default", VERSION)]

    homepage = "https://data.unityimaging.net"
    terms = "Unity has terms of its own, on its site, which have to be accepted there."
    advice = (
        "download png-cache.zip and view_index.csv from https://data.unityimaging.net, and put both there"
    )
    citation = """
@article{howard2021automated,
  title = {Automated Left Ventricular Dimension Assessment Using Artificial Intelligence Developed \
and Validated by a
           UK-Wide Collaborative},
  author = {James P. Howard and Catherine C. Stowell and Graham D. Cole and others},
  journal = {Circulation: Cardiovascular Imaging},
  volume = {14},
  number = {5},
  year = {2021}
}
"""

    views = frozenset({"PLAX", "A4C", "A2C"})

    def find_frames(self) -> dict[str, list[Frame]]:
        table = self.tree.find("view_index.csv")
        if table is None:
            raise FileNotFoundError(f"{self.tree.root} has no view_index.csv: {self.advice}.")
        images: dict[str, str] = {}
        for name in self.tree:
            if name.endswith(".png"):
                images.setdefault(name.rpartition("/")[2], name)
        views: dict[str, set[str]] = defaultdict(set)
        for file, view in zip(*read_columns(self.tree, table, ("file", "view")).values(), strict=True):
            views[file].add(view.upper())
        frames = []
        for file, named in sorted(views.items()):
            view = min(named)
            if not named & self.views:
                self.passed_over[f"view {view}"] += 1
            elif len(named) > 1:
                self.skip(file, f"it has the views {' and '.join(sorted(named))}")
            elif file not in images:
                self.skip(file, "it does not exist")
            else:
                frames.append(Frame(images[file], file.rpartition("-")[0] or file, ECHO_VIEWS.index(view)))
        self.passed_over["not in view_index.csv"] += len(images.keys() - views.keys())
        if not frames:
            raise ValueError(
                f"{self.tree.root} has no image with the view {', '.join(sorted(self.views))} in {table}"
                f"{self.example()}: {self.advice}."
            )
        return {"test": frames}


# CAMUS


@dataclass
class CamusConfig(EchoConfig):
    """How the intensities are treated.

    Args:
        quantile_match: give the images the intensities of `reference`, by one table for all.
        reference: folder or zip file of TMED-2, or the report.json that building TMED-2 left beside its
            cache.
    """

    quantile_match: bool = False
    reference: Source | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        if self.quantile_match != (self.reference is not None):
            raise ValueError(
                f"quantile_match is {self.quantile_match} and reference is {self.reference}, but expected "
                "both or none: give quantile_match=True and reference=, the folder of TMED-2."
            )
        return super().sources + ((self.reference,) if self.reference is not None else ())


class Camus(EchoBuilder):
    """CAMUS: echocardiogram views of a French hospital, A4C and A2C, for testing. Needs registration.

    End-diastolic and end-systolic images of 500 patients, in the older release (MetaImage, with pixels that
    are not square) or the newer one (NIfTI).
    """

    BUILDER_CONFIG_CLASS = CamusConfig
    BUILDER_CONFIGS = [CamusConfig("default", VERSION)]

    homepage = "https://www.creatis.insa-lyon.fr/Challenge/camus/"
    terms = "CAMUS is given to registered users alone, who may not pass it on."
    advice = (
        "register at https://www.creatis.insa-lyon.fr/Challenge/camus/, and put the folders training and "
        "testing, or CAMUS_public, there, extracted or as zip files"
    )
    citation = """
@article{leclerc2019deep,
  title = {Deep Learning for Segmentation Using an Open Large-Scale Dataset in 2D Echocardiography},
  author = {Sarah Leclerc and Erik Smistad and Joao Pedrosa and Andreas Ostvik and others},
  journal = {IEEE Transactions on Medical Imaging},
  volume = {38},
  number = {9},
  year = {2019}
}
"""
    file_name = re.compile(r"patient(\d{4})_(2CH|4CH)_(ED|ES)\.(mhd|nii|nii\.gz)", re.ASCII)
    folder = re.compile(r"(?:^|/)patient(\d{4})/", re.ASCII)
    view_names = {"2CH": "A2C", "4CH": "A4C"}
    table: np.ndarray | None = None

    def find_frames(self) -> dict[str, list[Frame]]:
        images = {
            name: match for name in self.tree if (match := self.file_name.fullmatch(name.rpartition("/")[2]))
        }
        releases = {match[4] == "mhd": name for name, match in images.items()}
        folders = {name: folder[1] for name in self.tree if (folder := self.folder.search(name))}
        patients = {self.patient(name, number, True in releases) for name, number in folders.items()}
        found: dict[tuple[str, str, str], str] = {}
        for name, match in images.items():
            patients.add(patient := self.patient(name, match[1], True in releases))
            found.setdefault((patient, match[2], match[3]), name)
        if not found:
            raise FileNotFoundError(
                f"{self.tree.root} has no file such as patient0001/patient0001_2CH_ED.mhd or .nii.gz: "
                f"{self.advice}."
            )
        if len(releases) > 1:
            raise ValueError(
                f"{self.tree.root} has two releases of CAMUS, with {releases[True]} and {releases[False]}: "
                "give the folder of one as data_dir."
            )
        frames = []
        for key in itertools.product(sorted(patients), self.view_names, ("ED", "ES")):
            if key in found:
                frames.append(Frame(found[key], key[0], ECHO_VIEWS.index(self.view_names[key[1]])))
            else:
                self.skip("_".join(key), "it does not exist")
        self.table = self.match_table(frames) if self.config.quantile_match else None
        return {"test": frames}

    def patient(self, name: str, number: str, older: bool) -> str:
        """In the older release the numbers of the folder testing start again at 1, after 450 others."""
        again = older and "testing" in (self.tree.root.name, *name.split("/"))
        return f"patient{int(number) + 450 * again:04d}"

    def read_frame(self, frame: Frame) -> np.ndarray:
        pixels = self.read_unmatched(frame)
        return pixels if self.table is None else self.table[pixels]

    def read_unmatched(self, frame: Frame) -> np.ndarray:
        volume = read_volume(self.tree, frame.name)
        if len(volume.frames) != 1:
            raise UnreadableImage(f"it has {len(volume.frames)} frames, expected one")
        return fit(stretch(square_pixels(volume.frames[0], volume.spacing)))

    def match_table(self, frames: Sequence[Frame]) -> np.ndarray:
        """Pixel values of the same quantile in TMED-2, from all pixels as a network sees them."""
        counts = np.zeros(256, np.int64)
        for frame in tqdm(frames, "Counting pixels of CAMUS", disable=len(frames) <= 100):
            try:
                counts += count_pixels(self.read_unmatched(frame))
            except UnreadableImage:  # to be listed when the set is built
                continue
        reference = reference_counts(self.config.trees[1])
        return quantile_table(counts, reference) if counts.any() else np.arange(256)


def reference_counts(tree: Tree) -> np.ndarray:
    """How often each pixel value occurs in the images of TMED-2, or in the report.json of a built set."""
    names = list(tree)
    if len(names) == 1 and names[0].endswith(".json"):
        try:
            counts = np.asarray(json.loads(tree.read(names[0]))["pixel_counts"])
            if counts.shape == (256,) and counts.dtype.kind in "iu" and counts.min() >= 0 and counts.any():
                return counts
        except (ValueError, KeyError, TypeError):
            pass
        raise ValueError(
            f"{tree.root / names[0]} has no 256 pixel_counts: give the report.json of TMED-2, or its folder."
        )
    images = [name for name in names if Tmed2.file_name.fullmatch(name.rpartition("/")[2])]
    counts = np.zeros(256, np.int64)
    for name in tqdm(images, "Counting pixels of the reference", disable=len(images) <= 2000):
        try:
            counts += count_pixels(fit(read_grey(tree.read(name))))
        except UnreadableImage:  # of no weight among so many
            continue
    if not counts.any():
        raise ValueError(
            f"The reference {tree.root} has no images such as 4860s1_0.png: give the folder of TMED-2."
        )
    return counts
