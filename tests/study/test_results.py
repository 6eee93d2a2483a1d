"""Numbers in the READMEs are those of the committed tables."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pandas as pd
import pytest

from hf_fixastep.study.comparison import compare, sentences
from hf_fixastep.study.results import read_runs


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "recipes/sweeps/results"
NAMES = {
    "supervised": "labeled-only",
    "pi_model": "Pi-model",
    "mean_teacher": "Mean Teacher",
    "pseudo_label": "Pseudo-label",
    "vat": "VAT",
    "mixmatch": "MixMatch",
    "fixmatch": "FixMatch",
}
PROBE, ZETAS = "probe", (0, 25, 50, 75, 100)
VARIANTS = {"labeled-only": "", "base": "", "+G": " +G", "+A": " +A", "Fix-A-Step": " + Fix-A-Step"}


def percent(values: pd.Series) -> str:
    return f"{100 * values.mean():.1f}"


def row_of(loss: str, variant: str, cells: list[str]) -> str:
    return f"| {' | '.join([NAMES[loss] + VARIANTS[variant], *cells])} |"


def cifar_rows(runs: pd.DataFrame) -> list[str]:
    """Test accuracy of every split, and the means of averaged and raw weights."""
    rows = []
    for (loss, zeta, variant), group in runs.groupby(["loss", "zeta", "variant"]):
        each = ", ".join(f"{100 * value:.1f}" for value in group.sort_values("split_seed")["test_accuracy"])
        shown = "" if loss == "supervised" else f"{zeta:.0f}"
        means = [percent(group["test_accuracy"]), percent(group["raw_test_accuracy"])]
        rows.append(row_of(loss, variant, [shown, each, *means]))
    return rows


def zeta_rows(runs: pd.DataFrame) -> list[str]:
    """Mean test accuracy over the splits, one column per zeta; labeled-only is the same in all of them."""
    columns, rows = runs[runs["loss"] != "supervised"]["zeta"].nunique(), []
    for (loss, variant), group in runs.groupby(["loss", "variant"]):
        cells = [percent(part["test_accuracy"]) for _, part in group.groupby("zeta")]
        rows.append(row_of(loss, variant, cells * (columns if loss == "supervised" else 1)))
    return rows


@pytest.mark.parametrize(
    ("page", "name", "rows"),
    [
        ("recipes/cifar10/README.md", "cifar10_cpu", cifar_rows),
        ("recipes/digits/README.md", "digits", zeta_rows),
    ],
)
def test_every_row_of_a_readme_is_that_of_the_table(page, name, rows):
    wanted = rows(read_runs([RESULTS / f"{name}.parquet"]))
    lines = (ROOT / page).read_text().splitlines()
    assert [row for row in wanted if row not in lines] == []
    first = lines.index(wanted[0])
    before = [*takewhile(lambda line: line.startswith("|"), reversed(lines[:first]))]
    table = [*reversed(before), *takewhile(lambda line: line.startswith("|"), lines[first:])]
    assert sorted(table[2:]) == sorted(wanted)  # and no other row


def test_every_quoted_answer_is_one_of_the_comparison():
    """The answers that `fixastep compare` gives about CIFAR-10 on a CPU, word by word."""
    told = {sentence.strip() for sentence in sentences(compare(read_runs([RESULTS / "cifar10_cpu.parquet"])))}
    lines = (ROOT / "recipes/cifar10/README.md").read_text().splitlines()
    quoted = {line.removeprefix("- ") for line in lines if line.startswith("- Did ")}
    assert quoted
    assert quoted <= told


def points(row: pd.Series) -> str:
    numbers = [100 * row[f"against_probe{end}"] for end in ("", "_low", "_high")]
    return "{:+.1f} ({:+.1f} to {:+.1f})".format(*numbers)


def against_probe(table: pd.DataFrame) -> dict[str, list[str]]:
    """Rows by heading: accuracies without a pile, and differences from the probe over zeta."""
    alone = table[table["zeta"].isna()].set_index(["labels_per_class", "name"])
    headings: dict[str, list[str]] = {"| labels per class |": []}
    for labels, part in table.groupby("labels_per_class"):
        cells = [f"{100 * alone.loc[(labels, PROBE), 'test_accuracy']:.1f}"]
        cells += [points(alone.loc[(labels, name)]) for name in ("k nearest neighbours", "labeled-only")]
        headings["| labels per class |"].append(f"| {' | '.join([str(labels), *cells])} |")
        rows = headings[f"| {labels} labels per class |"] = []
        part = part.dropna(subset=["zeta"])
        for name in part["name"].unique():
            by_zeta = part[part["name"] == name].set_index("zeta")
            cells = [points(by_zeta.loc[zeta]) if zeta in by_zeta.index else "" for zeta in ZETAS]
            rows.append(f"| {' | '.join([name, *cells])} |")
    return headings


def test_the_tables_of_pretrained_networks_are_those_of_the_comparison():
    """Of `fixastep compare`; the predictions behind its intervals are too large to commit."""
    lines = (ROOT / "recipes/pretrained/README.md").read_text().splitlines()
    for heading, rows in against_probe(pd.read_csv(RESULTS / "pretrained.csv")).items():
        (first,) = [number for number, line in enumerate(lines) if line.startswith(heading)]
        table = [*takewhile(lambda line: line.startswith("|"), lines[first:])]
        assert table[2:] == rows


def test_the_comparison_of_pretrained_networks_is_that_of_the_committed_runs():
    runs = pd.read_parquet(RESULTS / "pretrained.parquet")
    runs.loc[runs["loss"] == "shaped_probe", "gate"] = ""  # has none
    own = ["loss", "variant", "gate", "labels_per_class", "zeta"]
    by_split = runs.set_index([*own, "split_seed"])["test_accuracy"].sort_index()
    for _, row in (
        pd.read_csv(RESULTS / "pretrained.csv").dropna(subset=["zeta"]).fillna({"gate": ""}).iterrows()
    ):
        probes = by_split.loc[PROBE, :, :, row["labels_per_class"]].droplevel([0, 1, 2])
        gains = by_split.loc[tuple(row[own])] - probes
        assert row["seeds"] == len(gains) == 5
        assert row["against_probe"] == pytest.approx(gains.mean(), abs=1e-6)


def fetal_tables() -> dict[str, list[str]]:
    """By heading: the probe and differences from it, the lowest seeds, the analysis."""
    means = pd.read_csv(RESULTS / "fetal_planes.csv").set_index(["name", "labels_per_class"])
    runs = pd.read_parquet(RESULTS / "fetal_planes.parquet")
    pile = pd.read_csv(RESULTS / "fetal_planes_analysis.csv").groupby("labels_per_class").mean()
    counts = (5, 10, 20, 50)
    found: dict[str, list[str]] = {"| method |": [], "| lowest seed |": [], "| pile |": []}
    of_probe = [f"{100 * means.loc[(PROBE, n), 'test_balanced_accuracy']:.1f}" for n in counts]
    found["| method |"].append(f"| {' | '.join(['probe, balanced accuracy in %', *of_probe])} |")
    for name in means.index.get_level_values(0).unique().drop(PROBE):
        cells = [points(means.loc[(name, n)]) if (name, n) in means.index else "" for n in counts]
        found["| method |"].append(f"| {' | '.join([name, *cells])} |")
    by_seed = runs.set_index(["loss", "gate", "labels_per_class", "split_seed"])[
        "test_balanced_accuracy"
    ].sort_index()
    probes = runs[runs["loss"] == PROBE].set_index(["labels_per_class", "split_seed"])
    for gate, word in (("off", ""), ("drop", " +G"), ("per_example", " +G per example")):
        gains = by_seed.loc[("mean_teacher", gate)] - probes["test_balanced_accuracy"]
        cells = [f"{100 * gains.loc[n].min():+.1f}" for n in counts]
        found["| lowest seed |"].append(f"| {' | '.join(['Mean Teacher' + word, *cells])} |")
    for column, title in PILE.items():
        cells = [
            f"{pile.loc[n, column] * (100 if '%' in title else 1):.{1 if '%' in title else 2}f}"
            for n in counts
        ]
        found["| pile |"].append(f"| {' | '.join([title, *cells])} |")
    return found


PILE = {
    "known": "kept of known planes, %",
    "foreign": "kept of foreign images, %",
    "probe": "AUROC, largest probability of the probe",
    "largest": "AUROC, largest probability of the head",
    "energy": "AUROC, energy of the head",
    "labeled": "AUROC, nearest labeled images",
    "class": "AUROC, nearest class",
}


def test_the_tables_of_fetal_planes_are_those_of_the_committed_results():
    lines = (ROOT / "recipes/fetal_planes/README.md").read_text().splitlines()
    for heading, rows in fetal_tables().items():
        (first,) = [number for number, line in enumerate(lines) if line.startswith(heading)]
        assert [*takewhile(lambda line: line.startswith("|"), lines[first:])][2:] == rows


def test_the_table_of_the_first_page_is_that_of_fetal_planes():
    means = pd.read_csv(RESULTS / "fetal_planes.csv").set_index(["name", "labels_per_class"])
    lines = (ROOT / "README.md").read_text().splitlines()
    first = lines.index("| labels per plane | 5 | 10 | 20 | 50 |")
    table = [*takewhile(lambda line: line.startswith("|"), lines[first:])][2:]
    assert len(table) == 4
    for line in table:
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells == [
            f"{100 * means.loc[(name, n), 'test_balanced_accuracy']:.1f}" for n in (5, 10, 20, 50)
        ]


def test_the_table_over_machines_is_that_of_the_report():
    table = pd.read_csv(RESULTS / "fetal_planes_machines.csv").set_index(["machine", "name"])
    lines = (ROOT / "recipes/fetal_planes/README.md").read_text().splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith("| machine |")]
    names = [cell.strip() for cell in lines[first].strip("|").split("|")][2:]
    rows = []
    for machine in table.index.unique("machine"):
        found = 100 * table.loc[machine, ["balanced_accuracy", "low", "high"]].loc[names]
        cells = ["{:.1f} ({:.1f} to {:.1f})".format(*values) for values in found.to_numpy()]
        patients = table.loc[machine, "patients"].iloc[0]
        rows.append(f"| {' | '.join([machine, str(patients), *cells])} |")
    assert [*takewhile(lambda line: line.startswith("|"), lines[first:])][2:] == rows


def test_the_comparison_of_fetal_planes_is_that_of_the_committed_runs():
    runs = pd.read_parquet(RESULTS / "fetal_planes.parquet")
    by_seed = runs.set_index(["loss", "gate", "labels_per_class", "split_seed"])[
        "test_balanced_accuracy"
    ].sort_index()
    probes = runs[runs["loss"] == PROBE].set_index(["labels_per_class", "split_seed"])
    table = pd.read_csv(RESULTS / "fetal_planes.csv").dropna(subset=["gate"])
    assert len(table)
    for _, row in table.iterrows():
        own = by_seed.loc[(row["loss"], row["gate"], row["labels_per_class"])]
        gains = own - probes["test_balanced_accuracy"].loc[row["labels_per_class"]]
        assert row["seeds"] == len(own)
        assert row["against_probe"] == pytest.approx(gains.mean(), abs=1e-6)


def test_the_table_of_fits_is_that_of_the_committed_fits():
    fits = pd.read_csv(RESULTS / "pretrained_fits.csv")
    fits["gain"] = 100 * (fits["test_accuracy"] - fits["probe_accuracy"])
    gains = fits.groupby(["labels_per_class", "zeta"])["gain"]
    text = (ROOT / "recipes/pretrained/README.md").read_text()
    for labels in fits["labels_per_class"].unique():
        cells = [
            "{:+.1f} ({:+.1f} to {:+.1f})".format(
                *gains.get_group((labels, zeta)).agg(["mean", "min", "max"])
            )
            if (labels, zeta) in gains.groups
            else ""
            for zeta in ZETAS
        ]
        assert f"| {labels} labels | {' | '.join(cells)} |" in text
    kept, below = (fits["chosen"] == PROBE).sum(), (fits["gain"] < 0).sum()
    worst = -fits["gain"].min()
    assert f"In {len(fits)} fits its choice was never more than {worst:.1f} points below the probe" in text
    assert f"below it at all in {below}, and the probe itself in {kept}" in text


@pytest.mark.parametrize("name", ["cifar10_cpu", "digits", "pretrained", "fetal_planes"])
def test_a_committed_table_names_no_machine(name):
    text = read_runs([RESULTS / f"{name}.parquet"]).astype(str).to_csv()
    assert "/work" not in text
    assert "/tmp" not in text
