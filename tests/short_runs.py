"""Short runs on tiny data, and what they leave behind."""

from __future__ import annotations

import atexit
import gc
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PrinterCallback,
    TrainerCallback,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_fixastep import (
    LOSSES,
    FixAStepConfig,
    FixAStepTrainer,
    Images,
    SemiSupervisedLoss,
    Views,
    WideResNetConfig,
)
from hf_fixastep import WideResNetForImageClassification as WideResNet


# Every train() collects garbage: 0.3 s as long as the imported libraries are looked through as well.
gc.freeze()
atexit.register(gc.unfreeze)

# Of a recipe that is to last a few seconds.
SHORT = [
    "--max_steps",
    "4",
    "--logging_steps",
    "2",
    "--eval_steps",
    "2",
    "--save_steps",
    "2",
    "--disable_tqdm",
    "true",
]

EAGER = {"threshold": 0.36}  # of untrained networks of three classes, which are sure of nothing
# With these arguments, where a loss has them, it goes through all its phases in a few steps.
QUICK = {
    "threshold": 0.2,
    "warmup_steps": 2,
    "ramp_steps": 4,
    "visits": 1,
    "epoch_steps": 2,
    "decay": 0.9,
    "momentum": 0.9,
    "adversarial_start": 1,
    "adversarial_steps": 4,
    "reversal_start": 1,
    "reversal_steps": 4,
    "hidden": 8,
}


def known_arguments(loss: str, values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that are arguments of the loss."""
    return {
        name: value for name, value in values.items() if name in inspect.signature(LOSSES[loss]).parameters
    }


# Losses with layers or a memory of their own, and their quick arguments.
STATEFUL: dict[str, dict[str, Any]] = {
    name: known_arguments(name, QUICK)
    for name, kind in LOSSES.items()
    if kind.views and kind.prepare is not SemiSupervisedLoss.prepare
}


def tiny_wide_resnet(seed: int = 0, **settings: Any) -> WideResNet:
    torch.manual_seed(seed)
    return WideResNet(
        WideResNetConfig(**{"depth": 10, "width": 1, "image_size": 8, "num_labels": 3} | settings)
    )


def tiny_vit(seed: int = 0, dropout: float = 0.0) -> ViTForImageClassification:
    """No batch norm, so that rows do not meet."""
    torch.manual_seed(seed)
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
            num_labels=3,
            hidden_dropout_prob=dropout,
            initializer_range=0.3,  # predictions that differ from image to image
        )
    )


def random_images(count: int, seed: int, labeled: bool = False) -> Images:
    pixels = torch.randint(
        256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return Images(pixels, torch.arange(count) % 3, ["cat", "dog", "owl"]) if labeled else Images(pixels)


def tiny_processor() -> ViTImageProcessor:
    return ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.5] * 3, image_std=[0.25] * 3)


def make_config(folder: Path, **settings: Any) -> FixAStepConfig:
    few_and_quiet = {
        "loss": "mean_teacher",
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "unlabeled_ratio": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
    }
    return FixAStepConfig(output_dir=str(folder), **few_and_quiet | settings)


def make_trainer(
    folder: Path,
    model: nn.Module | None = None,
    kind: type[FixAStepTrainer] = FixAStepTrainer,
    objects: dict[str, Any] | None = None,
    **settings: Any,
) -> FixAStepTrainer:
    """A quiet trainer on random images.

    Args:
        objects: further arguments of the trainer, such as eval_dataset.
        settings: of the config.
    """
    defaults = {
        "train_dataset": random_images(24, seed=1, labeled=True),
        "unlabeled_dataset": random_images(40, seed=2),
        "processing_class": tiny_processor(),
    }
    objects = defaults | (objects or {})
    if "model_init" not in objects:
        objects["model"] = model or tiny_wide_resnet()
    trainer = kind(args=make_config(folder, **settings), **objects)
    trainer.remove_callback(PrinterCallback)
    return trainer


class NeutralViews(Views):
    """Every view is the image as it is."""

    def weak(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return self.plain(images)

    def strong(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return self.plain(images)


def without_augmentation(trainer: FixAStepTrainer) -> FixAStepTrainer:
    trainer.views = NeutralViews(trainer.views.mean, trainer.views.std)
    return trainer


class Recorder(TrainerCallback):
    """Keeps the raw and the averaged weights, buffers included: [0] before training, [n] after step n."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer = trainer
        self.raw: list[dict[str, Tensor]] = []
        self.averaged: list[dict[str, Tensor]] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.raw.append(weights(self.trainer.core_model))
        self.averaged.append(weights(self.trainer.teacher.model))

    on_step_end = on_train_begin


def train(trainer: FixAStepTrainer, resume_from_checkpoint: str | bool | None = None) -> Recorder:
    recorder = Recorder(trainer)
    trainer.add_callback(recorder)  # behind the trainer's own: it sees the average after its update
    try:
        trainer.train(resume_from_checkpoint)
    finally:
        trainer.remove_callback(recorder)
    return recorder


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def logged(trainer: FixAStepTrainer, name: str = "loss") -> list[Any]:
    """The values of one name in the training log, first to last."""
    return [row[name] for row in trainer.state.log_history if "loss" in row]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], within: float = 1e-6) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=0, atol=within, msg=lambda text, name=name: f"{name}: {text}"
        )


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)
