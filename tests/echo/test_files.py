"""Reading echo files, with SimpleITK and nibabel as the reference for MetaImage and NIfTI."""

from __future__ import annotations

import gzip
import io
import os
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import matplotlib.image
import nibabel
import numpy as np
import PIL.Image
import pytest
import SimpleITK

from hf_fixastep.data.files import UnreadableImage, read_grey
from hf_fixastep.data.trees import Tree
from hf_fixastep.echo.files import count_pixels, fit, quantile_table, square_pixels, stretch
from hf_fixastep.echo.volumes import Volume, read_volume
from tests.echo.echo_sets import heart, nifti, pack, picture, png, put, put_meta


def read(path: Path) -> Volume:
    return read_volume(Tree(path.parent), path.name)


class TestTree:
    def test_names_are_relative_and_hidden_files_are_passed_over(self, tmp_path):
        for name in ("b/c/x.png", "a.csv", ".hidden", "b/.git/y.png", "__MACOSX/b/x.png"):
            put(tmp_path / name, name)
        tree = Tree(tmp_path)
        assert list(tree) == ["a.csv", "b/c/x.png"]
        assert tree.read("b/c/x.png") == b"b/c/x.png"
        assert "x.png" not in tree

    @pytest.mark.parametrize(
        ("member", "name"),
        [
            ("x.png", "set/x.png"),
            ("set/x.png", "set/set/x.png"),
            ("./labeled/x.png", "set/labeled/x.png"),
            ("labeled\\x.png", "set/labeled/x.png"),
        ],
    )
    def test_a_zip_file_stands_for_the_folder_it_would_become(self, tmp_path, member, name):
        with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
            archive.writestr(member, b"content")
        for root in (tmp_path, tmp_path / "set.zip"):
            assert list(Tree(root)) == [name]
            assert Tree(root).read(name) == b"content"
        assert os.listdir(tmp_path) == ["set.zip"]  # nothing was extracted

    def test_an_extracted_folder_goes_before_its_zip_file(self, tmp_path):
        put(tmp_path / "labeled/x.png", b"in the zip file")
        put(tmp_path / "labeled/y.png", b"only there")
        pack(tmp_path / "labeled")
        put(tmp_path / "labeled/x.png", b"on the disk")
        assert [Tree(tmp_path).read(f"labeled/{name}") for name in ("x.png", "y.png")] == [
            *(b"on the disk", b"only there")
        ]

    def test_names_in_a_zip_file_lead_nowhere_else(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
            archive.writestr("../../escape.png", b"inside")
        put(tmp_path.parent / "escape.png", b"outside")
        assert list(Tree(tmp_path)) == []  # passed over, as its first part starts with a point

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
        changes = [
            lambda: put(tmp_path / "a/x.png", b"one"),
            lambda: put(tmp_path / "a/y.png", b"new"),
            lambda: put(tmp_path / "a/x.png", b"longer"),
            lambda: os.utime(tmp_path / "a/x.png", (10**9, 10**9)),
            lambda: pack(tmp_path / "a"),
        ]
        seen = set()
        for change in changes:
            change()
            assert Tree(tmp_path).fingerprint == Tree(tmp_path).fingerprint
            seen.add(Tree(tmp_path).fingerprint)
        assert len(seen) == len(changes)

    def test_find_compares_whole_parts(self, tmp_path):
        for name in ("x/not_DEV56/a.csv", "x/DEV56/a.csv.bak", "y/DEV56/a.csv"):
            put(tmp_path / name, b"")
        assert Tree(tmp_path).find("nothing", "DEV56/a.csv") == "y/DEV56/a.csv"
        assert Tree(tmp_path).find("nothing") is None

    @pytest.mark.parametrize("damage", ["password", "wrong byte"])
    def test_a_broken_member_of_a_zip_file_is_told(self, damage, tmp_path):
        put(tmp_path / "set/x.png", bytes(1000))
        content = bytearray(pack(tmp_path / "set").read_bytes())
        if damage == "password":
            for start, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
                content[content.index(start) + offset] |= 1
        put(tmp_path / "set.zip", content.replace(bytes(1000), bytes(999) + b"x"))
        with pytest.raises(UnreadableImage, match="encrypted" if damage == "password" else "Bad CRC-32"):
            Tree(tmp_path).read("set/x.png")

    def test_pipes_huge_and_missing_files_are_not_read(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.png")
        with open(tmp_path / "x.raw", "wb") as file:
            file.truncate(2**33)  # takes no room
        reasons = {
            "pipe.png": "it is not a file",
            "x.raw": "it has 8,589,934,592 bytes, and the limit is 536,870,912",
            "gone.png": "it does not exist",
        }
        for name, reason in reasons.items():
            with pytest.raises(UnreadableImage, match=reason):
                Tree(tmp_path).read(name)
        with pytest.raises(
            FileNotFoundError, match=r"There is no folder .*/nowhere: give the one of your down"
        ):
            Tree(tmp_path / "nowhere")


class TestPixels:
    @pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "LA", "1"])
    def test_every_mode_becomes_grey(self, mode):
        grey = PIL.Image.fromarray((picture("x") > 127).astype(np.uint8) * 255)
        buffer = io.BytesIO()
        grey.convert(mode).save(buffer, "PNG")
        assert np.array_equal(read_grey(buffer.getvalue()), np.asarray(grey))

    @pytest.mark.parametrize(
        ("shape", "inner"),
        [((600, 800), (84, 112)), ((800, 600), (112, 84)), ((389, 549), (79, 112)), ((2, 1000), (1, 112))],
    )
    def test_the_longer_side_is_scaled_and_the_rest_black(self, shape, inner):
        pixels = picture("x", shape) // 2 + 100
        expected = np.zeros((112, 112), np.uint8)
        resized = PIL.Image.fromarray(pixels).resize(inner[::-1])  # with PIL's own default
        expected[: inner[0], : inner[1]] = np.asarray(resized)
        assert np.array_equal(fit(pixels), expected)

    def test_stretching_is_what_a_plotting_library_does(self):
        values = heart("x").astype(np.int16) + 40
        buffer = io.BytesIO()
        matplotlib.image.imsave(buffer, values, cmap="gray", format="png")
        plotted = np.asarray(PIL.Image.open(buffer).convert("L")).astype(int)
        assert (stretch(values).min(), stretch(values).max()) == (0, 255)
        assert np.abs(stretch(values) - plotted).max() <= 2  # it cuts twice where we round once

    @pytest.mark.parametrize(
        ("spacing", "height"), [((0.154, 0.308), 48), ((0.4, 0.3), 128), ((0.2, 0.31), 62), ((0.3, 0.3), 96)]
    )
    def test_square_pixels_are_those_of_simpleitk(self, spacing, height):
        pixels = heart("x")
        image = SimpleITK.GetImageFromArray(pixels.astype(np.float64))
        image.SetSpacing(spacing[::-1])
        step = spacing[0] * len(pixels) / height  # the same area, cut into `height` rows
        grid = (0.0, (step - spacing[0]) / 2), (spacing[1], step), (1, 0, 0, 1)
        size, linear = (pixels.shape[1], height), SimpleITK.sitkLinear
        reference = SimpleITK.Resample(image, size, SimpleITK.Transform(), linear, *grid)
        squared = square_pixels(pixels, spacing)
        assert squared.shape == (height, 60)
        assert np.allclose(squared, SimpleITK.GetArrayFromImage(reference), atol=1e-3)

    @pytest.mark.parametrize(
        ("call", "why"),
        [
            (lambda: stretch(np.full((4, 4), 7)), "all its pixels are equal"),
            (lambda: stretch(np.array([[1.0, np.nan]])), "some of its pixels are not numbers"),
            (lambda: read_grey(b""), "it is empty"),
            (lambda: read_grey(b"words"), "it is no image of a known"),
            (lambda: read_grey(png(picture("x"))[:900]), "truncated"),
        ],
    )
    def test_pixels_that_show_nothing_are_told(self, call, why):
        with pytest.raises(UnreadableImage, match=why):
            call()


