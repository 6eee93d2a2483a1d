"""The command `fixastep`. This module imports little, so that the list of commands appears at once."""

from __future__ import annotations

import importlib
import signal
import sys

from hf_fixastep.checks import check_choice, harmless
from hf_fixastep.cli.commands import COMMANDS, GROUPS


HELP, VERSION = ("--help", "-h"), "--version"


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in HELP:
        print(overview())
        return
    if argv[0] == VERSION:
        print("fixastep", version())
        return
    try:
        check_choice("command", argv[0], [*COMMANDS, *(("--help", VERSION) if argv[0][0] == "-" else ())])
    except ValueError as error:
        sys.exit(f"error: {error}")
    if any(word in HELP for word in argv[1:]):
        from hf_fixastep.cli.help import print_help

        print_help(argv[0], COMMANDS[argv[0]])
        return
    try:
        importlib.import_module(f"hf_fixastep.{COMMANDS[argv[0]].module}").main(argv[1:])
    except SystemExit as end:
        sys.exit(harmless(end.code) if isinstance(end.code, str) else end.code)
    except KeyboardInterrupt:
        print("Interrupted; what is on the disk stays.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def overview() -> str:
    """All commands, one line each."""
    lines = [
        "usage: fixastep COMMAND [--key value ...]",
        "",
        "Image classifiers from a few labels and a large pile of unlabeled images.",
    ]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<13}{each.summary}" for name, each in commands.items())]
    lines += [
        "",
        "Example:",
        "  fixastep train --config digits/quickstart",
        "  fixastep evaluate runs/quickstart",
        "",
        "fixastep COMMAND --help tells more about a command.",
    ]
    return "\n".join(lines)


def version() -> str:
    from importlib import metadata

    try:
        return metadata.version("hf_fixastep")
    except metadata.PackageNotFoundError:
        return "of a folder that is not installed"
