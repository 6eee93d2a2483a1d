"""No command runs code of a network, opens a pickle or asks whether it may, whoever answers yes."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import yaml
from transformers import AutoConfig, AutoImageProcessor

from hf_fixastep import cli
from hf_fixastep.checkpoints import complete
from hf_fixastep.hub.loading import load_network
from tests.attack.plants import (
    AUTO_MAP,
    PLANTS,
    SOUGHT,
    change,
    plant_code,
    plant_repository,
    save_run,
    watch,
)
from tests.short_runs import assert_equal, make_trainer, tiny_vit, weights


ROOT = Path(__file__).parents[2]
LOADS = (".from_pretrained", "torch.load", "joblib.load", "yaml.unsafe_load", "yaml.full_load")
DATA = ["--dataset", "digits_open_set", "--labels_per_class", "2"]


def photos(folder: Path) -> str:
    for at in range(2):
        for place in ("a", "b"):
            (folder / place).mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(at).integers(0, 256, (9, 9, 3), dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(folder / place / f"{at}.png")
    return str(folder)


def heart2heart(run: str, place: Path) -> list[str]:
    (Path(run) / "recipe.yaml").write_text(yaml.safe_dump({"dataset": "tmed2", "dataset_config": "split0"}))
    return ["heart2heart", run, "--tmed2", str(place)]


def fit(run: str, place: Path) -> list[str]:
    sides = ["--labeled", photos(place / "labeled"), "--unlabeled", photos(place / "pile")]
    return ["fit", *sides, "--model", run, "--output_dir", str(place / "out"), "--time", "0"]


def gallery(run: str, place: Path) -> list[str]:
    settings = {"dataset": "digits_open_set", "labels_per_class": 2, "max_steps": 1, "use_cpu": True}
    (Path(run) / "recipe.yaml").write_text(yaml.safe_dump(settings))
    return ["gallery", run, "--out", str(place / "out")]


def study(command: str, run: str, place: Path) -> list[str]:
    """The file of a search or sweep, of one run that starts from the network."""
    settings = {"dataset": "digits_open_set", "labels_per_class": 2, "max_steps": 2, "model": run}
    (place / "recipe.yaml").write_text(yaml.safe_dump({**settings, "eval_steps": 2, "use_cpu": True}))
    seeds = {"space": {"seed": [0]}} if command == "search" else {"grids": [{"seed": [0]}]}
    recipe = {"config": str(place / "recipe.yaml")}
    file = {**recipe, **seeds} if command == "search" else {"settings": recipe, **seeds}
    (place / "study.yaml").write_text(yaml.safe_dump(file))
    return [command, "--config", str(place / "study.yaml"), "--output_dir", str(place / "out")]


COMMANDS: dict[str, Callable[[str, Path], list[str]]] = {
    "train": lambda run, place: ["train", "--model", run, *DATA, "--output_dir", str(place / "out")],
    "embed": lambda run, place: ["embed", "--model", run, *DATA, "--cache_dir", str(place / "cache")],
    "fit": fit,
    "evaluate": lambda run, place: ["evaluate", run],
    "predict": lambda run, place: ["predict", run, photos(place / "in"), "--out", str(place / "a.csv")],
    "predict echo": lambda run, place: [
        *("predict", run, photos(place / "in"), "--out", str(place / "a.csv"), "--echo", "true"),
    ],
    "demo": lambda run, place: ["demo", run],
    "heart2heart": heart2heart,
    "gallery": gallery,
    "search": lambda run, place: study("search", run, place),
    "push": lambda run, place: [
        *("push", run, "--hub_model_id", "org/name", "--hub_license", "mit", "--dry_run", "true"),
    ],
}


# With these every command is tried by default, with all others in the long run.
FEW = (
    "code beside the config",
    "processor of another repository",
    "code of a tokenizer",
    "pickle in the index",
)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Is there as soon as planted code has run."""
    path = tmp_path / "it ran"
    plant_repository(path)
    return path


@pytest.fixture
def plant(request: pytest.FixtureRequest, mark: Path, tmp_path: Path) -> Path:
    """A run with code planted in it."""
    run = save_run(tmp_path / "run")
    plant_code(mark, run)
    PLANTS[request.param][0](run, mark)
    return run


def assert_refused(name: str, message: str, run: Path, mark: Path, seen: list[str]) -> None:
    assert not mark.exists()
    assert seen == []
    assert PLANTS[name][1] in message
    assert str(run) in message
    assert "\n" not in message


