from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState, ViTConfig, ViTForImageClassification

from hf_fixastep import FixAStepTrainer
from tests.short_runs import (
    STATEFUL,
    assert_equal,
    largest_difference,
    make_trainer,
    random_images,
    tiny_vit,
    tiny_wide_resnet,
    train,
    weights,
)
from tests.test_trainer import Learned


class Interrupted(Exception):
    pass


class InterruptAfterSave(TrainerCallback):
    """What a queue does to a job: it is gone right after some checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Interrupted


def optimizer_tensors(trainer: FixAStepTrainer) -> dict[str, Tensor]:
    state = trainer.optimizer.state_dict()["state"]
    return {f"{i} {name}": value for i, values in state.items() for name, value in values.items()}


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The log without speeds."""
    return [
        {name: value for name, value in row.items() if "second" not in name and "runtime" not in name}
        for row in history
    ]


def interrupted_equals_whole(
    folder: Path, stop: int, build: Callable[[int], nn.Module] = tiny_wide_resnet, **settings: Any
) -> None:
    """Train in one go, and in two processes' worth of trainers; nothing may differ by a bit."""
    settings = {
        "max_steps": 8,
        "steps_per_epoch": 5,
        "teacher_decay": 0.9,
        "unlabeled_weight": 5.0,
    } | settings
    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    objects = {"eval_dataset": random_images(9, seed=3, labeled=True)}
    whole = make_trainer(folder / "whole", build(0), objects=objects, **settings, **saving)
    expected = train(whole)

    first = make_trainer(folder / "parts", build(0), objects=objects, **settings, **saving)
    first.add_callback(InterruptAfterSave(stop))
    with pytest.raises(Interrupted):
        first.train()
    torch.manual_seed(12345)
    second = make_trainer(folder / "parts", build(1), objects=objects, **settings, **saving)
    found = train(second, resume_from_checkpoint=True)

    assert len(found.raw) == 1 + settings["max_steps"] - stop
    for step in range(stop, settings["max_steps"] + 1):
        assert_equal(found.raw[step - stop], expected.raw[step])
        assert_equal(found.averaged[step - stop], expected.averaged[step])
    assert stop == settings["max_steps"] or largest_difference(expected.raw[stop], expected.raw[-1]) > 1e-4
    assert_equal(weights(second.model), weights(whole.model))
    assert_equal(weights(second.loss), weights(whole.loss))
    assert_equal(optimizer_tensors(second), optimizer_tensors(whole))
    assert second.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()
    assert without_times(second.state.log_history) == without_times(whole.state.log_history)


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_a_resumed_run_equals_an_uninterrupted_one_wherever_it_broke_off(stop: int, tmp_path: Path) -> None:
    interrupted_equals_whole(tmp_path, stop)  # in the first epoch, at its end, in the second


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_resumed_run_with_accumulation_equals_an_uninterrupted_one(stop: int, tmp_path: Path) -> None:
    # Epochs of five batches are steps of 2, 2 and 1.
    interrupted_equals_whole(tmp_path, stop, gradient_accumulation_steps=2)


class TiedForImageClassification(ViTForImageClassification):
    """Both linear layers of its first block have the same weights."""

    _tied_weights_keys = {"vit.layers.0.attention.q_proj.weight": "vit.layers.0.attention.k_proj.weight"}

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        attention = self.vit.layers[0].attention
        attention.q_proj.weight = attention.k_proj.weight


def tied_vit(seed: int) -> TiedForImageClassification:
    config = tiny_vit().config
    config.tie_word_embeddings = True
    torch.manual_seed(seed)
    return TiedForImageClassification(config)


def test_a_resumed_run_with_tied_weights_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    attention = tied_vit(0).vit.layers[0].attention
    assert attention.q_proj.weight is attention.k_proj.weight
    interrupted_equals_whole(tmp_path, 3, tied_vit, max_steps=5)


