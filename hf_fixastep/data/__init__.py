"""Images from the disk to the training step."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from hf_fixastep.data.base import folder_report
    from hf_fixastep.data.registry import DATASETS, export_dataset, list_datasets, load_dataset

__all__ = ["DATASETS", "export_dataset", "folder_report", "list_datasets", "load_dataset"]


def __getattr__(name: str) -> Any:
    """Import what is known by these names when it is asked for: a training needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "base" if name == "folder_report" else "registry"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
