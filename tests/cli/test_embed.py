"""`fixastep embed` in one process."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from hf_fixastep import cli
from tests.features.networks import tiny_network, tiny_processor


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    tiny_network().save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    return folder


def noise(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    PIL.Image.fromarray(pixels).save(path)


def test_every_split_has_a_line_and_only_training_images_have_views(
    network: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", str(network), "--dataset", "digits_open_set", "--cache_dir", str(tmp_path)]
    words += [
        "--labels_per_class",
        "2",
        "--weak",
        "1",
        "--strong",
        "1",
        "--dataset_kwargs",
        "{foreign: true}",
    ]
    cli.main(["embed", *words])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(lines) == ["labeled", "unlabeled", "validation", "test", "seen_foreign", "unseen_foreign"]
    counts = {name: int(line.split(" ", 1)[0].replace(",", "")) for name, line in lines.items()}
    assert counts["labeled"] == 12
    for name, line in lines.items():
        versions = 3 if name in ("labeled", "unlabeled") else 1
        size = counts[name] * versions * 64 * 2 / 1e6
        assert f" images, {versions} x 64 numbers each, {size:,.1f} MB in {tmp_path}/" in line


def test_unreadable_images_of_the_pile_are_counted(
    network: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(30):
        noise(tmp_path / f"labeled/{'ab'[number % 2]}/{number}.png", number)
        noise(tmp_path / f"pile/{number}.png", 100 + number)
    words = ["--labeled", str(tmp_path / "labeled"), "--unlabeled", str(tmp_path / "pile")]
    words += ["--model", str(network), "--cache_dir", str(tmp_path / "cache"), "--weak", "0", "--strong", "0"]
    cli.main(["embed", *words])
    assert re.search(r"^unlabeled: 30 images, 1 x 64 numbers", capsys.readouterr().out, re.M)
    broken = tmp_path / "pile/7.png"
    broken.write_bytes(broken.read_bytes()[:200])
    cli.main(["embed", *words])
    assert re.search(
        r"^unlabeled: 29 images, 1 x 64|29 images, 1 skipped, 1 x 64", capsys.readouterr().out, re.M
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--dataset", "digits_open_set"], "No model was named: give --model"),
        (["--model", "NETWORK"], "No data were named: give --dataset NAME"),
        (["--model", "NETWORK", "--dataset", "digits_open_sat"], "Unknown dataset 'digits_open_sat'"),
        (["--model", "NETWORK", "--dataset", "digits_open_set", "--weak", "-1"], "weak is -1, but an image"),
        (["--model", "nowhere", "--dataset", "digits_open_set"], "There is no folder nowhere"),
        (["--model", "NETWORK", "--wek", "1"], "Unknown argument 'wek'. Did you mean weak?"),
        (["--model", "nowhere", "--dataset", "digits_open_set", "--num_processes", "2"], "no folder nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_sentence(argv: list[str], sentence: str, network: Path) -> None:
    words = [str(network) if word == "NETWORK" else word for word in argv]
    with pytest.raises(SystemExit, match=re.escape(sentence)) as stopped:
        cli.main(["embed", *words])
    assert str(stopped.value).startswith("error: ")
    assert "\n" not in str(stopped.value)
