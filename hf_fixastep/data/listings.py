"""Which files are labeled and which are not, with their classes and groups: from folders or tables.

Apart from the builders, because `datasets` replaces `open`, `glob` and `os.path` in modules that hold one.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from hf_fixastep.data.files import (
    SUFFIXES,
    Source,
    check_unique,
    is_hidden,
    one_line,
    printable,
    read_column,
    state_of,
    walk,
)


TABLES = (".csv", ".parquet")


@dataclass
class Listing:
    """The files of one side, found but not opened.

    Args:
        root: the folder that names are relative to.
        names: the files.
        labels: the class of each file, on labeled sides.
        groups: the group of each file, where there are groups.
        passed_over: how many files are none of these, by reason.
    """

    root: str
    names: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.names)

    def path(self, row: int) -> str:
        return os.path.join(self.root, self.names[row])

    def shown(self, row: int) -> str:
        return printable(self.names[row])

    @property
    def outside(self) -> int:
        """How many files lie outside the root; only tables can lead there."""
        return sum(os.path.isabs(name) or name.startswith(os.pardir + os.sep) for name in self.names)

    def select(self, rows: Sequence[int] | np.ndarray) -> Listing:
        names, labels, groups = (
            [values[row] for row in rows] if values else []
            for values in (self.names, self.labels, self.groups)
        )
        return Listing(self.root, names, labels, groups)

    def fingerprint(self) -> bytes:
        """Changes when a file is added, removed or written, or its class or group changes."""
        content = hashlib.sha256(os.fsencode(os.path.abspath(self.root)))
        for name in self.names:
            found = state_of(os.path.join(self.root, name))
            state = f"{found.st_size} {found.st_mtime_ns}" if found else ""  # "" cannot be read
            content.update(f"{name}\0{state}\n".encode(errors="surrogateescape"))
        content.update(repr((self.labels, self.groups)).encode())
        return content.digest()


def list_sides(
    labeled: Any, unlabeled: Any, validation: Any = None, test: Any = None, group: str | None = None
) -> dict[str, Listing]:
    """The files of every side that is given."""
    given = {"labeled": labeled, "unlabeled": unlabeled, "validation": validation, "test": test}
    if labeled is None or unlabeled is None:
        missing = "labeled" if labeled is None else "unlabeled"
        raise ValueError(
            f"{missing} is not given; expected labeled= and unlabeled=, each a folder or a table of images."
        )
    check_apart(given)
    listings = {}
    for side, source in given.items():
        if source is not None:
            find = list_unlabeled if side == "unlabeled" else list_labeled
            listings[side] = find(side, source, group)
            if not len(listings[side]):
                raise ValueError(
                    f"{side} is {source}, where no image was found; passed over: "
                    f"{passed_over(listings[side])}."
                )
    return listings


def check_apart(given: Mapping[str, Any]) -> None:
    """No two sides may be the same folder."""
    seen: dict[str, str] = {}
    for side, source in given.items():
        if isinstance(source, (str, os.PathLike)):
            path = os.path.realpath(os.path.expanduser(source))
            if path in seen:
                raise ValueError(
                    f"{seen[path]} and {side} are both {source}, but expected a folder of its own for each."
                )
            seen[path] = side


def passed_over(listing: Listing) -> str:
    return (
        ", ".join(f"{count:,} {reason}" for reason, count in sorted(listing.passed_over.items())) or "nothing"
    )


def list_labeled(setting: str, source: Source, group: str | None) -> Listing:
    """A folder with one sub-folder per class, or a table with the columns file_name and label.

    Args:
        setting: what the source is the value of, for messages.
        group: a column of the table, or a regular expression for the file names.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise ValueError(
            f"{setting} is {source!r}, but expected one folder, or one {' or '.join(TABLES)} table."
        )
    path = os.path.expanduser(os.fspath(source))
    if is_table(path):
        return read_table(path, group, labeled=True)
    if not os.path.isdir(path):
        found = "no folder" if os.path.exists(path) else "missing"
        raise ValueError(
            f"{setting} is {printable(path)}, which is {found}; expected a folder with one sub-folder of "
            f"images per class, or a {' or '.join(TABLES)} table."
        )
    listing = list_classes(path)
    listing.groups = match_groups(listing, group)
    return listing


