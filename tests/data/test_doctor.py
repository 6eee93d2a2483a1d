import shlex
import shutil
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from hf_fixastep.data import doctor


def save(path: Path, seed: int, shape: tuple[int, ...] = (6, 5, 3)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def sides(tmp_path) -> dict[str, Path]:
    for number in range(24):
        name = "cat" if number < 4 else "dog"
        save(tmp_path / f"labeled/{name}/p{number % 8}_{number}.png", number)
    for number in range(5):
        save(tmp_path / f"pile/{number}.png", 100 + number, (9, 7 + number))
    return {"labeled": tmp_path / "labeled", "unlabeled": tmp_path / "pile"}


@pytest.fixture
def examine(sides, tmp_path, capsys):
    """What the doctor prints."""

    def run(**changes) -> str:
        options = [
            f"--{name}={value}"
            for name, value in {**sides, "out": tmp_path / "doctor.png", **changes}.items()
        ]
        doctor.main(options)
        return capsys.readouterr().out

    return run


def test_healthy_folders_get_counts_costs_and_a_command(examine, tmp_path):
    text = examine(image_size=16)
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"
    ]
    assert rows == [
        ["labeled", "24", "0", "5 x 6", "RGB 24"],
        ["unlabeled", "5", "0", "7-11 x 9-9, median 9 x 9", "L 5"],
        ["dog", "14", "2", "4"],
        ["cat", "2", "1", "1"],
    ]
    assert "To be repaired" not in text
    assert (
        "Worth a look\n  The class dog has 5.0 times the images of cat: judge by balanced accuracy.\n" in text
    )
    assert "Memory: 29 images of 16 x 16 pixels in RGB take 0.0 MB." in text
    assert text.endswith(f"Contact sheet: {tmp_path / 'doctor.png'}\n")


def test_the_command_names_these_folders(examine, sides):
    labeled, pile = sides.values()
    command = next(line for line in examine(group=r"(p\d+)_").splitlines() if "fixastep train" in line)
    assert shlex.split(command) == [
        *("fixastep", "train", "--config", "folders/fixmatch"),
        *("--labeled", str(labeled), "--unlabeled", str(pile), "--group", r"(p\d+)_", "--image_size", "32"),
    ]


def test_all_that_is_wrong_is_told_at_once(examine, sides, tmp_path):
    labeled, pile = sides.values()
    (labeled / "dog/p0_bad.png").write_bytes(b"")
    (labeled / "cat/p0_worse [x].png").write_text("<html>")
    (labeled / "cat/notes.txt").write_text("x")
    (pile / "bad.png").write_bytes(b"")
    shutil.copy(labeled / "cat/p0_0.png", labeled / "dog/p0_copy.png")
    shutil.copy(labeled / "dog/p4_4.png", pile / "copy.png")
    shutil.copy(pile / "0.png", pile / "again.png")
    save(tmp_path / "test/dog/p1_7.png", 70)
    shutil.copy(labeled / "dog/p5_5.png", tmp_path / "test/dog/p9_0.png")
    text = examine(test=tmp_path / "test", group=r"(p\d+)_")
    sentences = [line.strip() for line in text.splitlines()]
    for sentence in (
        "Broken files in labeled: 2, such as cat/p0_worse [x].png (it is no image of a known format).",
        "Unlabeled files that cannot be read: 1, such as bad.png (it is empty).",
        "Images in both labeled and unlabeled: 1, such as dog/p4_4.png and copy.png.",
        "Images in both labeled and test: 1, such as dog/p5_5.png and dog/p9_0.png.",
        "Images in two classes: 1, such as cat/p0_0.png and dog/p0_copy.png.",
        "Copies of other images within labeled: 1, such as cat/p0_0.png and dog/p0_copy.png.",
        "Copies of other images within unlabeled: 1.",
        "Groups in both labeled and test: 1, such as p1.",
        "Passed over in labeled: 1 not an image.",
    ):
        assert sentence in sentences


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda labeled: shutil.copytree(labeled / "cat", labeled / "CAT"),
            "labeled has the classes 'CAT' and 'cat', wh",
        ),
        (
            lambda labeled: shutil.rmtree(labeled / "cat"),
            "labeled has one class, dog, but expected at least two",
        ),
        (
            lambda labeled: [(labeled / f"cat/p{n}_{n}.png").unlink() for n in (1, 2)],
            "needs 3 different images of every",
        ),
        (
            lambda labeled: [path.write_bytes(b"") for path in labeled.rglob("*.png")],
            "No file in labeled can be read.",
        ),
    ],
)
def test_what_would_stop_the_training_does_not_stop_the_doctor(make, sentence, examine, sides, tmp_path):
    make(sides["labeled"])
    text = examine()
    assert sentence in text[text.index("To be repaired before training") : text.index("Cost")]
    assert (tmp_path / "doctor.png").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"labeled": "nowhere"}, "labeled is nowhere, which is missing"),
        ({"unlabeled": "nowhere"}, "unlabeled is nowhere, which is missing"),
        ({"group": "p"}, "expected a regular expression with the group in parentheses"),
        ({"image_size": 0}, "image_size is 0, but expected"),
        ({"image_size": "large"}, "invalid int value"),
    ],
)
def test_bad_arguments_exit_with_a_code(changes, sentence, examine, capsys):
    with pytest.raises(SystemExit) as stop:
        examine(**changes)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def shown(figure) -> tuple[list[list[str]], list[str]]:
    """What the cells of each row of a contact sheet hold, and the texts beside them."""
    rows: dict[int, list[str]] = {}
    for cell in figure.axes:
        content = "image" if cell.images else "".join(text.get_text() for text in cell.texts)
        rows.setdefault(cell.get_subplotspec().rowspan.start, []).append(content)
    return list(rows.values()), [text.get_text() for text in figure.texts]


@pytest.fixture
def sheets(monkeypatch) -> list:
    """The figures that are drawn."""
    figures, draw = [], doctor.contact_sheet
    monkeypatch.setattr(doctor, "contact_sheet", lambda surveys: figures.append(draw(surveys)) or figures[-1])
    return figures


def test_the_contact_sheet_shows_classes_in_rows(examine, tmp_path, sides, sheets):
    (sides["unlabeled"] / "bad.png").write_bytes(b"")
    examine(out=tmp_path / "new/sheet.png")
    rows, texts = shown(sheets[0])
    assert rows == [["image"] * 4, ["image"] * 10, ["image"] * 5 + ["broken"]]
    assert texts[:3] == ["cat\n4 files", "dog\n20 files", "unlabeled\n6 files"]
    assert texts[3] == "Files that cannot be read: 1\nunlabeled/bad.png: it is empty"
    assert PIL.Image.open(tmp_path / "new/sheet.png").width > 500


def test_many_classes_are_cut_short(examine, sides, sheets):
    for number in range(45):
        save(sides["labeled"] / f"class {number}/1.png", 500 + number)
    assert "and 7 more" in examine()
    rows, texts = shown(sheets[0])
    assert len(rows) == 21
    assert texts[-1].startswith("27 more classes are not shown\n")
