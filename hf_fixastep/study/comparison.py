"""Compare finished runs: means over seeds, paired differences with intervals, and what they say in plain
words.

Runs are rows of a table, as `fixastep sweep` leaves it. Test labels only measure; nothing is chosen by
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray
from scipy import stats  # comes with scikit-learn

from hf_fixastep.methods import METHODS


METRICS = ("test_accuracy", "test_balanced_accuracy")
DRAWS, SEED, TAIL = 4000, 0, 0.025
LABELED_ONLY, BASE, FIX_A_STEP = "labeled-only", "base", "Fix-A-Step"
VARIANTS = (LABELED_ONLY, BASE, "+G", "+A", FIX_A_STEP)
UNMIXED = ("mixmatch", "mtcf")  # they mix by themselves, so that Fix-A-Step is the gate alone

REPEATS = ("seed", "split_seed")
MIXING = ("mix_alpha", "mix_temperature", "mix_per_batch")
DATA = ("dataset", "dataset_config", "zeta", "labels_per_class", "oracle")
SWITCHES = ("variant", "gate", "mix_labeled", *MIXING, "mix_pool")
COLUMNS = ("loss", "procedure", *DATA, "batchnorm", "preset", "max_steps", *SWITCHES[:-1])
NETWORK = ("model", "model_kwargs", "image_size", "trainable", "lora_rank")
NEEDED = (
    "run",
    *COLUMNS,
    *REPEATS,
    "settings",
    "validation_accuracy",
    "test_labels",
    "test_predictions",
    "hash_test",
)
# what changes where and how a run is watched, not what it learns
OUTWARD: tuple[str, ...] = (
    "data_seed",
    "output_dir",
    "data_dir",
    "disable_tqdm",
    "report_to",
    "run_name",
    "cpu_threads",
    "use_cpu",
)
OUTWARD += ("resume_from_checkpoint", "ignore_changed_settings", "per_device_eval_batch_size", "push_to_hub")
OUTWARD_KINDS = ("logging_", "log_", "save_", "dataloader_", "hub_")


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
class Interval:
    """A mean and its 95 % interval, in shares; the ends are NaN where nothing can be said.

    Args:
        over: what the interval is about: seeds, test images or both.
    """

    mean: float
    low: float
    high: float
    seeds: int
    over: str

    @property
    def answer(self) -> str:
        if self.low > 0:
            return "yes"
        return "no" if self.high < 0 else "cannot tell"

    def __str__(self) -> str:
        ends = "no interval"
        if np.isfinite(self.low):
            ends = f"95 % interval {100 * self.low:+.1f} to {100 * self.high:+.1f} over {self.over}"
        return f"{100 * self.mean:+.1f} points ({ends}; {count(self.seeds, 'seed')})"


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
        missing: what could not be compared or not fully, by the reason.
        notes: what else a reader has to know, one sentence each.
    """

    metric: str
    groups: list[Group]
    means: list[Interval]
    gains: list[Difference] = field(default_factory=list)
    helps: list[Difference] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def compare(runs: pd.DataFrame, metric: str = METRICS[0]) -> Comparison:
    """Everything that the table supports."""
    check_columns(runs, (*NEEDED, metric))
    if not len(runs):
        raise ValueError("The tables hold no runs; give the results of at least one finished run.")
    groups = group_runs(runs)
    found = Comparison(metric, groups, [mean_interval(group.runs, metric) for group in groups])
    left_out = len(runs) - sum(len(group.runs) for group in groups)
    if left_out:
        found.notes.append(f"Left out: {count(left_out, 'run')} with the settings and seeds of another one.")
    for group in groups:
        if group.variant == LABELED_ONLY:
            continue
        if group.variant != BASE:
            add_difference(found, found.gains, group, own_base(group, groups), "base")
        add_difference(found, found.helps, group, labeled_only_of(group, groups, found.notes), LABELED_ONLY)
    found.notes = [
        *dict.fromkeys(found.notes),
        *(f"{why}: {'; '.join(names)}." for why, names in found.missing.items()),
    ]
    return found


def check_columns(runs: pd.DataFrame, names: Sequence[str]) -> None:
    if missing := [name for name in names if name not in runs]:
        raise ValueError(
            f"The table has no column {', '.join(missing)}; write it by fixastep sweep, or give folders of runs."
        )


# ---- groups


def group_runs(runs: pd.DataFrame) -> list[Group]:
    """In the order of data, methods and variants."""
    settings = [settings_of(run) for _, run in runs.iterrows()]
    keys = pd.Series([json.dumps(each, sort_keys=True) for each in settings], index=runs.index)
    groups = []
    for key, rows in runs.groupby(keys, sort=False):
        once = rows.drop_duplicates(list(REPEATS)).set_index(list(REPEATS)).sort_index()
        groups.append(Group(json.loads(str(key)), once))
    return sorted(groups, key=order_of)


