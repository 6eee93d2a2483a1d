"""The built wheel alone, with no clone: recipes, card templates and the command are in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.short_runs import SHORT


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as a build leaves folders beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("hf_fixastep", "hub_cards", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        source,
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
    ]
    subprocess.run(command, check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_all_code_recipes_and_card_templates_and_no_results(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = set((ROOT / "hf_fixastep").rglob("*.py"))
    found = {
        ROOT / name
        for name in names
        if not name.startswith(("hf_fixastep/recipes/", "hf_fixastep/hub_cards/"))
    }
    assert found == wanted
    for folder, endings in (("recipes", (".yaml", ".md", ".py")), ("hub_cards", (".md",))):
        files = {path for path in (ROOT / folder).rglob("*") if path.suffix in endings}
        packed = {
            ROOT / name.removeprefix("hf_fixastep/")
            for name in names
            if name.startswith(f"hf_fixastep/{folder}/")
        }
        assert packed == files


def test_the_quickstart_runs_from_the_wheel_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    install = [sys.executable, "-m", "pip", "install", wheel, "--no-deps", "--target", site]
    subprocess.run(install, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "HF_HOME": str(tmp_path / "home")}

    def call(*words: object) -> str:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert Path(call("-c", "import hf_fixastep; print(hf_fixastep.__file__)").strip()).is_relative_to(site)
    call("-m", "hf_fixastep", "train", "--config", "digits/quickstart", "--output_dir", "run", *SHORT)
    assert (here / "run/model.safetensors").is_file()
    assert "Fix-A-Step" in (here / "run/README.md").read_text()  # the card, from its template
    assert [path.name for path in here.iterdir()] == ["run"]
