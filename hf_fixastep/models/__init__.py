"""The networks that Hugging Face does not have; imported when first asked for, as torch comes with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from hf_fixastep.models.configuration_wide_resnet import WideResNetConfig
    from hf_fixastep.models.modeling_wide_resnet import WideResNetForImageClassification


__all__ = ["WideResNetConfig", "WideResNetForImageClassification"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_fixastep.models import configuration_wide_resnet, modeling_wide_resnet

    home = configuration_wide_resnet if name == "WideResNetConfig" else modeling_wide_resnet
    return getattr(home, name)
