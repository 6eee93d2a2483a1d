"""A search that is killed at any moment and started again ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml


pytest.importorskip("optuna", reason='a search needs Optuna: pip install "hf_fixastep[search]"')
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TRIALS = 8


def start(folder: Path, *launcher: str) -> subprocess.Popen:
    space = {"learning_rate": {"low": 0.001, "high": 0.1, "log": True}, "weight_decay": [5e-4, 5e-3]}
    settings = {"config": "recipes/digits/fixmatch.yaml", "trials": TRIALS, "max_steps": 20, "eval_steps": 4}
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({**settings, "space": space}))
    words = ["-m", "hf_fixastep", "search", "--config", str(path), "--output_dir", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, *words, "--disable_tqdm", "true", "--use_cpu", "true"],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(folder: Path) -> list[dict[str, Any]]:
    process = start(folder)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return json.loads((folder / "search.json").read_text())["trials"]


def kill_after(folder: Path, trials: int, delay: float) -> None:
    """SIGKILL so many seconds after so many trials of this process have ended."""
    process = start(folder)
    lines = 0
    for line in process.stdout or ():
        lines += line.startswith("[I")  # Optuna's: one before the first trial, and one for each that ended
        if lines == 1 + trials:
            break
    time.sleep(delay)
    process.kill()
    process.wait()


def numbers(trials: list[dict[str, Any]]) -> list[tuple]:
    ended = [trial for trial in trials if trial["state"] != "interrupted"]
    return [(trial["state"], trial["values"], trial["evaluations"]) for trial in ended]


def test_a_killed_search_ends_like_one_that_was_not(tmp_path):
    whole = numbers(finish(tmp_path / "whole"))
    assert len(whole) == TRIALS
    chance = random.Random(0)
    for trials in (0, 1, 0, 2):
        kill_after(tmp_path / "killed", trials, chance.uniform(0, 2))
    trials = finish(tmp_path / "killed")
    assert numbers(trials) == whole
    assert any(trial["state"] == "interrupted" for trial in trials)
    assert not (tmp_path / "killed/_trial").exists()


def test_several_processes_are_refused_in_one_sentence(tmp_path):
    process = start(tmp_path / "two", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    output, _ = process.communicate()
    assert process.returncode != 0
    assert "error: A search runs in one process, but 2 were started; start it by itself." in output
