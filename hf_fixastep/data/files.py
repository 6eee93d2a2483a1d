"""Image files of a user: finding them, decoding them safely, and telling which are equal.

Apart from `folders.py`, because `datasets` replaces `open`, `glob` and `os.path` in modules that hold a
builder.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import PIL.ExifTags
import PIL.Image
import PIL.ImageFile
import PIL.ImageOps

from hf_fixastep.data.images import DEEP_MODES, GREY_MODES


Source = str | os.PathLike[str]
SUFFIXES = (
    *(".bmp", ".dib", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".mpo"),
    *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"),
)
# none that runs a program, as EPS does; JPEG includes MPO
FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "GIF", "JPEG2000", "PPM", "WEBP")
COMPRESSED = ("JPEG", "MPO", "PNG", "WEBP")
TABLES = (".csv", ".parquet")


class UnreadableImage(ValueError):
    """A file that does not give an image; the message says why."""


@dataclass
class Picture:
    """A decoded file.

    Args:
        image: upright, 8 bits, mode L or RGB.
        mode: the mode that the file has.
        data: the bytes of the file where they need no change to give `image`.
    """

    image: PIL.Image.Image
    mode: str
    data: bytes | None


def read_picture(path: str) -> Picture:
    """Decode one file, of several frames the first; whatever is wrong with it becomes an `UnreadableImage`."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UnreadableImage("it is not a file")  # reading a pipe would never end
        with strict_decoding(), open(path, "rb") as file, PIL.Image.open(file, formats=FORMATS) as image:
            image.load()
            turn = orientation(image)
            plain = turn == 1 and image.mode in ("L", "RGB") and not image.has_transparency_data
            plain = plain and image.format in COMPRESSED
            upright = PIL.ImageOps.exif_transpose(image) if turn in range(2, 9) else image
            picture = Picture(to_grey_or_rgb(upright), image.mode, None)
            # a small picture in a large file, such as a thumbnail in front of other data, is better stored
            # anew
            if (
                plain
                and os.fstat(file.fileno()).st_size < picture.image.width * picture.image.height * 3 + 65536
            ):
                file.seek(0)
                picture.data = file.read()
            return picture
    except UnreadableImage:
        raise
    except Exception as error:  # decoders raise nearly anything on a broken file
        raise UnreadableImage(reason(path, error)) from error


@contextlib.contextmanager
def strict_decoding() -> Iterator[None]:
    """Truncated and too large images are errors, whatever was set before; odd metadata are passed over in
    silence.
    """
    before, PIL.ImageFile.LOAD_TRUNCATED_IMAGES = PIL.ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            yield
    finally:
        PIL.ImageFile.LOAD_TRUNCATED_IMAGES = before


def reason(path: str, error: Exception) -> str:
    """Why a file could not be read, in a few words."""
    if isinstance(error, FileNotFoundError):
        return "it is a link to nowhere" if os.path.islink(path) else "it does not exist"
    if isinstance(error, (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning)):
        return f"it has more than {PIL.Image.MAX_IMAGE_PIXELS:,} pixels, the limit PIL.Image.MAX_IMAGE_PIXELS"
    if isinstance(error, PIL.UnidentifiedImageError):
        return "it is no image of a known format" if os.path.getsize(path) else "it is empty"
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return one_line(message or type(error).__name__)


def one_line(text: object) -> str:
    return " ".join(str(text).split())[:200].rstrip(".")


def orientation(image: PIL.Image.Image) -> int:
    """EXIF orientation: 1 is upright, 2 to 8 are turned; 0 if broken, which says nothing about the pixels."""
    try:
        return image.getexif().get(PIL.ExifTags.Base.Orientation, 1)
    except Exception:
        return 0


def to_grey_or_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """8 bits per channel: L for grey images, RGB for all others; transparent pixels are laid over black."""
    if image.mode in DEEP_MODES:
        return PIL.Image.fromarray(to_8_bits(np.asarray(image)))
    mode = "L" if image.mode in GREY_MODES else "RGB"
    if not image.has_transparency_data:
        return image.convert(mode)
    image = image.convert("LA" if mode == "L" else "RGBA")
    return PIL.Image.composite(image.convert(mode), PIL.Image.new(mode, image.size), image.getchannel("A"))


def to_8_bits(values: np.ndarray) -> np.ndarray:
    """Scale an image of more than 8 bits, by the first of these ranges that holds all its values, to 0..255.

    Integers: 0..4095 (12 bits, as most sensors give) and 0..65535. Floats: 0..1. Otherwise the image's own
    smallest to largest value. Values that are not finite become black.
    """
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros(values.shape, np.uint8)
    low, high = float(values[finite].min()), float(values[finite].max())
    limits = (4095, 65535) if values.dtype.kind in "iu" else (1,)
    limit = next((limit for limit in limits if low >= 0 and high <= limit), None)
    if limit is not None:
        low, high = 0.0, float(limit)
    scaled = np.where(finite, values, low).astype(np.float64)
    scaled -= low  # in place: these arrays are eight times as large as the image
    scaled *= 255 / (high - low or 1.0)
    return np.rint(scaled, out=scaled).astype(np.uint8)


