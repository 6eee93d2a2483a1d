"""The published files of FETAL_PLANES_DB: the original release or parquet files, and copies among its images.

Apart from the builder, because `datasets` replaces `open` and `os.path` in modules that hold one.
"""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import datasets
import numpy as np
import pandas as pd
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.utils import tqdm
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from hf_fixastep.checks import check_choice
from hf_fixastep.data.files import (
    COMPRESSED,
    FORMATS,
    Picture,
    UnreadableImage,
    check_unique,
    encode,
    one_line,
    printable,
    read_column,
    read_grey,
)
from hf_fixastep.data.trees import Tree


HOMEPAGE = "https://zenodo.org/records/3904280"
TABLE = "FETAL_PLANES_DB_data.csv"
ADVICE = f"download FETAL_PLANES_ZENODO.zip from {HOMEPAGE}, and give it, or the folder it was extracted to"
PLANES = ("Fetal abdomen", "Fetal brain", "Fetal femur", "Fetal thorax", "Maternal cervix")
LONGEST_SIDE = 256  # pixels to which larger images are reduced, if nothing else is asked for
BRAIN_PLANES = ("Trans-thalamic", "Trans-cerebellum", "Trans-ventricular")
VALUES = {"plane": (*PLANES, "Other"), "brain_plane": (*BRAIN_PLANES, "Other", "Not A Brain")}
CSV_COLUMNS = {
    "name": "Image_name",
    "patient": "Patient_num",
    "plane": "Plane",
    "brain_plane": "Brain_plane",
    "operator": "Operator",
    "machine": "US_Machine",
    "train": "Train",
}
PARQUET_COLUMNS = {
    "plane": "label",
    "brain_plane": "brain_plane",
    "patient": "patient",
    "operator": "operator",
    "machine": "machine",
}
# Bits of 256 in which the hashes of copies may differ: frames that follow each other differ in 5 or more.
DISTANCE = 4


@dataclass
class Release:
    """The rows of the release, by patient and name, and what reads the image file of a row.

    Args:
        rows: the columns name, patient, plane, brain_plane, operator, machine and train, which is a bool.
    """

    rows: pd.DataFrame
    read: Callable[[int], bytes]


def read_release(tree: Tree) -> Release:
    """The table, checked, from the first source that is there."""
    table = tree.find(TABLE)
    if table is not None:
        return read_original(tree, table)
    shards = {side: [name for name in tree if is_shard(name, side)] for side in ("train", "test")}
    missing = [side for side, names in shards.items() if not names]
    if len(missing) == 1:
        raise FileNotFoundError(
            f"{printable(str(tree.root))} has no parquet file of the {missing[0]} images, such as "
            f"{missing[0]}-00000-of-00001.parquet: put the files of both sides there."
        )
    if missing:
        raise FileNotFoundError(
            f"{printable(str(tree.root))} holds neither {TABLE} nor parquet files such as "
            f"train-00000-of-00001.parquet and test-00000-of-00001.parquet: {ADVICE}."
        )
    return read_shards(tree, shards)


def is_shard(name: str, side: str) -> bool:
    """Such as data/train-00000-of-00001.parquet or train/0000.parquet."""
    *_, folder, file = ("", *name.split("/"))
    return file.endswith(".parquet") and (file.startswith(side) or folder == side)


# The original release


def read_original(tree: Tree, name: str) -> Release:
    """The table of the release, whose images lie beside it in Images."""
    path = printable(str(tree.root / name))
    table = read_table(tree, name, path)
    rows = pd.DataFrame({own: read_column(path, table, column) for own, column in CSV_COLUMNS.items()})
    rows["name"] = rows["name"].str.removesuffix(".png")
    wrong = rows.index[~rows["train"].isin(["0", "1"])]
    if len(wrong):
        raise ValueError(
            f"Row {wrong[0] + 1} of {path} has {rows['train'][wrong[0]]!r} in the column Train, but expected "
            "1 for images of training patients or 0 for those of test patients: use the table of the release."
        )
    rows["train"] = rows["train"] == "1"
    rows = in_order(rows, path)
    folder = f"{name[: -len(TABLE)]}Images/"
    places = [f"{folder}{image}.png" for image in rows["name"]]
    absent = [place for place in places if place not in tree]
    if absent:
        raise FileNotFoundError(
            f"{path} names {len(absent):,} images that are not in {folder}, such as {printable(absent[0])}: "
            f"{ADVICE}."
        )
    return Release(rows, lambda row: tree.read(places[row]))


