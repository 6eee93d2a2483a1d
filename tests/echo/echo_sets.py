"""Small TMED-2, Unity and CAMUS folders in the layouts of the real ones; nothing here uses the package."""

from __future__ import annotations

import csv
import gzip
import io
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import PIL.Image


SIDE = 112
BOTH, VIEW_ONLY = "view_and_diagnosis_labeled_set/labeled", "view_labeled_set/labeled"
COLUMNS = [
    *("query_key", "view_label", "diagnosis_label", "view_classifier_split"),
    *("diagnosis_classifier_split", "SourceFolder"),
]
# file, view, split, folder; patient 12 has two studies
TMED2_ROWS = [
    ("10s1_0.png", "PLAX", "train", BOTH),
    ("10s1_3.png", "PSAX", "train", BOTH),
    ("11s1_0.png", "A4C", "train", VIEW_ONLY),
    ("11s1_1.png", "A2C", "train", VIEW_ONLY),
    ("11s1_2.png", "A4CorA2CorOther", "train", VIEW_ONLY),
    ("12s1_0.png", "PSAX", "val", BOTH),
    ("12s2_0.png", "A4C", "val", BOTH),
    ("13s1_7.png", "A2C", "test", BOTH),
    ("14s1_0.png", "PLAX", "test", BOTH),
]
UNLABELED = ["900s1_0.png", "900s1_1.png", "901s1_0.png", "902s2_14.png"]


