"""No folder of this machine is published, however a setting was written."""

from __future__ import annotations

from typing import Any

import pytest

from hf_fixastep.hub.texts import shared
from hf_fixastep.runs.arguments import DataArguments, parse


FOLDED = {"labeled": "l", "unlabeled": "u"}
BLOCK = "labeled: /home/bob/l\nunlabeled: /home/bob/u"
WRITTEN = {
    "flow": "{labeled: /home/bob/l, unlabeled: /home/bob/u}",
    "block": BLOCK,
    "comment": f"# mine\n{BLOCK}",
    "comment before flow": "# mine\n{labeled: /home/bob/l, unlabeled: /home/bob/u}",
    "document": "--- {labeled: /home/bob/l, unlabeled: /home/bob/u}",
    "document of blocks": f"---\n{BLOCK}\n...",
    "directive": f"%YAML 1.1\n---\n{BLOCK}",
    "tag": "!!map {labeled: /home/bob/l, unlabeled: /home/bob/u}",
    "tag before a block": f"!!map\n{BLOCK}",
    "anchor": "&a {labeled: /home/bob/l, unlabeled: /home/bob/u}",
    "quotes": '{"labeled": "/home/bob/l", "unlabeled": "/home/bob/u"}',
    "folded text": "labeled: >-\n  /home/bob/l\nunlabeled: |-\n  /home/bob/u",
    "spaces": "   {labeled: /home/bob/l, unlabeled: /home/bob/u}",
}


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
def test_a_mapping_is_stored_parsed(text: str) -> None:
    *_, given = parse((DataArguments,), ["--dataset", "folders", "--dataset_kwargs", text])
    assert given["dataset_kwargs"] == {"labeled": "/home/bob/l", "unlabeled": "/home/bob/u"}


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN)
def test_of_a_mapping_that_is_text_the_parsed_values_are_cut(text: str) -> None:
    """As a recipe of an older run may hold it."""
    assert shared({"dataset_kwargs": text}) == {"dataset_kwargs": FOLDED}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"dataset_kwargs": {"deep": [{"er": ["/home/bob/l"]}]}},
            {"dataset_kwargs": {"deep": [{"er": ["l"]}]}},
        ),
        ({"dataset_kwargs": {"inner_kwargs": BLOCK}}, {"dataset_kwargs": {"inner_kwargs": FOLDED}}),
        ({"dataset_kwargs": "labeled: '{a: /home/bob/l}'"}, {"dataset_kwargs": {"labeled": {"a": "l"}}}),
        ({"/home/bob/l": 1}, {"l": 1}),
        ({"fsdp_config": "/home/bob/fsdp.json"}, {"fsdp_config": "fsdp.json"}),
        ("{a: /home/bob smith/l, a: /home/bob smith/u}", {"a": "u"}),
        ("!mine {labeled: /home/bob/l}", "!mine {labeled: l}"),
        ("momentum=0.9,file=/home/bob/l", "momentum=0.9,file=l"),
        ("- /home/bob/l\n- /home/bob/u", ["l", "u"]),
        ("seen in C:\\Users\\bob\\l and ~/bob/u", "seen in l and u"),
        ("from file:///home/bob/l", "from l"),
        # what is no path stays
        ("https://host/bobs/page and 1/255, and/or", "https://host/bobs/page and 1/255, and/or"),
        ({"verdict": "Chosen: the probe"}, {"verdict": "Chosen: the probe"}),
        (
            {"learning_rate": 0.1, "optim_args": "momentum=0.9"},
            {"learning_rate": 0.1, "optim_args": "momentum=0.9"},
        ),
    ],
)
def test_paths_are_cut_wherever_they_are(value: Any, expected: Any) -> None:
    assert shared(value) == expected
