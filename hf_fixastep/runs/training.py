"""One training: parse, data, model, trainer, train, evaluate, write."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from sklearn.metrics import confusion_matrix
from transformers import set_seed
from transformers.utils import logging

from hf_fixastep.checkpoints import checkpoints, find_checkpoint, only_run
from hf_fixastep.config import FixAStepConfig
from hf_fixastep.data.features import Examples
from hf_fixastep.data.registry import is_medical, load_dataset
from hf_fixastep.echo.files import is_phantom
from hf_fixastep.evaluation.metrics import evaluate_classifier
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.hub.checks import check_intended_use
from hf_fixastep.methods import FITTED
from hf_fixastep.plots import save_figures
from hf_fixastep.procedures import get_procedure
from hf_fixastep.procedures.rounds import PROCEDURE, run_procedure
from hf_fixastep.runs.arguments import DataArguments, ModelArguments, parse
from hf_fixastep.runs.folder import LOG, METRICS, PREDICTIONS
from hf_fixastep.runs.heads import (
    NEIGHBOURS,
    HeadTrainer,
    baselines,
    embed_splits,
    frozen_data,
    take_baseline,
)
from hf_fixastep.runs.network import is_pretrained, load_model
from hf_fixastep.trainer import FixAStepTrainer


TYPES = (DataArguments, ModelArguments, FixAStepConfig)  # the options of a training


def main(argv: list[str]) -> None:
    logging.disable_progress_bar()  # of files; the bar of the training stays
    try:
        trainer, data, start = prepare(argv)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    try:
        start()
        finish(trainer, data)
    except (OSError, FloatingPointError) as error:  # a full disk, a busy folder, a failed push; divergence
        sys.exit(f"error: {error}")


def prepare(argv: list[str]) -> tuple[FixAStepTrainer, Any, Callable[[], object]]:
    """Find all that can be wrong with what the user gave; the last answer starts the training."""
    data_args, model_args, args, given = parse(TYPES, argv)
    checkpoint = checkpoint_to_resume(args)
    medical = is_medical(data_args.dataset)
    if args.push_to_hub:
        check_intended_use(medical, args.hub_intended_use)
    procedure = get_procedure(args.procedure, **args.procedure_kwargs) if args.procedure else None
    set_seed(args.seed)
    make = partial(load_network_and_data, data_args, model_args, args.preset)
    trainer: FixAStepTrainer
    if args.loss == NEIGHBOURS and args.keep == "model":
        raise ValueError("Nearest neighbours leave no model; give --keep numbers, or --loss probe.")
    if args.trainable == "head" or args.loss in FITTED:
        backbone, data, test = frozen_data(make, data_args, model_args, args)
        trainer = HeadTrainer(backbone, args, data)
        if is_pretrained(model_args) and args.keep == "model" and args.loss not in FITTED:
            trainer.card.baselines = baselines(backbone, data, args)
    else:
        model, processor, data = make()
        measured, test = {}, data["test"]
        if is_pretrained(model_args) and args.keep == "model":  # before the training changes the network
            tested = {name: data[name] for name in ("labeled", "validation", "test")}
            backbone = Backbone(model, processor)
            measured = baselines(backbone, embed_splits(tested, backbone, model_args, args), args)
            set_seed(args.seed)
        trainer = FixAStepTrainer(
            model,
            args,
            train_dataset=data["labeled"],
            unlabeled_dataset=data["unlabeled"],
            eval_dataset=data["validation"],
            processing_class=processor,
        )
        trainer.card.baselines = measured
    trainer.card.dataset = {
        "name": data_args.dataset,
        "config": test.info.config_name,
        "medical": medical,
        "phantom": is_phantom(data_args.data_dir),
    }
    trainer.card.recipe = given
    trainer.card.patients = test["patient"] if "patient" in test.column_names else None
    if isinstance(trainer, HeadTrainer) and args.loss in FITTED:
        return trainer, data, partial(take_baseline, trainer)
    if procedure is not None:
        run = partial(run_procedure, procedure, trainer, data["unlabeled"], lambda: make()[0])
        return trainer, data, partial(run, resume=checkpoint is not None)
    if checkpoint is not None:
        trainer.check_checkpoint(checkpoint)
    return trainer, data, partial(trainer.train, resume_from_checkpoint=checkpoint)


def checkpoint_to_resume(args: FixAStepConfig) -> str | None:
    """The checkpoint that `resume_from_checkpoint` means; nothing is written over without it."""
    wanted, folder = args.resume_from_checkpoint, str(args.output_dir)
    if wanted and wanted.lower() not in ("true", "false"):
        return wanted
    if wanted and wanted.lower() == "true":
        if args.should_save and Path(folder).is_dir():
            with only_run(folder):  # else the checkpoint found may be gone in a moment
                pass
        return folder if args.procedure else find_checkpoint(folder)
    if checkpoints(folder) or any((Path(folder) / name).exists() for name in (METRICS, PROCEDURE)):
        raise ValueError(
            f"{folder} holds a run already; choose another --output_dir, continue it with "
            "--resume_from_checkpoint true, or delete it."
        )
    return None


def load_data(args: DataArguments) -> Any:
    return load_dataset(args.dataset, args.config, **args.settings)


def load_network_and_data(data_args: DataArguments, model_args: ModelArguments, preset: str) -> tuple:
    """Model, image processor and the splits of the data."""
    data = load_data(data_args)
    check_splits(data_args.dataset, data)
    return *load_model(model_args, data["labeled"].features["label"].num_classes, preset), data


def check_splits(name: str, data: Any) -> None:
    if missing := [split for split in ("labeled", "unlabeled", "validation", "test") if split not in data]:
        raise ValueError(
            f"{name} has the splits {', '.join(data)} here, but a training needs {' and '.join(missing)} "
            "as well: choose another data set, or shares above 0."
        )


def finish(trainer: FixAStepTrainer, data: Any) -> None:
    """Test the model and leave it with its numbers, figures and card in the output folder."""
    folder = Path(str(trainer.args.output_dir))
    validation = trainer.evaluate(metric_key_prefix="validation")
    images = trainer.images(data["test"])
    test = trainer.predict(images, metric_key_prefix="test")
    if trainer.args.keep == "model":
        # On all processes, for each may hold a shard; the push comes last.
        trainer.save_model(_internal_call=True)
    raw = raw_metrics(trainer, images)
    if not trainer.is_world_process_zero():
        return
    logits, labels = np.asarray(test.predictions), np.asarray(test.label_ids)
    tested = evaluate_classifier(logits, labels, trainer.class_names, "test_")
    metrics = trainer.card.facts({**validation, **(test.metrics or {}), **tested, **raw}, {"test": images})
    answers = pd.DataFrame({"label": labels, "prediction": logits.argmax(-1)})
    if trainer.card.patients is not None:
        answers["patient"] = list(trainer.card.patients)
    answers.to_csv(folder / PREDICTIONS, index=False)
    figures: list[Path] = []
    if trainer.args.keep == "model":
        # All classes, also those that test images of one's own may lack.
        confusion = confusion_matrix(
            answers["label"], answers["prediction"], labels=range(len(trainer.class_names))
        )
        log = pd.read_csv(folder / LOG) if (folder / LOG).is_file() else pd.DataFrame({"step": []})
        figures = save_figures(log, confusion, trainer.class_names, folder)
    trainer.card.write(metrics)
    print_table(metrics, folder, figures)
    if trainer.args.push_to_hub:
        print(f"Pushed: {trainer.card.push().commit_url}")


def raw_metrics(trainer: FixAStepTrainer, images: Examples) -> dict[str, float]:
    """The same of the raw weights of the best step, where its checkpoint is still there."""
    if trainer.raw_weights_file is None:
        return {}
    with trainer.raw_weights():
        results = trainer.evaluate(metric_key_prefix="validation")
        results |= trainer.predict(images, metric_key_prefix="test").metrics or {}
    names = ("validation_accuracy", "validation_balanced_accuracy", "test_accuracy", "test_balanced_accuracy")
    return {f"raw_{name}": results[name] for name in names}


def print_table(metrics: dict[str, Any], folder: Path, figures: list[Path]) -> None:
    name = metrics["procedure"] or metrics["loss"]
    title = f"{name}, gate {metrics['gate']}, mix_labeled {metrics['mix_labeled']}"
    if name in FITTED:
        title = FITTED[name]
    baselines = metrics.get("baselines") or {}
    title = "PHANTOM DATA, " * metrics["dataset"]["phantom"] + title
    table = Table("", "this run" if baselines else "value", *baselines, title=title)
    images = metrics["images"]
    table.add_row("images", ", ".join(f"{count} {name}" for name, count in images.items()))
    for name in ("validation_accuracy", "test_accuracy", "test_balanced_accuracy", "gate_open_rate"):
        if metrics.get(name) is not None:
            shares = [part.get(name) for part in (metrics, *baselines.values())]
            cells = ["" if share is None else f"{100 * share:.1f} %" for share in shares]
            table.add_row(name.replace("_", " "), *cells)
    table.add_row("model", str(folder))
    table.add_row("figures", ", ".join(figure.name for figure in figures))
    Console().print(table)
