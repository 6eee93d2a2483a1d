"""The one way to load a network: from a folder or the Hub, safetensors alone, and no code of it is run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    CLIPConfig,
    CLIPForImageClassification,
    CLIPVisionModel,
    SiglipConfig,
    SiglipForImageClassification,
    SiglipVisionModel,
)
from transformers.utils import logging

from hf_fixastep.disk import digest
from hf_fixastep.hub.client import pull, reason
from hf_fixastep.hub.screening import (
    CONFIG,
    check_calibration,
    check_values,
    find_weights,
    read_json,
    screen,
)
from hf_fixastep.step.forwards import classification_head


# The image half of a network of images and texts, saved alone: its class, and what makes a classifier of it.
TOWERS: dict[str, tuple[Any, Any, Any]] = {
    "clip_vision_model": (CLIPVisionModel, CLIPConfig, CLIPForImageClassification),
    "siglip_vision_model": (SiglipVisionModel, SiglipConfig, SiglipForImageClassification),
}
SAFELY: dict[str, Any] = {
    "trust_remote_code": False,
    "use_safetensors": True,
    "dtype": torch.float32,  # weights saved in half precision would be trained in it
    "ignore_mismatched_sizes": True,  # they are told, and judged here
    "output_loading_info": True,
}
HEAD = 2**27  # numbers of a head that is not in the files, such as 4,096 features times 32,768 classes
MANY = 1000  # tensors that may be missing in the files


def load_network(
    source: str | os.PathLike[str],
    num_labels: int | None = None,
    revision: str | None = None,
    calibrated: bool = True,
) -> tuple[Any, Any]:
    """An image classifier and its image processor.

    Args:
        source: a folder, or a name on the Hub.
        num_labels: classes of its head, which is new where the saved one has others or there is none; by
            default the saved head, which has to be there.
        revision: branch, tag or commit of a network on the Hub.
        calibrated: keep the calibration in its config, which has to be for its weights; a network that is to
            be trained, with `num_labels`, never keeps it.
    """
    folder = Path(find_folder(source, revision))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # a table of what is missing, and of the weights of other towers
    try:
        labels = {} if num_labels is None else {"num_labels": num_labels}
        files = screen(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **labels)
        check_kind(config)
        if calibrated and num_labels is None:
            check_calibration(getattr(config, "calibration", None), lambda: "".join(map(digest, files)))
        else:
            vars(config).pop("calibration", None)
        processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        with bounded(files):
            model, lacking = read_weights(folder, config)
        if num_labels is not None:
            new = head_names(model)
            lacking = {name: text for name, text in lacking.items() if name not in new}
    except Exception as error:  # the files of a network can be wrong in any way
        raise unloadable(source, error) from error
    finally:
        logging.set_verbosity(verbosity)
    if lacking:
        what = "a trained classifier" if num_labels is None else "whole, and only the head may be new"
        raise ValueError(
            f"{source} lacks {first_of(lacking.values())}, so it is not {what}: give one that is."
        )
    model.config.name_or_path = str(source)
    return model, processor


def read_config(source: str | os.PathLike[str]) -> dict[str, Any]:
    """What the config of a network says, from a folder or the Hub."""
    folder = Path(find_folder(source))
    try:
        return read_json(folder / CONFIG)
    except ValueError as error:
        raise unloadable(source, error) from error


def unloadable(source: str | os.PathLike[str], error: Exception) -> ValueError:
    return ValueError(f"No network could be loaded from {source}: {reason(error)}.")


def load_saved(kind: Any, folder: str | os.PathLike[str]) -> Any:
    """A network that a training has saved, of its very class, which may be one of the user's own."""
    try:
        check_values(CONFIG, read_json(Path(folder) / CONFIG), but=("auto_map",))  # a class needs no map
        find_weights(Path(folder))
        return kind.from_pretrained(folder, use_safetensors=True)
    except Exception as error:
        raise unloadable(folder, error) from error


def find_folder(source: str | os.PathLike[str], revision: str | None = None) -> str | os.PathLike[str]:
    """The folder itself, or that of the copy of a network on the Hub."""
    if os.path.isdir(source):
        if revision is not None:
            raise ValueError(
                f"revision is {revision}, but {source} is a folder, which has no revisions: leave it out."
            )
        return source
    try:
        return pull(str(source), revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no folder {source}; as a model on the Hub: {error}") from error


def check_kind(config: Any) -> None:
    """Refuse networks that transformers cannot make an image classifier of."""
    kind = config.model_type
    if kind.startswith("siglip2"):
        raise ValueError(
            f"its type {kind} takes patches instead of images; choose a SigLIP 2 of a fixed size, whose type "
            "is siglip"
        )
    if kind not in TOWERS and type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"transformers has no image classifier of its type {kind} ({type(config).__name__}); choose "
            "another network, such as a ViT, DINOv2, ConvNeXt, or one of timm"
        )


@contextlib.contextmanager
def bounded(files: Sequence[Path]) -> Iterator[None]:
    """End the building of networks that are larger than their files, which is done without memory at first.

    Args:
        files: with the weights of everything but a head.
    """
    numbers = sum(path.stat().st_size for path in files) + HEAD  # no number takes less than a byte
    tensors = sum(count_tensors(path) for path in files) * 3 + MANY  # a tower is built twice
    seen: set[tuple[int, str]] = set()
    here, left = threading.get_ident(), numbers

    def count(module: nn.Module, name: str, value: Tensor | None) -> None:
        nonlocal left
        if value is None or threading.get_ident() != here or (id(module), name) in seen:
            return
        seen.add((id(module), name))
        left -= value.numel()
        if left < 0 or len(seen) > tensors:
            raise ValueError(
                f"its {CONFIG} describes more than {min(numbers - left, numbers):,} numbers in "
                f"{len(seen):,} tensors, which its files cannot hold"
            )

    hooks = [
        register_module_parameter_registration_hook(count),
        register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def count_tensors(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return len(file.keys())


def read_weights(folder: Path, config: Any) -> tuple[Any, dict[str, str]]:
    """The network, and the weights that are not in the folder or not in this shape, with their names."""
    if config.model_type not in TOWERS:
        model, info = AutoModelForImageClassification.from_pretrained(folder, config=config, **SAFELY)
        return model, not_read(info)
    kind, kind_of_config, kind_of_classifier = TOWERS[config.model_type]
    tower, info = kind.from_pretrained(folder, config=config, **SAFELY)
    labels = {"num_labels": config.num_labels}
    model = kind_of_classifier(kind_of_config(vision_config=config.to_dict(), **labels)).eval()
    model.vision_model.load_state_dict(getattr(tower, "vision_model", tower).state_dict())
    return model, not_read(info) | {name: name for name in head_names(model)}


def not_read(info: dict[str, Any]) -> dict[str, str]:
    shapes = {name: (list(found), list(needed)) for name, found, needed in info["mismatched_keys"]}
    others = {name: f"{name} of shape {needed} (it has {found})" for name, (found, needed) in shapes.items()}
    return {name: name for name in info["missing_keys"]} | others


def head_names(model: Any) -> set[str]:
    """Parameters of the head, and of any other beside the body, for distilled networks have two."""
    classes = model.config.num_labels
    head, body = classification_head(model, classes), set(model.base_model.modules())
    heads = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features == classes
        if module is head or module not in body
    ]
    return {f"{name}.{own}" for name, module in heads for own, _ in module.named_parameters()}


def first_of(texts: Iterable[str], count: int = 3) -> str:
    texts = sorted(texts)
    more = f" and {len(texts) - count} more" if len(texts) > count else ""
    return ", ".join(texts[:count]) + more
