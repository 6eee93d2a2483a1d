"""What the files of a network may say, looked at before any library reads them: no code, no pickle, no more
than memory can hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
from transformers.image_processing_base import ImageProcessingMixin

from hf_fixastep.hub.checks import shown


CONFIG, INDEX, WEIGHTS = "config.json", "model.safetensors.index.json", "model.safetensors"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
LARGEST = 2**20  # number of a config, such as layers or classes
SIDE = 4096  # of images
# Bytes of a file of JSON, and of the list of tensors in a file of weights. A config with the names of 20,000
# classes has two million.
JSON_LIMIT = 2**24
NAMES = ("id2label", "label2id", "label_names")  # of classes, which may be any
CODE = "asks to run code from the Hub or of its own"
KERNELS = "asks for kernels, which are code from the Hub"
QUANTIZED = "says that its weights are quantized, and such weights are not read"
# Keys at any depth that are refused unless they are empty or false, and what they mean.
REFUSED = {
    "auto_map": CODE,
    "custom_pipelines": CODE,
    "use_kernels": KERNELS,
    "kernel_config": KERNELS,
    "fusion_config": "asks to change the classes of transformers",
    "quantization_config": QUANTIZED,
    "compression_config": QUANTIZED,
    "configuration_files": "names other configs, which nobody looked at",
    "transformers_weights": "names another file of weights",
    "class_info_file": "names a file of another place",  # which an image processor would fetch from the Hub
}
TIMM_REFUSED = ("checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay")
IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal)?")
PLAIN = ("eager", "sdpa")  # attention that needs nothing but PyTorch
COUNTS = re.compile(r"num_.*|.*sizes?|depths?|width|.*_(dims?|channels|layers|heads)")  # never below zero
NO_SIZES = re.compile(r".*(param|token|seed|flops|bytes).*")  # numbers that nothing is built from
SIDES = ("size", "crop_size", "pad_size", "input_size")
SHARD = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")


def screen(folder: Path) -> list[Path]:
    """The files of weights, if no file of the network asks for anything but numbers and known networks."""
    config = read_json(folder / CONFIG)
    check_values(CONFIG, config)
    check_numbers(config)
    for name in PROCESSORS:
        if (folder / name).exists():
            values = read_json(folder / name)
            check_values(name, values)
            check_processor(name, values)
            check_sides(name, values)
    check_processor(CONFIG, config)
    check_sides(CONFIG, config.get("pretrained_cfg"))  # of timm
    check_architecture(config)
    if (folder / "adapter_config.json").exists():
        raise ValueError(
            "it holds adapter_config.json, an adapter that names another network; merge the two, and give "
            "the folder of what comes out"
        )
    files = find_weights(folder, config)
    for path in files:
        check_header(path)
    return files


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a file of limited size."""
    if not path.is_file():
        raise ValueError(f"it holds no {path.name}")
    if (size := path.stat().st_size) > JSON_LIMIT:
        raise ValueError(f"its {path.name} has {size:,} bytes, and the limit is {JSON_LIMIT:,}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"its {path.name} is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"its {path.name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"its {path.name} holds {shown(values)}, but expected a mapping")
    return values


def walk(values: Any) -> Iterator[tuple[str, Any]]:
    """All keys and values of a mapping and of those inside it, but for names of classes."""
    todo = [values]
    while todo:
        found = todo.pop()
        if isinstance(found, dict):
            yield from found.items()
            todo += [value for key, value in found.items() if key not in NAMES]
        elif isinstance(found, list):
            todo += found


def check_values(name: str, values: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    """Refuse a mapping with keys that ask for more than a network, but for these."""
    for key, value in walk(values):
        if value and key in REFUSED and key not in but:
            refuse(name, key, REFUSED[key])
        if value and IMPLEMENTATION.fullmatch(key):
            for wanted in value.values() if isinstance(value, dict) else [value]:
                if wanted and wanted not in PLAIN:
                    refuse(name, key, f"is {shown(wanted)} and {KERNELS}")
        if key == "model_args" and isinstance(value, dict):
            for inner in TIMM_REFUSED:
                if value.get(inner):
                    refuse(name, f"{inner} in model_args", "names another file of weights")
        if key == "architecture" and not re.fullmatch(r"[\w.-]+", str(value)):
            refuse(name, key, f"is {shown(value)}, which names another place")


def check_numbers(config: dict[str, Any]) -> None:
    """Before a library counts up to them."""
    for key, value in walk(config):
        for number in whole_numbers(value):
            if abs(number) > LARGEST and not NO_SIZES.fullmatch(key):
                raise ValueError(f"its {CONFIG} has a {key} of {number:,}, and the limit is {LARGEST:,}")
            if number < 0 and COUNTS.fullmatch(key):
                raise ValueError(f"its {CONFIG} has a {key} of {number:,}, but expected no less than 0")


def check_sides(name: str, values: Any) -> None:
    """Sizes that images are brought to."""
    for key, value in walk(values):
        if key in SIDES:
            numbers = value.values() if isinstance(value, dict) else [value]
            for number in (each for one in numbers for each in whole_numbers(one)):
                if not 1 <= number <= SIDE:
                    raise ValueError(
                        f"its {name} has a {key} of {number:,}, but expected 1 to {SIDE:,} pixels"
                    )


def whole_numbers(value: Any) -> list[int]:
    """Those in a value that is a number or a list of numbers."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool)]


def refuse(name: str, key: str, what: str) -> None:
    raise ValueError(
        f"its {name} has the key {key}, which {what}; choose a network that transformers or this package "
        "knows, with plain weights"
    )


def check_processor(name: str, values: dict[str, Any]) -> None:
    """Only classes of image processors: transformers would take any class of its own by name."""
    for key, value in walk(values):
        if key not in ("image_processor_type", "feature_extractor_type") or value is None:
            continue
        wanted = str(value).replace("FeatureExtractor", "ImageProcessor").removesuffix("Fast")
        found = getattr(transformers, wanted, None)
        if not (isinstance(found, type) and issubclass(found, ImageProcessingMixin)):
            raise ValueError(
                f"its {name} names {shown(value)} as its image processor, which transformers does not have"
            )


def check_architecture(config: dict[str, Any]) -> None:
    """A network has to be saved as a class of transformers, or as the registered one of its type."""
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ValueError(f"its {CONFIG} has {shown(names)} as architectures, but expected a list")
    for name in names:
        found = getattr(transformers, str(name), None)
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        if not is_model and name not in registered(config.get("model_type")):
            raise ValueError(
                f"its {CONFIG} names the architecture {shown(name)}, which transformers does not have, so "
                "that its code would be needed; choose a network that transformers or this package knows"
            )


def registered(kind: Any) -> list[str]:
    """Names of the image classifiers of a model type."""
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return []
    found: Any = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING.get(CONFIG_MAPPING[kind], ())
    return [each.__name__ for each in (found if isinstance(found, tuple) else (found,))]


def check_header(path: Path) -> None:
    """The list of tensors at the start of a file, which safetensors compares with its length."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > JSON_LIMIT:
        raise ValueError(
            f"its {path.name} is no safetensors file, or damaged: its header would have {length:,} bytes, "
            f"and the limit is {JSON_LIMIT:,}"
        )
    try:
        with safe_open(path, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise ValueError(f"its {path.name} is no safetensors file, or damaged: {error}") from error


def check_calibration(found: Any, weights: Callable[[], str | None]) -> None:
    """Refuse a calibration that does not name the weights it is found with, given by their hash."""
    if isinstance(found, dict) and not (found.get("weights") and found["weights"] == weights()):
        raise ValueError(
            "its calibration was made for other weights, or does not say for which; fit it anew, as fixastep "
            f"heart2heart does for views of the heart, or remove calibration from its {CONFIG}"
        )


def find_weights(folder: Path, config: dict[str, Any] | None = None) -> list[Path]:
    """The files that transformers would read, which have to be safetensors in this very folder."""
    if shards := sorted(path.name for path in folder.iterdir() if SHARD.match(path.name)):
        raise ValueError(
            f"it holds {shards[0]}, a part of weights that were saved by many processes; save it with "
            "save_pretrained on one"
        )
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        kinds = (config or {}).get("architectures")
        kind = str(kinds[0]) if isinstance(kinds, list) and kinds else "AutoModelForImageClassification"
        kind = kind if kind.isidentifier() else "AutoModelForImageClassification"
        raise ValueError(
            f"it holds no {WEIGHTS}, and pickles such as pytorch_model.bin are not read, for they can run "
            f"code; if you trust it, convert it:  from transformers import {kind};  "
            f"{kind}.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    names = read_json(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"its {INDEX} has no weight_map, which says where the weights are")
    files = sorted({str(name) for name in names.values()})
    for name in files:
        plain = name == Path(name).name and name.endswith(".safetensors")
        if not plain or not (folder / name).is_file():
            raise ValueError(
                f"its {INDEX} names {shown(name)}, but expected safetensors in the same folder, as pickles "
                "are not read"
            )
    return [folder / name for name in files]
