"""Supervisors signal all processes of a run: the step in progress is saved nevertheless."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_fixastep.checkpoints import newest_complete
from tests.short_runs import make_trainer, random_images


pytestmark = pytest.mark.slow

STARTED = "started"  # a file: the workers are at work


class Started(TrainerCallback):
    def __init__(self, folder: Path, in_evaluation: bool) -> None:
        self.file, self.in_evaluation = folder / STARTED, in_evaluation
        self.images = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and not self.in_evaluation:
            self.file.touch()
        time.sleep(0.05)

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        self.images += 1
        if self.images == 4:  # by now both workers have handed in one
            self.file.touch()
        time.sleep(0.05)


def main(folder: Path, in_evaluation: bool, persistent: bool) -> None:
    settings: dict[str, Any] = {"max_steps": 500, "dataloader_num_workers": 2}
    settings |= {"dataloader_persistent_workers": persistent}
    if in_evaluation:
        settings |= {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1}
    objects = {"eval_dataset": random_images(40, seed=3, labeled=True)} if in_evaluation else {}
    trainer = make_trainer(folder, objects=objects, **settings)
    trainer.add_callback(Started(folder, in_evaluation))
    globals()["kept"] = trainer  # until the process ends, as in a script
    trainer.train()


@pytest.mark.parametrize(
    ("number", "in_evaluation", "persistent"),
    [
        (signal.SIGTERM, False, False),
        (signal.SIGTERM, False, True),
        (signal.SIGTERM, True, False),
        (signal.SIGINT, False, False),
    ],
)
def test_a_signal_to_all_processes_saves_the_step(
    number: signal.Signals, in_evaluation: bool, persistent: bool, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "tests.attack.test_signals", str(tmp_path)]
    words += [str(int(in_evaluation)), str(int(persistent))]
    process = subprocess.Popen(words, start_new_session=True, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / STARTED).exists() and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number, said
    assert newest_complete(tmp_path)[0] is not None
    assert "Traceback" not in said


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(word == "1" for word in sys.argv[2:]))
