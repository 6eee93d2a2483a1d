"""MetaImage and NIfTI files, the two formats of CAMUS, as frames and the size of their pixels.

No message contains a text from a file, which may be a name.

NIfTI is read with nibabel. MetaImage is read here, as SimpleITK is not as safe: it takes 10 of the 28 damaged
files in the tests for good ones, follows the name of the pixel file to any place on the disk, cannot read
from memory, and writes past Python to the terminal.
"""

from __future__ import annotations

import gzip
import io
import itertools
import math
import posixpath
import zlib
from dataclasses import dataclass

import numpy as np

from hf_fixastep.data.files import UnreadableImage
from hf_fixastep.data.trees import LIMIT, Tree
from hf_fixastep.echo.files import check_pixels, import_reader


META_TYPES = {"MET_UCHAR": "u1", "MET_USHORT": "u2", "MET_UINT": "u4", "MET_FLOAT": "f4"}
META_TYPES |= {"MET_CHAR": "i1", "MET_SHORT": "i2", "MET_INT": "i4", "MET_DOUBLE": "f8"}
NIFTI_TYPES = (2, 4, 8, 16, 64, 256, 512, 768)  # whole and real numbers of up to 64 bits


@dataclass
class Volume:
    """A still image or a clip.

    Args:
        frames: [T, H, W], upright, as stored.
        spacing: height and width of a pixel.
    """

    frames: np.ndarray
    spacing: tuple[float, float]


def read_volume(tree: Tree, name: str) -> Volume:
    """A MetaImage (.mhd with its .raw or .zraw, .mha) or NIfTI (.nii, .nii.gz) file."""
    read = read_meta_image if name.lower().endswith((".mhd", ".mha")) else read_nifti
    try:
        volume = read(tree, name)
    except (UnreadableImage, MemoryError):
        raise
    except Exception as error:  # damaged in another way, such as a gz file that is cut short
        raise UnreadableImage(f"it is damaged ({type(error).__name__})") from error
    height, width = volume.spacing
    if not (0 < height < math.inf and 0 < width < math.inf and 0.1 <= height / width <= 10):
        raise UnreadableImage(f"its pixels are {width:g} wide and {height:g} high")
    frames, rows, columns = volume.frames.shape
    check_pixels(frames, rows, columns, volume.spacing)
    return volume


def check_size(size: int, held: int) -> None:
    if size > LIMIT:
        raise UnreadableImage(f"its pixels take {size:,} bytes, and the limit is {LIMIT:,}")
    if size != held:
        raise UnreadableImage(f"it holds {held:,} bytes of pixels, but its header speaks of {size:,}")


# MetaImage


def read_meta_image(tree: Tree, name: str) -> Volume:
    header, rest = _meta_header(tree.read(name))
    channels, binary = header.get("ElementNumberOfChannels", "1"), header.get("BinaryData", "True")
    if channels != "1" or binary.lower() != "true":
        raise UnreadableImage("it holds colours, or pixels as text; expected binary grey pixels")
    dims, spacing = _numbers(header, "DimSize", int), _numbers(header, "ElementSpacing", float)
    kind = header.get("ElementType", "")
    if kind not in META_TYPES:
        raise UnreadableImage(f"its ElementType is missing or none of {', '.join(META_TYPES)}")
    big = "true" in (header.get(f"{key}ByteOrderMSB", "").lower() for key in ("BinaryData", "Element"))
    dtype = np.dtype(f"{'>' if big else '<'}{META_TYPES[kind]}")
    size, file = math.prod(dims) * dtype.itemsize, header["ElementDataFile"]
    data = rest if file == "LOCAL" else tree.read(_beside(tree, name, file))
    if header.get("CompressedData", "").lower() == "true":
        data = zlib.decompressobj().decompress(data, min(size, LIMIT) + 1)  # a bomb is not unpacked
    check_size(size, len(data))
    width, height, *times = dims
    frames = np.frombuffer(data, dtype).reshape(*(times or [1]), height, width)
    return Volume(frames, (spacing[1], spacing[0]))


def _meta_header(content: bytes) -> tuple[dict[str, str], bytes]:
    """The entries, of which ElementDataFile is the last, and the bytes after them."""
    file, header = io.BytesIO(content), {}
    for line in itertools.islice(file, 200):
        key, _, value = line.decode("latin-1").partition("=")
        header[key.strip()] = value.strip()
        if key.strip() == "ElementDataFile":
            return header, file.read()
    raise UnreadableImage("it is no MetaImage header: ElementDataFile is missing")


def _numbers(header: dict[str, str], key: str, kind: type) -> list:
    try:
        numbers = [kind(number) for number in header.get(key, "").split()]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or not all(number > 0 for number in numbers):
        raise UnreadableImage(f"its {key} is missing or not two or three positive numbers")
    return numbers


def _beside(tree: Tree, name: str, file: str) -> str:
    """A file in the folder of another; no way leads out of it."""
    place = posixpath.join(posixpath.dirname(name), file)
    if "/" in file or "\\" in file or place not in tree:
        raise UnreadableImage("the file of its pixels is not beside it")
    return place


# NIfTI


def read_nifti(tree: Tree, name: str) -> Volume:
    """Columns, rows, time become [T, H, W]; directions in the header are not used, as CAMUS is upright."""
    nibabel = import_reader("nibabel", "NIfTI")
    data = tree.read(name)
    if data.startswith(b"\x1f\x8b"):
        with gzip.open(io.BytesIO(data)) as file:
            data = file.read(LIMIT + 1)
    # nibabel's own checks would turn a spacing of zero into 1, and quote the header in its log
    header = nibabel.Nifti1Header(data[:348], check=False) if len(data) >= 352 else None
    if header is None or header["sizeof_hdr"] != 348 or data[344:348] != b"n+1\0":
        raise UnreadableImage("it is no complete NIfTI-1 file")
    count, *dims = header["dim"].tolist()
    dims = dims[: max(count, 0)]
    if not 2 <= count <= 7 or min(dims) < 1 or math.prod(dims[3:]) != 1:
        raise UnreadableImage(f"its dimensions are {dims}, expected columns, rows and at most a time")
    if header["datatype"] not in NIFTI_TYPES:
        raise UnreadableImage(f"its data type is number {header['datatype']}, expected one of {NIFTI_TYPES}")
    size, offset = math.prod(dims) * header.get_data_dtype().itemsize, header.get_data_offset()
    # before nibabel reserves the memory
    check_size(size, min(size, max(0, len(data) - offset)) if offset >= 352 else 0)
    frames = header.data_from_fileobj(io.BytesIO(data)).reshape(dims[0], dims[1], -1, order="F")
    width, height = header["pixdim"][1:3].tolist()
    return Volume(frames.transpose(2, 1, 0), (height, width))