def list_classes(path: str) -> Listing:
    """The images in the sub-folders of a folder, each of them a class."""
    listing = list_images(path)
    stray = [name for name in listing.names if os.sep not in name]
    if stray:
        raise ValueError(
            f"Images such as {printable(stray[0])} lie directly in {printable(path)}, but expected one "
            "sub-folder per class: move them into the folders of their classes."
        )
    listing.labels = [printable(name.split(os.sep)[0]) for name in listing.names]
    folders = {
        printable(entry.name) for entry in os.scandir(path) if entry.is_dir() and not is_hidden(entry.name)
    }
    if folders - set(listing.labels):
        empty = min(folders - set(listing.labels))
        raise ValueError(f"The class folder {empty} in {printable(path)} has no image: fill or remove it.")
    return listing


def list_unlabeled(setting: str, source: Source | Sequence[Source], group: str | None) -> Listing:
    """Folders of any depth, globs, or tables with the column file_name; one or several."""
    sources: list[Any] = list(source) if isinstance(source, (list, tuple)) else [source]
    if not sources or not all(isinstance(one, (str, os.PathLike)) for one in sources):
        raise ValueError(
            f"{setting} is {source!r}, but expected a folder, a glob or a table, or a list of them."
        )
    parts = [list_one(setting, os.path.expanduser(os.fspath(one)), group) for one in sources]
    listing = parts[0] if len(parts) == 1 else join(parts)
    if len(set(listing.names)) < len(listing):
        first = {name: row for row, name in reversed(list(enumerate(listing.names)))}
        counts = listing.passed_over + Counter({"given twice": len(listing) - len(first)})
        listing = listing.select(sorted(first.values()))
        listing.passed_over = counts
    return listing


def list_one(setting: str, path: str, group: str | None) -> Listing:
    if is_table(path):
        return read_table(path, group, labeled=False)
    if os.path.isdir(path):
        listing = list_images(path)
    elif glob.has_magic(path):
        listing = expand(path)
    else:
        found = "no folder" if os.path.exists(path) else "missing"
        raise ValueError(
            f"{setting} is {printable(path)}, which is {found}; expected a folder, a glob such as "
            f"'pile/**/*.png', or a {' or '.join(TABLES)} table."
        )
    listing.groups = match_optional_groups(listing, group)
    return listing


def is_table(path: str) -> bool:
    return path.lower().endswith(TABLES) and os.path.isfile(path)


def list_images(folder: str) -> Listing:
    """Image files at any depth; a folder that cannot be opened counts as an image that cannot be read."""
    listing = Listing(folder)
    for name, state in walk(folder, listing.passed_over):
        if state is not None and stat.S_ISDIR(state.st_mode):
            listing.names.append(name)
        else:
            add_if_image(listing, name)
    return listing


def add_if_image(listing: Listing, name: str) -> None:
    if is_hidden(os.path.basename(name)):
        listing.passed_over["hidden"] += 1
    elif name.lower().endswith(SUFFIXES):
        listing.names.append(name)
    else:
        listing.passed_over["not an image"] += 1


def expand(pattern: str) -> Listing:
    """Image files that match a glob, and those in folders that match, unless it goes to every depth."""
    root = pattern
    while glob.has_magic(root):
        root = os.path.dirname(root)
    listing = Listing(root or os.curdir)
    for match in sorted(
        glob.iglob(pattern[len(root) :].lstrip(os.sep), root_dir=root or None, recursive=True)
    ):
        if not os.path.isdir(os.path.join(listing.root, match)):
            add_if_image(listing, match)
        elif "**" not in pattern:
            inside = list_images(os.path.join(listing.root, match))
            listing.names += [os.path.join(match, name) for name in inside.names]
            listing.passed_over += inside.passed_over
    return listing