def picture(name: str, shape: tuple[int, ...] = (SIDE, SIDE)) -> np.ndarray:
    """Noise that only this name gives."""
    return np.random.default_rng(list(name.encode())).integers(0, 256, shape, dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def put(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def put_csv(path: Path, columns: list[str], rows: list) -> Path:
    buffer = io.StringIO()
    csv.writer(buffer).writerows([columns, *rows])
    return put(path, buffer.getvalue())


def tmed2_table(path: Path, rows: list) -> Path:
    cells = [(key, view, "no_AS", part, "not_used", folder) for key, view, part, folder in rows]
    return put_csv(path, COLUMNS, cells)


def write_tmed2(root: Path, rows: list = TMED2_ROWS, unlabeled: list[str] = UNLABELED) -> Path:
    """Fold 0 of DEV56 has the rows as they are; the other folds have no images of the patients 12 and 13."""
    for name, *_, folder in rows:
        put(root / folder / name, png(picture(name)))
    for name in unlabeled:
        put(root / "unlabeled_set" / name, png(picture(name)))
    moved = [(key, view, "val" if key[:2] == "14" else part, folder) for key, view, part, folder in rows]
    tmed2_table(root / "DEV56/TMED2_fold0_labeledpart.csv", rows)
    tmed2_table(root / "DEV56/TMED2_fold1_labeledpart.csv", [row for row in moved if row[0][:2] != "12"])
    tmed2_table(root / "DEV165/TMED2_fold0_labeledpart.csv", rows[2:])
    put_csv(root / "labels_per_image.csv", COLUMNS[:3], [(row[0], row[1], "no_AS") for row in rows])
    return root


def pack(folder: Path, inside: str = "") -> Path:
    """Replace a folder by a zip file, whose members lie in the folder `inside`."""
    with zipfile.ZipFile(folder.with_suffix(".zip"), "w") as archive:
        for path in sorted(folder.rglob("*")):
            archive.write(path, Path(inside, path.relative_to(folder)))
    shutil.rmtree(folder)
    return folder.with_suffix(".zip")


# Unity


def unity_name(clip: int, frame: int, kind: str = "01") -> str:
    return f"{kind}-{clip:02x}{'0123456789abcdef' * 4}"[:67] + f"-{frame:04d}.png"


UNITY_ROWS = [
    (unity_name(0x4D, 0), "plax"),
    (unity_name(0x4D, 31), "plax"),
    (unity_name(0x50, 2), "a4c"),
    (unity_name(0x51, 3, "02"), "A2C"),
    (unity_name(0x52, 0), "a5c"),
    (unity_name(0x53, 0), "a3c"),
]
UNITY_SHAPES = [(60, 80), (60, 80), (90, 70, 3), (112, 112), (60, 80), (60, 80)]


def unity_place(root: Path, name: str) -> Path:
    return root / "png-cache" / name[:2] / name[3:5] / name[5:7] / name


def write_unity(root: Path) -> Path:
    for (name, _), shape in zip(UNITY_ROWS, UNITY_SHAPES, strict=True):
        put(unity_place(root, name), png(picture(name, shape)))
    stray = unity_name(0x99, 5)
    put(unity_place(root, stray), png(picture(stray)))
    put_csv(root / "view_index.csv", ["file", "view"], UNITY_ROWS)
    return root


# CAMUS

META = {
    "ObjectType": "Image",
    "NDims": "3",
    "BinaryData": "True",
    "BinaryDataByteOrderMSB": "False",
    "CompressedData": "False",
    "ElementSpacing": "0.308 0.154 1.54",
    "ElementType": "MET_UCHAR",
}


def heart(name: str, height: int = 96, width: int = 60) -> np.ndarray:
    """Bright at the upper left, with noise; pixels twice as wide as high."""
    fall = np.add.outer(np.linspace(0, 1, height), np.linspace(0, 2, width)) / 3
    return (200 * (1 - fall) + picture(name, (height, width)) / 5).astype(np.uint8)


def put_meta(path: Path, pixels: np.ndarray, data: bytes | None = None, **entries: str | None) -> Path:
    """A .mhd file and its pixels; entries that are None are left out."""
    size = " ".join(map(str, (pixels[None] if pixels.ndim == 2 else pixels).shape[::-1]))
    header = {**META, "DimSize": size, **entries}
    # Always the last.
    header["ElementDataFile"] = header.pop("ElementDataFile", path.with_suffix(".raw").name)
    put(path, "".join(f"{key} = {value}\n" for key, value in header.items() if value is not None))
    if header["ElementDataFile"] is not None:
        put(path.with_suffix(".raw"), pixels.tobytes() if data is None else data)
    return path


def nifti(
    pixels: np.ndarray, zooms: tuple[float, ...] = (0.308, 0.308, 1.0), kind: int = 2, magic: bytes = b"n+1\0"
) -> bytes:
    """uint8 [H, W] or [T, H, W]."""
    shape = pixels.shape[::-1]
    header = bytearray(352)
    header[:4] = struct.pack("<i", 348)
    header[40:56] = struct.pack("<8h", len(shape), *shape, *[1] * (7 - len(shape)))
    header[70:74] = struct.pack("<2h", kind, 8 * pixels.itemsize)
    header[76:108] = struct.pack("<8f", 1, *zooms, *[0.0] * (7 - len(zooms)))
    header[108:116] = struct.pack("<2f", 352, 1)
    header[344:348] = magic
    return bytes(header) + pixels.tobytes()


ENDS = [f"{view}_{phase}" for view in ("2CH", "4CH") for phase in ("ED", "ES")]


def write_camus(root: Path) -> Path:
    """The older release: patients 1 and 2 for training, 1 for testing."""
    for part, patient in (("training", 1), ("training", 2), ("testing", 1)):
        folder = root / part / f"patient{patient:04d}"
        for end in ENDS:
            name = f"{folder.name}_{end}"
            put_meta(folder / f"{name}.mhd", heart(f"{part}{name}"))
            if part == "training":
                put_meta(folder / f"{name}_gt.mhd", np.ones((96, 60), np.uint8))
        for view in ("2CH", "4CH"):
            put_meta(folder / f"{folder.name}_{view}_sequence.mhd", np.zeros((3, 96, 60), np.uint8))
            put(folder / f"Info_{view}.cfg", "ED: 1\nES: 3\nNbFrame: 3\nImageQuality: Good\n")
    return root


def write_camus_nifti(root: Path) -> Path:
    """The newer release, of the same patients, resampled to square pixels."""
    for part, old, patient in (("training", 1, 1), ("training", 2, 2), ("testing", 1, 451)):
        folder = root / "CAMUS_public/database_nifti" / f"patient{patient:04d}"
        for end in ENDS:
            pixels = heart(f"{part}patient{old:04d}_{end}").astype(float)
            square = np.rint((pixels[::2] + pixels[1::2]) / 2).astype(np.uint8)
            put(folder / f"{folder.name}_{end}.nii.gz", gzip.compress(nifti(square)))
            put(folder / f"{folder.name}_{end}_gt.nii.gz", gzip.compress(nifti(np.ones((48, 60), np.uint8))))
        put(folder / "Info_2CH.cfg", "ED: 1\n")
    put(root / "CAMUS_public/database_split/subgroup_testing.txt", "patient0451\n")
    return root
