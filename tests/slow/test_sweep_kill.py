"""Sweeps that are killed, stopped, started twice, or have runs that fail."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml


pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TIMES = ["seconds", "resumed", "steps_per_second"]
GRID = {
    "settings": {"max_steps": 30, "logging_steps": 5, "eval_steps": 5, "save_steps": 5, "cpu_threads": 1},
    "grids": [
        {"seed": [0, 1], "loss": {"supervised": {"config": "recipes/digits/supervised.yaml"}}},
        {"seed": [0, 1], "loss": {"pi_model": {"config": "recipes/digits/pi_model.yaml"}}},
    ],
}


def start(folder: Path, *more: str, grid: dict = GRID) -> subprocess.Popen:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.parent / "grid.yaml"
    path.write_text(yaml.safe_dump(grid))
    words = ["-m", "hf_fixastep", "sweep", "--config", str(path), "--output_dir", str(folder), *more]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, **pipes)


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def table(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "results.parquet")


def comparable(frame: pd.DataFrame) -> list[dict]:
    """Rows without what depends on the machine's mood; arrays as lists."""
    rows = frame.drop(columns=TIMES).to_dict("records")
    return [{k: v.tolist() if hasattr(v, "tolist") else str(v) for k, v in row.items()} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "runs"
    finish(start(folder))
    return folder


def test_a_sweep_leaves_one_row_per_run_and_does_not_repeat_finished_ones(whole):
    assert len(table(whole)) == 4
    before = (whole / "results.parquet").read_bytes()
    logs = {path: path.read_bytes() for path in whole.glob("*/train.log")}
    assert "4 finished already" in finish(start(whole))
    assert {path: path.read_bytes() for path in whole.glob("*/train.log")} == logs
    assert (whole / "results.parquet").read_bytes() == before


def test_a_sweep_killed_at_random_moments_ends_with_the_same_table(whole, tmp_path):
    chance = random.Random(0)
    folder = tmp_path / "runs"
    for _ in range(3):
        process = start(folder, "--jobs", "2")
        deadline = time.monotonic() + 300
        while not list(folder.glob("*/train.log")) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(chance.uniform(0, 6))
        process.kill()
        process.wait()
    finish(start(folder))
    assert comparable(table(folder)) == comparable(table(whole))


def test_a_stopped_sweep_has_its_runs_save_and_goes_on_from_there(tmp_path):
    folder = tmp_path / "runs"
    grid = {"settings": GRID["settings"] | {"max_steps": 4000}, "grids": GRID["grids"][1:]}
    process = start(folder, grid=grid)
    deadline = time.monotonic() + 300
    while not list(folder.glob("*/checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    (log,) = folder.glob("*/train.log")
    assert "Stopped by SIGTERM after step" in log.read_text()


def test_two_sweeps_in_one_folder_share_the_work(whole, tmp_path):
    folder = tmp_path / "runs"
    pair = [start(folder), start(folder)]
    for process in pair:
        finish(process)
    assert comparable(table(folder)) == comparable(table(whole))
    trained = [log.read_text().count("train_runtime") for log in folder.glob("*/train.log")]
    assert trained == [1] * 4


def test_shards_make_the_table_of_the_whole(whole, tmp_path):
    folder = tmp_path / "runs"
    for part in ("0/2", "1/2"):
        finish(start(folder, "--shard", part))
        assert len(table(folder)) == (2 if part == "0/2" else 4)
    assert comparable(table(folder)) == comparable(table(whole))


def test_a_failed_run_is_reported_with_its_log_and_the_rest_goes_on(tmp_path):
    folder = tmp_path / "runs"
    data = {"good": {}, "bad": {"labels_per_class": 500}}
    grid = {
        "settings": GRID["settings"] | {"max_steps": 5},
        "grids": [GRID["grids"][0] | {"seed": [0], "labels": data}],
    }
    process = start(folder, grid=grid)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    assert "1 runs failed" in output
    assert "labels_per_class is 500" in output
    assert "train.log" in output
    assert len(table(folder)) == 1
