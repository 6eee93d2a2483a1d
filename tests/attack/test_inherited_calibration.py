"""A calibration belongs to the weights it was made for: no other network takes it over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fixastep.cli import push
from hf_fixastep.disk import digest
from hf_fixastep.evaluation.calibration import Calibration, write_calibration
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.hub.loading import load_network
from tests.attack.plants import change, finish_run, save_run
from tests.short_runs import make_trainer, tiny_processor, tiny_vit


OTHERS = {"temperature": 0.05, "abstain_below": 0.6, "coverage": 0.9}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = save_run(tmp_path / "run")
    write_calibration(folder, Calibration(**OTHERS))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_calibration_names_the_weights_it_was_made_for(run: Path) -> None:
    assert config_of(run)["calibration"] == OTHERS | {"weights": digest(run / "model.safetensors")}
    found = Classifier(run).calibration
    assert found is not None
    assert (found.temperature, found.abstain_below, found.coverage) == (0.05, 0.6, 0.9)


@pytest.mark.parametrize("number", [3, 4])
def test_a_network_that_is_loaded_for_a_training_has_none(run: Path, number: int) -> None:
    assert not hasattr(load_network(run, number)[0].config, "calibration")


def test_a_training_drops_the_one_of_the_model_it_is_given(tmp_path: Path) -> None:
    model = tiny_vit()
    model.config.calibration = OTHERS
    trainer = make_trainer(tmp_path, model, max_steps=1)
    trainer.train()
    trainer.save_model()
    assert "calibration" not in config_of(tmp_path)


def test_a_network_with_another_head_drops_it(tmp_path: Path) -> None:
    model = tiny_vit()
    model.config.calibration = OTHERS
    Backbone(model, tiny_processor()).save(torch.zeros(2, 16), torch.zeros(2), ["a", "b"], tmp_path)
    assert "calibration" not in config_of(tmp_path)


def retrain(folder: Path) -> None:
    """Other weights in the same folder, with the config as it was."""
    config = config_of(folder)
    tiny_vit(seed=1).save_pretrained(folder)
    change(folder / "config.json", **config)
    finish_run(folder)


def forget(folder: Path) -> None:
    change(folder / "config.json", calibration=OTHERS)


@pytest.mark.parametrize("spoil", [retrain, forget])
def test_the_calibration_of_other_weights_is_refused(run: Path, spoil: Any) -> None:
    spoil(run)
    with pytest.raises(ValueError, match="calibration was made for other weights") as error:
        Classifier(run)
    assert "\n" not in str(error.value)
    assert str(run) in str(error.value)
    assert Classifier(run, calibrated=False).calibration is None  # to be calibrated anew


@pytest.mark.parametrize("spoil", [retrain, forget])
def test_it_is_not_pushed_either(run: Path, spoil: Any) -> None:
    spoil(run)
    with pytest.raises(SystemExit, match="calibration was made for other weights"):
        push.main([str(run), "--hub_model_id", "org/name", "--hub_license", "mit", "--dry_run", "true"])
