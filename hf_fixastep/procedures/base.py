"""What every procedure is, without the trainer that it works with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_fixastep.losses.base import Method


if TYPE_CHECKING:
    from hf_fixastep.procedures.rounds import Round, Rounds


class Procedure(Method):
    """Base of all procedures: arguments are checked at construction, the work is in `__call__`."""

    def __call__(self, rounds: Rounds) -> Round:
        """Train round by round, and return the one whose model is the outcome."""
        raise NotImplementedError
