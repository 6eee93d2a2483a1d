"""What the sets of Heart2Heart share: four views, grey images of 112x112 pixels, patients, and a report."""

from __future__ import annotations

import hashlib
import inspect
import io
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import datasets
import numpy as np
import pandas as pd
import PIL.Image

from hf_fixastep.data import trees
from hf_fixastep.data.base import ImageSet
from hf_fixastep.data.files import (
    Picture,
    Source,
    UnreadableImage,
    encode,
    one_line,
    printable,
    read_column,
    read_grey,
)
from hf_fixastep.data.trees import Tree
from hf_fixastep.echo import files, volumes
from hf_fixastep.echo.files import ECHO_VIEWS, count_pixels, fit, is_phantom


logger = logging.getLogger(__name__)

HEART2HEART = """
@inproceedings{huang2023fixastep,
  title = {Fix-A-Step: Semi-supervised Learning from Uncurated Unlabeled Data},
  author = {Zhe Huang and Mary-Joy Sidhom and Benjamin S. Wessler and Michael C. Hughes},
  booktitle = {International Conference on Artificial Intelligence and Statistics},
  year = {2023}
}
"""


class Frame(NamedTuple):
    """An image that is to be read."""

    name: str  # in the tree
    patient: str
    label: int


@dataclass
class EchoConfig(datasets.BuilderConfig):
    """Settings that all three sets have: none but the data_dir."""

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.data_dir,) if self.data_dir is not None else ()

    def create_config_id(self, config_kwargs: dict, custom_features: datasets.Features | None = None) -> str:
        """The name of the cache folder, which changes with the settings, the files, and their readers."""
        self.trees = [Tree(source) for source in self.sources]  # not a field, which would be a setting
        settings = [getattr(self, field.name) for field in fields(self) if field.name != "data_dir"]
        settings += [tree.fingerprint for tree in self.trees]
        content = hashlib.sha256(repr(settings).encode())
        for module in (__file__, files.__file__, trees.__file__, volumes.__file__):
            content.update(Path(module).read_bytes())
        return f"{self.name}-{content.hexdigest()[:16]}"


class EchoBuilder(ImageSet):
    """What the three sets share; a subclass finds the frames and reads them."""

    BUILDER_CONFIG_CLASS = EchoConfig
    medical = True
    homepage: ClassVar[str]
    terms: ClassVar[str]
    advice: ClassVar[str]  # how to get the files
    citation: ClassVar[str]

    def find_frames(self) -> dict[str, list[Frame]]:
        """The frames of every split."""
        raise NotImplementedError

    def read_frame(self, frame: Frame) -> np.ndarray:
        """uint8 [112, 112], or an `UnreadableImage`."""
        return fit(read_grey(self.tree.read(frame.name)))

    def skip(self, name: str, why: str) -> None:
        """List a file that should have given an image."""
        self.skipped[printable(name)] = why

    def _info(self) -> datasets.DatasetInfo:
        features = {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=list(ECHO_VIEWS)),
            "patient": datasets.Value("string"),
        }
        phantom = "PHANTOM DATA. " * is_phantom(self.config.data_dir)
        return datasets.DatasetInfo(
            description=phantom + inspect.cleandoc(self.__doc__ or ""),
            homepage=self.homepage,
            license=self.terms,
            citation=(self.citation + HEART2HEART).strip(),
            features=datasets.Features(features),
        )

    def _split_generators(self, dl_manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        if self.config.data_dir is None:
            raise ValueError(
                f"{self.dataset_name} needs data_dir=, the folder of your own download: {self.advice}."
            )
        self.tree: Tree = self.config.trees[0]
        self.skipped: dict[str, str] = {}
        self.passed_over: Counter[str] = Counter()
        self.pixel_counts = np.zeros(256, np.int64)
        self.splits = self.find_frames()
        check_patients(self.splits)
        generators = [datasets.SplitGenerator(name=name, gen_kwargs={"split": name}) for name in self.splits]
        for generator in generators:
            generator.split_info.num_examples = len(self.splits[generator.name])  # for the progress bar
        return generators

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        for row, frame in enumerate(self.splits[split]):
            try:
                pixels = self.read_frame(frame)
            except UnreadableImage as error:
                self.skip(frame.name, str(error))
                continue
            self.pixel_counts += count_pixels(pixels)
            # written anew, as files may carry more than pixels
            image = encode(Picture(PIL.Image.fromarray(pixels), "L", None), None)
            picture = {"bytes": image, "path": None}
            yield row, {"image": picture, "label": frame.label, "patient": frame.patient}

    def findings(self, report: dict[str, Any]) -> list[str]:
        return [f"Images left out: {len(self.skipped):,}{self.example()}."] if self.skipped else []

    def example(self) -> str:
        name, why = next(iter(self.skipped.items()), ("", ""))
        return f", such as {name} ({why})" if name else ""

    def make_report(self) -> dict[str, Any]:
        """What was found in the files, ready for JSON; an error if a split is empty."""
        read = {
            split: [frame for frame in frames if printable(frame.name) not in self.skipped]
            for split, frames in self.splits.items()
        }
        for split, frames in read.items():
            if not frames:
                raise ValueError(f"No image of {split} in {self.tree.root} could be read{self.example()}.")
        return {
            "root": printable(str(self.tree.root)),
            "images": {split: len(frames) for split, frames in read.items()},
            "patients": {split: len({frame.patient for frame in frames}) for split, frames in read.items()},
            "classes": {
                split: {
                    view: sum(frame.label == label for frame in frames)
                    for label, view in enumerate(ECHO_VIEWS)
                }
                for split, frames in read.items()
                if split != "unlabeled"
            },
            "passed_over": dict(+self.passed_over),
            "skipped": self.skipped,
            "pixel_counts": self.pixel_counts.tolist(),
        }


def check_patients(splits: Mapping[str, Sequence[Frame]]) -> None:
    """No patient may be in two splits."""
    for one, other in itertools.combinations(splits, 2):
        shared = {frame.patient for frame in splits[one]} & {frame.patient for frame in splits[other]}
        if shared:
            raise ValueError(
                f"The splits {one} and {other} share {len(shared):,} patients, such as {min(shared)}, but "
                "expected none: use the CSV files of the release as they are."
            )


def read_columns(tree: Tree, name: str, columns: Iterable[str]) -> dict[str, list[str]]:
    """Columns of a CSV file, as text."""
    path = str(tree.root / name)
    options: dict[str, Any] = {"encoding": "utf-8-sig", "skipinitialspace": True, "keep_default_na": False}
    try:
        table = pd.read_csv(io.BytesIO(tree.read(name)), dtype=object, **options)
    except Exception as error:  # parsers raise nearly anything on a broken file
        raise ValueError(f"{printable(path)} cannot be read as a table: {one_line(error)}.") from error
    table.columns = [str(column).strip() for column in table.columns]
    if not len(table):
        raise ValueError(f"{printable(path)} has no rows: download it again.")
    return {column: read_column(path, table, column) for column in columns}
