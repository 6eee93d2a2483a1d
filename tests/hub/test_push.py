"""Pushes and pulls by the real client: what lands on the Hub, and what happens when the Hub does not play
along.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants
from PIL import Image
from transformers import AutoModelForImageClassification, TrainingArguments

from hf_fixastep import FixAStepConfig, load_dataset
from hf_fixastep.cli import push
from hf_fixastep.data import DATASETS
from hf_fixastep.data.digits import DigitsOpenSet
from hf_fixastep.disk import digest
from hf_fixastep.hub import client
from hf_fixastep.hub.callback import HubCardCallback
from hf_fixastep.hub.push import ALLOWED
from hf_fixastep.runs import training
from hf_fixastep.runs.arguments import parse
from hf_fixastep.runs.recipe import read_yaml
from tests.hub.server import HOST, HubServer, Python
from tests.short_runs import make_config, make_trainer, random_images, tiny_vit


ROOT = Path(__file__).parents[2]
PLANTED = "hf_" + "Planted7" * 4
GIVEN = ["--hub_model_id", "org/name", "--hub_license", "mit"]
SETTINGS = {"push_to_hub": True, "hub_model_id": "org/name", "hub_license": "mit"}
FEW = {
    "max_steps": 4,
    "logging_steps": 2,
    "eval_steps": 2,
    "save_steps": 2,
    "save_total_limit": 1,
    "disable_tqdm": True,
}
SHORT = [word for name, value in FEW.items() for word in (f"--{name}", str(value))]


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A Hub for the clients in this process."""
    with HubServer() as server:
        ask(monkeypatch, server.url)
        monkeypatch.setenv("HF_TOKEN", server.token)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield server
    huggingface_hub.close_session()


def ask(monkeypatch, url: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """A Hub that is not there: a port nobody listens to."""
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        ask(monkeypatch, f"http://{HOST}:{taken.getsockname()[1]}")
        monkeypatch.setenv("HF_TOKEN", PLANTED)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two steps with its card, never pushed."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    trainer = make_trainer(
        folder, objects={"eval_dataset": random_images(12, seed=3, labeled=True)}, max_steps=2
    )
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


def push_run(folder: Path, *more: str) -> None:
    push.main([str(folder), *GIVEN, *more])


# ---- what lands on the Hub


def test_a_run_lands_on_the_hub_as_listed(server, finished, capsys):
    before = contents(finished)
    push_run(finished)
    files = pushed(server)
    wanted = {
        "model.safetensors",
        "config.json",
        "preprocessor_config.json",
        "README.md",
        "metrics.json",
        "log.csv",
    }
    assert files.keys() == {*wanted, "recipe.yaml"}
    assert files["model.safetensors"] == before["model.safetensors"]
    assert json.loads(files["config.json"]) == json.loads(before["config.json"])
    assert contents(finished) == before
    assert ModelCard(files["README.md"].decode()).data.license == "mit"
    sha = server.repo("model", "org/name").commits[-1].sha
    assert f"Pushed: {server.url}/org/name/commit/{sha}" in capsys.readouterr().out


def test_pushing_twice_changes_nothing_and_a_file_that_is_gone_goes(server, finished):
    server.create("model", "org/name", {"gate.png": b"old", "mine.txt": b"theirs"})
    push_run(finished)
    assert "gate.png" not in pushed(server)
    assert pushed(server)["mine.txt"] == b"theirs"
    commits = len(server.repo("model", "org/name").commits)
    push_run(finished)
    assert len(server.repo("model", "org/name").commits) == commits


def test_private_and_branch_are_kept(server, finished):
    push_run(finished, "--hub_private_repo", "true", "--hub_revision", "try")
    repo = server.repo("model", "org/name")
    assert repo.private
    assert "model.safetensors" in repo.files("try")
    assert "model.safetensors" not in repo.files("main")


