"""The network of a run: built from scratch, or loaded, with the image processor that goes with it."""

from __future__ import annotations

import os
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageClassification, ViTImageProcessor

from hf_fixastep.checks import check_choice
from hf_fixastep.data.processing import with_size
from hf_fixastep.hub.loading import load_network
from hf_fixastep.runs.arguments import ModelArguments
from hf_fixastep.runs.recipe import read_mapping


def is_pretrained(args: ModelArguments) -> bool:
    return args.model not in CONFIG_MAPPING


def load_model(args: ModelArguments, num_labels: int, preset: str) -> tuple[Any, Any]:
    """Model and image processor: from scratch if `model` is a model type, otherwise pretrained."""
    if not is_pretrained(args):
        processor = build_processor(args)
        return AutoModelForImageClassification.from_config(build_config(args, num_labels, preset)), processor
    try:
        model, processor = load_network(args.model, num_labels)
        return model, processor if args.image_size is None else with_size(processor, args.image_size)
    except ValueError as error:
        if os.path.isdir(args.model):
            raise
        raise ValueError(
            f"{args.model} is no model type, and no model could be loaded from it: {error}"
        ) from error


def build_config(args: ModelArguments, num_labels: int, preset: str) -> Any:
    """The network's config from `model_kwargs`, with what the data and the preset say."""
    known = CONFIG_MAPPING[args.model].__annotations__
    given = read_mapping("model_kwargs", args.model_kwargs)
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
