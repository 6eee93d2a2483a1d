"""Numbers in the READMEs are those of the committed tables."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from hf_fixastep.methods import METHODS
from hf_fixastep.study.comparison import compare, sentences
from hf_fixastep.study.results import read_runs


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "recipes/sweeps/results"
LISTS = ["test_labels", "test_predictions", "log_step", "log_gate_open", "log_cosine", "eval_step"]
LISTS += ["eval_accuracy"]
VARIANTS = {"base": "", "+G": " +G", "+A": " +A", "Fix-A-Step": " + Fix-A-Step"}


def name_of(loss: str, variant: str) -> str:
    return METHODS[loss] + VARIANTS.get(variant, "")


def percent(values: pd.Series) -> str:
    return f"{100 * values.mean():.1f}"


def cifar_rows(runs: pd.DataFrame) -> list[str]:
    """Test accuracy of every split, and the mean."""
    rows = []
    for (loss, zeta, variant), group in runs.groupby(["loss", "zeta", "variant"]):
        each = ", ".join(f"{100 * value:.1f}" for value in group.sort_values("split_seed")["test_accuracy"])
        shown = "" if loss == "supervised" else f"{zeta:.0f}"
        raw = percent(group["raw_test_accuracy"])
        rows.append(
            f"| {name_of(loss, variant)} | {shown} | {each} | {percent(group['test_accuracy'])} | {raw} |"
        )
    return rows


def digits_rows(runs: pd.DataFrame) -> list[str]:
    """Mean test accuracy over the splits, one column per zeta."""
    rows = []
    for (loss, variant), group in runs.groupby(["loss", "variant"]):
        means = group.groupby("zeta")["test_accuracy"].mean()
        cells = [f"{100 * mean:.1f}" for mean in means]
        rows.append(
            f"| {name_of(loss, variant)} | {' | '.join(cells * (5 if loss == 'supervised' else 1))} |"
        )
    return rows


def short_rows(runs: pd.DataFrame) -> list[str]:
    """Mean test accuracy over the splits at zeta 0 and 100, of base and Fix-A-Step."""
    rows = []
    for (loss, variant), group in runs[~runs["variant"].isin(["+A", "+G"])].groupby(["loss", "variant"]):
        cells = [percent(part["test_accuracy"]) for _, part in group.groupby("zeta")]
        rows.append(
            f"| {name_of(loss, variant)} | {' | '.join(cells * (2 if loss == 'supervised' else 1))} |"
        )
    return rows


@pytest.mark.parametrize(
    ("file", "name", "rows"),
    [
        ("recipes/**/README.md", "cifar10_cpu", cifar_rows),
        ("recipes/**/README.md", "digits", digits_rows),
        ("README.md", "cifar10_cpu", short_rows),
    ],
)
def test_every_row_of_a_readme_is_that_of_the_table(file, name, rows):
    wanted = rows(read_runs([RESULTS / f"{name}.parquet"]))
    (text,) = [text for text in map(Path.read_text, ROOT.glob(file)) if wanted[0] in text.splitlines()]
    tables = [table for table in text.split("\n\n") if wanted[0] in table.splitlines()]
    found = [line for line in tables[0].splitlines() if line.startswith("|")]
    assert sorted(found[2:]) == sorted(wanted)  # after two lines of header, and no other row


@pytest.mark.parametrize("name", ["cifar10_cpu", "digits"])
def test_every_quoted_answer_is_one_of_the_comparison(name):
    """A line of a README that begins like an answer of `fixastep compare` is one."""
    runs = read_runs([RESULTS / f"{name}.parquet"])
    lines = [line for path in ROOT.glob("recipes/**/README.md") for line in path.read_text().splitlines()]
    quoted = [line.removeprefix("- ") for line in lines if f", {runs['dataset'][0]}, zeta" in line]
    assert quoted or name == "digits"
    told = set(sentences(compare(runs))) if quoted else set()
    assert [line for line in quoted if line not in told] == []


@pytest.mark.parametrize("name", ["cifar10_cpu", "digits"])
def test_a_committed_table_names_no_machine(name):
    text = read_runs([RESULTS / f"{name}.parquet"]).select_dtypes("object").drop(columns=LISTS).to_csv()
    assert "/work" not in text
    assert "/tmp" not in text
