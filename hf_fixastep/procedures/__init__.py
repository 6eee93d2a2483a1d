"""Methods that are several trainings, by name. A new one is a file here and a line in `PROCEDURES`."""

from __future__ import annotations

import inspect
from typing import Any

from hf_fixastep.checks import check_choice
from hf_fixastep.procedures.curriculum_labeling import CurriculumLabeling
from hf_fixastep.procedures.rounds import Procedure, run_procedure
from hf_fixastep.procedures.safe_student import SafeStudent


__all__ = ["PROCEDURES", "CurriculumLabeling", "Procedure", "SafeStudent", "get_procedure", "run_procedure"]

PROCEDURES: dict[str, type[Procedure]] = {
    "curriculum_labeling": CurriculumLabeling,
    "safe_student": SafeStudent,
}


def get_procedure(name: str, **kwargs: Any) -> Procedure:
    """A procedure by its name in `PROCEDURES`, with its own arguments."""
    kind = PROCEDURES[check_choice("procedure", name, PROCEDURES)]
    for argument in kwargs:
        check_choice(f"argument of {name}", argument, inspect.signature(kind).parameters)
    return kind(**kwargs)
