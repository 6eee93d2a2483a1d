"""The Trainer that takes Fix-A-Step steps."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import ProgressCallback, Trainer

from hf_fixastep.callbacks import (
    GateMonitorCallback,
    NonFiniteCallback,
    ProgressBarCallback,
    TeacherCallback,
    UnlabeledWeightCallback,
)
from hf_fixastep.config import FixAStepConfig
from hf_fixastep.data.streams import Images, PairedLoader, as_is, generator_for
from hf_fixastep.data.views import VIEWS, Views
from hf_fixastep.functional import SemiBatch, batchnorm_layers
from hf_fixastep.gate import LABELED, UNLABELED, GradientSlots
from hf_fixastep.losses import get_loss
from hf_fixastep.losses.base import Losses, SemiSupervisedLoss
from hf_fixastep.metrics import classification_metrics
from hf_fixastep.mixing import mix_labeled
from hf_fixastep.schedules import cosine_7_16, ramp_length
from hf_fixastep.teacher import Teacher


RAW_WEIGHTS = "training_weights.safetensors"  # what the optimizer updates; model.safetensors holds the average
LOSS_STATE = "loss.safetensors"  # parameters and buffers of a loss that has any
RUN = "fixastep.json"  # what a checkpoint may be resumed with


class FixAStepTrainer(Trainer):
    """Train an image classifier on a few labeled and many unlabeled images.

    Args:
        train_dataset: labeled images, a `datasets.Dataset` with columns image and label, or `Images`.
        unlabeled_dataset: unlabeled images of the same kinds; a label column is ignored.
        eval_dataset: like train_dataset, or several of them by name.
        processing_class: the image processor; it says size, mean and standard deviation, and is saved with the model.
        loss: the base loss; by default the one that `args.loss` names.
    """

    loss_is_scaled_for_ga = False  # our losses are means over one batch
    args: FixAStepConfig
    model: Any
    optimizer: Any
    train_dataset: Images
    _slots: GradientSlots

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
        if model is not None:
            self._fit_classes(model)
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
        if self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            raise ValueError(
                f"The launch uses {self.accelerator.distributed_type.value}, but the gate needs whole gradients "
                "before the optimizer runs. Launch on one process or with DDP."
            )
        if args.cpu_threads is not None:
            torch.set_num_threads(args.cpu_threads)
        self.loss.to(self.args.device)
        # Without batch norm joint and separate give the same numbers, and separate is cheaper.
        self.loss.batchnorm = args.batchnorm if batchnorm_layers(self.model) else "separate"
        self.teacher: Teacher | None = None
        self.unlabeled_weight = 0.0
        self.window: dict[str, list[float]] = {}  # values of every step between the last two logs
        self._values: dict[str, list[Tensor]] = defaultdict(list)  # of every step since the last log, on the device
        self._resumed_average: dict[str, Tensor] | None = None
        for callback in (UnlabeledWeightCallback, TeacherCallback, GateMonitorCallback, NonFiniteCallback):
            self.add_callback(callback(self))
        if self.pop_callback(ProgressCallback):
            self.add_callback(ProgressBarCallback())
        self.get_train_dataloader()  # finds empty sets and sizes that do not fit now, not at train()

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
        return model

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
            batch_sizes=(args.train_batch_size, args.unlabeled_batch_size if self.unlabeled is not None else 0),
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

        y = F.one_hot(inputs["labels"], self.model.config.num_labels).float()
        batch = SemiBatch(self.views.weak(inputs["pixel_values"], generator("labeled")), y, {})
        if self.unlabeled is not None:
            batch.index, batch.generator = inputs["unlabeled_index"], generator("loss", args.device)
            batch.views = self.views(self.loss.views, inputs["unlabeled"], generator("unlabeled"))
        if self.mix_labeled:
            pool = inputs["unlabeled"][: None if args.mix_pool == "all" else len(y)]
            missing = [name for name in self.views_needed if name not in batch.views]
            batch.views |= self.views(missing, pool, generator("pool"))
        return batch

    def compute_losses(self, model: nn.Module, inputs: dict[str, Any]) -> Losses:
        """The method: views, phase 1, the two losses."""
        args, batch = self.args, self.make_batch(inputs)
        if self.mix_labeled:
            batch = mix_labeled(
                model,
                batch,
                generator_for(args.seed, args.process_index, inputs["step"], "mix"),
                alpha=args.mix_alpha,
                temperature=args.mix_temperature,
                per_batch=args.mix_per_batch,
                pool_rows=None if args.mix_pool == "all" else len(batch.y),
                guess_all=self.loss.batchnorm == "joint",
            )
        losses = self.loss(model, batch, teacher=self.teacher.model)  # type: ignore[union-attr]
        if args.divide_by_all_rows and not self.mix_labeled and losses.unlabeled is not None:
            self._divide_by_all_rows(losses, len(batch.y), len(inputs["unlabeled"]))
        return losses

    def _divide_by_all_rows(self, losses: Losses, labeled: int, unlabeled: int) -> None:
        """As the official base methods do, where a loss of -1 labels is averaged over the whole batch."""
        for name, rows in (("labeled", labeled), ("unlabeled", unlabeled)):
            if name in self.loss.upstream_divides_by_all:
                setattr(losses, name, getattr(losses, name) * rows / (labeled + unlabeled))

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        if not model.training:
            model.train()
            if callable(getattr(self.optimizer, "train", None)):  # schedule-free optimizers
                self.optimizer.train()
        parts = self.current_gradient_accumulation_steps
        # DDP decides in the forward whether to reduce, and broadcasts buffers there. Everything stays local instead:
        # the gate reduces both gradients once, at the end of the window.
        with self.accelerator.no_sync(model):
            with self.compute_loss_context_manager():
                losses = self.compute_losses(model, self._prepare_inputs(inputs))
            with self._slots.fill(LABELED):
                shared_graph = self.loss.batchnorm == "joint" and losses.unlabeled is not None
                self.accelerator.backward(losses.labeled / parts, retain_graph=shared_graph)
            if losses.unlabeled is not None:
                with self._slots.fill(UNLABELED):
                    self.accelerator.backward(losses.unlabeled / parts)
        self._record({"loss/labeled": losses.labeled, "loss/unlabeled": losses.unlabeled, **losses.stats})
        if self.accelerator.sync_gradients:
            self._gate()
        unlabeled = 0.0 if losses.unlabeled is None else self.unlabeled_weight * losses.unlabeled.detach()
        return (losses.labeled.detach() + unlabeled) / parts

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
            average_buffers(self.core_model)

    # ---- logs

    def _record(self, values: dict[str, Tensor | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._values[name].append(value.detach())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # a training log, not an evaluation
            self.window = {name: torch.stack(values).float().tolist() for name, values in self._values.items()}
            for name, values in self.window.items():
                logs[name] = sum(values) if name.startswith("nonfinite/") else sum(values) / len(values)
            if self.unlabeled is not None:
                logs["unlabeled_weight"] = self.unlabeled_weight
            self._values.clear()
            self._tr_loss.zero_()  # the Trainer subtracts it from itself, which leaves NaN as NaN for ever
        super().log(logs, start_time)

    # ---- optimizer

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        if args.optim == "adam":
            betas = (args.adam_beta1, args.adam_beta2)
            return torch.optim.Adam, {
                "lr": args.learning_rate,
                "betas": betas,
                "eps": args.adam_epsilon,
                "fused": True,
            }
        kind, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
        return kind, {**kwargs, "fused": True} if kind is torch.optim.SGD else kwargs

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """All but norm layers and biases; all for Adam, whose decay in this field is plain L2."""
        return [name for name, p in model.named_parameters() if p.ndim > 1 or self.args.optim == "adam"]

    def create_optimizer(self, model: Any = None) -> Any:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if is_new and (parameters := [p for p in self.loss.parameters() if p.requires_grad]):
            optimizer.add_param_group({"params": parameters, "weight_decay": 0.0})
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
            self.core_model.load_state_dict(self.teacher.model.state_dict())
            self.teacher = None

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)  # the weights are loaded by now in every mode
        self._slots = GradientSlots([*self.core_model.parameters(), *self.loss.parameters()])
        self._values.clear()
        self.teacher = Teacher(self.core_model, self.args.teacher_decay)
        if self._resumed_average is not None:
            self.teacher.model.load_state_dict(self._resumed_average)
            self._resumed_average = None
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._averaged():
            return super().evaluation_loop(*args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        return super().prediction_step(
            model, {**inputs, "pixel_values": self.views.plain(inputs["pixel_values"])}, *args, **kwargs
        )

    def _load_best_model(self) -> None:
        self.core_model.load_state_dict(self._averaged_weights(self.state.best_model_checkpoint))
        self.teacher = None

    # ---- checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        with self._averaged():
            super()._save(str(folder), state_dict)
            if self.is_in_train and self.teacher is not None:  # which holds the raw weights meanwhile
                raw = {name: p.contiguous() for name, p in self.teacher.model.named_parameters()}
                save_file(raw, folder / RAW_WEIGHTS, metadata={"format": "pt"})
                if state := {name: value.contiguous() for name, value in self.loss.state_dict().items()}:
                    save_file(state, folder / LOSS_STATE)
                (folder / RUN).write_text(json.dumps(self._run(), indent=2))
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle that nobody reads and that can hold a token

    def _run(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be continued."""
        return {
            "loss": type(self.loss).__name__,
            "labeled data": self.train_dataset.fingerprint,
            "unlabeled data": None if self.unlabeled is None else self.unlabeled.fingerprint,
        }

    def check_checkpoint(self, folder: str | Path) -> None:
        """Refuse to continue a checkpoint of another loss or of other data."""
        if not (Path(folder) / RUN).is_file():
            raise ValueError(
                f"{folder} holds no {RUN}, so it is not a checkpoint to resume; choose a checkpoint-N folder."
            )
        saved = json.loads((Path(folder) / RUN).read_text())
        for name, value in self._run().items():
            if saved.get(name) != value:
                raise ValueError(
                    f"{folder} was trained with {name} {saved.get(name)}, but this run has {value}. Resume it with "
                    "the same, or start a new run in another output_dir."
                )

    def _averaged_weights(self, folder: str | Path | None) -> dict[str, Tensor]:
        # Not the Trainer's way (5.22): it loads model.safetensors without the renaming that save_pretrained did, and
        # leaves what it does not find, for a ViT all attention weights, as it was.
        return type(self.core_model).from_pretrained(folder).state_dict()  # type: ignore[attr-defined]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        self.check_checkpoint(folder)
        self._resumed_average = self._averaged_weights(folder)
        self.core_model.load_state_dict(self._resumed_average | load_file(folder / RAW_WEIGHTS))
        if (folder / LOSS_STATE).is_file():
            self.loss.load_state_dict(load_file(folder / LOSS_STATE))

    # ---- work of the stock Trainer that nobody here asks for, 2 ms a step

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        return None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm  # that of clipping, if there was any; the gate logs the norms of its two parts


