"""Names that users give and that do not exist, and names that a terminal would obey."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def harmless(text: str) -> str:
    """Text for a terminal in which names of anybody may be: control characters are written as `\\x1b`."""
    return re.sub(r"[^\t\n -~\xa0-\U0010ffff]", lambda found: f"\\x{ord(found[0]):02x}", text)


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
