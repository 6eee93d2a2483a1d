"""What the losses and procedures state about themselves, by their names."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from hf_fixastep.losses import LOSSES
from hf_fixastep.losses.base import Method
from hf_fixastep.losses.presets import SHARED
from hf_fixastep.procedures import PROCEDURES


ALL: dict[str, type[Method]] = {**LOSSES, **PROCEDURES}
METHODS = {name: kind.title for name, kind in ALL.items()}  # as tables and cards call them
CITATIONS = {name: inspect.cleandoc(kind.citation) for name, kind in ALL.items() if kind.citation}
BASELINES = {"probe": "probe", "neighbours": "k nearest neighbours"}  # of labeled images alone
FITTED = {**BASELINES, "shaped_probe": "shaped probe"}  # to frozen features, not trained
RIVALS = tuple(name for name, kind in ALL.items() if kind.rival)


def preset(name: str, loss: str, procedure: str | None = None) -> dict[str, Any]:
    """All settings of a preset for one loss; the other presets state only where they depart from `paper`.

    What the procedure states goes before what the loss states, and that before what all share. But what a
    method states for `paper` is about training from scratch, so all that `pretrained` states goes before it.
    """
    stated = [SHARED, *(ALL[each].settings for each in (loss, procedure) if each in ALL)]
    layers = [(each, layer) for each in stated for layer in ("paper", name)]
    if name == "pretrained":
        layers.sort(key=lambda pair: pair[1] == name)
    settings: dict[str, Any] = {}
    for each, layer in layers:
        settings |= each.get(layer, {})
    return copy.deepcopy(settings)
