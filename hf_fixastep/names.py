"""Names of the methods in prose."""

from __future__ import annotations


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
