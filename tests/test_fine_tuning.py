"""What the preset for pretrained networks needs: a rate of the head, frozen batch norm, a fitted teacher."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from hf_fixastep import FixAStepTrainer
from hf_fixastep.step.forwards import BATCH_NORM
from tests.short_runs import (
    assert_equal,
    assert_near,
    largest_difference,
    logged,
    make_trainer,
    random_images,
    tiny_vit,
    tiny_wide_resnet,
    train,
)
from tests.test_resume import interrupted_equals_whole


TRAINABLE = ["all", "head_and_norms", "lora"]


@pytest.fixture(autouse=True)
def needs_peft(request: pytest.FixtureRequest) -> None:
    if "lora" in request.node.name:
        pytest.importorskip("peft", reason="peft, the extra of the same name, is not installed")


class AtSteps(TrainerCallback):
    """Keeps what a function finds before every step."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self.look = look
        self.found: list[Any] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.found.append(self.look())


def watched(trainer: FixAStepTrainer, look: Callable[[], Any]) -> list[Any]:
    """What a function finds before every step of a training."""
    watch = AtSteps(look)
    trainer.add_callback(watch)
    trainer.train()
    return watch.found


# ---- the rate of the head


@pytest.mark.parametrize("trainable", TRAINABLE)
def test_the_head_has_groups_of_its_own_with_its_own_rate(trainable: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, tiny_vit(), preset="pretrained", trainable=trainable)
    names = {p: name for name, p in trainer.model.named_parameters() if p.requires_grad}
    seen = []
    for group in trainer.create_optimizer().param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            seen.append(name)
            rate = 30 * 1e-4 if name.startswith("classifier.") else 1e-4
            decay = 0.05 if parameter.ndim > 1 else 0.0
            assert (group["lr"], group["weight_decay"]) == (pytest.approx(rate), decay), name
    assert sorted(seen) == sorted(names.values())
    assert {"classifier.weight", "classifier.bias"} < set(seen)


def test_with_a_factor_of_one_the_groups_are_those_of_the_trainer(tmp_path: Path) -> None:
    groups = make_trainer(tmp_path, tiny_vit()).create_optimizer().param_groups
    assert [group["weight_decay"] for group in groups] == [5e-4, 0.0]


def test_the_layers_of_a_loss_learn_at_the_rate_of_the_head(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, tiny_vit(), preset="pretrained", loss="ds3l")
    groups = trainer.create_optimizer().param_groups
    own = {id(p) for p in trainer.loss.parameters()}
    rates = {group["lr"] for group in groups if any(id(p) in own for p in group["params"])}
    assert list(rates) == [pytest.approx(1e-4 * 30 * 0.2)]  # 0.2 is what DS3L states for its own


def test_both_rates_warm_up_over_a_tenth_of_the_run_and_follow_the_cosine(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, tiny_vit(), preset="pretrained", loss="supervised", max_steps=20)
    found = watched(trainer, lambda: [group["lr"] for group in trainer.optimizer.param_groups])
    shares = [step / 2 if step < 2 else (1 + math.cos(math.pi * (step - 2) / 18)) / 2 for step in range(20)]
    for rates, share in zip(found, shares, strict=True):
        assert rates == pytest.approx([1e-4 * share, 1e-4 * share, 3e-3 * share, 3e-3 * share], abs=1e-12)


@pytest.mark.parametrize("trainable", TRAINABLE)
@pytest.mark.parametrize("loss", ["mean_teacher", "openmatch"])
def test_a_resumed_run_equals_an_uninterrupted_one(trainable: str, loss: str, tmp_path: Path) -> None:
    settings = {"preset": "pretrained", "teacher_decay": None, "learning_rate": 1e-3, "loss": loss}
    interrupted_equals_whole(tmp_path, 3, build=tiny_vit, trainable=trainable, **settings)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    make_trainer(folder, tiny_vit(), **SAVED, save_strategy="steps", save_steps=2).train()
    return folder / "checkpoint-2"


SAVED = {"preset": "pretrained", "loss": "supervised", "max_steps": 8}


def test_a_changed_factor_is_really_used_by_a_resumed_run(saved: Path, tmp_path: Path) -> None:
    changed = {"head_rate_factor": 7.0, "ignore_changed_settings": ["head_rate_factor"]}
    trainer = make_trainer(tmp_path, tiny_vit(), **SAVED, **changed)
    rates: list[list[float]] = []
    trainer.add_callback(AtSteps(lambda: rates.append([g["lr"] for g in trainer.optimizer.param_groups])))
    trainer.train(str(saved))
    share = (1 + math.cos(math.pi / 7)) / 2  # of step 2, after one step of warm-up
    assert rates[0] == pytest.approx([1e-4 * share] * 2 + [7e-4 * share] * 2)
    assert rates[1][2] == pytest.approx(7 * rates[1][0])


