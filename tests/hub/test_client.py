"""The client against a Hub that does not play along: bounded in time, hashes compared, one sentence each."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time

import huggingface_hub
import pytest
from huggingface_hub import constants

from hf_fixastep.hub import client
from tests.hub.conftest import PLANTED, pushed, quick
from tests.hub.server import HOST, HubServer


WEIGHTS = bytes(range(256)) * 400
FILES = {
    "README.md": b"---\nlicense: mit\n---\n# A model\n",
    "config.json": b"{}",
    "preprocessor_config.json": b"{}",
    "model.safetensors": WEIGHTS,
}


def push(name: str = "org/name", files: dict = FILES, **settings: object) -> None:
    client.push_files(files, name, message="Push", **settings)


# ---- pushes


def test_files_land_in_one_commit_and_only_new_contents_are_sent(server, tmp_path):
    (tmp_path / "weights").write_bytes(WEIGHTS)
    push(files=FILES | {"model.safetensors": tmp_path / "weights"})
    repo = server.repo("model", "org/name")
    assert pushed(server) == FILES
    assert len(repo.commits) == 2
    assert [path for path, file in repo.at("main").tree.items() if file.lfs] == ["model.safetensors"]
    push()
    push(files=FILES | {"config.json": b"{1: 2}"})
    assert len(repo.commits) == 3
    assert len(server.seen("upload")) == 1


FAULTS = {
    "create 401": ("create", 401, {}, "the Hub does not accept the token"),
    "create 403": ("create", 403, {}, "the token may not do this"),
    "create 409 without end": ("create", 409, {}, "the Hub answered with 409 for"),
    "preupload 404": ("preupload", 404, {}, "there is no such repository"),
    "commit 409": ("commit", 409, {}, "it is being changed by someone else"),
    "commit 412": ("commit", 412, {}, "it was changed by someone else meanwhile"),
    "preupload 429, an hour": ("preupload", 429, {"seconds": 3600}, "the Hub asks to wait for 3600 seconds"),
    "upload 500": ("upload", 500, {}, "the Hub answered with 500: try again later"),
    "commit 500": ("commit", 500, {}, "the Hub answered with 500: try again later"),
    "upload reset": ("upload", "reset", {}, "the connection broke"),
    "commit reset": ("commit", "reset", {}, "the connection broke: try again"),
    "preupload too slow": ("preupload", "drip", {"seconds": 1}, "the connection broke or no answer came for"),
    "create too slow": ("create", "drip", {"seconds": 1}, "the Hub was silent for"),
    "create drips": ("create", "drip", {"seconds": 0.2}, "bytes in 1 seconds: try again later"),
    "create drips headers": ("create", "endless", {}, "the Hub has not sent its headers in 1 seconds"),
    "wrong hash": ("upload", "corrupt", {}, "the Hub refused what it got ('The sha256 of the content"),
    "redirect of the upload": ("upload", "redirect", {}, "the Hub sends us to another host, '127.0.0.2'"),
    "redirect of the commit": ("commit", "redirect", {}, "the Hub sends us to another host, '127.0.0.2'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_sentence_and_the_next_push_completes(server, short_waits, monkeypatch, fault):
    endpoint, kind, more, words = FAULTS[fault]
    monkeypatch.setattr(client, "PATIENCE", 0.6)
    monkeypatch.setattr(client, "STALL", 0.25)
    server.fail(endpoint, kind, times=10_000, **more)
    start = time.monotonic()
    with pytest.raises(OSError, match=re.escape(words)) as stopped:
        push()
    assert time.monotonic() - start < 10
    message = str(stopped.value)
    assert message.startswith("org/name was not pushed: ")
    assert message.endswith(". Nothing on this machine was changed.")
    assert message.isprintable()
    assert {request.host for request in server.requests} == {HOST}  # nothing was sent to another one
    server.heal()
    push()
    assert pushed(server) == FILES


@pytest.mark.parametrize(
    ("endpoint", "kind", "more"),
    [
        ("upload", 500, {}),
        ("upload", "reset", {}),
        ("commit", 500, {}),
        ("commit", "lost", {}),
        ("preupload", 429, {"seconds": 0}),
        ("preupload", "drip", {"seconds": 0.1}),
        ("create", 503, {}),
        ("commit", "drip", {"seconds": 0.6}),  # done, but answered too late
    ],
)
def test_a_fault_that_passes_is_survived(server, short_waits, monkeypatch, endpoint, kind, more):
    monkeypatch.setattr(client, "STALL", 0.3)
    server.fail(endpoint, kind, **more)
    push()
    assert pushed(server) == FILES
    assert len(server.repo("model", "org/name").commits) == 2  # not one more for the repetition


def test_what_was_uploaded_is_not_uploaded_again(server):
    server.fail("commit", 403)
    with pytest.raises(OSError, match="may not do this"):
        push()
    push()
    assert len(server.seen("upload")) == 1


def test_another_content_on_the_hub_is_noticed(server):
    server.objects[hashlib.sha256(WEIGHTS).hexdigest()] = b"what the storage made of it"
    with pytest.raises(OSError, match=r"the Hub has another content of model\.safetensors than was sent"):
        push()


def test_a_broken_card_is_refused_before_anything_is_sent(server):
    with pytest.raises(OSError, match=r"org/name was not pushed: Invalid metadata in README\.md") as stopped:
        push(files=FILES | {"README.md": b"---\nlicense: [mit\n---\n"})
    assert str(stopped.value).isprintable()
    assert not server.seen("upload")
    assert not pushed(server)


def test_a_wrong_token_a_foreign_name_and_no_token_end_in_a_sentence(server, monkeypatch):
    with pytest.raises(OSError, match="google/vit was not pushed: the token may not do this"):
        push("google/vit")
    with pytest.raises(OSError, match="google/vit cannot be pushed to: the token may not do this"):
        client.create_repo("google/vit")
    with pytest.raises(OSError, match="the Hub does not accept the token") as stopped:
        push(token=PLANTED)
    assert PLANTED not in str(stopped.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match="no token was found: log in with `hf auth login`"):
        push()


def test_the_limits_leave_the_client_as_it_was(server):
    default = client.client_factory()

    def own_client():
        found = default()
        found.timeout = 7.5
        return found

    huggingface_hub.set_client_factory(own_client)
    try:
        push()
        with pytest.raises(OSError, match="may not do this"):
            push("google/vit")
        assert huggingface_hub.get_session().timeout.read == 7.5
    finally:
        huggingface_hub.set_client_factory(default)


# ---- pulls


@pytest.fixture
def filled(server) -> HubServer:
    extra = dict.fromkeys(("pytorch_model.bin", "modeling.py", "optimizer.pt"), b"no model needs it")
    server.create("model", "org/name", FILES | extra, private=True)
    return server


def test_weights_and_settings_are_pulled_but_no_pickle_and_no_code(filled):
    pinned = filled.repo("model", "org/name").commits[-1].sha
    filled.repo("model", "org/name").add({}, "emptied")
    found = {path.name: path.read_bytes() for path in client.pull("org/name", revision=pinned).iterdir()}
    assert found == {name: FILES[name] for name in FILES if name != "README.md"}


@pytest.mark.parametrize(
    ("endpoint", "kind", "words"),
    [
        ("info", 401, "the Hub does not accept the token"),
        ("info", 403, "the token may not do this"),
        ("info", 404, "there is no such repository"),
        ("download", "corrupt", r"model\.safetensors came damaged and was removed; pull it again"),
        ("download", 500, "the Hub answered with 500"),
        ("download", "reset", "the connection broke"),
    ],
)
def test_a_pull_that_fails_is_one_sentence_and_the_next_completes(
    filled, short_waits, monkeypatch, endpoint, kind, words
):
    monkeypatch.setattr(client, "PATIENCE", 1.0)
    filled.fail(endpoint, kind, times=99, path="model.safetensors" if endpoint == "download" else "")
    with pytest.raises(OSError, match=f"^org/name could not be pulled: .*{words}") as stopped:
        client.pull("org/name")
    assert str(stopped.value).isprintable()
    filled.heal()
    assert (client.pull("org/name") / "model.safetensors").read_bytes() == WEIGHTS


def test_a_full_cache_ends_a_pull_in_a_sentence(filled, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub.file_download, "http_get", full)
    sentence = quick(lambda: client.pull("org/name"))
    assert sentence.startswith("org/name could not be pulled: ")
    assert sentence.endswith(f"{os.strerror(errno.ENOSPC)}.")


def test_storage_on_another_host_is_read_without_the_token(filled):
    filled.fail("head", "redirect", times=99, path="model.safetensors")
    filled.fail("download", "redirect", path="model.safetensors")
    client.pull("org/name")
    elsewhere = [request for request in filled.requests if request.host != HOST]
    assert elsewhere
    assert not any(request.token for request in elsewhere)


def test_a_model_in_the_cache_needs_no_network(filled, monkeypatch):
    folder = client.pull("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert client.pull("org/name") == folder
    assert "HF_HUB_OFFLINE is set" in quick(push)


# ---- no network


@pytest.mark.parametrize("away", ["nowhere", "silent"])
def test_a_hub_that_is_away_is_not_waited_for(request, away):
    request.getfixturevalue(away)
    assert "cannot be reached: check the network or HF_ENDPOINT" in quick(push)


def test_a_model_that_is_neither_here_nor_reachable_says_what_to_do(nowhere):
    assert not client.online()
    sentence = quick(lambda: client.pull("org/name"))
    assert "org/name is not in the cache, and the Hub at" in sentence
    assert "give the folder of a model, or run once where the Hub can be reached" in sentence