@pytest.mark.parametrize(("plant", "name"), [(name, name) for name in PLANTS], indirect=["plant"])
def test_what_is_planted_is_refused_before_it_is_opened(
    plant: Path, name: str, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n" * 100))
    for number in (None, 3):
        with watch() as seen, pytest.raises(ValueError, match=r"\.$") as error:
            load_network(plant, number)
        assert_refused(name, str(error.value), plant, mark, seen)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("plant", "name"),
    [pytest.param(name, name, marks=[] if name in FEW else pytest.mark.slow) for name in PLANTS],
    indirect=["plant"],
)
def test_no_command_runs_what_is_planted(
    command: str, plant: Path, name: str, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = COMMANDS[command](str(plant), tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n" * 100))
    with watch() as seen, pytest.raises(SystemExit) as stop:
        cli.main(argv)
    message = str(stop.value)
    assert message.startswith("error: ")
    if command == "push" and "holds no model.safetensors" in message:  # no other weights are pushed
        name = "pickle"
    assert_refused(name, message, plant, mark, seen)


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("plant", "name"), [(name, name) for name in FEW[:2]], indirect=["plant"])
def test_a_program_that_says_yes_to_everything_changes_nothing(
    command: str, plant: Path, name: str, mark: Path, tmp_path: Path
) -> None:
    argv = [sys.executable, "-m", "hf_fixastep", *COMMANDS[command](str(plant), tmp_path)]
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as yes:
        done = subprocess.run(argv, stdin=yes.stdout, capture_output=True, text=True, timeout=300)
        yes.kill()
    assert done.returncode == 1
    assert_refused(name, done.stderr.splitlines()[-1], plant, mark, [])
    assert "Traceback" not in done.stderr
    assert "[y/N]" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "name"), [(name, name) for name in FEW[:2]], indirect=["plant"])
def test_the_runs_of_a_sweep_refuse_it_too(plant: Path, name: str, mark: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hf_fixastep", *study("sweep", str(plant), tmp_path)]
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as yes:
        done = subprocess.run(argv, stdin=yes.stdout, capture_output=True, text=True, timeout=300)
        yes.kill()
    assert done.returncode == 1
    first, reason = done.stderr.splitlines()[-2:]
    assert first == "error: 1 runs failed; the same command tries them again."
    assert_refused(name, reason, plant, mark, [])


def test_a_checkpoint_is_resumed_without_its_code(mark: Path, tmp_path: Path) -> None:
    """Its class is known by then, so nothing that its config names is looked for."""
    make_trainer(tmp_path, tiny_vit(), max_steps=2, save_strategy="steps", save_steps=1).train()
    checkpoint = tmp_path / "checkpoint-1"
    plant_code(mark, checkpoint)
    for name in ("config.json", "preprocessor_config.json"):
        change(checkpoint / name, auto_map=AUTO_MAP)
    complete(checkpoint)
    with watch() as seen:
        make_trainer(tmp_path, tiny_vit(), max_steps=2).train(str(checkpoint))
    assert not mark.exists()
    assert [event for event in seen if event.startswith("asked")] == []  # it is opened to be hashed


def test_there_is_one_loader() -> None:
    """Whatever opens a network or a pickle is where the refusals are tested."""
    found = set()
    for path in sorted((ROOT / "hf_fixastep").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            is_load = isinstance(node, ast.Attribute) and ast.unparse(node).endswith(LOADS)
            if is_load or (isinstance(node, ast.Import) and "pickle" in ast.unparse(node)):
                found.add(path.relative_to(ROOT / "hf_fixastep").as_posix())
    assert found == {"hub/loading.py", "data/cifar_files.py"}


@pytest.mark.parametrize("auto_map", [SOUGHT, AUTO_MAP], ids=["here", "elsewhere"])
@pytest.mark.parametrize(
    ("file", "kind"), [("config.json", AutoConfig), ("preprocessor_config.json", AutoImageProcessor)]
)
def test_the_plants_are_alive(auto_map: dict, file: str, kind: type, mark: Path, tmp_path: Path) -> None:
    """Whoever trusts them runs them, and the watch sees it: the test above is not passed by dead code."""
    run = save_run(tmp_path / "run")
    plant_code(mark, run)
    change(run / file, auto_map=auto_map)
    with watch() as seen:
        kind.from_pretrained(run, trust_remote_code=True)
    assert mark.exists()
    assert seen


def test_the_run_without_a_plant_is_loaded(tmp_path: Path) -> None:
    assert_equal(weights(load_network(save_run(tmp_path))[0]), weights(tiny_vit()))
