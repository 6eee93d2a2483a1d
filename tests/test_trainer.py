from __future__ import annotations

import copy
import dataclasses
import math
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    ConvNextConfig,
    ConvNextForImageClassification,
    PrinterCallback,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
)

import hf_fixastep
from hf_fixastep import (
    FixAStepTrainer,
    Images,
    SemiSupervisedLoss,
    WideResNetConfig,
    WideResNetForImageClassification,
)
from hf_fixastep.losses import LOSSES
from hf_fixastep.losses.base import Losses
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.gate import GATES
from tests import naive
from tests.naive import Naive, NaiveFrozen, NaiveSeparate
from tests.short_runs import (
    EAGER,
    STATEFUL,
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
    without_augmentation,
)


# Settings that leave a visible trace within a few steps.
VISIBLE = {"weight_decay": 0.05, "teacher_decay": 0.9, "unlabeled_weight": 1.0, "max_steps": 5}


def same_as(loss: str, folder: Path, **settings: Any) -> None:
    """Compare a run, step by step, with the method written out; the unlabeled weight grows over two steps."""
    settings = VISIBLE | settings
    trainer = make_trainer(
        folder, tiny_wide_resnet(bn_momentum=0.1), loss=loss, unlabeled_warmup_steps=2.0, **settings
    )
    kinds = {"joint": Naive, "separate": NaiveSeparate, "frozen": NaiveFrozen}
    reference = kinds[trainer.args.batchnorm](
        trainer, getattr(naive, loss), lambda step: settings["unlabeled_weight"] * min(step / 2, 1)
    ).run()
    run = train(trainer)
    assert set(reference.open) == {0.0, 1.0}  # else the seed proves too little
    assert logged(trainer, "gate/open") == reference.open
    for step in range(settings["max_steps"] + 1):
        assert_near(run.raw[step], reference.raw[step])
        assert_near(run.averaged[step], reference.averaged[step])
    assert largest_difference(run.raw[0], run.raw[-1]) > 1e-2


# ---- the step against the method written out


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("mean_teacher", {"unlabeled_weight": 20.0, "mix_per_batch": True}),
        ("pi_model", {"unlabeled_weight": 20.0}),
        ("pseudo_label", {"loss_kwargs": EAGER}),
        ("fixmatch", {"loss_kwargs": EAGER, "unlabeled_ratio": 2.0, "mix_per_batch": True}),
        ("fixmatch", {"loss_kwargs": EAGER, "unlabeled_ratio": 2.0, "mix_pool": "all"}),
        ("fixmatch", {"loss_kwargs": EAGER, "unlabeled_ratio": 2.0, "mix_labeled": False}),
    ],
)
def test_steps_are_those_of_the_method_written_out(loss: str, settings: dict, tmp_path: Path) -> None:
    same_as(loss, tmp_path, **settings)


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("mean_teacher", {"unlabeled_weight": 20.0, "seed": 2}),
        ("pi_model", {"unlabeled_weight": 20.0, "seed": 1}),
        ("pseudo_label", {"loss_kwargs": EAGER, "mix_per_batch": True}),
        ("fixmatch", {"loss_kwargs": EAGER, "unlabeled_ratio": 2.0}),
        ("fixmatch", {"loss_kwargs": EAGER, "unlabeled_ratio": 2.0, "mix_labeled": False, "seed": 4}),
    ],
)
def test_separate_steps_are_those_of_the_method_written_out(
    loss: str, settings: dict, tmp_path: Path
) -> None:
    """Phase 1 takes the logits that the loss has of a view for guesses, and forwards nothing twice."""
    same_as(loss, tmp_path, batchnorm="separate", **settings)


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("mean_teacher", {"unlabeled_weight": 20.0}),
        ("pi_model", {"unlabeled_weight": 20.0}),
        ("fixmatch", {"loss_kwargs": EAGER, "unlabeled_ratio": 2.0, "mix_labeled": False}),
    ],
)
def test_steps_with_frozen_batch_norm_are_those_of_a_network_with_batch_norm_in_eval_mode(
    loss: str, settings: dict, tmp_path: Path
) -> None:
    same_as(loss, tmp_path, batchnorm="frozen", **settings)


