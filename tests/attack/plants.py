"""Networks with code planted wherever a file of theirs can name it, and a watch over what is opened."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import constants
from safetensors.torch import load_file
from transformers import TimmWrapperConfig, TimmWrapperForImageClassification

from hf_fixastep.disk import digest
from tests.hub.pretrained import TIMM, save_network
from tests.short_runs import tiny_processor, tiny_vit


ELSEWHERE = "org/code"  # another repository, which is in the cache
CODE = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor
class Config(ViTConfig): pass
class Model(ViTForImageClassification): config_class = Config
class Processor(ViTImageProcessor): pass
"""
SOUGHT = {  # what each class of transformers looks for in an auto_map
    "AutoConfig": "evil.Config",
    "AutoModel": "evil.Model",
    "AutoModelForImageClassification": "evil.Model",
    "AutoImageProcessor": "evil.Processor",
    "AutoFeatureExtractor": "evil.Processor",
    "AutoProcessor": "evil.Processor",
    "AutoTokenizer": ["evil.Processor", "evil.Processor"],
}
AUTO_MAP: dict[str, Any] = {
    name: [f"{ELSEWHERE}--{each}" for each in code] if isinstance(code, list) else f"{ELSEWHERE}--{code}"
    for name, code in SOUGHT.items()
}


# ---- a harmless run, with all files that the commands ask for


def save_run(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tiny_vit().save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    finish_run(folder)
    return folder


def finish_run(folder: Path) -> None:
    weights = folder / "model.safetensors"
    facts = {
        "weights": digest(weights) if weights.is_file() else None,
        "dataset": {"name": "digits_open_set"},
    }
    (folder / "metrics.json").write_text(json.dumps(facts))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"dataset": "digits_open_set"}))


def change(path: Path, **values: Any) -> None:
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(known | values))


# ---- plants


