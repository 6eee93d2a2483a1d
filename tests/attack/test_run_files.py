"""Files beside a model that are broken, or made to hurt: each command ends in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import PIL.Image
import pytest

from hf_fixastep import cli
from hf_fixastep.runs.recipe import read
from tests.attack.plants import save_run
from tests.attack.test_broken_networks import DEEP


DOUBLED = "\n".join(
    ["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
)  # the last one would have 2 ** 39 numbers
MERGED = "\n".join(["a0: &a0 {k: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40))])
CONTENT = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "bytes": b"\xff\xfe\x00",
    "deep": DEEP,
    "other facts": b'{"dataset": 5, "loss": [1], "weights": {}}',
    "names of names": DOUBLED.encode(),
    "merged names": MERGED.encode(),
    "code": b"dataset: !!python/object/apply:os.system [exit]",
}
COMMANDS: dict[str, tuple[Callable[[str, str], list[str]], tuple[str, ...]]] = {
    # the words, and which files beside the network it reads
    "predict": (
        lambda run, out: ["predict", run, "photo.png", "--out", out],
        ("metrics.json", "known.safetensors"),
    ),
    "push": (
        lambda run, out: ["push", run, "--hub_model_id", "org/name", "--hub_license", "mit"],
        ("metrics.json", "recipe.yaml", "fit.json"),
    ),
    "compare": (lambda run, out: ["compare", run, "--out", out], ("metrics.json", "recipe.yaml")),
    "gallery": (lambda run, out: ["gallery", run, "--out", out], ("recipe.yaml",)),
    "evaluate": (lambda run, out: ["evaluate", run], ("recipe.yaml",)),
}
CASES = [(command, name) for command, (_, names) in COMMANDS.items() for name in names]


@pytest.mark.parametrize("content", CONTENT)
@pytest.mark.parametrize(("command", "name"), CASES)
def test_a_command_ends_in_one_sentence(
    command: str, name: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = save_run(tmp_path / "run")
    (run / "test_predictions.csv").write_text("label,prediction\n0,0\n")
    (run / name).write_bytes(CONTENT[content])
    PIL.Image.new("RGB", (8, 8)).save(tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^error: .*[.?]$") as stop:
        cli.main(COMMANDS[command][0](str(run), str(tmp_path / "out")))
    assert str(run) in str(stop.value) or "Unknown dataset" in str(stop.value)
    assert len(str(stop.value)) < 700


@pytest.mark.parametrize("text", [DOUBLED, MERGED, "a: &a [*a]"], ids=["lists", "mappings", "itself"])
def test_names_that_stand_for_too_much_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"names stand for more than 100,000 values"):
        read("recipe", text)


def test_data_of_other_classes_are_refused(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    with pytest.raises(SystemExit, match=r"tells 3 classes, but the data have 6: expected the same\.$"):
        cli.main(["evaluate", str(run)])
