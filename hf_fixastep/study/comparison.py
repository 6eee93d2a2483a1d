"""Compare finished runs: which belong together, how they differ, and what that means in plain words.

Runs are rows of a table, as `fixastep sweep` leaves it. Test labels only measure; nothing is chosen by them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import pandas as pd

from hf_fixastep.config import FixAStepConfig
from hf_fixastep.methods import BASELINES, FITTED, METHODS
from hf_fixastep.runs.recipe import read_mapping
from hf_fixastep.study.statistics import (
    DRAWS,
    TAIL,
    Interval,
    count,
    difference,
    mean_interval,
    paired_runs,
    same_images,
)


TEST_METRICS = ("test_accuracy", "test_balanced_accuracy")
LABELED_ONLY, PROBE, BASE, FIX_A_STEP = "labeled-only", "probe", "base", "Fix-A-Step"
VARIANTS = (LABELED_ONLY, *FITTED, BASE, "+G", "+A", FIX_A_STEP)
TITLES = {**METHODS, **FITTED}
UNMIXED = ("mixmatch", "mtcf")  # they mix by themselves, so that Fix-A-Step is the gate alone

REPEATS = ("seed", "split_seed")
MIXING = ("mix_alpha", "mix_temperature", "mix_per_batch")
DATA = ("dataset", "dataset_config", "zeta", "labels_per_class", "oracle")
SWITCHES = ("variant", "gate", "mix_labeled", *MIXING, "mix_pool")
COLUMNS = ("loss", "procedure", *DATA, "batchnorm", "preset", "max_steps", *SWITCHES[:-1])
NETWORK = ("model", "model_kwargs", "image_size", "trainable", "lora_rank")
ANSWERS = ("validation_accuracy", "test_labels", "test_predictions", "hash_test")
NEEDED = ("run", *COLUMNS, *REPEATS, "settings", *ANSWERS)
# Settings that change where and how a run is watched, not what it learns.
WITHOUT_EFFECT = (
    *(
        "data_seed",
        "output_dir",
        "data_dir",
        "disable_tqdm",
        "report_to",
        "run_name",
        "cpu_threads",
        "use_cpu",
    ),
    *("resume_from_checkpoint", "ignore_changed_settings", "per_device_eval_batch_size", "push_to_hub"),
)
WITHOUT_PILE = (LABELED_ONLY, *BASELINES)
TRAINING = {each.name for each in fields(FixAStepConfig)} - {
    "loss_kwargs"
}  # without effect in what is fitted
KINDS_WITHOUT_EFFECT = ("logging_", "log_", "save_", "dataloader_", "hub_")


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seeds.

    Args:
        settings: what they have in common, as far as it matters.
        runs: one row per pair of seeds, which are the index.
    """

    settings: dict[str, Any]
    runs: pd.DataFrame

    def key(self, without: Iterable[str] = ()) -> str:
        kept = {name: value for name, value in self.settings.items() if name not in set(without)}
        return json.dumps(kept, sort_keys=True)

    @property
    def method(self) -> str:
        return self.settings["procedure"] or self.settings["loss"]

    @property
    def variant(self) -> str:
        return self.settings["variant"]


@dataclass(frozen=True)
class Difference:
    """How much better one group is than another."""

    first: Group
    second: Group
    interval: Interval


@dataclass
class Comparison:
    """All groups and their differences.

    Args:
        gains: of Fix-A-Step, +A and +G over their own base.
        helps: of everything that uses unlabeled images over labeled-only.
        beats: of everything else over the probe, where there is one.
        missing: what could not be compared or not fully, by the reason.
        notes: what else a reader has to know, one sentence each.
    """

    metric: str
    groups: list[Group]
    means: list[Interval]
    gains: list[Difference] = field(default_factory=list)
    helps: list[Difference] = field(default_factory=list)
    beats: list[Difference] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def compare(runs: pd.DataFrame, metric: str = TEST_METRICS[0]) -> Comparison:
    """Everything that the table supports."""
    check_columns(runs, (*NEEDED, metric))
    if not len(runs):
        raise ValueError("The tables hold no runs; give the results of at least one finished run.")
    groups = group_runs(runs)
    found = Comparison(metric, groups, [mean_interval(group.runs, metric) for group in groups])
    left_out = len(runs) - sum(len(group.runs) for group in groups)
    if left_out:
        found.notes.append(f"Left out: {count(left_out, 'run')} with the settings and seeds of another one.")
    compare_with_probe(found, groups)
    for group in groups:
        if group.variant in WITHOUT_PILE:
            continue
        if group.variant not in (BASE, *FITTED):
            add_difference(found, found.gains, group, own_base(group, groups), "base")
        alone = baseline_of(group, groups, LABELED_ONLY, found.notes)
        add_difference(found, found.helps, group, alone, LABELED_ONLY)
    found.notes = [
        *dict.fromkeys(found.notes),
        *(f"{why}: {'; '.join(names)}." for why, names in found.missing.items()),
    ]
    return found


