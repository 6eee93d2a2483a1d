from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageClassification

from hf_fixastep import run_procedure
from hf_fixastep.procedures import SafeStudent
from tests.short_runs import (
    EAGER,
    assert_equal,
    assert_near,
    largest_difference,
    logged,
    make_trainer,
    random_images,
    tiny_vit,
    tiny_wide_resnet,
    train,
    weights,
)
from tests.test_resume import interrupted_equals_whole


VALIDATION = random_images(9, seed=3, labeled=True)
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", **SAVING}


@pytest.fixture(autouse=True)
def needs_peft(request: pytest.FixtureRequest) -> None:
    if "lora" in request.node.name:
        pytest.importorskip("peft", reason="peft, the extra of the same name, is not installed")


@pytest.mark.parametrize(
    ("build", "norms"), [(tiny_vit, "layernorm"), (tiny_wide_resnet, "bn")], ids=["ViT", "Wide ResNet"]
)
def test_only_head_and_norm_layers_are_trained(
    build: Callable[[], nn.Module], norms: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, build(), trainable="head_and_norms", teacher_decay=0.0)
    run = train(trainer)
    moved = {name for name, value in run.raw[0].items() if not torch.equal(value, run.raw[-1][name])}
    parameters = dict(trainer.model.named_parameters())
    expected = {name for name in parameters if norms in name.lower() or name.startswith("classifier")}
    assert 0 < len(expected) < len(parameters)
    assert moved & parameters.keys() == expected
    assert sum(p.numel() for group in trainer.optimizer.param_groups for p in group["params"]) == sum(
        parameters[name].numel() for name in expected
    )


def test_the_gate_works_on_a_part_of_the_parameters(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, tiny_vit(), trainable="head_and_norms", loss="fixmatch", loss_kwargs=EAGER
    )
    trainer.train()
    assert set(logged(trainer, "gate/open")) <= {0.0, 1.0}
    assert all(norm > 0 for norm in logged(trainer, "gate/unlabeled_norm"))


@pytest.mark.parametrize("trainable", ["head_and_norms", "lora"])
@pytest.mark.parametrize("loss", ["supervised", "mean_teacher"])
def test_a_resumed_run_equals_an_uninterrupted_one(trainable: str, loss: str, tmp_path: Path) -> None:
    interrupted_equals_whole(tmp_path, 3, build=tiny_vit, max_steps=6, trainable=trainable, loss=loss)


def test_lora_trains_the_head_and_low_rank_changes_of_linear_layers(tmp_path: Path) -> None:
    start = weights(tiny_vit())
    trainer = make_trainer(
        tmp_path, tiny_vit(), loss="supervised", trainable="lora", lora_rank=2, learning_rate=0.1
    )
    trainer.train()
    trainer.save_model()
    saved = AutoModelForImageClassification.from_pretrained(tmp_path).state_dict()
    assert saved.keys() == start.keys()
    layers = {f"{name}.weight" for name, m in tiny_vit().named_modules() if isinstance(m, nn.Linear)}
    moved = {name for name in start if not torch.equal(saved[name], start[name])}
    assert moved == layers | {"classifier.bias"}
    for name in layers - {"classifier.weight"}:
        assert torch.linalg.matrix_rank(saved[name] - start[name], atol=1e-6) <= 2


def test_a_model_saved_with_lora_is_a_plain_one_that_answers_the_same(tmp_path: Path) -> None:
    objects = {"eval_dataset": VALIDATION}
    trainer = make_trainer(
        tmp_path, tiny_vit(), objects=objects, loss="supervised", trainable="lora", learning_rate=0.1, **BEST
    )
    trainer.train()
    trainer.save_model()
    logits = torch.from_numpy(trainer.predict(VALIDATION).predictions)
    images = (VALIDATION.pixels / 255 - 0.5) / 0.25
    model = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(pixel_values=images).logits, logits, rtol=0, atol=1e-5)
        untrained = tiny_vit().eval()(pixel_values=images).logits
    assert (untrained - logits).abs().max() > 1e-2
    best = Path(trainer.state.best_model_checkpoint)
    assert_near(load_file(best / "model.safetensors"), load_file(tmp_path / "model.safetensors"))
    assert not any("lora" in name or "base_layer" in name for name in load_file(best / "model.safetensors"))
    assert not (tmp_path / "lora.safetensors").exists()


def test_lora_adds_twice_the_product_of_its_two_layers(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, tiny_vit(), loss="supervised", trainable="lora", learning_rate=0.1)
    trainer.train()
    trainer.save_model()
    saved = AutoModelForImageClassification.from_pretrained(tmp_path).state_dict()
    name, layer = next((n, m) for n, m in trainer.model.named_modules() if hasattr(m, "base_layer"))
    down, up = layer.lora_A["fixastep"].weight, layer.lora_B["fixastep"].weight
    expected = layer.base_layer.weight + 2 * up @ down
    torch.testing.assert_close(saved[f"{name}.weight"], expected, rtol=0, atol=1e-6)
    assert up.abs().max() > 0


def test_a_trainer_with_lora_takes_the_weights_of_a_plain_model(tmp_path: Path) -> None:
    tiny_vit(seed=5).save_pretrained(tmp_path / "plain")
    trainer = make_trainer(
        tmp_path / "run", tiny_vit(), loss="supervised", trainable="lora", learning_rate=0.1
    )
    trainer.train()
    trainer.load_plain(tmp_path / "plain")
    trainer.save_model()
    assert_equal(
        AutoModelForImageClassification.from_pretrained(tmp_path / "run").state_dict(), weights(tiny_vit(5))
    )


def test_a_procedure_runs_with_lora(tmp_path: Path) -> None:
    objects: dict[str, Any] = {"eval_dataset": VALIDATION}
    trainer = make_trainer(
        tmp_path, tiny_vit(), objects=objects, loss="supervised", trainable="lora", learning_rate=0.1, **BEST
    )
    run_procedure(SafeStudent(iterations=1), trainer, random_images(20, seed=2), tiny_vit)
    trainer.save_model()
    found, students = (
        load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "student-1")
    )
    assert_near(found, students)
    assert largest_difference(found, load_file(tmp_path / "teacher/model.safetensors")) > 1e-4


def test_lora_of_a_network_without_linear_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="has no linear layer besides its head; choose head_and_norms or all"
    ):
        make_trainer(tmp_path, tiny_wide_resnet(), trainable="lora")


def test_without_peft_one_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"needs peft; install it with  pip install hf_fixastep\[peft\]"):
        make_trainer(tmp_path, tiny_vit(), trainable="lora")
