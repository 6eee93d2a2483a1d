"""What a search tries: its file, its command line, and the space of settings that trials are drawn from.

A space names settings. Each has a list of choices, a range {low, high, log}, or named choices, which set
several settings at once.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_fixastep.checks import check_choice
from hf_fixastep.config import FixAStepConfig
from hf_fixastep.losses import get_loss
from hf_fixastep.runs.arguments import DataArguments, ModelArguments, as_words, parse
from hf_fixastep.runs.recipe import read_recipe


Options = dict[str, list[str]]  # words of a command line by the name of their option

TYPES = (DataArguments, ModelArguments, FixAStepConfig)
VALIDATION_METRICS = ("balanced_accuracy", "accuracy")
BASE_METHOD: Options = {"gate": ["off"], "mix_labeled": ["false"]}
WITH_FIX_A_STEP: Options = {"gate": ["drop"], "mix_labeled": ["true"]}
# What the runs with the values found do not take over: they have the length of the recipe.
TRIAL_ONLY = ("output_dir", "max_steps", "eval_steps", "logging_steps", "disable_tqdm")
# Of a trial only its evaluations are kept.
NOTHING_SAVED: Options = {"save_strategy": ["no"], "load_best_model_at_end": ["false"]}
NOTHING_SAVED |= {"eval_strategy": ["steps"], "push_to_hub": ["false"]}


@dataclass
class SearchArguments:
    """How long to search, and for what."""

    trials: int = field(default=100, metadata={"help": "Finished trials to reach."})
    metric: str = field(default=VALIDATION_METRICS[0], metadata={"help": " or ".join(VALIDATION_METRICS)})
    prune: bool = field(default=True, metadata={"help": "Stop trials that are below the median."})

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"trials is {self.trials}, but it has to be a number from 1 on.")
        check_choice("metric", self.metric, VALIDATION_METRICS)


@dataclass(frozen=True)
class Search:
    """A search as its file and the command line describe it.

    Args:
        overrides: settings of all trials that differ from the recipe.
    """

    recipe: str
    space: dict[str, Any]
    overrides: Options
    args: SearchArguments

    @property
    def folder(self) -> Path:
        return Path(self.overrides["output_dir"][0])

    def settings(self, values: dict[str, Any]) -> dict[str, Any]:
        """What the values drawn for a trial set."""
        found: dict[str, Any] = {}
        for name, value in values.items():
            found |= self.space[name][value] if is_named(self.space[name]) else {name: value}
        return found

    def options(self, values: dict[str, Any]) -> Options:
        """Everything in which a trial differs from the recipe."""
        settings = self.settings(values)
        inner = [name for name in settings if "." in name]
        if inner:
            loss_kwargs = self.parse(self.overrides | NOTHING_SAVED)[2].loss_kwargs
            changes = {name.removeprefix("loss_kwargs."): settings.pop(name) for name in inner}
            settings["loss_kwargs"] = loss_kwargs | changes
        return self.overrides | {name: as_words(value) for name, value in settings.items()}

    def parse(self, options: Options) -> tuple[Any, ...]:
        return parse(TYPES, ["--config", self.recipe, *as_argv(options)])

    def parse_trial(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """The dataclasses of a trial, made anew, as some of their settings are filled in from others."""
        folder: Options = {"output_dir": [str(self.folder / "_trial")]}
        return self.parse(self.options(values) | BASE_METHOD | NOTHING_SAVED | folder)

    def command(self, values: dict[str, Any], switches: Options, name: str) -> str:
        """The run of full length with the values of a trial."""
        options = {name: words for name, words in self.options(values).items() if name not in TRIAL_ONLY}
        argv = as_argv(options | switches | {"output_dir": [str(self.folder / name)]})
        return shlex.join(["fixastep", "train", "--config", self.recipe, *argv])


# ---- what the user gave


def read_search(argv: Sequence[str]) -> Search:
    given = as_options(argv)
    if len(given.get("config", [])) != 1:
        raise ValueError("--config needs the file of a search after it, such as search/digits.")
    (path,) = given.pop("config")
    file = read_recipe(path)
    own = [field.name for field in dataclasses.fields(SearchArguments)]
    known = [*own, *(field.name for kind in TYPES for field in dataclasses.fields(kind) if field.init)]
    for key in file:
        check_choice(f"key in {path}:", key, ["config", "space", *known])
    for key in given:
        check_choice("argument", key, known)
    for key, kind in {"config": str, "space": dict}.items():
        if not file.get(key) or not isinstance(file[key], kind):
            raise ValueError(f"{path} has no {key}, but a search needs a recipe as config and a space.")
    recipe, space = file.pop("config"), file.pop("space")
    overrides = {name: as_words(value) for name, value in file.items()} | given
    overrides.setdefault("output_dir", [f"runs/search-{Path(path).stem}"])
    words = as_argv({name: overrides.pop(name) for name in own if name in overrides})
    search = Search(recipe, space, overrides, parse((SearchArguments,), words)[0])
    check_space(search)
    return search


def as_argv(options: Options) -> list[str]:
    return [word for name, words in options.items() for word in (f"--{name}", *words)]


def as_options(argv: Sequence[str]) -> Options:
    found: Options = {}
    for word in argv:
        if word.startswith("--"):
            name, *values = word[2:].split("=", 1)
            found[name] = values  # of an option that is given twice the last counts
        elif found:
            values.append(word)
        else:
            raise ValueError(f"Found {word!r} where an option such as --config is expected.")
    return found


# ---- the space


def is_range(choices: Any) -> bool:
    return isinstance(choices, dict) and {"low", "high"} <= choices.keys() <= {"low", "high", "log"}


def is_named(choices: Any) -> bool:
    return isinstance(choices, dict) and not is_range(choices)


def check_space(search: Search) -> None:
    """Find what is wrong before the first trial; every choice becomes a config once."""
    for name, choices in search.space.items():
        check_choices(name, choices)
    settings = [name for item in search.space.items() for name in settings_set_by(*item)]
    for name in [*settings, *search.overrides]:
        if name in BASE_METHOD:
            raise ValueError(
                f"{name} is given, but a search runs the base method and hands its values to Fix-A-Step; "
                "leave it out."
            )
    for name in settings:
        check_setting(name, settings.count(name) > 1 or name in (*TRIAL_ONLY, *search.overrides))
    first = {name: examples(choices)[0] for name, choices in search.space.items()}
    for name, choices in search.space.items():
        for value in examples(choices):
            args = search.parse_trial(first | {name: value})[2]
            get_loss(args.loss, **args.loss_kwargs)


def check_choices(name: str, choices: Any) -> None:
    if is_range(choices):
        low, high = choices["low"], choices["high"]
        right = isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high
        right = right and (low > 0 or not choices.get("log"))
    elif isinstance(choices, dict):
        right = all(isinstance(settings, dict) for settings in choices.values())
    else:
        right = isinstance(choices, list) and all(isinstance(value, (int, float, str)) for value in choices)
    if not right or not choices:
        raise ValueError(
            f"The choices of {name} are {choices}, but they should be a list of numbers or words, a range "
            "{low, high, log} with low < high and 0 < low for log, or names with their settings."
        )


def check_setting(name: str, is_set_elsewhere: bool) -> None:
    known = [field.name for field in dataclasses.fields(FixAStepConfig)]
    check_choice("setting in space:", name.split(".")[0], known)
    if is_set_elsewhere:
        raise ValueError(
            f"{name} is in the space and also set for all trials or twice; leave one of them out."
        )
    if "." in name and not name.startswith("loss_kwargs."):
        raise ValueError(f"{name} is in the space, but only loss_kwargs has names inside.")


def settings_set_by(name: str, choices: Any) -> list[str]:
    if not is_named(choices):
        return [name]
    return list(dict.fromkeys(setting for chosen in choices.values() for setting in chosen))


def examples(choices: Any) -> list[Any]:
    return [choices["low"], choices["high"]] if is_range(choices) else list(choices)
