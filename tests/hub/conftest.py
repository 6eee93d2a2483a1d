"""A Hub for the clients in this process, a Hub that is away, and a run that was never pushed."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.hub.server import HOST, HubServer
from tests.short_runs import make_trainer, random_images


ROOT = Path(__file__).parents[2]
PLANTED = "hf_" + "Planted7" * 4  # a token that may be found nowhere


@pytest.fixture
def server(monkeypatch, tmp_path) -> Iterator[HubServer]:
    with HubServer() as server:
        ask(monkeypatch, server.url, server.token, tmp_path)
        yield server
    huggingface_hub.close_session()


@pytest.fixture
def nowhere(monkeypatch, tmp_path) -> Iterator[None]:
    """A port nobody listens to."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        ask(monkeypatch, f"http://{HOST}:{taken.getsockname()[1]}", PLANTED, tmp_path)
        yield


@pytest.fixture
def silent(monkeypatch, tmp_path) -> Iterator[None]:
    """A host that takes every connection and never answers."""
    with socket.socket() as listening:
        listening.bind((HOST, 0))
        listening.listen()
        ask(monkeypatch, f"http://{HOST}:{listening.getsockname()[1]}", PLANTED, tmp_path)
        yield


def ask(monkeypatch, url: str, token: str, folder: Path) -> None:
    """Let the clients ask this address, with a token and an empty cache."""
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def short_waits(monkeypatch) -> None:
    """The waits of the clients, in huggingface_hub as well, take a fiftieth of their time."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds / 50))


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A run of two steps with its card, never pushed."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    objects = {"eval_dataset": random_images(12, seed=3, labeled=True)}
    trainer = make_trainer(folder, objects=objects, max_steps=2)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pushed(server: HubServer, kind: str = "model", name: str = "org/name") -> dict[str, bytes]:
    files = server.repo(kind, name).files()
    del files[".gitattributes"]  # the Hub's own
    return files


def quick(call) -> str:
    """The one sentence that a call ends in, within five seconds."""
    start = time.monotonic()
    with pytest.raises((SystemExit, OSError, ValueError)) as stopped:
        call()
    assert time.monotonic() - start < 5
    assert str(stopped.value).isprintable()
    return str(stopped.value)


def command(server: HubServer, folder: Path, *argv: str) -> str:
    """What a command of `fixastep` prints, in a process that asks this Hub."""
    environment = server.environment(folder / "home") | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    program = [sys.executable, "-m", "hf_fixastep", *argv]
    done = subprocess.run(program, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
