"""fixastep train: train a classifier from a few labels and a pile of unlabeled images.

fixastep train --config digits/quickstart [--key value ...]
"""

from __future__ import annotations

from hf_fixastep.runs.training import main


__all__ = ["main"]
