"""What several processes do together."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object


T = TypeVar("T")


def processes(**settings: Any) -> PartialState:
    """This process among those that a launcher started; `settings` are for making the group of them."""
    # Accelerate makes no group of processes on CPUs unless it is told that these are meant.
    use_cpu = os.environ.get("ACCELERATE_USE_CPU") == "true" or not torch.cuda.is_available()
    return PartialState(use_cpu, **settings)


def together(action: Callable[[], T], *, first_only: bool = False) -> T:
    """Run an action on all processes, or on the first one alone, and return what it gave there.

    Nobody goes on before all have done their part. An OSError or ValueError of one process is raised by all
    of them, for the others would wait for it in vain.
    """
    state = processes()
    if state.num_processes == 1:
        return action()
    found: Any = None
    error: OSError | ValueError | None = None
    try:
        if state.is_main_process or not first_only:
            found = action()
    except (OSError, ValueError) as caught:
        # A new one: some cannot be sent to other processes.
        error = (OSError if isinstance(caught, OSError) else ValueError)(str(caught))
    told = gather_object([(found if state.is_main_process else None, error)])
    for _, error in told:
        if error is not None:
            raise error
    return told[0][0]