class TestQuantiles:
    def test_the_table_is_that_of_a_direct_computation(self):
        random = np.random.default_rng(0)
        source = np.minimum(random.gamma(2, 30, 5000), 255).astype(np.uint8)
        target = np.minimum(random.gamma(1, 25, 7001), 255).astype(np.uint8)
        table = quantile_table(count_pixels(source), count_pixels(target))
        for value in np.unique(source):
            share = np.mean(source < value) + np.mean(source == value) / 2
            assert table[value] == np.quantile(target, share, method="inverted_cdf")
        assert np.all(np.diff(table.astype(int)) >= 0)

    def test_black_stays_black_where_the_reference_has_less_of_it(self):
        source, target = (
            np.r_[np.zeros(zeros, np.uint8), np.arange(50, 250, dtype=np.uint8)] for zeros in (400, 300)
        )
        table = quantile_table(count_pixels(source), count_pixels(target))
        assert table[0] == 0
        assert table[249] > 240

    def test_a_set_gets_the_intensities_of_the_reference(self):
        dark = picture("x", (200, 200)) // 2
        for shift in (0, 60):
            table = quantile_table(count_pixels(dark + shift), 7 * count_pixels(dark))
            assert np.array_equal(table[dark + shift], dark)


TYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "float64"]


def values(dtype: str, *shape: int) -> np.ndarray:
    return (picture("x", shape).astype(float) - 100 * (dtype[0] != "u")).clip(-128, 127).astype(dtype)