@pytest.mark.parametrize(
    ("settings", "events"),
    [
        (
            {"batchnorm": "separate"},
            ["forward", "backward 1", "reduce 1", "forward", "forward", "backward 0", "reduce 0"],
        ),
        (
            {"batchnorm": "joint"},
            ["forward", "forward", "forward", "backward 0", "reduce 0", "backward 1", "reduce 1"],
        ),
        (  # guesses come first, for there are no logits of the loss yet
            {"batchnorm": "separate", "gate": "per_example"},
            ["forward", "forward", "backward 0", "reduce 0", "forward", "backward 1", "reduce 1"],
        ),
    ],
)
def test_the_first_gradient_is_reduced_while_the_second_is_computed(
    settings: dict, events: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where batch norm is separate, the first graph is gone before the second one is built."""
    found: list[str] = []

    class Telling(FixAStepTrainer):
        def _backward(self, row: int, loss: Tensor, **kwargs: Any) -> None:
            found.append(f"backward {row}")
            super()._backward(row, loss, **kwargs)

    monkeypatch.setattr(
        "hf_fixastep.step.gate.GradientSlots.start_reduce", lambda _, row: found.append(f"reduce {row}")
    )
    model = tiny_wide_resnet()
    model.register_forward_pre_hook(lambda m, _: found.append("forward") if m.training else None)
    make_trainer(tmp_path, model, Telling, max_steps=1, **settings).train()
    assert found == events


def test_partners_come_from_one_labeled_batch_size_of_each_view_also_where_the_loss_has_more(
    tmp_path: Path,
) -> None:
    same_as("mean_teacher", tmp_path, unlabeled_weight=20.0, unlabeled_ratio=2.0, mix_pool="batch")


def test_partners_come_from_all_unlabeled_rows_on_request(tmp_path: Path) -> None:
    same_as("mean_teacher", tmp_path, unlabeled_weight=20.0, unlabeled_ratio=2.0, mix_pool="all")


@pytest.mark.parametrize("gate", GATES)
def test_weight_zero_is_labeled_only_training_on_mixed_images_whatever_the_gate(
    gate: str, tmp_path: Path
) -> None:
    trainer = make_trainer(tmp_path, gate=gate, **VISIBLE | {"unlabeled_weight": 0.0, "max_steps": 3})
    reference = Naive(trainer, naive.mean_teacher, lambda step: 0.0).run()
    assert_near(train(trainer).raw[-1], reference.raw[-1])


def test_a_step_without_gate_mixing_and_unlabeled_weight_is_one_of_the_stock_trainer(tmp_path: Path) -> None:
    off = {"gate": "off", "mix_labeled": False, "unlabeled_weight": 0.0, "batchnorm": "separate"}
    trainer = make_trainer(tmp_path / "ours", **VISIBLE | off)
    model = copy.deepcopy(trainer.model)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": decayed, "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.03, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: math.cos(7 * math.pi * step / (16 * 5))
    )
    batches = [
        {"pixel_values": trainer.make_batch(batch).x, "labels": batch["labels"]}
        for batch, _ in zip(trainer.get_train_dataloader(), range(5), strict=False)
    ]
    stock = Trainer(
        model,
        TrainingArguments(
            output_dir=str(tmp_path / "stock"),
            per_device_train_batch_size=1,  # item: a whole batch
            train_sampling_strategy="sequential",
            max_steps=5,
            max_grad_norm=0.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=batches,
        data_collator=lambda items: items[0],
        optimizers=(optimizer, schedule),
    )
    stock.remove_callback(PrinterCallback)
    stock.train()
    assert_near(train(trainer).raw[-1], weights(model))
    assert largest_difference(weights(model), weights(tiny_wide_resnet())) > 1e-2


def test_views_are_a_function_of_seed_and_step_alone(tmp_path: Path) -> None:
    first, again = make_trainer(tmp_path, loss="fixmatch"), make_trainer(tmp_path, loss="fixmatch")
    other_seed = make_trainer(tmp_path, loss="fixmatch", seed=43)
    inputs = next(iter(first.get_train_dataloader()))
    torch.rand(3)  # the global generator has no say
    batch, same = first.make_batch(inputs), again.make_batch(inputs)
    later, other = first.make_batch({**inputs, "step": 1}), other_seed.make_batch(inputs)
    for name in ("weak", "weak_2", "strong"):
        assert torch.equal(batch.views[name], same.views[name])
        assert not torch.equal(batch.views[name], later.views[name])
        assert not torch.equal(batch.views[name], other.views[name])
    assert not torch.equal(batch.views["weak"], batch.views["weak_2"])
    assert torch.equal(batch.x, same.x)
    assert not torch.equal(batch.x, later.x)


# ---- several micro-batches


def on_vit(folder: Path, **settings: Any) -> FixAStepTrainer:
    """Rows do not meet and views are neutral, so that a batch is nothing but the sum of its rows."""
    settings = {"loss": "fixmatch", "loss_kwargs": EAGER, "mix_labeled": False, "max_steps": 6} | settings
    return without_augmentation(make_trainer(folder, tiny_vit(), **VISIBLE | settings))


@pytest.mark.parametrize("gate", ["drop", "project"])
def test_four_micro_batches_are_one_large_batch(gate: str, tmp_path: Path) -> None:
    one = on_vit(tmp_path, gate=gate, per_device_train_batch_size=8)
    four = on_vit(tmp_path, gate=gate, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    whole, parts = train(one), train(four)
    assert set(logged(one, "gate/open")) == {0.0, 1.0}
    assert logged(four, "gate/open") == logged(one, "gate/open")
    assert logged(four, "loss/labeled") == pytest.approx(logged(one, "loss/labeled"), abs=1e-6)
    assert_near(parts.raw[-1], whole.raw[-1])
    assert_near(parts.averaged[-1], whole.averaged[-1])


def test_a_last_window_of_fewer_micro_batches_is_a_smaller_batch(tmp_path: Path) -> None:
    trainer = on_vit(tmp_path, gradient_accumulation_steps=2, steps_per_epoch=3)
    reference = Naive(trainer, naive.fixmatch, lambda step: 1.0)
    loader, batches = trainer.get_train_dataloader(), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        batches += [trainer.make_batch(batch) for batch in loader]
    for window in ([0, 1], [2], [3, 4], [5], [6, 7], [8]):
        members = [batches[number] for number in window]
        views = {name: torch.cat([m.views[name] for m in members]) for name in ("weak", "strong")}
        reference.step(torch.cat([m.x for m in members]), torch.cat([m.y for m in members]), views)
    assert_near(train(trainer).raw[-1], reference.raw[-1])
    assert logged(trainer, "gate/open") == reference.open


class Gradients(TrainerCallback):
    """Keeps what the optimizer is about to see."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        self.seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))


def test_clipping_shortens_the_gated_gradient_as_a_whole(tmp_path: Path) -> None:
    free, clipped = Gradients(), Gradients()
    for gradients, limit in ((free, 0.0), (clipped, 0.01)):
        settings = {
            "gate": "off",
            "unlabeled_weight": 20.0,
            "unlabeled_warmup_steps": 0.0,
            "max_grad_norm": limit,
        }
        trainer = make_trainer(tmp_path, objects={"callbacks": [gradients]}, max_steps=1, **settings)
        trainer.train()
    length = free.seen[0].norm()
    torch.testing.assert_close(clipped.seen[0], free.seen[0] * 0.01 / length, rtol=1e-3, atol=1e-7)
    assert logged(trainer, "grad_norm") == pytest.approx([float(length)], rel=1e-4)


# ---- any model


def tiny_convnext() -> nn.Module:
    shape = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2, "image_size": 8}
    return ConvNextForImageClassification(ConvNextConfig(**shape, layer_scale_init_value=0.1, num_labels=3))


