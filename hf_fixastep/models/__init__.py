"""The networks that Hugging Face does not have."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForImageClassification

from hf_fixastep.models.configuration_wide_resnet import WideResNetConfig
from hf_fixastep.models.modeling_wide_resnet import WideResNetForImageClassification


__all__ = ["WideResNetConfig", "WideResNetForImageClassification", "register"]


def register() -> None:
    """Make the Auto classes know our networks, so that a saved folder loads without remote code."""
    AutoConfig.register(WideResNetConfig.model_type, WideResNetConfig, exist_ok=True)
    AutoModelForImageClassification.register(
        WideResNetConfig, WideResNetForImageClassification, exist_ok=True
    )
