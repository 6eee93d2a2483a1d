"""A run that is killed at any moment and resumed ends as if nothing had happened.

All runs are forks of one launched process that has imported everything and computed nothing.
"""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_fixastep import FixAStepTrainer
from hf_fixastep.checkpoints import checkpoints, newest_complete
from tests.short_runs import make_trainer, random_images, tiny_wide_resnet
from tests.slow.launching import launch


pytestmark = pytest.mark.slow

STEPS = 12
SETTINGS: dict[str, Any] = {
    "max_steps": STEPS,
    "steps_per_epoch": 5,
    "teacher_decay": 0.9,
    "logging_steps": 3,  # no multiple of any other interval
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "metric_for_best_model": "accuracy",
    "load_best_model_at_end": True,
    "per_device_eval_batch_size": 4,
}
KILLS, SIGNALS = 18, 4


# ---- what the forked processes do


def make(folder: Path) -> FixAStepTrainer:
    objects = {"eval_dataset": random_images(9, seed=3, labeled=True)}
    return make_trainer(folder, tiny_wide_resnet(), objects=objects, **SETTINGS)


def run(folder: Path, prepare: Callable[[FixAStepTrainer], None] = lambda trainer: None) -> None:
    """Train to the end, from the newest complete checkpoint if there is any, and keep the final model."""
    trainer = make(folder)
    prepare(trainer)
    resume = folder.is_dir() and newest_complete(folder)[0] is not None
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "final"))
    if trainer.is_world_process_zero():
        (folder / "history.json").write_text(json.dumps(trainer.state.log_history))
        (folder / "best.json").write_text(
            json.dumps([trainer.state.best_global_step, trainer.state.best_metric])
        )


def fork(action: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_within(action: Callable[[], None], seconds: float, undo: Callable[[], object]) -> int:
    """Kill a fork after this time, and give its exit code.

    How fast it is depends on what else the machine does, so a fork that ended before its kill is undone and
    gets half of the time.
    """
    while True:
        child = fork(action)
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        if (code := wait(child)) != 0:
            return code
        undo()
        seconds /= 2


class Steps(TrainerCallback):
    """Tells the parent when a step begins."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        os.write(self.pipe, b"!")


def signalled(folder: Path, number: int, steps: int, delay: float) -> int:
    """The exit code of a run that gets a signal so many seconds after the begin of its n-th step."""
    reader, writer = os.pipe()
    child = fork(lambda: run(folder, lambda trainer: trainer.add_callback(Steps(writer))))
    os.close(writer)
    for _ in range(steps):
        os.read(reader, 1)
    time.sleep(delay)
    os.kill(child, number)
    code = wait(child)
    os.close(reader)
    return code


class Countdown:
    """Kills its own process at the n-th thing that happens inside a method of the trainer."""

    def __init__(self, trainer: FixAStepTrainer, method: str, count: int) -> None:
        self.count, self.inside, self.total = count, False, 0
        original = getattr(trainer, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self.inside = False

        setattr(trainer, method, watched)
        sys.setprofile(self.happens)

    def happens(self, frame: Any, event: str, argument: Any) -> None:
        if self.inside:
            self.total += 1
            if self.total == self.count:
                os.kill(os.getpid(), signal.SIGKILL)


METHODS = ("training_step", "_save_checkpoint", "evaluation_loop")


def count_events(folder: Path, method: str) -> int:
    """How many calls and returns happen inside a method during a whole run."""
    reader, writer = os.pipe()

    def count() -> None:
        counters = []
        run(folder, lambda trainer: counters.append(Countdown(trainer, method, -1)))
        sys.setprofile(None)
        os.write(writer, str(counters[0].total).encode())

    assert wait(fork(count)) == 0
    os.close(writer)
    total = int(os.read(reader, 100))
    os.close(reader)
    return total


def main(folder: Path) -> None:
    chance, report = random.Random(0), {}
    start = time.perf_counter()
    assert wait(fork(lambda: run(folder / "whole"))) == 0
    totals = {method: count_events(folder / f"count-{method}", method) for method in METHODS}
    report["events"] = totals

    for number in range(KILLS):
        target = folder / f"kill-{number}"
        method = METHODS[number % 3]
        count = chance.randint(1, totals[method])
        code = wait(
            fork(lambda m=method, c=count, t=target: run(t, lambda trainer: Countdown(trainer, m, c)))
        )
        report[target.name] = [method, count, code, [path.name for path in checkpoints(target)]]
        report[f"{target.name} resumed"] = wait(fork(lambda t=target: run(t)))

    many = folder / "many"
    report["many"] = [
        signalled(many, signal.SIGKILL, chance.randint(1, 2), chance.uniform(0, 0.05)) for _ in range(10)
    ]
    report["many resumed"] = wait(fork(lambda: run(many)))

    for number in range(SIGNALS):
        target = folder / f"signal-{number}"
        kind = (signal.SIGTERM, signal.SIGINT)[number % 2]
        report[target.name] = signalled(target, kind, chance.randint(1, STEPS - 3), chance.uniform(0, 0.05))
        report[f"{target.name} resumed"] = wait(fork(lambda t=target: run(t)))
    report["seconds"] = time.perf_counter() - start
    (folder / "report.json").write_text(json.dumps(report, indent=2))


class SignalOneProcess(TrainerCallback):
    """Process 1 gets a signal in its third step, process 0 none."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def main_of_two(folder: Path) -> None:
    """What each of two processes of one run does; test_two_processes launches them."""
    rank = os.environ["RANK"]
    run(folder / "whole")
    code = None
    try:
        run(folder / "stopped", lambda trainer: trainer.add_callback(SignalOneProcess()))
    except SystemExit as stop:
        code = stop.code
    facts = {"code": code, "checkpoints": [path.name for path in checkpoints(folder / "stopped")]}
    (folder / f"report-{rank}.json").write_text(json.dumps(facts))
    run(folder / "stopped")


# ---- the tests


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("runs"), "tests.slow.test_kill")


