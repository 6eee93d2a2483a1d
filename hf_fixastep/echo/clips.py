"""Echo files of all kinds as the frames that a view classifier sees: pictures, MetaImage, NIfTI and DICOM.

No message contains a value of a DICOM header, which may be a name, so no message of pydicom is passed on.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image

from hf_fixastep.data.files import SUFFIXES, UnreadableImage, read_grey
from hf_fixastep.data.trees import Tree
from hf_fixastep.echo.files import check_pixels, fit, import_reader, square_pixels, stretch
from hf_fixastep.echo.sector import find_sector
from hf_fixastep.echo.volumes import read_volume


VOLUMES = (".mhd", ".mha", ".nii", ".nii.gz")
PARTS = (".raw", ".zraw")  # pixels of a .mhd file
PLUGIN = "install a decoder: pip install python-gdcm, or pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg"
GREY = ("MONOCHROME1", "MONOCHROME2")
COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
RUN_LENGTHS = "1.2.840.10008.1.2.5"
DEFLATED = b"1.2.840.10008.1.2.1.99"  # the transfer syntax of files that are compressed as a whole
CENTIMETRES, TWO_DIMENSIONAL = 3, 1  # as DICOM's ultrasound regions write them


@dataclass
class Clip:
    """A still or a clip.

    Args:
        frames: uint8 [T, H, W], grey, with square pixels.
        study: the StudyInstanceUID of a DICOM file, which must not be written anywhere as it is.
        is_screen: there may be text around the ultrasound sector.
    """

    frames: np.ndarray
    study: str | None = None
    is_screen: bool = True


def read_clip(tree: Tree, name: str) -> Clip:
    """Decode one file; whatever is wrong with it becomes an `UnreadableImage`.

    MetaImage and NIfTI files are stretched from black to white frame by frame, as they are for the evaluation
    on CAMUS. All files with other suffixes than those of pictures are taken for DICOM, which often has none.
    """
    kind = name.lower()
    try:
        if kind.endswith(VOLUMES):
            clip = Clip(read_stretched(tree, name), is_screen=False)
        elif kind.endswith(SUFFIXES):
            pixels = read_grey(tree.read(name))
            check_pixels(1, len(pixels), pixels.shape[1], (1.0, 1.0))
            clip = Clip(pixels[None])
        else:
            clip = read_dicom(tree.read(name))
    except MemoryError as error:
        raise UnreadableImage("it does not fit into memory") from error
    if clip.frames.min() == clip.frames.max():
        raise UnreadableImage("all its pixels are equal")
    return clip


def prepare_frames(clip: Clip, mask: bool = True) -> np.ndarray:
    """Frames as in training: the longer side scaled to 112 pixels, black below or on the right.

    Args:
        mask: make everything outside the ultrasound sector of a screen black.
    """
    frames = clip.frames
    if mask and clip.is_screen:
        sector = find_sector(frames)
        if sector is None:
            raise UnreadableImage("no ultrasound sector was found in it")
        frames = frames * sector
    return np.stack([fit(frame) for frame in frames])


def read_stretched(tree: Tree, name: str) -> np.ndarray:
    if name.lower().removesuffix(".gz").rpartition(".")[0].endswith("_gt"):
        raise UnreadableImage("it is the drawn outline of another file, by its name")
    volume = read_volume(tree, name)
    return np.stack([stretch(square_pixels(frame, volume.spacing)) for frame in volume.frames])


def read_dicom(data: bytes) -> Clip:
    """A DICOM file, still or clip; compressed ones as far as pydicom and its plugins can read them."""
    if data[128:132] != b"DICM":
        raise UnreadableImage("it is no image of a known format" if data else "it is empty")
    pydicom = import_reader("pydicom", "DICOM")
    if DEFLATED in data:  # pydicom would unpack all of it before anything can be looked at
        raise UnreadableImage("it is compressed as a whole: convert it to JPEG or raw pixels")
    try:
        with quiet_pydicom():
            header = pydicom.dcmread(io.BytesIO(data))
            check_header(header)
            spacing = pixel_spacing(header)
            frames = [whole_numbers(square_pixels(frame, spacing)) for frame in decode(header)]
            study = header.get("StudyInstanceUID")
    except (UnreadableImage, MemoryError):
        raise
    except Exception as error:  # of many kinds, with messages that quote the header
        raise UnreadableImage(f"its header or its pixels are damaged ({type(error).__name__})") from error
    return Clip(np.stack(frames), str(study) if study else None)


def whole_numbers(frame: np.ndarray) -> np.ndarray:
    return np.rint(frame).astype(np.uint8)


@contextlib.contextmanager
def quiet_pydicom() -> Iterator[None]:
    """Keep back the warnings of pydicom, which quote the header too."""
    logger = logging.getLogger("pydicom")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


def check_header(header: Any) -> None:
    """Whether pydicom can decode the pixels, and they are of a kind and number that can be used."""
    from pydicom.pixels import get_decoder
    from pydicom.uid import UID_dictionary

    if "PixelData" not in header:
        raise UnreadableImage("it is a DICOM file without pixels")
    syntax = header.file_meta.get("TransferSyntaxUID")
    if syntax not in UID_dictionary:
        raise UnreadableImage("its transfer syntax is missing or unknown")
    try:
        decoder = get_decoder(syntax)
    except NotImplementedError as error:
        raise UnreadableImage(
            f"its pixels are stored as {syntax.name}: convert it to JPEG or raw pixels"
        ) from error
    if not decoder.is_available:
        raise UnreadableImage(f"its pixels are compressed as {syntax.name}: {PLUGIN}")
    photometric, samples = header.get("PhotometricInterpretation"), header.get("SamplesPerPixel")
    expected = 1 if photometric in (*GREY, "PALETTE COLOR") else 3 if photometric in COLOUR else None
    if expected is None or samples != expected:
        raise UnreadableImage("its photometric interpretation is unknown, or not for its number of samples")
    size = number_of_frames(header), int(header.Rows), int(header.Columns)
    check_pixels(*size, pixel_spacing(header))
    raw = math.prod(size) * samples * (int(header.BitsAllocated) // 8)
    if syntax == RUN_LENGTHS and len(header.PixelData) > 2 * raw + 2**16:  # each two bytes may become 128
        raise UnreadableImage("it holds more pixels than its header speaks of")


def number_of_frames(header: Any) -> int:
    return int(header.get("NumberOfFrames") or 1)


def pixel_spacing(header: Any) -> tuple[float, float]:
    """Height and width of a pixel, from the ultrasound region if there is one; (1, 1) if nothing is said."""
    spacing = (1.0, 1.0)
    regions = [region for region in header.get("SequenceOfUltrasoundRegions") or () if shows_tissue(region)]
    names = ("PixelSpacing", "NominalScannedPixelSpacing", "ImagerPixelSpacing", "PixelAspectRatio")
    given = [header.get(name) for name in names if header.get(name)]
    if regions:
        spacing = abs(float(regions[0].PhysicalDeltaY)), abs(float(regions[0].PhysicalDeltaX))
    elif given:
        height, width = map(float, given[0])
        spacing = height, width
    if not all(0 < side < math.inf for side in spacing) or not 0.1 <= spacing[0] / spacing[1] <= 10:
        raise UnreadableImage("its pixel spacing is not two positive numbers of similar size")
    return spacing


def shows_tissue(region: Any) -> bool:
    units = region.get("PhysicalUnitsXDirection"), region.get("PhysicalUnitsYDirection")
    return region.get("RegionSpatialFormat") == TWO_DIMENSIONAL and units == (CENTIMETRES, CENTIMETRES)


def decode(header: Any) -> Iterator[np.ndarray]:
    """Frames in grey, uint8 [H, W]."""
    from pydicom.pixels import apply_color_lut, iter_pixels

    count, photometric = 0, header.PhotometricInterpretation
    for frame in iter_pixels(header):  # as RGB where they are stored as luminance and two colours
        if photometric == "PALETTE COLOR":
            colours = apply_color_lut(frame, header)
            yield to_luminance(colours >> 8 if colours.dtype.itemsize > 1 else colours)
        else:
            lowest = -(2 ** (header.BitsStored - 1)) if header.PixelRepresentation else 0
            values = (frame.astype(np.float64) - lowest) * (255 / (2**header.BitsStored - 1))
            values = np.rint(values.clip(0, 255)).astype(np.uint8)
            values = values if photometric in GREY else to_luminance(values)
            yield 255 - values if photometric == "MONOCHROME1" else values
        count += 1
    if count < number_of_frames(header):
        raise UnreadableImage("some of its frames are missing: the file is cut off")


def to_luminance(colours: np.ndarray) -> np.ndarray:
    return np.asarray(PIL.Image.fromarray(colours.astype(np.uint8)[..., :3]).convert("L"))