def tiny_resnet() -> nn.Module:
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return ResNetForImageClassification(config)


@pytest.mark.parametrize("build", [tiny_vit, tiny_convnext, tiny_resnet])
def test_any_image_classifier_trains_and_serves_a_pipeline(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    test_set = random_images(6, seed=3, labeled=True)
    trainer = make_trainer(tmp_path, build(), objects={"eval_dataset": test_set}, max_steps=3)
    run = train(trainer)
    matrices = [name for name, parameter in trainer.model.named_parameters() if parameter.ndim > 1]
    assert [name for name in matrices if torch.equal(run.raw[0][name], run.raw[-1][name])] == []
    predictions = trainer.predict(test_set)
    assert (
        trainer.evaluate()["eval_accuracy"]
        == (predictions.predictions.argmax(1) == predictions.label_ids).mean()
    )

    trainer.save_model()
    classify = pipeline("image-classification", model=str(tmp_path), device="cpu")
    for pixels, logits in zip(test_set.pixels, torch.tensor(predictions.predictions), strict=True):
        picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        scores = {answer["label"]: answer["score"] for answer in classify(picture)}
        assert [scores[name] for name in ("cat", "dog", "owl")] == pytest.approx(
            logits.softmax(0).tolist(), abs=1e-5
        )


def as_dataset(images: Images) -> datasets.Dataset:
    columns = {"image": [Image.fromarray(pixels.permute(1, 2, 0).numpy()) for pixels in images.pixels]}
    features = {"image": datasets.Image()}
    if images.labels is not None:
        columns["label"], features["label"] = (
            images.labels.tolist(),
            datasets.ClassLabel(names=images.class_names),
        )
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def test_datasets_and_decoded_images_train_and_evaluate_alike(tmp_path: Path) -> None:
    decoded = {
        "train_dataset": random_images(24, seed=1, labeled=True),
        "unlabeled_dataset": random_images(40, seed=2),
        "eval_dataset": random_images(9, seed=3, labeled=True),
    }
    encoded = {name: as_dataset(images) for name, images in decoded.items()}
    named = {
        **encoded,
        "eval_dataset": {"near": encoded["eval_dataset"], "far": as_dataset(decoded["train_dataset"])},
    }
    first, second, third = (make_trainer(tmp_path, objects=objects) for objects in (decoded, encoded, named))
    assert_equal(train(first).raw[-1], train(second).raw[-1])
    third.train()
    expected, several = first.evaluate(), third.evaluate()
    for name in ("loss", "accuracy", "recall_owl"):
        assert second.evaluate()[f"eval_{name}"] == expected[f"eval_{name}"] == several[f"eval_near_{name}"]
        assert f"eval_far_{name}" in several


def test_a_model_that_is_built_anew_for_every_training_gets_the_class_names_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, objects={"model_init": lambda: tiny_vit()}, max_steps=1)
    trainer.train()
    assert trainer.model.config.id2label == {0: "cat", 1: "dog", 2: "owl"}


