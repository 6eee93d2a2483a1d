"""Recipes: YAML as people write it, by path or by the name of one that comes with the package."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from hf_fixastep.checks import check_choice


MOST_VALUES = 100_000  # of a file, with those that are there again under another name


class RecipeLoader(yaml.SafeLoader):
    """YAML as people write it: 1e-6 is a number, off and no are words; PyYAML sees text and false.

    A key that is written twice is a mistake, of which PyYAML would take the last one. So are a few lines of
    names for names that stand for more values than memory can hold.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and count_values(node, {}) > MOST_VALUES:
            message = f"its names stand for more than {MOST_VALUES:,} values"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [key for key, count in keys.items() if count > 1]:
            message = f"the key {twice[0]} is there twice"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return super().construct_mapping(node, deep)


RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(true|True|false|False)$"), list("tTfF")
)
RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def count_values(node: Any, known: dict[int, float]) -> float:
    """All values below a node, as often as they are named; endless where one contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = [] if isinstance(node, yaml.ScalarNode) else node.value
        children = [each for pair in inner for each in (pair if isinstance(pair, tuple) else [pair])]
        known[id(node)] = 1 + sum(count_values(each, known) for each in children)
    return known[id(node)]


def read(name: str, text: str) -> dict[str, Any]:
    try:
        settings = yaml.load(text, RecipeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {' '.join(str(error).split())}.") from error
    except RecursionError:
        raise ValueError(f"{name} is nested too deep for settings; write  key: value.") from None
    if not isinstance(settings, dict):
        raise ValueError(
            f"{name} holds no settings, but {text.strip()[:100]!r}; a mapping is written  key: value."
        )
    return settings


def read_mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """A mapping given as such, or as text on the command line."""
    return read(name, value) if isinstance(value, str) else value or {}


def read_yaml(path: str | Path) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ValueError(f"There is no file {path}; give the path of a YAML file.")
    try:
        return read(str(path), Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not YAML, for it is not UTF-8: {error.reason}.") from error


def read_recipe(name: str) -> dict[str, Any]:
    """The settings of a recipe, by path or by name."""
    return read_yaml(find_recipe(name))


def find_recipe(name: str) -> Path:
    """The file of a recipe: a path, or its name in the package, such as digits/quickstart."""
    folder, short = recipes_folder(), name.removeprefix("recipes/").removesuffix(".yaml")
    for path in (Path(name), folder / f"{short}.yaml"):
        if path.is_file():
            return path
    if name.endswith(".yaml"):
        raise ValueError(
            f"There is no file {name}; give the path of a recipe, or a name such as digits/quickstart."
        )
    known = [str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.yaml")]
    return folder / check_choice("recipe", short, known)


def recipes_folder() -> Path:
    """Where the recipes are: a wheel holds them inside the package, a clone beside it."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "recipes", package.parent / "recipes") if folder.is_dir())
