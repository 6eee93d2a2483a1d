"""Embedding that is killed, shared by two processes, or fails on one of them.

All killed runs are forks of one launched process that has imported everything and computed nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_fixastep.cli import embed as command
from hf_fixastep.features import embed as module
from hf_fixastep.features.part import CHUNK
from tests.features.networks import pictures, tiny_backbone, tiny_network, tiny_processor
from tests.slow.launching import ROOT, TWO_PROCESSES, launch
from tests.slow.test_kill import fork, kill_within, wait


pytestmark = pytest.mark.slow

KILLS = 10


def words(folder: Path, cache: str) -> list[str]:
    data = ["--dataset", "digits_open_set", "--weak", "2", "--strong", "1"]
    return ["--model", str(folder / "network"), "--cache_dir", str(folder / cache), *data]


def save_network(folder: Path) -> Path:
    tiny_network().save_pretrained(folder / "network")
    tiny_processor().save_pretrained(folder / "network")
    return folder


def parts(cache: Path) -> dict[str, str]:
    """Features, hashes and notes on unreadable images, as hashes of their files."""
    files = sorted(cache.glob("*/part-*.npy"))
    return {str(file.relative_to(cache)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# ---- what the launched processes do


def embed_all(folder: Path, cache: str) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    command.main(words(folder, cache))


def killed(folder: Path, cache: str, delay: float) -> int:
    return kill_within(lambda: embed_all(folder, cache), delay, lambda: shutil.rmtree(folder / cache))


def main_of_one(folder: Path) -> None:
    chance = random.Random(0)
    assert wait(fork(lambda: embed_all(folder, "first"))) == 0  # builds the data set
    start = time.perf_counter()
    assert wait(fork(lambda: embed_all(folder, "whole"))) == 0
    seconds = time.perf_counter() - start
    report: dict[str, Any] = {"apart": [], "one": [], "resumed": []}
    for number in range(KILLS):
        report["apart"].append(killed(folder, f"kill-{number}", chance.uniform(0, seconds)))
        report["resumed"].append(wait(fork(lambda n=number: embed_all(folder, f"kill-{n}"))))
    for _ in range(KILLS):
        report["one"].append(killed(folder, "many", chance.uniform(0, seconds / 4)))
    report["resumed"].append(wait(fork(lambda: embed_all(folder, "many"))))
    (folder / "report.json").write_text(json.dumps(report))


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main_of_two(folder: Path) -> None:
    """Errors of one process, which all have to raise, and then a run without any."""
    rank, split, backbone = int(os.environ["RANK"]), pictures(6 * CHUNK), tiny_backbone()
    report, counted, features = {}, [], module.Work.features

    def run() -> Any:
        return module.embed(split, backbone, weak=0, strong=0, cache_dir=folder / "cache")

    usage, free = namedtuple("usage", "total used free"), shutil.disk_usage
    if rank == 0:
        shutil.disk_usage = lambda path: usage(10, 9, 1)
    report["no room"] = error_of(run)
    shutil.disk_usage = free

    def overflow(self: Any, *args: Any) -> Any:
        if rank == 1:
            raise ValueError("too large")
        time.sleep(1)  # the other has failed by now
        counted.append(rank)
        return features(self, *args)

    module.Work.features = overflow
    report["overflow"] = error_of(run)
    report["chunks"] = len(counted)
    module.Work.features = features
    report["none"] = error_of(run)
    (folder / f"report-{rank}.json").write_text(json.dumps(report))


# ---- the tests


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_network(tmp_path_factory.mktemp("runs"))
    return launch(folder, "tests.slow.test_embed", HF_DATASETS_CACHE=str(folder / "data"))


@pytest.mark.parametrize("cache", [*(f"kill-{number}" for number in range(KILLS)), "many"])
def test_a_run_killed_at_random_moments_ends_like_one_that_was_not(cache: str, runs: Path) -> None:
    expected = parts(runs / "whole")
    assert len(expected) == 4 * 3
    assert parts(runs / cache) == expected


def test_all_runs_were_killed_and_then_finished(runs: Path) -> None:
    report = json.loads((runs / "report.json").read_text())
    assert report["apart"] == report["one"] == [-signal.SIGKILL] * KILLS
    assert set(report["resumed"]) == {0}


def test_two_processes_embed_as_one_does_and_only_the_first_prints(runs: Path) -> None:
    start = [sys.executable, "-m", "hf_fixastep", "embed", "--num_processes", "2", *words(runs, "two")]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_DATASETS_CACHE": str(runs / "data-2")}
    done = subprocess.run(
        start, cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    names = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert names == ["labeled", "unlabeled", "validation", "test"]
    assert parts(runs / "two") == parts(runs / "whole")


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = launch(tmp_path_factory.mktemp("failures"), "tests.slow.test_embed", *TWO_PROCESSES)
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in (0, 1)]


def test_an_error_of_the_first_process_is_raised_by_both(failures: list[dict[str, Any]]) -> None:
    first, second = failures
    assert first["no room"].startswith("OSError: The features of 384 images need ")
    assert second["no room"] == first["no room"]


def test_an_error_of_another_process_ends_both_soon(failures: list[dict[str, Any]]) -> None:
    assert [report["overflow"] for report in failures] == ["ValueError: too large"] * 2
    assert failures[0]["chunks"] <= 2  # of three


def test_after_an_error_both_go_on(failures: list[dict[str, Any]]) -> None:
    assert [report["none"] for report in failures] == ["none"] * 2


if __name__ == "__main__":
    (main_of_two if "RANK" in os.environ else main_of_one)(Path(sys.argv[1]))
