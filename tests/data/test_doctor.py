import shlex
import shutil
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import yaml

from hf_fixastep.data import doctor, load_dataset


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
def examine(sides, tmp_path, monkeypatch, capsys):
    """What the doctor prints, without the slow measurement."""
    monkeypatch.setattr(doctor, "time_of_pass", lambda size, channels: (64, 0.5, "cpu"))

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
    assert "through a WRN-28-2 took 0.50 s here (cpu)." in text
    assert "would take roughly 7.5 s." in text  # 64 + 2 * 448 images at 0.5 s for 64
    assert text.endswith(f"Contact sheet: {tmp_path / 'doctor.png'}\n")


def test_the_command_loads_these_folders(examine, tmp_path, sides):
    command = next(line for line in examine(group=r"(p\d+)_").splitlines() if "accelerate launch" in line)
    words = shlex.split(command)
    assert words[:5] == [
        "accelerate",
        "launch",
        "recipes/train.py",
        "--config",
        "recipes/folders/fixmatch.yaml",
    ]
    settings = yaml.safe_load(words[words.index("--dataset_kwargs") + 1])
    assert settings == {name: str(path) for name, path in sides.items()} | {
        "group": r"(p\d+)_",
        "image_size": 32,
    }
    assert len(load_dataset("folders", **settings, cache_dir=tmp_path / "cache")) == 4


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


def test_the_contact_sheet_shows_classes_in_rows(examine, tmp_path, sides):
    (sides["unlabeled"] / "bad.png").write_bytes(b"")
    examine(out=tmp_path / "new/sheet.png")
    sheet = np.asarray(PIL.Image.open(tmp_path / "new/sheet.png").convert("RGB")).astype(int)
    # Two classes, one row of the pile.
    assert sheet.shape == (6 + 3 * 94 + 20 + 2 * 20 + 6, 170 + 10 * 94 + 6, 3)
    used = [(sheet[top : top + 88, 170:] != 255).any((0, 2)).sum() // 88 for top in (6, 100, 214)]
    assert used == [4, 10, 6]
    assert sheet[220, 170 + 5 * 94 + 4].tolist() == [232, 180, 168]  # the broken file, last by name


def test_many_classes_are_cut_short(examine, tmp_path, sides):
    for number in range(45):
        save(sides["labeled"] / f"class {number}/1.png", 500 + number)
    assert "and 7 more" in examine()
    height = PIL.Image.open(tmp_path / "doctor.png").height
    assert height == 6 + 21 * 94 + 20 + 2 * 20 + 6


def test_the_time_is_measured():
    batch, seconds, device = doctor.time_of_pass(8, 1)
    assert batch == 64
    assert 0 < seconds < 60
    assert device in ("cpu", "cuda")
