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
BASELINES = {"probe": "probe", "neighbours": "k nearest neighbours"}  # fitted to frozen features, not trained
RIVALS = tuple(name for name, kind in ALL.items() if kind.rival)


def preset(name: str, loss: str, procedure: str | None = None) -> dict[str, Any]:
    """All settings of a preset for one loss; `upstream` states only where it departs from `paper`.

    What the procedure states goes before what the loss states, and that before what all share.
    """
    settings: dict[str, Any] = {}
    stated = [ALL[each].settings for each in (loss, procedure) if each in ALL]
    for layers in (SHARED, *stated):
        for layer in dict.fromkeys(("paper", name)):
            settings |= layers.get(layer, {})
    return copy.deepcopy(settings)
