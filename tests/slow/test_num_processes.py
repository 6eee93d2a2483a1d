"""`fixastep train --num_processes 2`, against a launch by Accelerate's own command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.short_runs import SHORT


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPE = ["--config", "recipes/digits/quickstart.yaml"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
FIXASTEP = [sys.executable, "-m", "hf_fixastep", "train", "--num_processes", "2"]


def test_two_processes_train_as_those_of_accelerate_launch(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", "recipes/accelerate/two_cpus.yaml", "recipes/train.py"]
    for name, command in (("own", FIXASTEP), ("launched", launch)):
        more = ["--use_cpu", "true"] if name == "launched" else []
        words = [*command, *RECIPE, "--output_dir", str(tmp_path / name), *SHORT, *more]
        done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    for name in ("model.safetensors", "test_predictions.csv"):
        own, launched = ((tmp_path / folder / name).read_bytes() for folder in ("own", "launched"))
        assert own == launched, name


def test_a_signal_reaches_the_training_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    more = ["--output_dir", str(tmp_path / "run"), *SHORT, "--max_steps", "100000"]
    with subprocess.Popen([*FIXASTEP, *RECIPE, *more], cwd=ROOT, env=ENVIRONMENT) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("run/checkpoint-*")) and time.monotonic() < deadline:
            time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) != 0
    count = len(list(tmp_path.glob("run/checkpoint-*")))
    assert count > 0
    time.sleep(2)
    assert len(list(tmp_path.glob("run/checkpoint-*"))) == count
