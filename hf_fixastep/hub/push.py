"""Pushes of nothing but what is on a list: a model with its card, or a data set that may be passed on."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError, safe_open

from hf_fixastep.data.registry import check_shareable, export_dataset
from hf_fixastep.disk import digest
from hf_fixastep.hub import client
from hf_fixastep.hub.cards import model_card
from hf_fixastep.hub.checks import check_intended_use, check_license, check_repo_id
from hf_fixastep.hub.screening import check_calibration, check_values, read_json, screen
from hf_fixastep.hub.texts import shared
from hf_fixastep.runs.folder import CARD, CONFIGS, FIGURES, LOG, METRICS, RECIPE, WEIGHTS, RunFolder


# All that a model on the Hub may consist of: no pickle, no optimizer, no image of the data.
ALLOWED = (WEIGHTS, *CONFIGS, CARD, METRICS, LOG, RECIPE, *FIGURES)
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{20,}")
PNG = b"\x89PNG\r\n\x1a\n"


def run_files(run: RunFolder, card: str) -> dict[str, bytes | Path]:
    """What a push of this run consists of, by name on the Hub."""
    files = {METRICS: json.dumps(shared(run.metrics), indent=2), RECIPE: yaml.safe_dump(shared(run.recipe))}
    log = run.log or run.folder / LOG
    if log.is_file() and (text := log.read_bytes()).startswith(b"step"):
        files[LOG] = text.decode()
    return model_files(run, {CARD: card, **files}, FIGURES)


def model_files(run: RunFolder, texts: Mapping[str, str], figures: Iterable[str]) -> dict[str, bytes | Path]:
    """A model with these texts and with figures of its folder; each file is checked for what it should be."""
    files: dict[str, bytes | Path] = {name: text.encode() for name, text in texts.items()}
    for name in CONFIGS:
        files[name] = json.dumps(shared_config(run.folder / name), indent=2).encode()
    for name in figures:
        if (run.folder / name).is_file() and (picture := (run.folder / name).read_bytes()).startswith(PNG):
            files[name] = picture
    files[WEIGHTS] = check_weights(run)
    for name, content in files.items():
        if isinstance(content, bytes) and TOKEN.search(content):
            raise ValueError(
                f"{name} holds what looks like an access token; remove it from the run before the push."
            )
    return files


def shared_config(path: Path) -> dict[str, Any]:
    """A config without paths of this machine, if it asks for no code."""
    config = read_json(path)
    check_values(path.name, config)
    # Names are no paths.
    classes = {key: config.pop(key) for key in ("id2label", "label2id") if key in config}
    return shared(config) | classes


def check_weights(run: RunFolder) -> Path:
    """The weights, if they are safetensors and the very ones that the card is about."""
    path = run.folder / WEIGHTS
    try:
        with safe_open(path, framework="numpy") as weights:
            notes = str(weights.metadata())
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no safetensors file ({error}), and no other kind of weights is pushed."
        ) from None
    if TOKEN.search(notes.encode()):
        raise ValueError(f"{path} holds what looks like an access token; save the model again without it.")
    if run.metrics.get("weights") != digest(path):
        raise ValueError(
            f"{path} is not the model that the numbers in its folder are about; train it again, so that the "
            "card says what is true."
        )
    return path


def check_push(run: RunFolder, repo_id: str | None, license: str | None, intended_use: str | None) -> str:
    """The name of the repository, if everything that a card cannot know was given, and the network asks for
    no code.
    """
    try:
        screen(run.folder)
        check_calibration(run.config.get("calibration"), lambda: run.metrics.get("weights"))
    except ValueError as error:
        raise ValueError(f"{run.folder} is not pushed: {error}.") from error
    check_license(license)
    check_intended_use(run.medical, intended_use)
    return check_repo_id(repo_id)


def prepare_model(
    run: RunFolder, repo_id: str | None, license: str | None, intended_use: str | None
) -> dict[str, bytes | Path]:
    """The files of a push of a run."""
    repo_id = check_push(run, repo_id, license, intended_use)
    return run_files(run, model_card(run, repo_id, license, intended_use))


def push_dataset(
    name: str,
    config: str | None,
    repo_id: str,
    *,
    license: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    **settings: Any,
) -> CommitInfo:
    """Export a data set that may be passed on, beside the configurations that the repository has already.

    Args:
        license: of data of your own; that of the others is known.
        settings: as in `load_dataset`.
    """
    check_repo_id(repo_id, "hub_dataset_id")
    check_shareable(name, license)
    if license is not None:
        check_license(license)
    where: dict[str, Any] = {"private": private, "revision": revision, "token": token}
    with tempfile.TemporaryDirectory() as folder:
        fetch_card(repo_id, Path(folder), revision, token)
        export_dataset(name, config, folder, license=license, **settings)
        files: dict[str, bytes | Path] = {
            path.relative_to(folder).as_posix(): path for path in Path(folder).glob("*/*.parquet")
        }
        card = (Path(folder) / CARD).read_text(encoding="utf-8")
        files[CARD] = card.replace('"this folder or repository"', json.dumps(repo_id)).encode()
        return client.push_files(files, repo_id, kind="dataset", message=f"Export {name}", **where)


def fetch_card(repo_id: str, folder: Path, revision: str | None, token: str | None) -> None:
    """The card of a repository, if it has one: the export adds to it, or refuses to write over another's."""
    try:
        client.check_online()
        with client.limits(other_hosts=True), tempfile.TemporaryDirectory() as place:
            api = HfApi(token=token)
            where: dict[str, Any] = {"repo_type": "dataset", "revision": revision, "local_dir": place}
            found = Path(api.hf_hub_download(repo_id, CARD, **where))
            (folder / CARD).write_bytes(found.read_bytes())
    except (RepositoryNotFoundError, RevisionNotFoundError, RemoteEntryNotFoundError):
        return
    except client.FAILURES as error:
        raise OSError(f"{repo_id} was not pushed: {client.reason(error)}.") from error
