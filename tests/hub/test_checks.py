"""What is missing for a push is missed before the training, without a client of the Hub."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers.trainer_utils import HubStrategy

from hf_fixastep.hub.checks import check_intended_use, check_license, check_push, check_repo_id


ENOUGH = {"hub_model_id": "org/name", "hub_license": "mit", "hub_strategy": "end"}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"hub_license": None}, "hub_license is not given, and a card cannot know it"),
        ({"hub_license": "My Own"}, "hub_license is 'My Own', but expected a short name"),
        ({"hub_model_id": None}, "hub_model_id is not given: say where on the Hub"),
        ({"hub_model_id": "../../etc"}, r"hub_model_id is '\.\./\.\./etc', but the Hub takes names"),
        ({"hub_strategy": "checkpoint"}, "hub_strategy is checkpoint, which would push the optimizer's"),
        ({"hub_strategy": HubStrategy.ALL_CHECKPOINTS}, "hub_strategy is all_checkpoints, which would"),
    ],
)
def test_a_push_that_cannot_work_is_refused(settings, sentence):
    for strategy in ("end", HubStrategy.EVERY_SAVE):
        check_push(SimpleNamespace(**ENOUGH | {"hub_strategy": strategy}))
    with pytest.raises(ValueError, match=f"^{sentence}"):
        check_push(SimpleNamespace(**ENOUGH | settings))


@pytest.mark.parametrize("name", ["org/name", "name", "a.b/c-d_e"])
def test_ordinary_names_are_taken(name):
    assert check_repo_id(name) == name


@pytest.mark.parametrize("text", [None, "", "MIT License", "mit\nother", "x" * 100, "<b>"])
def test_a_licence_has_to_be_a_short_name(text):
    with pytest.raises(ValueError, match=r"^hub_license is ") as refused:
        check_license(text)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("nothing", [None, "", " \n"])
def test_medical_data_need_an_intended_use(nothing):
    check_intended_use(False, nothing)
    check_intended_use(True, "Research on views.")
    with pytest.raises(ValueError, match="hub_intended_use is not given, and these data are medical"):
        check_intended_use(True, nothing)