def test_a_dry_run_shows_the_card_and_asks_nobody(finished, capsys):
    push_run(finished, "--dry_run", "true")
    shown = capsys.readouterr().out
    assert 'model="org/name"' in shown
    assert "Files: README.md, config.json, log.csv, metrics.json, model.safetensors" in shown


def test_what_is_pulled_gives_the_same_logits(server, finished):
    push_run(finished)
    images = torch.rand(5, 3, 8, 8)
    models = [
        AutoModelForImageClassification.from_pretrained(folder)
        for folder in (finished, client.pull("org/name"))
    ]
    here, there = (model.eval()(pixel_values=images).logits for model in models)
    assert torch.equal(here, there)


def test_a_pinned_revision_stays(server, finished, tmp_path):
    push_run(finished)
    pinned = server.repo("model", "org/name").commits[-1].sha
    server.create("model", "org/other", {"model.safetensors": b"x"})
    server.repo("model", "org/name").add({}, "emptied")
    weights = (client.pull("org/name", revision=pinned) / "model.safetensors").read_bytes()
    assert weights == (finished / "model.safetensors").read_bytes()


def test_the_trainer_pushes_the_averaged_weights_with_validation_results(server, tmp_path):
    folder = tmp_path / "run"
    objects = {"eval_dataset": random_images(12, seed=3, labeled=True)}
    trainer = make_trainer(folder, objects=objects, max_steps=2, hub_token=server.token, **SETTINGS)
    trainer.train()
    trainer.push_to_hub()
    files = pushed(server)
    assert set(files) <= set(ALLOWED)
    weights = trainer.model.state_dict()
    pulled = AutoModelForImageClassification.from_pretrained(client.pull("org/name")).state_dict()
    assert all(torch.equal(weights[name], pulled[name]) for name in weights)
    (accuracy, _) = ModelCard(files["README.md"].decode()).data.eval_results
    assert accuracy.dataset_split == "validation"
    assert accuracy.metric_value == pytest.approx(trainer.evaluate()["eval_accuracy"], abs=1e-4)


def test_save_model_pushes_too_as_the_trainer_of_transformers_does(server, tmp_path):
    trainer = make_trainer(tmp_path / "run", max_steps=1, **SETTINGS)
    trainer.train()
    trainer.save_model()
    assert set(pushed(server)) <= set(ALLOWED)
    assert "No accuracy was measured" in pushed(server)["README.md"].decode()


def test_no_token_is_left_anywhere(server, tmp_path, monkeypatch):
    """Given as a setting, on the command line: not in the files of the run, not in what was pushed."""
    monkeypatch.delenv("HF_TOKEN")
    server.token = PLANTED
    folder = tmp_path / "run"
    training.main(
        [*start("digits/quickstart", folder), *GIVEN, "--hub_token", PLANTED, "--hub_strategy", "every_save"]
    )
    local = contents(folder)
    assert {"checkpoint-4/trainer_state.json", "recipe.yaml", "README.md"} <= set(local)
    files = [
        *local.items(),
        *((n, d) for c in server.repo("model", "org/name").commits for n, d in files_of(c)),
    ]
    assert [name for name, data in files if PLANTED.encode() in data] == []
    assert [name for name in local if name.endswith(".bin")] == []


def start(recipe: str, folder: Path) -> list[str]:
    config = ["--config", str(ROOT / "recipes" / f"{recipe}.yaml"), "--output_dir", str(folder)]
    return [*config, *SHORT, "--push_to_hub", "true"]


def files_of(commit):
    return [(path, file.data) for path, file in commit.tree.items()]


