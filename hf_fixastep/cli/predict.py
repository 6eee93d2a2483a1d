"""fixastep predict: classify the images, or echo files, of a folder."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import PIL.Image
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from hf_fixastep.checks import harmless
from hf_fixastep.data.fetal_files import BRAIN_PLANES, LONGEST_SIDE, PLANES, reduced_size
from hf_fixastep.data.files import SUFFIXES, UnreadableImage, printable
from hf_fixastep.data.listings import is_table
from hf_fixastep.data.trees import Tree
from hf_fixastep.echo import prediction as echo
from hf_fixastep.echo.clips import PARTS, VOLUMES, read_clip
from hf_fixastep.echo.files import ECHO_VIEWS
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.evaluation.foreign import KnownImages
from hf_fixastep.evaluation.prediction import (
    RESEARCH,
    File,
    Predictions,
    find_images,
    picture_files,
    predict,
    write,
)
from hf_fixastep.hub.loading import read_config
from hf_fixastep.runs.arguments import as_words, option, parse, positional
from hf_fixastep.runs.folder import is_medical


@dataclass
class PredictArguments:
    """What to classify, and where to write."""

    model: str = option("", "Folder of a finished run, or a Hub name.")
    input: str = option("", "Folder of images or echo files, or one file.")
    out: str = option("", "CSV file to write.")
    batch_size: int = option(64, "Images per forward.")
    echo: bool | None = option(
        None, "Read files as echocardiograms; if not given, as the model or the files suggest."
    )
    mask: bool = option(True, "Echo: make screen text outside the ultrasound sector black.")
    salt: str | None = option(None, "Echo: secret that makes study ids equal between calls.")
    uncalibrated: bool = option(False, "Echo: use a model whose config has no calibration.")


def main(argv: list[str]) -> None:
    logging.disable_progress_bar()  # of the model's files
    try:
        args, given = read(argv)
        if args.echo if args.echo is not None else is_echo(args.model, args.input):
            words = {"model": args.model, "input": args.input, **given}
            words.pop("echo", None)
            echo.main([word for name, value in words.items() for word in (f"--{name}", *as_words(value))])
            return
        predict_images(args)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def read(argv: list[str]) -> tuple[PredictArguments, dict[str, object]]:
    """Model and input may be given as words or as options."""
    words, options = positional(argv)
    if len(words) > 2:
        raise ValueError(f"Found {len(words)} words before the options, but expected MODEL and INPUT.")
    named = [word for pair in zip(("--model", "--input"), words, strict=False) for word in pair]
    args, given = parse((PredictArguments,), [*named, *options])
    for name in ("model", "input", "out"):
        if not getattr(args, name):
            raise ValueError(f"No {name} was given: fixastep predict MODEL INPUT --out answers.csv")
    if Path(args.out).is_dir():
        raise ValueError(f"out is {args.out}, which is a folder; give the name of a CSV file.")
    return args, given


def class_names(model: str) -> set[str]:
    names = read_config(model).get("id2label", {})
    return {*map(str, names.values())} if isinstance(names, dict) else set()


def is_planes(model: str) -> bool:
    """The model tells planes of fetal ultrasound."""
    return class_names(model) in (set(PLANES), set(BRAIN_PLANES))


def is_echo(model: str, source: str) -> bool:
    """The model tells the views of the heart, or some file is DICOM, MetaImage or NIfTI."""
    if class_names(model) == set(ECHO_VIEWS):
        return True
    if is_planes(model) or not os.path.exists(source):  # a glob, or a mistake that will be found
        return False
    tree = Tree(source)
    return any(is_echo_file(tree, name) for name in tree)


def is_echo_file(tree: Tree, name: str) -> bool:
    if name.lower().endswith((*VOLUMES, *SUFFIXES, *PARTS)):
        return name.lower().endswith(VOLUMES)
    try:
        return tree.read(name)[128:132] == b"DICM"
    except UnreadableImage:
        return False


def predict_images(args: PredictArguments) -> None:
    classifier = Classifier(args.model, batch_size=args.batch_size)
    if is_planes(args.model) and os.path.exists(args.input) and not is_table(args.input):
        files = ultrasound_files(args.input)
    else:
        files = picture_files(find_images(args.input))
    if not files:
        raise ValueError(f"{args.input} holds no image; give a folder with images.")
    found = predict(classifier, files, KnownImages.of(args.model))
    paths = write(found, Path(args.out))
    if not found.images:
        first = found.skipped[0]
        raise ValueError(
            f"None of the {len(found.skipped):,} files in {args.input} could be used, such as "
            f"{first['file']}: {first['reason']}. All of them are in {paths[-1]}."
        )
    print_table(found, classifier, paths, is_planes(args.model) or is_medical(args.model))


def ultrasound_files(source: str) -> list[File]:
    """Pictures, DICOM, MetaImage and NIfTI files, as grey frames of the size that is trained on."""
    tree = Tree(source)
    names = [name for name in tree if not name.lower().endswith(PARTS)]
    return [(printable(name), partial(read_frames, tree, name)) for name in names]


def read_frames(tree: Tree, name: str) -> list[PIL.Image.Image]:
    frames = [PIL.Image.fromarray(frame) for frame in read_clip(tree, name).frames]
    size = reduced_size(frames[0].size, LONGEST_SIDE)
    return [frame.resize(size, PIL.Image.Resampling.BILINEAR) for frame in frames]


def print_table(found: Predictions, classifier: Classifier, paths: list[Path], medical: bool) -> None:
    console = Console(soft_wrap=True, markup=False, highlight=False)
    counts = Counter(row["class"] for row in found.images)
    unsure = Counter(row["class"] for row in found.images if row.get("abstain"))
    calibration = classifier.calibration
    table = Table("class", "images", *(["abstained"] if calibration else []))
    for name in classifier.classes:
        table.add_row(harmless(name), f"{counts[name]:,}", *([f"{unsure[name]:,}"] if calibration else []))
    console.print(table)
    if calibration is None:
        console.print("These probabilities were not calibrated.")
    for row in found.skipped[:5]:
        console.print(harmless(f"skipped {row['file']}: {row['reason']}"))
    if "foreign" in found.images[0]:
        console.print("foreign: share of held-out images of known classes that look more like labeled ones")
    used = len({row["file"] for row in found.images})
    console.print(f"{used:,} files used, {len(found.skipped):,} skipped, written to", *paths)
    if medical:
        console.print(RESEARCH)
