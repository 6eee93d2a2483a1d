"""Train a part of a model: its head and norm layers, or low-rank changes (LoRA) of its linear layers.

A model with LoRA has peft's layers in it while it is trained. What is saved is always the plain model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from hf_fixastep.step.forwards import BATCH_NORM, classification_head


INSTANCE_NORM = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (*BATCH_NORM, *INSTANCE_NORM, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
ADAPTER = "fixastep"  # peft's name for the layers it adds


def name_classes(model: Any, names: Sequence[str]) -> None:
    """Give a model the names of its classes, if it has as many."""
    if model.config.num_labels != len(names):
        raise ValueError(
            f"The model has {model.config.num_labels} outputs, but the labeled data have {len(names)} "
            f"classes ({', '.join(names[:10])}). Build the model with num_labels={len(names)}."
        )
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: number for number, name in enumerate(names)}
    if hasattr(model.config, "label_names"):  # timm's, which would be read in place of the other two
        model.config.label_names = list(names)


def limit_training(model: nn.Module, trainable: str, num_labels: int, rank: int = 8) -> None:
    """Freeze what is not to be trained.

    Args:
        trainable: all, head, head_and_norms, or lora (with the head).
        rank: of LoRA; its scale is 2.
    """
    if trainable == "all":
        return
    head = classification_head(model, num_labels)
    model.requires_grad_(False)
    if trainable == "lora":
        add_lora(model, head, rank)
    elif trainable == "head_and_norms":
        for module in model.modules():
            if isinstance(module, NORMS):
                module.requires_grad_(True)
    head.requires_grad_(True)


def add_lora(model: nn.Module, head: nn.Linear, rank: int) -> None:
    """Put low-rank layers around all linear ones but the head."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError(
            "trainable is lora, which needs peft; install it with  pip install hf_fixastep[peft]  or choose "
            "head_and_norms."
        ) from error
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    if not names:
        raise ValueError(
            f"trainable is lora, but {type(model).__name__} has no linear layer besides its head; choose "
            "head_and_norms or all."
        )
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)


def plain_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of a model with LoRA as that of a plain one, changes added in."""
    added = {name: value for name, value in state.items() if is_lora(name)}
    plain = {plain_name(name): value for name, value in state.items() if not is_lora(name)}
    for name, module in model.named_modules():
        if f"{name}.lora_A.{ADAPTER}.weight" in added:
            down, up = (added[f"{name}.lora_{side}.{ADAPTER}.weight"] for side in "AB")
            plain[f"{name}.weight"] = plain[f"{name}.weight"] + module.scaling[ADAPTER] * up @ down
    return plain


def with_lora(state: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of a model with LoRA that changes nothing yet: a plain one with the low-rank layers of
    `state`.
    """
    return {
        name: (value * 0 if ".lora_B." in name else value) if is_lora(name) else plain[plain_name(name)]
        for name, value in state.items()
    }


def is_lora(name: str) -> bool:
    return ".lora_" in name


def plain_name(name: str) -> str:
    return name.replace(".base_layer.", ".")
