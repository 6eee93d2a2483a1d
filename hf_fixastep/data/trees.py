"""Files below a folder or in zip files, which are read in place.

Apart from the builders, because `datasets` replaces `open` and `os.path` in modules that hold one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path

from hf_fixastep.data.files import Source, UnreadableImage, is_hidden, one_line, printable, reason, walk


LIMIT = 2**29  # bytes of one file, packed or not; the largest of the known sets have a tenth of it


class Tree:
    """Files below a folder, where a zip file stands for the folder that it would be extracted to.

    Names are relative to the folder, with slashes. Hidden files are passed over. Nothing is extracted.

    Args:
        root: a folder, or one file.
    """

    def __init__(self, root: Source) -> None:
        self.root = Path(root).expanduser().absolute()
        if not self.root.exists():
            raise FileNotFoundError(
                f"There is no folder {printable(str(self.root))}: give the one of your download."
            )
        self._files: list[str] = []
        self._archives: list[str] = []
        digest = hashlib.sha256(os.fsencode(self.root))
        found: list[tuple[str, os.stat_result | None]] = [(self.root.name, self.root.stat())]
        if self.root.is_dir():
            found = [(name.replace(os.sep, "/"), state) for name, state in walk(self.root)]
        else:
            self.root = self.root.parent
        for name, state in found:
            if not is_below_hidden(name):
                (self._archives if name.lower().endswith(".zip") else self._files).append(name)
                version = state and (state.st_size, state.st_mtime_ns)
                digest.update(f"{name}\0{version}\n".encode(errors="surrogateescape"))
        self.fingerprint = digest.hexdigest()  # changes when a file is added, removed or written

    @functools.cached_property
    def _places(self) -> dict[str, tuple[zipfile.ZipFile, str] | None]:
        """Archive and name in it of every file, None for files on the disk, which come first."""
        places: dict[str, tuple[zipfile.ZipFile, str] | None] = dict.fromkeys(self._files)
        for archive in self._archives:
            try:
                opened = zipfile.ZipFile(self.root / archive)
            except (zipfile.BadZipFile, OSError) as error:
                raise ValueError(
                    f"{printable(str(self.root / archive))} cannot be read as a zip file "
                    f"({one_line(error)}): download it again, or remove it."
                ) from error
            for member in opened.namelist():
                name = member.replace("\\", "/").removeprefix("./")  # as some programs write them
                if not name.endswith("/") and not is_below_hidden(name):
                    places.setdefault(f"{archive[: -len('.zip')]}/{name}", (opened, member))
        return places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def find(self, *endings: str) -> str | None:
        """The first file whose last parts are one of these."""
        wanted = tuple(f"/{ending}" for ending in endings)
        return next((name for name in self if f"/{name}".endswith(wanted)), None)

    def read(self, name: str) -> bytes:
        """The content; whatever is wrong with the file becomes an `UnreadableImage`."""
        path = str(self.root / name)
        try:
            place = self._places[name]
            if place is None and not stat.S_ISREG(os.stat(path).st_mode):
                raise UnreadableImage("it is not a file")  # reading a pipe would never end
            size = os.path.getsize(path) if place is None else place[0].getinfo(place[1]).file_size
            if size > LIMIT:
                raise UnreadableImage(f"it has {size:,} bytes, and the limit is {LIMIT:,}")
            return Path(path).read_bytes() if place is None else place[0].read(place[1])
        except UnreadableImage:
            raise
        except KeyError as error:
            raise UnreadableImage("it does not exist") from error
        except Exception as error:  # zip files are damaged, encrypted or packed in many ways
            raise UnreadableImage(reason(path, error)) from error


def is_below_hidden(name: str) -> bool:
    return any(is_hidden(part) for part in name.split("/"))