class Learned(SemiSupervisedLoss):
    """Squared distance between the logits of the weak view and a learned point; counts its steps."""

    views = ("weak",)

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.zeros(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        self.steps += 1
        labeled, weak = self.logits(model, batch, "weak")
        return Losses(self.labeled_loss(labeled, batch.y), (weak.detach() - self.point).square().mean())


def test_parameters_of_a_loss_are_trained(tmp_path: Path) -> None:
    loss = Learned()
    trainer = make_trainer(tmp_path, objects={"loss": loss}, gate="off", unlabeled_warmup_steps=0.0)
    trainer.train()
    assert float(loss.point.detach().abs().min()) > 1e-4
    assert float(loss.steps) == 4


class Sized(Learned):
    """Remembers what it was told."""

    learning_rate_factor = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.told: list[dict[str, int]] = []
        self.logits_of_validation: list[Tensor] = []

    def prepare(self, model: nn.Module, **sizes: int) -> None:
        self.told.append(sizes)
        self.matrix = nn.Parameter(torch.ones(2, 2))

    def validated(self, logits: Tensor) -> None:
        self.logits_of_validation.append(logits)


def test_a_loss_learns_the_sizes_before_there_is_an_optimizer(tmp_path: Path) -> None:
    loss = Sized()
    trainer = make_trainer(
        tmp_path, objects={"loss": loss, "eval_dataset": random_images(9, seed=3, labeled=True)}
    )
    assert loss.told == [{"num_labels": 3, "unlabeled_rows": 40, "validation_rows": 9}]
    groups = trainer.create_optimizer().param_groups[2:]
    assert [group["params"] for group in groups] == [[loss.matrix], [loss.point]]
    rate = trainer.args.learning_rate / 2
    assert [(group["weight_decay"], group["lr"]) for group in groups] == [(5e-4, rate), (0.0, rate)]


def test_parameters_of_a_loss_are_trained_without_weight_decay_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, objects={"loss": Sized()}, weight_decay=0.0)
    assert sum(len(group["params"]) for group in trainer.create_optimizer().param_groups[2:]) == 2


def test_a_loss_starts_anew_with_every_model_that_is_built(tmp_path: Path) -> None:
    loss = Sized()
    trainer = make_trainer(
        tmp_path, objects={"loss": loss, "model_init": lambda: tiny_wide_resnet()}, max_steps=1
    )
    first = loss.matrix
    trainer.train()
    assert loss.matrix is not first
    assert len(loss.told) == 2


