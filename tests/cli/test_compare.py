from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from hf_fixastep.cli import compare
from tests.study.tables import probes, run, study


def write(runs: pd.DataFrame, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    runs.to_parquet(folder / "results.parquet")
    return folder


def test_a_table_gives_text_numbers_and_figures(tmp_path, capsys) -> None:
    folder = write(study(), tmp_path / "sweep")
    compare.main([str(folder)])
    told = json.loads((folder / "comparison.json").read_text())
    assert len(told["rows"]) == 25
    assert told["metric"] == "test_accuracy"
    text = " ".join(capsys.readouterr().out.split())
    question, answer = re.match(r"(.*?\?) (.*)", told["sentences"][-1]).groups()
    assert question in text
    assert answer in text
    assert "No sensitivity: the sensitivity needs runs that differ in mix_alpha or mix_temperature." in text
    texts = {"comparison.json", "comparison.csv", "results.parquet"}
    drawn = {path.name for path in folder.iterdir()} - texts
    names = ("accuracy_over_zeta", "ablation", "gate_over_time")
    assert drawn == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}


def test_a_probe_adds_a_column_a_question_and_a_figure(tmp_path, capsys) -> None:
    runs = study(losses=("vat",), zetas=(0, 50))
    headings = [column.header for column in compare.comparison_table(compare.compare(runs)).columns]
    assert headings[4:] == ["against labeled-only", "against its base"]
    folder = write(pd.concat([runs, probes()]), tmp_path / "with")
    compare.main([str(folder)])
    assert "Did it beat the probe?" in capsys.readouterr().out
    found = compare.comparison_table(compare.compare(pd.concat([runs, probes()])))
    assert [column.header for column in found.columns] == [*headings[:4], "against the probe", *headings[4:]]
    (row,) = [number for number, name in enumerate(found.columns[1].cells) if name == "labeled-only"]
    assert list(found.columns[4].cells)[row].startswith("-3.0 (")
    assert len(json.loads((folder / "comparison.json").read_text())["against_probe"]) == 9
    assert (folder / "against_probe.png").is_file()


def test_the_csv_has_means_and_differences_of_every_row(tmp_path) -> None:
    runs = pd.concat([study(losses=("vat",), zetas=(0, 50)), probes()])
    compare.main([str(write(runs, tmp_path / "sweep"))])
    table = pd.read_csv(tmp_path / "sweep/comparison.csv").set_index(["name", "zeta"])
    means = runs.groupby(["loss", "variant", "zeta"])["test_accuracy"].mean()
    row, own = table.loc["VAT + Fix-A-Step", 50], means["vat", "Fix-A-Step", 50]
    assert row["test_accuracy"] == pytest.approx(own, abs=1e-6)
    assert row["against_base"] == pytest.approx(own - means["vat", "base", 50], abs=2e-6)
    assert row["against_probe"] == pytest.approx(own - means["probe"].mean(), abs=2e-6)
    assert row["against_probe_low"] <= row["against_probe"] <= row["against_probe_high"]
    assert table.loc["probe"].filter(like="against").isna().all(axis=None)


def test_the_outcome_goes_where_it_is_wanted_by_the_wanted_metric(tmp_path) -> None:
    table = write(study(losses=("vat",), zetas=(50,), seeds=1), tmp_path / "sweep") / "results.parquet"
    compare.main([str(table), "--out", str(tmp_path / "new" / "out"), "--metric", "test_balanced_accuracy"])
    told = json.loads((tmp_path / "new/out/comparison.json").read_text())
    assert told["metric"] == "test_balanced_accuracy"
    assert [path.name for path in table.parent.iterdir()] == ["results.parquet"]


def test_several_data_sets_have_figures_of_their_own(tmp_path) -> None:
    many = study(losses=("vat",), zetas=(50,), seeds=1)
    few = many.assign(labels_per_class=5, run="other-" + many["run"])
    folders = [write(many, tmp_path / "many"), write(few, tmp_path / "few")]
    out = tmp_path / "out"
    compare.main([*map(str, folders), "--out", str(out)])
    assert {"ablation-pictures-50.png", "ablation-pictures-5.png"} <= {path.name for path in out.iterdir()}
    told = json.loads((out / "comparison.json").read_text())
    assert {row["settings"]["labels_per_class"] for row in told["rows"]} == {50, 5}


def test_one_variant_alone_leaves_out_what_needs_more_and_says_so(tmp_path, capsys) -> None:
    folder = write(pd.DataFrame([run("vat", "base", 0.6)]), tmp_path / "sweep")
    compare.main([str(folder)])
    text = " ".join(capsys.readouterr().out.split())
    for name in ("accuracy_over_zeta", "ablation", "sensitivity", "gate_over_time"):
        assert f"No {name}: " in text
    assert "There is no labeled-only run of the same kind for: VAT, pictures, zeta 50, 50 labels" in text
    assert "The interval of a single seed is over test images" in text


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "Give the runs first"),
        (["--metric", "test_accuracy"], "Give the runs first"),
        (["nowhere"], "nowhere is no table of results"),
        (["TABLE", "--metric", "test_acuracy"], "Unknown metric 'test_acuracy'. Did you mean test_accuracy?"),
        (["TABLE", "--ot", "x"], "Unknown argument 'ot'. Did you mean out?"),
        (["NARROW"], "The table has no column hash_test"),
        (["EMPTY"], "The tables hold no runs"),
    ],
)
def test_mistakes_end_in_one_sentence(argv: list[str], sentence: str, tmp_path) -> None:
    runs = study(seeds=1)
    for name, part in (("TABLE", runs), ("NARROW", runs.drop(columns="hash_test")), ("EMPTY", runs.iloc[:0])):
        write(part, tmp_path / name)
    argv = [str(tmp_path / word) if word.isupper() else word for word in argv]
    with pytest.raises(SystemExit, match=re.escape(sentence)) as stopped:
        compare.main(argv)
    assert str(stopped.value).startswith("error: ")
    assert "\n" not in str(stopped.value)
