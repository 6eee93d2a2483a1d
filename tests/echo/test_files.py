"""Reading echo files: SimpleITK and nibabel are the reference for MetaImage and NIfTI, numpy for the
quantiles.
"""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile
import zlib
from pathlib import Path

import matplotlib.image
import numpy as np
import PIL.Image
import pytest

from hf_fixastep.data.files import UnreadableImage
from hf_fixastep.echo.files import (
    Tree,
    count_pixels,
    fit,
    quantile_table,
    read_grey,
    square_pixels,
    stretch,
)
from hf_fixastep.echo.volumes import read_volume
from tests.echo.echo_sets import heart, nifti, pack, picture, png, put, put_meta


@pytest.fixture
def sitk():
    return pytest.importorskip(
        "SimpleITK", reason="SimpleITK, the reference for these formats, is not installed"
    )


@pytest.fixture
def nibabel():
    return pytest.importorskip("nibabel", reason="nibabel, a reference for NIfTI, is not installed")


def read(path: Path):
    return read_volume(Tree(path.parent), path.name)


class TestTree:
    def test_names_are_relative_and_hidden_files_are_passed_over(self, tmp_path):
        for name in ("b/c/x.png", "a.csv", ".hidden", "b/.git/y.png", "__MACOSX/b/x.png"):
            put(tmp_path / name, name)
        tree = Tree(tmp_path)
        assert list(tree) == ["a.csv", "b/c/x.png"]
        assert tree.read("b/c/x.png") == b"b/c/x.png"
        assert "b/c/x.png" in tree
        assert "x.png" not in tree

    @pytest.mark.parametrize(
        ("inside", "name"), [("", "set/labeled/x.png"), ("labeled", "set/labeled/labeled/x.png")]
    )
    def test_a_zip_file_stands_for_the_folder_it_would_become(self, tmp_path, inside, name):
        put(tmp_path / "set/labeled/x.png", b"content")
        pack(tmp_path / "set/labeled", inside)
        tree = Tree(tmp_path)
        assert list(tree) == [name]
        assert tree.read(name) == b"content"
        assert [path.name for path in tmp_path.rglob("*")] == ["set", "labeled.zip"]  # nothing was extracted

    @pytest.mark.parametrize("written", ["./labeled/x.png", "labeled\\x.png"])
    def test_names_in_zip_files_of_other_programs(self, tmp_path, written):
        with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
            archive.writestr(written, b"content")
        tree = Tree(tmp_path)
        assert list(tree) == ["set/labeled/x.png"]
        assert tree.read("set/labeled/x.png") == b"content"

    def test_an_extracted_folder_goes_before_its_zip_file(self, tmp_path):
        put(tmp_path / "labeled/x.png", b"in the zip file")
        put(tmp_path / "labeled/y.png", b"only there")
        pack(tmp_path / "labeled")
        put(tmp_path / "labeled/x.png", b"on the disk")
        tree = Tree(tmp_path)
        assert [tree.read(name) for name in ("labeled/x.png", "labeled/y.png")] == [
            b"on the disk",
            b"only there",
        ]

    def test_one_zip_file_is_a_tree(self, tmp_path):
        put(tmp_path / "CAMUS_public/a/x.png", b"content")
        put(tmp_path / "other.txt", b"")
        tree = Tree(pack(tmp_path / "CAMUS_public"))
        assert list(tree) == ["CAMUS_public/a/x.png"]

    def test_names_in_a_zip_file_lead_nowhere_else(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr("../../escape.png", b"inside")
        put(tmp_path.parent / "escape.png", b"outside")
        tree = Tree(tmp_path)
        assert [tree.read(name) for name in tree] == []  # passed over, as its first part starts with a point

    def test_links_are_followed_but_not_in_circles(self, tmp_path):
        put(tmp_path / "elsewhere/x.png", b"content")
        (tmp_path / "root").mkdir()
        (tmp_path / "root/data").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere/up").symlink_to(tmp_path / "root")
        (tmp_path / "root/broken.png").symlink_to(tmp_path / "gone.png")
        tree = Tree(tmp_path / "root")
        assert list(tree) == ["broken.png", "data/x.png"]
        with pytest.raises(UnreadableImage, match="it is a link to nowhere"):
            tree.read("broken.png")

    def test_the_fingerprint_tells_every_change(self, tmp_path):
        put(tmp_path / "a/x.png", b"one")
        seen = [Tree(tmp_path).fingerprint]
        assert Tree(tmp_path).fingerprint == seen[0]
        put(tmp_path / "a/y.png", b"new")
        seen.append(Tree(tmp_path).fingerprint)
        put(tmp_path / "a/x.png", b"longer")
        seen.append(Tree(tmp_path).fingerprint)
        os.utime(tmp_path / "a/x.png", (10**9, 10**9))
        seen.append(Tree(tmp_path).fingerprint)
        pack(tmp_path / "a")
        seen.append(Tree(tmp_path).fingerprint)
        assert len(set(seen)) == len(seen)

    def test_find_compares_whole_parts(self, tmp_path):
        for name in ("x/not_DEV56/a.csv", "x/DEV56/a.csv.bak", "y/DEV56/a.csv"):
            put(tmp_path / name, b"")
        assert Tree(tmp_path).find("nothing", "DEV56/a.csv") == "y/DEV56/a.csv"
        assert Tree(tmp_path).find("nothing") is None

    def test_a_missing_root_and_a_missing_file(self, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=r"There is no folder .*/nowhere: give the one of your download\."
        ):
            Tree(tmp_path / "nowhere")
        with pytest.raises(UnreadableImage, match="it does not exist"):
            Tree(tmp_path).read("x.png")


class TestPixels:
    @pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "LA", "1"])
    def test_every_mode_becomes_grey(self, mode):
        grey = PIL.Image.fromarray((picture("x") > 127).astype(np.uint8) * 255)
        buffer = io.BytesIO()
        grey.convert(mode).save(buffer, "PNG")
        assert np.array_equal(read_grey(buffer.getvalue()), np.asarray(grey))

    @pytest.mark.parametrize(
        ("shape", "inner"),
        [
            ((600, 800), (84, 112)),
            ((800, 600), (112, 84)),
            ((389, 549), (79, 112)),  # 79.36
            ((112, 112), (112, 112)),
            ((30, 56), (60, 112)),
            ((2, 1000), (1, 112)),
        ],
    )
    def test_the_longer_side_is_scaled_and_the_rest_black(self, shape, inner):
        pixels = picture("x", shape) // 2 + 100
        fitted = fit(pixels)
        expected = np.asarray(PIL.Image.fromarray(pixels).resize(inner[::-1]))  # with PIL's own default
        assert fitted.dtype == np.uint8
        assert np.array_equal(fitted[: inner[0], : inner[1]], expected)
        assert not fitted[inner[0] :].any()
        assert not fitted[:, inner[1] :].any()

    def test_stretching_is_what_a_plotting_library_does(self):
        values = heart("x").astype(np.int16) + 40
        buffer = io.BytesIO()
        matplotlib.image.imsave(buffer, values, cmap="gray", format="png")
        plotted = np.asarray(PIL.Image.open(buffer).convert("L")).astype(int)
        stretched = stretch(values)
        assert (stretched.min(), stretched.max()) == (0, 255)
        assert np.abs(stretched - plotted).max() <= 2  # it cuts twice where we round once

    @pytest.mark.parametrize(
        ("spacing", "height"), [((0.154, 0.308), 48), ((0.4, 0.3), 128), ((0.2, 0.31), 62)]
    )
    def test_square_pixels_are_those_of_simpleitk(self, sitk, spacing, height):
        pixels = heart("x")
        image = sitk.GetImageFromArray(pixels.astype(np.float64))
        image.SetSpacing(spacing[::-1])
        # the same area, cut into `height` rows
        step = spacing[0] * len(pixels) / height
        origin = (0.0, (step - spacing[0]) / 2)
        reference = sitk.Resample(
            image,
            (pixels.shape[1], height),
            sitk.Transform(),
            sitk.sitkLinear,
            origin,
            (spacing[1], step),
            (1, 0, 0, 1),
        )
        squared = square_pixels(pixels, spacing)
        assert squared.shape == (height, 60)
        assert height == round(96 * spacing[0] / spacing[1])
        assert np.allclose(squared, sitk.GetArrayFromImage(reference), atol=1e-3)

    def test_pixels_that_are_square_stay_as_they_are(self):
        assert np.array_equal(square_pixels(heart("x"), (0.308, 0.308)), heart("x"))


