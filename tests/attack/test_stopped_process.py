"""A process that stands still does not hold the others for longer than `ddp_timeout`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.short_runs import make_trainer


pytestmark = pytest.mark.slow


class StopOneProcess(TrainerCallback):
    """Process 1 stands still at the begin of its third step, or when that has ended."""

    def __init__(self, moment: str) -> None:
        setattr(self, moment, self.stop)

    def stop(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and args.process_index == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


def main(folder: Path, moment: str) -> None:
    trainer = make_trainer(folder, max_steps=50, ddp_timeout=5)
    trainer.callback_handler.callbacks.insert(0, StopOneProcess(moment))  # before the signals are compared
    trainer.train()


@pytest.mark.parametrize("moment", ["on_step_begin", "on_step_end"])
def test_the_others_end_when_a_process_stands_still(moment: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "tests.attack.test_stopped_process", str(tmp_path), moment]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "one"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            words,
            env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        _, said = processes[0].communicate(timeout=90)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert processes[0].returncode == 1
    assert "imed out" in said


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
