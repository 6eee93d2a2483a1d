"""Runs on a pretrained network that stays as it is: its features are cached, and heads learn from them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, cast

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from transformers import PrinterCallback

from hf_fixastep.config import FixAStepConfig
from hf_fixastep.data.features import Features
from hf_fixastep.evaluation.metrics import accuracy, balanced_accuracy
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.features.embed import embed
from hf_fixastep.features.probe import Probe, fit_neighbours, fit_probe, standardisation
from hf_fixastep.features.shape import IMAGES, Shape, fit_shape, fit_shaped_probe
from hf_fixastep.losses.supervised import Supervised
from hf_fixastep.methods import BASELINES, FITTED
from hf_fixastep.models.head import FeatureHead, FeatureHeadConfig
from hf_fixastep.runs.arguments import DataArguments, ModelArguments
from hf_fixastep.trainer import FixAStepTrainer


PROBE, NEIGHBOURS, _ = FITTED  # as `loss`: no training


class HeadTrainer(FixAStepTrainer):
    """Trains a head on cached features; it saves the whole network with that head.

    Args:
        features: of the splits labeled, unlabeled and validation.
    """

    def __init__(
        self, backbone: Backbone, args: FixAStepConfig, features: Mapping[str, Features], **kwargs: Any
    ) -> None:
        self.backbone = backbone
        head = new_head(features, with_pile=args.loss not in ("supervised", *BASELINES))
        head.config.name_or_path = backbone.model.config.name_or_path
        if args.loss in FITTED:  # no training, but all that comes after one
            kwargs["loss"] = Supervised()
        super().__init__(
            head,
            args,
            train_dataset=features["labeled"],
            unlabeled_dataset=features.get("unlabeled"),
            eval_dataset=features.get("validation"),
            processing_class=backbone.processor,
            **kwargs,
        )
        self.answer: Callable[[NDArray], NDArray] | None = None  # where the head does not answer
        if args.loss in FITTED:
            self.card.loss = args.loss

    @property
    def saved_network(self) -> nn.Module:
        return self.backbone.model

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.answer is None:
            return super().prediction_step(model, inputs, *args, **kwargs)
        logits = torch.from_numpy(self.answer(self.views.plain(inputs["pixel_values"]).numpy()))
        return F.cross_entropy(logits, inputs["labels"]), logits, inputs["labels"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.is_in_train:  # a checkpoint: the head alone
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            weight, bias = self.core_model.linear()  # type: ignore[operator]
            folder = output_dir or str(self.args.output_dir)
            self.backbone.save(weight, bias, self.class_names, folder)


def new_head(features: Mapping[str, Features], with_pile: bool) -> FeatureHead:
    """A head that answers as the probe does, or as the shaped probe if it may look at the pile.

    It standardises by the images that it may look at.
    """
    seen = [features["labeled"]]
    if with_pile and "unlabeled" in features:
        seen.append(features["unlabeled"])
    probe = probe_of(*seen)
    classes, size = probe.weight.shape
    head = FeatureHead(FeatureHeadConfig(size=size, num_labels=classes))  # type: ignore[call-arg]
    head.standardise(*spread_of(seen))
    head.start_from(probe.weight, probe.bias)
    return head


# The last ones made: runs of a sweep in one process share them.
PROBES: dict[tuple[str, ...], Probe] = {}  # by the fingerprints of their images
SHAPES: dict[str, Shape] = {}
SPREADS: dict[tuple[str, ...], tuple[NDArray, NDArray]] = {}
LAST: dict[str, tuple[Backbone, dict[str, Features], datasets.Dataset]] = {}


def frozen_data(
    make: Callable[[], tuple], data_args: DataArguments, model_args: ModelArguments, args: FixAStepConfig
) -> tuple[Backbone, dict[str, Features], datasets.Dataset]:
    """The frozen network, the features of all splits of the data, and the test images.

    Args:
        make: loads model, image processor and data.
    """
    what = [asdict(data_args), asdict(model_args), args.flip, args.cutout]
    key = json.dumps(what, sort_keys=True, default=str)
    if key not in LAST:
        model, processor, data = make()
        backbone = Backbone(model, processor)
        LAST.clear()
        LAST[key] = backbone, embed_splits(data, backbone, model_args, args), data["test"]
    return LAST[key]


def embed_splits(
    data: Mapping[str, Any], backbone: Backbone, model_args: ModelArguments, args: FixAStepConfig
) -> dict[str, Features]:
    """Features of all splits: with views where they are trained on, of the plain images alone elsewhere."""
    settings: dict[str, Any] = {
        "flip": args.flip,
        "cutout": args.cutout,
        "cache_dir": model_args.cache_dir,
    }
    found = {}
    for name, split in data.items():
        views: dict[str, Any] = {} if name in ("labeled", "unlabeled") else {"weak": 0, "strong": 0}
        found[name] = embed(split, backbone, skip_unreadable=name == "unlabeled", **views, **settings)
    return found


def probe_of(labeled: Features, pile: Features | None = None) -> Probe:
    """The probe, which is of the labeled images alone; with a pile the shaped probe."""
    key = (labeled.fingerprint, pile.fingerprint if pile else "")
    if key not in PROBES:
        labels = np.asarray(labeled.labels)
        classes = len(labeled.class_names or ()) or int(labels.max()) + 1
        if len(PROBES) > 1:  # the probe and the shaped probe of the same labels
            PROBES.clear()
        if pile is None:
            PROBES[key] = fit_probe(labeled.plain(), labels, classes)
        else:
            PROBES[key] = fit_shaped_probe(labeled.weak_versions(), labels, classes, shape_of(pile))
    return PROBES[key]


def shape_of(pile: Features) -> Shape:
    if pile.fingerprint not in SHAPES:
        SHAPES.clear()
        SHAPES[pile.fingerprint] = fit_shape(pile.spaced(IMAGES).plain())
    return SHAPES[pile.fingerprint]


def spread_of(sets: list[Features]) -> tuple[NDArray, NDArray]:
    """Mean and deviation of each number over all images of some sets."""
    key = tuple(each.fingerprint for each in sets)
    if key not in SPREADS:
        SPREADS.clear()
        rows = np.concatenate([each.plain() for each in sets])
        SPREADS[key] = standardisation(rows)
    return SPREADS[key]


def take_baseline(trainer: HeadTrainer) -> None:
    """In place of a training."""
    labeled = cast(Features, trainer.train_dataset)
    if trainer.args.loss != NEIGHBOURS:
        return  # the head starts from it
    fitted = fit_neighbours(labeled.plain(), np.asarray(labeled.labels), len(trainer.class_names))
    trainer.answer = lambda features: np.log(fitted.probabilities(features) + 1e-6)


def baselines(
    backbone: Backbone, features: Mapping[str, Features], args: FixAStepConfig
) -> dict[str, dict[str, float]]:
    """What the same labels give without a pile: the probe, and a head trained on views of the images."""
    own = FixAStepConfig(
        output_dir=tempfile.mkdtemp(),
        preset="pretrained",
        head_rate_factor=1.0,  # it starts from the probe
        loss="supervised",
        max_steps=300,
        per_device_train_batch_size=32,
        seed=args.seed,
        use_cpu=args.use_cpu,
        cpu_threads=args.cpu_threads,
        save_strategy="no",
        logging_steps=300,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = HeadTrainer(backbone, own, features)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    shutil.rmtree(str(own.output_dir))
    answers = {PROBE: probe_of(features["labeled"]).logits, "labeled-only": partial(answers_of, trainer)}
    return {name: measure(answer, features) for name, answer in answers.items()}


def answers_of(trainer: HeadTrainer, features: NDArray) -> NDArray:
    with torch.no_grad():
        return trainer.core_model(pixel_values=torch.from_numpy(features)).logits.numpy()


def measure(answer: Any, features: Mapping[str, Features]) -> dict[str, float]:
    """Accuracies on the splits to test on."""
    found = {}
    for name in ("validation", "test"):
        if name in features:
            predictions, labels = answer(features[name].plain()).argmax(-1), np.asarray(features[name].labels)
            found[f"{name}_accuracy"] = accuracy(predictions, labels)
            found[f"{name}_balanced_accuracy"] = balanced_accuracy(predictions, labels)
    return found
