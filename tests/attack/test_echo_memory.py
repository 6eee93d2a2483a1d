"""Small echo files that would fill the memory."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from pydicom import uid
from pydicom.encaps import encapsulate, generate_frames

from hf_fixastep.data.files import UnreadableImage
from hf_fixastep.data.trees import Tree
from hf_fixastep.echo import clips
from hf_fixastep.echo.clips import read_clip, read_dicom
from tests.echo.test_dicom import dicom, encoded


TOO_LARGE = "more than 16,777,216 square ones each or 536,870,912 together"


def meta_image(height: int, width: int, frames: int, spacing: str) -> bytes:
    header = f"DimSize = {width} {height} {frames}\nElementSpacing = {spacing} 1\nElementType = MET_UCHAR\n"
    pixels = zlib.compress(bytes(height * width * frames), 1)
    return f"{header}CompressedData = True\nElementDataFile = LOCAL\n".encode() + pixels


def png(height: int, width: int) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def dicom_file(rows: int, columns: int, spacing: list[float]) -> bytes:
    return encoded(dicom(np.zeros((1, rows, columns), np.uint8), PixelSpacing=spacing))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tall.mha", lambda: meta_image(4000, 4000, 1, "1 10")),  # 160 million pixels from 16 million
        ("flat.mha", lambda: meta_image(5000, 5000, 1, "10 1")),  # few pixels, but from too many
        ("clip.mha", lambda: meta_image(512, 512, 250, "1 10")),  # each frame would do
        ("picture.png", lambda: png(4097, 4096)),
        ("tall", lambda: dicom_file(2000, 2000, [10, 1])),
    ],
)
def test_frames_that_would_fill_the_memory_are_passed_over(name: str, content: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content())
    with pytest.raises(UnreadableImage, match=TOO_LARGE):
        read_clip(Tree(tmp_path), name)


def test_a_file_that_is_compressed_as_a_whole_is_not_unpacked() -> None:
    """A megabyte of it is a gigabyte."""
    data = dicom(np.zeros((1, 20, 30), np.uint8))
    data.file_meta.TransferSyntaxUID = uid.DeflatedExplicitVRLittleEndian
    with pytest.raises(UnreadableImage, match="compressed as a whole: convert it"):
        read_dicom(encoded(data))


def test_run_lengths_of_more_than_the_frames_are_not_unpacked() -> None:
    data = dicom(np.arange(600).astype(np.uint8).reshape(1, 20, 30))
    data.compress(uid.RLELossless)
    frame = next(generate_frames(data.PixelData, number_of_frames=1))
    assert read_dicom(encoded(data)).frames.shape == (1, 20, 30)
    data.PixelData = encapsulate([frame + b"\x81\0" * 2**16])  # 128 zeros each
    with pytest.raises(UnreadableImage, match="more pixels than its header speaks of"):
        read_dicom(encoded(data))


def test_a_lack_of_memory_counts_as_an_unreadable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(clips, "square_pixels", full)
    (tmp_path / "file").write_bytes(dicom_file(20, 30, [1, 1]))
    (tmp_path / "file.mha").write_bytes(meta_image(20, 30, 1, "1 1"))
    for name in ("file", "file.mha"):
        with pytest.raises(UnreadableImage, match="it does not fit into memory"):
            read_clip(Tree(tmp_path), name)
