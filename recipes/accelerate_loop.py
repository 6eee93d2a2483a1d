"""The gate in a training loop of your own: Accelerate, no Trainer.

FixMatch with Fix-A-Step on scikit-learn's digits, the settings of recipes/digits/fixmatch.yaml; nothing to
download.

    python recipes/accelerate_loop.py accelerate launch recipes/accelerate_loop.py ACCELERATE_USE_CPU=true
    accelerate launch --multi_gpu --num_processes 2 recipes/accelerate_loop.py  # two CPUs
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hf_fixastep import GradientSlots, Images, Views, WideResNetConfig, get_loss, load_dataset
from hf_fixastep import WideResNetForImageClassification as WideResNet
from hf_fixastep.data.loader import PairedLoader, generator_for
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.gate import LABELED, UNLABELED
from hf_fixastep.step.mixing import mix_labeled
from hf_fixastep.step.schedules import cosine_7_16
from hf_fixastep.step.teacher import Teacher


CLASSES, BATCH_SIZES, SEED = 6, (16, 7 * 16), 0
UNLABELED_WEIGHT, LEARNING_RATE, WEIGHT_DECAY, TEACHER_DECAY = 1.0, 3e-2, 5e-4, 0.98
VIEWS = Views(mean=(0.3,) * 3, std=(0.38,) * 3, flip=False)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay on all but norm layers and biases."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=0.9, nesterov=True, fused=True)


def make_batch(images: dict[str, Any], model: nn.Module, accelerator: Accelerator) -> SemiBatch:
    """Views of one draw, labeled images mixed with unlabeled ones; a pure function of (seed, rank, step)."""
    generator = partial(generator_for, SEED, accelerator.process_index, images["step"])
    images = {name: value.to(accelerator.device) for name, value in images.items() if name != "step"}
    labels, unlabeled = images["labels"], images["unlabeled"]
    views = VIEWS(("weak", "strong"), unlabeled, generator("unlabeled"))
    views |= VIEWS(("weak_2",), unlabeled[: len(labels)], generator("pool"))  # for the guesses of the mixing
    x, y = VIEWS.weak(images["pixel_values"], generator("labeled")), F.one_hot(labels, CLASSES).float()
    return mix_labeled(model, SemiBatch(x, y, views), generator("mix"), pool_rows=len(labels))


def train(accelerator: Accelerator, data: Any, steps: int) -> tuple[nn.Module, Teacher]:
    """The trained model and its average, which is what to evaluate."""
    rank, world = accelerator.process_index, accelerator.num_processes
    labeled, unlabeled = (Images.from_dataset(data[name], (8, 8)) for name in ("labeled", "unlabeled"))
    # Knows its rank: not prepared.
    loader = PairedLoader(labeled, unlabeled, BATCH_SIZES, steps, SEED, rank, world)
    core = WideResNet(WideResNetConfig(depth=10, width=1, image_size=8, bn_momentum=0.05, num_labels=CLASSES))
    core.to(memory_format=torch.channels_last)
    model, optimizer = accelerator.prepare(core, make_optimizer(core))
    # Not prepared either: Accelerate would step it once per process.
    scheduler = LambdaLR(optimizer.optimizer, lambda step: cosine_7_16(step, steps))
    loss, teacher, slots = (
        get_loss("fixmatch"),
        Teacher(core, TEACHER_DECAY),
        GradientSlots(core.parameters()),
    )

    model.train()
    for images in loader:
        # DDP must reduce neither gradient: the gate does, once. To accumulate, run this block for several
        # batches, each loss divided by their number.
        with accelerator.no_sync(model):
            losses = loss(model, make_batch(images, model, accelerator), teacher.model)
            with slots.fill(LABELED):
                accelerator.backward(losses.labeled, retain_graph=True)  # one forward served both losses
            with slots.fill(UNLABELED):
                accelerator.backward(losses.unlabeled)
        slots.reduce()  # from here on both gradients are the same on all processes, and so is the decision
        slots.gate(UNLABELED_WEIGHT, pass_overflow=accelerator.scaler is not None)
        optimizer.step()
        scheduler.step()
        for buffer in core.buffers():  # DDP leaves running statistics apart in no_sync
            if buffer.is_floating_point():
                buffer.copy_(accelerator.reduce(buffer, "mean"))
        if not accelerator.optimizer_step_was_skipped:
            teacher.update(core)
    return core, teacher


@torch.no_grad()
def accuracy(model: nn.Module, images: Images, device: torch.device) -> float:
    answers = model(pixel_values=VIEWS.plain(images.pixels.to(device))).logits.argmax(-1)
    return float((answers.cpu() == images.labels).float().mean())


def main(steps: int = 1200) -> None:
    accelerator = Accelerator()
    if int(os.environ.get("WORLD_SIZE", 1)) != accelerator.num_processes:
        sys.exit("error: the launched processes would train apart; on a CPU set ACCELERATE_USE_CPU=true.")
    set_seed(SEED)
    data = load_dataset("digits_open_set", "zeta50", labels_per_class=5, seed=0)
    _, teacher = train(accelerator, data, steps)
    test = Images.from_dataset(data["test"], (8, 8))
    accelerator.print(f"test accuracy {100 * accuracy(teacher.model, test, accelerator.device):.1f} %")
    accelerator.end_training()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
