"""Files that are whole or not there, and what they hold."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def write_atomically(path: str | Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` at the end; a process that is killed before leaves
    what was there.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hex digits."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()
