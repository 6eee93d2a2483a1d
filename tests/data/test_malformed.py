"""What goes wrong with folders and image files, as tables: what is made, and what has to come of it."""

import functools
import io
import os
import re
import resource
import shutil
import struct
import unicodedata
import zipfile
import zlib
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import PIL.Image
import pytest

from hf_fixastep.data import folder_report, load_dataset


PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _no_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@functools.cache
def image(kind: str, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def header(width: int, height: int, depth: int = 8) -> bytes:
    return PNG + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0))


@functools.cache
def bomb(width: int, height: int) -> bytes:
    """A complete black PNG with one bit per pixel: a few kilobytes that PIL would decode to one byte per
    pixel.
    """
    packer = zlib.compressobj(1)
    row = bytes(1 + (width + 7) // 8)
    data = b"".join(packer.compress(row * 100) for _ in range(height // 100)) + packer.flush()
    return header(width, height, depth=1) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("../../escape.png", image("PNG"))
    return buffer.getvalue()


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :]


# name of the file -> its bytes, or what makes it; and why it cannot be read
BROKEN = {
    "zero bytes.png": (b"", "it is empty"),
    "page.png": (b"<!DOCTYPE html><html><body>404</body></html>", "it is no image of a known format"),
    "random.jpg": (np.random.default_rng(0).bytes(5000), "it is no image of a known format"),
    "drawing.png": (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "it is no image of a"),
    "program.png": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
        "it is no image of a known",
    ),
    "archive.jpg": (archive(), "it is no image of a known format"),
    "cut.png": (image("PNG")[:2000], "image file is truncated"),
    "cut.jpg": (image("JPEG")[:900], "image file is truncated"),
    "cut.webp": (image("WEBP")[:400], "."),
    "cut.tif": (image("TIFF")[:900], "."),
    "cut.jp2": (image("JPEG2000")[:400], "."),
    "cut.ppm": (image("PPM")[:400], "image file is truncated"),
    "start.png": (PNG, "."),
    "flipped bits.png": (flipped(image("PNG"), 60), "broken data stream"),
    "checksum.png": (flipped(image("PNG"), 30), "it is no image of a known format"),
    "without pixels.png": (header(4, 4) + chunk(b"IEND", b""), "."),
    "without size.png": (header(0, 0) + chunk(b"IEND", b""), "."),
    "nonsense size.ppm": (b"P6 -3 cat 255\n", "."),
    "offset.tif": (b"II*\0\xff\xff\xff\x7f" + bytes(100), "."),
    "bomb.png": (lambda path: path.write_bytes(bomb(30_000, 30_000)), "it has more than 89,478,485 pixels"),
    "small bomb.png": (lambda path: path.write_bytes(bomb(12_000, 10_000)), "it has more than 89,478,485"),
    "bomb.gif": (b"GIF89a\xff\xff\xff\xff\0\0\0" + bytes(50), "."),
    "bomb.ppm": (b"P6 30000 30000 255\n", "it has more than 89,478,485 pixels"),
    "bomb.bmp": (
        b"BM" + struct.pack("<IIIIiiHHIIiiII", 60, 0, 54, 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0),
        "it has mo",
    ),
    "text bomb.png": (
        header(4, 4) + chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(10**8))) + image("PNG")[33:],
        "Decompressed data too large",
    ),
    "link to nowhere.png": (
        lambda path: path.symlink_to(path.parent / "gone.png"),
        "it is a link to nowhere",
    ),
    "link to itself.png": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "link to a device.png": (lambda path: path.symlink_to("/dev/zero"), "it is not a file"),
    "pipe.png": (os.mkfifo, "it is not a file"),
}


# name of the file -> its bytes: odd, but images
ODD = {
    "jpeg.png": image("JPEG"),
    "UPPER.PNG": image("PNG"),
    b"caf\xe9.png": image("PNG"),
    "tab\tnew\nline.png": image("PNG"),
    "-rf.png": image("PNG"),
    "[a](b) %s {x}.png": image("PNG"),
    "garbage behind.png": image("PNG") + bytes(1000),
    "x" * 240 + ".png": image("PNG"),
    "16 bits.ppm": b"P5 2 2 65535\n" + bytes(range(8)),
    "thin.ppm": b"P5 1 20000 255\n" + bytes(20000),
}