def settings_of(run: pd.Series) -> dict[str, Any]:
    """All that makes a run what it is, but for its seeds and what has no effect in it."""
    given = json.loads(run["settings"])
    outward = [name for name in given if name in OUTWARD or name.startswith(OUTWARD_KINDS)]
    given = {name: value for name, value in given.items() if name not in (*outward, *REPEATS, "config")}
    if "dataset_kwargs" in given:  # text, if it was given on the command line
        kwargs = (
            yaml.safe_load(given["dataset_kwargs"])
            if isinstance(given["dataset_kwargs"], str)
            else given["dataset_kwargs"]
        )
        given["dataset_kwargs"] = {name: value for name, value in kwargs.items() if name != "oracle"} or None
    found = {name: plain(run[name]) for name in COLUMNS}
    if str(found["dataset_config"]).startswith("zeta"):
        found["dataset_config"] = None  # zeta says it
    if not found["mix_labeled"]:
        found |= dict.fromkeys(MIXING)
        given.pop("mix_pool", None)
    if found["variant"] == LABELED_ONLY:
        found |= dict.fromkeys(("zeta", "gate", "mix_labeled", "batchnorm")) | {"oracle": False}
        given = {name: value for name, value in given.items() if not name.startswith("unlabeled_")}
    return {name: value for name, value in given.items() if name not in found and value is not None} | found


def plain(value: Any) -> Any:
    """As JSON has it; NaN, which a table puts for nothing, is None."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value is pd.NA or value != value:
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def order_of(group: Group) -> tuple[Any, ...]:
    s = group.settings
    methods = list(METHODS)
    place = methods.index(group.method) if group.method in methods else len(methods)
    data = (s["dataset"], s["dataset_config"] or "", s["labels_per_class"] or 0)
    zeta = -1 if s["zeta"] is None else s["zeta"]
    return *data, zeta, place, group.method, bool(s["oracle"]), VARIANTS.index(group.variant), group.key()


def own_base(group: Group, groups: Sequence[Group]) -> Group | None:
    """The same without gate and mixing."""
    found = [each for each in groups if each.variant == BASE and each.key(SWITCHES) == group.key(SWITCHES)]
    return found[0] if found else None


def labeled_only_of(group: Group, groups: Sequence[Group], notes: list[str]) -> Group | None:
    """Of the same data, labels and network; of several the one nearest in length, then best in validation."""
    same = ("dataset", "dataset_config", "labels_per_class", "dataset_kwargs", *NETWORK)

    def fits(other: Group) -> bool:
        return all(other.settings.get(name) == group.settings.get(name) for name in same)

    found = [other for other in groups if other.variant == LABELED_ONLY and fits(other)]
    for name in ("max_steps", "preset"):
        found = [other for other in found if other.settings[name] == group.settings[name]] or found
    if len(found) > 1:
        notes.append(
            "Of several kinds of labeled-only runs the best one by validation accuracy is compared with."
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


# ---- statistics


def mean_interval(runs: pd.DataFrame, metric: str) -> Interval:
    """Student's t over seeds; of a single seed the bootstrap over test images."""
    values = runs[metric].to_numpy(dtype=float)
    if len(values) > 1:
        return Interval(values.mean(), *t_ends(values), len(values), "seeds")
    draws = image_draws(*answers(runs), metric)[:, 0]
    return Interval(values[0], *ends(draws), 1, "test images")


def difference(first: pd.DataFrame, second: pd.DataFrame, metric: str) -> Interval:
    """Mean of the paired differences, with an interval from a bootstrap over seeds and test images.

    Resampled seeds alone would say too little of the chance in training: three seeds have a third less
    variance than the truth, and no tails. So their deviations are stretched as much as Student's t is wider
    than the normal distribution. Test images are resampled where all runs share them, the same images for
    all; where each seed has images of its own, resampling seeds has resampled these as well.

    Args:
        first: runs whose rows fit those of `second`.
    """
    by_seed = first[metric].to_numpy(dtype=float) - second[metric].to_numpy(dtype=float)
    mean, seeds = by_seed.mean(), len(by_seed)
    shared = same_images(first, second) and first["hash_test"].nunique() == 1
    if seeds == 1 and not shared:
        return Interval(mean, np.nan, np.nan, 1, "nothing")
    draws, over = np.full(DRAWS, mean), []
    if seeds > 1:
        over.append("seeds")
        draws += stretch(seeds) * (seed_weights(seeds) @ by_seed - mean)
    if shared:
        over.append("test images")
        labels, predictions = answers(pd.concat([first, second]))
        scores = image_draws(labels, predictions, metric)
        draws += (scores[:, :seeds] - scores[:, seeds:]).mean(1) - mean
    return Interval(mean, *ends(draws), seeds, " and ".join(over))


