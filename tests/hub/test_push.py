"""What a run, a training and a data set put on the Hub, and what they keep to themselves."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from transformers import AutoModelForImageClassification, TrainerCallback, TrainingArguments

from hf_fixastep import FixAStepConfig, load_dataset
from hf_fixastep.cli import push
from hf_fixastep.data.digits import DigitsOpenSet
from hf_fixastep.hub import client
from hf_fixastep.hub.callback import HubCardCallback
from hf_fixastep.hub.push import ALLOWED
from hf_fixastep.runs import training
from hf_fixastep.runs.arguments import parse
from hf_fixastep.runs.folder import CARD, CONFIGS, LOG, METRICS, RECIPE, WEIGHTS
from hf_fixastep.runs.recipe import read_yaml
from tests.hub.conftest import PLANTED, ROOT, command, contents, pushed, quick
from tests.hub.server import HubServer, in_a_process
from tests.short_runs import make_trainer, random_images


GIVEN = ["--hub_model_id", "org/name", "--hub_license", "mit"]
SETTINGS = {"push_to_hub": True, "hub_model_id": "org/name", "hub_license": "mit"}
SHORT = (
    "--max_steps 4 --logging_steps 2 --eval_steps 2 --save_steps 2 --save_total_limit 1 --disable_tqdm true"
)


def push_run(folder: Path, *more: str) -> None:
    push.main([str(folder), *GIVEN, *more])


# ---- what lands on the Hub


def test_a_run_lands_on_the_hub_as_listed(server, finished, capsys):
    before = contents(finished)
    push_run(finished)
    files = pushed(server)
    assert files.keys() == {WEIGHTS, *CONFIGS, CARD, METRICS, LOG, RECIPE}
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
    folders = (finished, client.pull("org/name"))
    models = [AutoModelForImageClassification.from_pretrained(folder) for folder in folders]
    here, there = (model.eval()(pixel_values=images).logits for model in models)
    assert torch.equal(here, there)


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
        *(file for c in server.repo("model", "org/name").commits for file in files_of(c)),
    ]
    assert [name for name, data in files if PLANTED.encode() in data] == []
    assert [name for name in local if name.endswith(".bin")] == []


def start(recipe: str, folder: Path) -> list[str]:
    config = ["--config", str(ROOT / "recipes" / f"{recipe}.yaml"), "--output_dir", str(folder)]
    return [*config, *SHORT.split(), "--push_to_hub", "true"]


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
    steps = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    settings = {"max_steps": 4, "hub_strategy": "every_save", "save_total_limit": 1, **steps, **SETTINGS}
    trainer = make_trainer(folder, objects=objects, **settings)
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


class WaitForPush(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer

    def on_save(self, *args, **kwargs):
        self.trainer.card.pushing.join()


def test_a_push_that_fails_does_not_stop_the_training(server, tmp_path, caplog):
    steps = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path / "run", hub_strategy="every_save", **steps, **SETTINGS)
    trainer.add_callback(WaitForPush(trainer))
    server.fail("preupload", 403, times=9)
    with caplog.at_level(logging.WARNING, "hf_fixastep.hub"):
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
    with caplog.at_level(logging.WARNING, "hf_fixastep.hub"):
        trainer.train()
    assert "asks to run code from the Hub" in caplog.text
    assert len(server.repo("model", "org/name").commits) == 1


def test_without_the_callback_nothing_is_pushed_during_the_training(server, tmp_path):
    steps = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(tmp_path / "run", hub_strategy="every_save", **steps, **SETTINGS)
    trainer.remove_callback(HubCardCallback)
    trainer.train()
    assert len(server.repo("model", "org/name").commits) == 1


def test_a_push_at_the_end_that_fails_leaves_the_model_and_says_how_to_go_on(server, short_waits, tmp_path):
    folder = tmp_path / "run"
    server.fail("commit", 500, times=3)
    sentence = r"^error: .*answered with 500.* The model is saved; to push it: "
    with pytest.raises(SystemExit, match=sentence) as stopped:
        training.main([*start("digits/supervised", folder), *GIVEN])
    assert "\n" not in str(stopped.value)
    assert pushed(server) == {}
    push.main(str(stopped.value).split("push it: fixastep push ")[1].split())  # nothing else has to be given
    assert pushed(server)["model.safetensors"] == (folder / "model.safetensors").read_bytes()


# ---- what is missing is missed at once


@pytest.mark.parametrize("settings", [{"hub_license": None}, {"hub_strategy": "checkpoint"}])
def test_a_push_that_cannot_work_is_refused_before_the_training(tmp_path, settings):
    with pytest.raises(ValueError, match=r"^hub_\w+ is "):
        make_trainer(tmp_path / "run", **SETTINGS | settings)


def test_settings_changed_later_are_checked_as_well(server, tmp_path):
    trainer = make_trainer(tmp_path / "run", max_steps=1)
    trainer.args.set_push_to_hub("org/name", strategy="checkpoint")
    with pytest.raises(ValueError, match="hub_license is not given"):
        trainer.push_to_hub()
    assert server.requests == []


def test_a_run_on_medical_data_does_not_start_without_an_intended_use(tmp_path, monkeypatch):
    monkeypatch.setattr(DigitsOpenSet, "medical", True, raising=False)
    sentence = r"^error: hub_intended_use is not given, and these data are medical"
    with pytest.raises(SystemExit, match=sentence):
        training.main([*start("digits/supervised", tmp_path / "run"), *GIVEN])
    assert not (tmp_path / "run").exists()


def test_the_names_of_the_trainer_of_transformers_keep_their_meaning():
    stock = {field for field in TrainingArguments.__dataclass_fields__ if field.startswith("hub_")}
    assert {f for f in FixAStepConfig.__dataclass_fields__ if f.startswith("hub_")} - stock == {
        "hub_license",
        "hub_intended_use",
    }


def test_a_user_who_may_not_push_learns_it_before_the_training(server, tmp_path):
    sentence = r"^error: google/vit cannot be pushed to: the token may not do this"
    with pytest.raises(SystemExit, match=sentence):
        training.main([*start("digits/supervised", tmp_path / "run"), *GIVEN, "--hub_model_id", "google/vit"])
    assert contents(tmp_path / "run") == {}


# ---- no network


def test_without_network_a_training_that_is_to_be_pushed_does_not_start(nowhere, tmp_path):
    load_dataset("digits_open_set", "zeta50")  # its building is not what is timed
    assert "cannot be reached" in quick(
        lambda: training.main([*start("digits/supervised", tmp_path / "run"), *GIVEN])
    )


def test_without_network_cifar_fails_quickly(nowhere):
    sentence = quick(lambda: load_dataset("cifar10_six_animal", "zeta50"))
    assert "and pass the folder that holds it as data_dir" in sentence


def test_without_network_a_dataset_push_fails_quickly(nowhere):
    sentence = quick(lambda: push.main(["--dataset", "digits_open_set", "--hub_dataset_id", "org/data"]))
    assert "cannot be reached" in sentence


@pytest.mark.parametrize(
    "argv", [[], ["nowhere"], ["--dataset", "digit_open_set", "--hub_dataset_id", "org/data"]]
)
def test_a_mistake_ends_in_one_sentence(argv):
    with pytest.raises(SystemExit, match=r"^error: ") as stopped:
        push.main(argv)
    assert str(stopped.value).isprintable()


# ---- whole, in processes of their own


def code_of(card: str) -> str:
    """The code that a card prints, with its answers in `answers`."""
    return re.search(r"```python\n(.*?)```", card, re.DOTALL)[1].replace("print(", "answers = (")


VIT = "{patch_size: 4, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 16}"


@pytest.mark.slow
@pytest.mark.parametrize("ours", [True, False], ids=["wide", "vit"])
def test_a_model_trained_pushed_and_pulled_gives_the_same_logits(tmp_path, ours):
    """In a fresh process with empty caches: by the Auto class, and by the code that the card prints."""
    Image.fromarray(np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "image.png")
    with HubServer() as server:
        network = [] if ours else ["--model", "vit", "--model_kwargs", VIT]
        run = [*start("digits/quickstart", tmp_path / "run"), *GIVEN, *network]
        printed = command(server, tmp_path, "train", *run)
        assert f"Pushed: {server.url}/org/name/commit/" in printed
        assert set(pushed(server)) == set(ALLOWED)
        code = code_of(pushed(server)["README.md"].decode())
        assert ("import hf_fixastep" in code) == ours
        environment = server.environment(tmp_path / "empty") | ({"PYTHONPATH": str(ROOT)} if ours else {})
        program = f"""
            import sys, torch
            from huggingface_hub import ModelCard
            from transformers import AutoModelForImageClassification
            exec({code!r})
            pinned = {server.repo("model", "org/name").commits[-1].sha!r}
            model = AutoModelForImageClassification.from_pretrained("org/name", revision=pinned).eval()
            results = ModelCard.load("org/name").data.eval_results
            result = {{
                "logits": model(pixel_values=torch.linspace(-2, 2, 384).reshape(2, 3, 8, 8)).logits.tolist(),
                "results": {{f"{{r.dataset_split}} {{r.metric_type}}": r.metric_value for r in results}},
                "labels": [answer["label"] for answer in answers],
                "ours": "hf_fixastep" in sys.modules,
            }}
        """
        found = in_a_process(environment, program, tmp_path)
        assert not [request for request in server.requests if request.path.endswith(".py")]
    here = AutoModelForImageClassification.from_pretrained(tmp_path / "run").eval()
    images = torch.linspace(-2, 2, 384).reshape(2, 3, 8, 8)
    assert torch.equal(torch.tensor(found["logits"]), here(pixel_values=images).logits)
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    assert found["results"]["test accuracy"] == pytest.approx(metrics["test_accuracy"], abs=1e-4)
    assert set(found["labels"]) <= set("012345")
    assert found["ours"] == ours


assert os.environ["HF_HUB_OFFLINE"] == "1"  # by conftest; a test that forgets the loopback server asks nobody