@pytest.mark.slow
def test_paths_of_this_machine_stay_here(server, tmp_path):
    """The recipe in the folder keeps them, what is pushed does not."""
    labeled, pile = tmp_path / "secret_place" / "labeled", tmp_path / "secret_place" / "pile"
    pile.mkdir(parents=True)
    for row, example in enumerate(load_dataset("digits_open_set", split="validation")):
        folder = labeled / f"digit {example['label']}"
        folder.mkdir(parents=True, exist_ok=True)
        example["image"].save(folder / f"{row}.png")
        example["image"].save(pile / f"{row}.png")
    run = tmp_path / "run"
    sides = json.dumps({"labeled": str(labeled), "unlabeled": str(pile)})
    training.main(
        [
            *(*start("folders/fixmatch", run), *GIVEN, "--dataset_kwargs", sides, "--image_size", "8"),
            *("--model_kwargs", "{depth: 10, width: 1}", "--per_device_train_batch_size", "4"),
        ]
    )
    assert "secret_place" in (run / "recipe.yaml").read_text()
    assert [name for name, data in pushed(server).items() if b"secret_place" in data] == []
    recipe = yaml.safe_load(pushed(server)["recipe.yaml"])
    assert recipe["dataset_kwargs"] == {"labeled": "labeled", "unlabeled": "pile"}


def test_the_recipe_holds_what_was_given_and_no_default(finished, tmp_path):
    recipe = yaml.safe_load((finished / "recipe.yaml").read_text())
    assert {"loss": "mean_teacher", "max_steps": 2, "unlabeled_ratio": 1.0}.items() <= recipe.items()
    assert {"learning_rate", "mix_labeled", "adam_beta1", "gate"} & recipe.keys() == set()
    config = ROOT / "recipes/digits/supervised.yaml"
    types = (training.DataArguments, training.ModelArguments, FixAStepConfig)
    given = parse(types, ["--config", str(config), "--seed", "3", "--use_cpu", "true"])[-1]
    # Which is the default's.
    assert given.keys() == {*read_yaml(config), "seed", "use_cpu"} - {"save_strategy"}


# ---- during the training


def test_every_save_is_pushed_with_a_card_of_its_own(server, tmp_path):
    folder = tmp_path / "run"
    objects = {"eval_dataset": random_images(12, seed=3, labeled=True)}
    steps = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    trainer = make_trainer(
        folder, objects=objects, hub_strategy="every_save", save_total_limit=1, **steps, **SETTINGS
    )
    trainer.add_callback(WaitForPush(trainer))
    trainer.train()
    first, second = server.repo("model", "org/name").commits[1:]
    assert [first.message, second.message] == [f"Training in progress, step {step}" for step in (2, 4)]
    for commit, step in ((first, 2), (second, 4)):
        files = dict(files_of(commit))
        assert set(files) - {".gitattributes"} <= set(ALLOWED)
        assert f"this is step {step}." in files["README.md"].decode()
        logged = [row for row in trainer.state.log_history if row["step"] == step and "eval_accuracy" in row]
        assert json.loads(files["metrics.json"])["validation_accuracy"] == logged[0]["eval_accuracy"]
    assert files["model.safetensors"] == (folder / "checkpoint-4" / "model.safetensors").read_bytes()
    assert not (folder / "metrics.json").exists()  # which says that a run is over


class WaitForPush(HubCardCallback):
    def on_save(self, *args, **kwargs):
        self.trainer.card.pushing.join()


def test_a_push_that_fails_does_not_stop_the_training(server, tmp_path, caplog):
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path / "run", hub_strategy="every_save", **steps, **SETTINGS)
    trainer.add_callback(WaitForPush(trainer))
    server.fail("preupload", 403, times=9)
    with caplog.at_level(logging.WARNING, "hf_fixastep.callbacks"):
        trainer.train()
    assert trainer.state.global_step == 4
    warnings = [message for message in caplog.messages if message.endswith("The training goes on.")]
    assert [warning.split(":")[:2] for warning in warnings] == [
        ["org/name was not pushed", " the token may not do this"]
    ] * 2