@pytest.mark.parametrize("factor", [1.0, 7.0])
def test_a_head_without_groups_of_its_own_cannot_get_them_later(
    factor: float, saved: Path, tmp_path: Path
) -> None:
    changed = {"head_rate_factor": factor, "ignore_changed_settings": ["head_rate_factor"]}
    trainer = make_trainer(tmp_path, tiny_vit(), **SAVED, **changed)
    if factor != 1:
        assert trainer.check_checkpoint(saved) == {"head_rate_factor"}
        return
    with pytest.raises(ValueError, match=r"optim adamw_torch, the head apart, but this run has optim adamw"):
        trainer.check_checkpoint(saved)


# ---- frozen batch norm


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}


def test_frozen_batch_norm_keeps_its_statistics_and_learns_its_weights(tmp_path: Path) -> None:
    objects = {"eval_dataset": random_images(9, seed=3, labeled=True)}
    trainer = make_trainer(
        tmp_path, tiny_wide_resnet(bn_momentum=0.5), objects=objects, batchnorm="frozen", **EVALUATED
    )
    run = train(trainer)
    buffers = {name for name, _ in trainer.model.named_buffers()}
    assert buffers
    for found in (run.raw[-1], run.averaged[-1]):
        assert_equal(*({name: values[name] for name in buffers} for values in (found, run.raw[0])))
    layer = next(n for n, m in trainer.model.named_modules() if isinstance(m, BATCH_NORM))
    assert not torch.equal(run.raw[0][f"{layer}.weight"], run.raw[-1][f"{layer}.weight"])


@pytest.mark.parametrize("mode", ["frozen", "separate"])
def test_only_frozen_batch_norm_is_in_eval_mode_also_after_evaluations(mode: str, tmp_path: Path) -> None:
    seen: list[dict[bool, set[bool]]] = []

    class Looking(FixAStepTrainer):
        def compute_losses(self, model: nn.Module, *args: Any) -> Any:
            modes: dict[bool, set[bool]] = {True: set(), False: set()}
            for module in model.modules():
                modes[isinstance(module, BATCH_NORM)].add(module.training)
            seen.append(modes)
            return super().compute_losses(model, *args)

    objects = {"eval_dataset": random_images(9, seed=3, labeled=True)}
    make_trainer(tmp_path, tiny_wide_resnet(), Looking, objects, batchnorm=mode, **EVALUATED).train()
    assert seen == [{True: {mode != "frozen"}, False: {True}}] * 3


def test_with_frozen_batch_norm_every_set_of_images_has_a_forward_of_its_own(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, batchnorm="frozen").loss.batchnorm == "separate"
    assert make_trainer(tmp_path, batchnorm="joint").loss.batchnorm == "joint"


# ---- the fitted teacher


def test_the_decay_is_fitted_to_the_length_of_the_run_and_logged(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, preset="pretrained", loss="supervised", max_steps=25)
    assert trainer.teacher_decay is None  # nobody knows the length yet
    run = train(trainer)
    expected = {name: value for name, value in run.raw[0].items() if "num_batches" not in name}
    for raw in run.raw[1:]:
        expected = {name: 0.2 * value + 0.8 * raw[name] for name, value in expected.items()}
    assert_near({name: run.averaged[-1][name] for name in expected}, expected)
    assert largest_difference(expected, {name: run.raw[-1][name] for name in expected}) > 1e-6
    assert logged(trainer, "teacher_decay") == [pytest.approx(0.2)] * 25


def test_epochs_count_as_the_steps_that_they_have(tmp_path: Path) -> None:
    settings = {"max_steps": -1, "num_train_epochs": 2, "steps_per_epoch": 16}
    trainer = make_trainer(tmp_path, preset="pretrained", loss="supervised", **settings)
    trainer.train()
    assert trainer.teacher_decay == pytest.approx(1 - 20 / 32)


@pytest.mark.parametrize(("given", "decay"), [(None, 0.2), (0.7, 0.7)])
def test_a_run_and_its_card_tell_the_decay(given: float | None, decay: float, tmp_path: Path) -> None:
    settings = {"preset": "pretrained", "loss": "supervised", "teacher_decay": given, "max_steps": 25}
    trainer = make_trainer(tmp_path, **settings)
    trainer.train()
    trainer.save_model()
    trainer.card.write(trainer.card.facts({}))
    assert json.loads((tmp_path / "metrics.json").read_text())["teacher_decay"] == pytest.approx(decay)
    assert f"averaged with a decay of {decay:.1f}." in (tmp_path / "README.md").read_text()


def test_a_given_decay_is_not_in_the_log(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.train()
    assert not any("teacher_decay" in row for row in trainer.state.log_history)