def encode(picture: Picture, size: tuple[int, int] | None) -> bytes:
    """The bytes to store: those of the file if nothing was changed, otherwise PNG.

    Args:
        size: height and width to resize to, as the torchvision image processors do it (bilinear,
            antialiased).
    """
    image, data = picture.image, picture.data
    if size is not None and image.size != size[::-1]:
        image, data = image.resize(size[::-1], PIL.Image.Resampling.BILINEAR), None
    if data is not None:
        return data
    image.info = {}  # colour profiles and the like
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)  # five times as fast as the default, little larger
    return buffer.getvalue()


def digest(image: PIL.Image.Image) -> int:
    """A number other than 0 that only images with the same mode, size and pixels share."""
    content = hashlib.blake2b(f"{image.mode} {image.size}".encode(), digest_size=8)
    content.update(image.tobytes())
    return int.from_bytes(content.digest(), "big") or 1


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
            content.update(f"{name}\0{self._state(name)}\n".encode(errors="surrogateescape"))
        content.update(repr((self.labels, self.groups)).encode())
        return content.digest()

    def _state(self, name: str) -> str:
        try:
            found = os.stat(os.path.join(self.root, name))
        except (OSError, ValueError):  # will be unreadable
            return ""
        return f"{found.st_size} {found.st_mtime_ns}"


def printable(name: str) -> str:
    """A file name that any file can hold: bytes that are not UTF-8 are written as `\\xe9`."""
    return os.fsencode(name).decode(errors="backslashreplace")


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
            f"{setting} is {printable(path)}, which is {found}; expected a folder with one sub-folder of images per "
            f"class, or a {' or '.join(TABLES)} table."
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
            f"Images such as {printable(stray[0])} lie directly in {printable(path)}, but expected one sub-folder per "
            "class: move them into the folders of their classes."
        )
    listing.labels = [printable(name.split(os.sep)[0]) for name in listing.names]
    folders = {printable(entry.name) for entry in os.scandir(path) if entry.is_dir() and entry.name[0] != "."}
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
            f"{setting} is {printable(path)}, which is {found}; expected a folder, a glob such as 'pile/**/*.png', "
            f"or a {' or '.join(TABLES)} table."
        )
    listing.groups = match_optional_groups(listing, group)
    return listing


def is_table(path: str) -> bool:
    return path.lower().endswith(TABLES) and os.path.isfile(path)


def walk(
    root: Source, passed_over: Counter[str] | None = None
) -> Iterator[tuple[str, os.stat_result | None]]:
    """Names of the files below a folder at any depth, sorted, and their states (None for a broken link).

    Hidden files and folders are passed over. Links are followed, except back to a folder above them. A folder
    inside that cannot be opened is given like a file, with the state of a folder.

    Args:
        passed_over: counts what was passed over, by reason.
    """
    counts = Counter() if passed_over is None else passed_over
    found: list[tuple[str, os.stat_result | None]] = []
    waiting: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while waiting:
        below, above = waiting.pop()
        here = None
        try:
            here = os.stat(os.path.join(root, below))
            entries = list(os.scandir(os.path.join(root, below)))
        except OSError:
            if not below:
                raise
            found.append((below, here))
            continue
        identity = (here.st_dev, here.st_ino)
        if identity in above:
            counts["link to a folder above"] += 1
            continue
        for entry in entries:
            name = os.path.join(below, entry.name)
            if entry.name.startswith("."):
                counts["hidden"] += 1
            elif entry.is_dir():
                waiting.append((name, above | {identity}))
            else:
                found.append((name, state_of(entry)))
    yield from sorted(found, key=lambda file: file[0])


def state_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except OSError:
        return None


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
    if os.path.basename(name).startswith("."):
        listing.passed_over["hidden"] += 1
    elif name.lower().endswith(SUFFIXES):
        listing.names.append(name)
    else:
        listing.passed_over["not an image"] += 1


def expand(pattern: str) -> Listing:
    """Image files that match a glob, and those in folders that match, unless it reaches every depth by
    itself.
    """
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


def read_column(path: str, table: pd.DataFrame, name: str) -> list[str]:
    if name not in table:
        raise ValueError(
            f"{printable(path)} has the columns {', '.join(map(str, table.columns))}, but expected one called {name}: "
            "rename or add it."
        )
    cells = ["" if pd.isna(cell) else str(cell).strip() for cell in table[name]]
    if "" in cells:
        raise ValueError(
            f"Row {cells.index('') + 1} of {printable(path)} has no {name}: fill it or remove the row."
        )
    return cells


def check_unique(path: str, names: list[str]) -> None:
    name, count = Counter(names).most_common(1)[0] if names else ("", 1)
    if count > 1:
        raise ValueError(
            f"{printable(path)} names {printable(name)} {count} times: keep one row for each file."
        )


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
            f"{listing.shown(row)} has no group: the regular expression {group!r} does not match it. Change either."
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
            f"group is {group!r}, but expected {also}a regular expression with the group in parentheses, such as "
            "'(patient[0-9]+)'."
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