def compare_with_probe(found: Comparison, groups: Sequence[Group]) -> None:
    """Add to `beats` how much better these groups are than the probe of their kind, if there are probes."""
    if any(group.variant == PROBE for group in found.groups):
        for group in groups:
            if group.variant != PROBE:
                probe = baseline_of(group, found.groups, PROBE, found.notes)
                add_difference(found, found.beats, group, probe, PROBE)


def check_columns(runs: pd.DataFrame, needed: Sequence[str]) -> None:
    if missing := [name for name in needed if name not in runs]:
        names = ", ".join(missing)
        raise ValueError(
            f"The table has no column {names}; write it by fixastep sweep, or give folders of runs."
        )


# ---- groups


def group_runs(runs: pd.DataFrame) -> list[Group]:
    """In the order of data, methods and variants."""
    settings = [what_matters(run) for _, run in runs.iterrows()]
    keys = pd.Series([json.dumps(each, sort_keys=True) for each in settings], index=runs.index)
    groups = []
    for key, rows in runs.groupby(keys, sort=False):
        once = rows.drop_duplicates(list(REPEATS)).set_index(list(REPEATS)).sort_index()
        groups.append(Group(json.loads(str(key)), once))
    return sorted(groups, key=order_of)


def what_matters(run: pd.Series) -> dict[str, Any]:
    """All that makes a run what it is, but for its seeds and what has no effect in it."""
    given = json.loads(run["settings"])
    ignored = {name for name in given if name.startswith(KINDS_WITHOUT_EFFECT)}
    ignored |= {*WITHOUT_EFFECT, *REPEATS, "config"}
    given = {name: value for name, value in given.items() if name not in ignored}
    if "dataset_kwargs" in given:
        kwargs = read_mapping("dataset_kwargs", given["dataset_kwargs"])
        given["dataset_kwargs"] = {name: value for name, value in kwargs.items() if name != "oracle"} or None
    found = {name: plain(run[name]) for name in COLUMNS}
    if str(found["dataset_config"]).startswith("zeta"):
        found["dataset_config"] = None  # zeta says it
    if not found["mix_labeled"]:
        found |= dict.fromkeys(MIXING)
        given.pop("mix_pool", None)
    if found["variant"] in WITHOUT_PILE:
        found |= dict.fromkeys(("zeta", "gate", "mix_labeled", "batchnorm")) | {"oracle": False}
        given = {name: value for name, value in given.items() if not name.startswith("unlabeled_")}
    if found["variant"] in FITTED:
        found |= dict.fromkeys(("preset", "max_steps", "gate", "mix_labeled", "batchnorm", *MIXING))
        given = {name: value for name, value in given.items() if name not in TRAINING}
    return {name: value for name, value in given.items() if name not in found and value is not None} | found