def views_of(processor: Any, **settings: Any) -> tuple[tuple[int, int], Views]:
    """Image size and views as an image processor describes them; `settings` are further ones of the views."""
    size = processor.crop_size if getattr(processor, "do_center_crop", None) else processor.size
    height = size.get("height") or size.get("shortest_edge")
    width = size.get("width") or size.get("shortest_edge")
    if not height or not width:
        raise ValueError(f"The image processor's size is {dict(size)}, but it should give height and width.")
    mean, std = ((0.0,) * 3, (1.0,) * 3)
    if processor.do_normalize:
        mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    return (height, width), Views(mean=mean, std=std, **settings)


def class_names(labeled: Images) -> list[str]:
    if labeled.labels is None or len(labeled) == 0:
        raise ValueError("The labeled set is empty or has no label column; it needs at least one labeled image.")
    if labeled.class_names is not None:
        return labeled.class_names
    if labeled.labels.min() < 0:
        raise ValueError(f"A label is {int(labeled.labels.min())}, but labels count from 0.")
    return [str(number) for number in range(int(labeled.labels.max()) + 1)]


def average_buffers(model: nn.Module) -> None:
    """Make running statistics equal on all processes; DDP does not while its own synchronization is off."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if buffers:
        flat = torch.cat([buffer.flatten() for buffer in buffers])
        dist.all_reduce(flat)
        averages = (flat / dist.get_world_size()).split([buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [average.view_as(b) for average, b in zip(averages, buffers, strict=True)])