def test_a_model_that_may_not_be_pushed_does_not_stop_the_training(server, tmp_path, caplog):
    trainer = make_trainer(
        tmp_path / "run", save_strategy="steps", save_steps=4, hub_strategy="every_save", **SETTINGS
    )
    trainer.model.config.custom_pipelines = {"mine": "code.py"}
    with caplog.at_level(logging.WARNING, "hf_fixastep.callbacks"):
        trainer.train()
    assert "asks to run code from the Hub" in caplog.text
    assert len(server.repo("model", "org/name").commits) == 1


def test_without_the_callback_nothing_is_pushed_during_the_training(server, tmp_path):
    steps = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path / "run", hub_strategy="every_save", **steps, **SETTINGS)
    trainer.remove_callback(HubCardCallback)
    trainer.train()
    assert len(server.repo("model", "org/name").commits) == 1


@pytest.mark.slow
def test_a_push_at_the_end_that_fails_leaves_the_model_and_says_how_to_go_on(
    server, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "run"
    server.fail("commit", 500, times=3)
    with pytest.raises(
        SystemExit, match=r"^error: .*answered with 500.* The model is saved; to push it: "
    ) as stopped:
        training.main([*start("digits/supervised", folder), *GIVEN])
    assert "\n" not in str(stopped.value)
    command = str(stopped.value).split("push it: fixastep push ")[1].split()
    assert pushed(server) == {}
    push.main(command)  # nothing else has to be given
    assert pushed(server)["model.safetensors"] == (folder / "model.safetensors").read_bytes()


# ---- what is missing is missed at once


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hub_license": None}, "hub_license is not given, and a card cannot know it"),
        ({"hub_license": "My Own"}, "hub_license is 'My Own', but expected a short name"),
        ({"hub_model_id": None}, "hub_model_id is not given: say where on the Hub"),
        ({"hub_model_id": "../../etc"}, "hub_model_id is '../../etc', but the Hub takes names"),
        (
            {"hub_strategy": "checkpoint"},
            "hub_strategy is checkpoint, which would push the optimizer's state",
        ),
        ({"hub_strategy": "all_checkpoints"}, "hub_strategy is all_checkpoints, which would push"),
    ],
)
def test_a_push_that_cannot_work_is_refused_before_the_training(tmp_path, settings, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make_config(tmp_path / "run", **SETTINGS | settings)


def test_settings_changed_later_are_checked_as_well(server, tmp_path):
    trainer = make_trainer(tmp_path / "run", max_steps=1)
    trainer.args.set_push_to_hub("org/name", strategy="checkpoint")
    with pytest.raises(ValueError, match="hub_license is not given"):
        trainer.push_to_hub()
    assert server.requests == []


def test_a_run_on_medical_data_does_not_start_without_an_intended_use(tmp_path, monkeypatch):
    monkeypatch.setattr(DigitsOpenSet, "medical", True, raising=False)
    with pytest.raises(
        SystemExit, match=r"^error: hub_intended_use is not given, and these data are medical"
    ):
        training.main([*start("digits/supervised", tmp_path / "run"), *GIVEN])
    assert not (tmp_path / "run").exists()


def test_the_names_of_the_trainer_of_transformers_keep_their_meaning():
    stock = {field for field in TrainingArguments.__dataclass_fields__ if field.startswith("hub_")}
    assert {f for f in FixAStepConfig.__dataclass_fields__ if f.startswith("hub_")} - stock == {
        "hub_license",
        "hub_intended_use",
    }


# ---- faults


FAULTS = {
    "create 401": ("create", 401, {}, "the Hub does not accept the token"),
    "create 403": ("create", 403, {}, "the token may not do this"),
    "preupload 404": ("preupload", 404, {}, "there is no such repository"),
    "commit 409": ("commit", 409, {}, "it is being changed by someone else"),
    "commit 412": ("commit", 412, {}, "it was changed by someone else meanwhile"),
    "preupload 429, an hour": ("preupload", 429, {"seconds": 3600}, "the Hub asks to wait for 3600 seconds"),
    "upload 500": ("upload", 500, {}, "the Hub answered with 500 for"),
    "commit 500": ("commit", 500, {}, "the Hub answered with 500: try again later"),
    "upload reset": ("upload", "reset", {}, "the connection broke"),
    "commit reset": ("commit", "reset", {}, "the connection broke: try again"),
    "preupload too slow": ("preupload", "drip", {"seconds": 1}, "the connection broke or no answer came for"),
    "create too slow": ("create", "drip", {"seconds": 1}, "the Hub was silent for"),
    "wrong hash": ("upload", "corrupt", {}, "the Hub refused what it got ('The sha256 of the content"),
    "redirect of the upload": ("upload", "redirect", {}, "the Hub sends us to another host, '127.0.0.2'"),
    "redirect of the commit": ("commit", "redirect", {}, "the Hub sends us to another host, '127.0.0.2'"),
}


LONG = (
    "commit 409",
    "commit 412",
    "preupload too slow",
    "upload 500",
    "commit reset",
    "redirect of the commit",
)


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=pytest.mark.slow if f in LONG else ()) for f in FAULTS]
)
def test_a_fault_is_one_sentence_and_the_next_push_completes(server, finished, fault, monkeypatch):
    endpoint, kind, more, words = FAULTS[fault]
    for name, seconds in {"PATIENCE": 0.8, "STALL": 0.3, "PAUSE": 0.05}.items():
        monkeypatch.setattr(client, name, seconds)
    before = contents(finished)
    server.fail(endpoint, kind, times=99, **more)
    start = time.monotonic()
    with pytest.raises(SystemExit, match=re.escape(words)) as stopped:
        push_run(finished)
    assert time.monotonic() - start < 12
    message = str(stopped.value)
    assert message.startswith("error: org/name was not pushed: ")
    assert message.endswith(". Nothing on this machine was changed.")
    assert message.isprintable()
    assert contents(finished) == before
    assert {request.host for request in server.requests} == {HOST}  # nothing was sent to another one
    server.heal()
    push_run(finished)
    assert pushed(server)["model.safetensors"] == before["model.safetensors"]


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
def test_a_fault_that_passes_is_survived(server, finished, endpoint, kind, more, monkeypatch):
    monkeypatch.setattr(client, "STALL", 0.3)
    monkeypatch.setattr(client, "PAUSE", 0.05)
    server.fail(endpoint, kind, **more)
    push_run(finished)
    assert pushed(server)["model.safetensors"] == (finished / "model.safetensors").read_bytes()
    assert len(server.repo("model", "org/name").commits) == 2  # not one more for the repetition