class TestQuantiles:
    def test_the_table_is_that_of_a_direct_computation(self):
        random = np.random.default_rng(0)
        source = np.minimum(random.gamma(2, 30, 5000), 255).astype(np.uint8)
        target = np.minimum(random.gamma(1, 25, 7001), 255).astype(np.uint8)
        table = quantile_table(count_pixels(source), count_pixels(target))
        for value in np.unique(source):
            share = np.mean(source < value) + np.mean(source == value) / 2
            assert table[value] == np.quantile(target, share, method="inverted_cdf")
            assert table[value] == min(t for t in np.unique(target) if np.mean(target <= t) >= share)
        assert np.all(np.diff(table.astype(int)) >= 0)

    def test_black_stays_black_where_the_reference_has_less_of_it(self):
        source, target = (np.concatenate([np.zeros(zeros, int), 50 + np.arange(200)]) for zeros in (400, 300))
        table = quantile_table(count_pixels(source.astype(np.uint8)), count_pixels(target.astype(np.uint8)))
        assert table[0] == 0
        assert table[249] > 240

    def test_images_with_the_intensities_of_the_reference_stay_as_they_are(self):
        pixels = picture("x", (300, 300)) // 3
        table = quantile_table(count_pixels(pixels), 7 * count_pixels(pixels))
        assert np.array_equal(table[pixels], pixels)

    def test_a_brighter_set_is_darkened_to_the_reference(self):
        dark = picture("x", (200, 200)) // 2
        table = quantile_table(count_pixels(dark + 60), count_pixels(dark))
        assert np.array_equal(table[dark + 60], dark)

    def test_counts_are_of_all_values(self):
        assert count_pixels(np.array([[0, 3], [3, 255]], np.uint8)).nonzero()[0].tolist() == [0, 3, 255]


TYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "float64"]


def values(dtype: str, *shape: int) -> np.ndarray:
    return (picture("x", shape).astype(float) - 100 * (dtype[0] != "u")).clip(-128, 127).astype(dtype)


class TestMetaImage:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize(
        ("suffix", "compressed"), [(".mhd", False), (".mhd", True), (".mha", False), (".mha", True)]
    )
    def test_files_of_simpleitk_are_read_as_it_reads_them(self, sitk, tmp_path, dtype, suffix, compressed):
        image = sitk.GetImageFromArray(values(dtype, 2, 30, 20))
        image.SetSpacing((0.308, 0.154, 1.54))
        path = tmp_path / f"x{suffix}"
        sitk.WriteImage(image, str(path), useCompression=compressed)
        echo = read(path)
        assert np.array_equal(echo.frames, sitk.GetArrayFromImage(sitk.ReadImage(str(path))))
        assert echo.spacing == (0.154, 0.308)

    def test_files_of_camus_are_read_as_simpleitk_reads_them(self, sitk, tmp_path):
        path = put_meta(tmp_path / "patient0001_2CH_ED.mhd", heart("x"))
        image = sitk.ReadImage(str(path))
        echo = read(path)
        assert np.array_equal(echo.frames, sitk.GetArrayFromImage(image))
        assert echo.frames.shape == (1, 96, 60)
        assert echo.spacing == image.GetSpacing()[1::-1]

    def test_entries_that_have_a_default_may_be_missing(self, tmp_path):
        gone = dict.fromkeys(
            ("ObjectType", "NDims", "BinaryData", "BinaryDataByteOrderMSB", "CompressedData")
        )
        assert np.array_equal(read(put_meta(tmp_path / "x.mhd", heart("x"), **gone)).frames[0], heart("x"))

    def test_big_endian_pixels(self, tmp_path):
        pixels = values("int16", 5, 4)
        entries = {"ElementType": "MET_SHORT", "BinaryDataByteOrderMSB": "True"}
        path = put_meta(tmp_path / "x.mhd", pixels, pixels.astype(">i2").tobytes(), **entries)
        assert np.array_equal(read(path).frames[0], pixels)

    def test_windows_line_ends_and_pixels_in_a_zip_file(self, tmp_path):
        path = put_meta(tmp_path / "set/x.mhd", heart("x"))
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
        pack(tmp_path / "set")
        assert np.array_equal(read_volume(Tree(tmp_path), "set/x.mhd").frames[0], heart("x"))


