"""Search settings of a base method on validation images, and hand them unchanged to Fix-A-Step.

    fixastep search --config search/digits [--key value ...]

A file of a search names a recipe and a space of settings; recipes/search holds some.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import Counter
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from transformers import PrinterCallback, TrainerCallback, set_seed
from transformers.utils import logging

from hf_fixastep.callbacks import SignalCallback
from hf_fixastep.checkpoints import as_json, only_run
from hf_fixastep.config import FixAStepConfig
from hf_fixastep.plots import BLUE, ORANGE, WIDTH, percent, tidy
from hf_fixastep.runs.training import load_data, load_model
from hf_fixastep.study.figures import save
from hf_fixastep.study.search_space import BASE_METHOD, WITH_FIX_A_STEP, Search, is_range, read_search
from hf_fixastep.trainer import FixAStepTrainer


try:
    import optuna
except ImportError:  # an extra of the package
    optuna: Any = None  # type: ignore[no-redef]

ENDED = {"COMPLETE": "complete", "PRUNED": "pruned"}  # states of Optuna; all others mean interrupted
SHOWN = 10  # best trials in a table


# ---- trials


class Trials:
    """Trains one trial after the other; they share the images and nothing else."""

    def __init__(self, search: Search) -> None:
        self.search = search
        data_args, self.model_args, self.args, _ = search.parse_trial({})
        check_trial(search, self.args)
        data = load_data(data_args)
        self.classes = data["labeled"].features["label"].num_classes
        splits = {"train_dataset": "labeled", "unlabeled_dataset": "unlabeled", "eval_dataset": "validation"}
        self.images: dict[str, Any] = {argument: data[split] for argument, split in splits.items()}
        first: Any = self.trainer({})
        decoded = first.train_dataset, first.unlabeled, first.eval_dataset
        self.images = dict(zip(splits, decoded, strict=True))
        self.identity = first.identity()

    def trainer(self, values: dict[str, Any]) -> FixAStepTrainer:
        args = self.search.parse_trial(values)[2]
        set_seed(args.seed)
        model, processor = load_model(self.model_args, self.classes, args.preset)
        trainer = FixAStepTrainer(model, args, processing_class=processor, **self.images)
        trainer.remove_callback(PrinterCallback)  # Optuna has a line per trial
        trainer.remove_callback(SignalCallback)  # nothing is to be saved: a signal ends the trial at once
        return trainer

    def __call__(self, trial: Any) -> float:
        """The objective: the best evaluation of a trial."""
        earlier = finished(trial.study)
        trial.study.sampler = sampler(self.args.seed, len(earlier))
        values = {name: draw(trial, name, choices) for name, choices in self.search.space.items()}
        for same in earlier:
            if same.params == values:  # and the same seed, so the same result
                return repeat(trial, same)
        return self.train(trial, values)

    def train(self, trial: Any, values: dict[str, Any]) -> float:
        folder = self.search.folder / "_trial"
        shutil.rmtree(folder, ignore_errors=True)  # of a trial that was killed
        report = Report(trial, f"eval_{self.search.args.metric}")
        try:
            trainer = self.trainer(values)
            trainer.add_callback(report)
            trainer.train()
        except FloatingPointError as error:
            trial.set_user_attr("diverged", str(error))
            return 0.0
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if report.pruned:
            raise optuna.TrialPruned
        return max(report.evaluations)


class Report(TrainerCallback):
    """Tells Optuna every evaluation of a trial, and ends the training where Optuna gives it up."""

    def __init__(self, trial: Any, metric: str) -> None:
        self.trial, self.metric = trial, metric
        self.evaluations: list[float] = []
        self.pruned = False

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.evaluations.append(metrics[self.metric])
        self.trial.report(metrics[self.metric], state.global_step)
        if self.trial.should_prune():
            self.pruned = control.should_training_stop = True


def check_trial(search: Search, args: FixAStepConfig) -> None:
    if args.procedure:
        raise ValueError(
            f"{search.recipe} has the procedure {args.procedure}, but a search runs single trainings."
        )
    if args.world_size > 1:
        raise ValueError(
            f"A search runs in one process, but {args.world_size} were started; start it by itself."
        )
    if args.max_steps < 1 or not args.eval_steps or args.max_steps % args.eval_steps:
        raise ValueError(
            f"A trial has max_steps {args.max_steps} and eval_steps {args.eval_steps}, but it should end "
            "with an evaluation; choose max_steps as a multiple of eval_steps."
        )


def draw(trial: Any, name: str, choices: Any) -> Any:
    if not is_range(choices):
        return trial.suggest_categorical(name, list(choices))
    low, high, log = choices["low"], choices["high"], choices.get("log", False)
    whole = isinstance(low, int) and isinstance(high, int)
    return (trial.suggest_int if whole else trial.suggest_float)(name, low, high, log=log)


def sampler(seed: int, count: int) -> Any:
    """TPE whose draws depend on the seed and the finished trials alone, so that a search can be resumed.

    Settings are drawn one by one, which was the default of Optuna at the time of the paper.
    """
    state = np.random.SeedSequence([seed, count]).generate_state(1)
    return optuna.samplers.TPESampler(seed=int(state[0]), multivariate=False)


def finished(study: Any) -> list[Any]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in ENDED]


def repeat(trial: Any, same: Any) -> float:
    """Let a trial have the outcome of an earlier one."""
    trial.set_user_attr("same_as", same.number)
    for name, value in same.user_attrs.items():
        trial.set_user_attr(name, value)
    for step, value in same.intermediate_values.items():
        trial.report(value, step)
    if same.state == optuna.trial.TrialState.PRUNED:
        raise optuna.TrialPruned
    return same.value


# ---- the study


def open_study(trials: Trials) -> Any:
    """The search in the folder, if it is the same one, with its unfinished trial given up; or a new one."""
    search, args = trials.search, trials.args
    median = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=args.max_steps // 3)
    study = optuna.create_study(
        storage=f"sqlite:///{search.folder.resolve() / 'search.db'}",
        study_name="search",
        direction="maximize",
        load_if_exists=True,
        sampler=sampler(args.seed, 0),  # each trial sets its own
        pruner=median if search.args.prune else optuna.pruners.NopPruner(),
    )
    identity = as_json(trials.identity)
    wanted = {
        "space": search.space,
        "metric": search.args.metric,
        "prune": search.args.prune,
        "eval_steps": args.eval_steps,
        "validation data": trials.images["eval_dataset"].fingerprint,
        **identity.pop("settings"),
        **identity,
    }
    if not study.get_trials(deepcopy=False):
        study.set_user_attr("search", wanted)
    old = study.user_attrs["search"]
    if changed := [name for name in wanted if old.get(name) != wanted[name]]:
        raise ValueError(
            f"{search.folder} holds a search with another {', '.join(changed)}; choose another --output_dir, "
            "or give what it was started with."
        )
    for trial in study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING]):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


# ---- the report


def outcome(trial: Any, search: Search) -> dict[str, Any]:
    """One trial for the report; its value is that of its best evaluation."""
    evaluations = trial.intermediate_values
    best_step = max(evaluations, key=lambda step: evaluations[step]) if evaluations else None
    ended = ENDED.get(trial.state.name, "interrupted")
    return {
        "number": trial.number,
        "state": "diverged" if "diverged" in trial.user_attrs else ended,
        "same_as": trial.user_attrs.get("same_as"),
        "values": trial.params,
        "settings": search.settings(trial.params),
        "validation": evaluations.get(best_step),
        "best_step": best_step,
        "seconds": trial.duration.total_seconds() if trial.duration else None,
        "evaluations": evaluations,
    }


def write_report(trials: Trials, study: Any) -> None:
    """Leave all trials, the best ones as a table, a figure and the commands for the values found."""
    search = trials.search
    outcomes = [outcome(trial, search) for trial in study.get_trials(deepcopy=False)]
    complete = [trial for trial in outcomes if trial["state"] == "complete"]
    ranked = sorted(complete, key=lambda trial: -trial["validation"])
    commands = {}
    if ranked:
        commands["base"] = search.command(ranked[0]["values"], BASE_METHOD, "base")
        if trials.images["unlabeled_dataset"] is not None:
            commands["fixastep"] = search.command(ranked[0]["values"], WITH_FIX_A_STEP, "fixastep")
    metric = search.args.metric
    facts = {"recipe": search.recipe, "metric": metric, "trials": outcomes, "commands": commands}
    (search.folder / "search.json").write_text(json.dumps(facts, indent=2))
    if not ranked:
        print(f"No trial in {search.folder} has come to its end.")
        return
    save(plot_search([t for t in outcomes if t["state"] != "interrupted"], metric), search.folder / "search")
    states = sorted(Counter(trial["state"] for trial in outcomes).items())
    title = f"Trials of {search.recipe}: {', '.join(f'{count} {state}' for state, count in states)}"
    header = f"| trial | validation {metric.replace('_', ' ')} | best step | seconds | values |"
    table = "\n".join([header, "| --- " * 5 + "|", *map(row_of, ranked[:SHOWN])])
    runs = "```bash\n" + "\n".join(commands.values()) + "\n```"
    parts = [f"# {title}", "The best trials; all are in search.json.", table, "![All trials](search.png)"]
    parts += ["The runs with the values of the first:", runs]
    (search.folder / "report.md").write_text("\n\n".join(parts) + "\n")
    print(title, table, *commands.values(), sep="\n")


def row_of(trial: dict[str, Any]) -> str:
    values = [f"{k} {f'{v:.4g}' if isinstance(v, float) else v}" for k, v in trial["values"].items()]
    numbers = f"{trial['number']} | {100 * trial['validation']:.1f} % | {trial['best_step']}"
    return f"| {numbers} | {trial['seconds']:.0f} | {', '.join(values)} |"


def plot_search(trials: list[dict[str, Any]], metric: str) -> Figure:
    """The value of each finished trial, and the best so far."""
    figure = Figure((WIDTH, 4.0), facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    tidy(axes)
    order = [trial["number"] for trial in trials]
    values = np.array([math.nan if t["validation"] is None else t["validation"] for t in trials])
    is_complete = np.array([trial["state"] == "complete" for trial in trials])
    whole, broken = np.where(is_complete, values, math.nan), np.where(is_complete, math.nan, values)
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
        if optuna is None:
            raise ValueError('A search needs Optuna: pip install "hf_fixastep[search]"')
        trials = Trials(read_search(argv))
        with only_run(trials.search.folder):
            study = open_study(trials)
            try:
                missing = trials.search.args.trials - len(finished(study))
                if missing > 0:
                    study.optimize(trials, n_trials=missing, gc_after_trial=True)
            except KeyboardInterrupt:
                sys.exit("error: Interrupted; the same command goes on with the trial that was running.")
            finally:
                write_report(trials, study)
    except (OSError, ValueError) as error:  # an OSError is also a full disk
        sys.exit(f"error: {error}")
