"""The help of one command, from the dataclasses that hold its options."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import textwrap
from functools import partial
from typing import Any

from hf_fixastep.cli.commands import Command


WIDTH = 80
SAMPLES = {"bool": "BOOL", "int": "N", "float": "X", "dict": "YAML", "list": "A B"}


def print_help(name: str, command: Command) -> None:
    """What it does, how it is called, an example, and its own options."""
    module = importlib.import_module(f"hf_fixastep.{command.module}")
    groups, example = groups_of(module), f"example:\n  {command.example}"
    if command.own_parser and not groups:
        with contextlib.suppress(SystemExit):
            module.main(["--help"])
        print(f"\n{example}")
        return
    parser = argparse.ArgumentParser(
        f"fixastep {name}",
        usage=f"fixastep {name} {command.usage}".rstrip(),
        description=f"{command.summary}\n\n{example}",
        epilog=textwrap.fill(command.more, WIDTH),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=28, width=WIDTH),
        add_help=False,
    )
    seen: set[str] = set()
    for title, kind in groups.items():
        group = parser.add_argument_group(title)
        for field in own_fields(kind):
            if field.name not in seen:
                group.add_argument(f"--{field.name}", metavar=sample(field), help=help_of(field))
            seen.add(field.name)
    print(parser.format_help().rstrip())


def groups_of(module: Any) -> dict[str, Any]:
    """The dataclasses of a command's options: those it lists, or else those it calls its arguments."""
    if hasattr(module, "OPTIONS"):
        return module.OPTIONS
    kinds = [kind for name, kind in vars(module).items() if name.endswith("Arguments")]
    own = [kind for kind in kinds if kind.__module__ != "hf_fixastep.runs.arguments"]
    return {str(kind.__doc__).split("\n")[0].rstrip("."): kind for kind in own}


def own_fields(kind: Any) -> list[dataclasses.Field]:
    """Without those of the Trainer."""
    foreign = [base for base in kind.__mro__ if not base.__module__.startswith("hf_fixastep.")]
    bases = [base for base in foreign if dataclasses.is_dataclass(base)]
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    return [field for field in dataclasses.fields(kind) if field.init and field.name not in inherited]


def sample(field: dataclasses.Field) -> str:
    """What a value looks like, by the type of the field."""
    kind = str(getattr(field.type, "__name__", field.type)).split("[")[0].split(" ")[0]
    return SAMPLES.get(kind, "TEXT")


def help_of(field: dataclasses.Field) -> str:
    text = str(field.metadata.get("help", "")).replace("%", "%%")
    text, default = text.replace(" If not given, as the preset says.", " [by preset]"), field.default
    if default in (None, "", dataclasses.MISSING) or isinstance(default, dict):
        return text
    shown = str(default).lower() if isinstance(default, bool) else default
    return f"{text} [{shown}]"
