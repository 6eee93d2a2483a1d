"""What is imported is declared, and what is declared is imported."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

import pytest


ROOT = Path(__file__).parents[2]
BY_NAME = ("import_module", "import_reader")  # functions that import the module of this name
# Declared although no module imports them, and who does.
USED_BY_OTHERS = {
    "jinja2": "huggingface_hub, for the templates of cards",
    "tensorboard": "transformers, for report_to",
    "trackio": "transformers, for report_to",
}


def normal(name: str) -> str:
    """The name of a project as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python reads TOML from 3.11 on")
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared() -> set[str]:
    """Projects that the package needs, alone or with an extra, but for those of its tests."""
    extras = [needs for name, needs in project()["optional-dependencies"].items() if name != "test"]
    needs = [*project()["dependencies"], *(need for extra in extras for need in extra)]
    return {normal(re.split(r"[\s\[<>=!~;]", need)[0]) for need in needs}


def imported() -> dict[str, str]:
    """Foreign modules that ours import at any depth, also by name, and one of the files that do."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "hf_fixastep").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(BY_NAME):
                names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            for name in names:
                found.setdefault(name.split(".")[0], str(path.relative_to(ROOT)))
    return {
        name: file for name, file in found.items() if name not in {"hf_fixastep", *sys.stdlib_module_names}
    }


def projects_of(module: str) -> set[str]:
    known = importlib.metadata.packages_distributions()
    if module not in known:
        return {normal(module)}  # an extra that is not installed here
    return {normal(name) for name in known[module]}


def test_every_import_is_declared() -> None:
    missing = {name: file for name, file in imported().items() if not projects_of(name) & declared()}
    assert not missing


def test_every_declared_project_is_imported_or_used_by_one_that_is() -> None:
    used = {name for module in imported() for name in projects_of(module)}
    assert declared() - used == USED_BY_OTHERS.keys()


def test_the_imports_were_found() -> None:
    assert {"torch", "transformers", "scipy", "PIL", "yaml", "nibabel"} <= imported().keys()