def put(path: Path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)


@pytest.fixture
def sides(tmp_path) -> dict[str, Path]:
    for number in range(6):
        put(tmp_path / f"labeled/{'cat' if number % 2 else 'dog'}/{number}.png", image("PNG", number))
    for number in range(3):
        put(tmp_path / f"pile/{number}.jpg", image("JPEG", number))
    return {"labeled": tmp_path / "labeled", "unlabeled": tmp_path / "pile"}


@pytest.fixture
def load(tmp_path):
    def load_here(settings):
        return load_dataset("folders", **settings, cache_dir=tmp_path / "cache")

    return load_here


@pytest.fixture
def refused(load, tmp_path):
    """Loading fails with one sentence and leaves nothing in the cache."""

    def check(settings, sentence: str) -> None:
        with pytest.raises(ValueError, match=sentence) as error:
            load(settings)
        assert type(error.value) is ValueError
        message = str(error.value)
        assert "\n" not in message
        assert message.endswith(".")
        left = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert not [name for name in left if not name.endswith(".lock")]

    return check


@pytest.fixture(autouse=True)
def bounded_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000  # kilobytes; the bomb would take 900,000


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_unlabeled_file_is_skipped_and_listed(name, load, sides):
    content, why = BROKEN[name]
    put(sides["unlabeled"] / "deep" / name, content)
    data = load(sides)
    assert data["unlabeled"]["file_name"] == ["0.jpg", "1.jpg", "2.jpg"]
    skipped = folder_report(data)["skipped"]
    assert list(skipped) == [f"deep/{name}"]
    assert re.search(why, skipped[f"deep/{name}"])


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_labeled_file_is_an_error_that_names_it(name, refused, sides):
    content, why = BROKEN[name]
    put(sides["labeled"] / "dog" / name, content)
    path = re.escape(str(sides["labeled"] / "dog" / name))
    refused(sides, rf"^The labeled image {path} cannot be read: .*{why}.*\. Repair or remove it; ")


@pytest.mark.parametrize("name", ODD)
def test_an_odd_file_is_read_on_both_sides(name, load, sides):
    for folder in (sides["labeled"] / "dog", sides["unlabeled"]):
        put(Path(os.fsdecode(os.fsencode(folder) + b"/" + os.fsencode(name))), ODD[name])
    data = load(sides)
    shown = "caf\\xe9.png" if isinstance(name, bytes) else name
    assert len(data["unlabeled"]) == 4
    assert shown in data["unlabeled"]["file_name"]
    assert f"dog/{shown}" in [
        file_name for split in data if split != "unlabeled" for file_name in data[split]["file_name"]
    ]


def without(sides, side):
    return {name: path for name, path in sides.items() if name != side}


def moved(sides, name):
    """Labeled images in other classes: every letter of `name` is a file, every word a class."""
    shutil.rmtree(sides["labeled"])
    for seed, (number, word) in enumerate((n, w) for w in name.split() for n in range(3)):
        put(sides["labeled"] / word / f"{number}.png", image("PNG", seed))
    return sides


def table(sides, content: str | bytes, side: str = "labeled", suffix: str = "csv"):
    path = sides["labeled"] / f"table.{suffix}"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return {**sides, side: path}


def parquet(sides, **columns):
    pd.DataFrame(columns).to_parquet(sides["labeled"] / "table.parquet")
    return {**sides, "labeled": sides["labeled"] / "table.parquet"}


def with_file(sides, place: str, content=b"x", **settings):
    put(sides["labeled"].parent / place, content)
    return {**sides, **settings}


def only(sides, *names: str):
    """Labeled side with nothing but these files."""
    shutil.rmtree(sides["labeled"])
    sides["labeled"].mkdir()
    for seed, name in enumerate(names):
        put(sides["labeled"] / name, image("PNG", seed))
    return sides


def linked(sides):
    (sides["labeled"].parent / "alias").symlink_to(sides["labeled"])
    return {**sides, "test": sides["labeled"].parent / "alias"}


def copied(sides):
    for path in sides["labeled"].glob("cat/*"):
        path.write_bytes(image("PNG", 1))
    return sides


def unreadable_pile(sides):
    for path in sides["unlabeled"].iterdir():
        path.write_bytes(b"")
    return sides


