"""Search settings of a base method on validation images, and hand them unchanged to Fix-A-Step.

fixastep search --config recipes/search/digits.yaml [--key value ...]
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from transformers import PrinterCallback, set_seed
from transformers.utils import logging

from hf_fixastep import FixAStepConfig, FixAStepTrainer
from hf_fixastep.checkpoints import as_json, only_run
from hf_fixastep.checks import check_choice
from hf_fixastep.losses import get_loss
from hf_fixastep.plots import BLUE, ORANGE, RESOLUTION, WIDTH, percent, tidy
from hf_fixastep.runs.arguments import DataArguments, ModelArguments, parse
from hf_fixastep.runs.recipe import read_yaml
from hf_fixastep.runs.training import load_data, load_model


Options = dict[str, list[str]]  # words of a command line by the name of their option

TYPES = (DataArguments, ModelArguments, FixAStepConfig)
OWN = ("trials", "metric", "prune")
METRICS = ("balanced_accuracy", "accuracy")
BASE: Options = {"gate": ["off"], "mix_labeled": ["false"]}
FIX_A_STEP: Options = {"gate": ["drop"], "mix_labeled": ["true"]}
# What the runs with the values found do not take over: they have the length of the recipe.
TRIAL_ONLY = ("output_dir", "max_steps", "eval_steps", "logging_steps", "disable_tqdm")
# Of a trial only its evaluations are kept.
NOTHING_SAVED: Options = {
    "eval_strategy": ["steps"],
    "save_strategy": ["no"],
    "load_best_model_at_end": ["false"],
    "push_to_hub": ["false"],
}
STATES = {"COMPLETE": "complete", "PRUNED": "pruned"}  # all others: interrupted
SHOWN = 10  # best trials in a table


# ---- what the user gave


@dataclass
class Search:
    """A search as its file and the command line describe it."""

    recipe: str
    space: dict[str, Any]
    overrides: Options  # settings other than the recipe's
    trials: int
    metric: str
    prune: bool

    @property
    def folder(self) -> Path:
        return Path(self.overrides["output_dir"][0])

    def settings(self, params: dict[str, Any]) -> dict[str, Any]:
        """What the values of a trial set."""
        found: dict[str, Any] = {}
        for name, value in params.items():
            found |= self.space[name][value] if is_named(self.space[name]) else {name: value}
        return found

    def options(self, params: dict[str, Any]) -> Options:
        """Everything that a trial has other than the recipe."""
        settings = self.settings(params)
        own = {
            name.removeprefix("loss_kwargs."): settings.pop(name) for name in list(settings) if "." in name
        }
        if own:
            args = self.parse(self.overrides | NOTHING_SAVED)[2]
            settings["loss_kwargs"] = args.loss_kwargs | own
        return self.overrides | {name: as_words(value) for name, value in settings.items()}

    def parse(self, options: Options) -> tuple[Any, ...]:
        return parse(TYPES, ["--config", self.recipe, *as_argv(options)])

    def parse_trial(self, params: dict[str, Any]) -> tuple[Any, ...]:
        """The dataclasses of a trial, from scratch: settings that depend on others are filled in at their
        birth.
        """
        folder: Options = {"output_dir": [str(self.folder / "_trial")]}
        return self.parse(self.options(params) | BASE | NOTHING_SAVED | folder)

    def command(self, params: dict[str, Any], variant: Options, name: str) -> str:
        """The full-length run with the values of a trial."""
        options = {name: words for name, words in self.options(params).items() if name not in TRIAL_ONLY}
        argv = as_argv(options | variant | {"output_dir": [str(self.folder / name)]})
        return shlex.join(["python", "recipes/train.py", "--config", self.recipe, *argv])


def as_argv(options: Options) -> list[str]:
    return [word for name, words in options.items() for word in (f"--{name}", *words)]


def as_words(value: Any) -> list[str]:
    """A setting as it is written on the command line."""
    if isinstance(value, list):
        return [word for item in value for word in as_words(item)]
    return [json.dumps(value) if isinstance(value, (dict, bool)) else str(value)]


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


def read_search(argv: Sequence[str]) -> Search:
    given = as_options(argv)
    if len(given.get("config", [])) != 1:
        raise ValueError(
            "--config needs the path of a YAML file behind it, such as recipes/search/digits.yaml."
        )
    (path,) = given.pop("config")
    file = read_yaml(path)
    known = [*OWN, *(field.name for kind in TYPES for field in dataclasses.fields(kind) if field.init)]
    for key in file:
        check_choice(f"key in {path}:", key, ["config", "space", *known])
    for key in given:
        check_choice("argument", key, known)
    for key in ("config", "space"):
        if not file.get(key):
            raise ValueError(
                f"{path} has no {key}, but a search needs a recipe as config and settings as space."
            )
    overrides = {
        name: as_words(value) for name, value in file.items() if name not in ("config", "space")
    } | given
    overrides.setdefault("output_dir", [f"runs/search-{Path(path).stem}"])
    own = {name: " ".join(overrides.pop(name)) for name in OWN if name in overrides}
    search = Search(file["config"], file["space"], overrides, **read_own(**own))
    check_space(search)
    return search


def read_own(trials: str = "100", metric: str = "balanced_accuracy", prune: str = "true") -> dict[str, Any]:
    if not trials.isdecimal() or int(trials) < 1:
        raise ValueError(f"trials is {trials}, but it has to be a number from 1 on.")
    check_choice("metric", metric, METRICS)
    return {
        "trials": int(trials),
        "metric": metric,
        "prune": check_choice("prune", prune, ("true", "false")) == "true",
    }


# ---- the space: a list of choices, a range {low, high, log}, or named choices of several settings


def is_range(choices: Any) -> bool:
    return isinstance(choices, dict) and {"low", "high"} <= choices.keys() <= {"low", "high", "log"}


def is_named(choices: Any) -> bool:
    return isinstance(choices, dict) and not is_range(choices)


def check_space(search: Search) -> None:
    """Find what is wrong before the first trial; every choice becomes a config once."""
    if not isinstance(search.space, dict):
        raise ValueError("space is no mapping, but it should name settings and their choices.")
    for name, choices in search.space.items():
        check_choices(name, choices)
    settings = [name for choices in search.space.items() for name in settings_set_by(*choices)]
    for name in [*settings, *search.overrides]:
        if name in BASE:
            raise ValueError(
                f"{name} is given, but a search runs the base method and hands its values to Fix-A-Step; leave it out."
            )
    for name in settings:
        check_choice(
            "setting in space:",
            name.split(".")[0],
            [field.name for field in dataclasses.fields(FixAStepConfig)],
        )
        if name in (*TRIAL_ONLY, *search.overrides) or settings.count(name) > 1:
            raise ValueError(
                f"{name} is in the space and also set for all trials or twice; leave one of them out."
            )
        if "." in name and not name.startswith("loss_kwargs."):
            raise ValueError(f"{name} is in the space, but only loss_kwargs has names inside.")
    first = {name: examples(choices)[0] for name, choices in search.space.items()}
    for name, choices in search.space.items():
        for value in examples(choices):
            args = search.parse_trial(first | {name: value})[2]
            get_loss(args.loss, **args.loss_kwargs)


def check_choices(name: str, choices: Any) -> None:
    if is_range(choices):
        low, high = choices["low"], choices["high"]
        numbers = all(isinstance(value, (int, float)) for value in (low, high))
        if not numbers or not low < high or (choices.get("log") and low <= 0):
            raise ValueError(
                f"The range of {name} is {choices}, but it needs low < high, and 0 < low for log."
            )
    elif not isinstance(choices, (list, dict)) or not choices:
        raise ValueError(
            f"{name} has no choices but {choices}; give a list, a range {{low, high, log}} or named ones."
        )
    elif isinstance(choices, dict) and not all(isinstance(settings, dict) for settings in choices.values()):
        raise ValueError(f"{name} is {choices}; give a range {{low, high, log}}, or settings to every name.")
    elif isinstance(choices, list) and not all(
        isinstance(value, (bool, int, float, str)) for value in choices
    ):
        raise ValueError(
            f"{name} has the choices {choices}, but they should be numbers, words, true or false."
        )


def settings_set_by(name: str, choices: Any) -> list[str]:
    if not is_named(choices):
        return [name]
    return list(dict.fromkeys(setting for settings in choices.values() for setting in settings))


def examples(choices: Any) -> list[Any]:
    return [choices["low"], choices["high"]] if is_range(choices) else list(choices)


def suggest(trial: Any, name: str, choices: Any) -> Any:
    if not is_range(choices):
        return trial.suggest_categorical(name, list(choices))
    low, high, log = choices["low"], choices["high"], choices.get("log", False)
    whole = isinstance(low, int) and isinstance(high, int)
    return (trial.suggest_int if whole else trial.suggest_float)(name, low, high, log=log)


# ---- the search


class SearchTrainer(FixAStepTrainer):
    """Lends itself to `hyperparameter_search`; every trial is a trainer of its own.

    The Trainer (5.22) would set attributes of one config, behind what depends on them: the presets, the
    optimizer's arguments, the loss. It also takes the last evaluation of a trial for its value, here it is
    the best one.
    """

    def __init__(self, search: Search, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.search = search

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> None:
        earlier = finished(trial.study)
        trial.study.sampler = sampler(self.args.seed, len(earlier))
        params = self.hp_space(trial)
        for same in earlier:
            if same.params == params:  # and the same seed, so the same result
                self.objective = repeat(trial, same)
                return
        runner = self.runner(params)
        try:
            runner.train(trial=trial)  # reports its evaluations, and may be pruned there
            values = [
                row[f"eval_{self.search.metric}"] for row in runner.state.log_history if "eval_loss" in row
            ]
            self.objective = max(values)
        except FloatingPointError as error:
            trial.set_user_attr("diverged", str(error))
            self.objective = 0.0
        finally:
            shutil.rmtree(runner.args.output_dir, ignore_errors=True)

    def runner(self, params: dict[str, Any]) -> FixAStepTrainer:
        args = self.search.parse_trial(params)[2]
        shutil.rmtree(args.output_dir, ignore_errors=True)  # of a trial that was killed
        set_seed(args.seed)
        runner = FixAStepTrainer(
            self.model_init(),
            args,
            train_dataset=self.train_dataset,
            unlabeled_dataset=self.unlabeled,
            eval_dataset=self.eval_dataset,
            processing_class=self.processing_class,
        )
        runner.remove_callback(PrinterCallback)  # Optuna has a line per trial
        runner.remove_callback(runner.signals)  # there is nothing to save: a signal ends the trial at once
        runner.hp_search_backend, runner.compute_objective = self.hp_search_backend, self.compute_objective
        runner.hp_space = lambda trial: {}  # its settings are in place
        return runner


def sampler(seed: int, count: int) -> Any:
    """TPE whose draws depend on the seed and the finished trials alone, so a search goes on as if never
    interrupted.

    Settings are drawn one by one, which was the default of Optuna at the time of the paper.
    """
    import optuna

    state = np.random.SeedSequence([seed, count]).generate_state(1)
    return optuna.samplers.TPESampler(seed=int(state[0]), multivariate=False)


def finished(study: Any) -> list[Any]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in STATES]


def repeat(trial: Any, same: Any) -> float:
    """Let a trial have the outcome of an earlier one."""
    import optuna

    trial.set_user_attr("same_as", same.number)
    for name, value in same.user_attrs.items():
        trial.set_user_attr(name, value)
    for step, value in same.intermediate_values.items():
        trial.report(value, step)
    if same.state == optuna.trial.TrialState.PRUNED:
        raise optuna.TrialPruned
    return same.value


def prepare(search: Search) -> SearchTrainer:
    data_args, model_args, args, _ = search.parse_trial({})
    if args.procedure:
        raise ValueError(
            f"{search.recipe} has the procedure {args.procedure}, but a search runs single trainings."
        )
    if args.world_size > 1:
        raise ValueError(
            f"A search runs in one process, but {args.world_size} were started; start it with python."
        )
    if args.max_steps < 1 or not args.eval_steps or args.max_steps % args.eval_steps:
        raise ValueError(
            f"A trial has max_steps {args.max_steps} and eval_steps {args.eval_steps}, but it should end with an "
            "evaluation; choose max_steps as a multiple of eval_steps."
        )
    set_seed(args.seed)
    data = load_data(data_args)
    network = model_args, data["labeled"].features["label"].num_classes, args.preset
    return SearchTrainer(
        search,
        args=args,
        model_init=lambda: load_model(*network)[0],
        train_dataset=data["labeled"],
        unlabeled_dataset=data["unlabeled"],
        eval_dataset=data["validation"],
        processing_class=load_model(*network)[1],
    )


def open_study(trainer: SearchTrainer) -> Any:
    """The search in the folder, if it is the same, with its unfinished trial given up; otherwise a new one."""
    import optuna

    search = trainer.search
    study = optuna.create_study(direction="maximize", load_if_exists=True, **where(search))
    run = as_json(trainer.identity())
    wanted = {
        "space": search.space,
        "metric": search.metric,
        "prune": search.prune,
        "eval_steps": trainer.args.eval_steps,
        "validation data": trainer.eval_dataset.fingerprint,
        **run.pop("settings"),
        **run,
    }
    if not study.get_trials(deepcopy=False):
        study.set_user_attr("search", wanted)
    old = study.user_attrs["search"]
    if changed := [name for name in wanted if old.get(name) != wanted[name]]:
        raise ValueError(
            f"{search.folder} holds a search with another {', '.join(changed)}; choose another --output_dir, or give "
            "what it was started with."
        )
    for trial in study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def where(search: Search) -> dict[str, Any]:
    return {"storage": f"sqlite:///{search.folder.resolve() / 'search.db'}", "study_name": "search"}


def run(trainer: SearchTrainer, study: Any) -> None:
    """Trials until as many are finished as were asked for."""
    import optuna

    search = trainer.search
    median = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=trainer.args.max_steps // 3)
    missing = search.trials - len(finished(study))
    if missing > 0:
        trainer.hyperparameter_search(
            hp_space=lambda trial: {
                name: suggest(trial, name, choices) for name, choices in search.space.items()
            },
            compute_objective=lambda metrics: metrics[f"eval_{search.metric}"],
            n_trials=missing,
            direction="maximize",
            backend="optuna",
            load_if_exists=True,
            sampler=sampler(trainer.args.seed, 0),  # each trial sets its own
            pruner=median if search.prune else optuna.pruners.NopPruner(),
            **where(search),
        )


# ---- the report


def outcome(trial: Any, search: Search) -> dict[str, Any]:
    """One trial for the report; its value is that of its best evaluation."""
    evaluations = trial.intermediate_values
    best_step = max(evaluations, key=lambda step: evaluations[step]) if evaluations else None
    return {
        "number": trial.number,
        "state": "diverged"
        if "diverged" in trial.user_attrs
        else STATES.get(trial.state.name, "interrupted"),
        "same_as": trial.user_attrs.get("same_as"),
        "values": trial.params,
        "settings": search.settings(trial.params),
        "validation": evaluations.get(best_step),
        "best_step": best_step,
        "seconds": trial.duration.total_seconds() if trial.duration else None,
        "evaluations": evaluations,
    }


def report(trainer: SearchTrainer, study: Any) -> None:
    """Leave all trials, the best ones as a table, a figure and the commands for the values found."""
    search = trainer.search
    trials = [outcome(trial, search) for trial in study.get_trials(deepcopy=False)]
    ranked = sorted((t for t in trials if t["state"] == "complete"), key=lambda trial: -trial["validation"])
    commands = {}
    if ranked:
        commands["base"] = search.command(ranked[0]["values"], BASE, "base")
        if trainer.unlabeled is not None:
            commands["fixastep"] = search.command(ranked[0]["values"], FIX_A_STEP, "fixastep")
    facts = {"recipe": search.recipe, "metric": search.metric, "trials": trials, "commands": commands}
    (search.folder / "search.json").write_text(json.dumps(facts, indent=2))
    if not ranked:
        print(f"No trial in {search.folder} has come to its end.")
        return
    figure = plot_search([trial for trial in trials if trial["state"] != "interrupted"], search.metric)
    for kind in ("png", "svg"):
        figure.savefig(search.folder / f"search.{kind}", dpi=RESOLUTION)
    title = f"Trials of {search.recipe}: {summary(trials)}"
    header = ["trial", f"validation {search.metric.replace('_', ' ')}", "best step", "seconds", "values"]
    (search.folder / "report.md").write_text(markdown(title, header, list(rows(ranked)), commands))
    table = Table(*header, title=title)
    for row in rows(ranked):
        table.add_row(*row)
    Console().print(table)
    print(*commands.values(), sep="\n")


def summary(trials: list[dict[str, Any]]) -> str:
    counts = {
        state: sum(t["state"] == state for t in trials) for state in dict.fromkeys(t["state"] for t in trials)
    }
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def rows(ranked: list[dict[str, Any]]) -> Iterator[list[str]]:
    for trial in ranked[:SHOWN]:
        numbers = [str(trial["number"]), f"{100 * trial['validation']:.1f} %", str(trial["best_step"])]
        values = [
            f"{name} {f'{value:.4g}' if isinstance(value, float) else value}"
            for name, value in trial["values"].items()
        ]
        yield [*numbers, f"{trial['seconds']:.0f}", ", ".join(values)]


def markdown(title: str, header: list[str], body: list[list[str]], commands: dict[str, str]) -> str:
    lines = [header, ["---"] * len(header), *body]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    runs = "\n".join(commands.values())
    return (
        f"# {title}\n\nThe best trials; all are in search.json.\n\n{table}\n\n![All trials](search.png)\n\n"
        f"The runs with the values of the first:\n\n```bash\n{runs}\n```\n"
    )


def plot_search(trials: list[dict[str, Any]], metric: str) -> Figure:
    """The value of each finished trial, and the best so far."""
    figure = Figure((WIDTH, 4.0), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    tidy(axes)
    order = [trial["number"] for trial in trials]
    whole = [t["validation"] if t["state"] == "complete" else math.nan for t in trials]
    broken = [
        math.nan if t["state"] == "complete" or t["validation"] is None else t["validation"] for t in trials
    ]
    axes.plot(order, np.fmax.accumulate(whole), color=BLUE, drawstyle="steps-post", label="best so far")
    axes.plot(order, whole, color=BLUE, linestyle="none", marker="o", label="complete")
    if not np.isnan(broken).all():
        axes.plot(order, broken, color=ORANGE, linestyle="none", marker="x", label="pruned or diverged")
    axes.set(xlabel="Trial", ylabel=f"Validation {metric.replace('_', ' ')}")
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.yaxis.set_major_formatter(percent)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, borderaxespad=0)
    return figure


def main(argv: list[str]) -> None:
    logging.disable_progress_bar()  # of files; the bar of the training stays
    try:
        check_optuna()
        trainer = prepare(read_search(argv))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(only_run(trainer.search.folder))
            study = open_study(trainer)
        except (OSError, ValueError) as error:
            sys.exit(f"error: {error}")
        try:
            run(trainer, study)
        except KeyboardInterrupt:
            sys.exit("error: Interrupted; the same command goes on with the trial that was running.")
        except OSError as error:  # a full disk
            sys.exit(f"error: {error}")
        finally:
            report(trainer, study)


def check_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise ValueError('A search needs Optuna: pip install -e ".[search]"') from None