def test_a_loss_sees_what_the_average_says_about_the_validation_images(tmp_path: Path) -> None:
    loss = Sized()
    objects = {"loss": loss, "eval_dataset": random_images(9, seed=3, labeled=True)}
    trainer = make_trainer(tmp_path, objects=objects, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert [len(logits) for logits in loss.logits_of_validation] == [9, 9]
    expected = trainer.predict(random_images(9, seed=3, labeled=True)).predictions
    torch.testing.assert_close(loss.logits_of_validation[-1], torch.tensor(expected))
    assert len(loss.logits_of_validation) == 2  # not of what comes after the training


def test_a_batch_knows_the_step_and_the_weight(tmp_path: Path) -> None:
    seen = []

    class Seeing(Learned):
        def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
            seen.append((batch.step, batch.weight))
            return super().forward(model, batch, teacher)

    settings = {"gradient_accumulation_steps": 2, "unlabeled_weight": 8.0, "unlabeled_warmup_steps": 4.0}
    make_trainer(tmp_path, objects={"loss": Seeing()}, max_steps=3, **settings).train()
    assert seen == [(0, 2.0), (0, 2.0), (1, 4.0), (1, 4.0), (2, 6.0), (2, 6.0)]


@pytest.mark.parametrize("build", [tiny_vit, tiny_convnext, tiny_resnet])
@pytest.mark.parametrize("loss", STATEFUL)
def test_every_loss_with_state_trains_any_image_classifier_also_with_fix_a_step(
    loss: str, build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    settings = {
        "loss": loss,
        "loss_kwargs": STATEFUL[loss],
        "unlabeled_ratio": 4.0,
        "unlabeled_warmup_steps": 0.0,
    }
    trainer = make_trainer(tmp_path, build(), max_steps=4, **settings)
    run = train(trainer)
    assert largest_difference(run.raw[-1], run.raw[0]) > 1e-4
    assert all(
        torch.isfinite(value).all() for value in [*run.raw[-1].values(), *trainer.loss.state_dict().values()]
    )


def test_the_number_of_threads_can_be_set(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    make_trainer(tmp_path, cpu_threads=3)
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


# ---- what is evaluated and saved


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def plain_loss(model: nn.Module, state: dict[str, Tensor], images: Any) -> float:
    """Mean cross-entropy of these weights on images without augmentation, normalized by hand."""
    model = copy.deepcopy(model).eval()
    model.load_state_dict(state)
    x = (images.pixels / 255 - 0.5) / 0.25
    with torch.no_grad():
        log_probabilities = model(pixel_values=x).logits.log_softmax(1)
    return -float(log_probabilities[torch.arange(len(x)), images.labels].mean())


def test_evaluation_uses_the_averaged_weights_and_gives_the_raw_ones_back(tmp_path: Path) -> None:
    test_set = random_images(9, seed=3, labeled=True)
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "teacher_decay": 0.5, "max_steps": 5}
    trainer = make_trainer(tmp_path / "evaluated", objects={"eval_dataset": test_set}, **evaluated)
    run = train(trainer)
    losses = {row["step"]: row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row}
    assert losses.keys() == {2, 4, 5}
    for step, loss in losses.items():
        assert loss == pytest.approx(plain_loss(trainer.model, run.averaged[step], test_set), abs=1e-5)
        assert loss != pytest.approx(plain_loss(trainer.model, run.raw[step], test_set), abs=1e-3)
    undisturbed = train(make_trainer(tmp_path / "undisturbed", teacher_decay=0.5, max_steps=5))
    assert_equal(run.raw[-1], undisturbed.raw[-1])
    assert_equal(run.averaged[-1], undisturbed.averaged[-1])


def test_a_checkpoint_holds_the_average_as_the_model_and_the_raw_weights_beside_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, teacher_decay=0.5, save_strategy="steps", save_steps=2)
    run = train(trainer)
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        assert_equal(load_file(folder / "model.safetensors"), run.averaged[step])
        names = [name for name, _ in trainer.model.named_parameters()]
        assert_equal(load_file(folder / "training_weights.safetensors"), {n: run.raw[step][n] for n in names})
    assert largest_difference(run.raw[4], run.averaged[4]) > 1e-3


def test_after_training_the_model_is_the_average(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, teacher_decay=0.5)
    run = train(trainer)
    assert_equal(weights(trainer.model), run.averaged[-1])
    assert largest_difference(run.raw[-1], run.averaged[-1]) > 1e-3
    trainer.save_model(str(tmp_path / "saved"))
    assert_equal(load_file(tmp_path / "saved" / "model.safetensors"), run.averaged[-1])
    assert "training_weights.safetensors" not in files(tmp_path / "saved")


# transformers 5 saves the weights of a ViT under other names than the model has.
@pytest.mark.parametrize("build", [tiny_wide_resnet, tiny_vit])
def test_the_best_model_at_the_end_gives_the_best_metric_again(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    steps = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "teacher_decay": 0.5,
    }
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    objects = {"eval_dataset": random_images(24, seed=1, labeled=True)}
    trainer = make_trainer(tmp_path, build(), objects=objects, learning_rate=0.1, **steps, **best)
    run = train(trainer)
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    step = 1 + losses.index(min(losses))
    assert step < 4  # else it would be the last model in any case
    assert_equal(weights(trainer.model), run.averaged[step])
    assert trainer.evaluate()["eval_loss"] == min(losses)


def test_no_pickle_of_the_arguments_is_left_anywhere(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    assert not [name for name in files(tmp_path) if name.endswith("training_args.bin")]
    assert {"model.safetensors", "config.json", "checkpoint-4/model.safetensors"} <= files(tmp_path)


# ---- optimizer and schedule


def test_sgd_decays_the_29_convolution_and_linear_weights_of_the_benchmark_network(tmp_path: Path) -> None:
    model = WideResNetForImageClassification(WideResNetConfig(num_labels=3))
    trainer = make_trainer(tmp_path, model, loss="fixmatch")
    optimizer = trainer.create_optimizer()
    assert type(optimizer) is torch.optim.SGD
    name_of = {parameter: name for name, parameter in trainer.model.named_parameters()}
    decayed, free = ([name_of[p] for p in group["params"]] for group in optimizer.param_groups)
    assert len(decayed) == 29
    assert sorted(decayed) == sorted(
        name for name in name_of.values() if "bn" not in name and "bias" not in name
    )
    assert len(decayed) + len(free) == len(name_of)
    expected = {"lr": 0.03, "momentum": 0.9, "nesterov": True, "dampening": 0, "fused": True}
    for group, decay in zip(optimizer.param_groups, (5e-4, 0.0), strict=True):
        assert {name: group[name] for name in expected} == expected
        assert group["weight_decay"] == decay


def test_adam_decays_everything_as_part_of_the_gradient(tmp_path: Path) -> None:
    settings = {
        "loss": "supervised",
        "mix_labeled": False,
        "optim": "adam",
        "lr_cycle_steps": 0.0,
        "weight_decay": 0.5,
    }
    trainer = make_trainer(tmp_path, learning_rate=1e-3, **settings)
    reference = Naive(trainer, naive.labeled_only, lambda step: 0.0).run()
    assert_near(train(trainer).raw[-1], reference.raw[-1], within=1e-6)
    assert type(trainer.optimizer.optimizer) is torch.optim.Adam


@pytest.mark.parametrize(("setting", "cycle"), [(1.0, 5), (0.4, 2), (8.0, 8), (2.0, 2)])
def test_the_learning_rate_follows_seven_sixteenths_of_a_cosine(
    setting: float, cycle: int, tmp_path: Path
) -> None:
    trainer = make_trainer(
        tmp_path, loss="supervised", learning_rate=0.01, lr_cycle_steps=setting, max_steps=5
    )
    trainer.train()
    expected = [0.01 * max(0.0, math.cos(7 * math.pi * step / (16 * cycle))) for step in range(5)]
    assert logged(trainer, "learning_rate") == pytest.approx(expected, abs=1e-12)


# ---- the upstream preset


@pytest.mark.parametrize(
    ("loss", "labeled", "unlabeled"),
    [
        ("pi_model", 1 / 3, 1),
        ("mean_teacher", 1 / 3, 1),
        ("vat", 1 / 3, 2 / 3),
        ("pseudo_label", 1 / 3, 2 / 3),
        ("fixmatch", 1, 1),
        ("mixmatch", 1, 1),
    ],
)
def test_upstream_divides_by_all_rows_what_the_official_base_methods_do(
    loss: str, labeled: float, unlabeled: float, tmp_path: Path
) -> None:
    settings = {
        "preset": "upstream",
        "loss": loss,
        "unlabeled_ratio": 2.0,
        "mix_labeled": False,
        "max_steps": 1,
    }
    if loss in ("fixmatch", "pseudo_label"):
        settings["loss_kwargs"] = EAGER
    upstream, own = (
        make_trainer(tmp_path, **settings),
        make_trainer(tmp_path, divide_by_all_rows=False, **settings),
    )
    upstream.train()
    own.train()
    for name, factor in (("loss/labeled", labeled), ("loss/unlabeled", unlabeled)):
        assert logged(own, name)[0] > 0
        assert logged(upstream, name)[0] == pytest.approx(factor * logged(own, name)[0], rel=1e-6)


@pytest.mark.parametrize("loss", ["pi_model", "mean_teacher", "vat", "pseudo_label"])
def test_upstream_divides_each_loss_by_its_own_rows_once_labeled_images_are_mixed(
    loss: str, tmp_path: Path
) -> None:
    settings = {"preset": "upstream", "loss": loss, "unlabeled_ratio": 2.0, "max_steps": 1}
    upstream, own = (
        make_trainer(tmp_path, **settings),
        make_trainer(tmp_path, divide_by_all_rows=False, **settings),
    )
    upstream.train()
    own.train()
    for name in ("loss/labeled", "loss/unlabeled"):
        assert logged(upstream, name) == logged(own, name)


# ---- no waiting for the device


PACKAGE = Path(hf_fixastep.__file__).parent
WAITING_METHODS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__array__",
)
WAITING_OPERATIONS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "_unique2",
    "unique_dim",
    "is_nonzero",
)

