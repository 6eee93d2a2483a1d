"""Every promise of SECURITY.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
PROMISED = (ROOT / "SECURITY.md").read_text().split("## What is promised")[1].split("## What is not")[0]
PROMISES = PROMISED.split("\n- ")[1:]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda text: text.split("**")[1])
def test_a_promise_names_its_tests(promise: str) -> None:
    named = re.findall(r"`(tests/[a-z_/0-9]+\.py)`", promise)
    assert named
    assert [path for path in named if "def test_" not in (ROOT / path).read_text()] == []
