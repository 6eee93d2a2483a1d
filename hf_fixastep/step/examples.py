"""The gate per example: an unlabeled image counts only if it does not oppose the labeled gradient.

Judged by the last layer alone, whose gradient of one image is known without a backward pass of its own. Plain
torch, like the slots that it works with:

    examples = ExampleGate(model, num_labels)
    with examples.watching():
        with slots.fill(LABELED):
            main_loss().backward()
        examples.learn(slots)
        loss = auxiliary_loss()
        with examples.choosing(), slots.fill(UNLABELED):
            loss.backward()
    slots.gate(weight=1.0, policy="per_example")
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_fixastep.step.forwards import classification_head
from hf_fixastep.step.gate import LABELED, GradientSlots, is_distributed, precise


class ExampleGate:
    """Stops the gradient of every row whose own gradient of the head opposes the labeled one.

    A row is what goes through the head: one view of one image. With delta the gradient of the unlabeled loss
    by the row's logits, h its features, G and g the labeled gradients of weight and bias, the inner product
    of both gradients is delta @ (G @ h + g).
    """

    def __init__(self, model: nn.Module, num_labels: int) -> None:
        self.head = head = classification_head(model, num_labels)
        # Kept, for FSDP2 puts others in their place during a forward.
        self.parameters: list[Any] = [
            p for p in (head.weight, head.bias) if p is not None and p.requires_grad
        ]
        self.labeled: list[Tensor] = []  # G, and g if the head has a bias that is trained
        self.is_choosing = False
        self.waiting: list[Any] = []  # what is to be judged by the labeled gradient when it is complete
        self.counts = torch.zeros(2, dtype=torch.int64, device=head.weight.device)  # rows kept, and judged

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Both forwards run inside."""
        hook = self.head.register_forward_hook(self._watch)
        try:
            yield
        finally:
            hook.remove()

    def learn(self, slots: GradientSlots) -> None:
        """Take over the labeled gradient, of all processes; before the slots begin to reduce it."""
        gradients: list[Any] = [slots.gradients[parameter][LABELED] for parameter in self.parameters]
        is_sharded = isinstance(gradients[0], DTensor)  # and then reduced already
        whole = [gradient.full_tensor() if is_sharded else gradient for gradient in gradients]
        self.labeled = [precise(gradient).clone() for gradient in whole]
        if is_distributed() and not is_sharded:
            for gradient in self.labeled:  # only the sign of a product with it counts, so a sum will do
                dist.all_reduce(gradient)

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        """The unlabeled backward runs inside. Others, such as VAT's in its forward, stay as they are."""
        self.is_choosing = True
        try:
            yield
        finally:
            self.is_choosing = False

    def share(self) -> Tensor:
        """Of the rows that had a gradient since the last call, on all processes, those kept; 0 of none."""
        counts, self.counts = self.counts, torch.zeros_like(self.counts)
        if is_distributed():
            dist.all_reduce(counts)
        return counts[0] / counts[1].clamp_min(1)

    def _watch(self, head: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> None:
        if not logits.requires_grad:
            return
        if logits.ndim != 2:
            raise ValueError(
                f"The classification head got features of shape {list(inputs[0].shape)}, but the gate "
                "per_example needs one vector per image; choose a model with a linear head on pooled "
                "features, or another gate."
            )
        features = inputs[0].detach()
        logits.register_hook(lambda delta: self._choose(delta, features) if self.is_choosing else None)

    def _choose(self, delta: Tensor, features: Tensor) -> Tensor:
        products = (F.linear(precise(features), *self.labeled) * precise(delta)).sum(1)
        # A row that is not finite passes, so that the slots reject and count the gradient as with every gate,
        # and a GradScaler learns of an overflow.
        kept = (products > 0) | ~delta.isfinite().all(1)
        judged = delta.ne(0).any(1)
        self.counts += torch.stack([kept & judged, judged]).sum(1)
        # where, never a product with 0: a rejected row may hold anything.
        return torch.where(kept[:, None], delta, 0.0)


def check_examples(model: nn.Module, num_labels: int, loss: Any, micro_batches: int) -> None:
    """Refuse what the gate per example cannot judge; `micro_batches` are those of an optimizer step."""
    if not classification_head(model, num_labels).weight.requires_grad:
        raise ValueError(
            "The gate per_example judges by the gradient of the classification head, but the head is frozen; "
            "train it, or choose another gate."
        )
    name = type(loss).__name__
    if any(p.requires_grad for p in loss.parameters()):
        raise ValueError(
            f"{name} has layers of its own, which would learn from images that the gate per_example rejects; "
            "choose another gate or loss."
        )
    if micro_batches > 1 and not loss.in_parts:
        remedy = "set batchnorm to separate" if loss.separable else "choose another gate or loss"
        raise ValueError(
            f"gradient_accumulation_steps is {micro_batches}, and the gate per_example needs the labeled "
            f"gradient of all micro-batches first, but {name} takes labeled and unlabeled images together; "
            f"{remedy}, or take one large batch."
        )
