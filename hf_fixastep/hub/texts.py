"""Texts that users give, made safe for a card, and settings without what nobody else should know."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from hf_fixastep.runs.recipe import RecipeLoader


# Controls, formats such as right-to-left overrides, surrogates, private, unassigned, separators.
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
# An underscore inside a word is no markup, nor is a colon before a space; a point before a letter could make
# a link.
MARKUP = re.compile(r"[^\w \-.,/()':;=+]|(?<![^\W_])_|_(?![^\W_])|:(?! )|\.(?=[^\W\d])")
# Settings that are told to nobody.
PRIVATE = re.compile(r"output_dir|push_to_hub|hub_.*|.*_token|resume_from_checkpoint")
MAPPING = re.compile(r".*_(kwargs|args|config)")  # settings that are mappings, also where given as text
YAML_START = re.compile(r"\s*([{\[!#%&]|---|-\s)")
# Inside other text, all of an absolute path but its last part.
FOLDERS = re.compile(r"(?<![\w./\\:~])(file:/*|~|\.\.|[A-Za-z]:)?[/\\]([^\s/\\'\",;{}\[\]]+[/\\])+")
LOCAL_PATH = re.compile(r"\s*([/~\\]|\.\.[/\\]|[A-Za-z]:[/\\]|file:)")


class Reader(RecipeLoader):
    """As for recipes, but a key may be there twice: of text that is not read, paths are cut less surely."""

    construct_mapping = yaml.SafeLoader.construct_mapping


def plain(value: Any, limit: int = 100) -> str:
    """One line of limited length, without control, bidirectional or otherwise invisible characters."""
    text = " ".join(str(value)[: 10 * limit].split())
    text = "".join("\ufffd" if unicodedata.category(c) in INVISIBLE else c for c in text)
    return (text if len(text) <= limit else f"{text[: limit - 1]}…") or "(empty)"


def escape(value: Any, limit: int = 100) -> str:
    """The same as Markdown that shows these very characters after other words: entities are no markup."""
    return MARKUP.sub(lambda match: f"&#{ord(match[0])};", plain(value, limit))


def shared(value: Any) -> Any:
    """What may leave this machine of a setting: paths that tell where files are keep their last part only.

    A mapping or list that was given as text is read first, so that what is inside it is cut as well.
    """
    if isinstance(value, Mapping):
        return {
            shared_text(key) if isinstance(key, str) else key: shared(read_setting(str(key), item))
            for key, item in value.items()
            if not PRIVATE.fullmatch(str(key))
        }
    if isinstance(value, (list, tuple)):
        return [shared(item) for item in value]
    if not isinstance(value, (str, PurePath)):
        return value
    inner = read_setting("", str(value))
    return shared_text(inner) if isinstance(inner, str) else shared(inner)


def read_setting(key: str, value: Any) -> Any:
    """A mapping or list that was given as YAML, by the name of its setting or by how it begins."""
    if not isinstance(value, str) or not (MAPPING.fullmatch(key) or YAML_START.match(value)):
        return value
    try:
        inner = yaml.load(value, Reader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return value
    return inner if isinstance(inner, (dict, list)) else value


def shared_text(value: str) -> str:
    if LOCAL_PATH.match(value) and "\n" not in value:
        kind = PureWindowsPath if "\\" in value else PurePosixPath
        return kind(value.strip()).name
    return FOLDERS.sub("", value)


def template_path(name: str) -> Path:
    """A file of `hub_cards`, which a wheel holds inside the package and a clone beside it."""
    package = Path(__file__).parents[1]
    place = next(f for f in (package / "hub_cards", package.parent / "hub_cards") if f.is_dir())
    return place / name
