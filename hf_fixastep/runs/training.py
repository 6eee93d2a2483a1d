"""Train a classifier from a few labels and a pile of unlabeled images.

accelerate launch recipes/train.py --config recipes/digits/quickstart.yaml [--key value ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.table import Table
from sklearn.metrics import confusion_matrix
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTImageProcessor,
    set_seed,
)
from transformers.utils import logging

from hf_fixastep.checkpoints import checkpoints, find_checkpoint
from hf_fixastep.checks import check_choice
from hf_fixastep.config import FixAStepConfig
from hf_fixastep.data.images import Images
from hf_fixastep.data.registry import is_medical, load_dataset
from hf_fixastep.echo.files import is_phantom
from hf_fixastep.hub.checks import check_intended_use
from hf_fixastep.hub.client import pull
from hf_fixastep.plots import save_figures
from hf_fixastep.procedures import get_procedure
from hf_fixastep.procedures.rounds import PROCEDURE, run_procedure
from hf_fixastep.runs.arguments import DataArguments, ModelArguments, parse
from hf_fixastep.runs.folder import LOG, PREDICTIONS
from hf_fixastep.trainer import FixAStepTrainer


def load_data(args: DataArguments) -> Any:
    return load_dataset(args.dataset, args.config, **args.settings)


def load_model(args: ModelArguments, num_labels: int, preset: str) -> tuple[Any, Any]:
    """Model and image processor: from scratch if `model` is a model type, otherwise pretrained."""
    if args.model in CONFIG_MAPPING:
        processor = build_processor(args)
        return AutoModelForImageClassification.from_config(build_config(args, num_labels, preset)), processor
    try:
        folder = args.model if Path(args.model).is_dir() else pull(args.model)
        processor = AutoImageProcessor.from_pretrained(folder)
        model = AutoModelForImageClassification.from_pretrained(
            folder, num_labels=num_labels, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{args.model} is no model type, and no model could be loaded from it: {reason}"
        ) from error
    model.config.name_or_path = args.model
    return model, processor


def build_config(args: ModelArguments, num_labels: int, preset: str) -> Any:
    """The network's config from `model_kwargs`, with what the data and the preset say."""
    known, given = CONFIG_MAPPING[args.model].__annotations__, args.model_kwargs
    for key in given:  # a config would take any
        check_choice(f"key of {args.model} in model_kwargs:", key, known)
    defaults = {"image_size": args.image_size, "upstream_block": preset == "upstream"}
    settings = {key: value for key, value in defaults.items() if key in known} | given
    try:
        return AutoConfig.for_model(args.model, num_labels=num_labels, **settings)
    except StrictDataclassError as error:
        raise ValueError(f"{args.model}: {error.__cause__ or error}") from error


def build_processor(args: ModelArguments) -> ViTImageProcessor:
    if args.image_size is None:
        raise ValueError(f"Building {args.model} from scratch needs image_size, for example image_size: 32.")
    return ViTImageProcessor(
        size={"height": args.image_size, "width": args.image_size},
        do_convert_rgb=True,
        do_normalize=args.image_mean is not None,
        image_mean=args.image_mean,
        image_std=args.image_std,
    )


def checkpoint_to_resume(args: FixAStepConfig) -> str | None:
    """The checkpoint that `resume_from_checkpoint` means; nothing is written over without it."""
    wanted = args.resume_from_checkpoint
    if wanted and wanted.lower() not in ("true", "false"):
        return wanted
    if wanted and wanted.lower() == "true":
        return args.output_dir if args.procedure else find_checkpoint(args.output_dir)
    marks = [Path(args.output_dir) / name for name in ("metrics.json", PROCEDURE)]
    if checkpoints(args.output_dir) or any(mark.exists() for mark in marks):
        raise ValueError(
            f"{args.output_dir} holds a run already; choose another --output_dir, continue it with "
            "--resume_from_checkpoint true, or delete it."
        )
    return None


