"""What a report over machines calls its runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_fixastep.runs.sites import method_of


@pytest.mark.parametrize(
    ("facts", "title"),
    [
        ({"loss": "mean_teacher", "gate": "per_example"}, "Mean Teacher, gate per_example"),
        ({"loss": "mean_teacher", "gate": "off"}, "Mean Teacher"),
        ({"loss": "supervised", "gate": "drop"}, "labeled-only"),
        ({"loss": "probe", "gate": "drop"}, "probe"),
    ],
)
def test_only_methods_that_see_a_pile_have_a_gate_in_their_name(
    facts: dict[str, str], title: str, tmp_path: Path
) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps(facts))
    assert method_of(tmp_path) == title
