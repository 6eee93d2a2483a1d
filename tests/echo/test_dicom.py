"""Echo files for prediction: DICOM and its oddities, and the sector on screens full of text."""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont
import pytest
from scipy import ndimage

from hf_fixastep.data.files import UnreadableImage
from hf_fixastep.echo.clips import Clip, pixel_spacing, prepare_frames, read_clip, read_dicom
from hf_fixastep.echo.files import Tree
from hf_fixastep.echo.sector import find_sector


pydicom = pytest.importorskip("pydicom", reason="needs the extra echo")
encapsulate = pytest.importorskip("pydicom.encaps").encapsulate
get_testdata_file = pytest.importorskip("pydicom.data").get_testdata_file
uid = pytest.importorskip("pydicom.uid")
Dataset = pydicom.dataset.Dataset
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


def clip_of(
    frames: int, shape: tuple[int, int] = (480, 640), text: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Frames [T, H, W] whose speckle changes and whose text does not, and where the sector is."""
    inside = fan(shape)
    heart = (
        np.hypot(*(np.mgrid[: shape[0], : shape[1]] - np.array(shape)[:, None, None] / 2)) < 0.15 * shape[0]
    )
    pictures = []
    for number in range(frames):
        picture = (speckle(shape, number) * inside * np.where(heart, 0.02, 1)).astype(np.uint8)
        pictures.append(write_text(picture) if text else picture)
    return np.stack(pictures), inside


def dicom(frames: np.ndarray | None, photometric: str = "MONOCHROME2", **elements: Any) -> Any:
    """An uncompressed file with pixels [T, H, W] or [T, H, W, 3]; further elements replace or add to its own."""
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


@pytest.fixture(scope="module")
def ramp() -> np.ndarray:
    return np.arange(20 * 30, dtype=np.uint32).reshape(1, 20, 30)


def region(height: float, width: float, kind: int = 1, unit: int = 3) -> Any:
    item = Dataset()
    item.RegionSpatialFormat, item.RegionDataType = kind, 1
    item.PhysicalUnitsXDirection = item.PhysicalUnitsYDirection = unit
    item.PhysicalDeltaX, item.PhysicalDeltaY = width, height
    return item


# Pixels


def test_grey_pixels_come_as_they_are(ramp):
    frames = np.concatenate([ramp % 256, (ramp + 7) % 256]).astype(np.uint8)
    clip = read(dicom(frames))
    np.testing.assert_array_equal(clip.frames, frames)
    assert clip.study == "1.2.826.0.1.99"


def test_monochrome1_is_turned_round(ramp):
    frames = (ramp % 256).astype(np.uint8)
    np.testing.assert_array_equal(read(dicom(frames, "MONOCHROME1")).frames, 255 - frames)


@pytest.mark.parametrize("bits", [10, 12, 16])
def test_more_than_eight_bits_are_scaled_by_the_range_of_the_bits(bits, ramp):
    values = (ramp * 97 % 2**bits).astype(np.uint16)
    expected = np.rint(values / (2**bits - 1) * 255)
    np.testing.assert_array_equal(read(dicom(values, BitsStored=bits, HighBit=bits - 1)).frames, expected)


def test_signed_values_start_at_the_lowest(ramp):
    values = (ramp * 100 % 65536).astype(np.uint16)
    signed = (values.astype(np.int32) - 32768).astype(np.int16)
    np.testing.assert_array_equal(read(dicom(signed)).frames, np.rint(values / 65535 * 255))


def test_colours_become_their_luminance():
    colours = np.random.default_rng(0).integers(0, 256, (2, 12, 14, 3), dtype=np.uint8)
    expected = colours @ np.array([0.299, 0.587, 0.114])
    assert np.abs(read(dicom(colours, "RGB")).frames - expected).max() < 1
    planes = dicom(colours, "RGB", PlanarConfiguration=1)
    planes.PixelData = np.moveaxis(colours, 3, 1).tobytes()
    np.testing.assert_array_equal(read(planes).frames, read(dicom(colours, "RGB")).frames)


def test_the_luminance_of_ybr_is_its_first_channel():
    luminance = np.random.default_rng(1).integers(20, 236, (1, 12, 14), dtype=np.uint8)
    grey = np.stack([luminance, *[np.full_like(luminance, 128)] * 2], axis=-1)
    assert np.abs(read(dicom(grey, "YBR_FULL")).frames.astype(int) - luminance).max() <= 1


def test_a_palette_is_looked_up(ramp):
    numbers = (ramp % 200).astype(np.uint8)
    table = (np.arange(256)[::-1].astype(np.uint16) * 257).tobytes()
    colours = ("Red", "Green", "Blue")
    entries = {f"{colour}PaletteColorLookupTableDescriptor": [256, 0, 16] for colour in colours}
    data = dicom(numbers, "PALETTE COLOR", **entries)
    for colour in colours:
        data.add_new(pydicom.datadict.tag_for_keyword(f"{colour}PaletteColorLookupTableData"), "OW", table)
        data[f"{colour}PaletteColorLookupTableDescriptor"].VR = "US"
    np.testing.assert_array_equal(read(data).frames, 255 - numbers)


def test_jpeg_and_run_length_clips_are_decoded(ramp):
    smooth = np.tile(np.linspace(0, 255, 64).astype(np.uint8), (3, 48, 1))
    packed = []
    for frame in smooth:
        buffer = io.BytesIO()
        PIL.Image.fromarray(frame).save(buffer, "JPEG", quality=95)
        packed.append(buffer.getvalue())
    data = dicom(smooth)
    data.file_meta.TransferSyntaxUID = uid.JPEGBaseline8Bit
    data.PixelData = encapsulate(packed)
    assert np.abs(read(data).frames.astype(int) - smooth).max() <= 3
    data = dicom(smooth)
    data.compress(uid.RLELossless)
    np.testing.assert_array_equal(read(data).frames, smooth)


# Spacing


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
def test_the_height_of_a_pixel_comes_from_the_region_or_the_spacing(elements, expected, ramp):
    data = dicom((ramp % 256).astype(np.uint8), **elements)
    height, width = pixel_spacing(data)
    assert height / width == pytest.approx(expected)
    assert read(data).frames.shape == (1, round(20 * expected), 30)


def test_a_circle_seen_through_flat_pixels_comes_out_round():
    y, x = np.mgrid[:200, :100]
    squeezed = np.where(np.hypot((y - 100) / 2, x - 50) < 40, 200, 0).astype(np.uint8)[None]
    frame = read(dicom(squeezed, PixelSpacing=[0.1, 0.2])).frames[0] > 100
    rows, columns = np.nonzero(frame)
    assert np.ptp(rows) == pytest.approx(np.ptp(columns), abs=2)


# The sector


def overlap(found: np.ndarray | None, expected: np.ndarray) -> float:
    assert found is not None
    return (found & expected).sum() / (found | expected).sum()


@pytest.mark.parametrize("shape", [(480, 640), (600, 800), (240, 320), (768, 1024)])
@pytest.mark.parametrize("frames", [1, 6])
def test_the_sector_is_found_among_text(shape, frames):
    pictures, inside = clip_of(frames, shape)
    sector = find_sector(pictures)
    assert overlap(sector, inside) > 0.9
    kept = pictures * sector
    assert kept[:, : shape[0] // 6, : shape[1] // 5].max() == 0
    assert kept[:, int(0.95 * shape[0]) :].max() == 0
    assert kept[:, inside].sum() > 0.999 * pictures[:, inside].sum()


def test_a_frozen_clip_is_treated_as_a_still():
    pictures, inside = clip_of(1)
    assert overlap(find_sector(np.repeat(pictures, 5, axis=0)), inside) > 0.9


def test_a_running_trace_and_a_clock_do_not_widen_the_sector():
    pictures, inside = clip_of(8)
    for number, picture in enumerate(pictures):
        columns = np.arange(640)
        picture[(440 - 12 * (columns % (80 + number) < 4)).astype(int), columns] = 220
        picture[20:32, 500 + 2 * number] = 255
    assert overlap(find_sector(pictures), inside) > 0.9


def test_a_picture_without_screen_loses_nothing():
    """As the images of TMED-2 are: 112 pixels, no text."""
    shape = (112, 112)
    picture = (speckle(shape, grain=0.8) * fan(shape)).astype(np.uint8)[None]
    assert (picture * find_sector(picture)).sum() > 0.999 * picture.sum()


@pytest.mark.parametrize(
    "frames",
    [
        np.zeros((1, 1, 1), np.uint8),
        np.zeros((2, 64, 64), np.uint8),
        np.full((1, 64, 64), 90, np.uint8),
        write_text(np.zeros((480, 640), np.uint8))[None],
    ],
    ids=["one pixel", "black", "grey", "text alone"],
)
def test_a_screen_without_speckle_has_no_sector(frames):
    assert find_sector(frames) is None
    with pytest.raises(UnreadableImage, match="no ultrasound sector"):
        prepare_frames(Clip(frames))


def test_frames_are_prepared_as_in_training():
    """Longer side to 112, nothing below or on the right of the rest."""
    pictures, inside = clip_of(3)
    prepared = prepare_frames(Clip(pictures))
    assert prepared.shape == (3, 112, 112)
    assert prepared[:, 84:].max() == 0
    small = np.asarray(PIL.Image.fromarray((pictures[0] * inside).astype(np.uint8)).resize((112, 84)))
    assert np.abs(prepared[0, :84].astype(int) - small).mean() < 1
    assert prepare_frames(Clip(pictures), mask=False)[:, 80:84].max() > 50


@pytest.fixture(scope="module")
def echo() -> Clip:
    with open(str(get_testdata_file("examples_ybr_color.dcm")), "rb") as file:
        return read_dicom(file.read())


def test_a_real_echo_is_read(echo):
    """Thirty frames of an apical view with menus around; its region speaks of a larger picture than the file
    has.
    """
    assert echo.frames.shape == (30, 240, 320)
    bright = ndimage.center_of_mass(echo.frames[:, 20:210, 60:260].mean(0))
    assert 60 < bright[0] < 130
    assert 70 < bright[1] < 130


@pytest.mark.parametrize("chosen", [slice(None), slice(1), slice(20, 21)], ids=["clip", "first", "later"])
def test_text_and_menus_of_a_real_echo_are_black(echo, chosen):
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


def with_meta(frames: np.ndarray, syntax: str, pixels: bytes | None = None) -> bytes:
    data = dicom(frames)
    data.PixelData = encapsulate([pixels or b"\xff\xd8"])
    data.file_meta.TransferSyntaxUID = syntax
    data["PixelData"].is_undefined_length = True
    return encoded(data)


GREY = (np.arange(600) % 256).reshape(1, 20, 30).astype(np.uint8)
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "text": (b"Dear doctor", "no image of a known format"),
    "no preamble": (encoded(dicom(GREY))[132:], "no image of a known format"),
    "preamble alone": (b"\0" * 128 + b"DICM", "without pixels"),
    "garbage behind the preamble": (
        b"\0" * 128 + b"DICM" + bytes(range(256)) * 9,
        "damaged|without pixels|syntax",
    ),
    "no pixels": (encoded(dicom(None)), "without pixels"),
    "cut off in the header": (encoded(dicom(GREY))[:300], "damaged|without pixels|syntax"),
    "cut off in the pixels": (encoded(dicom(GREY))[:-100], "damaged"),
    "fewer frames than stated": (encoded(dicom(GREY, NumberOfFrames=4)), "damaged"),
    "video": (with_meta(GREY, uid.MPEG4HP41), "stored as MPEG-4 AVC/H.264 High Profile.*: convert it"),
    "unknown syntax": (
        encoded(dicom(GREY)).replace(b"1.2.840.10008.1.2.1", b"1.2.840.99999.1.2.1"),
        "transfer syntax is missing or unknown",
    ),
    "damaged jpeg": (with_meta(GREY, uid.JPEGBaseline8Bit), "damaged"),
    "unknown colours": (encoded(dicom(GREY, NAME)), "photometric interpretation"),
    "cmyk": (encoded(dicom(GREY, "CMYK")), "photometric interpretation"),
    "grey with three samples": (
        encoded(dicom(np.stack([GREY] * 3, -1), "MONOCHROME2")),
        "photometric interpretation",
    ),
    "palette without colours": (encoded(dicom(GREY, "PALETTE COLOR")), "damaged"),
    "zero spacing": (encoded(dicom(GREY, PixelSpacing=[0, 0])), "pixel spacing"),
    "negative spacing": (encoded(dicom(GREY, PixelSpacing=[-1, 1])), "pixel spacing"),
    "extreme spacing": (encoded(dicom(GREY, PixelSpacing=[1, 1e-6])), "pixel spacing"),
    "one number for a spacing": (encoded(dicom(GREY, PixelSpacing=[0.5])), "damaged"),
    "region of no height": (
        encoded(dicom(GREY, SequenceOfUltrasoundRegions=[region(0, 1)])),
        "pixel spacing",
    ),
    "no rows": (encoded(dicom(GREY, Rows=0)), "no pixels"),
    "huge frames": (encoded(dicom(GREY, Rows=65535, Columns=65535)), "536,870,912 and more"),
    "a million frames": (encoded(dicom(GREY, NumberOfFrames=1_000_000)), "536,870,912 and more"),
    "bits that do not exist": (encoded(dicom(GREY, BitsAllocated=12)), "damaged"),
    "all black": (encoded(dicom(np.zeros((3, 20, 30), np.uint8))), "all its pixels are equal"),
    "one pixel": (encoded(dicom(np.full((1, 1, 1), 7, np.uint8))), "all its pixels are equal"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_dicom_file_has_one_clear_reason(kind, tmp_path, capsys, caplog):
    content, reason = BAD_FILES[kind]
    (tmp_path / "file").write_bytes(content)
    with caplog.at_level(logging.DEBUG), pytest.raises(UnreadableImage, match=reason) as found:
        read_clip(Tree(tmp_path), "file")
    said = f"{found.value} {capsys.readouterr()} {caplog.text}"
    assert NAME not in said
    assert "\n" not in str(found.value)


def test_compressed_pixels_without_a_decoder_say_what_to_install(monkeypatch):
    from pydicom.pixels import get_decoder

    monkeypatch.setattr(get_decoder(uid.JPEGLSLossless), "_available", {})
    with pytest.raises(
        UnreadableImage, match=r"compressed as JPEG-LS Lossless.*: install a decoder: pip install"
    ):
        read_dicom(with_meta(GREY, uid.JPEGLSLossless))


def test_without_pydicom_the_reason_says_so(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    with pytest.raises(UnreadableImage, match=r"pip install 'hf_fixastep\[echo\]'"):
        read_dicom(encoded(dicom(GREY)))


def test_every_file_that_pydicom_ships_is_read_or_has_a_reason():
    """Other organs, other machines, and files that are broken on purpose; nothing else than a reason may
    come.
    """
    folder = Path(str(get_testdata_file("examples_ybr_color.dcm"))).parent
    used, reasons = [], {}
    for path in sorted(folder.glob("*.dcm")):
        try:
            read_dicom(path.read_bytes())
            used.append(path.name)
        except UnreadableImage as error:
            reasons[path.name] = str(error)
    assert {
        "examples_ybr_color.dcm",
        "MR_small_RLE.dcm",
        "SC_rgb_jpeg_dcmtk.dcm",
        "examples_palette.dcm",
    } <= set(used)
    assert reasons["MR_truncated.dcm"].startswith("its header or its pixels are damaged")
    assert reasons["rtplan.dcm"] == "it is a DICOM file without pixels"


# Other formats


def put_meta_image(folder: Path, pixels: np.ndarray, **entries: str) -> str:
    header = {
        "NDims": "3",
        "BinaryData": "True",
        "CompressedData": "False",
        "ElementSpacing": "0.2 0.1 1",
        "DimSize": " ".join(map(str, pixels.shape[::-1])),
        "ElementType": "MET_UCHAR",
        "ElementDataFile": "clip.raw",
    }
    (folder / "clip.mhd").write_text(
        "".join(f"{key} = {value}\n" for key, value in (header | entries).items())
    )
    (folder / "clip.raw").write_bytes(pixels.tobytes())
    return "clip.mhd"


def test_a_meta_image_clip_is_squared_and_stretched_frame_by_frame(tmp_path):
    pixels = np.random.default_rng(0).integers(10, 100, (3, 40, 30), dtype=np.uint8)
    name = put_meta_image(tmp_path, pixels)
    clip = read_clip(Tree(tmp_path), name)
    assert clip.frames.shape == (3, 20, 30)
    assert clip.study is None
    assert [(frame.min(), frame.max()) for frame in clip.frames] == [(0, 255)] * 3
    prepare_frames(clip)  # noise without a sector: such files are no screens, and are not masked


@pytest.mark.parametrize(
    "entries",
    [
        {"ElementType": NAME},
        {"DimSize": f"{NAME} 40 3"},
        {"ElementSpacing": f"{NAME} 1 1"},
        {"ElementDataFile": f"{NAME}.raw"},
    ],
    ids=lambda entries: next(iter(entries)),
)
def test_a_bad_meta_image_does_not_quote_its_header(entries, tmp_path):
    name = put_meta_image(tmp_path, np.zeros((3, 40, 30), np.uint8), **entries)
    with pytest.raises(UnreadableImage, match=r"missing|beside") as found:
        read_clip(Tree(tmp_path), name)
    assert NAME not in str(found.value)


def test_values_of_a_nifti_that_are_not_numbers_are_a_reason(tmp_path):
    nibabel = pytest.importorskip("nibabel", reason="needs the extra echo")
    values = np.random.default_rng(0).random((30, 20)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / "good.nii.gz")
    values[3, 4] = np.nan
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / "bad.nii.gz")
    assert read_clip(Tree(tmp_path), "good.nii.gz").frames.shape == (1, 20, 30)
    with pytest.raises(UnreadableImage, match="not numbers"):
        read_clip(Tree(tmp_path), "bad.nii.gz")


def test_outlines_are_passed_over(tmp_path):
    (tmp_path / "patient0001_2CH_ED_gt.nii.gz").write_bytes(b"")
    with pytest.raises(UnreadableImage, match="outline"):
        read_clip(Tree(tmp_path), "patient0001_2CH_ED_gt.nii.gz")


def test_a_picture_of_any_mode_is_grey(tmp_path):
    colours = np.random.default_rng(0).integers(0, 256, (12, 14, 3), dtype=np.uint8)
    PIL.Image.fromarray(colours).save(tmp_path / "still.png")
    expected = colours @ np.array([0.299, 0.587, 0.114])
    assert np.abs(read_clip(Tree(tmp_path), "still.png").frames[0] - expected).max() < 1
