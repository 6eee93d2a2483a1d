"""Image classifiers from a few labels and a large, uncurated pile of unlabeled images."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_fixastep._compat.registration import register_networks


if TYPE_CHECKING:
    from hf_fixastep.config import FixAStepConfig
    from hf_fixastep.data.images import Images
    from hf_fixastep.data.registry import export_dataset, list_datasets, load_dataset
    from hf_fixastep.data.views import Views
    from hf_fixastep.features.fit import fit
    from hf_fixastep.losses import LOSSES, get_loss
    from hf_fixastep.losses.base import Losses, SemiSupervisedLoss
    from hf_fixastep.models import WideResNetConfig, WideResNetForImageClassification
    from hf_fixastep.procedures import PROCEDURES, get_procedure
    from hf_fixastep.procedures.rounds import run_procedure
    from hf_fixastep.step.gate import GradientSlots
    from hf_fixastep.trainer import FixAStepTrainer

# Where each public name lives; imported when first asked for, so that `import hf_fixastep` stays quick.
_HOMES = {
    "FixAStepConfig": "config",
    "FixAStepTrainer": "trainer",
    "GradientSlots": "step.gate",
    "Images": "data.images",
    "LOSSES": "losses",
    "Losses": "losses.base",
    "PROCEDURES": "procedures",
    "SemiSupervisedLoss": "losses.base",
    "Views": "data.views",
    "WideResNetConfig": "models",
    "WideResNetForImageClassification": "models",
    "export_dataset": "data.registry",
    "fit": "features.fit",
    "get_loss": "losses",
    "get_procedure": "procedures",
    "list_datasets": "data.registry",
    "load_dataset": "data.registry",
    "run_procedure": "procedures.rounds",
}

__all__ = [
    "LOSSES",
    "PROCEDURES",
    "FixAStepConfig",
    "FixAStepTrainer",
    "GradientSlots",
    "Images",
    "Losses",
    "SemiSupervisedLoss",
    "Views",
    "WideResNetConfig",
    "WideResNetForImageClassification",
    "export_dataset",
    "fit",
    "get_loss",
    "get_procedure",
    "list_datasets",
    "load_dataset",
    "run_procedure",
]

register_networks()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
