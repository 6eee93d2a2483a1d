"""A procedure that is killed at any moment, between its rounds too, ends as if nothing had happened.

All runs are forks of one launched process that has imported everything and computed nothing.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_fixastep.procedures import CurriculumLabeling, Procedure, SafeStudent
from hf_fixastep.procedures.rounds import PROCEDURE
from tests.procedures.test_procedures import outcome, run
from tests.slow.launching import launch
from tests.slow.test_kill import Countdown, fork, wait


pytestmark = pytest.mark.slow

KILLS = 3  # of each procedure, every one in a later part of it
PROCEDURES: dict[str, Procedure] = {
    "curriculum_labeling": CurriculumLabeling(percent=50),
    "safe_student": SafeStudent(iterations=2),
}


# ---- what the forked processes do


def finish(folder: Path, name: str) -> None:
    run(PROCEDURES[name], folder, resume=(folder / PROCEDURE).is_file())


def watch(folder: Path, name: str, count: int = -1) -> int:
    """Run a procedure to the end, or until so many things have happened in it; how many have."""
    watched = SimpleNamespace(run=run)
    countdown = Countdown(watched, "run", count)  # type: ignore[arg-type]
    watched.run(PROCEDURES[name], folder)
    sys.setprofile(None)
    return countdown.total


def count_events(folder: Path, name: str) -> int:
    reader, writer = os.pipe()
    child = fork(lambda: os.write(writer, str(watch(folder, name)).encode()))  # type: ignore[arg-type]
    os.close(writer)
    assert wait(child) == 0
    total = int(os.read(reader, 100))
    os.close(reader)
    return total


def main(folder: Path) -> None:
    chance, ended = random.Random(0), {}
    for name in PROCEDURES:
        total = count_events(folder / name / "whole", name)
        for number in range(KILLS):
            target = folder / name / f"kill-{number}"
            count = int(total * (number + chance.uniform(0, 0.9)) / KILLS)
            first = wait(fork(lambda t=target, n=name, c=count: watch(t, n, c)))
            ended[f"{name}/{target.name}"] = [first, wait(fork(lambda t=target, n=name: finish(t, n)))]
    (folder / "report.json").write_text(json.dumps(ended, indent=2))


# ---- the tests


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("procedures"), "tests.attack.test_procedure_kill")


@pytest.mark.parametrize("number", range(KILLS))
@pytest.mark.parametrize("name", PROCEDURES)
def test_a_killed_procedure_ends_like_one_that_was_not(name: str, number: int, runs: Path) -> None:
    ended: dict[str, Any] = json.loads((runs / "report.json").read_text())
    assert ended[f"{name}/kill-{number}"] == [-signal.SIGKILL, 0]
    found, expected = outcome(runs / name / f"kill-{number}"), outcome(runs / name / "whole")
    assert found.keys() == expected.keys()
    assert [key for key in expected if found[key] != expected[key]] == []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
