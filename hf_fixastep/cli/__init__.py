"""The command `fixastep`, one file per sub-command."""

from __future__ import annotations

import importlib
import sys

from hf_fixastep.checks import check_choice


# Sub-commands by the module whose `main` runs them; imported when called, so that `fixastep` answers quickly.
COMMANDS = {
    "train": "cli.train",
    "evaluate": "cli.evaluate",
    "predict": "echo.prediction",
    "heart2heart": "echo.evaluation",
    "phantom": "echo.phantom",
    "compare": "cli.compare",
    "sweep": "study.sweep",
    "search": "study.search",
    "gallery": "study.gallery",
    "doctor": "data.doctor",
    "push": "cli.push",
    "demo": "cli.demo",
    "benchmark": "study.benchmark",
}


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv:
            raise ValueError(f"Give a command: {', '.join(COMMANDS)}.")
        name = COMMANDS[check_choice("command", argv[0], COMMANDS)]
    except ValueError as error:
        sys.exit(f"error: {error}")
    importlib.import_module(f"hf_fixastep.{name}").main(argv[1:])
