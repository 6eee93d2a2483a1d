"""A small release of FETAL_PLANES_DB with its quirks, and where the real one may be."""

import io
from pathlib import Path

import datasets
import numpy as np
import PIL.Image


ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared/data/fetal_planes"
PLANES = ["Fetal abdomen", "Fetal brain", "Fetal femur", "Fetal thorax", "Maternal cervix"]
BRAIN = ["Trans-thalamic", "Trans-cerebellum", "Trans-ventricular"]
SPLITS = ["labeled", "unlabeled", "validation", "test", "unseen_foreign"]
HEADER = "Image_name;Patient_num;Plane;Brain_plane;Operator;US_Machine;Train "  # with a space, as released
TRAIN, TEST = range(1, 31), range(31, 41)  # patients
TWINS = {"2", "3"}  # one examination under two numbers


def png(pixels: np.ndarray, compress_level: int = 6) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG", compress_level=compress_level)
    return file.getvalue()


def make_rows() -> list[dict]:
    """A row per image; no two files have the same bytes, which tell the rows of a built set."""
    random = np.random.default_rng(0)
    rows = []

    def add(patient: int, plane: str, brain: str, pixels: np.ndarray, compress_level: int = 6) -> None:
        number = sum(row["patient"] == str(patient) for row in rows) + 1
        rows.append(
            {
                "name": f"Patient{patient:05}_Plane_{number}",
                "patient": str(patient),
                "plane": plane,
                "brain": brain,
                "operator": f"Op. {patient % 3}",
                "machine": "Aloka" if patient % 2 else "Voluson E6",
                "train": patient in TRAIN,
                "bytes": png(pixels, compress_level),
            }
        )

    def noise() -> np.ndarray:
        return random.integers(0, 256, (40, 50), dtype=np.uint8)

    for patient in (*TRAIN, *TEST):
        for plane in (*PLANES, "Other"):
            brains = [*BRAIN, "Other"] if plane == "Fetal brain" else ["Not A Brain"]
            for brain in brains:
                add(patient, plane, brain, noise())
    add(2, "Fetal femur", "Not A Brain", shared := noise())
    near = shared.copy()
    near[3, 3] ^= 1
    add(3, "Fetal femur", "Not A Brain", near)
    for patient in (4, 5, *TEST[:2]):  # copies with two planes
        add(patient, "Fetal thorax", "Not A Brain", twice := noise())
        add(patient, "Other", "Not A Brain", twice, 1)
    for patient in TRAIN:  # copies with one
        add(patient, "Maternal cervix", "Not A Brain", twice := noise())
        add(patient, "Maternal cervix", "Not A Brain", twice, 1)
    return rows


ROWS = make_rows()
BY_BYTES = {row["bytes"]: row for row in ROWS}
# The names of images of which there is a copy with another plane.
UNCLEAR = {
    row["name"]
    for row in ROWS
    if (row["patient"] in ("4", "5", "31", "32"))
    and int(row["name"].rpartition("_")[2]) in (10, 11)  # after nine others
}


def write_table(folder: Path, lines: list[str], encoding: str = "utf-8") -> None:
    (folder / "FETAL_PLANES_DB_data.csv").write_text("\n".join(lines) + "\n", encoding=encoding)


def table(rows: list[dict] = ROWS) -> list[str]:
    columns = ("name", "patient", "plane", "brain", "operator", "machine")
    return [HEADER, *(";".join(row[c] for c in columns) + f";{int(row['train'])}" for row in rows)]


def write_folder(folder: Path) -> Path:
    (folder / "Images").mkdir(parents=True)
    for row in ROWS:
        (folder / "Images" / f"{row['name']}.png").write_bytes(row["bytes"])
    write_table(folder, table())
    return folder


def write_parquet(folder: Path, rows: list[dict] = ROWS, **changes) -> Path:
    names = {
        "label": sorted({row["plane"] for row in ROWS}),
        "brain_plane": sorted({r["brain"] for r in ROWS}),
    }
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=names["label"]),
        "brain_plane": datasets.ClassLabel(names=names["brain_plane"]),
        "patient": datasets.Value("int64"),
        "operator": datasets.Value("string"),
        "machine": datasets.Value("string"),
    }
    (folder / "data").mkdir(parents=True)
    for side in ("train", "test"):
        part = [row for row in rows if row["train"] == (side == "train")]
        columns = {
            "image": [{"bytes": row["bytes"], "path": f"{row['name']}.jpg"} for row in part],
            "label": [row["plane"] for row in part],
            "brain_plane": [row["brain"] for row in part],
            "patient": [int(row["patient"]) for row in part],
            "operator": [row["operator"] for row in part],
            "machine": [row["machine"] for row in part],
        }
        half = len(part) // 2
        for shard, rows_of in enumerate((slice(half), slice(half, None))):
            data = datasets.Dataset.from_dict(
                {name: values[rows_of] for name, values in columns.items()},
                features=datasets.Features(features),
            )
            for column, change in changes.items():
                data = change(data, column)
            data.to_parquet(folder / "data" / f"{side}-{shard:05}-of-00002.parquet")
    return folder
