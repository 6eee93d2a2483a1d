"""The README's program runs as printed, and what it says about files is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "recipes/README.md", ROOT / "CONTRIBUTING.md"]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_program_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    """As printed but for the number of steps, which only makes it quick."""
    monkeypatch.chdir(tmp_path)
    (program,) = blocks(ROOT / "README.md", "python")
    assert "max_steps=" in program
    exec(compile(re.sub(r"max_steps=\d+", "max_steps=6", program), "README.md", "exec"), {})
    assert 0 <= float(capsys.readouterr().out.split()[-1]) <= 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_in_a_command_exists(page):
    words = [word for block in blocks(page, "bash") for word in shlex.split(block, comments=True)]
    paths = [word for word in words if re.fullmatch(r"(\.ci|recipes|tests|hub_cards)/[\w./-]+", word)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_works(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)\)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []
