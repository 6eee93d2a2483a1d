"""The Trainer that takes Fix-A-Step steps."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any, cast

import datasets
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import ProgressCallback, set_seed

from hf_fixastep import callbacks as own
from hf_fixastep._compat.checkpointing import CheckpointingTrainer
from hf_fixastep._compat.distributed import check_launch, reduction_by_gate
from hf_fixastep._compat.optimizing import remember_lomo
from hf_fixastep._compat.patches import allow_second_backward, tune_cpu
from hf_fixastep.config import FixAStepConfig
from hf_fixastep.data.features import CachedViews, Examples, Features
from hf_fixastep.data.images import Images
from hf_fixastep.data.loader import PairedLoader, as_is, generator_for
from hf_fixastep.data.processing import check_classes, check_views, class_names, views_of
from hf_fixastep.data.views import Views
from hf_fixastep.evaluation.metrics import classification_metrics
from hf_fixastep.hub.pushing import PushingTrainer
from hf_fixastep.losses import get_loss
from hf_fixastep.losses.base import Losses, SemiSupervisedLoss
from hf_fixastep.losses.functional import class_weights
from hf_fixastep.models.head import FeatureHead
from hf_fixastep.models.trainable import limit_training, name_classes
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.examples import ExampleGate, check_examples
from hf_fixastep.step.forwards import average_buffers, batchnorm_layers, restore_buffers
from hf_fixastep.step.gate import LABELED, UNLABELED, GradientSlots, gradient_slots
from hf_fixastep.step.mixing import mix_labeled
from hf_fixastep.step.schedules import fitted_decay
from hf_fixastep.step.teacher import Teacher
from hf_fixastep.step.values import Values


class FixAStepTrainer(CheckpointingTrainer, PushingTrainer):
    """Train an image classifier on a few labeled and many unlabeled images.

    Args:
        model: an image classifier; or a folder or Hub name of a pretrained network, whose head becomes a new
            one if it has other classes.
        train_dataset: labeled images, a `datasets.Dataset` with columns image and label, or `Images`,
            or cached `Features`.
        unlabeled_dataset: unlabeled images of the same kinds; a label column is ignored.
        eval_dataset: like train_dataset, or several of them by name.
        processing_class: the image processor, which says size, mean and deviation; saved with the model. By
            default that of a pretrained network.
        loss: the base loss; by default the one that `args.loss` names.
    """

    loss_is_scaled_for_ga = False  # our losses are means over one batch
    train_dataset: Examples
    slots: GradientSlots
    examples: ExampleGate | None = None  # for the gate per_example

    def __init__(
        self,
        model: nn.Module | str | os.PathLike[str] | None = None,
        args: FixAStepConfig | None = None,
        *,
        train_dataset: datasets.Dataset | Examples,
        unlabeled_dataset: datasets.Dataset | Examples | None = None,
        eval_dataset: datasets.Dataset | Examples | dict[str, datasets.Dataset | Examples] | None = None,
        processing_class: Any = None,
        loss: SemiSupervisedLoss | None = None,
        callbacks: list[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, FixAStepConfig):
            raise ValueError(f"args is {type(args).__name__}, but FixAStepTrainer needs a FixAStepConfig.")
        if isinstance(model, (str, os.PathLike)):
            model, processor = load_pretrained(model, train_dataset, args.seed)
            processing_class = processing_class or processor
        if processing_class is None:
            raise ValueError("processing_class is None, but the image processor of the model is needed.")
        self.loss = loss or get_loss(args.loss, **cast(dict[str, Any], args.loss_kwargs))
        self.mix_labeled = args.mix_labeled and self.loss.mixable
        self.image_size: tuple[int, int] | None = None  # of images that are to be decoded
        self.views: Views | CachedViews
        if isinstance(train_dataset, Features):
            self.views = CachedViews(*train_dataset.versions)
        else:
            self.image_size, self.views = views_of(processing_class, flip=args.flip, cutout=args.cutout)
        labeled = self.images(train_dataset)
        self.class_names = class_names(labeled)
        self.unlabeled = self._unlabeled_images(unlabeled_dataset)
        self.gates_examples = args.gate == "per_example" and self.unlabeled is not None
        if isinstance(eval_dataset, dict):
            eval_dataset = {name: self._labeled_images(split) for name, split in eval_dataset.items()}
        elif eval_dataset is not None:
            eval_dataset = self._labeled_images(eval_dataset)
        self.validation_rows = len(eval_dataset) if isinstance(eval_dataset, Images | Features) else 0
        self.unlabeled_weight = 0.0
        self.window: dict[str, list[float]] = {}  # values of every step between the last two logs
        self.values = Values()
        if model is not None:
            self._fit(model, args)
        kwargs.setdefault("compute_metrics", classification_metrics(self.class_names))
        super().__init__(
            model=model,
            args=args,
            data_collator=as_is,
            train_dataset=labeled,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=[*(kind(self) for kind in own.BETWEEN_STEPS), *(callbacks or [])],
            **kwargs,
        )
        if model is not None:
            self._prepare_loss(model)
        check_launch(self.accelerator, self.loss, args.procedure)
        remember_lomo()
        if args.device.type == "cpu":
            tune_cpu(args.cpu_threads)
        if args.class_weights == "balanced":
            self._weigh_classes()
        # Without batch statistics joint and separate give the same numbers, and separate is cheaper.
        joint = args.batchnorm == "joint" and batchnorm_layers(self.model)
        self.loss.batchnorm = "joint" if joint else "separate"
        if self.gates_examples:
            check_examples(self.model, len(self.class_names), self.loss, args.gradient_accumulation_steps)
        if args.torch_compile and self.loss.batchnorm == "joint":
            allow_second_backward()
        if self.pop_callback(ProgressCallback):
            self.add_callback(own.ProgressBarCallback())
        if args.push_to_hub:
            self.add_callback(self.card)
        # The last one: it ends the process when all others have done their part.
        self.signals = own.SignalCallback(self)
        self.add_callback(self.signals)
        self.get_train_dataloader()  # finds empty sets and sizes that do not fit now, not at train()

    # ---- data in

    def images(self, dataset: datasets.Dataset | Examples) -> Examples:
        """A set of images, decoded to the size that the model takes, or their features."""
        if isinstance(dataset, Images | Features):
            return dataset
        if self.image_size is None:
            raise ValueError(
                "The labeled images are cached features, but other images are not; embed them with the same "
                "network."
            )
        return Images.from_dataset(dataset, self.image_size)

    def _labeled_images(self, dataset: datasets.Dataset | Examples) -> Examples:
        """Images to evaluate on, whose labels have to mean what those of the training mean."""
        images = self.images(dataset)
        check_classes(images, self.class_names)
        return images

    def _unlabeled_images(self, dataset: datasets.Dataset | Examples | None) -> Examples | None:
        if not self.views_needed:
            return None
        check_views(self.views_needed, dataset is not None, type(self.loss).__name__)
        return self.images(cast(Examples, dataset))

    @property
    def views_needed(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.loss.views, *(("weak", "weak_2") if self.mix_labeled else ())]))

    def get_train_dataloader(self) -> DataLoader:
        args = self.args
        return PairedLoader(
            self.train_dataset,
            self.unlabeled,
            batch_sizes=(
                args.train_batch_size,
                args.unlabeled_batch_size if self.unlabeled is not None else 0,
            ),
            steps_per_epoch=args.steps_per_epoch,
            seed=args.seed if args.data_seed is None else args.data_seed,
            rank=args.process_index,
            world=args.world_size,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        named = eval_dataset is None or isinstance(eval_dataset, str)
        return super().get_eval_dataloader(eval_dataset if named else self.images(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return super().get_test_dataloader(self.images(test_dataset))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list, None]:
        """The next batches; their items need no counting, for our losses are means."""
        return [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)], None

    # ---- model and loss

    def _fit(self, model: Any, args: FixAStepConfig) -> None:
        name_classes(model, self.class_names)
        model.to(memory_format=torch.channels_last)
        if not isinstance(model, FeatureHead):  # of which there is nothing to leave out
            limit_training(model, args.trainable, len(self.class_names), args.lora_rank)

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        self._fit(model, self.args)
        self._prepare_loss(model)
        return model

    def _prepare_loss(self, model: nn.Module) -> None:
        """Give a new training's loss its layers and state; the seed is set by now, the optimizer not made."""
        self.loss.prepare(
            model,
            num_labels=len(self.class_names),
            unlabeled_rows=0 if self.unlabeled is None else len(self.unlabeled),
            validation_rows=self.validation_rows,
        )
        self.loss.to(self.args.device)
        if self.loss.class_weights is not None:  # an argument, not a state, so not a buffer
            self.loss.class_weights = self.loss.class_weights.to(self.args.device)

    def _weigh_classes(self) -> None:
        """By the whole labeled set, and a mean over rows: n processes are one with n times the batch."""
        counts = torch.bincount(cast(Tensor, self.train_dataset.labels), minlength=len(self.class_names))
        as_upstream = self.args.divide_by_all_rows  # weights of sum 1, and a weighted mean unless mixed
        self.loss.weighted_mean = as_upstream and not self.mix_labeled
        self.loss.class_weights = class_weights(counts, keep_scale=not as_upstream).to(self.args.device)

    def set_up(self) -> None:
        """Make what the steps need; the model is by now where, and as, it is going to be trained."""
        twin = self.twin.shard(self.accelerator) if self.accelerator.is_fsdp2 else None
        self.slots = gradient_slots([*self.core_model.parameters(), *self.loss.parameters()])
        self.values.clear()
        if self.args.world_size > 1:
            for tensor in self.loss.state_dict().values():  # DDP sees to the model only
                dist.broadcast(tensor, 0)
        self.teacher = Teacher(self.core_model, cast(float, self.teacher_decay), twin)
        self.examples = ExampleGate(self.core_model, len(self.class_names)) if self.gates_examples else None
        self.finish_resuming()

    @property
    def teacher_decay(self) -> float | None:
        """As given, or fitted to the run once its length is known."""
        steps = self.state.max_steps
        if self.args.teacher_decay is None and steps:
            return fitted_decay(steps)
        return self.args.teacher_decay

    # ---- one step

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
        shared_graph = self.loss.batchnorm == "joint" and losses.unlabeled is not None
        self._backward(LABELED, losses.labeled, retain_graph=shared_graph)
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
        self.values.record({"loss/labeled" if row == LABELED else "loss/unlabeled": loss})
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

    # ---- evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self.averaged():
            output = super().evaluation_loop(*args, **kwargs)
        is_validation = 0 < self.validation_rows == output.num_samples
        if self.is_in_train and is_validation and output.predictions is not None:
            self.loss.validated(torch.as_tensor(output.predictions, device=self.args.device))
        return output

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs = send_to_device(inputs, self.args.device)
        inputs["pixel_values"] = self.views.plain(inputs["pixel_values"])
        return super().prediction_step(model, inputs, *args, **kwargs)

    # ---- logs

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a training log, not an evaluation
            self.window = self.values.read()
            for name, values in self.window.items():
                logs[name] = sum(values) if name.startswith("nonfinite/") else sum(values) / len(values)
            if self.unlabeled is not None:
                logs["unlabeled_weight"] = self.unlabeled_weight
            if self.args.teacher_decay is None:
                logs["teacher_decay"] = cast(float, self.teacher_decay)
            self.values.clear()
        super().log(logs, start_time)


def load_pretrained(
    source: str | os.PathLike[str], labeled: datasets.Dataset | Images, seed: int
) -> tuple[nn.Module, Any]:
    """A pretrained network for the classes of a labeled set, and its image processor."""
    from hf_fixastep.hub.loading import load_network  # here, as it needs the client of the Hub

    set_seed(seed)  # for a new head
    return load_network(source, len(class_names(labeled)))
