"""Data sets on the Hub: those that may be passed on, without what photographs tell of their owners."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from PIL import Image

from hf_fixastep import load_dataset
from hf_fixastep.cli import push
from hf_fixastep.data import DATASETS
from hf_fixastep.data.digits import DigitsOpenSet
from hf_fixastep.hub import client
from tests.hub.conftest import command, pushed
from tests.hub.server import HubServer, in_a_process


def push_data(*more: str) -> None:
    push.main(["--hub_dataset_id", "org/data", *more])


def test_configurations_are_pushed_one_beside_the_other(server):
    push_data("--dataset", "digits_open_set", "--zeta", "50")
    push_data("--dataset", "digits_open_set", "--zeta", "100", "--labels_per_class", "3")
    files = pushed(server, "dataset", "org/data")
    splits = ("labeled", "unlabeled", "validation", "test")
    assert files.keys() == {"README.md", *(f"zeta{z}/{split}.parquet" for z in (50, 100) for split in splits)}
    card = files["README.md"].decode()
    header = yaml.safe_load(card.split("---")[1])
    assert [config["config_name"] for config in header["configs"]] == ["zeta50", "zeta100"]
    assert header["license"] == "cc-by-4.0"
    assert 'load_dataset("org/data", "zeta50")' in card


def test_the_card_of_something_else_is_not_written_over(server):
    server.create("dataset", "org/data", {"README.md": b"---\nlicense: mit\n---\nMine."})
    with pytest.raises(SystemExit, match="belongs to something else than an export of digits_open_set"):
        push_data("--dataset", "digits_open_set")
    assert pushed(server, "dataset", "org/data") == {"README.md": b"---\nlicense: mit\n---\nMine."}


def test_a_card_that_cannot_be_read_stops_the_push(server, monkeypatch):
    monkeypatch.setattr(client, "PATIENCE", 1.0)
    server.create("dataset", "org/data", {"README.md": b"---\nlicense: mit\n---\nMine."})
    server.fail("head", 500, times=99)
    with pytest.raises(SystemExit, match="org/data was not pushed: the Hub answered with 500"):
        push_data("--dataset", "digits_open_set")
    assert len(server.repo("dataset", "org/data").commits) == 2


@pytest.fixture
def sides(tmp_path) -> str:
    """Folders of photographs that tell who, when and where."""
    exif = Image.Exif()
    exif[0x010E] = "Where I live"
    for side, names in {"labeled": ("a", "b"), "pile": (".",)}.items():
        for name in names:
            (tmp_path / side / name).mkdir(parents=True, exist_ok=True)
            for row in range(6):
                pixels = np.random.default_rng([row, len(side), ord(name)]).integers(
                    0, 256, (8, 8, 3), dtype=np.uint8
                )
                Image.fromarray(pixels).save(tmp_path / side / name / f"patient Smith {row}.jpg", exif=exif)
    return json.dumps({"labeled": str(tmp_path / "labeled"), "unlabeled": str(tmp_path / "pile")})


def test_folders_are_pushed_only_with_a_licence_and_then_as_pixels_and_labels(server, sides, tmp_path):
    with pytest.raises(SystemExit, match="State the licence under which you pass them on"):
        push_data("--dataset", "folders", "--dataset_kwargs", sides)
    with pytest.raises(SystemExit, match="hub_license is 'My own', but expected a short name of the Hub"):
        push_data("--dataset", "folders", "--dataset_kwargs", sides, "--hub_license", "My own")
    assert ("dataset", "org/data") not in server.repos
    push_data("--dataset", "folders", "--dataset_kwargs", sides, "--hub_license", "cc-by-4.0")
    files = pushed(server, "dataset", "org/data")
    for secret in (b"Smith", b"Where I live", str(tmp_path).encode()):
        assert [name for name, data in files.items() if secret in data] == []
    header = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert header["license"] == "cc-by-4.0"
    assert len(files) == 5


@pytest.mark.parametrize("license", [[], ["--hub_license", "mit"]])
def test_data_that_may_not_be_passed_on_never_are(server, monkeypatch, license):
    monkeypatch.setattr(DigitsOpenSet, "shareable", False)
    monkeypatch.setattr(DigitsOpenSet, "terms", "its owner gives it to approved persons alone.")
    with pytest.raises(SystemExit, match="may not be exported: its owner gives it to approved persons alone"):
        push_data("--dataset", "digits_open_set", *license)
    assert server.requests == []


def test_the_licence_of_a_known_set_is_not_the_users_to_choose(server):
    with pytest.raises(SystemExit, match="is known, and not yours to choose"):
        push_data("--dataset", "digits_open_set", "--hub_license", "mit")


def test_a_medical_set_is_only_shared_where_its_licence_allows_it():
    medical = [kind for kind in DATASETS.values() if getattr(kind, "medical", False)]
    shared = [kind.terms for kind in medical if getattr(kind, "shareable", False)]
    assert len(medical) == 4
    assert [terms.partition(":")[0] for terms in shared] == ["Creative Commons Attribution 4.0 (CC BY 4.0)"]


@pytest.mark.slow
def test_a_pushed_data_set_is_loaded_without_this_package(tmp_path):
    with HubServer() as server:
        command(
            server,
            tmp_path,
            "push",
            "--dataset",
            "digits_open_set",
            "--zeta",
            "50",
            "--hub_dataset_id",
            "org/data",
        )
        program = """
            import sys, datasets
            whole = datasets.load_dataset("org/data", "zeta50")
            stream = datasets.load_dataset("org/data", "zeta50", streaming=True)
            first = next(iter(stream["labeled"]))
            assert "hf_fixastep" not in sys.modules
            result = {
                "sizes": {name: len(split) for name, split in whole.items()},
                "labels": whole["labeled"]["label"][:],
                "unlabeled": sorted(set(map(str, whole["unlabeled"]["label"]))),
                "same": first["image"].tobytes() == whole["labeled"][0]["image"].tobytes(),
            }
        """
        found = in_a_process(server.environment(tmp_path / "empty"), program, tmp_path)
    data = load_dataset("digits_open_set", "zeta50")
    assert found["sizes"] == {name: len(split) for name, split in data.items()}
    assert found["labels"] == data["labeled"]["label"][:]
    assert found["unlabeled"] == ["None"]
    assert found["same"]