class TestMetaImage:
    @pytest.mark.parametrize("dtype", TYPES)
    def test_files_of_simpleitk_are_read_as_it_reads_them(self, tmp_path, dtype):
        image = SimpleITK.GetImageFromArray(values(dtype, 2, 30, 20))
        image.SetSpacing((0.308, 0.154, 1.54))
        for suffix, compressed in ((".mhd", False), (".mhd", True), (".mha", False), (".mha", True)):
            path = tmp_path / f"x{compressed}{suffix}"
            SimpleITK.WriteImage(image, str(path), useCompression=compressed)
            volume = read(path)
            assert np.array_equal(volume.frames, SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path))))
            assert volume.spacing == (0.154, 0.308)

    def test_big_endian_pixels_windows_line_ends_and_entries_with_a_default(self, tmp_path):
        pixels = values("int16", 5, 4)
        gone = dict.fromkeys(("ObjectType", "NDims", "BinaryData", "CompressedData"))
        entries = {"ElementType": "MET_SHORT", "BinaryDataByteOrderMSB": "True", **gone}
        path = put_meta(tmp_path / "set/x.mhd", pixels, pixels.astype(">i2").tobytes(), **entries)
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
        pack(tmp_path / "set")
        assert np.array_equal(read_volume(Tree(tmp_path), "set/x.mhd").frames[0], pixels)


class TestNifti:
    @pytest.mark.parametrize("dtype", TYPES)
    @pytest.mark.parametrize("shape", [(30, 20), (1, 30, 20), (4, 30, 20)])
    def test_files_of_simpleitk_are_read_as_it_reads_them(self, tmp_path, dtype, shape):
        image = SimpleITK.GetImageFromArray(values(dtype, *shape))
        image.SetSpacing((0.25, 0.5, 1.0)[: len(shape)])
        for name in ("x.nii", "x.nii.gz"):
            SimpleITK.WriteImage(image, str(tmp_path / name))
            volume = read(tmp_path / name)
            stored = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(tmp_path / name)))
            assert np.array_equal(volume.frames, stored.reshape(-1, 30, 20))
            assert volume.spacing == (0.5, 0.25)

    def test_an_image_is_upright_whatever_the_directions_say(self, tmp_path):
        image = SimpleITK.GetImageFromArray(heart("x"))
        image.SetDirection((-1, 0, 0, -1))
        SimpleITK.WriteImage(image, str(tmp_path / "x.nii.gz"))
        assert np.array_equal(read(tmp_path / "x.nii.gz").frames[0], heart("x"))

    @pytest.mark.parametrize("order", "<>")
    def test_slope_and_byte_order_are_used(self, tmp_path, order):
        pixels = values("int16", 30, 20)
        content = bytearray(nifti(pixels, (0.3, 0.2), kind=4))
        content[108:120] = struct.pack("<3f", 352, 0.5, -3)
        if order == ">":
            header = nibabel.Nifti1Header(bytes(content[:348])).as_byteswapped(">").binaryblock
            content = header + bytes(4) + pixels.astype(">i2").tobytes()
        volume = read(put(tmp_path / "x.nii", bytes(content)))
        assert np.array_equal(volume.frames[0], 0.5 * pixels - 3.0)
        assert volume.spacing == pytest.approx((0.2, 0.3))

    def test_without_nibabel_the_reason_says_so(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "nibabel", None)
        with pytest.raises(
            UnreadableImage, match=r"^NIfTI files need nibabel: pip install 'hf_fixastep\[echo\]'"
        ):
            read(put(tmp_path / "x.nii", nifti(heart("x"))))


