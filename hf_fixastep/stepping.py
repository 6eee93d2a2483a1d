"""One step of a training: views, mixing, two losses, two gradients, one decision."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, cast

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from hf_fixastep._compat.checkpointing import CheckpointingTrainer
from hf_fixastep._compat.distributed import reduction_by_gate
from hf_fixastep.data.features import CachedViews
from hf_fixastep.data.loader import generator_for
from hf_fixastep.data.views import Views
from hf_fixastep.losses.base import Losses
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.examples import ExampleGate
from hf_fixastep.step.forwards import average_buffers, batchnorm_layers, restore_buffers
from hf_fixastep.step.gate import LABELED, UNLABELED, GradientSlots
from hf_fixastep.step.mixing import mix_labeled
from hf_fixastep.step.teacher import Teacher


class SteppingTrainer(CheckpointingTrainer):
    """A Trainer that takes Fix-A-Step steps; a subclass gives it data, views and slots."""

    views: Views | CachedViews
    slots: GradientSlots
    examples: ExampleGate | None = None  # for the gate per_example
    mix_labeled: bool
    unlabeled_weight: float

    @property
    def views_needed(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.loss.views, *(("weak", "weak_2") if self.mix_labeled else ())]))

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Two gradients, apart, and at the end of the optimizer step the decision of the gate."""
        self.train_mode(model)
        inputs = send_to_device(inputs, self.args.device)
        watching = self.examples.watching() if self.examples else contextlib.nullcontext()
        with reduction_by_gate(self.accelerator, model), watching:
            if not self.loss.in_parts:
                losses = self._both_at_once(model, inputs)
            elif self.examples:
                losses = self._labeled_first(model, inputs, self.examples)
            else:
                losses = self._unlabeled_first(model, inputs)
        if self.accelerator.sync_gradients:
            self._gate()
        unlabeled = 0.0 if losses.unlabeled is None else self.unlabeled_weight * losses.unlabeled.detach()
        return (losses.labeled.detach() + unlabeled) / self.current_gradient_accumulation_steps

    def _both_at_once(self, model: nn.Module, inputs: dict[str, Any]) -> Losses:
        with self.compute_loss_context_manager():
            batch = self.mix(model, self.make_batch(inputs), inputs["step"])
            losses = self.compute_losses(model, batch)
        # The two may share a graph, as with joint batch norm they always do.
        self._backward(LABELED, losses.labeled, retain_graph=losses.unlabeled is not None)
        with self.examples.choosing() if self.examples else contextlib.nullcontext():
            self._backward(UNLABELED, losses.unlabeled)
        return losses

    def _unlabeled_first(self, model: nn.Module, inputs: dict[str, Any]) -> Losses:
        """The logits of the unlabeled images serve phase 1 as guesses."""
        batch = self.make_batch(inputs)
        with self.compute_loss_context_manager():
            losses = self.compute_losses(model, batch.unlabeled_part())
        self._backward(UNLABELED, losses.unlabeled)
        losses.labeled = self._labeled_part(model, batch, inputs["step"])
        return losses

    def _labeled_first(self, model: nn.Module, inputs: dict[str, Any], examples: ExampleGate) -> Losses:
        """Unlabeled images wait for the labeled gradient of the whole optimizer step, which judges them."""
        batch = self.make_batch(inputs)
        total = Losses(self._labeled_part(model, batch, inputs["step"]), None)
        examples.waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return total
        found = []
        for part in examples.waiting:  # views are made anew: they take more memory than their images
            unlabeled = (batch if part is inputs else self.make_batch(part)).unlabeled_part()
            with self.compute_loss_context_manager():
                losses = self.compute_losses(model, unlabeled)
            with examples.choosing():
                self._backward(UNLABELED, losses.unlabeled, last=part is inputs)
                found.append(cast(Tensor, losses.unlabeled).detach())
        examples.waiting.clear()
        total.unlabeled = torch.stack(found).sum()
        return total

    def _labeled_part(self, model: nn.Module, batch: SemiBatch, draw: int) -> Tensor:
        with self.compute_loss_context_manager():
            batch = self.mix(model, batch, draw)
            loss = self._divided("labeled", self.loss.labeled_part(model, batch))
        self._backward(LABELED, loss)
        return loss

    def _backward(self, row: int, loss: Any, retain_graph: bool = False, last: bool = True) -> None:
        """Add to a gradient of this optimizer step, and begin to reduce it after its last loss."""
        if loss is None:
            return
        if not (isinstance(loss, Tensor) and loss.requires_grad):
            raise ValueError(
                f"The {'labeled' if row == LABELED else 'unlabeled'} loss of {type(self.loss).__name__} has "
                "no gradient; compute it from the model's logits, or give None where an unlabeled one is not "
                "there."
            )
        self.values.record({"loss/labeled" if row == LABELED else "loss/unlabeled": loss})
        if self.current_gradient_accumulation_steps > 1:
            loss = loss / self.current_gradient_accumulation_steps
        with self.slots.fill(row):
            self.accelerator.backward(loss, retain_graph=retain_graph)
        if self.accelerator.sync_gradients and last:
            if row == LABELED and self.examples:
                self.examples.learn(self.slots)
            self.slots.start_reduce(row)

    @property
    def frozen_layers(self) -> list[nn.Module]:
        """Batch norm that stays in eval mode."""
        return batchnorm_layers(self.core_model) if self.args.batchnorm == "frozen" else []

    def train_mode(self, model: nn.Module) -> None:
        if not (model.training and self.model.training):  # an evaluation switches only the inner one
            model.train()
            if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers
                self.optimizer.train()
        for layer in self.frozen_layers:  # always, for the Trainer may have switched the whole model
            layer.eval()

    def make_batch(self, inputs: dict[str, Any]) -> SemiBatch:
        """Views of the drawn images, as a pure function of (seed, rank, draw)."""
        args, draw = self.args, inputs["step"]

        def generator(purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
            return generator_for(args.seed, args.process_index, draw, purpose, device=device)

        # Not F.one_hot, which on a CPU looks at the labels.
        y = torch.eye(self.model.config.num_labels, device=inputs["labels"].device)[inputs["labels"]]
        x = self.views((args.labeled_view,), inputs["pixel_values"], generator("labeled"))[args.labeled_view]
        batch = SemiBatch(x, y, {}, generator=generator("loss", args.device))
        if self.unlabeled is not None:
            batch.index = inputs["unlabeled_index"]
            batch.step, batch.weight = self.state.global_step, self.unlabeled_weight
            batch.views = self.views(self.loss.views, inputs["unlabeled"], generator("unlabeled"))
        if self.mix_labeled:
            pool = inputs["unlabeled"][: None if args.mix_pool == "all" else len(y)]
            missing = [name for name in self.views_needed if name not in batch.views]
            batch.views |= self.views(missing, pool, generator("pool"))
        return batch

    def mix(self, model: nn.Module, batch: SemiBatch, draw: int) -> SemiBatch:
        """Phase 1, if it is on."""
        args = self.args
        if not self.mix_labeled:
            return batch
        return mix_labeled(
            model,
            batch,
            generator_for(args.seed, args.process_index, draw, "mix"),
            alpha=args.mix_alpha,
            temperature=args.mix_temperature,
            per_batch=args.mix_per_batch,
            pool_rows=None if args.mix_pool == "all" else len(batch.y),
            guess_all=self.loss.batchnorm == "joint",
        )

    def compute_losses(self, model: nn.Module, batch: SemiBatch) -> Losses:
        """The two losses of a batch, or the unlabeled one of its unlabeled part; stats are for the log."""
        losses = self.loss(model, batch, teacher=cast(Teacher, self.teacher).model)
        losses.labeled = self._divided("labeled", losses.labeled)
        losses.unlabeled = self._divided("unlabeled", losses.unlabeled)
        self.values.record(losses.stats)
        return losses

    def _divided(self, name: str, loss: Any) -> Any:
        """As the official base methods do, where a loss of -1 labels is averaged over the whole batch."""
        if loss is None or self.mix_labeled or not self.args.divide_by_all_rows or self.unlabeled is None:
            return loss
        if name == "labeled" and self.loss.weighted_mean:
            return loss
        rows = {"labeled": self.args.train_batch_size, "unlabeled": self.args.unlabeled_batch_size}
        return loss * rows[name] / sum(rows.values()) if name in self.loss.upstream_divides_by_all else loss

    def _gate(self) -> None:
        """Decide on the gradients of the whole optimizer step, and leave the outcome in `.grad`."""
        self.slots.reduce()
        overflows = self.accelerator.scaler is not None
        gate = self.slots.gate(self.unlabeled_weight, self.args.gate, pass_overflow=overflows)
        if self.examples:
            gate = dataclasses.replace(gate, open=gate.open * self.examples.share())
        if self.unlabeled is not None:
            for name in ("open", "cosine", "labeled_norm", "unlabeled_norm"):
                self.values.record({f"gate/{name}": getattr(gate, name)})
            self.values.record({"nonfinite/unlabeled": gate.unlabeled_nonfinite})
        self.values.record({"nonfinite/labeled": gate.labeled_nonfinite})
        if self.args.world_size > 1:
            of_loss = self.loss.buffers() if self.loss.average_buffers else ()
            fixed = {id(buffer) for layer in self.frozen_layers for buffer in layer.buffers()}
            of_model = [buffer for buffer in self.core_model.buffers() if id(buffer) not in fixed]
            average_buffers([*of_model, *of_loss])
        restore_buffers(self.core_model, cast(Teacher, self.teacher).model)
