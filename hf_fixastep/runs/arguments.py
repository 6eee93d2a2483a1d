"""From a recipe and the command line to dataclasses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from transformers import HfArgumentParser

from hf_fixastep.checks import check_choice
from hf_fixastep.runs.recipe import read_mapping, read_recipe


NOT_GIVEN = object()  # the value of an option that neither the recipe nor the command line sets
SIDES = ("labeled", "unlabeled", "validation", "test", "group")  # what the data set `folders` is made of


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class NamedDataArguments:
    """A data set by name."""

    dataset: str = option("", "A name of hf_fixastep.list_datasets().")
    dataset_config: str | None = option(None, "A variant of the data set, such as split0.")
    zeta: int | None = option(None, "Percent of unlabeled classes that are foreign.")
    labels_per_class: int | None = option(None, "Labeled images per class.")
    split_seed: int | None = option(None, "Seed of the split into labeled, unlabeled, ...")
    data_dir: str | None = option(None, "Folder of raw files, for data that need them.")
    dataset_kwargs: dict | str | None = option(None, "Whatever else the data set can vary, as YAML.")

    def __post_init__(self) -> None:
        self.dataset_kwargs = read_mapping("dataset_kwargs", self.dataset_kwargs)
        if self.dataset_config is not None and self.zeta is not None:
            raise ValueError(
                f"dataset_config is {self.dataset_config} and zeta is {self.zeta}; give one of the two."
            )

    @property
    def config(self) -> str | None:
        """The variant of the data set, whichever way it was given."""
        return self.dataset_config if self.zeta is None else f"zeta{self.zeta}"

    @property
    def settings(self) -> dict[str, Any]:
        """What `load_dataset` gets besides the name and the variant."""
        own = {"labels_per_class": self.labels_per_class, "seed": self.split_seed, "data_dir": self.data_dir}
        given = {name: value for name, value in own.items() if value is not None}
        return given | read_mapping("dataset_kwargs", self.dataset_kwargs)


@dataclass
class DataArguments(NamedDataArguments):
    """Which data to load, by name, or which folders of images."""

    labeled: str | None = option(
        None, "Your own images: a folder with a sub-folder per class, or a table. Means --dataset folders."
    )
    unlabeled: list[str] | None = option(None, "Your own pile: folders, globs or tables.")
    validation: str | None = option(None, "As --labeled; if not given, a tenth of it is cut off.")
    test: str | None = option(None, "As --labeled; if not given, a fifth of it is cut off.")
    group: str | None = option(
        None,
        "Column of the table, or regular expression with (the group) in file names, such as the patient.",
    )

    def __post_init__(self) -> None:
        if not self.dataset:
            raise ValueError("No data were named: give --dataset NAME, or --labeled DIR and --unlabeled DIR.")
        super().__post_init__()


@dataclass
class ModelArguments:
    """Which network to train."""

    model: str = option("", "A model type to build from scratch, or a folder or Hub name to start from.")
    model_kwargs: dict | str | None = option(None, "Config of a model built from scratch, as YAML.")
    image_size: int | None = option(
        None, "Side of the images: of a model from scratch, or if not that of a pretrained one's processor."
    )
    image_mean: list[float] | None = option(None, "Mean per channel, of values in 0..1.")
    image_std: list[float] | None = option(None, "Standard deviation per channel.")
    cache_dir: str | None = option(
        None, "Where features of frozen networks are kept; by default with the files of Hugging Face."
    )

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("No model was named: give --model, such as wide_resnet_fixastep or a Hub name.")
        self.model_kwargs = read_mapping("model_kwargs", self.model_kwargs)


class OneSentenceParser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one sentence; argparse would print two pages of usage before it."""
        raise ValueError(f"{message[0].upper()}{message[1:]}.")


def positional(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words in front of the first option, and the rest."""
    at = next((at for at, word in enumerate(argv) if word.startswith("--")), len(argv))
    return list(argv[:at]), list(argv[at:])


def parse(types: Sequence[type], argv: Sequence[str]) -> tuple[Any, ...]:
    """Dataclasses from `--config RECIPE` and command-line overrides, then a dict of the settings given.

    The recipe's settings become words in front of the command line, so that both are read in the same way
    and the command line wins.
    """
    parser = OneSentenceParser(types, allow_abbrev=False)  # type: ignore[arg-type]
    known = {f.name: f for kind in types for f in dataclasses.fields(kind) if f.init}
    parser.set_defaults(**dict.fromkeys(known, NOT_GIVEN))
    namespace, unused = parser.parse_known_args([*recipe_words(argv, known), *without_recipe(argv)])
    for word in unused:
        if not word.startswith("--"):
            raise ValueError(f"Found {word!r} where an option such as --config is expected.")
        check_choice("argument", word.removeprefix("--").split("=")[0], known)
    given = {name: value for name, value in vars(namespace).items() if value is not NOT_GIVEN}
    for name, value in given.items():
        if name.endswith("_kwargs") and isinstance(value, str):
            given[name] = read_mapping(name, value)
    if DataArguments in types:
        given = fold_sides(given)
    made = [
        kind(**{f.name: given[f.name] for f in dataclasses.fields(kind) if f.name in given}) for kind in types
    ]
    return *made, {name: value for name, value in given.items() if value != default(known[name])}


def fold_sides(given: dict[str, Any]) -> dict[str, Any]:
    """Folders of one's own become `dataset_kwargs`, so that a recipe knows one form of them."""
    sides = {name: given[name] for name in SIDES if given.get(name) is not None}
    if not sides:
        return given
    if (dataset := given.get("dataset", "folders")) != "folders":
        name = next(iter(sides))
        raise ValueError(
            f"{name} is {sides[name]}, but dataset is {dataset}: --{name} is for images of your own, "
            "with --dataset folders or --config folders/fixmatch."
        )
    if len(sides.get("unlabeled", ())) == 1:
        (sides["unlabeled"],) = sides["unlabeled"]
    rest = {name: value for name, value in given.items() if name not in SIDES}
    kwargs = read_mapping("dataset_kwargs", given.get("dataset_kwargs")) | sides
    return rest | {"dataset": dataset, "dataset_kwargs": kwargs}


def recipe_words(argv: Sequence[str], known: dict[str, Any]) -> list[str]:
    """The settings of the recipe that `--config` names, as words of a command line."""
    words = split_config(argv)
    if "--config" not in words:
        return []
    at = words.index("--config")
    if at + 1 == len(words):
        raise ValueError("--config needs a recipe after it: a path, or a name such as digits/quickstart.")
    settings = read_recipe(words[at + 1])
    for key in settings:
        check_choice(f"key in {words[at + 1]}:", key, known)
    return [
        word
        for key, value in settings.items()
        if value is not None
        for word in (f"--{key}", *as_words(value))
    ]


def without_recipe(argv: Sequence[str]) -> list[str]:
    words = split_config(argv)
    at = words.index("--config") if "--config" in words else len(words)
    return words[:at] + words[at + 2 :]


def split_config(argv: Sequence[str]) -> list[str]:
    return [
        part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])
    ]


def as_words(value: Any) -> list[str]:
    """A setting as it is written on the command line."""
    if isinstance(value, list):
        return [word for item in value for word in as_words(item)]
    return [json.dumps(value) if isinstance(value, (dict, bool)) else str(value)]


def default(known: dataclasses.Field) -> Any:
    return known.default if known.default_factory is dataclasses.MISSING else known.default_factory()
