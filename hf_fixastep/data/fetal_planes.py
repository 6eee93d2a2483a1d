"""FETAL_PLANES_DB: planes of fetal ultrasound, few labels, and a pile that shows whatever a clinic stores."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray

from hf_fixastep.checks import check_choice
from hf_fixastep.data import fetal_files, files, trees
from hf_fixastep.data.base import WITHOUT_LABELS, ImageSet
from hf_fixastep.data.fetal_files import (
    ADVICE,
    BRAIN_PLANES,
    HOMEPAGE,
    LONGEST_SIDE,
    PLANES,
    find_copies,
    find_persons,
    read_release,
    to_store,
)
from hf_fixastep.data.open_set import OpenSetConfig
from hf_fixastep.data.trees import Tree


DESCRIPTION = """
FETAL_PLANES_DB as a semi-supervised task with a truly uncurated pile: 12,400 ultrasound images of 1,792
patients. Which of the known planes does an image show? The unlabeled images are whatever else the training
patients have, nothing filtered.

| config | known planes |
| --- | --- |
| planes | Fetal abdomen, Fetal brain, Fetal femur, Fetal thorax, Maternal cervix |
| brain | Trans-thalamic, Trans-cerebellum, Trans-ventricular |

All other images are foreign: those called Other, and for `brain` also the other planes and other images of
the brain. They are about 36 percent of the pile of `planes`, and 78 percent of that of `brain`.

The official test patients are in `test` (known planes) and `unseen_foreign` (the others, for rejection,
unless `foreign=False`). The training patients are put into an order by numpy's `RandomState(seed)`. Of the
first fifth, the images of known planes are in `validation`, and the others in no split. The rest have the
labels: of each class, one patient after another gives an image, until there are `labels_per_class`; if there
are too few patients, each gives a second one, and so on. All other images of these patients are `unlabeled`,
those of labeled patients included, in a shuffled order. So validation patients are in no other split, they do
not depend on the config nor on the number of labels, and a smaller labeled set is part of every larger one.
`machine` restricts labeled, unlabeled and validation images to one machine; the other machines are then in
the test alone.

Two images are copies if their difference hashes, of 256 bits, differ in at most 4: 940 of the 12,400 images
at 128 pixels repeat another one, 833 of them to the pixel. Patients with a copy in common count as one: the
training patients 778 and 790, 779 and 791, 781 and 793, 786 and 799, and 820 and 830 show the same
examinations. Copies of labeled images are neither labeled nor in the pile. Copies with two classes (40 images
of `planes`, 25 of `brain`) may be in the pile, but in no other split. All other copies stay, as released.
Neighbouring frames of a sweep differ in more bits: they are on one side with their patient, but one may be
labeled and the next one in the pile.

`data_dir` is the original release, FETAL_PLANES_ZENODO.zip or the folder it was extracted to, with
FETAL_PLANES_DB_data.csv beside Images, or a folder of parquet files of it, train-*.parquet and test-*.parquet
with the columns image, label, brain_plane, patient, operator and machine. Both give the same splits, but for
copies that are told apart only in full size.

