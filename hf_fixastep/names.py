"""Names: of the methods in prose, and the one rule for those that users give and that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


METHODS = {
    "supervised": "labeled images alone",
    "pi_model": "Pi-model",
    "mean_teacher": "Mean Teacher",
    "pseudo_label": "Pseudo-label",
    "vat": "VAT",
    "mixmatch": "MixMatch",
    "fixmatch": "FixMatch",
    "uasd": "UASD",
    "ds3l": "DS3L",
    "mtcf": "MTCF",
    "openmatch": "OpenMatch",
    "toor": "TOOR",
    "curriculum_labeling": "Curriculum Labeling",
    "safe_student": "Safe-Student",
}


def choose(what: str, found: str, valid: Iterable[str]) -> str:
    """`found` if it is valid, otherwise a ValueError that names the nearest valid one, and all if they are few."""
    valid = list(valid)
    if found in valid:
        return found
    near = difflib.get_close_matches(str(found).lower().replace("-", "_"), valid, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    if not near or len(valid) <= 20:
        hint += f" Choose one of {', '.join(valid)}." if valid else " There is none."
    raise ValueError(f"Unknown {what} {found!r}.{hint}")
