"""The one rule for names that users give and that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def check_choice(what: str, found: str, valid: Iterable[str]) -> str:
    """`found` if it is valid, otherwise a ValueError that names the nearest valid one, and all if they are
    few.
    """
    valid = list(valid)
    if found in valid:
        return found
    near = difflib.get_close_matches(str(found).lower().replace("-", "_"), valid, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    if not near or len(valid) <= 20:
        hint += f" Choose one of {', '.join(valid)}." if valid else " There is none."
    raise ValueError(f"Unknown {what} {found!r}.{hint}")
