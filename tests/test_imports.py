"""Imports point one way. Read from the source, so that no import is missed because it happens late."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_fixastep


PACKAGE = Path(hf_fixastep.__file__).parent
HUGGING_FACE = {
    "accelerate",
    "datasets",
    "evaluate",
    "huggingface_hub",
    "safetensors",
    "tokenizers",
    "transformers",
}
EVERYWHERE = {"checks", "disk", "runs.folder", "runs.recipe"}  # which import nothing of ours but these
# Which of our modules a module may import besides itself; a package stands for all that is in it. Of two
# rules the first one counts.
ALLOWED = {
    # the bottom
    "checks": set(),
    "disk": set(),
    "runs.folder": set(),
    "_compat.datasets_builder": set(),
    "_compat.datasets_private": set(),
    "_compat.dispatch": set(),
    "_compat.hub_private": set(),
    "_compat.mixed_precision": set(),
    "_compat.patches": set(),
    "_compat.registration": {"models"},
    # one step
    "step": {"_compat.patches"},
    "losses.vat": {"_compat.mixed_precision", "losses", "step"},
    "losses": {"step"},
    "models": {"step"},
    "procedures.rounds": {
        *("_compat.distributed", "checkpoints", "data", "hub.loading", "losses", "procedures.base"),
        "trainer",
    },
    "procedures": {"losses", "step"},
    "methods": {"losses", "procedures"},
    # a training
    "checkpoints": set(),
    "config": {"hub.checks", "losses.presets", "methods", "step"},
    "callbacks": {"checkpoints", "step"},
    "_compat": {"checkpoints", "config", "hub.loading", "losses", "models", "step"},
    "stepping": {"_compat", "data.features", "data.loader", "data.views", "losses.base", "step"},
    "trainer": {
        *("_compat", "callbacks", "config", "data.features", "data.images", "data.loader"),
        *("data.processing", "data.views", "stepping"),
        *("evaluation.metrics", "hub.loading", "hub.pushing", "losses", "models", "step"),
    },
    # data, evaluation and the Hub, which import nothing of a training but for what a push needs
    "hub.checks": set(),
    "hub.texts": set(),
    "hub.client": {"_compat.hub_private", "hub.checks"},
    "hub.screening": {"hub.checks"},
    "hub.loading": {"hub.client", "hub.screening", "step"},
    "hub.pushing": {"config", "hub.callback", "hub.checks"},
    "hub": {"data", "evaluation.intervals", "methods", "models", "runs.report"},
    "data": {"_compat.datasets_builder", "_compat.datasets_private", "hub.client", "hub.texts"},
    "evaluation.report": {"evaluation", "plots"},
    "evaluation": {"_compat.patches", "data", "hub.client", "hub.loading", "step.forwards"},
    "features.probe": {"evaluation.calibration"},
    "plots": set(),
    "echo.evaluation": {"data", "echo", "evaluation", "runs"},
    "echo.prediction": {"data", "echo", "evaluation", "runs"},
    "echo.report": {"evaluation", "plots"},
    "echo": {"data"},
    # the path from images to a saved model, above the training
    "features.candidates": {"config", "evaluation.metrics", "features", "models.head", "trainer"},
    "features.fit_data": {"data", "features"},
    "features.fit_files": {
        *("checkpoints", "evaluation.calibration", "features", "hub.cards", "hub.push", "hub.texts"),
        *("methods", "plots"),
    },
    "features.tuning": {"data", "features", "models.head"},
    "features.verdict": {"features", "study.statistics"},
    "features.fit": {
        *("checkpoints", "data", "evaluation", "features", "hub.loading", "models.head", "runs.report"),
        "step.forwards",
    },
    "features.processes": set(),
    "features": {"_compat.patches", "data", "hub.loading", "models", "step"},
    # runs, studies and commands
    "runs.recipe": set(),
    "runs.arguments": {"runs.recipe"},
    "runs.report": {"checkpoints", "evaluation.intervals", "hub.cards", "losses"},
    "runs": {
        *("checkpoints", "config", "data", "echo.files", "evaluation", "features", "hub", "losses"),
        *("methods", "models", "plots", "procedures", "trainer"),
    },
    "study": {
        *("_compat.dispatch", "callbacks", "checkpoints", "config", "data", "features", "losses", "methods"),
        *("models", "plots", "procedures", "runs", "step", "trainer"),
    },
    "cli": {"data", "echo", "evaluation", "features", "hub", "runs", "study"},
    "__main__": {"cli"},
    "": {"_compat.registration"},
}


def module_name(path: Path) -> str:
    """As it is imported, without the package: "" for the package itself."""
    return ".".join(part for part in path.relative_to(PACKAGE).with_suffix("").parts if part != "__init__")


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
LOSS_TOOLS = ("losses.base", "losses.functional", "losses.presets")
LOSS_FILES = [name for name in SOURCES if name.startswith("losses.") and name not in LOSS_TOOLS]


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements at any depth, but for those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        else:
            yield from statements(child)


def imports_of(tree: ast.AST, name: str, is_package: bool) -> set[str]:
    """Full names of everything imported; `from a import b` gives a.b where that is a module of ours,
    otherwise a.
    """
    here = ["hf_fixastep", *name.split(".")] if name else ["hf_fixastep"]
    found = set()
    for statement in statements(tree):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
            continue
        base = here[: len(here) - statement.level + is_package] if statement.level else []
        source = ".".join([*base, *([statement.module] if statement.module else [])])
        for alias in statement.names:
            full = f"{source}.{alias.name}"
            found.add(full if full.removeprefix("hf_fixastep.") in SOURCES else source)
    return found


def imports(name: str) -> set[str]:
    path = SOURCES[name]
    return imports_of(ast.parse(path.read_text()), name, path.name == "__init__.py")


def ours(name: str) -> set[str]:
    """Our modules that a module imports, without the package's name."""
    found = {full for full in imports(name) if full.split(".")[0] == "hf_fixastep"}
    return {full.removeprefix("hf_fixastep").removeprefix(".") for full in found}