# Numbers that were drawn by a generator on the host and never leave it, read there to plan the work of the
# device.
ON_THE_HOST = {
    ("views.py", "_apply", "tolist"),  # images per kind of operation
    ("views.py", "_tone", "tolist"),  # images per table
    ("views.py", "_geometry", "tolist"),  # operations and strengths, for the matrices
    ("mixing.py", "mix_labeled", "index by a mask"),  # which partners are unlabeled rows
    ("mixing.py", "mix_labeled", "_unique2"),  # and which of them need a guess
}


class Waits(TorchDispatchMode):
    """Lists, inside, everything that would make the host wait for a GPU: what, and who in the package asked
    for it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self.active = False
        for name in WAITING_METHODS:
            monkeypatch.setattr(Tensor, name, self.reporting(name, getattr(Tensor, name)))

    def __enter__(self) -> Waits:
        self.active = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.active = False

    def reporting(self, name: str, method: Callable) -> Callable:
        def reported(*args: Any, **kwargs: Any) -> Any:
            self.report(name)
            return method(*args, **kwargs)

        return reported

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in WAITING_OPERATIONS:
            self.report(name)
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            self.report("index by a mask")
        return function(*args, **(kwargs or {}))

    def report(self, name: str) -> None:
        frame = sys._getframe()
        while frame is not None and PACKAGE not in Path(frame.f_code.co_filename).parents:
            frame = frame.f_back
        file, caller = (
            ("", "") if frame is None else (Path(frame.f_code.co_filename).name, frame.f_code.co_name)
        )
        if self.active and (file, caller, name) not in ON_THE_HOST:
            self.found.append((file, caller, name))


class Watch(TrainerCallback):
    """Counts in every step, the new average included, and takes turns at the gates."""

    def __init__(self, waits: Waits, gates: tuple[str, ...] = GATES) -> None:
        self.waits, self.gates = waits, gates

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        args.gate = self.gates[state.global_step % len(self.gates)]
        self.waits.__enter__()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.waits.__exit__(None, None, None)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    # On a CPU, and only there, torch's own reads the labels to check them.
    monkeypatch.setattr(
        "torch.nn.functional.one_hot", lambda labels, classes: torch.eye(classes)[labels].long()
    )
    return Waits(monkeypatch)


@pytest.mark.parametrize("batchnorm", ["joint", "separate"])
@pytest.mark.parametrize("loss", LOSSES)
def test_no_step_waits_for_the_device(loss: str, batchnorm: str, waits: Waits, tmp_path: Path) -> None:
    settings = {"loss": loss, "batchnorm": batchnorm, "unlabeled_ratio": 2.0, "max_steps": len(GATES)}
    settings["loss_kwargs"] = STATEFUL.get(loss, {})
    trainer = make_trainer(tmp_path, logging_steps=len(GATES), max_grad_norm=1.0, **settings)
    trainer.add_callback(Watch(waits))
    trainer.train()
    assert waits.found == []


@pytest.mark.parametrize(
    ("peek", "name"),
    [
        (lambda loss: loss.item(), "item"),
        (lambda loss: float(loss), "__float__"),
        (lambda loss: int(loss), "__int__"),
        (lambda loss: bool(loss > 1), "__bool__"),
        (lambda loss: loss.tolist(), "tolist"),
        (lambda loss: loss.cpu(), "cpu"),
        (lambda loss: loss.numpy(), "numpy"),
        (lambda loss: loss.nonzero(), "nonzero"),
        (lambda loss: loss.view(1)[loss.view(1) > 1], "index by a mask"),
        (lambda loss: loss.masked_select(loss > 1), "masked_select"),
        (lambda loss: torch.equal(loss, loss), "equal"),
        (lambda loss: loss.unique(), "_unique2"),
    ],
)
def test_a_look_at_the_loss_would_be_noticed(peek: Callable, name: str, waits: Waits, tmp_path: Path) -> None:
    class Peeking(FixAStepTrainer):
        def compute_losses(self, *args: Any) -> Losses:
            losses = super().compute_losses(*args)
            peek(losses.labeled.detach())
            return losses

    trainer = make_trainer(tmp_path, kind=Peeking, max_steps=1)
    trainer.add_callback(Watch(waits))
    trainer.train()
    assert name in [what for _, _, what in waits.found]


FAULTS = """
import resource, torch
{before}
block, faults = torch.zeros(2**25), []
for _ in range(4):
    del block
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = torch.zeros(2**25)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start)
print(min(faults))
"""


# With the libraries of a training loaded, as it is used, and before features are embedded.
TUNED = {
    "training": "import hf_fixastep.trainer; from hf_fixastep._compat.patches import tune_cpu; tune_cpu()",
    "embedding": "from tests.features.networks import tiny_backbone; tiny_backbone()",
}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="Only glibc has mallopt.")
def test_on_a_cpu_memory_is_kept_for_the_next_step() -> None:
    def faults(before: str) -> int:
        code = FAULTS.format(before=before)
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)

    assert faults("") > 50  # pages, some of them huge
    # In some processes the addresses behind the heap are taken, by chance, and glibc asks the system again.
    for before in TUNED.values():
        assert any(faults(before) < 10 for _ in range(5))


# ---- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_network_of_another_precision_is_trained_in_float32_from_its_values(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    given = tiny_vit().to(dtype)
    start = {name: value.float() for name, value in weights(given).items()}
    run = train(make_trainer(tmp_path, given, max_steps=2))
    assert_equal(run.raw[0], start)
    assert largest_difference(run.raw[2], start) > 0
    expected = tiny_vit()
    expected.load_state_dict(start)
    assert_equal(run.raw[2], train(make_trainer(tmp_path, expected, max_steps=2)).raw[2])


# ---- losses of one's own


class Entropy(SemiSupervisedLoss):
    """The unlabeled loss may contain the labeled one."""

    views = ("weak",)
    contained = 0.0

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: Any) -> Losses:
        labeled, weak = self.logits(model, batch, "weak")
        loss = self.labeled_loss(labeled, batch.y)
        unlabeled = -(weak.softmax(-1) * weak.log_softmax(-1)).sum(-1).mean()
        return Losses((2 - self.contained) * loss, unlabeled + self.contained * loss)


@pytest.mark.parametrize("batchnorm", ["joint", "separate"])
def test_the_two_losses_may_share_a_graph(batchnorm: str, tmp_path: Path) -> None:
    """Without the gate it does not matter in which of the two the labeled loss is."""
    runs = []
    for contained in (0.0, 1.0):
        loss = Entropy()
        loss.contained = contained
        settings = {"batchnorm": batchnorm, "gate": "off", "max_steps": 3, "mix_labeled": False}
        settings |= {"unlabeled_weight": 1.0, "unlabeled_warmup_steps": 0.0}
        runs.append(train(make_trainer(tmp_path, tiny_vit(), objects={"loss": loss}, **settings)))
    assert_near(runs[1].raw[3], runs[0].raw[3])


class WithoutGradient(Entropy):
    name: str
    constant: Any = None  # else one of the two is detached

    def forward(self, *args: Any, **kwargs: Any) -> Losses:
        losses = super().forward(*args, **kwargs)
        value = getattr(losses, self.name).detach() if self.constant is None else self.constant
        return dataclasses.replace(losses, **{self.name: value})


@pytest.mark.parametrize("constant", [None, 0.0, torch.zeros(())], ids=["detached", "number", "tensor"])
@pytest.mark.parametrize("name", ["labeled", "unlabeled"])
def test_a_loss_without_gradient_is_refused_in_a_sentence(name: str, constant: Any, tmp_path: Path) -> None:
    loss = WithoutGradient()
    loss.name, loss.constant = name, constant
    with pytest.raises(ValueError, match=f"The {name} loss of WithoutGradient has no gradient"):
        make_trainer(tmp_path, objects={"loss": loss}).train()
