"""Run a grid of trainings, each in a process of its own, and collect them in one table.

    fixastep sweep --config sweeps/digits [--profile cpu] [--jobs 2] [--shard 0/4] [--key value ...]

A file of a sweep names grids of settings; recipes/sweeps holds some. A sweep that was stopped goes on where
it was, and several may share a folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from hf_fixastep.checkpoints import checkpoints
from hf_fixastep.checks import check_choice
from hf_fixastep.config import FixAStepConfig
from hf_fixastep.disk import write_atomically
from hf_fixastep.procedures.rounds import PROCEDURE
from hf_fixastep.runs import training
from hf_fixastep.runs.arguments import DataArguments, ModelArguments, parse
from hf_fixastep.runs.folder import METRICS
from hf_fixastep.runs.recipe import read, read_recipe
from hf_fixastep.study.results import FINISHED, NOT_FINGERPRINTED, TABLE, read_run, write_table


TYPES = (DataArguments, ModelArguments, FixAStepConfig)
# Files in the folder of each run, besides those that any run leaves.
SETTINGS_FILE, TRAIN_LOG, CLAIM = "settings.yaml", "train.log", "_claim"
TAKEN = 75  # exit code of a run that another sweep is at
POLL = 5.0  # seconds between looks at such a run


@dataclass
class SweepArguments:
    """Which part of a sweep to run, and how."""

    profile: str | None = field(default=None, metadata={"help": "One of the file's profiles."})
    jobs: int = field(default=1, metadata={"help": "Runs at the same time."})
    shard: str = field(default="0/1", metadata={"help": "Part i of n of the runs, as i/n with i from 0."})
    dry_run: bool = field(default=False, metadata={"help": "List the runs and start none."})


# ---- from the file to runs


def expand(grid: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and settings of every combination of one choice per axis; later axes win."""
    axes = [list(choices(axis, values)) for axis, values in grid.items()]
    for combination in itertools.product(*axes):
        settings: dict[str, Any] = {}
        for _, chosen in combination:
            settings |= chosen
        yield "-".join(name for name, _ in combination), settings