def paired_runs(first: pd.DataFrame, second: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of the seeds that both have, in the same order."""
    common = first.index.intersection(second.index).sort_values()
    return first.loc[common], second.loc[common]


def same_images(first: pd.DataFrame, second: pd.DataFrame) -> bool:
    """Whether the two runs of each pair were tested on the same images."""
    return bool(
        (first["hash_test"].notna() & (first["hash_test"].to_numpy() == second["hash_test"].to_numpy())).all()
    )


def answers(runs: pd.DataFrame) -> tuple[NDArray, NDArray]:
    """Labels [N] and predictions [R, N] of runs with the same test images."""
    return np.asarray(runs["test_labels"].iloc[0]), np.stack(
        [np.asarray(row) for row in runs["test_predictions"]]
    )


def image_draws(labels: NDArray, predictions: NDArray, metric: str) -> NDArray:
    """The metric of R runs on each bootstrap sample of test images, [DRAWS, R]."""
    classes = np.unique(labels) if metric == "test_balanced_accuracy" else [None]
    weights, found = image_weights(len(labels)), []
    for name in classes:  # of which accuracy has one, all images
        members = np.ones(len(labels), bool) if name is None else labels == name
        correct = (predictions == labels)[:, members].T.astype(np.float32)
        part = weights[:, members].astype(np.float32)  # sums of so few ones are exact
        with np.errstate(invalid="ignore"):  # a sample without images of a rare class
            found.append((part @ correct).astype(float) / part.sum(1, keepdims=True, dtype=float))
    return np.nanmean(found, axis=0)


@lru_cache(maxsize=2)
def image_weights(images: int) -> NDArray:
    """How often each image is in each sample, [DRAWS, images]; the same for every comparison."""
    random = np.random.default_rng(SEED)
    counts = [np.bincount(random.integers(images, size=images), minlength=images) for _ in range(DRAWS)]
    return np.array(counts, dtype=np.uint16)


@lru_cache(maxsize=64)
def seed_weights(seeds: int) -> NDArray:
    """The share of each seed in each sample, [DRAWS, seeds]."""
    return np.random.default_rng([SEED, 1]).multinomial(seeds, np.full(seeds, 1 / seeds), size=DRAWS) / seeds


def stretch(seeds: int) -> float:
    """How much wider Student's interval is than that of resampled seeds."""
    wider = stats.t.ppf(1 - TAIL, seeds - 1) / stats.norm.ppf(1 - TAIL)
    return float(wider * np.sqrt(seeds / (seeds - 1)))


def t_ends(values: NDArray) -> tuple[float, float]:
    half = stats.t.ppf(1 - TAIL, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def ends(draws: NDArray) -> tuple[float, float]:
    low, high = np.quantile(draws, [TAIL, 1 - TAIL])
    return float(low), float(high)


# ---- words


def name_of(group: Group) -> str:
    """Such as FixMatch + Fix-A-Step."""
    if group.variant == LABELED_ONLY:
        return LABELED_ONLY
    name = METHODS.get(group.method, group.method)
    if group.settings["oracle"]:
        name += " with perfect filtering"
    return (
        name
        if group.variant == BASE
        else f"{name} {group.variant if group.variant != FIX_A_STEP else '+ Fix-A-Step'}"
    )


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
        alike = [
            other for other in groups if (name_of(other), data_of(other)) == (name_of(group), data_of(group))
        ]
        names = sorted({name for other in alike for name in other.settings} - shown)
        varied = [n for n in names if len({json.dumps(other.settings.get(n)) for other in alike}) > 1]
        found.append(", ".join(f"{n} {group.settings.get(n)}" for n in varied))
    return found


def questions(found: Comparison) -> dict[str, list[str]]:
    """The answers to both questions, one for each method and data."""
    asked = {
        "Did the unlabeled data help against labeled-only?": found.helps,
        "Did Fix-A-Step help its base?": found.gains,
    }
    more = dict(zip(map(id, found.groups), details(found.groups), strict=True))
    told: dict[str, list[str]] = {}
    for question, differences in asked.items():
        for each in differences:
            if each.first.variant == BASE or is_full(each.first):
                words = ", ".join(
                    filter(None, [name_of(each.first), data_of(each.first), more[id(each.first)]])
                )
                told.setdefault(question, []).append(f"{words}: {each.interval.answer}, {each.interval}.")
    return told


def sentences(found: Comparison) -> list[str]:
    return [f"{question} {answer}" for question, answers in questions(found).items() for answer in answers]


def as_json(found: Comparison) -> dict[str, Any]:
    def named(group: Group) -> dict[str, Any]:
        return {
            "name": name_of(group),
            "variant": group.variant,
            "data": data_of(group),
            "settings": group.settings,
        }

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
    differences = {"against_labeled_only": told(found.helps), "against_base": told(found.gains)}
    return {**how, "rows": rows, **differences, "sentences": sentences(found), "notes": found.notes}


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in values.items()
    }


def count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
