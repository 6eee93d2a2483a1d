"""Texts that users give, made safe for a card, and settings without what nobody else should know."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml


# Controls, formats such as right-to-left overrides, surrogates, private, unassigned, separators.
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
# An underscore inside a word is no markup, nor is a colon before a space; a point before a letter could make
# a link.
MARKUP = re.compile(r"[^\w \-.,/()':;=+]|(?<![^\W_])_|_(?![^\W_])|:(?! )|\.(?=[^\W\d])")
# Settings that are told to nobody.
PRIVATE = re.compile(r"output_dir|push_to_hub|hub_.*|.*_token|resume_from_checkpoint")
LOCAL_PATH = re.compile(r"\s*([/~\\]|\.\.[/\\]|[A-Za-z]:[/\\]|file:)")


def plain(value: Any, limit: int = 100) -> str:
    """One line of limited length, without control, bidirectional or otherwise invisible characters."""
    text = " ".join(str(value)[: 10 * limit].split())
    text = "".join("\ufffd" if unicodedata.category(c) in INVISIBLE else c for c in text)
    return (text if len(text) <= limit else f"{text[: limit - 1]}…") or "(empty)"


def escape(value: Any, limit: int = 100) -> str:
    """The same as Markdown that shows these very characters after other words: entities are no markup."""
    return MARKUP.sub(lambda match: f"&#{ord(match[0])};", plain(value, limit))


def shared(value: Any) -> Any:
    """What may leave this machine of a setting: paths that tell where files are keep their last part only."""
    if isinstance(value, Mapping):
        return {key: shared(item) for key, item in value.items() if not PRIVATE.fullmatch(str(key))}
    if isinstance(value, (list, tuple)):
        return [shared(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.lstrip()[:1] in ("{", "["):  # a mapping or list given on the command line
        try:
            inner = yaml.safe_load(value)
        except yaml.YAMLError:
            inner = None
        if isinstance(inner, (dict, list)):
            return shared(inner)
    if LOCAL_PATH.match(value):
        kind = PureWindowsPath if "\\" in value else PurePosixPath
        return kind(value.strip()).name
    return value


def template_path(name: str) -> Path:
    """A file of `hub_cards`, which a wheel holds inside the package and a clone beside it."""
    package = Path(__file__).parents[1]
    place = next(f for f in (package / "hub_cards", package.parent / "hub_cards") if f.is_dir())
    return place / name