def test_what_was_uploaded_is_not_uploaded_again(server, finished):
    server.fail("commit", 403)
    with pytest.raises(SystemExit, match="may not do this"):
        push_run(finished)
    push_run(finished)
    assert len(server.seen("upload")) == 1


def test_another_content_on_the_hub_is_noticed(server, finished):
    sha256 = digest(finished / "model.safetensors")
    server.objects[sha256] = b"what the storage made of it"
    with pytest.raises(SystemExit, match=r"the Hub has another content of model\.safetensors than was sent"):
        push_run(finished)


def test_a_wrong_token_and_a_foreign_name_end_in_a_sentence(server, finished, monkeypatch):
    with pytest.raises(SystemExit, match="google/vit was not pushed: the token may not do this"):
        push.main([str(finished), "--hub_model_id", "google/vit", "--hub_license", "mit"])
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    with pytest.raises(SystemExit, match="the Hub does not accept the token") as stopped:
        push_run(finished)
    assert PLANTED not in str(stopped.value)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(SystemExit, match="no token was found: log in with `hf auth login`"):
        push_run(finished)


def test_a_user_who_may_not_push_learns_it_before_the_training(server, tmp_path):
    with pytest.raises(
        SystemExit, match=r"^error: google/vit cannot be pushed to: the token may not do this"
    ):
        training.main([*start("digits/supervised", tmp_path / "run"), *GIVEN, "--hub_model_id", "google/vit"])
    assert contents(tmp_path / "run") == {}