def report(runs: Path) -> dict[str, Any]:
    return json.loads((runs / "report.json").read_text())


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if "second" not in name and "runtime" not in name}


def log_rows(path: Path) -> list[dict[str, Any]]:
    with open(path, newline="") as file:
        return [without_times(row) for row in csv.DictReader(file)]


def assert_same(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for name in expected:
            assert_same(found[name], expected[name], f"{where} {name}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{where} {index}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


def assert_ends_like(found: Path, expected: Path, ranks: int = 1) -> None:
    """The same to the bit: final model, raw and averaged weights, optimizer, schedule, random numbers, both
    logs.
    """
    final, reference = found / f"checkpoint-{STEPS}", expected / f"checkpoint-{STEPS}"
    assert_same(
        load_file(found / "final/model.safetensors"), load_file(expected / "final/model.safetensors"), "final"
    )
    for name in (
        "model.safetensors",
        "training_weights.safetensors",
        *(f"log_window_{r}.safetensors" for r in range(ranks)),
    ):
        assert_same(load_file(final / name), load_file(reference / name), name)
    for name in ("optimizer.pt", "scheduler.pt"):
        assert_same(torch.load(final / name), torch.load(reference / name), name)
    for name in ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]:
        states = [torch.load(path / name, weights_only=False) for path in (final, reference)]
        assert_same(*({key: state[key] for key in ("python", "cpu")} for state in states), name)
    rows = [
        [without_times(row) for row in json.loads((path / "history.json").read_text())]
        for path in (found, expected)
    ]
    assert_same(*rows, "history")
    states = [json.loads((path / "trainer_state.json").read_text()) for path in (final, reference)]
    assert_same(*([without_times(row) for row in state["log_history"]] for state in states), "state")
    assert_same(log_rows(found / "log.csv"), log_rows(expected / "log.csv"), "log.csv")
    assert (found / "best.json").read_text() == (expected / "best.json").read_text()
    assert not [path.name for path in found.iterdir() if path.name.startswith("_")]


@pytest.mark.parametrize("number", range(KILLS))
def test_a_run_killed_at_a_random_moment_ends_like_one_that_was_not(number: int, runs: Path) -> None:
    facts = report(runs)
    assert facts[f"kill-{number}"][2] == -signal.SIGKILL
    assert facts[f"kill-{number} resumed"] == 0
    assert_ends_like(runs / f"kill-{number}", runs / "whole")


def test_a_run_killed_ten_times_ends_like_one_that_was_not(runs: Path) -> None:
    assert report(runs)["many"] == [-signal.SIGKILL] * 10
    assert report(runs)["many resumed"] == 0
    assert_ends_like(runs / "many", runs / "whole")


@pytest.mark.parametrize("number", range(SIGNALS))
def test_a_run_stopped_by_a_signal_ends_like_one_that_was_not(number: int, runs: Path) -> None:
    assert report(runs)[f"signal-{number}"] == (143, 130)[number % 2]
    assert report(runs)[f"signal-{number} resumed"] == 0
    assert_ends_like(runs / f"signal-{number}", runs / "whole")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