@pytest.mark.parametrize("stop", [3, 5])
def test_a_resumed_run_with_workers_equals_an_uninterrupted_one(stop: int, tmp_path: Path) -> None:
    interrupted_equals_whole(tmp_path, stop, dataloader_num_workers=2, max_steps=6)


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("fixmatch", {"unlabeled_ratio": 2.0, "loss_kwargs": {"threshold": 0.4}}),
        ("vat", {}),  # draws noise, and Adam has more state than SGD
        ("mixmatch", {}),
        ("pseudo_label", {"batchnorm": "separate", "loss_kwargs": {"threshold": 0.4}}),
        ("supervised", {}),
    ],
)
def test_every_loss_resumes_to_the_bit(loss: str, settings: dict[str, Any], tmp_path: Path) -> None:
    interrupted_equals_whole(tmp_path, 3, loss=loss, max_steps=6, **settings)


@pytest.mark.parametrize("loss", STATEFUL)
def test_every_loss_with_state_resumes_to_the_bit_with_its_layers_and_its_memory(
    loss: str, tmp_path: Path
) -> None:
    settings = {"loss_kwargs": STATEFUL[loss], "unlabeled_ratio": 4.0, "unlabeled_warmup_steps": 0.0}
    interrupted_equals_whole(tmp_path, 3, loss=loss, max_steps=6, **settings)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_network_from_transformers_resumes_to_the_bit_with_and_without_dropout(
    dropout: float, tmp_path: Path
) -> None:
    interrupted_equals_whole(tmp_path, 3, build=lambda seed: tiny_vit(seed, dropout), max_steps=6)


def test_a_run_logged_every_second_step_resumes_with_the_same_log(tmp_path: Path) -> None:
    interrupted_equals_whole(tmp_path, 4, logging_steps=2)


@pytest.mark.parametrize(("stop", "logging_steps"), [(1, 2), (5, 3), (7, 5), (4, 20)])
def test_a_resumed_log_has_the_values_from_before_the_checkpoint(
    stop: int, logging_steps: int, tmp_path: Path
) -> None:
    interrupted_equals_whole(tmp_path, stop, logging_steps=logging_steps)


@pytest.mark.parametrize("steps_per_epoch", [4, 5])
def test_a_run_that_broke_off_behind_its_last_step_is_only_finished(
    steps_per_epoch: int, tmp_path: Path
) -> None:
    interrupted_equals_whole(tmp_path, 8, steps_per_epoch=steps_per_epoch, logging_steps=3)


def test_a_resumed_run_is_not_evaluated_on_start_again(tmp_path: Path) -> None:
    interrupted_equals_whole(tmp_path, 3, eval_on_start=True, max_steps=4)


def test_a_checkpoint_can_be_continued_into_another_folder(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    expected = train(make_trainer(tmp_path / "whole", **saving))
    before = {path: path.read_bytes() for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    found = train(
        make_trainer(tmp_path / "other", tiny_wide_resnet(1), **saving), str(tmp_path / "whole/checkpoint-2")
    )
    assert_equal(found.raw[-1], expected.raw[-1])
    assert {path: path.read_bytes() for path in (tmp_path / "whole").rglob("*") if path.is_file()} == before


def test_the_csv_file_of_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    make_trainer(tmp_path / "whole", **saving).train()
    first = make_trainer(tmp_path / "parts", objects={"callbacks": [InterruptAfterSave(2)]}, **saving)
    with pytest.raises(Interrupted):
        first.train()
    make_trainer(tmp_path / "parts", **saving).train(resume_from_checkpoint=True)
    assert (tmp_path / "parts/log.csv").read_text() == (tmp_path / "whole/log.csv").read_text()


def test_parameters_and_buffers_of_a_loss_are_resumed(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "gate": "off", "unlabeled_warmup_steps": 0.0}
    whole, resumed = Learned(), Learned()
    train(make_trainer(tmp_path, objects={"loss": whole}, **saving))
    train(make_trainer(tmp_path, objects={"loss": resumed}, **saving), str(tmp_path / "checkpoint-2"))
    assert_equal(weights(resumed), weights(whole))
    assert float(resumed.steps) == 4