def plain(value: Any) -> Any:
    """As JSON has it; NaN, which a table puts for nothing, is None."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value is pd.NA or value != value:
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def order_of(group: Group) -> tuple[Any, ...]:
    s = group.settings
    methods = ["supervised", *FITTED, *METHODS]
    place = methods.index(group.method) if group.method in methods else len(methods)
    data = (s["dataset"], s["dataset_config"] or "", s["labels_per_class"] or 0)
    zeta = -1 if s["zeta"] is None else s["zeta"]
    return *data, zeta, place, group.method, bool(s["oracle"]), VARIANTS.index(group.variant), group.key()


def own_base(group: Group, groups: Sequence[Group]) -> Group | None:
    """The same without gate and mixing."""
    found = [each for each in groups if each.variant == BASE and each.key(SWITCHES) == group.key(SWITCHES)]
    return found[0] if found else None


def baseline_of(group: Group, groups: Sequence[Group], variant: str, notes: list[str]) -> Group | None:
    """Of the same data, labels and network; of several the one nearest in length, then best in validation."""
    same = {"dataset", "dataset_config", "labels_per_class", "dataset_kwargs", *NETWORK}
    if variant in FITTED or group.variant in FITTED:  # to the frozen network
        same -= {"trainable", "lora_rank"}

    def fits(other: Group) -> bool:
        return all(other.settings.get(name) == group.settings.get(name) for name in same)

    found = [other for other in groups if other.variant == variant and fits(other)]
    for name in ("max_steps", "preset"):
        found = [other for other in found if other.settings[name] == group.settings[name]] or found
    if len(found) > 1:
        notes.append(
            f"Of several kinds of {variant} runs the best one by validation accuracy is compared with."
        )
    return max(found, key=lambda other: other.runs["validation_accuracy"].mean(), default=None)


def is_full(group: Group) -> bool:
    """Whether all of Fix-A-Step that applies is on."""
    return group.variant == FIX_A_STEP or (group.variant == "+G" and group.method in UNMIXED)


def add_difference(
    found: Comparison, differences: list[Difference], first: Group, second: Group | None, word: str
) -> None:
    """Or a note why there is none."""
    reason = ""
    if second is None:
        reason = f"There is no {word} run of the same kind for"
    elif not len((pairs := paired_runs(first.runs, second.runs))[0]):
        reason = f"No seeds in common with {word}, so not compared with it"
    else:
        differences.append(Difference(first, second, difference(*pairs, found.metric)))
        if not same_images(*pairs):
            reason = f"Tested on other images than {word}, so paired by seed only"
    if reason:
        found.missing.setdefault(reason, []).append(f"{name_of(first)}, {data_of(first)}")


# ---- words


def name_of(group: Group) -> str:
    """Such as FixMatch + Fix-A-Step, or FixMatch +G per example."""
    if group.variant == LABELED_ONLY:
        return LABELED_ONLY
    name = TITLES.get(group.method, group.method)
    if group.settings["oracle"]:
        name += " with perfect filtering"
    if group.variant in (BASE, *FITTED):
        return name
    return f"{name} {'+ ' * (group.variant == FIX_A_STEP)}{switches_of(group)}"


def switches_of(group: Group) -> str:
    """The variant, and the policy of the gate unless it is that of the paper: +G, +G per example."""
    gate = group.settings["gate"]
    policy = "" if gate in (None, "off", "drop") else f" {gate.replace('_', ' ')}"
    return group.variant + policy


def data_of(group: Group) -> str:
    """Such as digits_open_set, zeta 50, 5 labels per class."""
    s = group.settings
    parts = [s["dataset"], s["dataset_config"]]
    parts += [None if s["zeta"] is None else f"zeta {s['zeta']}"]
    parts += [None if s["labels_per_class"] is None else count(s["labels_per_class"], "label") + " per class"]
    return ", ".join(part for part in parts if part)


def details(groups: Sequence[Group]) -> list[str]:
    """What tells apart the groups of the same name and data, one text per group."""
    shown = {*DATA, "loss", "procedure", "variant", "gate", "mix_labeled"}
    found = []
    for group in groups:
        heading = name_of(group), data_of(group)
        alike = [other for other in groups if (name_of(other), data_of(other)) == heading]
        names = sorted({name for other in alike for name in other.settings} - shown)
        varied = [n for n in names if len({json.dumps(other.settings.get(n)) for other in alike}) > 1]
        found.append(", ".join(f"{n} {group.settings.get(n)}" for n in varied))
    return found


def questions(found: Comparison) -> dict[str, list[str]]:
    """The answers to all questions, one for each method and data."""
    asked = {
        "Did it beat the probe?": found.beats,
        "Did the unlabeled data help against labeled-only?": found.helps,
        "Did Fix-A-Step help its base?": found.gains,
    }
    more = dict(zip(map(id, found.groups), details(found.groups), strict=True))
    told: dict[str, list[str]] = {}
    for question, differences in asked.items():
        for each in differences:
            if differences is found.beats or each.first.variant == BASE or is_full(each.first):
                words = ", ".join(
                    filter(None, [name_of(each.first), data_of(each.first), more[id(each.first)]])
                )
                told.setdefault(question, []).append(f"{words}: {each.interval.answer}, {each.interval}.")
    return told


def sentences(found: Comparison) -> list[str]:
    return [f"{question} {answer}" for question, answers in questions(found).items() for answer in answers]


def as_dict(found: Comparison) -> dict[str, Any]:
    """All of it, for a JSON file."""

    def named(group: Group) -> dict[str, Any]:
        words = {"name": name_of(group), "variant": group.variant, "data": data_of(group)}
        return {**words, "settings": group.settings}

    def told(differences: Sequence[Difference]) -> list[dict[str, Any]]:
        return [
            {**named(each.first), "against": name_of(each.second), "answer": each.interval.answer}
            | finite(asdict(each.interval))
            for each in differences
        ]

    rows = [
        {**named(group), **finite(asdict(mean)), "runs": group.runs["run"].tolist()}
        for group, mean in zip(found.groups, found.means, strict=True)
    ]
    how = {"metric": found.metric, "draws": DRAWS, "level": 1 - 2 * TAIL}
    differences = {
        "against_probe": told(found.beats),
        "against_labeled_only": told(found.helps),
        "against_base": told(found.gains),
    }
    return {**how, "rows": rows, **differences, "sentences": sentences(found), "notes": found.notes}


def as_table(found: Comparison) -> pd.DataFrame:
    """A row per group: its mean, and its differences from what it is compared with."""
    parts = {"probe": found.beats, "labeled_only": found.helps, "base": found.gains}
    columns = {name: {id(each.first): each.interval for each in part} for name, part in parts.items()}
    rows = []
    for group, mean in zip(found.groups, found.means, strict=True):
        shown = ("loss", *DATA, *SWITCHES[:3])
        row = {"name": name_of(group), **{name: group.settings[name] for name in shown}}
        row |= {"seeds": mean.seeds, found.metric: mean.mean, "low": mean.low, "high": mean.high}
        for name, intervals in columns.items():
            if interval := intervals.get(id(group)):
                ends = {"": interval.mean, "_low": interval.low, "_high": interval.high}
                row |= {f"against_{name}{end}": value for end, value in ends.items()}
        rows.append(row)
    return pd.DataFrame(rows)


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    nothing = {name for name, value in values.items() if isinstance(value, float) and not np.isfinite(value)}
    return values | dict.fromkeys(nothing)