def composed(sides):
    return moved(sides, f"{unicodedata.normalize('NFC', 'café')} {unicodedata.normalize('NFD', 'café')}")


ROWS = "file_name,label\ncat/1.png,a\ncat/3.png,a\ncat/5.png,a\ndog/0.png,b\ndog/2.png,b\n"
REFUSED = {
    "no labeled side": (lambda s: without(s, "labeled"), "^labeled is not given; expected"),
    "no unlabeled side": (lambda s: without(s, "unlabeled"), "^unlabeled is not given; expected"),
    "a missing labeled folder": (lambda s: {**s, "labeled": "nowhere"}, "^labeled is nowhere, which is"),
    "an image as labeled side": (
        lambda s: {**s, "labeled": s["labeled"] / "cat/1.png"},
        r"^labeled is .*/cat/1\.png, which is no folder; expected a folder with one sub-folder of images",
    ),
    "two labeled folders": (lambda s: {**s, "labeled": ["a", "b"]}, r"^labeled is \['a', 'b'\], but"),
    "a number as labeled side": (lambda s: {**s, "labeled": 3}, "^labeled is 3, but expected one folder"),
    "a glob as labeled side": (lambda s: {**s, "labeled": f"{s['labeled']}/*"}, r"labeled/\*, which is"),
    "labeled images without classes": (
        lambda s: {**s, "labeled": s["unlabeled"], "unlabeled": s["labeled"]},
        r"^Images such as 0\.jpg lie directly in .*pile, but expected one sub-folder per class: move them",
    ),
    "an image beside the classes": (lambda s: with_file(s, "labeled/x.png"), r"^Images such as x\.png lie"),
    "an empty labeled folder": (only, "^labeled is .*, where no image was found; passed over: nothing"),
    "text for images": (lambda s: with_file(only(s), "labeled/a.txt"), "^labeled is .*, where no image was"),
    "an empty class": (lambda s: with_file(s, "labeled/owl/a.txt"), "^The class folder owl in .* has no"),
    "a class of hidden files": (lambda s: with_file(s, "labeled/owl/._1.png"), "^The class folder owl in .*"),
    "one class": (lambda s: moved(s, "cat"), "^labeled has one class, cat, but expected at least two"),
    "classes that differ in case": (lambda s: moved(s, "Cat cat dog"), "^labeled has the classes 'Cat' and"),
    "classes that differ in accents": (composed, "^labeled has the classes .* and .*, which differ only in"),
    "one image per class": (lambda s: only(s, "cat/1.png", "dog/1.png"), "^Cutting validation and test from"),
    "copies of one image": (copied, "needs 3 different images of every class, but 'cat' has 1: add images"),
    "one patient per class": (lambda s: {**s, "group": "(cat|dog)"}, "needs 3 groups of every class, but"),
    "the same folder twice": (lambda s: {**s, "unlabeled": s["labeled"]}, "^labeled and unlabeled are both"),
    "a link to the same folder": (linked, "^labeled and test are both .*alias, but expected a folder of its"),
    "a missing pile": (lambda s: {**s, "unlabeled": "nowhere"}, "^unlabeled is nowhere, which is missing;"),
    "a missing pile among others": (
        lambda s: {**s, "unlabeled": [s["unlabeled"], "no"]},
        "^unlabeled is no, which is",
    ),
    "an image for a pile": (lambda s: {**s, "unlabeled": s["unlabeled"] / "0.jpg"}, r"0\.jpg, which is no"),
    "an empty pile": (lambda s: {**s, "unlabeled": []}, r"^unlabeled is \[\], but expected a folder"),
    "a number for a pile": (lambda s: {**s, "unlabeled": 7}, "^unlabeled is 7, but expected a folder"),
    "a glob without a match": (lambda s: {**s, "unlabeled": f"{s['unlabeled']}/*.tif"}, "where no image was"),
    "a pile of broken files": (unreadable_pile, "^None of the 3 unlabeled files can be read, such as"),
    "a class only for testing": (
        lambda s: {**with_file(s, "test/Dog/1.png", image("PNG", 99)), "test": s["labeled"].parent / "test"},
        "^Unknown class in test, which labeled does not have: 'Dog'. Did you mean dog",
    ),
    "a table without file names": (lambda s: table(s, "path,label\na.png,b\n"), "columns path, label, but"),
    "a table without labels": (lambda s: table(s, "file_name\na.png\n"), "columns file_name, but expected"),
    "a pile's table without file names": (
        lambda s: table(s, "x\na.png\n", "unlabeled"),
        "one called file_name",
    ),
    "a table with semicolons": (lambda s: table(s, "file_name;label\na.png;b\n"), "columns file_name;label,"),
    "an empty table": (lambda s: table(s, ""), r"table\.csv cannot be read as a table: No columns to parse"),
    "a table without rows": (lambda s: table(s, "file_name,label\n"), "where no image was found"),
    "a table of bytes": (
        lambda s: table(s, bytes(range(256)) * 9),
        "table.csv (cannot be read|has the columns)",
    ),
    "a ragged table": (lambda s: table(s, ROWS + "a,b,c,d\n"), "cannot be read as a table: Error tokenizing"),
    "a table without a label": (lambda s: table(s, ROWS + "x.png,\n"), "^Row 6 of .*table.csv has no label:"),
    "a table without a name": (lambda s: table(s, ROWS + " ,a\n"), "^Row 6 of .*table.csv has no file_name:"),
    "a file named twice": (lambda s: table(s, ROWS + "./cat/1.png,b\n"), r"names cat/1\.png 2 times: keep"),
    "a missing labeled file": (lambda s: table(s, ROWS + "gone.png,b\n"), r"labeled/gone\.png cannot be"),
    "a labeled folder in a table": (lambda s: table(s, ROWS + "cat,b\n"), "/labeled/cat cannot be read: it"),
    "parquet that is none": (lambda s: table(s, "PAR1", suffix="parquet"), "table.parquet cannot be read as"),
    "parquet without a label": (
        lambda s: parquet(s, file_name=["cat/1.png", "dog/0.png"], label=["a", None]),
        r"^Row 2 of .*table\.parquet has no label",
    ),
    "a group without parentheses": (lambda s: {**s, "group": "p[0-9]"}, r"^group is 'p\[0-9\]', but"),
    "a misspelt column": (lambda s: {**table(s, ROWS), "group": "lable"}, "^group is 'lable', but expected"),
    "a group that is no expression": (
        lambda s: {**s, "group": "(p"},
        "^group is",
    ),
    "a group that does not match": (lambda s: {**s, "group": r"([1-9])\."}, r"^dog/0\.png has no group: the"),
    "a size of nothing": (lambda s: {**s, "image_size": 0}, "^image_size is 0, but expected a number of"),
    "a size in words": (lambda s: {**s, "image_size": "32x32"}, "^image_size is '32x32', but expected a"),
    "a size of three": (lambda s: {**s, "image_size": [3, 32, 32]}, r"^image_size is \[3, 32, 32\], but"),
    "a negative seed": (lambda s: {**s, "seed": -1}, "^seed is -1, but expected a whole number from 0"),
    "shares of everything": (lambda s: {**s, "test_share": 0.9}, "^validation_share is 0.1 and test_share"),
    "a negative share": (lambda s: {**s, "test_share": -0.1}, "^validation_share is 0.1 and test_share -0.1"),
    "a share in words": (lambda s: {**s, "test_share": "half"}, "^validation_share is 0.1 and test_share"),
    "a misspelt setting": (lambda s: {**s, "unlabelled": "x"}, "^Unknown setting of folders 'unlabelled'."),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_one_sentence(name, refused, sides):
    settings, sentence = REFUSED[name]
    refused(settings(sides), sentence)


def test_a_table_of_the_pile_may_name_files_that_are_missing(load, sides):
    names = "file_name\n../pile/0.jpg\ngone.png\n/gone/too.png\nnul\0.png\n" + str(
        sides["unlabeled"] / "1.jpg"
    )
    data = load(table(sides, names, "unlabeled"))
    assert len(data["unlabeled"]) == 2
    report = folder_report(data)
    assert report["skipped"].keys() >= {"gone.png", "/gone/too.png"}
    assert len(report["skipped"]) == 3
    assert report["outside_root"]["unlabeled"] == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_skipped_and_listed(load, sides):
    (sides["unlabeled"] / "closed").mkdir(mode=0)
    assert list(folder_report(load(sides))["skipped"]) == ["closed"]
