"""fixastep train: train a classifier from a few labels and a pile of unlabeled images."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hf_fixastep.cli.launch import launch, take_processes
from hf_fixastep.runs import training
from hf_fixastep.runs.arguments import option, parse


@dataclass
class LaunchArguments:
    """Which recipe, and how to start it."""

    config: str | None = option(None, "A recipe: a path, or a name such as digits/quickstart.")
    num_processes: int = option(1, "Processes on this machine, started through Accelerate.")


OPTIONS = dict(
    zip(("recipe", "data", "model", "Fix-A-Step"), (LaunchArguments, *training.TYPES), strict=True)
)


def main(argv: list[str]) -> None:
    try:
        number, argv = take_processes(argv)
        if number > 1:
            *_, args, _ = parse(training.TYPES, argv)  # a mistake is said here once, and not by every process
            launch(number, "train", argv, args.use_cpu)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    training.main(argv)
