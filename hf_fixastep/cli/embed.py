"""fixastep embed: run a pretrained network once over images, and keep the features to train on."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from transformers.utils import logging

from hf_fixastep.cli.launch import launch, take_processes
from hf_fixastep.data.base import WITHOUT_LABELS
from hf_fixastep.data.features import Features
from hf_fixastep.data.registry import load_dataset
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.features.embed import check_versions, embed
from hf_fixastep.features.processes import processes, together
from hf_fixastep.hub.loading import load_network
from hf_fixastep.runs.arguments import DataArguments, option, parse


@dataclass
class EmbedArguments:
    """Which network, and which views of the images."""

    model: str = option("", "A folder of a pretrained network, or its name on the Hub.")
    image_size: int | None = option(None, "Side of the images; if not given, that of the image processor.")
    weak: int = option(4, "Weak views of each labeled and unlabeled image.")
    strong: int = option(2, "Strong views of each labeled and unlabeled image.")
    flip: bool = option(True, "Mirror half of the views.")
    cutout: float = option(0.5, "Side of the grey box of strong views: pixels, or below 1 a share.")
    cache_dir: str | None = option(
        None, "Where features are kept; if not given, with the other files of Hugging Face."
    )
    num_processes: int = option(1, "Processes on this machine, started through Accelerate.")

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("No model was named: give --model, a folder or a name on the Hub.")
        check_versions(self.weak, self.strong)


TYPES = (EmbedArguments, DataArguments)
OPTIONS = dict(zip(("network and views", "data"), TYPES, strict=True))


def main(argv: list[str]) -> None:
    logging.disable_progress_bar()  # of loading the weights
    try:
        number, argv = take_processes(argv)
        args, data_args, _ = parse(TYPES, argv)
        if number > 1:
            prepare(args, data_args)  # a mistake is said here once, and not by every process
            launch(number, "embed", argv)
        run(args, data_args)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}" if os.environ.get("RANK", "0") == "0" else 1)


def prepare(args: EmbedArguments, data_args: DataArguments) -> tuple[Any, Backbone]:
    """The data, built by one process where they are not yet, and the network."""
    together(lambda: len(load_data(data_args)), first_only=True)
    data = load_data(data_args)
    labels = next(iter(data.values())).features["label"]
    model, processor = load_network(args.model, labels.num_classes)  # a new head, for there may be none
    return data, Backbone(model, processor, args.image_size)


def load_data(args: DataArguments) -> Any:
    return load_dataset(args.dataset, args.config, **args.settings)


def run(args: EmbedArguments, data_args: DataArguments) -> None:
    # Nobody knows how long the slowest process takes for its share.
    state = processes(timeout=timedelta(days=7))
    data, backbone = prepare(args, data_args)
    for name, split in data.items():
        with_views = name in ("labeled", "unlabeled")
        found = embed(
            split,
            backbone,
            weak=args.weak if with_views else 0,
            strong=args.strong if with_views else 0,
            flip=args.flip,
            cutout=args.cutout,
            cache_dir=args.cache_dir,
            skip_unreadable=name in WITHOUT_LABELS,
        )
        if state.is_main_process:
            print(describe(name, found), flush=True)
    if state.num_processes > 1:
        state.destroy_process_group()


def describe(name: str, found: Features) -> str:
    """A line on the features of a split."""
    versions, (numbers,) = 1 + sum(found.versions), found.row_shape
    size = len(found) * versions * numbers * 2 / 1e6
    skipped = f", {len(found.skipped):,} skipped" if found.skipped else ""
    return (
        f"{name}: {len(found):,} images{skipped}, {versions} x {numbers:,} numbers each, {size:,.1f} MB in "
        f"{found.files[0].parent}"
    )
