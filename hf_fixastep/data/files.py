"""Files of a user: finding them, decoding images safely, and columns of tables.

Apart from the builders, because `datasets` replaces `open`, `glob` and `os.path` in modules that hold one.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

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
# None that runs a program, as EPS does. JPEG includes MPO.
FORMATS = ("JPEG", "PNG", "TIFF", "BMP", "GIF", "JPEG2000", "PPM", "WEBP")
COMPRESSED = ("JPEG", "MPO", "PNG", "WEBP")
AGAIN = "link to what is there already"
LONGEST = 32  # times its shorter side, for an image processor


def walk(root: Source, passed_over: Counter[str] | None = None) -> list[tuple[str, os.stat_result | None]]:
    """Names of the files below a folder at any depth, sorted, and their states (None for a broken link).

    Hidden files and folders are passed over. Links are followed, but every real folder and file comes once:
    under its own name if it is below the root, else under the first link to it. A folder inside that cannot
    be opened is given like a file, with the state of a folder.

    Args:
        passed_over: counts what was passed over, by reason.
    """
    counts = Counter() if passed_over is None else passed_over
    found: list[tuple[str, os.stat_result | None]] = []
    folders: list[tuple[str, os.stat_result]] = [("", os.stat(root))]
    links: deque[tuple[str, os.stat_result]] = deque()  # after all that is no link
    files: list[tuple[str, os.stat_result]] = []
    seen: set[tuple[int, int]] = set()
    while folders or links:
        below, here = folders.pop() if folders else links.popleft()
        if not is_new(here, seen):
            counts[AGAIN] += 1
            continue
        try:
            entries = sorted(os.listdir(os.path.join(root, below)))
        except OSError:
            if not below:
                raise
            found.append((below, here))
            continue
        for entry in entries:
            name = os.path.join(below, entry)
            path = os.path.join(root, name)
            state, is_link = state_of(path), os.path.islink(path)
            if is_hidden(entry):
                counts["hidden"] += 1
            elif state is None:
                found.append((name, None))
            elif stat.S_ISDIR(state.st_mode):
                (links if is_link else folders).append((name, state))
            elif is_link:
                files.append((name, state))
            else:
                seen.add((state.st_dev, state.st_ino))
                found.append((name, state))
    for name, state in sorted(files, key=lambda file: file[0]):
        if is_new(state, seen):
            found.append((name, state))
        else:
            counts[AGAIN] += 1
    return sorted(found, key=lambda file: file[0])


def is_new(state: os.stat_result, seen: set[tuple[int, int]]) -> bool:
    """Whether a folder or file was not seen before; from now on it was."""
    identity = (state.st_dev, state.st_ino)
    if identity in seen:
        return False
    seen.add(identity)
    return True


def is_hidden(name: str) -> bool:
    """Whether a system put the file there, and not the user; __MACOSX is in zip files that a Mac made."""
    return name.startswith(".") or name == "__MACOSX"


def state_of(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):  # a link to nowhere or to itself; a name that no file can have
        return None


def printable(name: str) -> str:
    """A file name that any file can hold: bytes that are not UTF-8 are written as `\\xe9`."""
    return os.fsencode(name).decode(errors="backslashreplace")


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
    """Decode one file, the first frame of several; whatever is wrong becomes an `UnreadableImage`."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise UnreadableImage("it is not a file")  # reading a pipe would never end
        with strict_decoding(), open(path, "rb") as file, PIL.Image.open(file, formats=FORMATS) as image:
            image.load()
            turn = orientation(image)
            plain = turn == 1 and image.mode in ("L", "RGB") and not image.has_transparency_data
            plain &= image.format in COMPRESSED
            upright = PIL.ImageOps.exif_transpose(image) if turn in range(2, 9) else image
            picture = Picture(to_grey_or_rgb(upright), image.mode, None)
            # A small picture in a large file, such as a thumbnail before other data, is better stored anew.
            raw_size = picture.image.width * picture.image.height * 3
            if plain and os.fstat(file.fileno()).st_size < raw_size + 65536:
                file.seek(0)
                picture.data = file.read()
            return picture
    except UnreadableImage:
        raise
    except Exception as error:  # decoders raise nearly anything on a broken file
        raise UnreadableImage(reason(path, error)) from error


@contextlib.contextmanager
def strict_decoding() -> Iterator[None]:
    """Truncated and too large images are errors, whatever was set before; odd metadata are ignored."""
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


def for_processor(image: PIL.Image.Image, channels: int) -> PIL.Image.Image:
    """What an image processor gets: grey or RGB, and of strips that are very long their middle.

    A processor that scales the shorter side, as most do, would make gigabytes of 100,000 x 1 pixels.
    """
    image = to_grey_or_rgb(image).convert("L" if channels == 1 else "RGB")
    width, height = (min(side, LONGEST * min(image.size)) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def read_grey(data: bytes) -> np.ndarray:
    """An image file, such as PNG, as uint8 [H, W]."""
    try:
        with strict_decoding(), PIL.Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return np.asarray(to_grey_or_rgb(image).convert("L"))
    except PIL.UnidentifiedImageError as error:
        raise UnreadableImage("it is no image of a known format" if data else "it is empty") from error
    except Exception as error:  # decoders raise nearly anything on a broken file
        raise UnreadableImage(reason("", error)) from error


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


def read_column(path: str, table: pd.DataFrame, name: str) -> list[str]:
    if name not in table:
        raise ValueError(
            f"{printable(path)} has the columns {', '.join(map(str, table.columns))}, but expected one "
            f"called {name}: rename or add it."
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
