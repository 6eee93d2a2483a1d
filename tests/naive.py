"""Fix-A-Step written out in plain torch, as slowly as the papers describe it; none of the package's own
mathematics.

Only the images come from the package: which ones, how they were augmented, and the generators for the draws.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_fixastep import FixAStepTrainer
from hf_fixastep.data.loader import generator_for
from tests.short_runs import weights


Images = dict[str, Tensor]


class Naive:
    """One process, SGD with Nesterov momentum 0.9 or Adam, three backward passes per step, one joint forward.

    Args:
        trainer: gives the images, the settings and the initial weights, so make it before `trainer.train()`.
        unlabeled_loss: logits of the labeled rows and the unlabeled loss, from (naive, x, views).
        weight: of the unlabeled loss, by step, counted from 1.
    """

    def __init__(
        self,
        trainer: FixAStepTrainer,
        unlabeled_loss: Callable[..., tuple[Tensor, Tensor]],
        weight: Callable[[int], float],
    ) -> None:
        self.trainer, self.args = trainer, trainer.args
        self.unlabeled_loss, self.weight = unlabeled_loss, weight
        self.model = copy.deepcopy(trainer.model).train()
        self.average = copy.deepcopy(trainer.model).eval()
        self.memory: dict[nn.Parameter, Any] = {}  # of the optimizer
        self.open: list[float] = []
        self.raw = [weights(self.model)]
        self.averaged = [weights(self.average)]

    def batches(self) -> list[dict[str, Any]]:
        """What the trainer draws, in order, for as many epochs as its steps may take."""
        loader, drawn = self.trainer.get_train_dataloader(), []
        for epoch in range(math.ceil(self.args.max_steps / self.args.steps_per_epoch) + 1):
            loader.set_epoch(epoch)
            for batch in loader:
                drawn.append(batch)
                if len(drawn) == self.args.max_steps * self.args.gradient_accumulation_steps:
                    return drawn
        return drawn

    def run(self) -> Naive:
        for batch in self.batches():
            views = self.trainer.make_batch(batch)
            x, y = views.x, views.y
            if self.args.mix_labeled:
                x, y = self.mixed(x, y, views.views, batch["step"])
            self.step(x, y, views.views)
        return self

    def mixed(self, x: Tensor, y: Tensor, views: Images, step: int) -> tuple[Tensor, Tensor]:
        rows = len(x)
        count = rows if self.args.mix_pool == "batch" else len(views["weak"])
        first, second = views["weak"][:count], views["weak_2"][:count]
        generator = generator_for(self.args.seed, 0, step, "mix")
        partners = torch.randperm(rows + 2 * count, generator=generator)
        one, other = self.guess_logits(views, count, partners[:rows].tolist())
        guess = ((one.softmax(1) + other.softmax(1)).detach() / 2) ** (1 / self.args.mix_temperature)
        guess = guess / guess.sum(1, keepdim=True)
        pool, labels = torch.cat([x, first, second]), torch.cat([y, guess, guess])
        draws = 1 if self.args.mix_per_batch else rows
        gamma = torch.full((2, draws), self.args.mix_alpha, dtype=torch.float64)
        one, other = torch._standard_gamma(gamma, generator=generator)
        new_x, new_y = [], []
        for row in range(rows):
            draw = row % draws
            share = float(one[draw] / (one[draw] + other[draw]))
            share = max(share, 1 - share)
            new_x.append(share * x[row] + (1 - share) * pool[partners[row]])
            new_y.append(share * y[row] + (1 - share) * labels[partners[row]])
        return torch.stack(new_x), torch.stack(new_y)

    def guess_logits(self, views: Images, count: int, partners: list[int]) -> tuple[Tensor, Tensor]:
        return self.without_trace(views["weak"][:count]), self.without_trace(views["weak_2"][:count])

    def step(self, x: Tensor, y: Tensor, views: Images) -> None:
        number = len(self.open) + 1
        logits, unlabeled = self.unlabeled_loss(self, x, views)
        labeled = -(y * logits.log_softmax(1)).sum(1).mean()
        weight = self.weight(number)

        gradients = []
        for loss in (labeled, unlabeled):
            loss.backward(retain_graph=True)
            gradients.append(torch.cat([gradient(p).flatten() for p in self.model.parameters()]).double())
            self.model.zero_grad()
        self.open.append(float(gradients[0] @ gradients[1] > 0))
        (labeled + weight * unlabeled if self.open[-1] else labeled).backward()

        with torch.no_grad():
            rate = self.args.learning_rate
            if self.args.lr_cycle_steps:
                rate *= math.cos(
                    7 * math.pi * (number - 1) / (16 * self.args.lr_cycle_steps * self.args.max_steps)
                )
            for parameter in self.model.parameters():
                update = self.adam if self.args.optim == "adam" else self.nesterov
                parameter -= rate * update(parameter, gradient(parameter), number)
            self.model.zero_grad()
            decay = self.args.teacher_decay
            for old, new in zip(self.average.parameters(), self.model.parameters(), strict=True):
                old.copy_(decay * old + (1 - decay) * new)
            for old, new in zip(self.average.buffers(), self.model.buffers(), strict=True):
                old.copy_(new)
        self.raw.append(weights(self.model))
        self.averaged.append(weights(self.average))

    def nesterov(self, parameter: nn.Parameter, gradient: Tensor, number: int) -> Tensor:
        if parameter.ndim > 1:
            gradient = gradient + self.args.weight_decay * parameter
        velocity = 0.9 * self.memory.get(parameter, torch.zeros_like(parameter)) + gradient
        self.memory[parameter] = velocity
        return gradient + 0.9 * velocity

    def adam(self, parameter: nn.Parameter, gradient: Tensor, number: int) -> Tensor:
        gradient = gradient + self.args.weight_decay * parameter
        mean, square = self.memory.get(parameter, (torch.zeros_like(parameter), torch.zeros_like(parameter)))
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        self.memory[parameter] = (mean, square)
        return mean / (1 - 0.9**number) / ((square / (1 - 0.999**number)).sqrt() + 1e-8)

    def logits(self, *images: Tensor) -> tuple[Tensor, ...]:
        """From one forward, which moves the running statistics."""
        together = self.model(pixel_values=torch.cat(images)).logits
        return together.split([len(rows) for rows in images])

    def without_trace(self, images: Tensor) -> Tensor:
        """Logits with the statistics of the batch; the running ones are put back."""
        kept = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        logits = self.model(pixel_values=images).logits
        for name, buffer in self.model.named_buffers():
            buffer.data = kept[name]
        return logits


class NaiveSeparate(Naive):
    """The same with a forward for every set of images; only the labeled ones move the running statistics."""

    def logits(self, *images: Tensor) -> tuple[Tensor, ...]:
        return self.model(pixel_values=images[0]).logits, *(self.without_trace(rows) for rows in images[1:])

    def guess_logits(self, views: Images, count: int, partners: list[int]) -> tuple[Tensor, Tensor]:
        """From the whole view where the loss forwards it anyway, else from the partners' rows alone."""
        labeled = self.args.train_batch_size
        rows = sorted({(partner - labeled) % count for partner in partners if partner >= labeled})
        if len(rows) == 1:  # would be alone in batch norm
            rows.append((rows[0] + 1) % count)
        first = self.without_trace(views["weak"])[:count]
        if self.args.loss == "pi_model":
            return first, self.without_trace(views["weak_2"])[:count]
        second = torch.full_like(first, math.nan)
        second[rows] = self.without_trace(views["weak_2"][rows])
        return first, second


