"""Private names of other libraries live in `_compat` alone."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Trainer

import hf_fixastep
from hf_fixastep import FixAStepTrainer


PACKAGE = Path(hf_fixastep.__file__).parent
OUTSIDE = [path for path in sorted(PACKAGE.rglob("*.py")) if "_compat" not in path.parts]
# Documented, although they begin with an underscore: named tuples, `os._exit`, and what builders of
# `datasets`, metrics of `evaluate` and models of transformers have to define.
DOCUMENTED = {
    "_exit",
    "_replace",
    "_asdict",
    "_fields",
    "_info",
    "_split_generators",
    "_generate_examples",
    "_compute",
}
DOCUMENTED |= {"_init_weights", "_no_split_modules"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def touches(tree: ast.AST) -> Iterator[str]:
    """Private modules and names that are imported, and private attributes of all but `self` and `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if any(map(is_private, alias.name.split("."))))
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            names = [*parts, *(alias.name for alias in node.names)]
            if parts[0] != "hf_fixastep" and node.level == 0:
                yield from filter(is_private, names)
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not own:
                yield ast.unparse(node)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._functorch import config", ["_functorch"]),
        ("from torch.nn.modules.batchnorm import _BatchNorm", ["_BatchNorm"]),
        ("torch._foreach_copy_(a, b)", ["torch._foreach_copy_"]),
        ("super()._save(folder)", ["super()._save"]),
        ("self._own, __name__, output._replace(a=1)", []),
    ],
)
def test_every_kind_of_touch_is_found(source: str, found: list[str]) -> None:
    assert list(touches(ast.parse(source))) == found


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_private_name_of_another_library_is_read(path: Path) -> None:
    assert list(touches(ast.parse(path.read_text()))) == []


def private_overrides(kind: type, ours: str) -> set[str]:
    """Private names that a class has from modules of ours and that a class of somebody else has as well."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("hf_fixastep")]
    foreign = {name for base in kind.__mro__ if base not in own for name in dir(base)}
    made_by_metaclasses = {"_abc_impl", "_backward_cls"}
    names = {name for base in own if base.__module__.startswith(ours) for name in vars(base)}
    return {name for name in names & foreign if is_private(name)} - made_by_metaclasses


def classes(path: Path) -> Iterator[type]:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    name = ".".join(["hf_fixastep", *(part for part in parts if part != "__init__")])
    module = importlib.import_module(name)
    yield from (kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == name)


@pytest.mark.parametrize(
    "path",
    [path for path in OUTSIDE if path.stem != "__main__"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_class_overrides_a_private_name_of_another_library(path: Path) -> None:
    found = {kind.__name__: private_overrides(kind, kind.__module__) for kind in classes(path)}
    assert {name: names for name, names in found.items() if names} == {}


def test_the_trainer_overrides_five_private_methods_of_its_base() -> None:
    found = private_overrides(FixAStepTrainer, "hf_fixastep._compat")
    assert found == {
        "_save_checkpoint",
        "_load_from_checkpoint",
        "_load_best_model",
        "_push_from_checkpoint",
        "_get_grad_norm",
    }
    assert all(callable(getattr(Trainer, name)) for name in found)
