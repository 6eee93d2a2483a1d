"""Every promise of SECURITY.md names tests that exist and are run with this suite."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import is_marked


ROOT = Path(__file__).parents[2]
PROMISED = (ROOT / "SECURITY.md").read_text().split("## What is promised")[1].split("## What is not")[0]
PROMISES = PROMISED.split("\n- ")[1:]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda text: text.split("**")[1])
def test_a_promise_names_its_tests(promise: str) -> None:
    named = re.findall(r"`(tests/[a-z_/0-9]+\.py)`", promise)
    assert named
    assert [path for path in named if "def test_" not in (ROOT / path).read_text()] == []
    assert [path for path in named if not is_marked(ROOT / path, "attack")] == []


@pytest.mark.parametrize("subject", ["No code", "no token", "absolute paths", "memory", "one host"])
def test_it_is_promised(subject: str) -> None:
    assert any(subject in " ".join(promise.split()) for promise in PROMISES)