def join(parts: Sequence[Listing]) -> Listing:
    """One listing with names relative to the folder that the parts have in common."""
    roots = [os.path.abspath(part.root) for part in parts]
    whole = Listing(os.path.commonpath(roots))
    for part, root in zip(parts, roots, strict=True):
        below = os.path.relpath(root, whole.root)
        whole.names += [os.path.normpath(os.path.join(below, name)) for name in part.names]
        whole.passed_over += part.passed_over
    if all(part.groups for part in parts):
        whole.groups = [group for part in parts for group in part.groups]
    return whole


def read_table(path: str, group: str | None, labeled: bool) -> Listing:
    """The files that a table names; relative names start at its folder, others may lead anywhere."""
    try:
        if path.lower().endswith(".csv"):  # as text, and NA is a word like any other
            options: dict[str, Any] = {"encoding": "utf-8-sig", "encoding_errors": "surrogateescape"}
            table = pd.read_csv(path, dtype=object, keep_default_na=False, **options)
        else:
            table = pd.read_parquet(path)
    except Exception as error:  # parsers raise nearly anything on a broken file
        raise ValueError(f"{printable(path)} cannot be read as a table: {one_line(error)}.") from error
    columns = [str(column) for column in table.columns]
    listing = Listing(os.path.dirname(path) or os.curdir)
    listing.names = [os.path.normpath(name) for name in read_column(path, table, "file_name")]
    if labeled:
        listing.labels = [printable(label) for label in read_column(path, table, "label")]
        check_unique(path, listing.names)
    if group in columns:
        listing.groups = [printable(cell) for cell in read_column(path, table, group)]
    elif labeled:
        listing.groups = match_groups(listing, group, columns)
    else:
        listing.groups = match_optional_groups(listing, group)
    return listing


def match_optional_groups(listing: Listing, group: str | None) -> list[str]:
    """As below, with "" for files without a group; none at all if `group` is a column of another table."""
    try:
        pattern = compile_group(group or "", ())
    except ValueError:
        return []
    matches = map(pattern.search, listing.names)
    return [printable(match[1] or "") if match else "" for match in matches]


def match_groups(listing: Listing, group: str | None, columns: Sequence[str] = ()) -> list[str]:
    """What the first parentheses of a regular expression match in every file name."""
    if group is None:
        return []
    compile_group(group, columns)
    groups = match_optional_groups(listing, group)
    if "" in groups:
        row = groups.index("")
        raise ValueError(
            f"{listing.shown(row)} has no group: the regular expression {group!r} does not match it. Change "
            "either."
        )
    return groups


def compile_group(group: str, columns: Sequence[str]) -> re.Pattern[str]:
    also = f"a column of the table ({', '.join(columns)}) or " if columns else ""
    try:
        pattern = re.compile(group)
    except (re.error, TypeError) as error:
        raise ValueError(f"group is {group!r}, but expected {also}a regular expression: {error}.") from error
    if pattern.groups < 1:
        raise ValueError(
            f"group is {group!r}, but expected {also}a regular expression with the group in parentheses, "
            "such as '(patient[0-9]+)'."
        )
    return pattern


def duplicates(digests: dict[str, np.ndarray]) -> list[dict[str, list[int]]]:
    """Sets of files with the same pixels, as rows of each split, if one of them is not unlabeled.

    Args:
        digests: of every file, 0 for those that could not be read.
    """
    values = np.concatenate(list(digests.values()))
    found, counts = np.unique(values, return_counts=True)
    labeled = np.concatenate([part for name, part in digests.items() if name != "unlabeled"])
    repeated = np.setdiff1d(np.intersect1d(found[counts > 1], labeled), [0])
    sets: dict[int, dict[str, list[int]]] = {int(value): {} for value in repeated}
    for name, part in digests.items():
        for row in np.flatnonzero(np.isin(part, repeated)):
            sets[int(part[row])].setdefault(name, []).append(int(row))
    return list(sets.values())