class TestNifti:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("shape", [(30, 20), (1, 30, 20), (4, 30, 20)])
    def test_files_of_simpleitk_are_read_as_it_reads_them(self, sitk, tmp_path, dtype, shape):
        image = sitk.GetImageFromArray(values(dtype, *shape))
        image.SetSpacing((0.25, 0.5, 1.0)[: len(shape)])
        for name in ("x.nii", "x.nii.gz"):
            sitk.WriteImage(image, str(tmp_path / name))
            echo = read(tmp_path / name)
            stored = sitk.GetArrayFromImage(sitk.ReadImage(str(tmp_path / name)))
            assert np.array_equal(echo.frames, stored.reshape(-1, 30, 20))
            assert echo.spacing == (0.5, 0.25)

    def test_an_image_is_upright_whatever_the_directions_say(self, sitk, tmp_path):
        image = sitk.GetImageFromArray(heart("x"))
        image.SetDirection((-1, 0, 0, -1))
        sitk.WriteImage(image, str(tmp_path / "x.nii.gz"))
        assert np.array_equal(read(tmp_path / "x.nii.gz").frames[0], heart("x"))

    @pytest.mark.parametrize("order", "<>")
    def test_files_of_nibabel_are_read_as_it_reads_them_but_transposed(self, nibabel, tmp_path, order):
        pixels = values("int16", 30, 20)
        header = nibabel.Nifti1Header(endianness=order)
        header.set_data_dtype(np.int16)
        image = nibabel.Nifti1Image(pixels.T.astype(f"{order}i2"), np.diag([-0.3, -0.2, 1, 1]), header)
        image.header.set_slope_inter(0.5, -3)
        nibabel.save(image, tmp_path / "x.nii.gz")
        stored = nibabel.load(tmp_path / "x.nii.gz")
        echo = read(tmp_path / "x.nii.gz")
        assert stored.header.endianness == order
        assert np.allclose(echo.frames[0], stored.get_fdata().T)
        assert np.allclose(echo.spacing, stored.header.get_zooms()[1::-1])

    def test_both_releases_of_an_image_look_alike(self, tmp_path):
        old = read(put_meta(tmp_path / "x.mhd", heart("x")))
        square = square_pixels(old.frames[0], old.spacing)
        put(tmp_path / "x.nii.gz", gzip.compress(nifti(np.rint(square).astype(np.uint8))))
        new = read(tmp_path / "x.nii.gz")
        assert np.abs(square_pixels(new.frames[0], new.spacing) - square).max() <= 0.5
        # Bright at the upper left.
        assert new.frames[0, :20, :20].mean() > new.frames[0, -20:, -20:].mean() + 50


def header_of(**changes: tuple[int, bytes]) -> bytes:
    """A NIfTI file with some bytes replaced, by their offset."""
    content = bytearray(nifti(heart("x")))
    for offset, new in changes.values():
        content[offset : offset + len(new)] = new
    return bytes(content)