Images are grey; where the longer side has more than `longest_side` pixels, they are reduced to it, unless it
is 0. All splits have the columns `patient`, `machine` and `operator`, for reports and never for training. For
research: a classifier of planes is not a medical device.
"""

CITATION = """
@article{burgosartizzu2020evaluation,
  title = {Evaluation of Deep Convolutional Neural Networks for Automatic Classification of Common Maternal
           Fetal Ultrasound Planes},
  author = {Xavier P. Burgos-Artizzu and David Coronado-Guti{\\'e}rrez and Brenda Valenzuela-Alcaraz and
            Elisenda Bonet-Carne and Elisenda Eixarch and Fatima Crispi and Eduard Gratac{\\'o}s},
  journal = {Scientific Reports},
  volume = {10},
  number = {10200},
  year = {2020}
}
"""

VALIDATION_SHARE = 0.2  # of the training patients


@dataclass
class FetalPlanesConfig(OpenSetConfig):
    """One choice of known planes.

    Args:
        foreign: have the split unseen_foreign: what is not a known plane, of test patients.
        machine: the machine of all labeled, unlabeled and validation images; any if None.
        longest_side: pixels to which larger images are reduced; 0 keeps their size.
    """

    labels_per_class: int = 20
    foreign: bool = True
    machine: str | None = None
    longest_side: int = LONGEST_SIDE

    def create_config_id(self, config_kwargs: dict, custom_features: datasets.Features | None = None) -> str:
        """The name of the cache folder, which changes with the settings and the files."""
        settings = [getattr(self, field.name) for field in fields(self) if field.name != "data_dir"]
        if self.data_dir is not None:
            self.tree = Tree(self.data_dir)  # not a field, which would be a setting
            settings.append(self.tree.fingerprint)
        return f"{self.name}-{hashlib.sha256(repr(settings).encode()).hexdigest()[:16]}"


class FetalPlanes(ImageSet):
    """Fetal ultrasound: five known planes or three of the brain; the pile is what else a clinic stores."""

    BUILDER_CONFIG_CLASS = FetalPlanesConfig
    BUILDER_CONFIGS = [FetalPlanesConfig(name, datasets.Version("1.0.0")) for name in ("planes", "brain")]
    DEFAULT_CONFIG_NAME = "planes"
    config: FetalPlanesConfig

    medical = True
    shareable = True
    terms = (
        "Creative Commons Attribution 4.0 (CC BY 4.0): it may be passed on if its authors, Burgos-Artizzu et "
        "al. (2020), are named and changes are stated. Here the images were cut into other splits, and may "
        "have been reduced."
    )
    sources = (fetal_files, files, trees)
    classes = {"planes": PLANES, "brain": BRAIN_PLANES}
    columns = {"planes": "plane", "brain": "brain_plane"}  # that name the classes

    def _info(self) -> datasets.DatasetInfo:
        features = {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=list(self.classes[self.config.name])),
            **{column: datasets.Value("string") for column in ("patient", "machine", "operator")},
        }
        return datasets.DatasetInfo(
            description=DESCRIPTION.strip(),
            homepage=HOMEPAGE,
            license="cc-by-4.0",
            citation=CITATION.strip(),
            features=datasets.Features(features),
        )

    def _split_generators(self, dl_manager: datasets.DownloadManager) -> list[datasets.SplitGenerator]:
        config, names = self.config, self.classes[self.config.name]
        check_settings(config)
        if config.data_dir is None:
            raise ValueError(f"{self.dataset_name} needs data_dir=, the files of the release: {ADVICE}.")
        self.release = read_release(config.tree)
        rows = self.release.rows
        if config.machine is not None:
            check_choice("machine", config.machine, sorted(rows["machine"].unique()))
        numbers = {name: number for number, name in enumerate(names)}
        self.labels = rows[self.columns[config.name]].map(numbers).fillna(-1).to_numpy(np.int64)
        self.copies = find_copies(self.release)
        chosen = np.ones(len(rows), bool) if config.machine is None else rows["machine"] == config.machine
        self.rows = draw(
            names,
            self.labels,
            rows["train"].to_numpy(),
            np.asarray(chosen),
            self.copies,
            rows["patient"].to_numpy(),
            config.labels_per_class,
            config.seed,
        )
        if not config.foreign:
            del self.rows["unseen_foreign"]
        return [
            datasets.SplitGenerator(name=name, gen_kwargs={"split": name})
            for name, part in self.rows.items()
            if len(part)
        ]

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        table = self.release.rows
        for key, row in enumerate(self.rows[split]):
            # no path: the original file names tell the plane
            image = {"bytes": to_store(self.release.read(row), self.config.longest_side), "path": None}
            label = -1 if split in WITHOUT_LABELS else int(self.labels[row])
            yield (
                key,
                {"image": image, "label": label}
                | {column: table[column][row] for column in ("patient", "machine", "operator")},
            )

    def make_report(self) -> dict[str, Any]:
        """Sizes, and what was left out. Only an analysis may know the classes of the unlabeled images."""
        table, names = self.release.rows, [*self.classes[self.config.name], "foreign"]  # -1 is the last
        counts = {
            column: {split: dict(Counter(values[part])) for split, part in self.rows.items()}
            for column, values in (
                ("classes", np.array(names)[self.labels]),
                ("machines", table["machine"].to_numpy()),
            )
        }
        used = np.concatenate(list(self.rows.values()))
        return {
            "images": {split: len(part) for split, part in self.rows.items()},
            "patients": {split: int(table["patient"][part].nunique()) for split, part in self.rows.items()},
            **counts,
            "left_out": table["name"].drop(used).tolist(),
            "copies": len(table) - len(np.unique(self.copies)),
            "two_classes": table["name"][two_classes(self.labels, self.copies)].tolist(),
            "unlabeled_classes": self.labels[self.rows["unlabeled"]].tolist(),
        }


def check_settings(config: FetalPlanesConfig) -> None:
    """Before the files are read, which takes a while."""
    for name, low in (("labels_per_class", 1), ("seed", 0), ("longest_side", 0)):
        value = getattr(config, name)
        if not isinstance(value, int) or not low <= value < 2**32:
            raise ValueError(f"{name} is {value!r}, but expected a whole number from {low} to {2**32 - 1}.")


def two_classes(labels: NDArray, copies: NDArray) -> NDArray:
    """Whether there is a copy of each row with another class, foreign being one."""
    pairs = np.unique(np.stack([copies, labels]), axis=1)
    return np.bincount(pairs[0])[copies] > 1


def draw(
    names: Sequence[str],
    labels: NDArray,
    train: NDArray,
    chosen: NDArray,
    copies: NDArray,
    patients: NDArray,
    labels_per_class: int,
    seed: int,
) -> dict[str, NDArray]:
    """The rows of every split.

    Args:
        labels: class of each row, -1 for foreign images.
        train: whether a row is of a training patient.
        chosen: whether it may be in a split for training.
        copies: number of its set of copies.
        patients: its patient.
    """
    random = np.random.RandomState(seed)
    clear = ~two_classes(labels, copies)
    own = train & chosen & ~np.isin(copies, copies[~train])
    found, numbers = np.unique(patients[own], return_inverse=True)
    # Patients and not persons are put into an order, so that a pair of copies more or less moves no others.
    persons = find_persons(patients, copies)
    turns = np.full(len(labels), len(found))  # of each person: that of the first patient
    np.minimum.at(turns, persons[own], random.permutation(len(found))[numbers])
    held_out = own & (turns[persons] < max(1, round(VALIDATION_SHARE * len(found))))
    shuffled = random.permutation(len(labels))
    labeled: list[int] = []
    largest = {}
    for number, name in enumerate(names):
        candidates = shuffled[(own & ~held_out & clear & (labels == number))[shuffled]]
        candidates = candidates[np.sort(np.unique(copies[candidates], return_index=True)[1])]
        given: Counter[int] = Counter()
        ranks = []
        for row in candidates:
            ranks.append((given[persons[row]], turns[persons[row]], row))
            given[persons[row]] += 1
        largest[name] = len(ranks)
        labeled += [int(row) for *_, row in sorted(ranks)[:labels_per_class]]
    name, most = min(largest.items(), key=lambda item: item[1])
    if labels_per_class > most:
        machine = "" if chosen.all() else " of this machine"
        advice = f"choose at most {most}" if most else "choose another machine" if machine else ADVICE
        raise ValueError(
            f"labels_per_class is {labels_per_class}, but the training patients{machine} have {most} "
            f"different images of {name} outside validation: {advice}."
        )
    pile = own & ~held_out & ~np.isin(copies, copies[labeled])
    parts = {
        "labeled": np.array(sorted(labeled)),
        "unlabeled": random.permutation(np.flatnonzero(pile)),
        "validation": np.flatnonzero(held_out & clear & (labels >= 0)),
        "test": np.flatnonzero(~train & clear & (labels >= 0)),
        "unseen_foreign": np.flatnonzero(~train & clear & (labels < 0)),
    }
    for split in ("unlabeled", "validation", "test"):
        if not len(parts[split]):
            raise ValueError(f"There is no image for the split {split}: {ADVICE}.")
    return parts
