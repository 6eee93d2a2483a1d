"""Settings of a run: the Trainer's own, ours, and the presets that fill what is left open."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from transformers import IntervalStrategy, TrainingArguments
from transformers.utils import is_torch_tf32_available

from hf_fixastep.checks import check_choice
from hf_fixastep.hub.checks import check_push
from hf_fixastep.losses.presets import ADAM, PRESETS, SGD
from hf_fixastep.methods import preset
from hf_fixastep.step.gate import GATES
from hf_fixastep.step.schedules import RAMPS


logger = logging.getLogger(__name__)

TRAINABLE = ("all", "head", "head_and_norms", "lora")
KEEP = ("model", "numbers")
MOST_IMAGES = 2**17  # per step; far above what any device holds


def preset_field(text: str) -> Any:
    """A field that the preset fills when nothing is given."""
    return field(default=None, metadata={"help": f"{text} If not given, as the preset says."})


def own_field(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class FixAStepConfig(TrainingArguments):
    """Training arguments of Fix-A-Step; everything else is inherited. A preset fills what is not given."""

    preset: str = own_field(
        "paper", "paper; upstream: what the official code executes; pretrained: to fine-tune a network."
    )
    loss: str = own_field("fixmatch", "Base loss, a key of LOSSES.")
    loss_kwargs: dict | str | None = preset_field("Arguments of the base loss, as JSON on the command line.")
    procedure: str | None = own_field(
        None, "Several trainings with the loss instead of one, a key of PROCEDURES."
    )
    procedure_kwargs: dict | str | None = own_field(
        None, "Arguments of the procedure, as JSON on the command line."
    )
    unlabeled_ratio: float = preset_field("Unlabeled images per labeled image.")
    unlabeled_weight: float = preset_field("Final weight of the unlabeled loss.")
    unlabeled_ramp: str = preset_field("How that weight grows: linear, staircase or sigmoid.")
    unlabeled_warmup_steps: float = preset_field(
        "For how long: up to 1 a share of the run, above 1 steps, 0 at once."
    )
    divide_by_all_rows: bool = preset_field("Divide losses by all rows where the official base code does.")
    class_weights: str = own_field(
        "none", "In the labeled loss: none, or balanced, inverse to the images per class."
    )

    gate: str = own_field(
        "drop", "drop (the paper), project, layerwise, per_example (judges every image alone), or off."
    )
    mix_labeled: bool = preset_field("Mix labeled images with unlabeled ones (phase 1).")
    mix_alpha: float = own_field(0.5, "Shape of the Beta distribution of the shares.")
    mix_temperature: float = own_field(0.5, "Temperature of the guesses; below 1 sharpens.")
    mix_per_batch: bool = preset_field("One share per batch instead of one per image.")
    mix_pool: str = own_field("batch", "Partners from one labeled batch size of each view, or from all.")

    batchnorm: str = preset_field(
        "joint: one forward over all rows. separate: one each, cheaper. frozen: the same, with the running "
        "statistics of a pretrained network, which stay as they are."
    )
    teacher_decay: float | None = preset_field(
        "Decay of the averaged model, which is evaluated and saved. pretrained fits it to the run: "
        "1 - 20 / steps, at most 0.999."
    )
    trainable: str = own_field(
        "all", "What of the model is trained: all, head, head_and_norms, or lora (needs peft)."
    )
    lora_rank: int = own_field(8, "Rank of the changes that lora trains.")
    labeled_view: str = preset_field("Augmentation of labeled images: weak or strong.")
    flip: bool = own_field(True, "Horizontal flips in all views; switch off for digits.")
    cutout: float = preset_field("Box of the strong view: below 1 a share of the side, otherwise pixels.")
    cpu_threads: int | None = own_field(
        None, "Threads on a CPU; 1 is best for tiny networks. If not given, torch's."
    )
    keep: str = own_field(
        "model", "What a finished run leaves: the model with figures and a card, or its numbers alone."
    )
    steps_per_epoch: int = own_field(1024, "What the Trainer calls an epoch, in batches.")
    lr_cycle_steps: float = preset_field(
        "Cycle K of the learning rate's cos(7 pi s / 16 K): up to 1 a share of the run, above 1 steps, 0 to "
        "use lr_scheduler_type instead."
    )

    optim: str = preset_field("sgd, adam (coupled weight decay, on everything), or another of the Trainer's.")
    learning_rate: float = preset_field("The initial learning rate.")
    head_rate_factor: float = preset_field(
        "Learning rate of the classification head, and of layers of the loss, as a multiple of learning_rate."
    )
    weight_decay: float = preset_field("Weight decay; but for adam not on norm layers and biases.")
    lr_scheduler_type: str = preset_field("Used where lr_cycle_steps is 0.")
    warmup_steps: float = preset_field(
        "Linear warm-up, where lr_cycle_steps is 0: below 1 a share of the run."
    )
    per_device_train_batch_size: int = own_field(64, "Labeled images per step and process.")
    per_device_eval_batch_size: int = own_field(512, "Images per evaluation step and process.")
    max_grad_norm: float = own_field(0.0, "Clip the gated gradient to this norm; 0 is off, as in the paper.")
    ignore_changed_settings: list[str] | None = own_field(None, "Settings that a resumed run may change.")
    logging_nan_inf_filter: bool = own_field(False, "Keep off: the log shows losses as they are, also NaN.")
    remove_unused_columns: bool = own_field(False, "Keep off: images are not arguments of the model.")
    hub_strategy: str = own_field("end", "When to push: end, or every_save to push also during the training.")
    hub_license: str | None = own_field(None, "Licence of a pushed model, such as mit; needed to push.")
    hub_intended_use: str | None = own_field(
        None, "What a pushed model is for; needed to push one of medical data."
    )

    def __post_init__(self) -> None:
        own = [f for f in dataclasses.fields(self) if f.init and f.default_factory is dataclasses.MISSING]
        self.given = {f.name: getattr(self, f.name) for f in own if getattr(self, f.name) != f.default}
        self._fill_from_preset()
        if self.tf32 is None and is_torch_tf32_available():
            self.tf32 = True
        several = dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1
        if self.use_cpu and several and not dist.is_initialized():
            # The Trainer (5.23) would drop ddp_timeout here, and wait for a lost process for half an hour.
            dist.init_process_group(self.ddp_backend or "gloo", timeout=self.ddp_timeout_delta)
        plain_adam = self.optim == "adam"  # the Trainer knows only AdamW, whose weight decay is another one
        if plain_adam:
            self.optim = "adamw_torch"
        super().__post_init__()
        if plain_adam:
            self.optim = "adam"
        if self.device.type == "cpu":
            # Nothing to pin memory for; torch would warn at each evaluation.
            self.dataloader_pin_memory = False
        self._check()

    def _fill_from_preset(self) -> None:
        settings = preset(check_choice("preset", self.preset, PRESETS), self.loss, self.procedure)
        for name in ("loss_kwargs", "procedure_kwargs"):
            if isinstance(getattr(self, name), str):
                raise ValueError(
                    f"{name} is the text {getattr(self, name)!r}, but expected a mapping; give a dict."
                )
        self.loss_kwargs = settings.pop("loss_kwargs", {}) | (self.loss_kwargs or {})
        self.procedure_kwargs = self.procedure_kwargs or {}
        if self.optim not in (None, settings["optim"]):  # the preset speaks of another optimizer
            settings |= {"optim_args": None, "learning_rate": None, "weight_decay": None}
            if self.preset != "pretrained":  # those two are for training from scratch
                settings |= {"sgd": SGD, "adam": ADAM}.get(self.optim, {})
        for name, value in settings.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.learning_rate is None or self.weight_decay is None:
            raise ValueError(
                f"optim is {self.optim}, which preset {self.preset} does not know; give its learning_rate "
                "and weight_decay."
            )

    def _check(self) -> None:
        check_choice("gate", self.gate, GATES)
        if self.gate == "per_example" and self.torch_compile:
            raise ValueError(
                "gate is per_example, which has to watch the last layer, but torch_compile hides the layers; "
                "switch it off, or choose another gate."
            )
        check_choice("batchnorm", self.batchnorm, ("joint", "separate", "frozen"))
        check_choice("unlabeled_ramp", self.unlabeled_ramp, RAMPS)
        check_choice("mix_pool", self.mix_pool, ("batch", "all"))
        check_choice("class_weights", self.class_weights, ("none", "balanced"))
        check_choice("labeled_view", self.labeled_view, ("weak", "strong"))
        check_choice("trainable", self.trainable, TRAINABLE)
        check_choice("keep", self.keep, KEEP)
        for name in (
            "head_rate_factor",
            "lora_rank",
            "mix_alpha",
            "mix_temperature",
            "unlabeled_ratio",
            "per_device_train_batch_size",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, but it has to be positive and finite.")
        for name in (
            "learning_rate",
            "weight_decay",
            "unlabeled_weight",
            "unlabeled_warmup_steps",
            "lr_cycle_steps",
            "cutout",
        ):
            if not 0 <= getattr(self, name) < math.inf:
                value = getattr(self, name)
                raise ValueError(f"{name} is {value}, but it cannot be negative, infinite or NaN.")
        if self.teacher_decay is not None and not 0 <= self.teacher_decay < 1:
            raise ValueError(
                f"teacher_decay is {self.teacher_decay}, but it has to be at least 0 and below 1."
            )
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ValueError(f"cpu_threads is {self.cpu_threads}, but it has to be at least 1.")
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"steps_per_epoch is {self.steps_per_epoch}, but an epoch has at least one step."
            )
        if self.unlabeled_batch_size < 1:
            raise ValueError(
                f"unlabeled_ratio {self.unlabeled_ratio} of a batch of {self.per_device_train_batch_size} "
                "labeled images leaves no unlabeled image; raise one of the two."
            )
        if self.train_batch_size + self.unlabeled_batch_size > MOST_IMAGES:
            raise ValueError(
                f"unlabeled_ratio {self.unlabeled_ratio} of a batch of {self.per_device_train_batch_size} "
                f"labeled images makes more than {MOST_IMAGES} images per step; lower one of the two."
            )
        if self.warmup_steps and self.lr_cycle_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, but the 7/16 cosine has no warm-up; set it to "
                "0, or set lr_cycle_steps to 0 and choose an lr_scheduler_type."
            )
        if self.logging_strategy == IntervalStrategy.NO:
            raise ValueError(
                "logging_strategy is no, but the watch for non-finite values reads the log; use a large "
                "logging_steps."
            )

        if self.push_to_hub:
            check_push(self)

        if self.loss == "mean_teacher" and self.unlabeled_warmup_steps == 0:
            logger.warning(
                "Mean Teacher starts at its full unlabeled weight, when its teacher still knows nothing; set "
                "unlabeled_warmup_steps."
            )
        if int(os.environ.get("WORLD_SIZE", 1)) != self.world_size:
            raise ValueError(
                f"The launcher started {os.environ['WORLD_SIZE']} processes, but they are in groups of "
                f"{self.world_size} and would train apart. On a CPU set use_cpu to true."
            )

    @property
    def unlabeled_batch_size(self) -> int:
        return round(self.unlabeled_ratio * self.train_batch_size)
