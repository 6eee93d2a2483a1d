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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hf_fixastep.checks import check_choice


LABELED, UNLABELED = 0, 1
GATES = ("drop", "project", "layerwise", "per_example", "off")
LARGEST = 2.0**64  # a gradient of this norm counts as not finite: in float32 its square is infinite


@dataclass(frozen=True)
class Gate:
    """What the gate saw in one step; tensors, so that reading them does not stall the device."""

    # 1. when the unlabeled gradient was kept whole, else 0.; layerwise: the share of tensors kept.
    open: Tensor
    dot: Tensor
    cosine: Tensor  # 0. when either gradient is zero or not finite
    labeled_norm: Tensor
    unlabeled_norm: Tensor
    labeled_nonfinite: Tensor  # 1. when the step contributes nothing because of it
    unlabeled_nonfinite: Tensor  # 1. when the unlabeled gradient was rejected because of it


class GradientSlots:
    """Two gradients per parameter, apart: row 0 of a flat buffer is the labeled one, row 1 the unlabeled one.

    On several processes every backward stays local (for DDP: under `no_sync`), and `reduce` comes before
    `gate`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise ValueError("No parameter requires a gradient, so there is nothing to train; unfreeze some.")
        groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self.parameters:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self.decided = False
        self.reducing: dict[int, list[Any]] = {}  # collectives under way, by row
        self.buffers: list[Tensor] = []
        self.views: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self.gradients: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}  # the views as .grad takes them
        for (dtype, device), members in groups.items():
            sizes = [self._own_part(p).numel() for p in members]
            buffer = torch.zeros(2, sum(sizes), dtype=dtype, device=device)
            self.buffers.append(buffer)
            for parameter, *pieces in zip(members, *(row.split(sizes) for row in buffer), strict=True):
                labeled, unlabeled = (shaped_like(piece, self._own_part(parameter)) for piece in pieces)
                self.views[parameter] = (labeled, unlabeled)
                self.gradients[parameter] = (
                    self._gradient(labeled, parameter),
                    self._gradient(unlabeled, parameter),
                )

    @contextlib.contextmanager
    def fill(self, row: int) -> Iterator[None]:
        """Backward passes inside add to this row; the first fill after a decision starts from zero."""
        if self.decided:
            for buffer in self.buffers:
                buffer.zero_()
            self.decided = False
        for parameter in self.parameters:
            parameter.grad = self.gradients[parameter][row]
        try:
            yield
            for parameter in self.parameters:
                if parameter.grad is not self.gradients[parameter][row]:
                    raise RuntimeError(
                        "The backward pass replaced .grad instead of adding to it, so the two gradients "
                        "cannot be kept apart; switch off what does this (for DDP: gradient_as_bucket_view)."
                    )
        finally:
            for parameter in self.parameters:
                parameter.grad = None

    def start_reduce(self, row: int) -> None:
        """Begin to add up one gradient over the processes, while the other one is still being computed."""
        if is_distributed() and row not in self.reducing:
            self.reducing[row] = [dist.all_reduce(buffer[row], async_op=True) for buffer in self.buffers]

    def reduce(self) -> None:
        """Average both gradients over the processes."""
        if is_distributed():
            for row in (LABELED, UNLABELED):
                self.start_reduce(row)
            for work in self.reducing.pop(LABELED) + self.reducing.pop(UNLABELED):
                work.wait()
            for buffer in self.buffers:
                buffer.div_(dist.get_world_size())

    def gate(self, weight: float, policy: str = "drop", pass_overflow: bool = False) -> Gate:
        """Leave in `.grad` the labeled gradient plus `weight` times what the policy keeps of the unlabeled
        one.

        Args:
            weight: lambda; it multiplies after the decision.
            policy: drop (reject the unlabeled gradient unless the inner product is positive), project (remove
                its component against the labeled one), layerwise (drop, tensor by tensor), off (always keep),
                per_example (the same: an `ExampleGate` has chosen before).
            pass_overflow: write NaN when a gradient is not finite, so that a GradScaler skips and backs off.
        """
        check_choice("gate", policy, GATES)
        products = self._inner_products()
        dot, squares = products[0], products[1:]
        labeled_finite, unlabeled_finite = finite = squares < LARGEST**2  # False for NaN
        if policy == "layerwise":
            opened = self._add_layerwise(weight, unlabeled_finite)
        else:
            opened = unlabeled_finite
            # where, never a product with 0: a rejected gradient may hold inf or NaN.
            if policy == "drop":
                opened = opened & (dot > 0)
            elif policy == "project":
                opened = opened & (dot >= 0)
                pull_back = torch.where((dot < 0) & labeled_finite, dot / squares[LABELED], 0.0)
            for labeled, unlabeled in self._chunks():
                if policy == "project":
                    step = precise(unlabeled) - pull_back * precise(labeled)
                    kept = torch.where(unlabeled_finite, step, 0.0)
                else:
                    kept = torch.where(opened, unlabeled, 0.0)
                labeled.add_(kept, alpha=weight)
        usable = labeled_finite & unlabeled_finite if pass_overflow else labeled_finite
        for labeled, _ in self.buffers:
            labeled.masked_fill_(~usable, torch.nan if pass_overflow else 0.0)
        for parameter in self.parameters:
            parameter.grad = self.gradients[parameter][LABELED]
        self.decided = True
        labeled_norm, unlabeled_norm = squares.sqrt()
        labeled_nonfinite, unlabeled_nonfinite = (~finite).float()
        norms = labeled_norm * unlabeled_norm
        return Gate(
            open=opened.float(),
            dot=dot,
            cosine=torch.where(finite.all() & (norms > 0), dot / norms, 0.0),
            labeled_norm=labeled_norm,
            unlabeled_norm=unlabeled_norm,
            labeled_nonfinite=labeled_nonfinite,
            unlabeled_nonfinite=unlabeled_nonfinite,
        )

    def _chunks(self) -> Iterator[Tensor]:
        """Both rows, part by part: copies in float64 stay small, and on a CPU in the cache."""
        for buffer in self.buffers:
            yield from buffer.split(2**16 if buffer.device.type == "cpu" else 2**22, dim=1)

    def _inner_products(self) -> Tensor:
        """<labeled, unlabeled>, |labeled|^2 and |unlabeled|^2, where squares of tiny float32 values do not
        vanish.
        """
        total: Any = 0
        for chunk in self._chunks():
            labeled, unlabeled = precise(chunk)
            total = total + torch.stack(
                [labeled.dot(unlabeled), labeled.dot(labeled), unlabeled.dot(unlabeled)]
            )
        return self._agree(total)

    def _add_layerwise(self, weight: float, finite: Tensor) -> Tensor:
        dots = [(precise(labeled) * precise(unlabeled)).sum() for labeled, unlabeled in self.views.values()]
        opened = (self._agree(torch.stack(dots)) > 0) & finite
        for keep, (labeled, unlabeled) in zip(opened, self.views.values(), strict=True):
            labeled.add_(torch.where(keep, unlabeled, 0.0), alpha=weight)
        return opened.float().mean()

    def _own_part(self, parameter: nn.Parameter) -> Tensor:
        return parameter

    def _gradient(self, view: Tensor, parameter: nn.Parameter) -> Tensor:
        return view

    def _agree(self, products: Tensor) -> Tensor:
        """The same numbers on all processes: unlike devices may round sums of the same values differently."""
        if is_distributed():
            dist.broadcast(products, 0)
        return products


class ShardedSlots(GradientSlots):
    """The same for parameters sharded by FSDP2 (DTensor): each process keeps its shard of both gradients.

    FSDP2 averages over the processes in every backward, so none may run under `no_sync`.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        if not all(isinstance(p, DTensor) for p in parameters):
            raise ValueError("FSDP2 has sharded some parameters and not others; shard all of them or none.")
        super().__init__(parameters)

    def start_reduce(self, row: int) -> None:
        """Nothing is left to reduce."""

    def reduce(self) -> None:
        """Nothing is left to reduce."""

    def _own_part(self, parameter: nn.Parameter) -> Tensor:
        return parameter.to_local()  # type: ignore[attr-defined]

    def _gradient(self, view: Tensor, parameter: nn.Parameter) -> Tensor:
        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        size, stride = parameter.size(), parameter.stride()
        return DTensor.from_local(view, mesh, placements, run_check=False, shape=size, stride=stride)

    def _agree(self, products: Tensor) -> Tensor:
        """Sums over the shards; replicas of a shard, if there are any, have the same."""
        first: Any = self.parameters[0]
        for dimension, placement in enumerate(first.placements):
            if placement.is_shard():
                dist.all_reduce(products, group=first.device_mesh.get_group(dimension))
        return products


def gradient_slots(parameters: Iterable[nn.Parameter]) -> GradientSlots:
    """The slots that fit the parameters: plain or sharded."""
    parameters = list(parameters)
    kind = ShardedSlots if any(isinstance(p, DTensor) for p in parameters) else GradientSlots
    return kind(parameters)


def precise(values: Tensor) -> Tensor:
    """In float64; Apple's devices have none."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def shaped_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """A view of `flat` with the parameter's shape and strides: fused optimizers walk both in memory order."""
    outer_to_inner = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
    if parameter.permute(outer_to_inner).is_contiguous():  # no gaps, in whatever order
        return flat.as_strided(parameter.size(), parameter.stride(), flat.storage_offset())
    return flat.view_as(parameter)
