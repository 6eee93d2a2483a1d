"""The gate: the unlabeled gradient counts only if it does not oppose the labeled one.

Plain torch, so that it also serves a hand-written loop with any main and any auxiliary loss:

    slots = GradientSlots(model.parameters())
    with slots.fill(LABELED):
        main_loss.backward()
    with slots.fill(UNLABELED):
        auxiliary_loss.backward()
    slots.gate(weight=1.0)  # leaves the gated gradient in .grad; the next fill starts from zero
    optimizer.step()
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_fixastep.names import choose


LABELED, UNLABELED = 0, 1
GATES = ("drop", "project", "layerwise", "off")


@dataclass(frozen=True)
class Gate:
    """What the gate saw in one step; tensors, so that reading them does not stall the device."""

    open: Tensor  # 1. when the unlabeled gradient was kept whole, else 0.; layerwise: the share of tensors kept
    dot: Tensor
    cosine: Tensor  # 0. when either gradient is zero or not finite
    labeled_norm: Tensor
    unlabeled_norm: Tensor
    labeled_nonfinite: Tensor  # 1. when the step contributes nothing because of it
    unlabeled_nonfinite: Tensor  # 1. when the unlabeled gradient was rejected because of it


class GradientSlots:
    """Two gradients per parameter, apart: row 0 of a flat buffer is the labeled one, row 1 the unlabeled one."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise ValueError("No parameter requires a gradient, so there is nothing to train; unfreeze some.")
        groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self.decided = False
        self.buffers: list[Tensor] = []
        self.views: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        for (dtype, device), members in groups.items():
            buffer = torch.zeros(2, sum(p.numel() for p in members), dtype=dtype, device=device)
            self.buffers.append(buffer)
            pieces = [row.split([p.numel() for p in members]) for row in buffer]
            for parameter, labeled, unlabeled in zip(members, *pieces, strict=True):
                self.views[parameter] = (shaped_like(labeled, parameter), shaped_like(unlabeled, parameter))

    @contextlib.contextmanager
    def fill(self, row: int) -> Iterator[None]:
        """Backward passes inside add to this row; the first fill after a decision starts from zero."""
        if self.decided:
            for buffer in self.buffers:
                buffer.zero_()
            self.decided = False
        for parameter in self.parameters:
            parameter.grad = self.views[parameter][row]
        try:
            yield
            for parameter in self.parameters:
                if parameter.grad is None or parameter.grad.data_ptr() != self.views[parameter][row].data_ptr():
                    raise RuntimeError(
                        "The backward pass replaced .grad instead of adding to it, so the two gradients cannot be "
                        "kept apart; switch off what does this (for DDP: gradient_as_bucket_view)."
                    )
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def reduce(self) -> None:
        """Average both gradients over the processes, in one collective per buffer."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            for buffer in self.buffers:
                dist.all_reduce(buffer)
                buffer.div_(dist.get_world_size())

    def gate(self, weight: float, policy: str = "drop", pass_overflow: bool = False) -> Gate:
        """Leave in `.grad` the labeled gradient plus `weight` times what the policy keeps of the unlabeled one.

        Args:
            weight: lambda; it multiplies after the decision.
            policy: drop (reject the unlabeled gradient unless the inner product is positive), project (remove its
                component against the labeled one), layerwise (drop, tensor by tensor), off (always keep).
            pass_overflow: write NaN when a gradient is not finite, so that a GradScaler skips and backs off.
        """
        choose("gate", policy, GATES)
        dot, labeled_square, unlabeled_square = self._inner_products()
        labeled_finite, unlabeled_finite = labeled_square.isfinite(), unlabeled_square.isfinite()
        if policy == "layerwise":
            opened = self._add_layerwise(weight, unlabeled_finite)
        else:
            opened = {"drop": dot > 0, "project": dot >= 0, "off": torch.ones_like(dot, dtype=torch.bool)}[policy]
            opened = opened & unlabeled_finite
            # where, never a product with 0: a rejected gradient may hold inf or NaN.
            pull_back = torch.where((dot < 0) & labeled_finite, dot / labeled_square, 0.0)
            for labeled, unlabeled in self.buffers:
                if policy == "project":
                    kept = torch.where(unlabeled_finite, unlabeled - pull_back.to(labeled.dtype) * labeled, 0.0)
                else:
                    kept = torch.where(opened, unlabeled, 0.0)
                labeled.add_(kept, alpha=weight)
        usable = labeled_finite & unlabeled_finite if pass_overflow else labeled_finite
        for labeled, _ in self.buffers:
            labeled.masked_fill_(~usable, torch.nan if pass_overflow else 0.0)
        for parameter in self.parameters:
            parameter.grad = self.views[parameter][LABELED]
        self.decided = True
        labeled_norm, unlabeled_norm = labeled_square.sqrt(), unlabeled_square.sqrt()
        norms, finite = labeled_norm * unlabeled_norm, labeled_finite & unlabeled_finite
        return Gate(
            open=opened.float(),
            dot=dot,
            cosine=torch.where(finite & (norms > 0), dot / norms, 0.0),
            labeled_norm=labeled_norm,
            unlabeled_norm=unlabeled_norm,
            labeled_nonfinite=(~labeled_finite).float(),
            unlabeled_nonfinite=(~unlabeled_finite).float(),
        )

    def _inner_products(self) -> Tensor:
        """<labeled, unlabeled>, |labeled|^2 and |unlabeled|^2, in float32 at least."""
        total = torch.zeros(3, device=self.buffers[0].device)
        for buffer in self.buffers:
            labeled, unlabeled = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
            total = total + torch.stack([labeled.dot(unlabeled), labeled.dot(labeled), unlabeled.dot(unlabeled)])
        return total

    def _add_layerwise(self, weight: float, finite: Tensor) -> Tensor:
        opened = []
        for labeled, unlabeled in self.views.values():
            precise = torch.promote_types(labeled.dtype, torch.float32)
            keep = ((labeled.to(precise) * unlabeled.to(precise)).sum() > 0) & finite
            labeled.add_(torch.where(keep, unlabeled, 0.0), alpha=weight)
            opened.append(keep.float())
        return torch.stack(opened).mean()


def shaped_like(flat: Tensor, parameter: nn.Parameter) -> Tensor:
    """A view of `flat` with the parameter's shape and strides: fused optimizers walk both in memory order."""
    outer_to_inner = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
    if parameter.permute(outer_to_inner).is_contiguous():  # no gaps, in whatever order
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset())
    return flat.view_as(parameter)
