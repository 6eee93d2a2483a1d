from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.mixing import mixing_shares


CLASSES = 3
MODES = ("joint", "separate")


class TinyNet(nn.Module):
    """One convolution, with or without batch norm, that remembers its forwards."""

    def __init__(self, batchnorm: bool = True) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if batchnorm else nn.Identity()
        self.head = nn.Linear(8, CLASSES)
        self.seen: list[Tensor] = []  # images of every forward
        self.graded: list[bool] = []  # whether it kept a graph

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        self.seen.append(pixel_values.detach())
        self.graded.append(torch.is_grad_enabled())
        features = self.norm(self.convolution(pixel_values)).relu().mean((2, 3))
        return SimpleNamespace(logits=self.head(features))


class PixelModel(nn.Module):
    """The pixels of an image are its logits, times a weight of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.weight * pixel_values.flatten(1))


@pytest.fixture
def model() -> TinyNet:
    return make_model()


@pytest.fixture
def plain_model() -> TinyNet:
    return make_model(batchnorm=False)


@pytest.fixture
def batch() -> SemiBatch:
    return make_batch()


def make_model(batchnorm: bool = True, seed: int = 0) -> TinyNet:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = TinyNet(batchnorm).double()
        weight = nn.init.normal_(model.head.weight.data, std=3)  # predictions far from uniform,
        weight -= weight.mean(1, keepdim=True)  # and no class preferred
    return model.train()


def make_batch(labeled: int = 4, unlabeled: int = 6) -> SemiBatch:
    generator = torch.Generator().manual_seed(1)

    def images(count: int) -> Tensor:
        color = torch.randn(count, 3, 1, 1, generator=generator, dtype=torch.float64)
        return color + torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)

    y = torch.rand(labeled, CLASSES, generator=generator, dtype=torch.float64).softmax(-1)
    views = {name: images(unlabeled) for name in ("weak", "weak_2", "strong")}
    index = torch.arange(unlabeled).flip(0)
    return SemiBatch(images(labeled), y, views, index=index, generator=torch.Generator().manual_seed(2))


def prepared(
    loss: SemiSupervisedLoss, model: nn.Module, unlabeled_rows: int = 6, validation_rows: int = 0
) -> Any:
    """The loss with its own layers and state, in double precision like the models here."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        loss.prepare(model, CLASSES, unlabeled_rows, validation_rows)
    return loss.double()


def pixel_batch(x: list, y: list, **views: list) -> SemiBatch:
    """A batch for the PixelModel from logits."""

    def images(logits: list) -> Tensor:
        return torch.tensor(logits, dtype=torch.float64)[:, :, None, None]

    labels = torch.tensor(y, dtype=torch.float64)
    views = {name: images(logits) for name, logits in views.items()}
    return SemiBatch(images(x), labels, views, generator=torch.Generator().manual_seed(2))


def in_mode(loss: SemiSupervisedLoss, mode: str) -> SemiSupervisedLoss:
    loss.batchnorm = mode
    return loss


def gradient(value: Tensor, model: nn.Module) -> Tensor:
    """All parameter gradients in one vector."""
    gradients = torch.autograd.grad(value, list(model.parameters()), retain_graph=True, allow_unused=True)
    pairs = zip(gradients, model.parameters(), strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def buffers_after(model: nn.Module, *images: Tensor) -> dict[str, Tensor]:
    """Buffers of a copy of the model after train-mode forwards of these images."""
    model = copy.deepcopy(model).train()
    for rows in images:
        model(pixel_values=rows)
    return dict(model.named_buffers())


def assert_buffers(model: nn.Module, expected: dict[str, Tensor]) -> None:
    buffers = dict(model.named_buffers())
    assert buffers.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(buffers[name], value), name


def forward(model: nn.Module, *images: Tensor) -> tuple[Tensor, ...]:
    """Logits of several sets of images from one train-mode forward that leaves the buffers alone."""
    kept = copy.deepcopy(dict(model.named_buffers()))
    logits = model(pixel_values=torch.cat(images)).logits.split([len(rows) for rows in images])
    for name, buffer in model.named_buffers():
        buffer.data.copy_(kept[name])
    return logits


def predict(mode: str, model: nn.Module, *images: Tensor) -> tuple[Tensor, ...]:
    """Logits of several sets of images, from one forward or from one each, as the mode of batch norm asks."""
    if mode == "joint":
        return forward(model, *images)
    return tuple(forward(model, rows)[0] for rows in images)


def features(model: TinyNet, *images: Tensor) -> tuple[Tensor, ...]:
    """What the head sees, from one train-mode forward that leaves the buffers alone."""
    kept = copy.deepcopy(dict(model.named_buffers()))
    rows = model.norm(model.convolution(torch.cat(images))).relu().mean((2, 3))
    for name, buffer in model.named_buffers():
        buffer.data.copy_(kept[name])
    return rows.split([len(part) for part in images])


def assert_same(losses: Losses, labeled: Tensor, unlabeled: Tensor, *modules: nn.Module) -> None:
    """Both losses and their gradients in these modules are as expected."""
    for value, expected in [(losses.labeled, labeled), (losses.unlabeled, unlabeled)]:
        torch.testing.assert_close(value, expected)
        for module in modules:
            torch.testing.assert_close(gradient(value, module), gradient(expected, module))


def squared_distance(logits: Tensor, target: Tensor) -> Tensor:
    """Between the predictions and the target, entry by entry, as a mean over rows and classes."""
    pairs = zip(logits.softmax(-1).flatten(), target.flatten(), strict=True)
    return sum((p - t) ** 2 for p, t in pairs) / target.numel()


def mix_by_hand(
    model: nn.Module,
    batch: SemiBatch,
    temperature: float,
    alpha: float,
    per_example: bool = True,
    rows: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """MixMatch's mixed images and labels, row by row, with the draws that a loss makes."""
    weak, weak_2 = (batch.views[name][rows or slice(None)] for name in ("weak", "weak_2"))
    guess = guess_by_hand(model, weak, weak_2, temperature)
    images, labels = [*batch.x, *weak, *weak_2], [*batch.y, *guess, *guess]
    generator = make_batch().generator
    partners = torch.randperm(len(images), generator=generator).tolist()
    shares = mixing_shares(len(images) if per_example else 1, alpha, generator).tolist()
    if not per_example:
        shares = shares * len(images)
    triples = list(zip(range(len(images)), partners, shares, strict=True))
    mixed = [b * images[i] + (1 - b) * images[j] for i, j, b in triples]
    return torch.stack(mixed), torch.stack([b * labels[i] + (1 - b) * labels[j] for i, j, b in triples])


def guess_by_hand(model: nn.Module, weak: Tensor, weak_2: Tensor, temperature: float) -> Tensor:
    """The mean prediction for two views, sharpened."""
    (first,), (second,) = forward(model, weak), forward(model, weak_2)
    rows = []
    for a, b in zip(first.detach().softmax(-1), second.detach().softmax(-1), strict=True):
        sharp = [((a[c] + b[c]) / 2) ** (1 / temperature) for c in range(len(a))]
        rows.append(torch.stack([value / sum(sharp) for value in sharp]))
    return torch.stack(rows)


def cross_entropy(probabilities: Tensor, logits: Tensor) -> Tensor:
    """Row by row and class by class."""
    total = torch.zeros((), dtype=logits.dtype)
    for target, row in zip(probabilities, logits, strict=True):
        for c in range(len(row)):
            total = total - target[c] * (row[c] - row.exp().sum().log())
    return total / len(logits)
