"""The base losses, by name. A new one is a file here and a line in `LOSSES`."""

from __future__ import annotations

import inspect
from typing import Any

from hf_fixastep.checks import check_choice
from hf_fixastep.losses.base import SemiSupervisedLoss
from hf_fixastep.losses.ds3l import DS3L
from hf_fixastep.losses.fixmatch import FixMatch
from hf_fixastep.losses.flexmatch import FlexMatch
from hf_fixastep.losses.mean_teacher import MeanTeacher
from hf_fixastep.losses.mixmatch import MixMatch
from hf_fixastep.losses.mtcf import MTCF
from hf_fixastep.losses.openmatch import OpenMatch
from hf_fixastep.losses.pi_model import PiModel
from hf_fixastep.losses.pseudo_label import PseudoLabel
from hf_fixastep.losses.softmatch import SoftMatch
from hf_fixastep.losses.supervised import Supervised
from hf_fixastep.losses.toor import TOOR
from hf_fixastep.losses.uasd import UASD
from hf_fixastep.losses.vat import VAT


LOSSES: dict[str, type[SemiSupervisedLoss]] = {
    kind.name: kind
    for kind in (
        Supervised,
        PiModel,
        MeanTeacher,
        PseudoLabel,
        VAT,
        MixMatch,
        FixMatch,
        FlexMatch,
        SoftMatch,
        UASD,
        DS3L,
        MTCF,
        OpenMatch,
        TOOR,
    )
}


def get_loss(name: str, **kwargs: Any) -> SemiSupervisedLoss:
    """A loss by its name in `LOSSES`, with its own arguments."""
    kind = LOSSES[check_choice("loss", name, LOSSES)]
    parameters = inspect.signature(kind).parameters.values()
    for argument in kwargs:
        check_choice(
            f"argument of {name}", argument, [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        )
    return kind(**kwargs)