def test_the_limits_leave_the_client_as_it_was(server, finished):
    huggingface_hub.set_client_factory(own_client)
    try:
        push_run(finished)
        with pytest.raises(SystemExit):
            push.main([str(finished), "--hub_model_id", "google/vit", "--hub_license", "mit"])
        assert huggingface_hub.get_session().timeout.read == 7.5
    finally:
        huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)


def own_client():
    client = huggingface_hub.utils._http.default_client_factory()
    client.timeout = 7.5
    return client


# ---- pulls


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
    server, finished, endpoint, kind, words, monkeypatch
):
    push_run(finished)
    monkeypatch.setattr(client, "PATIENCE", 1.0)
    server.fail(endpoint, kind, times=99, path="model.safetensors" if endpoint == "download" else "")
    with pytest.raises(OSError, match=f"^org/name could not be pulled: .*{words}") as stopped:
        client.pull("org/name")
    assert str(stopped.value).isprintable()
    server.heal()
    assert digest(client.pull("org/name") / "model.safetensors") == digest(finished / "model.safetensors")


def test_storage_on_another_host_is_read_without_the_token(server, finished):
    push_run(finished)
    server.fail("head", "redirect", times=99, path="model.safetensors")
    server.fail("download", "redirect", path="model.safetensors")
    client.pull("org/name")
    elsewhere = [request for request in server.requests if request.host != HOST]
    assert elsewhere
    assert not any(request.token for request in elsewhere)


def test_no_pickle_and_no_code_is_pulled(server, finished):
    push_run(finished)
    repo = server.repo("model", "org/name")
    extra = dict.fromkeys(
        ("pytorch_model.bin", "modeling.py", "optimizer.pt"), repo.at("main").tree["config.json"]
    )
    repo.add({**repo.at("main").tree, **extra}, "extra")
    names = {path.name for path in client.pull("org/name").iterdir()}
    assert names == {"config.json", "preprocessor_config.json", "model.safetensors"}


# ---- no network


def quick(call) -> str:
    """The one sentence that a call ends in, within five seconds."""
    start = time.monotonic()
    with pytest.raises((SystemExit, OSError, ValueError)) as stopped:
        call()
    assert time.monotonic() - start < 5
    assert str(stopped.value).isprintable()
    return str(stopped.value)


def test_without_network_a_push_fails_quickly(nowhere, finished):
    assert "cannot be reached: check the network or HF_ENDPOINT" in quick(lambda: push_run(finished))


def test_without_network_a_training_that_is_to_be_pushed_does_not_start(nowhere, tmp_path):
    load_dataset("digits_open_set", "zeta50")  # its building is not what is timed
    assert "cannot be reached" in quick(
        lambda: training.main([*start("digits/supervised", tmp_path / "run"), *GIVEN])
    )


def test_without_network_a_model_by_name_fails_quickly(nowhere):
    model = training.ModelArguments(model="org/name")
    sentence = quick(lambda: training.load_model(model, 6, "paper"))
    assert "org/name is not in the cache, and the Hub at" in sentence
    assert "give the folder of a model, or run once where the Hub can be reached" in sentence


def test_without_network_cifar_fails_quickly(nowhere):
    sentence = quick(lambda: load_dataset("cifar10_six_animal", "zeta50"))
    assert "and pass the folder that holds it as data_dir" in sentence


def test_without_network_a_dataset_push_fails_quickly(nowhere):
    sentence = quick(lambda: push.main(["--dataset", "digits_open_set", "--hub_dataset_id", "org/data"]))
    assert "cannot be reached" in sentence


def test_a_host_that_never_answers_is_not_waited_for(monkeypatch, finished):
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen()
        ask(monkeypatch, f"http://{HOST}:{silent.getsockname()[1]}")
        monkeypatch.setenv("HF_TOKEN", PLANTED)
        assert "cannot be reached" in quick(lambda: push_run(finished))