class NaiveFrozen(Naive):
    """The same with batch norm in eval mode, so that rows do not meet and one forward is as good as three."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()


def gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def labeled_only(naive: Naive, x: Tensor, views: Images) -> tuple[Tensor, Tensor]:
    (logits,) = naive.logits(x)
    return logits, 0 * logits.sum()


def mean_teacher(naive: Naive, x: Tensor, views: Images) -> tuple[Tensor, Tensor]:
    labeled, student = naive.logits(x, views["weak"])
    with torch.no_grad():
        target = naive.average(pixel_values=views["weak_2"]).logits.softmax(1)
    return labeled, ((student.softmax(1) - target) ** 2).sum() / target.numel()


def pi_model(naive: Naive, x: Tensor, views: Images) -> tuple[Tensor, Tensor]:
    labeled, first = naive.logits(x, views["weak"])
    target = first.detach().softmax(1)
    second = naive.without_trace(views["weak_2"]).softmax(1)
    return labeled, ((second - target) ** 2).sum() / target.numel()


def pseudo_label(naive: Naive, x: Tensor, views: Images) -> tuple[Tensor, Tensor]:
    labeled, weak = naive.logits(x, views["weak"])
    return labeled, confident_cross_entropy(weak.detach(), weak, naive.trainer.loss.threshold)


def fixmatch(naive: Naive, x: Tensor, views: Images) -> tuple[Tensor, Tensor]:
    labeled, weak, strong = naive.logits(x, views["weak"], views["strong"])
    return labeled, confident_cross_entropy(weak.detach(), strong, naive.trainer.loss.threshold)


def confident_cross_entropy(target: Tensor, logits: Tensor, threshold: float) -> Tensor:
    rows = []
    for probabilities, row in zip(target.softmax(1), logits, strict=True):
        counts = float(probabilities.max()) >= threshold
        rows.append(-row.log_softmax(0)[int(probabilities.argmax())] * counts)
    return torch.stack(rows).mean()