PIXELS = heart("x")
BESIDE = "the file of its pixels is not beside it"
SIZE, SPACING = "its DimSize is missing or not two", "its ElementSpacing is missing or not two or three pos"
META_BROKEN = {
    "no raw file": ({"ElementDataFile": "gone.raw"}, BESIDE),
    "a path for the raw file": ({"ElementDataFile": "../x.raw"}, BESIDE),
    "an absolute path": ({"ElementDataFile": "/etc/hostname"}, BESIDE),
    "a list of files": ({"ElementDataFile": "LIST"}, BESIDE),
    "no ElementDataFile": ({"ElementDataFile": None}, "it is no MetaImage header"),
    "raw file cut short": (
        {"data": PIXELS.tobytes()[:-1]},
        "holds 5,759 bytes of pixels, but its header spe",
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
    "no size": ({"DimSize": None}, SIZE),
    "one size": ({"DimSize": "60"}, SIZE),
    "no width": ({"DimSize": "0 96 1"}, SIZE),
    "size in words": ({"DimSize": "John Doe 1"}, SIZE),
    "no spacing": ({"ElementSpacing": None}, SPACING),
    "spacing of zero": ({"ElementSpacing": "0.3 0 1"}, SPACING),
    "negative spacing": ({"ElementSpacing": "-0.3 0.15 1"}, SPACING),
    "spacing that is no number": ({"ElementSpacing": "nan 0.15 1"}, SPACING),
    "spacing in words": ({"ElementSpacing": "John Doe"}, SPACING),
    "infinite spacing": ({"ElementSpacing": "0.3 inf 1"}, "its pixels are 0.3 wide and inf high"),
    "absurd spacing": ({"ElementSpacing": "0.3 300 1"}, "its pixels are 0.3 wide and 300 high"),
    "unknown type": ({"ElementType": "MET_Doe"}, "its ElementType is missing or none of MET_UCHAR, "),
    "wrong type": ({"ElementType": "MET_FLOAT"}, "it holds 5,760 bytes of pixels, but .* speaks of 23,040"),
    "colour": ({"ElementNumberOfChannels": "3"}, "it holds colours, or pixels as text"),
    "pixels as text": ({"BinaryData": "False"}, "it holds colours, or pixels as text"),
}


@pytest.mark.parametrize("case", META_BROKEN)
def test_a_broken_meta_image_is_told(case, tmp_path, capfd):
    changes, why = META_BROKEN[case]
    path = put_meta(tmp_path / "folder/x.mhd", PIXELS, **changes)
    put(tmp_path / "x.raw", PIXELS.tobytes())  # which no name may lead to
    with pytest.raises(UnreadableImage, match=why) as error:
        read(path)
    assert "Doe" not in f"{error.value} {capfd.readouterr()}"


def changed(offset: int, *new: object) -> bytes:
    """A NIfTI file with some bytes replaced."""
    content, new = bytearray(nifti(PIXELS)), struct.pack(*new)
    content[offset : offset + len(new)] = new
    return bytes(content)


INCOMPLETE = "it is no complete NIfTI-1 file"
NIFTI_BROKEN = {
    "gz cut short": (gzip.compress(nifti(PIXELS))[:-900], r"it is damaged \(EOFError\)"),
    "gz with a wrong checksum": (gzip.compress(nifti(PIXELS))[:-8] + bytes(8), r"damaged \(BadGzipFile\)"),
    "text": (b"<html>404</html>", INCOMPLETE),
    "empty": (b"", INCOMPLETE),
    "header cut short": (nifti(PIXELS)[:300], INCOMPLETE),
    "a pair of files": (nifti(PIXELS, magic=b"ni1\0"), INCOMPLETE),
    "another size of the header": (changed(0, "<i", 540), INCOMPLETE),
    "pixels cut short": (
        nifti(PIXELS)[:-10],
        "it holds 5,750 bytes of pixels, but its header speaks of 5,760",
    ),
    "pixels before their place": (changed(108, "<f", 10), "it holds 0 bytes of pixels, but its header"),
    "pixels after the end": (changed(108, "<f", 1e9), "it holds 0 bytes of pixels, but its header"),
    "pixels at no place": (changed(108, "<f", float("nan")), r"it is damaged \(ValueError\)"),
    "spacing of zero": (nifti(PIXELS, zooms=(0.0, 0.3)), "its pixels are 0 wide and 0.3 high"),
    "spacing that is no number": (
        nifti(PIXELS, zooms=(0.3, float("nan"))),
        "its pixels are 0.3 wide and nan",
    ),
    "complex numbers": (nifti(PIXELS, kind=32), "its data type is number 32"),
    "an unknown type": (nifti(PIXELS, kind=9999), "its data type is number 9999"),
    "no dimensions": (changed(40, "<h", 0), r"its dimensions are \[\], expected"),
    "a negative dimension": (changed(42, "<h", -60), r"its dimensions are \[-60, 96\]"),
    "four dimensions": (changed(40, "<8h", 4, 60, 48, 1, 2, 1, 1, 1), "its dimensions are"),
    "huge dimensions": (
        changed(40, "<4h", 3, 32000, 32000, 32000),
        "its pixels take 32,768,000,000,000 bytes",
    ),
}


@pytest.mark.parametrize("case", NIFTI_BROKEN)
def test_a_broken_nifti_file_is_told_and_its_texts_are_not(case, tmp_path, capfd, caplog):
    content, why = NIFTI_BROKEN[case]
    if content[344:347] == b"n+1":  # in the fields db_name, descrip, aux_file and intent_name
        content = content[:14] + b"John Doe" + content[22:148] + b"John Doe" * 13 + content[252:]
    with pytest.raises(UnreadableImage, match=why) as error:
        read(put(tmp_path / "x.nii.gz", content))
    assert "Doe" not in f"{error.value} {capfd.readouterr()} {caplog.text}"