class Gadget:
    """As a pickle it makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def plant_code(mark: Path, *folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "evil.py").write_text(CODE.format(mark=str(mark)))


def plant_repository(mark: Path) -> None:
    """Code of another repository in the cache, as a download leaves it."""
    repository = Path(constants.HF_HUB_CACHE) / f"models--{ELSEWHERE.replace('/', '--')}"
    commit = hashlib.sha1(str(mark).encode()).hexdigest()
    plant_code(mark, repository / "snapshots" / commit)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs/main").write_text(commit)


def in_config(**values: Any) -> Callable[[Path, Path], None]:
    return lambda folder, mark: change(folder / "config.json", **values)


def in_processor(**values: Any) -> Callable[[Path, Path], None]:
    return lambda folder, mark: change(folder / "preprocessor_config.json", **values)


def in_nested_processor(folder: Path, mark: Path) -> None:
    known = json.loads((folder / "preprocessor_config.json").read_text())
    change(folder / "processor_config.json", image_processor=known | {"auto_map": AUTO_MAP})


def in_vision_config(folder: Path, mark: Path) -> None:
    shutil.rmtree(folder)
    save_network("CLIP", folder)
    config = json.loads((folder / "config.json").read_text())
    change(folder / "config.json", vision_config=config["vision_config"] | {"auto_map": AUTO_MAP})
    finish_run(folder)


def in_other_config(folder: Path, mark: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(folder / "config.4.0.0.json", **config, auto_map=AUTO_MAP)
    change(folder / "config.json", configuration_files=["config.4.0.0.json"])


def in_tokenizer(folder: Path, mark: Path) -> None:
    change(folder / "preprocessor_config.json", image_processor_type="AutoTokenizer")
    change(folder / "tokenizer_config.json", auto_map=AUTO_MAP)


def put_pickle(path: Path, mark: Path) -> None:
    """As torch.save writes it, and as a reader of weights alone would take it, but for the gadget."""
    torch.save({"classifier.bias": torch.zeros(3), "gadget": Gadget(mark)}, path)


def as_pickle(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").unlink()
    put_pickle(folder / "pytorch_model.bin", mark)


def as_pickle_beside_other_safetensors(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    put_pickle(folder / "pytorch_model.bin", mark)


def as_raw_pickle_named_safetensors(folder: Path, mark: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Gadget(mark)))


def in_index(folder: Path, mark: Path) -> None:
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    put_pickle(folder / "two.bin", mark)
    files = dict.fromkeys(names, "one.safetensors") | {"classifier.bias": "two.bin"}
    change(folder / "model.safetensors.index.json", metadata={}, weight_map=files)


def in_index_outside(folder: Path, mark: Path) -> None:
    in_index(folder, mark)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / "one.safetensors").rename(folder.parent / "one.safetensors")
    files = dict.fromkeys(index["weight_map"], "../one.safetensors")
    change(folder / "model.safetensors.index.json", weight_map=files)


def as_named_weights(folder: Path, mark: Path) -> None:
    put_pickle(folder / "adapter_model.bin", mark)
    change(folder / "config.json", transformers_weights="adapter_model.bin")


def as_adapter(folder: Path, mark: Path) -> None:
    put_pickle(folder / "adapter_model.bin", mark)
    change(
        folder / "adapter_config.json",
        peft_type="LORA",
        base_model_name_or_path=ELSEWHERE,
        target_modules=["query"],
        auto_mapping={"base_model_class": "Model", "parent_library": "evil"},
    )


def as_shards(folder: Path, mark: Path) -> None:
    """Weights of many processes, which come with a pickle that says what is where."""
    shutil.copy(folder / "model.safetensors", folder / "shard-00001-model-00001-of-00001.safetensors")
    (folder / ".metadata").write_bytes(pickle.dumps(Gadget(mark)))


def timm_network(folder: Path, **values: Any) -> None:
    shutil.rmtree(folder)
    TimmWrapperForImageClassification(TimmWrapperConfig(**TIMM)).save_pretrained(folder)
    finish_run(folder)
    change(folder / "preprocessor_config.json", image_processor_type="TimmWrapperImageProcessor")
    change(folder / "config.json", **values)


def as_timm_checkpoint(folder: Path, mark: Path) -> None:
    timm_network(folder, model_args={"checkpoint_path": str(folder / "timm.bin")})
    put_pickle(folder / "timm.bin", mark)


def as_timm_weights(folder: Path, mark: Path) -> None:
    file = str(folder / "timm.bin")
    timm_network(folder, model_args={"pretrained_cfg": {"file": file, "custom_load": True}})
    put_pickle(folder / "timm.bin", mark)


def as_timm_folder(folder: Path, mark: Path) -> None:
    timm_network(folder, architecture=f"local-dir:{folder}")


PLANTS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    # by what it is: how it is planted, and what the sentence says
    "code beside the config": (in_config(auto_map=SOUGHT), "auto_map"),
    "code of another repository": (in_config(auto_map=AUTO_MAP), "auto_map"),
    "code of an unknown type": (in_config(auto_map=SOUGHT, model_type="evil"), "auto_map"),
    "code in the processor": (in_processor(auto_map=SOUGHT), "auto_map"),
    "processor of another repository": (in_processor(auto_map=AUTO_MAP), "auto_map"),
    "code in a nested processor": (in_nested_processor, "auto_map"),
    "code in a vision config": (in_vision_config, "auto_map"),
    "code in another config": (in_other_config, "configuration_files"),
    "code of a tokenizer": (in_tokenizer, "AutoTokenizer"),
    "processor that nobody knows": (in_processor(image_processor_type="EvilImageProcessor"), "EvilImage"),
    "processor that asks another repository": (
        in_processor(
            image_processor_type="OneFormerImageProcessor", class_info_file="a.json", repo_path=ELSEWHERE
        ),
        "class_info_file",
    ),
    "architecture that nobody knows": (in_config(architectures=["EvilForImageClassification"]), "EvilFor"),
    "pipeline of its own": (in_config(custom_pipelines={"x": {"impl": "evil.Model"}}), "custom_pipelines"),
    "quantized": (in_config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantization_config"),
    "kernel": (in_config(attn_implementation="org/kernel"), "org/kernel"),
    "private kernel": (in_config(_attn_implementation="org/kernel@main:attend"), "org/kernel"),
    "kernel by name": (in_config(_attn_implementation_internal="flash_attention_2"), "flash_attention_2"),
    "kernels of parts": (in_config(attn_implementation={"": "sdpa", "x": "org/kernel"}), "org/kernel"),
    "kernels": (in_config(use_kernels=True), "use_kernels"),
    "kernel config": (in_config(kernel_config={"RMSNorm": "org/kernel:Norm"}), "kernel_config"),
    "fusion config": (in_config(fusion_config={"patch_embeddings": True}), "fusion_config"),
    "pickle": (as_pickle, "holds no model.safetensors"),
    "pickle beside safetensors": (as_pickle_beside_other_safetensors, "holds no model.safetensors"),
    "pickle by another name": (as_raw_pickle_named_safetensors, "model.safetensors"),
    "pickle in the index": (in_index, "two.bin"),
    "index that leads outside": (in_index_outside, "one.safetensors"),
    "pickle named by the config": (as_named_weights, "transformers_weights"),
    "adapter": (as_adapter, "adapter_config.json"),
    "shards": (as_shards, "shard-00001"),
    "checkpoint of timm": (as_timm_checkpoint, "checkpoint_path"),
    "weights of timm": (as_timm_weights, "pretrained_cfg"),
    "folder of timm": (as_timm_folder, "local-dir"),
}


# ---- the watch

PLANTED = ("evil.py", ".bin", ".metadata")  # ends of the names of all planted files
_seen: list[str] | None = None


def _listen(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event == "open" and str(args[0]).endswith(PLANTED):
        _seen.append(f"opened {args[0]}")
    if event == "builtins.input":
        _seen.append(f"asked {args[0]}")


sys.addaudithook(_listen)  # for ever, but it listens only inside `watch`


@contextmanager
def watch() -> Iterator[list[str]]:
    """Every planted file that is opened inside, and every question that is asked."""
    global _seen
    _seen = []
    try:
        yield _seen
    finally:
        _seen = None