def read_table(tree: Tree, name: str, path: str) -> pd.DataFrame:
    expected = "use the table of the release, which is UTF-8 text with ; between the columns"
    try:
        text = tree.read(name).decode("utf-8-sig")
    except (UnicodeDecodeError, UnreadableImage) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text ({one_line(error)}): {expected}.") from error
    header = text.partition("\n")[0]
    if "\0" in header:
        raise ValueError(f"{path} is not UTF-8 text, as it has bytes of 0: {expected}.")
    other = next((mark for mark in (",", "\t", "|") if mark in header), None)
    if ";" not in header and other:
        raise ValueError(f"{path} has {other!r} between the columns, but expected ';': {expected}.")
    try:
        table = pd.read_csv(io.StringIO(text), sep=";", dtype=object, keep_default_na=False, index_col=False)
    except Exception as error:  # parsers raise nearly anything on a broken file
        raise ValueError(f"{path} cannot be read as a table: {one_line(error)}.") from error
    if not len(table):
        raise ValueError(f"{path} has no rows: {ADVICE}.")
    table.columns = [str(column).strip() for column in table.columns]  # "Train " in the release
    return table


# Parquet files


def read_shards(tree: Tree, shards: dict[str, list[str]]) -> Release:
    """All shards of both sides; their images stay in memory as they are, compressed."""
    parts: list[pd.DataFrame] = []
    images: list[bytes | None] = []
    for side, names in shards.items():
        for name in sorted(names):
            path = printable(str(tree.root / name))
            table = open_shard(tree, name, path)
            features = datasets.Features.from_arrow_schema(table.schema)
            part = pd.DataFrame(
                {own: as_text(table[column], features[column]) for own, column in PARQUET_COLUMNS.items()}
            )
            files = [PurePosixPath(image["path"] or "").stem for image in table["image"].to_pylist()]
            # Where the names are lost, the order of the files is what there is.
            part["name"] = [file or f"{len(parts):05}-{row:06}" for row, file in enumerate(files)]
            part["train"] = side == "train"
            for column in PARQUET_COLUMNS:
                read_column(path, part, column)
            parts.append(part)
            images += table["image"].combine_chunks().field("bytes").to_pylist()
    found = pd.concat(parts, ignore_index=True)
    rows = in_order(found, printable(str(tree.root)))
    return Release(rows, lambda row: images[rows["place"][row]] or b"")


def open_shard(tree: Tree, name: str, path: str) -> pa.Table:
    try:
        table = pq.read_table(pa.BufferReader(tree.read(name)))
    except (pa.ArrowException, OSError, UnreadableImage) as error:
        raise ValueError(
            f"{path} is no complete parquet file ({one_line(error)}): download it again."
        ) from error
    wanted = ("image", *PARQUET_COLUMNS.values())
    missing = [column for column in wanted if column not in table.column_names]
    image = pa.null() if "image" in missing else table.schema.field("image").type
    fits = pa.types.is_struct(image) and {"bytes", "path"} <= {field.name for field in image}
    if missing or not fits:
        raise ValueError(
            f"{path} has the columns {', '.join(table.column_names)}, but expected encoded images "
            f"in image, and {', '.join(PARQUET_COLUMNS.values())}: rename or add them."
        )
    return table


def as_text(values: pa.ChunkedArray, feature: Any) -> list[str]:
    """Cells as text: names for numbers of classes, "" for none."""
    names = dict(enumerate(feature.names)) if isinstance(feature, datasets.ClassLabel) else {}
    return ["" if value is None else str(names.get(value, value)) for value in values.to_pylist()]


# Both


