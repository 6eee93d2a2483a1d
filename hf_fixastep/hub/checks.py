"""What must be known before a push, checked without a client of the Hub."""

from __future__ import annotations

import re
from typing import Any


def check_push(args: Any) -> None:
    """Refuse settings with which a push at the end could not work, or would push the optimizer's state.

    Args:
        args: the settings of a training, with those of transformers and our `hub_license`.
    """
    check_repo_id(args.hub_model_id)
    check_license(args.hub_license)
    strategy = getattr(args.hub_strategy, "value", args.hub_strategy)
    if strategy not in ("end", "every_save"):
        raise ValueError(
            f"hub_strategy is {strategy}, which would push the optimizer's state; use end or every_save."
        )


def check_repo_id(repo_id: str | None, setting: str = "hub_model_id") -> str:
    """The name, if the Hub would take it for a repository."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if repo_id is None:
        raise ValueError(f"{setting} is not given: say where on the Hub, such as {setting} org/name.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise ValueError(
            f"{setting} is {shown(repo_id)}, but the Hub takes names such as org/name: letters, digits, "
            "-, _ and ., at most 96 of them."
        ) from None
    return repo_id


def check_license(license: str | None, setting: str = "hub_license") -> str:
    """The licence, if it looks like one of the Hub's short names."""
    if license is None:
        raise ValueError(
            f"{setting} is not given, and a card cannot know it: state the licence, such as {setting} mit or "
            "apache-2.0; other, if it has no short name."
        )
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,63}", license):
        raise ValueError(
            f"{setting} is {shown(license)}, but expected a short name of the Hub such as mit, apache-2.0 or "
            "other."
        )
    return license


def check_intended_use(medical: bool, intended_use: str | None) -> None:
    """Models of medical data are not pushed without a sentence about their use."""
    if medical and not (intended_use or "").strip():
        raise ValueError(
            "hub_intended_use is not given, and these data are medical: say in a sentence what the model is "
            "for and who may use it."
        )


def shown(text: Any) -> str:
    """Anything that users give, for a terminal: one line of limited length, without control characters."""
    text = str(text)
    return repr(text if len(text) <= 100 else f"{text[:100]}…")
