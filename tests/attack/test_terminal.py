"""Names that would command the terminal they are printed on."""

from __future__ import annotations

from pathlib import Path

import PIL.Image
import pytest

from hf_fixastep import cli
from hf_fixastep.checks import harmless
from tests.attack.plants import change, save_run


TITLE, RED = "\x1b]0;title\x07", "\x1b[31m"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes and a file that is no image, all of bad names."""
    for name in (f"{RED}cat", "dog"):
        (tmp_path / name).mkdir()
        for at in range(4):
            PIL.Image.new("RGB", (9, 9), (at, 0, 0)).save(tmp_path / name / f"{RED}{at}.png")
    (tmp_path / "dog" / f"{TITLE}broken.png").write_bytes(b"no image")
    return tmp_path


def test_control_characters_are_written_out_and_others_stay() -> None:
    assert harmless(f"{RED}a\r\x9b") == r"\x1b[31ma\x0d\x9b"
    text = "Zähne, می\u200cخواهم, 歯,\tand\n👩\u200d⚕️"  # noqa: RUF001
    assert harmless(text) == text


def check(said: str, name: str) -> None:
    assert not any(character in said for character in "\x1b\x07")
    assert name in said


def test_a_prediction(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path_factory.mktemp("run"))
    names = {0: f"{RED}cat", 1: f"{TITLE}dog", 2: "owl"}
    change(run / "config.json", id2label=names, label2id={name: at for at, name in names.items()})
    cli.main(["predict", str(run), str(folder), "--out", str(run / "out.csv")])
    said = capsys.readouterr().out
    check(said, r"/\x1b]0;title\x07broken.png: ")
    check(said, r"\x1b[31mcat")


def test_the_doctor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = ["--labeled", str(folder), "--unlabeled", str(folder)]
    cli.main(["doctor", *sides, "--out", str(folder / "sheet.png")])
    said = capsys.readouterr().out
    check(said, r"dog/\x1b]0;title\x07broken.png")
    check(said, r"\x1b[31mcat")


def test_an_error(folder: Path) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["predict", f"{RED}none", str(folder), "--out", str(folder / "out.csv")])
    check(str(stop.value), r"\x1b[31mnone")
