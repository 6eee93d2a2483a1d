"""Grids of runs: which runs a file means, and the rows that runs become."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification

from hf_fixastep import FixAStepConfig, Images, load_dataset
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.runs import training
from hf_fixastep.runs.arguments import parse
from hf_fixastep.runs.folder import RAW_WEIGHTS
from hf_fixastep.runs.recipe import read_yaml
from hf_fixastep.study import sweep
from hf_fixastep.study.results import read_run, read_runs, variant, write_table
from tests.short_runs import SHORT


ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "recipes/sweeps").glob("*.yaml"))
ABLATION = ["--config", "sweeps/ablation"]
PROFILES = [(path, profile) for path in SWEEPS for profile in (None, *read_yaml(path).get("profiles", {}))]


def settings(runs: dict[str, dict], *names: str) -> list[tuple]:
    return [tuple(run.get(name) for name in names) for run in runs.values()]


def write(folder: Path, file: dict) -> str:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(file))
    return str(path)


def test_a_grid_is_every_combination_and_the_first_axis_changes_last():
    variants = {"base": {"gate": "off"}, "+G": {"gate": "drop"}}
    grid = {"split_seed, seed": [3, 4], "zeta": [0, 50], "variant": variants}
    runs = sweep.plan({"grids": [grid]}, None, {})
    wanted = [(s, s, z, g) for s, z, g in itertools.product([3, 4], [0, 50], ["off", "drop"])]
    assert settings(runs, "split_seed", "seed", "zeta", "gate") == wanted
    assert next(iter(runs)).startswith("split_seed3-zeta0-base-")


def test_recipe_settings_profile_axes_and_command_line_win_in_this_order(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{zeta: 1, gate: a, seed: 1, max_steps: 1, loss: pi_model}")
    file = {
        "settings": {"config": str(recipe), "gate": "b", "seed": 2, "max_steps": 2, "zeta": 2},
        "profiles": {"short": {"settings": {"seed": 3, "max_steps": 3, "zeta": 3}}},
        "grids": [{"max_steps": [4], "zeta": [4]}],
    }
    runs = sweep.plan(file, "short", {"zeta": 5})
    assert settings(runs, "loss", "gate", "seed", "max_steps", "zeta") == [("pi_model", "b", 3, 4, 5)]


def test_a_run_in_two_grids_is_one_run_and_places_make_no_other_run():
    grids = [{"zeta": [0, 50]}, {"zeta": [50, 100]}]
    runs = sweep.plan({"grids": grids}, None, {})
    assert settings(runs, "zeta") == [(0,), (50,), (100,)]
    assert list(sweep.plan({"grids": grids}, None, {"data_dir": "elsewhere"})) == list(runs)
    assert not set(sweep.plan({"grids": grids}, None, {"max_steps": 7})) & set(runs)


def test_a_profile_may_have_other_grids():
    file = {"grids": [{"zeta": [0, 50]}], "profiles": {"cpu": {"grids": [{"zeta": [100]}]}}}
    assert settings(sweep.plan(file, "cpu", {}), "zeta") == [(100,)]


def test_shards_are_a_partition():
    runs = {f"run{number}": {} for number in range(11)}
    shards = [list(sweep.shard_of(f"{i}/4", runs)) for i in range(4)]
    assert sorted(name for shard in shards for name in shard) == sorted(runs)
    assert {len(shard) for shard in shards} <= {2, 3}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "No sweep is named"),
        (["--config", "nowhere.yaml"], "There is no file nowhere.yaml"),
        (["--config", "sweeps/digit"], "Unknown recipe 'sweeps/digit'. Did you mean sweeps/digits?"),
        (["--config", "digits/vat"], "has no list of grids"),
        ([*ABLATION, "--profile", "papr"], "Unknown profile 'papr'. Did you mean paper?"),
        ([*ABLATION, "--shard", "4/4"], "shard is 4/4, but expected i/n"),
        ([*ABLATION, "--jobs", "0"], "jobs is 0"),
        ([*ABLATION, "--jobs"], "Expected pairs of --name and value"),
        ([*ABLATION, "--lerning_rate", "1"], "Did you mean learning_rate?"),
        ([*ABLATION, "--gate", "dorp"], "Unknown gate 'dorp'. Did you mean drop?"),
    ],
    ids=lambda value: " ".join(map(str, value[2:])) if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_sentence_and_starts_nothing(words, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit, match="error: ") as raised:
        sweep.main([*words, "--output_dir", str(tmp_path / "runs")])
    assert sentence in str(raised.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ({"grids": [{"zeta": []}]}, "Axis zeta is []"),
        ({"grids": [{"zeta": 50}]}, "Axis zeta is 50"),
        (
            {"grids": [{"zeta": [50]}], "seting": {}},
            "Unknown key of a sweep 'seting'. Did you mean settings?",
        ),
        ({"grids": [{"config": ["nowhere.yaml"]}]}, "There is no file"),
    ],
)
def test_a_sweep_file_with_a_mistake_is_refused(file, sentence, tmp_path):
    with pytest.raises(SystemExit) as raised:
        sweep.main(["--config", write(tmp_path, file), "--output_dir", str(tmp_path / "runs")])
    assert sentence in str(raised.value)


@pytest.mark.parametrize(("path", "profile"), PROFILES, ids=lambda value: getattr(value, "stem", str(value)))
def test_every_sweep_file_names_its_command_and_its_runs_parse(path, profile):
    assert f"fixastep sweep --config sweeps/{path.stem}" in path.read_text()
    runs = sweep.plan(read_yaml(path), profile, {})
    by_loss = {
        (run["loss"], run.get("procedure"), run.get("optim")): {name: run} for name, run in runs.items()
    }
    for some in by_loss.values():  # one of each kind: all would take minutes
        sweep.check(some)


def grid_of(name: str, *columns: str) -> set[tuple]:
    return set(settings(sweep.plan(read_yaml(ROOT / f"recipes/sweeps/{name}.yaml"), "paper", {}), *columns))


def test_the_sweeps_have_the_design_of_the_paper():
    variants = {("off", False), ("drop", False), ("off", True), ("drop", True)}
    ablation = grid_of("ablation", "loss", "zeta", "gate", "mix_labeled", "labels_per_class")
    losses = ("pi_model", "mean_teacher", "vat", "pseudo_label", "fixmatch")
    wanted = {(loss, zeta, *v, 400) for loss in losses for zeta in (0, 25, 50, 75, 100) for v in variants}
    assert {run for run in ablation if run[0] != "supervised"} == wanted
    sensitivity = grid_of("sensitivity", "loss", "split_seed", "zeta", "mix_temperature", "mix_alpha", "gate")
    mixed = set(itertools.product(["mean_teacher"], range(5), (50, 100), (0.5, 0.95), (0.5, 0.75), (None,)))
    assert {run for run in sensitivity if run[5] != "off"} == mixed
    assert len(sensitivity) == len(mixed) + 10
    splits = grid_of("splits", "loss", "split_seed", "seed", "zeta", "gate")
    assert {run[:4] for run in splits if run[0] != "supervised"} == {
        (loss, split, 0, zeta)
        for loss in ("mean_teacher", "fixmatch")
        for split in range(5)
        for zeta in (50, 100)
    }
    cifar100 = grid_of("cifar100", "dataset", "loss", "zeta", "gate", "max_steps")
    assert {run[1:4] for run in cifar100 if run[1] != "supervised"} == set(
        itertools.product(("pi_model", "vat", "fixmatch"), (50, 100), ("off", "drop"))
    )
    assert {(run[0], run[4]) for run in cifar100} == {("cifar100_fifty_class", 812448)}
    figure2 = grid_of("figure2", "labels_per_class", "max_steps", "procedure")
    assert {run[:2] for run in figure2 if run[2] is None} == {(400, 385392), (50, 333332)}


def test_processes_of_a_sweep_start_with_the_trainer_imported(tmp_path):
    context = sweep.Sweep(tmp_path, {}, sweep.SweepArguments()).context
    code = (
        f"import sys; open({str(tmp_path / 'found')!r}, 'w').write(str('hf_fixastep.trainer' in sys.modules))"
    )
    process = context.Process(target=exec, args=(code,))
    process.start()
    process.join()
    assert (tmp_path / "found").read_text() == "True"


def test_the_sweep_of_heart2heart_has_the_settings_of_the_recipes_of_every_split(tmp_path):
    """Which state them in their first lines, one for each further split."""
    runs = sweep.plan(read_yaml(ROOT / "recipes/sweeps/heart2heart.yaml"), "paper", {})
    wanted = set()
    for name in ("supervised", "pi_model", "vat", "fixmatch"):
        text = (ROOT / f"recipes/heart2heart/{name}.yaml").read_text()
        for split in range(3):
            lines = [line for line in text.splitlines() if line.startswith(f"# Split {split}:")]
            more = [line.split("add ")[1].split() for line in lines]
            for switches in ([], ["--gate", "off", "--mix_labeled", "false"]):
                words = [*(more[0] if more else []), *(switches if name != "supervised" else [])]
                wanted.add(fields(["--config", str(ROOT / f"recipes/heart2heart/{name}.yaml"), *words]))
    found = {fields(["--config", write(tmp_path, run)]) for run in runs.values()}
    assert found == wanted


def fields(argv: list[str]) -> tuple:
    data, _, args, _ = parse(sweep.TYPES, argv)
    names = (
        "loss",
        "gate",
        "mix_labeled",
        "learning_rate",
        "lr_cycle_steps",
        "unlabeled_weight",
        "max_steps",
    )
    names += ("unlabeled_warmup_steps", "mix_temperature", "mix_alpha", "eval_steps", "save_steps", "optim")
    return data.dataset_config, *(getattr(args, name) for name in names)


# ---- rows


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "short"
    recipe = str(ROOT / "recipes/digits/mean_teacher.yaml")
    training.main(["--config", recipe, "--output_dir", str(folder), "--gate", "off", *SHORT])
    return folder


def test_the_row_of_a_run_holds_its_numbers_settings_and_curves(run):
    row, facts = read_run(run), json.loads((run / "metrics.json").read_text())
    found = tuple(row[name] for name in ("loss", "variant", "zeta", "labels_per_class"))
    assert found == ("mean_teacher", "+A", 50, 5)
    assert (row["mix_alpha"], row["batchnorm"], row["preset"], row["seed"]) == (0.5, "joint", "paper", 0)
    assert row["test_accuracy"] == facts["test_accuracy"]
    assert row["hash_test"] == facts["dataset"]["hashes"]["test"]
    assert (row["log_step"], row["eval_step"]) == ([2, 4], [2, 4])
    assert len(row["log_cosine"]) == len(row["log_gate_open"]) == 2
    assert not {"output_dir", "data_dir"} & json.loads(row["settings"]).keys()


def test_the_predictions_of_a_row_give_its_accuracies(run):
    row = read_run(run)
    labels, answers = np.array(row["test_labels"]), np.array(row["test_predictions"])
    assert np.mean(labels == answers) == pytest.approx(row["test_accuracy"])
    recalls = [np.mean(answers[labels == c] == c) for c in range(6)]
    assert np.mean(recalls) == pytest.approx(row["test_balanced_accuracy"])


def test_raw_numbers_are_those_of_the_raw_weights_of_the_best_step(run):
    """Evaluated here by hand, from the checkpoint of that step."""
    facts = json.loads((run / "metrics.json").read_text())
    checkpoint = run / f"checkpoint-{facts['best_step']}"
    model = AutoModelForImageClassification.from_pretrained(checkpoint)
    model.load_state_dict(model.state_dict() | load_file(checkpoint / RAW_WEIGHTS))
    data = load_dataset("digits_open_set", "zeta50", labels_per_class=5)
    images = Images.from_dataset(data["test"], (8, 8))
    with torch.inference_mode():
        answers = model.eval()(
            next(Classifier(run, batch_size=len(images)).batches(images.pixels))
        ).logits.argmax(-1)
    assert (answers == images.labels).double().mean().item() == pytest.approx(facts["raw_test_accuracy"])
    assert facts["raw_test_accuracy"] != facts["test_accuracy"]  # so that the test could fail


def test_test_labels_choose_nothing(run, tmp_path, monkeypatch):
    """With other test labels everything but the test metrics is the same."""

    def wrong(args):
        data = load_data(args)
        labels = [(label + 1) % 6 for label in data["test"]["label"]]
        features = data["test"].features
        data["test"] = data["test"].remove_columns("label").add_column("label", labels).cast(features)
        return data

    load_data = training.load_data
    monkeypatch.setattr(training, "load_data", wrong)
    recipe = str(ROOT / "recipes/digits/mean_teacher.yaml")
    training.main(["--config", recipe, "--output_dir", str(tmp_path / "short"), "--gate", "off", *SHORT])
    right, other = read_run(run), read_run(tmp_path / "short")
    kept = ("best_step", "validation_accuracy", "raw_validation_accuracy", "eval_accuracy", "log_cosine")
    for name in (*kept, "test_predictions", "hash_labeled", "hash_unlabeled"):
        assert other[name] == right[name]
    assert other["test_accuracy"] != right["test_accuracy"]


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (("supervised", None, "drop", False), "labeled-only"),
        (("supervised", "curriculum_labeling", "off", False), "base"),
        (("probe", None, "off", False), "probe"),
        (("neighbours", None, "off", False), "neighbours"),
        (("fixmatch", None, "off", False), "base"),
        (("fixmatch", None, "project", False), "+G"),
        (("fixmatch", None, "off", True), "+A"),
        (("fixmatch", None, "drop", True), "Fix-A-Step"),
    ],
)
def test_the_variant_follows_from_gate_and_mixing(facts, name):
    assert variant(dict(zip(("loss", "procedure", "gate", "mix_labeled"), facts, strict=True))) == name


def test_a_run_that_was_fitted_and_not_trained_has_no_log_and_no_curves(run, tmp_path):
    folder = tmp_path / "probe"
    shutil.copytree(run, folder)
    (folder / "log.csv").unlink()
    facts = json.loads((folder / "metrics.json").read_text()) | {
        "loss": "probe",
        "gate": "off",
        "speed": None,
    }
    (folder / "metrics.json").write_text(json.dumps(facts))
    row = read_run(folder)
    assert (row["variant"], row["log_step"], row["eval_accuracy"]) == ("probe", [], [])


def test_tables_folders_and_runs_are_read_alike_and_a_run_counts_once(run, tmp_path):
    write_table([read_run(run)], tmp_path / "results.parquet")
    single = read_runs([run])
    for paths in ([tmp_path], [tmp_path / "results.parquet"], [tmp_path, run]):
        table = read_runs(paths)
        assert list(table["run"]) == ["short"]
        assert list(table["test_predictions"][0]) == single["test_predictions"][0]


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match="is no table of results, no folder of a sweep and no finished run"):
        read_runs([tmp_path])
    with pytest.raises(ValueError, match="No runs are named"):
        read_runs([])


def test_a_table_is_written_whole_or_not_at_all(run, tmp_path):
    write_table([read_run(run)], tmp_path / "results.parquet")
    before = (tmp_path / "results.parquet").read_bytes()
    with pytest.raises(pa.ArrowInvalid):
        write_table([{"run": "a", "settings": object()}], tmp_path / "results.parquet")
    assert (tmp_path / "results.parquet").read_bytes() == before


def test_the_settings_of_a_row_name_what_the_preset_filled(run):
    assert read_run(run)["mix_per_batch"] is FixAStepConfig(output_dir="x", loss="mean_teacher").mix_per_batch


@pytest.mark.parametrize("name", ["digits", "cifar10_cpu"])
def test_runs_are_named_as_when_the_committed_tables_were_made(name, tmp_path, monkeypatch):
    """So a sweep finds what it has finished; and a name finds the file and its recipes in any folder."""
    monkeypatch.chdir(tmp_path)
    table = pd.read_parquet(ROOT / f"recipes/sweeps/results/{name}.parquet", columns=["run"])
    assert set(sweep.command_line(["--config", f"sweeps/{name}"])[2]) == set(table["run"])
