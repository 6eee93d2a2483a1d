"""Echo files for prediction: DICOM and its oddities, and the sector on screens full of text."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import pydicom
import pytest
from pydicom import uid
from pydicom.data import get_testdata_file
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.pixels import get_decoder
from scipy import ndimage

from hf_fixastep.data.files import UnreadableImage
from hf_fixastep.data.trees import Tree
from hf_fixastep.echo.clips import Clip, pixel_spacing, prepare_frames, read_clip, read_dicom
from hf_fixastep.echo.sector import find_sector
from tests.echo.echo_sets import put, put_meta


NAME = "DOE^JOHN"


def speckle(shape: tuple[int, int], seed: int = 0, grain: float = 1.5) -> np.ndarray:
    noise = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=(2, *shape)), (0, grain, grain))
    return np.clip(70 * np.hypot(*noise) / np.hypot(*noise).mean(), 0, 255)


def fan(shape: tuple[int, int], half_angle: float = 40) -> np.ndarray:
    """A sector with its tip at the middle of the upper edge, 80 % as high as the screen."""
    y, x = np.mgrid[: shape[0], : shape[1]].astype(float)
    y, x = y - 0.08 * shape[0], x - shape[1] / 2
    return (np.hypot(x, y) < 0.8 * shape[0]) & (np.degrees(np.arctan2(np.abs(x), y)) < half_angle)


def write_text(frame: np.ndarray) -> np.ndarray:
    """A screen: lines of text in the corners, a ruler, a grey scale, and a menu with words on it."""
    height, width = frame.shape
    picture = PIL.Image.fromarray(frame)
    draw, font = PIL.ImageDraw.Draw(picture), PIL.ImageFont.load_default(size=max(8, height // 32))
    for line, text in enumerate(("DOE JOHN 1961", "Adult Echo", "S5-1 50 Hz", "17 cm")):
        draw.text((4, 4 + line * height // 24), text, fill=235, font=font)
        draw.text((int(0.8 * width), 4 + line * height // 24), text[::-1], fill=200, font=font)
    for mark in range(10, height - 10, height // 20):
        draw.line([(width - 12, mark), (width - 6, mark)], fill=180)
    draw.rectangle([0, int(0.95 * height), width, height], fill=60)
    draw.text((width // 3, int(0.955 * height)), "Page 1/3   Sector   MB Off", fill=180, font=font)
    scale = np.asarray(picture).copy()
    scale[height // 3 : height // 2, 6:14] = np.linspace(255, 10, height // 2 - height // 3)[:, None]
    return scale


def clip_of(frames: int, shape: tuple[int, int] = (480, 640)) -> tuple[np.ndarray, np.ndarray]:
    """Frames [T, H, W] whose speckle changes and whose text does not, and where the sector is."""
    inside, middle = fan(shape), np.array(shape)[:, None, None] / 2
    chamber = np.hypot(*(np.mgrid[: shape[0], : shape[1]] - middle)) < 0.15 * shape[0]
    echo = inside * np.where(chamber, 0.02, 1)
    return np.stack([write_text((speckle(shape, n) * echo).astype(np.uint8)) for n in range(frames)]), inside


def dicom(frames: np.ndarray | None, photometric: str = "MONOCHROME2", **elements: Any) -> Any:
    """An uncompressed file with pixels [T, H, W] or [T, H, W, 3], and further elements."""
    data = Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = uid.ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = uid.UltrasoundMultiFrameImageStorage
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = "1.2.3.4"
    data.PatientName, data.StudyInstanceUID = NAME, "1.2.826.0.1.99"
    if frames is not None:
        data.NumberOfFrames, data.Rows, data.Columns = frames.shape[:3]
        data.SamplesPerPixel = 3 if frames.ndim == 4 else 1
        if frames.ndim == 4:
            data.PlanarConfiguration = 0
        data.BitsAllocated = data.BitsStored = 8 * frames.dtype.itemsize
        data.HighBit, data.PixelRepresentation = data.BitsStored - 1, int(frames.dtype.kind == "i")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that do not exist
            data.PhotometricInterpretation = photometric
        data.PixelData = frames.tobytes() + b"\0" * (frames.nbytes % 2)
        data["PixelData"].VR = "OB" if frames.dtype.itemsize == 1 else "OW"
    for keyword, value in elements.items():
        setattr(data, keyword, value)
    return data


def encoded(data: Any) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pydicom.dcmwrite(buffer, data, enforce_file_format=True)
    return buffer.getvalue()


def read(data: Any) -> Clip:
    return read_dicom(encoded(data))


RAMP = np.arange(20 * 30, dtype=np.uint32).reshape(1, 20, 30)
GREY = (RAMP % 256).astype(np.uint8)


def region(height: float, width: float, kind: int = 1, unit: int = 3) -> Any:
    item = Dataset()
    item.RegionSpatialFormat, item.RegionDataType = kind, 1
    item.PhysicalUnitsXDirection = item.PhysicalUnitsYDirection = unit
    item.PhysicalDeltaX, item.PhysicalDeltaY = width, height
    return item


# Pixels


def test_grey_pixels_come_as_they_are_or_turned_round():
    frames = np.concatenate([GREY, GREY[:, ::-1]])
    assert np.array_equal(read(dicom(frames)).frames, frames)
    assert np.array_equal(read(dicom(frames, "MONOCHROME1")).frames, 255 - frames)
    assert read(dicom(frames)).study == "1.2.826.0.1.99"


@pytest.mark.parametrize("bits", [10, 12, 16])
def test_more_than_eight_bits_are_scaled_by_the_range_of_the_bits(bits):
    values = (RAMP * 97 % 2**bits).astype(np.uint16)
    expected = np.rint(values / (2**bits - 1) * 255)
    assert np.array_equal(read(dicom(values, BitsStored=bits, HighBit=bits - 1)).frames, expected)
    if bits == 16:  # signed values start at the lowest
        signed = (values.astype(np.int32) - 32768).astype(np.int16)
        assert np.array_equal(read(dicom(signed)).frames, expected)


def test_colours_become_their_luminance():
    colours = np.random.default_rng(0).integers(0, 256, (2, 12, 14, 3), dtype=np.uint8)
    expected = colours @ np.array([0.299, 0.587, 0.114])
    assert np.abs(read(dicom(colours, "RGB")).frames - expected).max() < 1
    planes = dicom(colours, "RGB", PlanarConfiguration=1)
    planes.PixelData = np.moveaxis(colours, 3, 1).tobytes()
    assert np.array_equal(read(planes).frames, read(dicom(colours, "RGB")).frames)
    grey = np.stack([GREY // 2 + 50, *[np.full_like(GREY, 128)] * 2], axis=-1)
    assert np.abs(read(dicom(grey, "YBR_FULL")).frames.astype(int) - grey[..., 0]).max() <= 1


def test_a_palette_is_looked_up():
    table = (np.arange(256)[::-1].astype(np.uint16) * 257).tobytes()
    colours = ("Red", "Green", "Blue")
    entries = {f"{colour}PaletteColorLookupTableDescriptor": [256, 0, 16] for colour in colours}
    data = dicom(GREY, "PALETTE COLOR", **entries)
    for colour in colours:
        data.add_new(pydicom.datadict.tag_for_keyword(f"{colour}PaletteColorLookupTableData"), "OW", table)
        data[f"{colour}PaletteColorLookupTableDescriptor"].VR = "US"
    assert np.array_equal(read(data).frames, 255 - GREY)


def test_jpeg_and_run_length_clips_are_decoded():
    smooth = np.tile(np.linspace(0, 255, 64).astype(np.uint8), (3, 48, 1))
    buffers = [io.BytesIO() for _ in smooth]
    for buffer, frame in zip(buffers, smooth, strict=True):
        PIL.Image.fromarray(frame).save(buffer, "JPEG", quality=95)
    data = dicom(smooth)
    data.file_meta.TransferSyntaxUID = uid.JPEGBaseline8Bit
    data.PixelData = encapsulate([buffer.getvalue() for buffer in buffers])
    assert np.abs(read(data).frames.astype(int) - smooth).max() <= 3
    data = dicom(smooth)
    data.compress(uid.RLELossless)
    assert np.array_equal(read(data).frames, smooth)


@pytest.mark.parametrize(
    ("elements", "expected"),
    [
        ({}, 1.0),
        ({"PixelSpacing": [0.2, 0.4]}, 0.5),
        ({"PixelAspectRatio": ["2", "1"]}, 2.0),
        ({"SequenceOfUltrasoundRegions": [region(0.03, 0.06)], "PixelSpacing": [3, 1]}, 0.5),
        ({"SequenceOfUltrasoundRegions": [region(-0.03, 0.06)]}, 0.5),
        # a spectrum, in seconds, says nothing about the picture
        ({"SequenceOfUltrasoundRegions": [region(0.0, 9.0, unit=4), region(0.05, 0.1)]}, 0.5),
        ({"SequenceOfUltrasoundRegions": [region(0.0, 9.0, kind=3)], "PixelSpacing": [1, 2]}, 0.5),
    ],
)
def test_the_height_of_a_pixel_comes_from_the_region_or_the_spacing(elements, expected):
    height, width = pixel_spacing(dicom(GREY, **elements))
    assert height / width == pytest.approx(expected)
    assert read(dicom(GREY, **elements)).frames.shape == (1, round(20 * expected), 30)


# The sector


def overlap(found: np.ndarray | None, expected: np.ndarray) -> float:
    assert found is not None
    return (found & expected).sum() / (found | expected).sum()


@pytest.mark.parametrize(
    ("shape", "frames"), [((480, 640), 1), ((600, 800), 4), ((240, 320), 6), ((240, 320), 1)]
)
def test_the_sector_is_found_among_text(shape, frames):
    pictures, inside = clip_of(frames, shape)
    sector = find_sector(pictures)
    assert overlap(sector, inside) > 0.9
    kept = pictures * sector
    assert kept[:, : shape[0] // 6, : shape[1] // 5].max() == 0
    assert kept[:, int(0.95 * shape[0]) :].max() == 0
    assert kept[:, inside].sum() > 0.999 * pictures[:, inside].sum()
    # a frozen clip is treated as a still
    assert np.array_equal(find_sector(pictures[:1].repeat(3, 0)), find_sector(pictures[:1]))


def test_a_running_trace_and_a_clock_do_not_widen_the_sector():
    pictures, inside = clip_of(8)
    for number, picture in enumerate(pictures):
        columns = np.arange(640)
        picture[(440 - 12 * (columns % (80 + number) < 4)).astype(int), columns] = 220
        picture[20:32, 500 + 2 * number] = 255
    assert overlap(find_sector(pictures), inside) > 0.9


def test_a_picture_without_screen_loses_nothing():
    """As the images of TMED-2 are: 112 pixels, no text."""
    picture = (speckle((112, 112), grain=0.8) * fan((112, 112))).astype(np.uint8)[None]
    assert (picture * find_sector(picture)).sum() > 0.999 * picture.sum()


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((1, 1, 1), np.uint8),
        np.full((2, 64, 64), 90, np.uint8),
        write_text(np.zeros((480, 640), np.uint8))[None],
    ],
    ids=["one pixel", "grey", "text alone"],
)
def test_a_screen_without_speckle_has_no_sector(frames):
    assert find_sector(frames) is None
    with pytest.raises(UnreadableImage, match="no ultrasound sector"):
        prepare_frames(Clip(frames))


def test_frames_are_prepared_as_in_training():
    """Longer side to 112, nothing below or on the right of the rest."""
    pictures, inside = clip_of(2)
    prepared = prepare_frames(Clip(pictures))
    assert prepared.shape == (2, 112, 112)
    assert prepared[:, 84:].max() == 0
    small = np.asarray(PIL.Image.fromarray((pictures[0] * inside).astype(np.uint8)).resize((112, 84)))
    assert np.abs(prepared[0, :84].astype(int) - small).mean() < 1
    assert prepare_frames(Clip(pictures), mask=False)[:, 80:84].max() > 50


@pytest.mark.parametrize("chosen", [slice(None), slice(1), slice(20, 21)], ids=["clip", "first", "later"])
def test_text_and_menus_of_a_real_echo_are_black(chosen):
    """Thirty frames of an apical view; its region speaks of a larger picture than the file has."""
    echo = read_dicom(Path(str(get_testdata_file("examples_ybr_color.dcm"))).read_bytes())
    assert echo.frames.shape == (30, 240, 320)
    frames = echo.frames[chosen]
    kept = frames * find_sector(frames)
    assert frames[:, 227:].max() > 60
    assert kept[:, 227:].max() == 0, "the menu"
    assert kept[:, :, 290:].max() == kept[:, :40, :40].max() == 0, "the text"
    heart = frames[:, 30:205, 80:240].astype(float)
    assert kept[:, 30:205, 80:240].sum() > 0.97 * heart.sum()


@pytest.mark.parametrize("name", ["examples_rgb_color.dcm", "examples_palette.dcm"])
def test_titles_of_real_stills_are_black(name):
    clip = read_dicom(Path(str(get_testdata_file(name))).read_bytes())
    height = clip.frames.shape[1]
    kept = clip.frames * find_sector(clip.frames)
    assert clip.frames[:, : height // 7].max() > 200
    assert kept[:, : height // 7].max() == 0
    assert kept.max() > 150


# What can be wrong with a file


def packed(syntax: str) -> bytes:
    """A file whose pixels are said to be compressed, and are not."""
    data = dicom(GREY)
    data.PixelData = encapsulate([b"\xff\xd8"])
    data.file_meta.TransferSyntaxUID = syntax
    data["PixelData"].is_undefined_length = True
    return encoded(data)


def bad(**elements: Any) -> bytes:
    return encoded(dicom(GREY, **elements))


WHOLE, PREAMBLE = encoded(dicom(GREY)), b"\0" * 128 + b"DICM"
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "text": (b"Dear doctor", "no image of a known format"),
    "no preamble": (WHOLE[132:], "no image of a known format"),
    "preamble alone": (PREAMBLE, "without pixels"),
    "garbage after the preamble": (PREAMBLE + bytes(range(256)) * 9, "damaged|without pixels|syntax"),
    "no pixels": (encoded(dicom(None)), "without pixels"),
    "cut off in the header": (WHOLE[:300], "damaged|without pixels|syntax"),
    "cut off in the pixels": (WHOLE[:-100], "damaged"),
    "fewer frames than stated": (bad(NumberOfFrames=4), "damaged"),
    "video": (packed(uid.MPEG4HP41), "stored as MPEG-4 AVC/H.264 High Profile.*: convert it"),
    "unknown syntax": (
        WHOLE.replace(b"1.2.840.10008.1.2.1", b"1.2.840.99999.1.2.1"),
        "transfer syntax is missing or unknown",
    ),
    "damaged jpeg": (packed(uid.JPEGBaseline8Bit), "damaged"),
    "unknown colours": (bad(photometric=NAME), "photometric interpretation"),
    "cmyk": (bad(photometric="CMYK"), "photometric interpretation"),
    "grey with three samples": (encoded(dicom(np.stack([GREY] * 3, -1))), "photometric interpretation"),
    "palette without colours": (bad(photometric="PALETTE COLOR"), "damaged"),
    "zero spacing": (bad(PixelSpacing=[0, 0]), "pixel spacing"),
    "negative spacing": (bad(PixelSpacing=[-1, 1]), "pixel spacing"),
    "extreme spacing": (bad(PixelSpacing=[1, 1e-6]), "pixel spacing"),
    "one number for a spacing": (bad(PixelSpacing=[0.5]), "damaged"),
    "region of no height": (bad(SequenceOfUltrasoundRegions=[region(0, 1)]), "pixel spacing"),
    "no rows": (bad(Rows=0), "no pixels"),
    "huge frames": (bad(Rows=65535, Columns=65535), "16,777,216 .* 536,870,912 together"),
    "a million frames": (bad(NumberOfFrames=1_000_000), "16,777,216 .* 536,870,912 together"),
    "bits that do not exist": (bad(BitsAllocated=12), "damaged"),
    "all black": (encoded(dicom(np.zeros((3, 20, 30), np.uint8))), "all its pixels are equal"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_dicom_file_has_one_clear_reason(kind, tmp_path, capsys, caplog):
    content, reason = BAD_FILES[kind]
    put(tmp_path / "file", content)
    with caplog.at_level(logging.DEBUG), pytest.raises(UnreadableImage, match=reason) as found:
        read_clip(Tree(tmp_path), "file")
    assert NAME not in f"{found.value} {capsys.readouterr()} {caplog.text}"
    assert "\n" not in str(found.value)


def test_what_has_to_be_installed_is_said(monkeypatch):
    monkeypatch.setattr(get_decoder(uid.JPEGLSLossless), "_available", {})
    with pytest.raises(
        UnreadableImage, match=r"compressed as JPEG-LS Lossless.*: install a decoder: pip inst"
    ):
        read_dicom(packed(uid.JPEGLSLossless))
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UnreadableImage, match=r"pip install 'hf_fixastep\[echo\]'"):
        read_dicom(WHOLE)


def test_every_file_that_pydicom_ships_is_read_or_has_a_reason():
    """Other organs, other machines, and files broken on purpose; nothing else than a reason may come."""
    folder = Path(str(get_testdata_file("examples_ybr_color.dcm"))).parent
    used, reasons = set(), {}
    for path in sorted(folder.glob("*.dcm")):
        try:
            read_dicom(path.read_bytes())
            used.add(path.name)
        except UnreadableImage as error:
            reasons[path.name] = str(error)
    assert {"MR_small_RLE.dcm", "SC_rgb_jpeg_dcmtk.dcm", "examples_palette.dcm"} <= used
    assert reasons["MR_truncated.dcm"].startswith("its header or its pixels are damaged")
    assert reasons["rtplan.dcm"] == "it is a DICOM file without pixels"


# Other formats


def test_a_meta_image_clip_is_squared_and_stretched_frame_by_frame(tmp_path):
    pixels = np.random.default_rng(0).integers(10, 100, (3, 40, 30), dtype=np.uint8)
    put_meta(tmp_path / "clip.mhd", pixels, ElementSpacing="0.2 0.1 1")
    clip = read_clip(Tree(tmp_path), "clip.mhd")
    assert clip.frames.shape == (3, 20, 30)
    assert clip.study is None
    assert [(frame.min(), frame.max()) for frame in clip.frames] == [(0, 255)] * 3
    prepare_frames(clip)  # noise without a sector: such files are no screens, and are not masked


def test_outlines_are_passed_over(tmp_path):
    put(tmp_path / "patient0001_2CH_ED_gt.nii.gz", b"")
    with pytest.raises(UnreadableImage, match="outline"):
        read_clip(Tree(tmp_path), "patient0001_2CH_ED_gt.nii.gz")