def inside(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize(
    ("source", "name", "is_package", "expected"),
    [
        ("import torch.nn, json", "step.gate", False, {"torch.nn", "json"}),
        ("from torch import nn", "step.gate", False, {"torch"}),
        ("from hf_fixastep.step.gate import GATES", "config", False, {"hf_fixastep.step.gate"}),
        ("from hf_fixastep.step import gate", "config", False, {"hf_fixastep.step.gate"}),
        ("from .step import gate", "config", False, {"hf_fixastep.step.gate"}),
        ("from .base import Losses", "losses.vat", False, {"hf_fixastep.losses.base"}),
        ("from .base import Losses", "losses", True, {"hf_fixastep.losses.base"}),
        ("from ..step.gate import GATES", "losses.vat", False, {"hf_fixastep.step.gate"}),
        ("def late():\n    import transformers", "step.gate", False, {"transformers"}),
        ("if TYPE_CHECKING:\n    import transformers", "step.gate", False, set()),
    ],
)
def test_every_kind_of_import_is_found(source: str, name: str, is_package: bool, expected: set[str]) -> None:
    assert imports_of(ast.parse(source), name, is_package) == expected


@pytest.mark.parametrize("name", SOURCES)
def test_imports_point_one_way(name: str) -> None:
    home = next(package for package in ALLOWED if inside(name, {package}))
    wrong = {found for found in ours(name) if not inside(found, {home} | EVERYWHERE | ALLOWED[home])}
    assert not wrong, f"{name} must not import {', '.join(sorted(wrong))}"


def test_every_rule_is_about_a_module_that_exists() -> None:
    assert ALLOWED.keys() <= SOURCES.keys()


@pytest.mark.parametrize("name", LOSS_FILES)
def test_a_loss_imports_no_other_loss(name: str) -> None:
    wrong = {found for found in ours(name) if not inside(found, {"_compat", "checks", "step", *LOSS_TOOLS})}
    assert not wrong, f"{name} must not import {', '.join(sorted(wrong))}"


def test_the_list_of_losses_imports_nothing_but_losses_and_checks() -> None:
    assert all(inside(found, {"checks", "losses"}) for found in ours("losses"))


def test_the_losses_were_found() -> None:
    assert len(LOSS_FILES) >= 7


@pytest.mark.parametrize(
    ("package", "refused"), [("step", HUGGING_FACE), ("features.probe", {*HUGGING_FACE, "torch"})]
)
def test_these_import_none_of_these_libraries_and_nothing_that_does(package: str, refused: set[str]) -> None:
    seen, todo = set(), [name for name in SOURCES if inside(name, {package})]
    while todo:
        name = todo.pop()
        seen.add(name)
        assert not {full.split(".")[0] for full in imports(name)} & refused, name
        todo += ours(name) - seen


@pytest.mark.parametrize("name", SOURCES)
def test_no_module_imports_recipes_or_tests(name: str) -> None:
    assert not {full.split(".")[0] for full in imports(name)} & {"recipes", "tests", "conftest", "pytest"}


def test_no_modules_import_each_other_in_a_circle() -> None:
    remaining = {
        name: {found for found in ours(name) if found in SOURCES and found != name} for name in SOURCES
    }
    while free := [name for name, needs in remaining.items() if not needs & remaining.keys()]:
        for name in free:
            del remaining[name]
    assert not remaining


@pytest.mark.parametrize("name", hf_fixastep.__all__)
def test_every_public_name_resolves_to_what_its_home_defines(name: str) -> None:
    home = importlib.import_module(f"hf_fixastep.{hf_fixastep._HOMES[name]}")
    assert getattr(hf_fixastep, name) is getattr(home, name)


def test_homes_and_public_names_agree() -> None:
    assert hf_fixastep._HOMES.keys() == set(hf_fixastep.__all__)


def test_type_checkers_see_the_public_names_where_they_live() -> None:
    tree = ast.parse(SOURCES[""].read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: statement.module for statement in block.body for alias in statement.names}
    assert seen == {name: f"hf_fixastep.{home}" for name, home in hf_fixastep._HOMES.items()}


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"hf_fixastep.*'FixAStpeTrainer'"):
        _ = hf_fixastep.FixAStpeTrainer