def in_order(rows: pd.DataFrame, path: str) -> pd.DataFrame:
    """The rows by patient and name, with their place before, if nothing is wrong with them."""
    for column, valid in VALUES.items():
        for value in rows[column].unique():
            check_choice(f"{column.replace('_', ' ')} in {path}:", value, valid)
    rows["patient"] = rows["patient"].str.replace(r"^0+(?=.)", "", regex=True)
    shared = set(rows["patient"][rows["train"]]) & set(rows["patient"][~rows["train"]])
    if shared:
        raise ValueError(
            f"{path} has {len(shared):,} patients among both the training and the test images, such as "
            f"patient {min(shared)}, but expected none: use the official split of the release."
        )
    check_unique(path, rows["name"].tolist())
    rows["place"] = range(len(rows))
    return rows.sort_values(["patient", "name"], ignore_index=True)


def read_pixels(release: Release, row: int) -> NDArray:
    """uint8 [H, W]."""
    try:
        return read_grey(release.read(row))
    except UnreadableImage as error:
        name = printable(release.rows["name"][row])
        raise ValueError(f"The image {name} cannot be read: {error}. Download it again.") from error


def to_store(data: bytes, longest_side: int) -> bytes:
    """A grey image: the bytes of the file if they are one that is not too large, otherwise PNG."""
    with PIL.Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = reduced_size(image.size, longest_side)
        if (width, height) == image.size and image.mode == "L" and image.format in COMPRESSED:
            return data
    return encode(Picture(PIL.Image.fromarray(read_grey(data)), "L", None), (height, width))


def reduced_size(size: tuple[int, int], longest_side: int) -> tuple[int, int]:
    """Width and height of an image that is too large, with its aspect ratio; those of others stay."""
    scale = min(1.0, (longest_side or np.inf) / max(size))
    width, height = (max(1, round(scale * side)) for side in size)
    return width, height


# Copies


def find_copies(release: Release) -> NDArray:
    """For every row the number of its set of copies: images that are the same or nearly so."""
    count = len(release.rows)
    bar = tqdm(range(count), "Looking for copies", disable=count <= 2000)
    return group_hashes(np.array([difference_hash(read_pixels(release, row)) for row in bar]))


def difference_hash(pixels: NDArray) -> NDArray:
    """bool [256]: whether each of 16 x 16 places is brighter than the one left of it."""
    small = np.asarray(PIL.Image.fromarray(pixels).resize((17, 16), PIL.Image.Resampling.BOX))
    return (small[:, 1:] > small[:, :-1]).ravel()


def group_hashes(hashes: NDArray) -> NDArray:
    """Numbers of the sets that hashes form, each at most DISTANCE bits from another of its set.

    Hashes that differ in DISTANCE bits agree in one of DISTANCE + 1 parts: only such pairs are looked at.
    """
    pairs: list[tuple[int, int]] = []
    for part in range(DISTANCE + 1):
        alike = defaultdict(list)
        for row, bits in enumerate(np.packbits(hashes[:, part :: DISTANCE + 1], axis=1)):
            alike[bits.tobytes()].append(row)
        for rows in alike.values():
            for one, other in itertools.combinations(rows, 2):
                if np.count_nonzero(hashes[one] != hashes[other]) <= DISTANCE:
                    pairs.append((one, other))
    return components(pairs, len(hashes))


def components(pairs: Sequence[tuple[int, int]], count: int) -> NDArray:
    """For each of `count` things the number of the set that pairs connect it to."""
    ones, others = np.array(pairs, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(pairs), bool), (ones, others)), shape=(count, count))
    return connected_components(graph, directed=False)[1]


def find_persons(patients: NDArray, copies: NDArray) -> NDArray:
    """For every row the number of its patient, one number for patients of whom there is the same image."""
    numbers, count = np.unique(patients, return_inverse=True)[1], len(patients)
    pairs = [(int(number), count + int(group)) for number, group in zip(numbers, copies, strict=True)]
    return np.unique(components(pairs, 2 * count)[numbers], return_inverse=True)[1]