def locked() -> bytes:
    """A zip file that asks for a password."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x.png", png(picture("x")))
    content = bytearray(buffer.getvalue())
    for start, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(start) + offset] |= 1
    return bytes(content)


PIXELS = heart("x")
META_BROKEN = {
    "no raw file": ({"ElementDataFile": "gone.raw"}, "the file of its pixels is not beside it"),
    "a path for the raw file": ({"ElementDataFile": "../x.raw"}, "the file of its pixels is not beside it"),
    "an absolute path": ({"ElementDataFile": "/etc/hostname"}, "the file of its pixels is not beside it"),
    "a list of files": ({"ElementDataFile": "LIST"}, "the file of its pixels is not beside it"),
    "no ElementDataFile": ({"ElementDataFile": None}, "it is no MetaImage header"),
    "raw file cut short": (
        {"data": PIXELS.tobytes()[:-1]},
        "it holds 5,759 bytes of pixels, but its header speaks of",
    ),
    "raw file too long": ({"data": PIXELS.tobytes() + b"x"}, "it holds 5,761 bytes of pixels"),
    "empty raw file": ({"data": b""}, "it holds 0 bytes of pixels"),
    "compressed, but not": ({"CompressedData": "True"}, r"it is damaged \(error\)"),
    "compressed and cut short": (
        {"CompressedData": "True", "data": zlib.compress(PIXELS.tobytes())[:2000]},
        "it holds .* bytes of pixels, but its header speaks of 5,760",
    ),
    "a bomb": (
        {"CompressedData": "True", "data": zlib.compress(bytes(10**8))},
        "it holds 5,761 bytes of pixels",  # one more than there should be, and no more
    ),
    "huge size": ({"DimSize": "100000 100000 1"}, "its pixels take 10,000,000,000 bytes, and the limit is"),
    "no size": ({"DimSize": None}, "its DimSize is missing or not two or three positive numbers"),
    "one size": ({"DimSize": "60"}, "its DimSize is missing or not"),
    "no width": ({"DimSize": "0 96 1"}, "its DimSize is missing or not"),
    "size in words": ({"DimSize": "wide high 1"}, "its DimSize is missing or not"),
    "no spacing": (
        {"ElementSpacing": None},
        "its ElementSpacing is missing or not two or three positive numbers",
    ),
    "spacing of zero": ({"ElementSpacing": "0.3 0 1"}, "its ElementSpacing is missing or not"),
    "negative spacing": ({"ElementSpacing": "-0.3 0.15 1"}, "its ElementSpacing is missing or not"),
    "spacing that is no number": ({"ElementSpacing": "nan 0.15 1"}, "its ElementSpacing is missing or not"),
    "spacing in words": ({"ElementSpacing": "John Doe"}, "its ElementSpacing is missing or not"),
    "one spacing": ({"ElementSpacing": "0.3"}, "its ElementSpacing is missing or not"),
    "infinite spacing": ({"ElementSpacing": "0.3 inf 1"}, "its pixels are 0.3 wide and inf high"),
    "absurd spacing": ({"ElementSpacing": "0.3 300 1"}, "its pixels are 0.3 wide and 300 high"),
    "unknown type": ({"ElementType": "MET_SECRET"}, "its ElementType is missing or none of MET_UCHAR, "),
    "wrong type": (
        {"ElementType": "MET_FLOAT"},
        "it holds 5,760 bytes of pixels, but its header speaks of 23,040",
    ),
    "colour": ({"ElementNumberOfChannels": "3"}, "it holds colours, or pixels as text"),
    "pixels as text": ({"BinaryData": "False"}, "it holds colours, or pixels as text"),
}


@pytest.mark.parametrize("case", META_BROKEN)
def test_a_broken_meta_image_is_told(case, tmp_path):
    changes, why = META_BROKEN[case]
    path = put_meta(tmp_path / "x.mhd", PIXELS, **changes)
    with pytest.raises(UnreadableImage, match=why) as error:
        read(path)
    assert "Doe" not in str(error.value)
    assert "SECRET" not in str(error.value)


NIFTI_BROKEN = {
    "gz cut short": (gzip.compress(nifti(PIXELS))[:-900], r"it is damaged \(EOFError\)"),
    "gz with a wrong checksum": (
        gzip.compress(nifti(PIXELS))[:-8] + bytes(8),
        r"it is damaged \(BadGzipFile\)",
    ),
    "text": (b"<html>404</html>", "it is no complete NIfTI-1 file"),
    "empty": (b"", "it is no complete NIfTI-1 file"),
    "header cut short": (nifti(PIXELS)[:300], "it is no complete NIfTI-1 file"),
    "a pair of files": (nifti(PIXELS, magic=b"ni1\0"), "it is no complete NIfTI-1 file"),
    "pixels cut short": (
        nifti(PIXELS)[:-10],
        "it holds 5,750 bytes of pixels, but its header speaks of 5,760",
    ),
    "pixels before their place": (
        header_of(offset=(108, struct.pack("<f", 10))),
        "bytes of pixels, but its header",
    ),
    "spacing of zero": (nifti(PIXELS, zooms=(0.0, 0.3)), "its pixels are 0 wide and 0.3 high"),
    "spacing that is no number": (
        nifti(PIXELS, zooms=(0.3, float("nan"))),
        "its pixels are 0.3 wide and nan high",
    ),
    "complex numbers": (nifti(PIXELS, kind=32), "its data type is number 32"),
    "no dimensions": (header_of(dims=(40, struct.pack("<h", 0))), r"its dimensions are \[\], expected"),
    "a negative dimension": (header_of(dims=(42, struct.pack("<h", -60))), r"its dimensions are \[-60, 96\]"),
    "four dimensions": (
        header_of(dims=(40, struct.pack("<8h", 4, 60, 48, 1, 2, 1, 1, 1))),
        "its dimensions are",
    ),
}


@pytest.mark.parametrize("case", NIFTI_BROKEN)
def test_a_broken_nifti_file_is_told(case, tmp_path):
    content, why = NIFTI_BROKEN[case]
    with pytest.raises(UnreadableImage, match=why):
        read(put(tmp_path / "x.nii.gz", content))


FILES_BROKEN = {
    "password": (locked(), "encrypted"),
    "damaged member": (b"", "Bad CRC-32"),
}


@pytest.mark.parametrize("case", FILES_BROKEN)
def test_a_broken_member_of_a_zip_file_is_told(case, tmp_path):
    content, why = FILES_BROKEN[case]
    if not content:
        put(tmp_path / "set/x.png", bytes(1000))
        content = pack(tmp_path / "set").read_bytes().replace(bytes(1000), bytes(999) + b"x")
    put(tmp_path / "set.zip", content)
    with pytest.raises(UnreadableImage, match=why):
        Tree(tmp_path).read("set/x.png")


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "x.png")
    with pytest.raises(UnreadableImage, match="it is not a file"):
        Tree(tmp_path).read("x.png")


def test_a_huge_file_is_not_read(tmp_path):
    with open(tmp_path / "x.raw", "wb") as file:
        file.truncate(2**33)  # takes no room
    with pytest.raises(UnreadableImage, match="it has 8,589,934,592 bytes, and the limit is 536,870,912"):
        Tree(tmp_path).read("x.raw")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (np.full((4, 4), 7), "all its pixels are equal"),
        (np.array([[1.0, np.nan]]), "some of its pixels are not numbers"),
    ],
)
def test_pixels_that_show_nothing_are_told(values, why):
    with pytest.raises(UnreadableImage, match=why):
        stretch(values)


@pytest.mark.parametrize(
    ("data", "why"),
    [(b"", "it is empty"), (b"words", "it is no image of a known"), (png(picture("x"))[:900], "truncated")],
)
def test_a_broken_picture_is_told(data, why):
    with pytest.raises(UnreadableImage, match=why):
        read_grey(data)
