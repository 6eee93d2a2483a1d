"""The search of settings: spaces, trials, resuming, and what it hands on."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from hf_fixastep.checkpoints import only_run
from hf_fixastep.runs import training
from hf_fixastep.runs.arguments import parse
from hf_fixastep.study import search
from hf_fixastep.study.search_space import TYPES, read_search
from tests import short_runs  # noqa: F401, for its frozen garbage: every trial collects


optuna = pytest.importorskip("optuna", reason='a search needs Optuna: pip install "hf_fixastep[search]"')

ROOT = Path(__file__).parents[2]
SMALL = ["--max_steps", "4", "--eval_steps", "2", "--disable_tqdm", "true"]


def write(folder: Path, space: Any, recipe: str = "digits/fixmatch", **more: Any) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"config": f"recipes/{recipe}.yaml", "space": space, **more}))
    return path


def arguments(path: Path, folder: Path, *more: str) -> list[str]:
    return ["--config", str(path), "--output_dir", str(folder), *SMALL, *more]


def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "search.json").read_text())


# ---- the paper's spaces

# Learning rates, weight decays, unlabeled weights, steps of the ramp.
PAPER = {
    "supervised": ({0.001, 0.003, 0.01, 0.03, 0.1, 0.3}, {0, 0.00005, 0.0005, 0.005, 0.05}, None, None),
    "pi_model": ({0.003, 0.01, 0.03, 0.1}, {0, 0.0005, 0.005, 0.05}, {1, 5, 10, 20, 100}, {0, 17000, 34000}),
    "vat": (
        *({0.0002, 0.0006, 0.002, 0.006}, {0.000004, 0.00004, 0.0004}),
        *({0.3, 0.1, 0.9, 0.03, 3}, {0, 17000, 34000}),
    ),
    "fixmatch": ({0.003, 0.01, 0.03, 0.1}, {0.0005, 0.005, 0.05}, {0.5, 1, 5, 10}, None),
    "openmatch": ({0.003, 0.01, 0.03, 0.1, 0.3}, {5e-7, 5e-6, 5e-5, 5e-4, 5e-3, 0.05}, None, None),
}
OPENMATCH = {
    "loss_kwargs.entropy_weight": {0.03, 0.1, 0.3, 1},
    "loss_kwargs.consistency_weight": {0.25, 0.5, 1, 2},
}


@pytest.mark.parametrize("name", PAPER)
def test_the_spaces_of_tmed2_are_those_of_the_paper(name):
    wanted = read_search(["--config", f"search/{name}"])  # a name is enough, in any folder
    names = ("learning_rate", "weight_decay", "unlabeled_weight", "unlabeled_warmup_steps")
    assert tuple(set(wanted.space[key]) if key in wanted.space else None for key in names) == PAPER[name]
    others = {key: set(choices) for key, choices in wanted.space.items() if key not in names}
    switches = {"optimizer": {"adam", "sgd"}, "schedule": {"fixed", "cosine"}}
    assert others == (OPENMATCH if name == "openmatch" else switches)
    assert (wanted.args.trials, wanted.args.metric) == (100, "balanced_accuracy")
    data, _, args, _ = wanted.parse_trial({})
    assert (data.dataset, data.dataset_config, args.loss) == ("tmed2", "split0", name)
    assert (args.max_steps, args.max_steps % args.eval_steps) == (180 * (1561 // 64), 0)
    assert (args.gate, args.mix_labeled) == ("off", False)
    if name == "openmatch":
        assert args.unlabeled_batch_size == 128
        return
    for optimizer, momentum in (("adam", None), ("sgd", "momentum=0.9,nesterov=true")):
        for schedule, cycle in (("fixed", 0), ("cosine", 1)):
            values = {
                "learning_rate": 0.01,
                "weight_decay": 0.0,
                "optimizer": optimizer,
                "schedule": schedule,
            }
            args = wanted.parse_trial(values)[2]
            assert (args.optim, args.optim_args) == (optimizer, momentum)
            assert (args.learning_rate, args.weight_decay) == (0.01, 0.0)
            assert (args.lr_cycle_steps, args.lr_scheduler_type) == (cycle, "constant")


@pytest.mark.parametrize("path", sorted((ROOT / "recipes/search").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_gives_its_own_command(path):
    assert f"fixastep search --config search/{path.stem}" in path.read_text()


# ---- a search with real trainings

SPACE = {
    "learning_rate": {"low": 0.001, "high": 0.1, "log": True},
    "weight_decay": [0.0, 5e-7],
    "optimizer": {"adam": {"optim": "adam"}, "sgd": {"optim": "sgd"}},
    "loss_kwargs.entropy_weight": [0.3, 1],
}


class PruneTheSecond:
    def __init__(self, **kwargs: Any) -> None:
        pass

    def prune(self, study: Any, trial: Any) -> bool:
        return trial.number == 1


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Path:
    """Three trials without any test images."""
    folder = tmp_path_factory.mktemp("search")
    with pytest.MonkeyPatch.context() as patch:
        load = training.load_data
        patch.setattr(search, "load_data", lambda args: {k: v for k, v in load(args).items() if k != "test"})
        patch.setattr(optuna.pruners, "MedianPruner", PruneTheSecond)
        search.main(arguments(write(folder, SPACE, "digits/openmatch", trials=3), folder / "out"))
    return folder / "out"


def test_trials_are_pruned_ranked_and_reported_and_leave_no_checkpoints(searched):
    trials = found(searched)["trials"]
    states = [(trial["state"], list(trial["evaluations"])) for trial in trials]
    assert states == [("complete", ["2", "4"]), ("pruned", ["2"]), ("complete", ["2", "4"])]
    for trial in trials:
        evaluations = {int(step): value for step, value in trial["evaluations"].items()}
        assert trial["validation"] == max(evaluations.values()) == evaluations[trial["best_step"]]
        assert trial["seconds"] > 0
    names = {"report.md", "search.db", "search.json", "search.png", "search.svg"}
    assert {path.name for path in searched.iterdir()} == names
    for command in found(searched)["commands"].values():
        assert command in (searched / "report.md").read_text()


def best_of(facts: dict[str, Any]) -> dict[str, Any]:
    return max(
        (t for t in facts["trials"] if t["state"] == "complete"), key=lambda trial: trial["validation"]
    )


def settings_of(command: str) -> dict[str, Any]:
    program, name, *argv = shlex.split(command)
    assert (program, name) == ("fixastep", "train")
    *_, args, given = parse(TYPES, argv)
    return args.to_dict() | given | {"loss_kwargs": args.loss_kwargs}


def test_the_values_are_handed_on_unchanged(searched):
    facts = found(searched)
    base, fixastep = (settings_of(facts["commands"][name]) for name in ("base", "fixastep"))
    for settings in (base, fixastep):
        for name, value in best_of(facts)["values"].items():
            if name == "optimizer":
                assert settings["optim"] == value
            elif name.startswith("loss_kwargs."):  # the recipe's other arguments stay
                recipe = {"warmup_steps": 120, "decay": 0.98}
                assert settings["loss_kwargs"] == recipe | {name.split(".")[1]: value}
            else:
                assert settings[name] == value
        assert settings["max_steps"] == 1200  # the recipe's, not a trial's
    changed = {name for name in base if base[name] != fixastep[name]}
    assert changed == {"gate", "mix_labeled", "output_dir"}
    assert (base["gate"], base["mix_labeled"]) == ("off", False)
    assert (fixastep["gate"], fixastep["mix_labeled"]) == ("drop", True)


def test_a_trial_gives_the_numbers_of_a_run_with_its_settings(searched, tmp_path):
    facts = found(searched)
    argv = shlex.split(facts["commands"]["base"])[2:]
    trainer, _, start = training.prepare([*argv, *SMALL, "--save_steps", "2", "--output_dir", str(tmp_path)])
    start()
    rows = [row for row in trainer.state.log_history if "eval_balanced_accuracy" in row]
    evaluations = {str(row["step"]): row["eval_balanced_accuracy"] for row in rows}
    assert evaluations == best_of(facts)["evaluations"]


def test_each_trial_has_its_own_optimizer_loss_and_weights(tmp_path):
    path = write(tmp_path, SPACE, "digits/openmatch")
    trials = search.Trials(read_search(arguments(path, tmp_path / "out")))
    values = {"learning_rate": 0.01, "weight_decay": 5e-7}
    adam = trials.trainer(values | {"optimizer": "adam", "loss_kwargs.entropy_weight": 0.3})
    sgd = trials.trainer(values | {"optimizer": "sgd", "loss_kwargs.entropy_weight": 1})
    assert type(adam.create_optimizer()) is torch.optim.Adam
    group = sgd.create_optimizer().param_groups[0]
    found = tuple(group[name] for name in ("lr", "weight_decay", "momentum", "nesterov"))
    assert found == (0.01, 5e-7, 0.9, True)
    assert (adam.loss.entropy_weight, sgd.loss.entropy_weight) == (0.3, 1)
    for kept, new in zip(adam.model.parameters(), sgd.model.parameters(), strict=True):
        assert kept is not new
        assert torch.equal(kept, new)
    assert torch.equal(adam.loss.one_vs_all.weight, sgd.loss.one_vs_all.weight)


# ---- many trials, with a formula instead of a training


class Formula:
    """Stands for the trainer of a trial; stops at the n-th trial if told to."""

    stop_at: int | None = None
    error: type[BaseException] = KeyboardInterrupt
    count = 0

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def add_callback(self, callback: Any) -> None:
        self.callback = callback

    def train(self) -> None:
        Formula.count += 1
        control = SimpleNamespace(should_training_stop=False)
        for step in (2, 4):
            if step == 4 and Formula.count == self.stop_at:
                raise self.error("stopped")
            value = step / 5 - abs(self.values["learning_rate"] - 0.04) - self.values.get("weight_decay", 0)
            metrics, state = {"eval_balanced_accuracy": value}, SimpleNamespace(global_step=step)
            self.callback.on_evaluate(None, state, control, metrics=metrics)
            if control.should_training_stop:
                return


@pytest.fixture
def formula(monkeypatch) -> type[Formula]:
    trainer = search.Trials.trainer
    monkeypatch.setattr(
        search.Trials, "trainer", lambda self, values: Formula(values) if values else trainer(self, values)
    )
    monkeypatch.setattr("gc.collect", lambda *args: 0)  # which takes longer than a formula
    for name, value in {"count": 0, "stop_at": None, "error": KeyboardInterrupt}.items():
        monkeypatch.setattr(Formula, name, value)
    return Formula


RANGES = {"learning_rate": {"low": 0.001, "high": 0.1}, "weight_decay": [0.0, 0.01, 0.05]}


def finished(folder: Path) -> list[tuple]:
    trials = [trial for trial in found(folder)["trials"] if trial["state"] != "interrupted"]
    return [(trial["state"], trial["values"], trial["evaluations"]) for trial in trials]


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(formula, tmp_path):
    path = write(tmp_path, RANGES, trials=14)
    search.main(arguments(path, tmp_path / "whole"))
    whole = finished(tmp_path / "whole")
    assert len(whole) == 14
    assert {state for state, *_ in whole} == {"complete", "pruned"}
    assert len({json.dumps(values) for _, values, _ in whole}) == 14  # the sampler does not repeat itself

    for at in (1, 13):  # in the first trial, and after the ten that TPE draws at random
        formula.count, formula.stop_at = 0, at
        with pytest.raises(SystemExit, match="the same command goes on"):
            search.main(arguments(path, tmp_path / "parts"))
        assert finished(tmp_path / "parts") == whole[: at - 1]
    search.main(arguments(path, tmp_path / "parts"))
    assert finished(tmp_path / "parts") == whole
    trials = found(tmp_path / "parts")["trials"]
    broken = [number for number, trial in enumerate(trials) if trial["state"] == "interrupted"]
    assert broken == [0, 13]
    for number in broken:
        assert trials[number]["values"] == trials[number + 1]["values"]  # tried again


def test_a_finished_search_can_be_asked_for_more_trials_but_not_for_another_search(formula, tmp_path):
    path, out = write(tmp_path, RANGES, trials=2, teacher_decay=0.9), tmp_path / "out"
    search.main(arguments(path, out, "--split_seed=3"))
    before = finished(out)
    search.main(arguments(path, out, "--split_seed=3", "--trials", "3"))
    assert (formula.count, finished(out)[:2]) == (3, before)
    settings = settings_of(found(out)["commands"]["fixastep"])
    assert (settings["teacher_decay"], settings["split_seed"]) == (0.9, 3)  # those of all trials
    assert (settings["max_steps"], settings["eval_steps"]) == (1200, 100)  # but for their lengths

    before = (out / "search.json").read_bytes()
    other = ["--split_seed=1", "--metric", "accuracy", "--max_steps", "8"]
    with pytest.raises(SystemExit, match="holds a search with another metric, validation data, max_steps"):
        search.main(arguments(path, out, *other))
    changed = write(tmp_path, {"learning_rate": [0.1]}, teacher_decay=0.9)
    with pytest.raises(SystemExit, match="holds a search with another space;"):
        search.main(arguments(changed, out, "--split_seed=3"))
    with only_run(out), pytest.raises(SystemExit, match="error: Another run is writing to"):
        search.main(arguments(path, out, "--split_seed=3"))
    assert (formula.count, (out / "search.json").read_bytes()) == (3, before)


def test_values_that_were_tried_are_not_trained_again_and_pruning_can_be_off(formula, tmp_path):
    path = write(tmp_path, {"learning_rate": [0.01, 0.03]}, "digits/supervised", trials=14, prune=False)
    search.main(arguments(path, tmp_path / "out"))
    trials = found(tmp_path / "out")["trials"]
    assert [trial["state"] for trial in trials] == ["complete"] * 14
    assert formula.count == len({trial["values"]["learning_rate"] for trial in trials}) <= 2
    for trial in trials:
        if trial["same_as"] is not None:
            first = trials[trial["same_as"]]
            assert (trial["values"], trial["evaluations"]) == (first["values"], first["evaluations"])
    assert found(tmp_path / "out")["commands"].keys() == {"base"}  # labeled-only has nothing to gate


def test_a_trial_that_diverges_is_finished_and_never_the_best(formula, tmp_path, capsys):
    formula.stop_at, formula.error = 1, FloatingPointError
    path = write(tmp_path, RANGES, trials=1)
    search.main(arguments(path, tmp_path / "out"))
    assert "has come to its end" in capsys.readouterr().out
    assert found(tmp_path / "out")["commands"] == {}
    search.main(arguments(path, tmp_path / "out", "--trials", "2"))
    facts = found(tmp_path / "out")
    assert [trial["state"] for trial in facts["trials"]] == ["diverged", "complete"]
    assert f"--learning_rate {facts['trials'][1]['values']['learning_rate']} " in facts["commands"]["base"]


def test_other_seeds_draw_other_values():
    drawn = set()
    for seed, count in ((0, 0), (0, 1), (1, 0)):
        study = optuna.create_study(sampler=search.sampler(seed, count))
        drawn.add(search.draw(study.ask(), "learning_rate", RANGES["learning_rate"]))
    assert len(drawn) == 3


# ---- mistakes


@pytest.mark.parametrize(
    ("space", "sentence"),
    [
        ({"lerning_rate": [0.1]}, "Unknown setting in space: 'lerning_rate'. Did you mean learning_rate?"),
        ({"loss_kwargs.treshold": [0.9]}, "Unknown argument of fixmatch 'treshold'. Did you mean threshold?"),
        (
            {"optimizer": {"adam": {"optin": "adam"}}},
            "Unknown setting in space: 'optin'. Did you mean optim?",
        ),
        ({"learning_rate": []}, "The choices of learning_rate are [], but they should be a list of"),
        ({"learning_rate": {}}, "The choices of learning_rate are {}, but"),
        ({"learning_rate": 0.1}, "The choices of learning_rate are 0.1, but"),
        ({"learning_rate": [[0.1]]}, "The choices of learning_rate are [[0.1]], but"),
        ({"learning_rate": {"low": 1, "hihg": 2}}, "a range {low, high, log} with low < high"),
        ({"learning_rate": {"low": 0.3, "high": 0.1}}, "with low < high and"),
        ({"learning_rate": {"low": 0, "high": 0.1, "log": True}}, "0 < low for log"),
        (
            {"unlabeled_weight": [1, -1]},
            "unlabeled_weight is -1.0, but it cannot be negative, infinite or NaN.",
        ),
        ({"learning_rate": ["high"]}, "Argument --learning_rate"),
        ({"gate": ["drop", "off"]}, "gate is given, but a search runs the base method"),
        ({"max_steps": [2, 4]}, "max_steps is in the space and also set"),
        ({"seed": [1], "both": {"x": {"seed": 2}}}, "seed is in the space and also set"),
        ({"seed.x": [1]}, "only loss_kwargs has names inside"),
        ([1], "has no space"),
        ({}, "has no space"),
    ],
    ids=str,
)
def test_a_wrong_space_ends_in_one_sentence(space, sentence, tmp_path):
    with pytest.raises(ValueError, match=re.escape(sentence)) as raised:
        read_search(arguments(write(tmp_path, space), tmp_path / "out"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--trails", "3"], "Unknown argument 'trails'. Did you mean trials?"),
        (["--trials", "0"], "trials is 0, but it has to be a number from 1 on."),
        (["--metric", "acuracy"], "Unknown metric 'acuracy'. Did you mean accuracy?"),
        (["--gate", "drop"], "gate is given, but a search runs the base method"),
        (["--eval_steps", "3"], "choose max_steps as a multiple of eval_steps"),
        (["--learning_rate", "0.1"], "learning_rate is in the space and also set"),
        (["--procedure", "safe_student"], "has the procedure safe_student"),
        (["--dataset", "digit_open_set"], "Unknown dataset 'digit_open_set'. Did you mean digits_open_set?"),
        (["--config", "nowhere.yaml"], "There is no file nowhere.yaml"),
        (["--config", "search/digit"], "Unknown recipe 'search/digit'. Did you mean search/digits?"),
        (["--config"], "--config needs the file of a search"),
    ],
    ids=str,
)
def test_a_mistake_on_the_command_line_ends_in_one_sentence(more, sentence, tmp_path):
    with pytest.raises(SystemExit, match=re.escape(sentence)) as stopped:
        search.main(arguments(write(tmp_path, RANGES), tmp_path / "out", *more))
    assert "\n" not in str(stopped.value)
    assert not (tmp_path / "out").exists()


def test_an_unknown_key_in_the_file_is_an_error_with_a_suggestion(tmp_path):
    with pytest.raises(ValueError, match=r"'trails'\. Did you mean trials\?"):
        read_search(arguments(write(tmp_path, RANGES, trails=3), tmp_path / "out"))


def test_without_optuna_the_sentence_names_the_install(monkeypatch, tmp_path):
    monkeypatch.setattr(search, "optuna", None)
    with pytest.raises(SystemExit, match=re.escape('pip install "hf_fixastep[search]"')):
        search.main(arguments(write(tmp_path, RANGES), tmp_path / "out"))
