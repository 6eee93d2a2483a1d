"""Private names of huggingface_hub."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
from huggingface_hub.utils import _http


def client_factory() -> Callable[[], httpx2.Client]:
    """What makes the clients now: the user's own factory, or the default.

    huggingface_hub 2.4 has `set_client_factory` but nothing to read it back with, and a factory that a user
    has set, for a proxy or certificates, must work inside our limits and be back after them. It can go when
    there is a public getter.
    """
    return _http._GLOBAL_CLIENT_FACTORY
