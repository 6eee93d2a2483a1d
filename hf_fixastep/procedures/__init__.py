"""Methods that are several trainings, by name. A new one is a file here and a line in `PROCEDURES`."""

from __future__ import annotations

import inspect
from typing import Any

from hf_fixastep.checks import check_choice
from hf_fixastep.procedures.base import Procedure
from hf_fixastep.procedures.curriculum_labeling import CurriculumLabeling
from hf_fixastep.procedures.safe_student import SafeStudent


PROCEDURES: dict[str, type[Procedure]] = {kind.name: kind for kind in (CurriculumLabeling, SafeStudent)}


def get_procedure(name: str, **kwargs: Any) -> Procedure:
    """A procedure by its name in `PROCEDURES`, with its own arguments."""
    kind = PROCEDURES[check_choice("procedure", name, PROCEDURES)]
    for argument in kwargs:
        check_choice(f"argument of {name}", argument, inspect.signature(kind).parameters)
    return kind(**kwargs)
