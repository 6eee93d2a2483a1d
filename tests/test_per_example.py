"""Trainings with the gate per example against the method written out, a gradient for every image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_fixastep import FixAStepTrainer, Views
from hf_fixastep.losses import LOSSES
from tests.naive import Images, Naive, NaiveSeparate, gradient
from tests.short_runs import (
    EAGER,
    QUICK,
    assert_near,
    known_arguments,
    largest_difference,
    logged,
    make_trainer,
    tiny_vit,
    tiny_wide_resnet,
    train,
    without_augmentation,
)
from tests.test_resume import interrupted_equals_whole
from tests.test_trainer import Waits, Watch, waits  # noqa: F401


VISIBLE = {"gate": "per_example", "teacher_decay": 0.9, "unlabeled_warmup_steps": 0.0, "max_steps": 4}


class InFloat64(Views):
    def __call__(self, *args: Any) -> dict[str, Tensor]:
        return {name: view.double() for name, view in super().__call__(*args).items()}


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class EachImage(Naive):
    """The unlabeled loss has a value for each row, and each row a gradient of its own."""

    def step(self, x: Tensor, y: Tensor, views: Images) -> None:
        logits, rows = self.unlabeled_loss(self, x, views)
        labeled = -(y * logits.log_softmax(1)).sum(1).mean()
        head = list(self.model.classifier.parameters())
        judge = torch.autograd.grad(labeled, head, retain_graph=True)
        keep = torch.zeros(len(rows))
        counted = 0
        for number, row in enumerate(rows):
            own = torch.autograd.grad(row, head, retain_graph=True)
            keep[number] = sum((a * b).sum() for a, b in zip(own, judge, strict=True)) > 0
            counted += any(bool(g.any()) for g in own)
        (labeled + self.weight(1) * (rows * keep).sum() / len(rows)).backward()
        self.open.append(float(keep.sum()) / max(counted, 1))
        with torch.no_grad():
            for parameter in self.model.parameters():
                update = self.nesterov(parameter, gradient(parameter), 1)
                parameter -= self.args.learning_rate * update
            self.model.zero_grad()
            decay = self.args.teacher_decay
            for old, new in zip(self.average.parameters(), self.model.parameters(), strict=True):
                old.copy_(decay * old + (1 - decay) * new)
            for old, new in zip(self.average.buffers(), self.model.buffers(), strict=True):
                old.copy_(new)
        self.raw.append({name: value.clone() for name, value in self.model.state_dict().items()})


class EachImageSeparate(EachImage, NaiveSeparate):
    def guess_logits(self, views: Images, count: int, partners: list[int]) -> tuple[Tensor, Tensor]:
        """The labeled images are mixed before the loss sees a view: both views of the partners at once."""
        labeled = self.args.train_batch_size
        rows = sorted({(partner - labeled) % count for partner in partners if partner >= labeled})
        guesses = torch.full((2, count, 3), torch.nan)
        guesses[:, rows] = self.without_trace(torch.cat([views["weak"][rows], views["weak_2"][rows]])).view(
            2, len(rows), 3
        )
        return guesses[0], guesses[1]


def fixmatch(naive: Naive, x: Tensor, views: Images) -> tuple[Tensor, Tensor]:
    labeled, weak, strong = naive.logits(x, views["weak"], views["strong"])
    confidence, pseudo_labels = weak.detach().softmax(1).max(1)
    rows = [-row.log_softmax(0)[label] for row, label in zip(strong, pseudo_labels, strict=True)]
    return labeled, torch.stack(rows) * (confidence >= naive.trainer.loss.threshold)


def mean_teacher(naive: Naive, x: Tensor, views: Images) -> tuple[Tensor, Tensor]:
    labeled, student = naive.logits(x, views["weak"])
    target = naive.average(pixel_values=views["weak_2"]).logits.detach().softmax(1)
    return labeled, (student.softmax(1) - target).square().sum(1) / 3


def pi_model(naive: Naive, x: Tensor, views: Images) -> tuple[Tensor, Tensor]:
    labeled, first = naive.logits(x, views["weak"])
    second = naive.without_trace(views["weak_2"]).softmax(1)
    return labeled, (second - first.detach().softmax(1)).square().sum(1) / 3


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("build", "batchnorm", "mixed"),
    [
        (tiny_wide_resnet, "joint", False),
        (tiny_wide_resnet, "separate", False),
        (tiny_wide_resnet, "joint", True),
        (tiny_wide_resnet, "separate", True),
        (tiny_vit, "separate", False),
    ],
)
@pytest.mark.parametrize("loss", [fixmatch, mean_teacher, pi_model])
def test_steps_are_those_of_a_loop_over_the_images(
    loss: Callable[..., Any], build: Callable[[], nn.Module], batchnorm: str, mixed: bool, tmp_path: Path
) -> None:
    settings = {"batchnorm": batchnorm, "mix_labeled": mixed, "unlabeled_ratio": 2.0, "lr_cycle_steps": 0.0}
    settings |= {"lr_scheduler_type": "constant", "loss_kwargs": known_arguments(loss.__name__, EAGER)}
    weight = 1.0 if loss is fixmatch else 20.0
    trainer = make_trainer(
        tmp_path, build(), loss=loss.__name__, unlabeled_weight=weight, **VISIBLE | settings
    )
    trainer.views = InFloat64(trainer.views.mean, trainer.views.std)
    kind = EachImage if batchnorm == "joint" else EachImageSeparate
    reference = kind(trainer, loss, lambda step: weight).run()
    run = train(trainer)
    assert len({*reference.open} - {0.0, 1.0}) > 1  # else the seed proves too little
    assert logged(trainer, "gate/open") == pytest.approx(reference.open)
    for step in range(VISIBLE["max_steps"] + 1):
        assert_near(run.raw[step], reference.raw[step], within=1e-6 if mixed else 1e-10)  # shares: float32
    assert largest_difference(run.raw[0], run.raw[-1]) > 1e-3


# ---- several micro-batches


def on_vit(folder: Path, **settings: Any) -> FixAStepTrainer:
    """Rows do not meet and views are neutral, so that a batch is nothing but the sum of its rows."""
    settings = {"loss": "fixmatch", "loss_kwargs": EAGER, "mix_labeled": False} | settings
    return without_augmentation(make_trainer(folder, tiny_vit(), **VISIBLE | {"max_steps": 6} | settings))


def test_four_micro_batches_are_one_large_batch(tmp_path: Path) -> None:
    one = on_vit(tmp_path, per_device_train_batch_size=8)
    four = on_vit(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    whole, parts = train(one), train(four)
    assert len({*logged(one, "gate/open")} - {0.0, 1.0}) > 1
    for name in ("gate/open", "gate/cosine", "loss", "loss/labeled", "loss/unlabeled", "mask_rate"):
        assert logged(four, name) == pytest.approx(logged(one, name), abs=1e-6), name
    assert_near(parts.raw[-1], whole.raw[-1])
    assert_near(parts.averaged[-1], whole.averaged[-1])


def test_a_last_window_of_fewer_micro_batches_judges_all_of_its_images(tmp_path: Path) -> None:
    trainer = on_vit(tmp_path, gradient_accumulation_steps=2, steps_per_epoch=3, lr_cycle_steps=0.0)
    trainer.args.lr_scheduler_type = "constant"
    reference = EachImageSeparate(trainer, fixmatch, lambda step: 1.0)
    loader, batches = trainer.get_train_dataloader(), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        batches += [trainer.make_batch(batch) for batch in loader]
    for window in ([0, 1], [2], [3, 4], [5], [6, 7], [8]):
        members = [batches[number] for number in window]
        views = {name: torch.cat([m.views[name] for m in members]) for name in ("weak", "strong")}
        reference.step(torch.cat([m.x for m in members]), torch.cat([m.y for m in members]), views)
    assert_near(train(trainer).raw[-1], reference.raw[-1])
    assert logged(trainer, "gate/open") == pytest.approx(reference.open)


def test_an_interrupted_run_in_parts_of_a_step_resumes_to_the_bit(tmp_path: Path) -> None:
    settings = {"gate": "per_example", "batchnorm": "separate", "gradient_accumulation_steps": 2}
    interrupted_equals_whole(tmp_path, stop=3, **settings)


def test_what_a_broken_off_step_left_waiting_is_not_judged_in_the_next_training(tmp_path: Path) -> None:
    class Failing(FixAStepTrainer):
        fails = True

        def training_step(self, *args: Any) -> Tensor:
            result = super().training_step(*args)
            if self.fails:
                raise InterruptedError
            return result

    settings = {"gradient_accumulation_steps": 2, **VISIBLE}
    trainer = make_trainer(tmp_path, tiny_vit(), Failing, **settings)
    with pytest.raises(InterruptedError):
        trainer.train()
    Failing.fails = False
    expected = train(make_trainer(tmp_path, tiny_vit(), **settings))
    assert largest_difference(train(trainer).raw[-1], expected.raw[-1]) == 0


# ---- beside the rest


@pytest.mark.parametrize("batchnorm", ["joint", "separate"])
@pytest.mark.parametrize("loss", ["mean_teacher", "vat", "mixmatch", "flexmatch", "softmatch", "uasd"])
def test_no_step_waits_for_the_device(
    loss: str,
    batchnorm: str,
    waits: Waits,  # noqa: F811
    tmp_path: Path,
) -> None:
    settings = {"loss": loss, "batchnorm": batchnorm, "loss_kwargs": known_arguments(loss, QUICK)}
    trainer = make_trainer(tmp_path, unlabeled_ratio=2.0, **VISIBLE | settings)
    trainer.add_callback(Watch(waits, ("per_example",)))
    trainer.train()
    assert waits.found == []


def test_the_hook_is_gone_after_a_training(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **VISIBLE)
    trainer.train()
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_labeled_only_training_has_no_images_to_judge(tmp_path: Path) -> None:
    settings = {"loss": "supervised", "gradient_accumulation_steps": 2, "max_steps": 2}
    runs = [train(make_trainer(tmp_path, gate=gate, **settings)) for gate in ("per_example", "off")]
    assert largest_difference(runs[0].raw[-1], runs[1].raw[-1]) == 0


# ---- what is refused


class ConvolutionalHead(type(tiny_wide_resnet())):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.classifier = nn.Sequential(nn.Unflatten(1, (-1, 1, 1)), nn.Conv2d(64, 3, 1), nn.Flatten())


def frozen_head() -> nn.Module:
    model = tiny_wide_resnet()
    model.classifier.requires_grad_(False)
    return model


OWN_LAYERS = [name for name in LOSSES if name in ("ds3l", "mtcf", "openmatch", "toor")]
PARTS = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (tiny_wide_resnet, {"loss": "fixmatch", **PARTS}, "FixMatch takes.* together; set batchnorm to sep"),
        (tiny_wide_resnet, {"loss": "mixmatch", **PARTS}, "is 2, .*MixMatch takes .*another gate or loss"),
        (tiny_vit, {"loss": "mixmatch", **PARTS}, "MixMatch takes labeled and unlabeled images together"),
        *((tiny_wide_resnet, {"loss": name}, "has layers of its own") for name in OWN_LAYERS),
        (frozen_head, {}, "the head is frozen; train it, or choose another gate"),
        (
            lambda: ConvolutionalHead(tiny_wide_resnet().config),
            {},
            "has no linear layer with 3 outputs, one per class",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused_at_once(
    build: Callable[[], nn.Module], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, build(), gate="per_example", **settings)
