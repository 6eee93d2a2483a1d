"""The Trainer that takes Fix-A-Step steps."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import json
import shutil
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import datasets
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, fsdp2_prepare_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import ProgressCallback, Trainer
from transformers.trainer import TRAINER_STATE_NAME

from hf_fixastep.callbacks import (
    GateMonitorCallback,
    LogResumeCallback,
    NonFiniteCallback,
    ProgressBarCallback,
    SignalCallback,
    TeacherCallback,
    UnlabeledWeightCallback,
)
from hf_fixastep.checkpoints import (
    OPTIMIZER_SETTINGS,
    RUN,
    SETTINGS,
    check_run,
    damage,
    find_checkpoint,
    only_run,
    prune,
    publish,
    saving,
)
from hf_fixastep.config import FixAStepConfig
from hf_fixastep.data.images import Images
from hf_fixastep.data.loader import PairedLoader, as_is, generator_for
from hf_fixastep.data.processor import views_of
from hf_fixastep.data.views import VIEWS
from hf_fixastep.evaluation.metrics import classification_metrics
from hf_fixastep.hub.callback import HubCardCallback
from hf_fixastep.hub.client import create_repo
from hf_fixastep.losses import get_loss
from hf_fixastep.losses.base import Losses, SemiSupervisedLoss
from hf_fixastep.losses.functional import class_weights
from hf_fixastep.models.trainable import limit_training, plain_state, with_lora
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.forwards import batchnorm_layers
from hf_fixastep.step.gate import LABELED, UNLABELED, GradientSlots, gradient_slots
from hf_fixastep.step.mixing import mix_labeled
from hf_fixastep.step.schedules import cosine_7_16, ramp_length
from hf_fixastep.step.teacher import Teacher, load_whole, reshard, whole_parameters


# What the optimizer updates; model.safetensors holds the average.
RAW_WEIGHTS = "training_weights.safetensors"
LORA_STATE = "lora.safetensors"  # the average as it is trained; model.safetensors has the changes added in
LOSS_STATE = "loss.safetensors"  # parameters and buffers of a loss that has any
LOG_WINDOW = "log_window_{}.safetensors"  # what each process has seen since the last log


class FixAStepTrainer(Trainer):
    """Train an image classifier on a few labeled and many unlabeled images.

    Args:
        train_dataset: labeled images, a `datasets.Dataset` with columns image and label, or `Images`.
        unlabeled_dataset: unlabeled images of the same kinds; a label column is ignored.
        eval_dataset: like train_dataset, or several of them by name.
        processing_class: the image processor; it says size, mean and standard deviation, and is saved with
            the model.
        loss: the base loss; by default the one that `args.loss` names.
    """

    loss_is_scaled_for_ga = False  # our losses are means over one batch
    args: FixAStepConfig
    model: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Images
    _slots: GradientSlots
    _partial: Path | None = None  # where a checkpoint is written, while it is

    def __init__(
        self,
        model: nn.Module | None = None,
        args: FixAStepConfig | None = None,
        *,
        train_dataset: datasets.Dataset | Images,
        unlabeled_dataset: datasets.Dataset | Images | None = None,
        eval_dataset: datasets.Dataset | Images | dict[str, datasets.Dataset | Images] | None = None,
        processing_class: Any,
        loss: SemiSupervisedLoss | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, FixAStepConfig):
            raise ValueError(f"args is {type(args).__name__}, but FixAStepTrainer needs a FixAStepConfig.")
        self.loss = loss or get_loss(args.loss, **cast(dict[str, Any], args.loss_kwargs))
        self.mix_labeled = args.mix_labeled and self.loss.mixable
        self.image_size, self.views = views_of(processing_class, flip=args.flip, cutout=args.cutout)
        labeled = self._images(train_dataset)
        self.class_names = class_names(labeled)
        self.unlabeled = self._check_unlabeled(unlabeled_dataset)
        if isinstance(eval_dataset, dict):
            eval_dataset = {name: self._labeled_images(split) for name, split in eval_dataset.items()}
        elif eval_dataset is not None:
            eval_dataset = self._labeled_images(eval_dataset)
        self.validation_rows = len(eval_dataset) if isinstance(eval_dataset, Images) else 0
        if model is not None:
            self._fit_classes(model)
            limit_training(model, args.trainable, len(self.class_names), args.lora_rank)
        kwargs.setdefault("compute_metrics", classification_metrics(self.class_names))
        super().__init__(
            model=model,
            args=args,
            data_collator=as_is,
            train_dataset=labeled,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        if model is not None:
            self._prepare_loss(model)
        self._check_launch()
        if args.cpu_threads is not None:
            torch.set_num_threads(args.cpu_threads)
        if self.args.device.type == "cpu":
            keep_freed_memory()
        if args.class_weights == "balanced":
            self._weigh_classes()
        # Without batch norm joint and separate give the same numbers, and separate is cheaper.
        self.loss.batchnorm = args.batchnorm if batchnorm_layers(self.model) else "separate"
        if args.torch_compile and self.loss.batchnorm == "joint":
            # Else the first backward uses up what the second one needs.
            functorch_config.donated_buffer = False
        self.teacher: Teacher | None = None
        self.unlabeled_weight = 0.0
        self.window: dict[str, list[float]] = {}  # values of every step between the last two logs
        # Of every step since the last log, on the device.
        self._values: dict[str, list[Tensor]] = defaultdict(list)
        self._resumed_average: dict[str, Tensor] | None = None
        self._resumed_log: dict[str, Tensor] | None = None
        self._changed_settings: set[str] = set()
        self.bad_steps = 0  # in a row, up to the last log
        self._raw_weights: dict[str, Tensor] = {}  # while a model is saved
        for callback in (UnlabeledWeightCallback, TeacherCallback, GateMonitorCallback, NonFiniteCallback):
            self.add_callback(callback(self))
        if self.pop_callback(ProgressCallback):
            self.add_callback(ProgressBarCallback())
        self.add_callback(LogResumeCallback(self))
        self.card = HubCardCallback(self)
        self.add_callback(self.card)
        # The last one: it ends the process when all others have done their part.
        self.signals = SignalCallback(self)
        self.add_callback(self.signals)
        self.get_train_dataloader()  # finds empty sets and sizes that do not fit now, not at train()

    def _check_launch(self) -> None:
        """Refuse what would step before the gate has decided, and what FSDP2 cannot do here."""
        kind = self.accelerator.distributed_type
        if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.FSDP):
            if not self.accelerator.is_fsdp2:
                raise ValueError(
                    f"The launch uses {'FSDP1' if kind == DistributedType.FSDP else kind.value}, but the gate needs "
                    "two gradients per parameter before the optimizer runs. Launch with plain data parallelism, or "
                    "with FSDP and fsdp_version: 2."
                )
            self._check_sharding(self.accelerator.state.fsdp_plugin)

    def _check_sharding(self, plugin: Any) -> None:
        if plugin.cpu_ram_efficient_loading:
            raise ValueError(
                "FSDP2 would load the weights on one process only; set fsdp_cpu_ram_efficient_loading to false."
            )
        if "FULL" not in str(plugin.state_dict_type):
            raise ValueError(
                "FSDP2 would save the weights in shards, which from_pretrained cannot load; set "
                "fsdp_state_dict_type to FULL_STATE_DICT."
            )
        if any(p.requires_grad for p in self.loss.parameters()):
            raise ValueError(
                f"{type(self.loss).__name__} has parameters of its own, which FSDP2 would not train; launch it with "
                "plain data parallelism."
            )
        if self.args.procedure:
            self.check_procedure()

    def check_procedure(self) -> None:
        """Refuse FSDP2: Accelerate (1.15) prepares no model without its optimizer, so none that only
        predicts.
        """
        if self.accelerator.is_fsdp2:
            raise ValueError(
                "A procedure predicts between its trainings, which FSDP2 cannot do with a model that is not trained; "
                "launch it with plain data parallelism."
            )

    # ---- data

    def _images(self, dataset: datasets.Dataset | Images) -> Images:
        return dataset if isinstance(dataset, Images) else Images.from_dataset(dataset, self.image_size)

    def _labeled_images(self, dataset: datasets.Dataset | Images) -> Images:
        """Images to evaluate on, whose labels have to mean what those of the training mean."""
        images = self._images(dataset)
        names = self.class_names if images.labels is None else class_names(images)
        if names != self.class_names[: None if images.class_names else len(names)]:
            raise ValueError(
                f"The evaluation data have the classes {', '.join(names)}, but the labeled data have "
                f"{', '.join(self.class_names)}. Give both the same classes in the same order."
            )
        return images

    def _fit_classes(self, model: Any) -> None:
        """Give the model the names of its classes, if it has as many."""
        names = self.class_names
        if model.config.num_labels != len(names):
            raise ValueError(
                f"The model has {model.config.num_labels} outputs, but the labeled data have {len(names)} classes "
                f"({', '.join(names[:10])}). Build the model with num_labels={len(names)}."
            )
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: number for number, name in enumerate(names)}
        model.to(memory_format=torch.channels_last)

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        self._fit_classes(model)
        limit_training(model, self.args.trainable, len(self.class_names), self.args.lora_rank)
        self._prepare_loss(model)
        return model

    def _weigh_classes(self) -> None:
        """By the whole labeled set, and a mean over rows: n processes are one with n times the batch."""
        counts = torch.bincount(cast(Tensor, self.train_dataset.labels), minlength=len(self.class_names))
        weights = class_weights(counts)
        # The official code: weights of sum 1, and a weighted mean unless mixed.
        if self.args.divide_by_all_rows:
            self.loss.weighted_mean = not self.mix_labeled
        else:  # the mean over the labeled images is 1, so that the loss keeps its scale
            weights *= counts.sum() / (weights * counts).sum()
        self.loss.class_weights = weights.to(self.args.device)

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

    @property
    def views_needed(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.loss.views, *(("weak", "weak_2") if self.mix_labeled else ())]))

    def _check_unlabeled(self, dataset: datasets.Dataset | Images | None) -> Images | None:
        name = type(self.loss).__name__
        if unknown := set(self.loss.views) - set(VIEWS):
            raise ValueError(
                f"{name} needs the view {', '.join(sorted(unknown))}, but an image has the views {', '.join(VIEWS)}."
            )
        if not self.views_needed:
            return None
        if dataset is None:
            raise ValueError(
                f"{name} needs the views {', '.join(self.views_needed)} of unlabeled images, but there is no "
                "unlabeled_dataset. Pass one, or train with loss='supervised'."
            )
        return self._images(dataset)

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

    def _get_dataloader(self, dataset: datasets.Dataset | Images, *args: Any, **kwargs: Any) -> DataLoader:
        return super()._get_dataloader(self._images(dataset), *args, **kwargs)

    # ---- one step

    def make_batch(self, inputs: dict[str, Any]) -> SemiBatch:
        """Views of the drawn images, as a pure function of (seed, rank, step)."""
        args, step = self.args, inputs["step"]

        def generator(purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
            return generator_for(args.seed, args.process_index, step, purpose, device=device)

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

    def mix(self, model: nn.Module, batch: SemiBatch, step: int) -> SemiBatch:
        """Phase 1, if it is on."""
        args = self.args
        if not self.mix_labeled:
            return batch
        return mix_labeled(
            model,
            batch,
            generator_for(args.seed, args.process_index, step, "mix"),
            alpha=args.mix_alpha,
            temperature=args.mix_temperature,
            per_batch=args.mix_per_batch,
            pool_rows=None if args.mix_pool == "all" else len(batch.y),
            guess_all=self.loss.batchnorm == "joint",
        )

    def compute_losses(self, model: nn.Module, batch: SemiBatch) -> Losses:
        """The two losses of a batch, or the unlabeled one of its unlabeled part."""
        losses = self.loss(model, batch, teacher=self.teacher.model)  # type: ignore[union-attr]
        losses.labeled = self._divided("labeled", losses.labeled)
        losses.unlabeled = self._divided("unlabeled", losses.unlabeled)
        return losses

    def _divided(self, name: str, loss: Any) -> Any:
        """As the official base methods do, where a loss of -1 labels is averaged over the whole batch."""
        if loss is None or self.mix_labeled or not self.args.divide_by_all_rows or self.unlabeled is None:
            return loss
        if name == "labeled" and self.loss.weighted_mean:
            return loss
        rows = {"labeled": self.args.train_batch_size, "unlabeled": self.args.unlabeled_batch_size}
        return loss * rows[name] / sum(rows.values()) if name in self.loss.upstream_divides_by_all else loss

    def _backward(self, row: int, loss: Tensor, retain_graph: bool = False) -> None:
        with self._slots.fill(row):
            self.accelerator.backward(
                loss / self.current_gradient_accumulation_steps, retain_graph=retain_graph
            )
        if self.accelerator.sync_gradients:
            self._slots.start_reduce(row)

    def _step_at_once(self, model: nn.Module, inputs: dict[str, Any]) -> Losses:
        with self.compute_loss_context_manager():
            losses = self.compute_losses(model, self.mix(model, self.make_batch(inputs), inputs["step"]))
        shared_graph = self.loss.batchnorm == "joint" and losses.unlabeled is not None
        self._backward(LABELED, losses.labeled, retain_graph=shared_graph)
        if losses.unlabeled is not None:
            self._backward(UNLABELED, losses.unlabeled)
        return losses

    def _step_apart(self, model: nn.Module, inputs: dict[str, Any]) -> Losses:
        """Unlabeled images first: one graph in memory at a time, and their logits serve as guesses for phase
        1.
        """
        batch = self.make_batch(inputs)
        with self.compute_loss_context_manager():
            losses = self.compute_losses(model, batch.unlabeled_part())
        self._backward(UNLABELED, losses.unlabeled)  # type: ignore[arg-type]
        with self.compute_loss_context_manager():
            batch = self.mix(model, batch, inputs["step"])
            losses.labeled = self._divided("labeled", self.loss.labeled_part(model, batch))
        self._backward(LABELED, losses.labeled)
        return losses

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        if not (model.training and self.model.training):  # an evaluation switches only the inner one
            model.train()
            if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers
                self.optimizer.train()
        apart = self.loss.separable and self.loss.batchnorm == "separate"
        with self._reduction_by_gate(model):
            losses = (self._step_apart if apart else self._step_at_once)(model, self._prepare_inputs(inputs))
        self._record({"loss/labeled": losses.labeled, "loss/unlabeled": losses.unlabeled, **losses.stats})
        if self.accelerator.sync_gradients:
            self._gate()
        unlabeled = 0.0 if losses.unlabeled is None else self.unlabeled_weight * losses.unlabeled.detach()
        return (losses.labeled.detach() + unlabeled) / self.current_gradient_accumulation_steps

    def _reduction_by_gate(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Forwards and backwards inside leave the gate two gradients as it expects them."""
        if self.accelerator.is_fsdp2:
            # Undo the Trainer's no_sync around inner micro-batches: FSDP2 would add up both gradients in one
            # place.
            model.set_requires_gradient_sync(True)
            return contextlib.nullcontext()
        # DDP decides in the forward whether to reduce, and broadcasts buffers there. Everything stays local
        # instead: the gate reduces both gradients once, at the end of the window.
        return self.accelerator.no_sync(model)

    def _gate(self) -> None:
        """Decide on the gradients of the whole optimizer step, and leave the outcome in `.grad`."""
        self._slots.reduce()
        overflows = self.accelerator.scaler is not None
        gate = self._slots.gate(self.unlabeled_weight, self.args.gate, pass_overflow=overflows)
        if self.unlabeled is not None:
            for name in ("open", "cosine", "labeled_norm", "unlabeled_norm"):
                self._record({f"gate/{name}": getattr(gate, name)})
            self._record({"nonfinite/unlabeled": gate.unlabeled_nonfinite})
        self._record({"nonfinite/labeled": gate.labeled_nonfinite})
        if self.args.world_size > 1:
            average_buffers(
                [*self.core_model.buffers(), *(self.loss.buffers() if self.loss.average_buffers else ())]
            )
        restore_buffers(self.core_model, self.teacher.model)  # type: ignore[union-attr]

    # ---- logs

    def _record(self, values: dict[str, Tensor | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._values[name].append(value.detach())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a training log, not an evaluation
            self.window = self._read_values()
            for name, values in self.window.items():
                logs[name] = sum(values) if name.startswith("nonfinite/") else sum(values) / len(values)
            if self.unlabeled is not None:
                logs["unlabeled_weight"] = self.unlabeled_weight
            self._values.clear()
            self._tr_loss.zero_()  # the Trainer subtracts it from itself, which leaves NaN as NaN for ever
        if "train_loss" in logs:  # of the whole run, also where this is only the end of it
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def _read_values(self) -> dict[str, list[float]]:
        """Every recorded value, as its mean over the processes."""
        if not self._values:
            return {}
        flat = torch.cat([torch.stack(values).float() for values in self._values.values()])
        if self.args.world_size > 1:
            dist.all_reduce(flat)
            flat /= self.args.world_size
        steps = flat.split([len(values) for values in self._values.values()])
        return {name: values.tolist() for name, values in zip(self._values, steps, strict=True)}

    # ---- optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        # Accelerate (1.15) does not see a GradScaler skip a fused step; torch (2.15) has no fused SGD for
        # shards.
        sharded = args.distributed_state.distributed_type == DistributedType.FSDP
        fused = args.mixed_precision != "fp16" and not sharded
        if args.optim == "adam":
            betas = (args.adam_beta1, args.adam_beta2)
            kwargs = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
            return torch.optim.Adam, {**kwargs, "fused": fused}
        kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return kind, {**kwargs, "fused": fused} if kind in (torch.optim.SGD, torch.optim.AdamW) else kwargs

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """All but norm layers and biases; all for Adam, whose decay in this field is plain L2."""
        return [name for name, p in model.named_parameters() if p.ndim > 1 or self.args.optim == "adam"]

    def create_optimizer(self, model: Any = None) -> Any:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new:
            decayed = self.get_decay_parameter_names(self.loss)
            rate = self.args.learning_rate * self.loss.learning_rate_factor
            own = {name: p for name, p in self.loss.named_parameters() if p.requires_grad}
            for names, decay in (
                (own.keys() & decayed, self.args.weight_decay),
                (own.keys() - set(decayed), 0.0),
            ):
                if group := [p for name, p in own.items() if name in names]:
                    optimizer.add_param_group({"params": group, "weight_decay": decay, "lr": rate})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None and self.args.lr_cycle_steps:
            cycle = ramp_length(self.args.lr_cycle_steps, num_training_steps)
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: cosine_7_16(step, cycle))
            self._created_lr_scheduler = True
        return super().create_scheduler(num_training_steps, optimizer)

    # ---- the teacher: what is evaluated and saved

    @property
    def core_model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.teacher is None else self.teacher.applied(self.core_model)

    def keep_average(self) -> None:
        """The run is over: from now on the model is what was evaluated."""
        if self.teacher is not None:
            reshard(self.core_model)
            reshard(self.teacher.model)
            self.core_model.load_state_dict(self.teacher.model.state_dict())
            self.teacher = None

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        twin = self._twin_to_shard() if self.accelerator.is_fsdp2 else None
        with no_input_embeddings(self.core_model, twin):
            # The weights are loaded by now in every mode.
            prepared = super()._prepare_for_training(*args, **kwargs)
            if twin is not None:
                fsdp2_prepare_model(self.accelerator, twin)
        self._slots = gradient_slots([*self.core_model.parameters(), *self.loss.parameters()])
        self._values.clear()
        if self.args.world_size > 1:
            for tensor in self.loss.state_dict().values():  # DDP sees to the model only
                dist.broadcast(tensor, 0)
        self.teacher = Teacher(self.core_model, self.args.teacher_decay, twin)
        if self._resumed_average is not None:
            load_whole(self.teacher.model, self._resumed_average)
            self._resumed_average = None
        return prepared

    def _twin_to_shard(self) -> nn.Module:
        """A copy of the model from before FSDP2 shards it."""
        if isinstance(self.core_model, FSDPModule):
            raise ValueError(
                "FSDP2 has sharded this model already, so it has no copy to average in; build a new one."
            )
        self.core_model.to(memory_format=torch.contiguous_format)  # FSDP2 shards no other order
        return copy.deepcopy(self.core_model)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._averaged():
            output = super().evaluation_loop(*args, **kwargs)
        if (
            self.is_in_train
            and 0 < self.validation_rows == output.num_samples
            and output.predictions is not None
        ):
            self.loss.validated(torch.as_tensor(output.predictions, device=self.args.device))
        return output

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        return super().prediction_step(
            model, {**inputs, "pixel_values": self.views.plain(inputs["pixel_values"])}, *args, **kwargs
        )

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if reason := damage(best):
            raise ValueError(
                f"The best checkpoint {best} is damaged: {reason}. Choose the model of another one."
            )
        load_whole(self.core_model, self._averaged_weights(self.state.best_model_checkpoint))
        if (best / LOSS_STATE).is_file():
            self.loss.load_state_dict(load_file(best / LOSS_STATE))
        self.teacher = None

    @property
    def raw_weights_file(self) -> Path | None:
        """Of the best step, whose average is the model after the training."""
        best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
        file = Path(best) / RAW_WEIGHTS if best else None
        return file if file and file.is_file() else None

    @contextlib.contextmanager
    def raw_weights(self) -> Iterator[None]:
        """Inside, the model has the raw weights of the best step; behind it, their average again."""
        file = cast(Path, self.raw_weights_file)
        load_whole(self.core_model, self._averaged_weights(file.parent) | load_file(file))
        try:
            yield
        finally:
            self._load_best_model()

    # ---- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        folder = str(self.args.output_dir)
        with only_run(folder) if self.args.should_save else contextlib.nullcontext():
            if resume_from_checkpoint is True:
                resume_from_checkpoint = find_checkpoint(folder)
            if resume_from_checkpoint:
                self._changed_settings = self.check_checkpoint(str(resume_from_checkpoint))
            try:
                output = super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self.signals.restore()
            if self.signals.received:  # behind the last step: whoever is next shall know
                signal.raise_signal(self.signals.received)
            return output

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # Killed behind its last step; the Trainer would go on.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False
    ) -> dict[str, float]:
        # Eval_on_start: a resumed run did so when it started.
        if skip_scheduler and self.state.global_step > 0:
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        output = super()._finalize_training(*args, **kwargs)
        return output._replace(training_loss=output.metrics["train_loss"])

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let the Trainer write aside, and give the checkpoint its name when all processes have done their
        part.
        """
        checkpoint = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        with saving(checkpoint) as written:
            if self.args.should_save:
                shutil.rmtree(written.parent, ignore_errors=True)
                written.mkdir(parents=True)
            self.accelerator.wait_for_everyone()
            self._partial = written.parent
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._partial = None
            best = checkpoint.with_name(f"checkpoint-{self.state.best_global_step}")
            if best == checkpoint or best.is_dir():
                self.state.best_model_checkpoint = str(best)
            self._save_log_window(written)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.state.save_to_json(str(written / TRAINER_STATE_NAME))  # again, for the name of the best
                publish(written, checkpoint)
        if self.args.should_save:
            prune(checkpoint, self.args.save_total_limit, self.state.best_model_checkpoint)
        self.accelerator.wait_for_everyone()

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._partial is None else str(self._partial)

    def _save_log_window(self, folder: Path) -> None:
        state = {f"values/{name}": torch.stack(values) for name, values in self._values.items()}
        state["loss"] = self._tr_loss
        state["total_loss"] = torch.tensor(self._total_loss_scalar, dtype=torch.float64)
        state["last_logged"] = torch.tensor(self._globalstep_last_logged)
        state["bad_steps"] = torch.tensor(self.bad_steps)
        save_file(state, folder / LOG_WINDOW.format(self.args.process_index))

    def resume_log(self) -> None:
        """Go on with the values since the last log; the Trainer has just set its own to zero."""
        if (state := self._resumed_log) is not None:
            self._resumed_log = None
            for name, values in state.items():
                if name.startswith("values/"):
                    self._values[name.removeprefix("values/")] = list(values.to(self.args.device).unbind())
            self._tr_loss = state["loss"].to(self.args.device)
            self._total_loss_scalar = state["total_loss"].item()
            self._globalstep_last_logged = int(state["last_logged"])
            self.bad_steps = int(state["bad_steps"])

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        with self._averaged():  # on all processes: the Trainer gathers weights that are sharded
            if self.teacher is not None:
                self._raw_weights = whole_parameters(self.teacher.model)
            super().save_model(output_dir, _internal_call)
            self._raw_weights = {}

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        with self._averaged():
            if self.args.trainable == "lora":
                whole = state_dict or self.core_model.state_dict()
                state_dict = plain_state(self.core_model, whole)
                if self.is_in_train:
                    save_file(
                        {name: value.contiguous() for name, value in whole.items()}, folder / LORA_STATE
                    )
            super()._save(str(folder), state_dict)
            if self.is_in_train and self.teacher is not None:  # which holds the raw weights meanwhile
                raw = {name: p.contiguous() for name, p in self._raw_weights.items()}
                save_file(raw, folder / RAW_WEIGHTS, metadata={"format": "pt"})
                (folder / RUN).write_text(json.dumps(self._run(), indent=2))
        tells_foreign = type(self.loss).outlier_score is not SemiSupervisedLoss.outlier_score
        state = {name: value.contiguous() for name, value in self.loss.state_dict().items()}
        if state and (self.is_in_train or tells_foreign):
            save_file(state, folder / LOSS_STATE)
        # A pickle that nobody reads and that can hold a token.
        (folder / "training_args.bin").unlink(missing_ok=True)

    def _run(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued."""
        count = sum(p.numel() for p in self.core_model.parameters())
        return {
            "loss": type(self.loss).__name__,
            "labeled data": self.train_dataset.fingerprint,
            "unlabeled data": None if self.unlabeled is None else self.unlabeled.fingerprint,
            "classes": self.class_names,
            "model": f"{type(self.core_model).__name__.removeprefix('FSDP')} of {count} parameters",
            "optim": self.args.optim,
            "settings": {name: getattr(self.args, name) for name in SETTINGS},
        }

    def check_checkpoint(self, folder: str | Path) -> set[str]:
        """Refuse to continue a checkpoint of another run; return the changed settings that are to be ignored."""
        return check_run(folder, self._run(), self.args.ignore_changed_settings or [])

    def load_plain(self, folder: str | Path) -> None:
        """Take the weights of a saved model of the same kind."""
        state = type(self.core_model).from_pretrained(folder).state_dict()  # type: ignore[attr-defined]
        lora = self.args.trainable == "lora"
        load_whole(self.core_model, with_lora(self.core_model.state_dict(), state) if lora else state)

    def _averaged_weights(self, folder: str | Path | None) -> dict[str, Tensor]:
        if self.args.trainable == "lora":
            return load_file(Path(str(folder)) / LORA_STATE)
        # Not the Trainer's way (5.22): it loads model.safetensors without the renaming that save_pretrained
        # did, and leaves what it does not find, for a ViT all attention weights, as it was.
        return type(self.core_model).from_pretrained(folder).state_dict()  # type: ignore[attr-defined]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        self._resumed_average = self._averaged_weights(folder)
        load_whole(self.core_model, self._resumed_average | load_file(folder / RAW_WEIGHTS))
        if (folder / LOSS_STATE).is_file():
            self.loss.load_state_dict(load_file(folder / LOSS_STATE))
        if "world_size" not in self._changed_settings:
            self._resumed_log = load_file(folder / LOG_WINDOW.format(self.args.process_index))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        given = [
            {name: group[name] for name in group if name != "params"} for group in self.optimizer.param_groups
        ]
        super()._load_optimizer_and_scheduler(checkpoint)  # with the old learning rate, momentum and so on
        if checkpoint is not None and self._changed_settings & set(OPTIMIZER_SETTINGS):
            groups = self.optimizer.param_groups
            for group, new in zip(groups, given, strict=True):
                group |= new | {"lr": group["lr"] / group["initial_lr"] * new["initial_lr"]}
            self.lr_scheduler.base_lrs = [group["initial_lr"] for group in groups]
            self.lr_scheduler._last_lr = [group["lr"] for group in groups]

    # ---- the Hub

    def init_hf_repo(self, token: str | None = None) -> None:
        if self.is_world_process_zero():
            args = self.args
            args.check_push()
            where: dict[str, Any] = {"private": args.hub_private_repo, "token": token or args.hub_token}
            self.hub_model_id = create_repo(str(args.hub_model_id), **where)  # type: ignore[assignment]

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Describe the saved model for those who get it; evaluates it first."""
        results = {} if self.eval_dataset is None else self.evaluate(metric_key_prefix="validation")
        if self.is_world_process_zero():
            self.card.write(self.card.facts(results))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model, write its card, and push what `cards.ALLOWED` lists; returns when that is done."""
        self.args.check_push()
        self.save_model(_internal_call=True)
        self.create_model_card()
        if not self.is_world_process_zero():
            return None
        return self.card.push(commit_message or "End of training", token=token, revision=revision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Left to HubCardCallback: the stock way pushes a pickle of all settings, token included."""

    # ---- work of the stock Trainer that nobody here asks for, 2 ms a step

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        return None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm  # that of clipping, if there was any; the gate logs the norms of its two parts


def keep_freed_memory() -> None:
    """Let the C library keep large blocks that are freed: getting them again takes a tenth of a step on a
    CPU.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc
        trim_threshold, mmap_max = -1, -4
        mallopt(trim_threshold, -1)
        mallopt(mmap_max, 0)


def class_names(labeled: Images) -> list[str]:
    if labeled.labels is None or len(labeled) == 0:
        raise ValueError(
            "The labeled set is empty or has no label column; it needs at least one labeled image."
        )
    if labeled.class_names is not None:
        return labeled.class_names
    if labeled.labels.min() < 0:
        raise ValueError(f"A label is {int(labeled.labels.min())}, but labels count from 0.")
    return [str(number) for number in range(int(labeled.labels.max()) + 1)]


@contextlib.contextmanager
def no_input_embeddings(*models: Any) -> Iterator[None]:
    """Accelerate (1.15) shards input embeddings apart; image models have none, or in a block sharded as a
    whole.
    """
    for model in filter(None, models):
        model.get_input_embeddings = lambda: None
    try:
        yield
    finally:
        for model in filter(None, models):
            del model.get_input_embeddings


def average_buffers(buffers: Iterable[Tensor]) -> None:
    """Make running statistics equal on all processes; DDP does not while its own synchronization is off."""
    if buffers := [buffer for buffer in buffers if buffer.is_floating_point()]:
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        dist.all_reduce(flat)
        averages = (flat / dist.get_world_size()).split([buffer.numel() for buffer in buffers])
        torch._foreach_copy_(
            buffers, [average.view_as(b) for average, b in zip(averages, buffers, strict=True)]
        )


def restore_buffers(model: nn.Module, last: nn.Module) -> None:
    """Put back running statistics that are not finite, for they would stay so, to what `last` has."""
    new, old = ([buffer for buffer in m.buffers() if buffer.is_floating_point()] for m in (model, last))
    if new:
        flat, spare = (torch.cat([buffer.flatten() for buffer in buffers]) for buffers in (new, old))
        kept = torch.where(flat.isfinite(), flat, spare).split([buffer.numel() for buffer in new])
        torch._foreach_copy_(new, [values.view_as(b) for values, b in zip(kept, new, strict=True)])
