"""fixastep compare: did the unlabeled data help, did Fix-A-Step help, and how sure is it?"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from hf_fixastep.checks import check_choice
from hf_fixastep.runs.arguments import option, parse, positional
from hf_fixastep.study.comparison import (
    TEST_METRICS,
    Comparison,
    as_dict,
    as_table,
    compare,
    data_of,
    details,
    name_of,
    questions,
)
from hf_fixastep.study.figures import STUDY_FIGURES, left_out, save
from hf_fixastep.study.probe_figures import plot_against_probe, plot_over_labels
from hf_fixastep.study.results import read_runs
from hf_fixastep.study.statistics import Interval


FIGURES = {**STUDY_FIGURES, "against_probe": plot_against_probe}  # of one data set and label count


@dataclass
class CompareArguments:
    """What to compare by, and where the outcome goes."""

    out: str | None = option(None, "Folder of the outcome; by default beside the runs.")
    metric: str = option(TEST_METRICS[0], f"{' or '.join(TEST_METRICS)}.")


def prepare(argv: list[str]) -> tuple[pd.DataFrame, Path, str]:
    words, options = positional(argv)
    if not words:
        raise ValueError("Give the runs first: tables of results, folders of sweeps, or folders of runs.")
    paths = [Path(word) for word in words]
    args, _ = parse((CompareArguments,), options)
    check_choice("metric", args.metric, TEST_METRICS)
    beside = paths[0] if paths[0].is_dir() else paths[0].parent
    return read_runs(paths), Path(args.out) if args.out else beside, args.metric


def print_comparison(found: Comparison) -> None:
    console = Console()
    console.print(comparison_table(found))
    if any(mean.seeds == 1 for mean in found.means):
        console.print(
            "The interval of a single seed is over test images, or their patients where these are known, and "
            "says nothing of the chance in training."
        )
    for question, answers in questions(found).items():
        console.print(f"\n[bold]{question}[/bold]")
        for answer in answers:
            console.print(f"  {answer}", highlight=False, soft_wrap=True)
    if (number := len(found.beats) + len(found.helps) + len(found.gains)) > 10:
        console.print(
            f"Of {number} such intervals about {number / 20:.0f} would miss 0 if nothing made a difference."
        )
    for note in found.notes:
        console.print(note, highlight=False, soft_wrap=True)


def comparison_table(found: Comparison) -> Table:
    """A row per group; differences and their intervals in points."""
    data = [data_of(group).split(", ") for group in found.groups]
    common = [word for word in data[0] if all(word in words for words in data)]
    title = f"{', '.join(common)}: {found.metric.replace('_', ' ')} in percent, with 95 % intervals"
    columns = {"against labeled-only": found.helps, "against its base": found.gains}
    if found.beats:
        columns = {"against the probe": found.beats} | columns
    table = Table("data", "runs", "seeds", "mean", *columns, title=title)
    differences = [{id(each.first): each.interval for each in part} for part in columns.values()]
    for group, mean, more, words in zip(found.groups, found.means, details(found.groups), data, strict=True):
        table.add_row(
            ", ".join(word for word in words if word not in common),
            ", ".join(filter(None, [name_of(group), more])),
            str(mean.seeds),
            f"{100 * mean.mean:.1f} ({100 * mean.low:.1f} to {100 * mean.high:.1f})",
            *(points(part.get(id(group))) for part in differences),
        )
    return table


def points(value: Interval | None) -> str:
    if value is None:
        return ""
    return f"{100 * value.mean:+.1f} ({100 * value.low:+.1f} to {100 * value.high:+.1f})"


def draw_figures(runs: pd.DataFrame, metric: str, folder: Path) -> list[str]:
    """Draw what the runs support, apart for each data set and label count; returns what to tell."""
    told = []
    config = runs["dataset_config"].where(~runs["dataset_config"].astype(str).str.startswith("zeta"))
    data = [runs["dataset"], config]
    for ending, part in parts_of(runs, [*data, runs["labels_per_class"]]):
        told += [draw_figure(draw, part, metric, folder / f"{n}{ending}") for n, draw in FIGURES.items()]
        if number := left_out(part):
            told.append(
                f"The figures{ending} show one setting of each method and leave out {number} further ones."
            )
    for ending, part in parts_of(runs, data):
        told.append(
            draw_figure(plot_over_labels, part, metric, folder / f"against_probe_over_labels{ending}")
        )
    return told


def parts_of(runs: pd.DataFrame, by: list[pd.Series]) -> Iterator[tuple[str, pd.DataFrame]]:
    """The runs of each kind, with the ending of its files, which is empty where there is one kind."""
    parts = list(runs.groupby(by, dropna=False, sort=False))
    for key, part in parts:
        words = [str(word) for word in key if word == word and word is not None]
        yield "-" + "-".join(word.removesuffix(".0") for word in words) if len(parts) > 1 else "", part


def draw_figure(
    draw: Callable[[pd.DataFrame, str], Figure], runs: pd.DataFrame, metric: str, path: Path
) -> str:
    try:
        files = save(draw(runs, metric), path)
    except ValueError as reason:
        return f"No {path.name}: {reason}."
    return f"Figure: {', '.join(map(str, files))}"


def main(argv: list[str]) -> None:
    try:
        runs, folder, metric = prepare(argv)
        found = compare(runs, metric)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "comparison.json").write_text(json.dumps(as_dict(found), indent=2))
        as_table(found).to_csv(folder / "comparison.csv", index=False, float_format="%.6f")
        print_comparison(found)
        print(*draw_figures(runs, metric, folder), sep="\n")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
