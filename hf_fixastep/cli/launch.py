"""Start a command of fixastep in several processes of this machine."""

from __future__ import annotations

import os
import sys

import torch


def take_processes(argv: list[str]) -> tuple[int, list[str]]:
    """The value of --num_processes, and the other words."""
    words = [
        part
        for word in argv
        for part in (word.split("=", 1) if word.startswith("--num_processes=") else [word])
    ]
    if "--num_processes" not in words:
        return 1, argv
    at = words.index("--num_processes")
    value = words[at + 1] if at + 1 < len(words) else "missing"
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"num_processes is {value}, but it has to be a whole number of at least 1.")
    if "LOCAL_RANK" in os.environ:
        raise ValueError(
            "num_processes is given, but a launcher started this process: give it to the launcher."
        )
    return int(value), words[:at] + words[at + 2 :]


def launch(number: int, command: str, argv: list[str], use_cpu: bool = False) -> None:
    """Become `accelerate launch`, so that signals and the exit code are those of the command."""
    words = ["--multi_gpu", "--num_processes", str(number), "--num_machines", "1", "--main_process_port", "0"]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "hf_fixastep", command, *argv]
    environment = dict(os.environ)
    if use_cpu or not torch.cuda.is_available():
        # --cpu would start a single process, and MULTI_CPU as well (Accelerate 1.15).
        environment["ACCELERATE_USE_CPU"] = "true"
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", "accelerate.commands.launch", *words], environment)