def test_the_package_and_the_list_of_commands_import_no_library() -> None:
    """Only what tells the Auto classes of our networks, once these are imported."""
    assert ours("") == {"_compat.registration"}
    assert ours("cli") == {"checks", "cli.commands", "cli.help"}  # the last one when asked for
    program = "import sys, hf_fixastep.cli; print({'torch', 'transformers', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    "first",
    [
        "import hf_fixastep; from transformers import AutoConfig",
        pytest.param("import hf_fixastep; from transformers import pipeline", marks=pytest.mark.slow),
        pytest.param("import hf_fixastep; import transformers.modeling_utils", marks=pytest.mark.slow),
        pytest.param("from transformers import AutoConfig; import hf_fixastep", marks=pytest.mark.slow),
        pytest.param("from hf_fixastep import WideResNetForImageClassification", marks=pytest.mark.slow),
    ],
)
def test_the_auto_classes_know_our_networks_whatever_is_imported_first(first: str) -> None:
    program = (
        f"{first}; from transformers import AutoConfig, AutoModelForImageClassification as Auto;"
        "print(type(Auto.from_config(AutoConfig.for_model('wide_resnet_fixastep', depth=10))).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "WideResNetForImageClassification\n", done.stderr


# What the import of the trainer must not load; every room adds what it keeps away.
NOT_FOR_TRAINING = [
    "hf_fixastep.echo",
    "hf_fixastep.data.cifar",
    "hf_fixastep.data.cifar_files",
    "hf_fixastep.data.digits",
    "hf_fixastep.data.doctor",
    "hf_fixastep.data.fetal_files",
    "hf_fixastep.data.fetal_planes",
    "hf_fixastep.data.folders",
    "hf_fixastep.evaluation.report",
    "hf_fixastep.evaluation.sites",
    "hf_fixastep.hub.callback",
    "hf_fixastep.hub.cards",
    "hf_fixastep.hub.client",
    "hf_fixastep.hub.loading",
    "hf_fixastep.hub.screening",
    "hf_fixastep.runs.report",
    "hf_fixastep.study",
    "matplotlib",
]


@pytest.fixture(scope="module")
def loaded_by_the_trainer() -> set[str]:
    program = "import sys; from hf_fixastep import FixAStepTrainer; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("name", NOT_FOR_TRAINING)
def test_the_trainer_does_not_load(loaded_by_the_trainer: set[str], name: str) -> None:
    assert "hf_fixastep.trainer" in loaded_by_the_trainer
    assert not [found for found in loaded_by_the_trainer if inside(found, {name})]
