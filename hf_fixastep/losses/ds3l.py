from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from hf_fixastep.losses.base import Losses, SemiSupervisedLoss, check_positive
from hf_fixastep.losses.presets import OLIVER
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.forwards import frozen_batchnorm


class DS3L(SemiSupervisedLoss):
    """Pi-model, each image with a weight from a small net that learns what helps the labeled images.

    The net's gradient is that of the labeled loss after a virtual SGD step of the model, all from the
    forwards that the step makes anyway but one; it comes with the labeled loss, to whose value it adds 0. The
    official code updates the net before it weighs the same batch, here it is after; and all its forwards
    update the running statistics. The net needs an optimizer that forgets the gradient's scale, such as Adam.

    Args:
        virtual_rate: learning rate of the virtual step.
        net_rate: learning rate of the net, as a multiple of the model's.
        hidden: units in the net's hidden layer.
    """

    name = "ds3l"
    title = "DS3L"
    paper = "Guo et al., 2020, ICML"
    citation = """
    @inproceedings{guo2020safe,
      title = {Safe Deep Semi-Supervised Learning for Unseen-Class Unlabeled Data},
      author = {Guo, Lan-Zhe and Zhang, Zhen-Yu and Jiang, Yuan and Li, Yu-Feng and Zhou, Zhi-Hua},
      booktitle = {International Conference on Machine Learning},
      year = {2020}
    }"""
    settings = {"paper": {**OLIVER, "unlabeled_weight": 10.0}}
    rival = True
    views = ("weak", "weak_2")
    upstream_divides_by_all = ("labeled",)

    def __init__(self, virtual_rate: float = 1e-3, net_rate: float = 0.2, hidden: int = 100) -> None:
        super().__init__()
        check_positive(virtual_rate=virtual_rate, net_rate=net_rate, hidden=hidden)
        self.virtual_rate = virtual_rate
        self.learning_rate_factor = net_rate
        self.hidden = hidden

    def prepare(self, model: nn.Module, num_labels: int, unlabeled_rows: int, validation_rows: int) -> None:
        self.net = nn.Sequential(nn.Linear(num_labels, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 1))

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        with sdpa_kernel(SDPBackend.MATH):  # the only attention with a second derivative
            labeled, first = self.logits(model, batch, "weak")
            second = self.logits_again(model, batch, "weak_2")
            change = (second.softmax(-1) - first.detach().softmax(-1)).square().mean(-1)
            weights = self.net(first.softmax(-1)).sigmoid().squeeze(1)
            rows = len(labeled) + len(first)
            inner = F.cross_entropy(labeled, batch.y, reduction="sum") / rows
            inner = inner + batch.weight * weighted_mean(change, weights)
            ahead = self.ahead(model, batch, inner)
        parameters = list(self.net.parameters())
        gradients = torch.autograd.grad(ahead, parameters)
        pull = torch.stack([(p * g).sum() for p, g in zip(parameters, gradients, strict=True)]).sum()
        weights = weights.detach()
        return Losses(
            self.labeled_loss(labeled, batch.y) + pull - pull.detach(),
            weighted_mean(change, weights),
            {
                "loss/ahead": ahead,
                "weights/mean": weights.mean(),
                "weights/deviation": weights.std(correction=0),
            },
        )

    def ahead(self, model: nn.Module, batch: SemiBatch, inner: Tensor) -> Tensor:
        """Cross-entropy of the labeled images after a step of SGD on `inner`, as a function of the net."""
        core = model.module if isinstance(model, DistributedDataParallel) else model
        now = {name: p for name, p in core.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(inner, list(now.values()), create_graph=True, materialize_grads=True)
        step = {name: p - self.virtual_rate * g for (name, p), g in zip(now.items(), gradients, strict=True)}
        with frozen_batchnorm(core):
            logits = functional_call(core, step, kwargs={"pixel_values": batch.x}).logits
        return F.cross_entropy(logits, batch.y)


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    total = weights.sum()
    return (weights * values).sum() / torch.where(total > 0, total, 1.0)