def prepare(argv: list[str]) -> tuple[FixAStepTrainer, Any, Callable[[], object]]:
    """Everything that can be wrong with what the user gave is found in here; the last answer starts the training."""
    data_args, model_args, args, given = parse((DataArguments, ModelArguments, FixAStepConfig), argv)
    checkpoint = checkpoint_to_resume(args)
    medical = is_medical(data_args.dataset)
    if args.push_to_hub:
        check_intended_use(medical, args.hub_intended_use)
    procedure = get_procedure(args.procedure, **args.procedure_kwargs) if args.procedure else None
    set_seed(args.seed)
    data = load_data(data_args)
    network = model_args, data["labeled"].features["label"].num_classes, args.preset
    model, processor = load_model(*network)
    trainer = FixAStepTrainer(
        model,
        args,
        train_dataset=data["labeled"],
        unlabeled_dataset=data["unlabeled"],
        eval_dataset=data["validation"],
        processing_class=processor,
    )
    trainer.card.dataset = {
        "name": data_args.dataset,
        "config": data["test"].info.config_name,
        "medical": medical,
    }
    trainer.card.dataset["phantom"] = is_phantom(data_args.data_dir)
    trainer.card.recipe = given
    if procedure is not None:
        run = partial(run_procedure, procedure, trainer, data["unlabeled"], lambda: load_model(*network)[0])
        return trainer, data, partial(run, resume=checkpoint is not None)
    if checkpoint is not None:
        trainer.check_checkpoint(checkpoint)
    return trainer, data, partial(trainer.train, resume_from_checkpoint=checkpoint)


def finish(trainer: FixAStepTrainer, data: Any) -> None:
    """Test the model and leave it with its numbers, figures and card in the output folder."""
    folder = Path(trainer.args.output_dir)
    validation = trainer.evaluate(metric_key_prefix="validation")
    images = Images.from_dataset(data["test"], trainer.image_size)
    test = trainer.predict(images, metric_key_prefix="test")
    trainer.save_model(
        _internal_call=True
    )  # on all processes, which may each hold a shard; the push comes last
    raw = raw_metrics(trainer, images)
    if not trainer.is_world_process_zero():
        return
    metrics = trainer.card.facts({**validation, **test.metrics, **raw}, {"test": images})
    answers = pd.DataFrame({"label": test.label_ids, "prediction": test.predictions.argmax(-1)})
    answers.to_csv(folder / PREDICTIONS, index=False)
    # All classes, also those that test images of one's own may lack.
    confusion = confusion_matrix(
        answers["label"], answers["prediction"], labels=range(len(trainer.class_names))
    )
    figures = save_figures(pd.read_csv(folder / LOG), confusion, trainer.class_names, folder)
    trainer.card.write(metrics)
    print_table(metrics, folder, figures)
    if trainer.args.push_to_hub:
        print(f"Pushed: {trainer.card.push().commit_url}")


def raw_metrics(trainer: FixAStepTrainer, images: Images) -> dict[str, float]:
    """The same of the raw weights of the best step, where its checkpoint is still there."""
    if trainer.raw_weights_file is None:
        return {}
    with trainer.raw_weights():
        results = trainer.evaluate(metric_key_prefix="validation")
        results |= trainer.predict(images, metric_key_prefix="test").metrics
    names = ("validation_accuracy", "validation_balanced_accuracy", "test_accuracy", "test_balanced_accuracy")
    return {f"raw_{name}": results[name] for name in names}


def print_table(metrics: dict[str, Any], folder: Path, figures: list[Path]) -> None:
    name = metrics["procedure"] or metrics["loss"]
    title = f"{name}, gate {metrics['gate']}, mix_labeled {metrics['mix_labeled']}"
    table = Table("", "value", title="PHANTOM DATA, " * metrics["dataset"]["phantom"] + title)
    images = metrics["images"]
    table.add_row("images", ", ".join(f"{count} {name}" for name, count in images.items()))
    for name in ("validation_accuracy", "test_accuracy", "test_balanced_accuracy", "gate_open_rate"):
        if metrics.get(name) is not None:
            table.add_row(name.replace("_", " "), f"{100 * metrics[name]:.1f} %")
    table.add_row("model", str(folder))
    table.add_row("figures", ", ".join(figure.name for figure in figures))
    Console().print(table)


def main(argv: list[str]) -> None:
    logging.disable_progress_bar()  # of files; the bar of the training stays
    try:
        trainer, data, start = prepare(argv)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    try:
        start()
        finish(trainer, data)
    except OSError as error:  # a full disk, another run in the same folder, or a push that failed
        sys.exit(f"error: {error}")