def test_a_model_in_the_cache_needs_no_network(server, finished, monkeypatch):
    push_run(finished)
    folder = client.pull("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert client.pull("org/name") == folder


# ---- data sets


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


def test_every_medical_set_is_never_shared():
    medical = [kind for kind in DATASETS.values() if getattr(kind, "medical", False)]
    assert not any(getattr(kind, "shareable", False) for kind in medical)


@pytest.mark.parametrize(
    "argv", [[], ["nowhere"], ["--dataset", "digit_open_set", "--hub_dataset_id", "org/data"]]
)
def test_a_mistake_ends_in_one_sentence(argv):
    with pytest.raises(SystemExit, match=r"^error: ") as stopped:
        push.main(argv)
    assert str(stopped.value).isprintable()


# ---- whole, in processes of their own


def code_of(card: str) -> str:
    return re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]


def recipe(server: HubServer, tmp_path: Path, script: str, *argv: str) -> subprocess.CompletedProcess:
    environment = server.environment(tmp_path / "home") | {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(ROOT / "recipes" / script), *argv]
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_quickstart_trained_pushed_and_pulled_gives_the_same_logits(tmp_path):
    """In a fresh process with empty caches: by the Auto class, and by the code that the card prints."""
    with HubServer() as server:
        config = str(ROOT / "recipes/digits/quickstart.yaml")
        run = [
            "--config",
            config,
            "--output_dir",
            str(tmp_path / "run"),
            "--max_steps",
            "60",
            "--disable_tqdm",
            "true",
        ]
        done = recipe(server, tmp_path, "train.py", *run, "--push_to_hub", "true", *GIVEN)
        assert done.returncode == 0, done.stderr
        assert f"Pushed: {server.url}/org/name/commit/" in done.stdout
        assert set(pushed(server)) == set(ALLOWED)
        pinned = server.repo("model", "org/name").commits[-1].sha
        Image.fromarray(np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "image.png")
        here = AutoModelForImageClassification.from_pretrained(tmp_path / "run").eval()
        images = torch.linspace(-2, 2, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
        environment = server.environment(tmp_path / "empty") | {"PYTHONPATH": str(ROOT)}
        with Python(environment) as python:
            python(f"import os; os.chdir({str(tmp_path)!r})")
            outcome = python(
                f"""
                import torch, hf_fixastep
                from transformers import AutoModelForImageClassification
                model = AutoModelForImageClassification.from_pretrained("org/name", revision={pinned!r}).eval()
                images = torch.linspace(-2, 2, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
                result = model(pixel_values=images).logits.tolist()
                """
            )
            assert outcome.errors == []
            assert torch.equal(torch.tensor(outcome.value), here(pixel_values=images).logits)
            printed = code_of(pushed(server)["README.md"].decode()).replace("print(", "result = (")
            outcome = python(printed)
            assert outcome.errors == []
            assert {answer["label"] for answer in outcome.value} <= set("012345")
            results = python(
                """
                from huggingface_hub import ModelCard
                card = ModelCard.load("org/name")
                result = {f"{r.dataset_split} {r.metric_type}": r.metric_value for r in card.data.eval_results}
                """
            ).value
        metrics = json.loads((tmp_path / "run/metrics.json").read_text())
        assert results["test accuracy"] == pytest.approx(metrics["test_accuracy"], abs=1e-4)
        assert not [request for request in server.requests if request.path.endswith(".py")]


@pytest.mark.slow
def test_models_of_the_library_are_pulled_without_this_package(tmp_path):
    shapes = {
        "vit": "{patch_size: 4, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}",
        "convnext": "{patch_size: 2, hidden_sizes: [8, 16], depths: [1, 1], num_stages: 2}",
    }
    with HubServer() as server, Python(server.environment(tmp_path / "empty")) as python:
        Image.fromarray(np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "image.png")
        python(f"import os; os.chdir({str(tmp_path)!r})")
        for model, settings in shapes.items():
            folder = tmp_path / model
            run = [
                "--config",
                str(ROOT / "recipes/digits/supervised.yaml"),
                "--output_dir",
                str(folder),
                *SHORT,
            ]
            given = ["--push_to_hub", "true", "--hub_model_id", f"org/{model}", "--hub_license", "mit"]
            done = recipe(
                server, tmp_path, "train.py", *run, "--model", model, "--model_kwargs", settings, *given
            )
            assert done.returncode == 0, done.stderr
            printed = code_of(pushed(server, name=f"org/{model}")["README.md"].decode())
            assert "hf_fixastep" not in printed
            outcome = python(
                printed.replace("print(", "answers = (")
                + "\nimport sys\nresult = 'hf_fixastep' in sys.modules"
            )
            assert outcome.errors == []
            assert outcome.value is False
            outcome = python(
                f"""
                import torch
                from transformers import AutoModelForImageClassification
                model = AutoModelForImageClassification.from_pretrained("org/{model}").eval()
                result = model(pixel_values=torch.linspace(-2, 2, 192).reshape(1, 3, 8, 8)).logits.tolist()
                """
            )
            here = AutoModelForImageClassification.from_pretrained(folder).eval()
            expected = here(pixel_values=torch.linspace(-2, 2, 192).reshape(1, 3, 8, 8)).logits
            assert torch.equal(torch.tensor(outcome.value), expected)


@pytest.mark.slow
def test_a_pushed_data_set_is_loaded_without_this_package(tmp_path):
    with HubServer() as server:
        done = recipe(
            server,
            tmp_path,
            "push.py",
            "--dataset",
            "digits_open_set",
            "--zeta",
            "50",
            "--hub_dataset_id",
            "org/data",
        )
        assert done.returncode == 0, done.stderr
        with Python(server.environment(tmp_path / "empty")) as python:
            outcome = python(
                """
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
            )
    assert outcome.errors == []
    ours = load_dataset("digits_open_set", "zeta50")
    assert outcome.value["sizes"] == {name: len(split) for name, split in ours.items()}
    assert outcome.value["labels"] == ours["labeled"]["label"][:]
    assert outcome.value["unlabeled"] == ["None"]
    assert outcome.value["same"]


@pytest.mark.slow
def test_without_network_the_recipes_say_so_in_a_process_of_their_own(tmp_path, finished):
    """As a user meets it, with no client patched; importing torch is not what is timed."""
    with HubServer() as server:
        environment = server.environment(tmp_path / "home") | {"PYTHONPATH": str(ROOT)}
    environment["HF_ENDPOINT"] = f"http://{HOST}:9"
    with Python(environment) as python:
        python("from hf_fixastep.cli import push; from hf_fixastep.runs import training")
        for call in (
            f"push.main([{str(finished)!r}, *{GIVEN!r}])",
            "training.load_model(training.ModelArguments(model='org/name'), 6, 'paper')",
        ):
            outcome = python(f"try:\n    {call}\nexcept SystemExit as stop:\n    raise ValueError(stop)")
            assert "cannot be reached" in outcome.errors[0]
            assert outcome.seconds < 5


@pytest.mark.slow
def test_a_vit_trained_and_pushed_by_the_trainer_keeps_its_attention(server, tmp_path):
    trainer = make_trainer(tmp_path / "run", tiny_vit(), max_steps=2, **SETTINGS)
    trainer.train()
    trainer.push_to_hub()
    images = torch.rand(4, 3, 8, 8)
    pulled = AutoModelForImageClassification.from_pretrained(client.pull("org/name")).eval()
    assert torch.equal(pulled(pixel_values=images).logits, trainer.model.eval()(pixel_values=images).logits)


assert os.environ["HF_HUB_OFFLINE"] == "1"  # by conftest; a test that forgets the loopback server asks nobody
