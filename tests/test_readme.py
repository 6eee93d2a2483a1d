"""The README's program runs as printed, and what the pages say about files and commands is so."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

from hf_fixastep import FixAStepConfig
from hf_fixastep.cli import COMMANDS
from hf_fixastep.runs.arguments import DataArguments, ModelArguments
from hf_fixastep.runs.recipe import find_recipe


ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "recipes").rglob("README.md")])
COMMAND = r"\bfixastep (\w+)(.*)"
LAUNCHING = {"config", "labeled", "num_processes", "unlabeled"}  # options of `train` that are no settings


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands_of(page: Path) -> list[tuple[str, str]]:
    """Name and options of every `fixastep` command, in a block or between backticks."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    return [found for line in lines + re.findall(r"`([^`]+)`", prose) for found in re.findall(COMMAND, line)]


def anchors(page: Path) -> set[str]:
    """The headings of a page as a link names them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_the_program_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    """As printed but for the number of steps, which only makes it quick."""
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(ROOT / "README.md", "python")
    assert "max_steps=" in program
    exec(compile(re.sub(r"max_steps=\d+", "max_steps=6", program), "README.md", "exec"), {})
    assert 0 <= float(capsys.readouterr().out.split()[-1]) <= 1


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) < 900


def test_every_folder_of_recipes_has_a_page():
    folders = {path.parent for path in (ROOT / "recipes").rglob("*.yaml")}
    assert [folder.name for folder in folders if not (folder / "README.md").is_file()] == []


def test_every_path_in_a_command_exists():
    words = [
        word for page in PAGES for block in blocks(page, "bash") for word in shlex.split(block, comments=True)
    ]
    paths = [word for word in words if re.fullmatch(r"(\.ci|recipes|tests|hub_cards)/[\w./-]+", word)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_link_works():
    wrong = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            path = page.parent / target if target else page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                wrong.append((str(page.relative_to(ROOT)), target, anchor))
    assert wrong == []


def test_every_command_exists_and_finds_its_recipe():
    commands = [command for page in PAGES for command in commands_of(page)]
    assert {name for name, _ in commands} == {*COMMANDS}  # and none is left out
    for recipe in {
        name for _, line in commands for name in re.findall(r"--config ([a-z]\w*/[a-z]\w*)", line)
    }:
        assert find_recipe(recipe).is_file()


def test_every_option_of_a_training_exists():
    kinds = (DataArguments, ModelArguments, FixAStepConfig)
    known = {field.name for kind in kinds for field in dataclasses.fields(kind)} | LAUNCHING
    lines = [line for page in PAGES for name, line in commands_of(page) if name == "train"]
    assert {word for line in lines for word in re.findall(r"--(\w+)", line)} - known == {"key"}


def test_every_recipe_in_prose_exists():
    folders = "|".join(path.name for path in (ROOT / "recipes").iterdir() if path.is_dir())
    names = {name for page in PAGES for name in re.findall(rf"`((?:{folders})/\w+)`", page.read_text())}
    assert [name for name in names if not (ROOT / f"recipes/{name}.yaml").is_file()] == []


def test_every_recipe_gives_its_own_command():
    """In its header, by the name that `--config` takes; Accelerate's files by the path that it takes."""
    wrong = []
    for recipe in (ROOT / "recipes").rglob("*.yaml"):
        folder = recipe.parent.name
        verb = {"sweeps": "sweep", "search": "search"}.get(folder, "train")
        given = f"fixastep {verb} --config {folder}/{recipe.stem}"
        if folder == "accelerate":
            given = f"accelerate launch --config_file recipes/accelerate/{recipe.name}"
        if not re.search(rf"^#   {re.escape(given)}( |$)", recipe.read_text(), re.MULTILINE):
            wrong.append(f"{folder}/{recipe.name}")
    assert wrong == []