def choices(axis: str, values: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of a list, each value of the settings that the axis names; of a mapping, each named set of settings."""
    if isinstance(values, dict):
        for name, settings in values.items():
            yield str(name), settings or {}
        return
    if not isinstance(values, list) or not values:
        raise ValueError(
            f"Axis {axis} is {values!r}, but expected a list of values, or names with their settings."
        )
    names = [name.strip() for name in axis.split(",")]
    for value in values:
        yield f"{names[0]}{value}", dict.fromkeys(names, value)


def with_recipe(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings on top of those of the recipe that they name."""
    settings = dict(settings)
    path = settings.pop("config", None)
    return settings if path is None else cached_recipe(path) | settings


cached_recipe = functools.cache(read_recipe)


def plan(file: dict[str, Any], profile: str | None, overrides: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All runs by name, each with its settings; a run that several grids name is one run."""
    for key in file:
        check_choice("key of a sweep", key, ("settings", "grids", "profiles"))
    chosen: dict[str, Any] = {}
    if profile is not None:
        chosen = file.get("profiles", {})[check_choice("profile", profile, file.get("profiles", {}))]
        for key in chosen:
            check_choice(f"key of profile {profile}:", key, ("settings", "grids"))
    shared = (file.get("settings") or {}) | (chosen.get("settings") or {})
    runs, seen = {}, set()
    for grid in chosen.get("grids") or file["grids"]:
        for name, settings in expand(grid):
            whole = with_recipe(shared | settings | overrides)
            mark = fingerprint(whole)
            if mark not in seen:
                seen.add(mark)
                runs[f"{re.sub('[^A-Za-z0-9_.+-]', '_', name)}-{mark}"] = whole
    return runs


def fingerprint(settings: dict[str, Any]) -> str:
    """A hash of everything that makes a run what it is: another setting is another run."""
    known = {name: value for name, value in settings.items() if name not in NOT_FINGERPRINTED}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:8]


def shard_of(text: str, runs: dict[str, Any]) -> dict[str, Any]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(f"shard is {text}, but expected i/n with i from 0 to n - 1, such as 0/4.")
    return dict(list(runs.items())[int(match[1]) :: int(match[2])])


def command_line(argv: list[str]) -> tuple[Path, SweepArguments, dict[str, dict[str, Any]]]:
    """The folder, how to run, and the runs; settings of the command line go before those of the file."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if len(words) % 2 or not all(name.startswith("--") for name in words[::2]):
        raise ValueError(f"Expected pairs of --name and value, but found {' '.join(argv)!r}.")
    given = {name.removeprefix("--"): text for name, text in zip(words[::2], words[1::2], strict=True)}
    path = given.pop("config", None)
    if path is None:
        raise ValueError("No sweep is named; give --config sweeps/digits, or the path of a file.")
    file = read_recipe(path)
    if not isinstance(file.get("grids"), list):
        raise ValueError(f"{path} has no list of grids, so it is not a sweep; those are in recipes/sweeps/.")
    own = [name for name in given if name in {f.name for f in dataclasses.fields(SweepArguments)}]
    args, _ = parse((SweepArguments,), [word for name in own for word in (f"--{name}", given.pop(name))])
    if args.jobs < 1:
        raise ValueError(f"jobs is {args.jobs}, but it has to be at least 1.")
    name = Path(path).stem if args.profile is None else f"{Path(path).stem}-{args.profile}"
    folder = Path(given.pop("output_dir", f"runs/sweeps/{name}"))
    overrides: dict[str, Any] = {}
    for name, text in given.items():
        overrides |= read(f"--{name}", f"{name}: {text}")
    return folder, args, plan(file, args.profile, overrides)


def check(runs: dict[str, dict[str, Any]]) -> None:
    """Settings are read as the training will read them, before the first one starts; once for all seeds."""
    seeds = {"seed": 0, "split_seed": 0}
    kinds = {fingerprint(settings | seeds): name for name, settings in reversed(runs.items())}
    with tempfile.TemporaryDirectory() as folder:
        for name in reversed(kinds.values()):
            settings = runs[name]
            path = Path(folder) / SETTINGS_FILE
            path.write_text(yaml.safe_dump(settings))
            try:
                parse(TYPES, ["--config", str(path), "--output_dir", folder])
            except ValueError as error:
                raise ValueError(f"Run {name}: {str(error).replace(str(path), 'its settings')}") from error


def batch_of(name: str, settings: dict[str, Any]) -> str:
    """Runs of the same batch share a process: heads on the features of the same images, which take seconds.

    All others have a process of their own.
    """
    if settings.get("trainable") != "head":
        return name
    shared = {f.name for kind in (DataArguments, ModelArguments) for f in dataclasses.fields(kind)}
    return json.dumps({key: settings[key] for key in sorted(shared & settings.keys())})


# ---- the runs of a process


def work(runs: list[tuple[Path, dict[str, Any]]], sweep: Connection) -> None:
    """One run after the other; the exit code is that of the last one that ended with an error."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    threading.Thread(target=stop_with, args=(sweep,), daemon=True).start()
    # Accelerate collects garbage before every training, and would look at all objects of the libraries.
    gc.collect()
    gc.freeze()
    code: Any = 0
    for folder, settings in runs:
        try:
            work_on(folder, settings)
        except SystemExit as end:
            if isinstance(end.code, int) and end.code > 128:  # a signal is for all of them
                raise
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr, flush=True)
            code = end.code if end.code == TAKEN else 1
    sys.exit(code)


def work_on(folder: Path, settings: dict[str, Any]) -> None:
    """Train from the start or from the last checkpoint, unless another sweep is at it or has finished it."""
    folder.mkdir(parents=True, exist_ok=True)
    with claimed(folder):
        if (folder / FINISHED).is_file():
            return
        log = os.open(folder / TRAIN_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        start, resumed = time.monotonic(), bool(checkpoints(folder) or (folder / PROCEDURE).is_file())
        if not resumed:
            (folder / METRICS).unlink(missing_ok=True)
        (folder / SETTINGS_FILE).write_text(yaml.safe_dump(settings))
        argv = [
            "--config",
            str(folder / SETTINGS_FILE),
            "--output_dir",
            str(folder),
            "--disable_tqdm",
            "true",
        ]
        training.main([*argv, "--resume_from_checkpoint", "true"] if resumed else argv)
        facts = {"seconds": round(time.monotonic() - start, 1), "resumed": resumed}
        with write_atomically(folder / FINISHED) as partial:
            partial.write_text(json.dumps(facts))
        for checkpoint in checkpoints(folder):
            shutil.rmtree(checkpoint)


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the run; the system takes the lock back when the process dies."""
    try:
        with FileLock(folder / CLAIM, timeout=0):
            yield
    except Timeout:
        sys.exit(TAKEN)


def is_claimed(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    try:
        with FileLock(folder / CLAIM, timeout=0):
            return False
    except Timeout:
        return True


def stop_with(sweep: Connection) -> None:
    """When the sweep ends or dies, have the training save and stop, unless a signal told it to already."""
    with contextlib.suppress(EOFError, OSError):
        sweep.recv()
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # which the training sets while it stops
        os.kill(os.getpid(), signal.SIGTERM)


# ---- all runs


class Sweep:
    """Starts runs, `jobs` at a time, and keeps the table."""

    def __init__(self, folder: Path, every: dict[str, dict[str, Any]], args: SweepArguments) -> None:
        self.folder, self.every, self.runs, self.jobs = folder, every, shard_of(args.shard, every), args.jobs
        self.rows: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, int] = {}
        self.active: dict[tuple[str, ...], tuple[Any, Connection]] = {}  # processes by their runs
        # The libraries are imported once, not in every run.
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([__name__])

    def run(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.collect()
        waiting = deque(name for name in self.runs if name not in self.rows)
        done = len(self.runs) - len(waiting)
        print(f"{len(self.runs)} runs in {self.folder}, {done} finished already", flush=True)
        try:
            while waiting or self.active:
                while len(self.active) < self.jobs and (names := self.free_runs(waiting)):
                    self.start(names)
                wait([process.sentinel for process, _ in self.active.values()], timeout=POLL)
                if ended := self.ended():
                    self.collect()
                for name, code in ended:
                    if name in self.rows:
                        print(self.progress(name, waiting), flush=True)
                    elif code == TAKEN:
                        waiting.append(name)
                    else:
                        self.failed[name] = code
                        print(f"failed: {name}", flush=True)
        finally:
            for _, connection in self.active.values():
                connection.close()
            for process, _ in self.active.values():
                process.join()
            self.collect()

    def free_runs(self, waiting: deque[str]) -> tuple[str, ...]:
        """The first runs that share a process and that no other sweep is at.

        Those that another sweep has finished are dropped.
        """
        found: list[str] = []
        batch = None
        for name in list(waiting):
            own = batch_of(name, self.runs[name])
            folder = self.folder / name
            if batch not in (None, own) or not ((folder / FINISHED).is_file() or not is_claimed(folder)):
                continue
            waiting.remove(name)
            if not (folder / FINISHED).is_file():
                batch = own
                found.append(name)
        return tuple(found)

    def start(self, names: tuple[str, ...]) -> None:
        theirs, ours = self.context.Pipe(duplex=False)
        runs = [(self.folder / name, self.runs[name]) for name in names]
        process = self.context.Process(target=work, args=(runs, theirs), name=names[0])
        process.start()
        theirs.close()
        self.active[names] = process, ours

    def ended(self) -> list[tuple[str, int]]:
        over = [names for names, (process, _) in self.active.items() if not process.is_alive()]
        codes = []
        for names in over:
            process, connection = self.active.pop(names)
            connection.close()
            codes += [(name, process.exitcode) for name in names]
        return codes

    def collect(self) -> None:
        """Write the table of all finished runs of the grid, also those of other shards and sweeps."""
        with FileLock(self.folder / "_table"):
            for name in self.every.keys() - self.rows.keys():
                if (self.folder / name / FINISHED).is_file():
                    self.rows[name] = read_run(self.folder / name)
            if self.rows:
                write_table(list(self.rows.values()), self.folder / TABLE)

    def progress(self, name: str, waiting: deque[str]) -> str:
        row, done = self.rows[name], len(self.runs.keys() & (self.rows.keys() | self.failed.keys()))
        active = [each for names in self.active for each in names]
        left = sum(self.expected(other) for other in (*waiting, *active)) / self.jobs
        accuracy = f"validation accuracy {100 * row['validation_accuracy']:.1f} %, {row['seconds']:.0f} s"
        return f"[{done}/{len(self.runs)}] {name}: {accuracy}; about {timedelta(seconds=round(left))} left"

    def expected(self, name: str) -> float:
        """Seconds, as runs of the same loss took so far, or else all runs."""
        loss = self.runs[name].get("loss")
        whole = [row for row in self.rows.values() if not row["resumed"]] or list(self.rows.values())
        times = [row["seconds"] for row in whole if row["loss"] == loss] or [row["seconds"] for row in whole]
        return sum(times) / len(times)

    def report(self) -> str:
        """What failed, each with the end of its log."""
        lines = []
        for name in self.failed:
            log = self.folder / name / TRAIN_LOG
            text = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
            lines.append(f"{name}: {text[-1] if text else 'no output'} ({log})")
        return "\n".join(lines)


def main(argv: list[str]) -> None:
    try:
        folder, args, every = command_line(argv)
        runs = shard_of(args.shard, every)
        check(runs)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    if args.dry_run:
        print("\n".join(runs))
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sweep = Sweep(folder, every, args)
    try:
        sweep.run()
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"{len(sweep.rows)} of {len(every)} runs are in {folder / TABLE}.")
    if sweep.failed:
        failed = f"{len(sweep.failed)} runs failed; the same command tries them again."
        sys.exit(f"error: {failed}\n{sweep.report()}")
