"""fixastep fit: the whole path from images to a saved model."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from transformers.utils import logging

from hf_fixastep.features.fit import DEFAULT_MODEL, fit
from hf_fixastep.runs.arguments import SIDES, NamedDataArguments, option, parse


@dataclass
class FitArguments:
    """Images, network and time."""

    output_dir: str = option("", "Folder to write the model to.")
    labeled: str | None = option(None, "A folder with a sub-folder per class, or a table.")
    unlabeled: list[str] | None = option(None, "Your pile: folders, globs or tables.")
    validation: str | None = option(
        None, "As --labeled; if not given, candidates are compared by cross-validation over the labels."
    )
    test: str | None = option(None, "As --labeled; it is tested on once, at the end.")
    group: str | None = option(
        None,
        "Column of the table, or regular expression with (the group) in file names, such as the patient.",
    )
    model: str | None = option(
        None, f"Folder or Hub name of a pretrained network; {DEFAULT_MODEL} if not given."
    )
    time: str = option("10m", "For all; what is left may go into fine-tuning. 0 for no fine-tuning.")
    image_size: int | None = option(None, "Side of the images, if not as the network's processor says.")
    seeds: int = option(3, "Trainings of each head, whose mean is taken.")
    cache_dir: str | None = option(None, "Where to keep the features.")


OPTIONS = {"images, network and time": FitArguments, "or a data set by name": NamedDataArguments}


def main(argv: list[str]) -> None:
    logging.disable_progress_bar()  # of files
    try:
        args, named, _ = parse((FitArguments, NamedDataArguments), argv)
        if not args.output_dir:
            raise ValueError("No output_dir was given: give a folder to write the model to.")
        if not named.dataset and not any(getattr(args, name) for name in SIDES):
            raise ValueError(
                "No images were named: give --labeled DIR and --unlabeled DIR, or --dataset NAME."
            )
        if args.unlabeled and len(args.unlabeled) == 1:
            (args.unlabeled,) = args.unlabeled
        fit(**vars(args), dataset=named.dataset or None, config=named.config, **named.settings)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
