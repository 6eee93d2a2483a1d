"""The Trainer that takes Fix-A-Step steps."""

from __future__ import annotations

import os
from typing import Any, cast

import datasets
import torch
import torch.distributed as dist
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import ProgressCallback, set_seed

from hf_fixastep import callbacks as own
from hf_fixastep._compat.distributed import check_launch
from hf_fixastep._compat.optimizing import remember_lomo
from hf_fixastep._compat.patches import allow_second_backward, tune_cpu
from hf_fixastep.config import FixAStepConfig
from hf_fixastep.data.features import CachedViews, Examples, Features
from hf_fixastep.data.images import Images
from hf_fixastep.data.loader import PairedLoader, as_is, outlive_signal
from hf_fixastep.data.processing import check_classes, check_views, class_names, views_of
from hf_fixastep.evaluation.metrics import classification_metrics
from hf_fixastep.hub.pushing import PushingTrainer
from hf_fixastep.losses import get_loss
from hf_fixastep.losses.base import SemiSupervisedLoss
from hf_fixastep.losses.functional import class_weights
from hf_fixastep.models.head import FeatureHead
from hf_fixastep.models.trainable import limit_training, name_classes
from hf_fixastep.step.examples import ExampleGate, check_examples
from hf_fixastep.step.forwards import batchnorm_layers
from hf_fixastep.step.gate import gradient_slots
from hf_fixastep.step.schedules import fitted_decay
from hf_fixastep.step.teacher import Teacher
from hf_fixastep.step.values import Values
from hf_fixastep.stepping import SteppingTrainer


class FixAStepTrainer(SteppingTrainer, PushingTrainer):
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
        if args.torch_compile and not self.loss.in_parts:
            allow_second_backward()
        if self.pop_callback(ProgressCallback):
            self.add_callback(own.ProgressBarCallback())
        if args.push_to_hub:
            self.add_callback(self.card)
        # Behind all others: it ends the process when they have done their part.
        self.signals = own.SignalCallback(self)
        self.add_callback(self.signals)
        self.add_callback(own.NonFiniteCallback(self))  # whoever asks for a save, this one may refuse it
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
        loader = super().get_eval_dataloader(eval_dataset if named else self.images(eval_dataset))
        getattr(loader, "base_dataloader", loader).worker_init_fn = outlive_signal  # inside Accelerate's
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        return super().get_test_dataloader(self.images(test_dataset))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list, None]:
        """The next batches; their items need no counting, for our losses are means."""
        return [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)], None

    # ---- model and loss

    def _fit(self, model: Any, args: FixAStepConfig) -> None:
        if isinstance(model, (nn.DataParallel, DistributedDataParallel)):
            raise ValueError(
                f"The model is wrapped in {type(model).__name__}; give its .module, which the trainer wraps "
                "itself when it is launched on several processes."
            )
        if args.gradient_checkpointing and not getattr(model, "supports_gradient_checkpointing", False):
            raise ValueError(
                f"gradient_checkpointing is on, but {type(model).__name__} does not support it; switch it "
                "off."
            )
        name_classes(model, self.class_names)
        # In float32, torch's default, as autocast and the optimizer expect, whatever it is stored in.
        model.to(dtype=torch.get_default_dtype(), memory_format=torch.channels_last)
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
    def saved_network(self) -> nn.Module:
        """What `save_model` writes at the end."""
        return self.core_model

    @property
    def teacher_decay(self) -> float | None:
        """As given, or fitted to the run once its length is known."""
        steps = self.state.max_steps
        if self.args.teacher_decay is None and steps:
            return fitted_decay(steps)
        return self.args.teacher_decay

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
