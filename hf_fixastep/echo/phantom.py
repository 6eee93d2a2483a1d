"""Synthetic echo studies in the layouts of TMED-2, Unity and CAMUS, for running the whole path without them.

fixastep phantom --out phantom [--patients 100 --seed 0]

Hearts are ellipses, and nobody's, seen through speckle and the settings of a machine. A file PHANTOM.txt at
the root of each set tells it from the real one.
"""

from __future__ import annotations

import argparse
import gzip
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import PIL.Image
from rich.console import Console

from hf_fixastep.echo.files import ECHO_VIEWS, MARKER, import_reader


Key = tuple[int, int, int, int]  # seed, patient, study and clip
Ranges = tuple[tuple[float, float], ...]
Hospital = tuple[int, Ranges]

NOTICE = """PHANTOM DATA. These images are synthetic: drawn by hf_fixastep.echo.phantom, of no patient.
Files and folders are laid out as in {name}, but nothing here comes from it. Results on these images say
nothing about hearts, hospitals or the published benchmark.
Made with seed {seed} and {patients} patients.
"""
SETS = {"tmed2": "TMED-2", "unity": "Unity", "camus": "CAMUS", "camus_nifti": "CAMUS (NIfTI)"}
SMALLEST = 5  # patients
# TMED-2: of each folder, patients per patient with both labels, labeled views of a study, and its unlabeled
# images. Shares of views are those of the real set as far as they are known.
BOTH_LABELS = ["PLAX"] * 5 + ["PSAX"] * 2 + ["A4C"] * 3 + ["A2C"] * 2 + ["other"]
TMED2_PARTS: dict[str, tuple[float, list[str], int]] = {
    "view_and_diagnosis_labeled_set": (1, BOTH_LABELS, 5),
    "view_labeled_set": (0.5, ["PLAX"] * 2 + ["PSAX", "A4C", "A2C"], 2),
    "unlabeled_set": (3, [], 8),
}
TMED2_COLUMNS = ["query_key", "view_label", "diagnosis_label"]
FOLD_COLUMNS = [*TMED2_COLUMNS, "view_classifier_split", "diagnosis_classifier_split", "SourceFolder"]
PILE = {"PLAX": 0.16, "PSAX": 0.10, "A4C": 0.14, "A2C": 0.10, "other": 0.5}  # shares among unlabeled images
DEV_SHARES = {"DEV479": 1.0, "DEV165": 0.5, "DEV56": 0.12}  # of the patients that are not for the test
DIAGNOSES = ("no_AS", "mild_AS", "mildtomod_AS", "moderate_AS", "severe_AS")
FIRST_PATIENT, TWO_STUDIES = 1001, 8  # every eighth patient came twice

UNITY_VIEWS = {"PLAX": 0.4, "A4C": 0.27, "A2C": 0.23, "A3C": 0.05, "A5C": 0.05}
UNITY_SHAPES = ((120, 160), (144, 192), (160, 224))
CAMUS_SHAPES = ((102, 134), (112, 144), (122, 158))  # of the newer release
UNITY_FRAMES, CAMUS_FRAMES = 3, 5  # of a clip


# A chamber is an ellipse: its kind, x to the right and z down from the probe in centimetres, half axes across
# and along, and degrees that it is turned. Each is painted over those before it. Apical views start with the
# left ventricle and the left atrium. A kind has a wall, and a share that it loses in systole.
KINDS = {"lv": (0.9, 0.2), "rv": (0.4, 0.2), "atrium": (0.25, -0.2), "vessel": (0.25, 0)}
LEFT = [("lv", 1.6, 6.7, 1.8, 3.8, -6), ("atrium", 1.9, 12.1, 1.9, 1.7, 0)]
FOUR = [*LEFT, ("rv", -2.0, 7.4, 1.4, 3.0, 10), ("atrium", -2.1, 11.9, 1.8, 1.7, 0)]
OUTFLOW = [("vessel", 2.9, 5.2, 2.3, 1.2, -12), ("atrium", 3.1, 8.4, 2.1, 1.5, 0)]
DRAWINGS = {
    "PLAX": [("rv", -0.4, 2.9, 3.0, 0.8, -6), ("lv", -2.3, 6.7, 3.5, 2.0, -8), *OUTFLOW],
    "PSAX": [("rv", -1.7, 5.0, 3.5, 2.6, -25), ("lv", 0.7, 7.0, 2.4, 2.4, 0)],
    "A4C": FOUR,
    "A2C": [("lv", 0.0, 6.7, 2.1, 3.9, -2), ("atrium", 0.25, 12.2, 2.2, 1.8, 0)],
    # of no class: among the unlabeled images, or with a label that is passed over
    "A5C": [*FOUR, ("vessel", 0.1, 10.6, 0.8, 1.6, 0)],
    "A3C": [("lv", 0, 6.7, 2.1, 3.9, 0), ("atrium", -1.3, 12, 1.9, 1.7, 0), ("vessel", 1.9, 11.4, 1, 2, 15)],
    "arch": [("vessel", 0, 6, 4, 2, 0), ("vessel", 0.3, 10.5, 2.3, 1.2, 0)],
    "cava": [("vessel", -0.5, 8, 5.5, 0.9, -10), ("atrium", 4, 8.6, 1.9, 2.1, 0)],
}
OTHER = ("A5C", "A3C", "arch", "cava")


# A hospital is a number, and the ranges of depth in centimetres, half angle in degrees, gain and gamma.
BOSTON: Hospital = 1, ((14, 17.5), (37, 43), (0.8, 1.2), (0.9, 1.1))
UNITED_KINGDOM: Hospital = 2, ((13.5, 16.5), (38, 45), (1.0, 1.5), (0.7, 0.9))
FRANCE: Hospital = 3, ((15, 19), (34, 39), (0.6, 0.9), (1.1, 1.3))
HEART: Ranges = ((0.82, 1.15), (0.75, 1.35), (0.85, 1.15))  # size, thickness of walls, width of ventricles
# flatness and turn in degrees of the cut, centimetres that the probe is off, and a shadow: where and how wide
PROBE: Ranges = ((0.85, 1.15), (-25, 25), (-1.5, 1.5), (-1.2, 1.2), (-1.7, 1.7), (0.1, 0.3))


def draw(
    view: str,
    key: Key,
    shape: tuple[int, int],
    hospital: Hospital,
    frame: int = 0,
    systole: float | None = None,
    pixel_height: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Pixels of a sector, labels of an apical view, and the depth; the same arguments give the same picture.

    A label is 1 in the left ventricle, 2 in its muscle, and 3 in the left atrium.

    Args:
        key: hearts differ by patient, machines by study, the probe by clip.
        shape: height and width in pixels.
        systole: from 0 to 1; at random by default.
        pixel_height: of a pixel, in widths of one.
    """
    heart, machine, probe = (np.random.default_rng([n, hospital[0], *key[:n]]) for n in (2, 3, 4))
    depth, half_angle, gain, gamma = machine.uniform(*zip(*hospital[1], strict=True))
    random = np.random.default_rng([5, hospital[0], *key, frame])
    systole = random.uniform() if systole is None else systole
    centimetres = depth / ((shape[0] - 1) * pixel_height)
    x = ((np.arange(shape[1]) - (shape[1] - 1) / 2) * centimetres).astype(np.float32)
    z = (np.arange(shape[0])[:, None] * pixel_height * centimetres).astype(np.float32)
    radius, angle = np.hypot(x, z) / depth, np.arctan2(x, z) / np.radians(half_angle)
    *cut, shadow, width = probe.uniform(*zip(*PROBE, strict=True))
    tissue, labels = anatomy(view, heart.uniform(*zip(*HEART, strict=True)), cut, systole, x, z)
    tissue *= (1 - 0.4 * radius) * np.where(np.abs(angle - shadow) < width, 0.3, 1)
    grey = np.clip(gain * (tissue + 0.04) * speckle(shape, random), 0, 1) ** gamma
    inside = (radius <= 1) & (np.abs(angle) <= 1)
    return (255 * grey * inside).astype(np.uint8), labels * inside, float(depth)


def speckle(shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """Amplitude of the echo of many scatterers, with a mean of 1 and a grain that grows with the picture."""
    noise = random.standard_normal((2, 63, 84), dtype=np.float32)
    parts = [PIL.Image.fromarray(part).resize(shape[::-1], PIL.Image.Resampling.BICUBIC) for part in noise]
    amplitude = np.hypot(*map(np.asarray, parts))
    return amplitude / amplitude.mean()


def anatomy(
    view: str, heart: Any, cut: Any, systole: float, x: np.ndarray, z: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Brightness of the tissue, and the labels of an apical view."""
    (size, thickness, dilation), (flatness, turn, off_x, off_z), middle = heart, cut, 7.5
    x, z = rotate(x - off_x, z - off_z - middle, turn)
    x, z = x / size, z / (size * flatness) + middle
    bright, labels = np.full(x.shape, 0.3, np.float32), np.zeros(x.shape, np.uint8)
    for number, (kind, at_x, at_z, across, along, turned) in enumerate(DRAWINGS[view]):
        wall, beat = KINDS[kind]
        growth = (dilation if beat > 0 else 1) * (1 - beat * systole)
        across, along = across * growth, along * (1 + growth) / 2
        u, v = rotate(x - at_x, z - at_z, turned)
        outside = (np.hypot(u / across, v / along) - 1) * min(across, along)  # nearly centimetres
        muscle = (outside >= 0) & (outside < wall * thickness)
        bright[muscle], bright[outside < 0] = 0.6, 0.03
        if number < 2:
            labels[outside < 0] = (1, 3)[number]
            labels[muscle & (labels == 0)] = (2, 0)[number]
    return bright, labels


def rotate(x: np.ndarray, z: np.ndarray, degrees: float) -> tuple[np.ndarray, np.ndarray]:
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return x * cosine + z * sine, z * cosine - x * sine


def draw_screen(
    view: str, key: Key, shape: tuple[int, int], hospital: Hospital, frame: int = 0
) -> np.ndarray:
    """A picture with what machines write beside the sector: two lines of text and a scale."""
    random = np.random.default_rng([6, hospital[0], *key])
    view = str(random.choice(OTHER)) if view == "other" else view
    pixels, _, depth = draw(view, key, shape, hospital, frame)
    for line in (1, 5):
        pixels[line : line + 3, 1:19] |= (170 * (random.random((3, 18)) < 0.45)).astype(np.uint8)
    pixels[(np.arange(1, 13, 2) * shape[0] / depth).astype(int), -4:-1] = 200
    return pixels


# Files


def write_phantom(out: str | os.PathLike[str], patients: int = 100, seed: int = 0) -> dict[str, int]:
    """Write the sets tmed2, unity, camus (MetaImage) and camus_nifti below `out`; returns counts of images.

    Args:
        patients: with both labels in TMED-2; the other parts grow with it.
    """
    if patients < SMALLEST:
        raise ValueError(f"patients is {patients}, but three splits and hospitals need at least {SMALLEST}.")
    if seed < 0:
        raise ValueError(f"seed is {seed}, but it cannot be negative.")
    import_reader("nibabel", "NIfTI")  # before anything is written
    roots = {name: Path(out) / name for name in SETS}
    for root in roots.values():
        if root.exists():
            raise FileExistsError(f"{root} is already there: delete it, or write to another folder.")
    for name, root in roots.items():
        put(root / MARKER, NOTICE.format(name=SETS[name], seed=seed, patients=patients))
    generators = [np.random.default_rng([seed, hospital]) for hospital in range(3)]
    tmed2 = write_tmed2(roots["tmed2"], patients, generators[0])
    unity = write_unity(roots["unity"], patients, generators[1])
    camus = write_camus(roots, max(5, patients // 3), generators[2])
    return {"tmed2": tmed2, "unity": unity, "camus": camus, "camus_nifti": camus}


def write_tmed2(root: Path, patients: int, random: np.random.Generator) -> int:
    seed = int(random.integers(2**32))
    rows: list[dict[str, Any]] = []
    orders, first = [], FIRST_PATIENT
    for place, (share, labeled, unlabeled) in TMED2_PARTS.items():
        orders.append(first + random.permutation(round(share * patients)))
        for patient in np.sort(orders[-1]).tolist():
            for study in range(1, 3 if patient % TWO_STUDIES == 0 else 2):
                rows += tmed2_study(place, patient, study, labeled, unlabeled, random)
        first += len(orders[-1])
    for row in rows:
        pixels = draw_screen(row["view"], (seed, *row["key"]), (84, 112), BOSTON)
        padded = np.pad(pixels, ((0, 28), (0, 0)))  # at the bottom alone, as the real ones
        write_png(root / row["SourceFolder"] / row["query_key"], padded)
    named = [row for row in rows if "/labeled" in row["SourceFolder"]]
    write_csv(root / "labels_per_image.csv", named, TMED2_COLUMNS)
    for fold in range(3):
        for dev, share in DEV_SHARES.items():
            write_fold(root / dev / f"TMED2_fold{fold}", rows, fold_of(orders[0], orders[1], fold, share))
    return len(rows)


def tmed2_study(
    place: str, patient: int, study: int, labeled: list[str], unlabeled: int, random: np.random.Generator
) -> list[dict[str, Any]]:
    """The images of one study, with the columns of the tables."""
    pile = random.choice(list(PILE), unlabeled, p=list(PILE.values()))
    diagnosis = str(random.choice(DIAGNOSES)) if place == "view_and_diagnosis_labeled_set" else "Not_Provided"
    rows = []
    for index, view in enumerate((*random.permutation(labeled).tolist(), *pile.tolist())):
        kind = "" if not labeled else "/labeled" if index < len(labeled) else "/unlabeled"
        label = view if view in ECHO_VIEWS else "A4CorA2CorOther"
        labels = (label, diagnosis) if kind == "/labeled" else ("Not_Provided", "Not_Provided")
        columns = (f"{patient}s{study}_{index}.png", *labels, place + kind)
        row = dict(zip((*TMED2_COLUMNS, "SourceFolder"), columns, strict=True))
        rows.append({"view": view, "key": (patient, study, index), **row})
    return rows


def fold_of(both: np.ndarray, views_only: np.ndarray, fold: int, share: float) -> dict[int, str]:
    """The part of each patient: a fifth for the test, and of `share` of the others half for validation."""
    both = np.roll(both, -fold * len(both) // 3)
    test, rest = np.split(both, [max(1, len(both) // 5)])
    chosen = rest[: max(2, round(share * len(rest)))]
    validation, train = np.split(chosen, [len(chosen) // 2])
    views_only = np.roll(views_only, -fold)[: max(1, round(share * len(views_only)))]
    parts = {"test": test, "val": validation, "train": np.concatenate([train, views_only])}
    return {int(patient): part for part, some in parts.items() for patient in some}


def write_fold(stem: Path, rows: list[dict[str, Any]], parts: dict[int, str]) -> None:
    tables: dict[str, list[dict[str, Any]]] = {"labeled": [], "unlabeled": []}
    for row in rows:
        part, pile = parts.get(row["key"][0]), row["SourceFolder"].rpartition("/")[2]
        if pile == "unlabeled":
            part = "unlabeled" if part == "train" else None  # those of tested patients would give them away
        if part is not None:
            diagnosed = part if row["SourceFolder"].startswith("view_and_diagnosis") else "not_used"
            splits = {"view_classifier_split": part, "diagnosis_classifier_split": diagnosed}
            tables[pile].append(row | splits)
    for pile, table in tables.items():
        write_csv(stem.with_name(f"{stem.name}_{pile}part.csv"), table, FOLD_COLUMNS)


def write_unity(root: Path, patients: int, random: np.random.Generator) -> int:
    seed = int(random.integers(2**32))
    views = random.choice(list(UNITY_VIEWS), patients, p=list(UNITY_VIEWS.values())).tolist()
    views[:3] = "PLAX", "A4C", "A2C"
    index: list[dict[str, str]] = []
    for clip, view in enumerate(views):
        code = f"{'02' if clip % 5 == 4 else '01'}-{random.bytes(32).hex()}"
        for frame in sorted(random.choice(60, UNITY_FRAMES, replace=False).tolist()):
            name = f"{code}-{frame:04d}.png"
            pixels = draw_screen(view, (seed, clip, 1, 1), UNITY_SHAPES[clip % 3], UNITED_KINGDOM, frame)
            pixels = pixels if clip % 4 else np.repeat(pixels[..., None], 3, -1)  # some in colour
            write_png(root / "png-cache" / name[:2] / name[3:5] / name[5:7] / name, pixels)
            if clip != patients - 1:  # of which nobody told the view
                index.append({"file": name, "view": view.lower()})
    write_csv(root / "view_index.csv", index, ["file", "view"])
    return UNITY_FRAMES * patients


def write_camus(roots: dict[str, Path], patients: int, random: np.random.Generator) -> int:
    """Both releases of the same patients; the newer one has every second row of the older one."""
    seed = int(random.integers(2**32))
    training = patients - max(1, patients // 10)
    names = [f"patient{number + 1:04d}" for number in range(patients)]
    newer = roots["camus_nifti"] / "CAMUS_public"
    for number, name in enumerate(names):
        place = f"training/{name}" if number < training else f"testing/{names[number - training]}"
        folders = roots["camus"] / place, newer / "database_nifti" / name
        for clip, (chambers, view) in enumerate({"2CH": "A2C", "4CH": "A4C"}.items(), 1):
            write_camus_clip(folders, chambers, view, (seed, number, 1, clip), number < training)
        put(folders[1] / "MANDATORY_CITATION.md", "Phantom data: nothing to cite.\n")
    parts = np.split(np.array(names), [patients - 2 * (patients - training), training])
    for part, group in zip(("training", "validation", "testing"), parts, strict=True):
        put(newer / f"database_split/subgroup_{part}.txt", "".join(f"{name}\n" for name in group))
    return 4 * patients


def write_camus_clip(folders: tuple[Path, Path], chambers: str, view: str, key: Key, outlined: bool) -> None:
    """A clip from diastole to systole; the older release has outlines of training patients alone."""
    height, width = CAMUS_SHAPES[key[1] % len(CAMUS_SHAPES)]
    shape = 2 * height - 1, width  # the older release has nearly twice the rows
    pictures = [draw(view, key, shape, FRANCE, n, n / (CAMUS_FRAMES - 1), 0.5) for n in range(CAMUS_FRAMES)]
    spacing = 10 * pictures[0][2] / (height - 1)  # millimetres
    older, newer = (f"{folder / folder.name}_{chambers}_" for folder in folders)
    for end, rows in {"ED": slice(0, 1), "ES": slice(-1, None), "sequence": slice(None)}.items():
        for number, kind in enumerate(("", "_gt")):
            frames = np.stack([picture[number] for picture in pictures[rows]])
            if not kind or (outlined and end != "sequence"):
                write_metaimage(Path(f"{older}{end}{kind}.mhd"), frames, (spacing, spacing / 2))
            path = Path(f"{newer}{end.replace('seq', 'half_seq')}{kind}.nii.gz")
            write_nifti(path, frames[:, ::2], spacing)
    facts = f"ED: 1\nES: {CAMUS_FRAMES}\nNbFrame: {CAMUS_FRAMES}\nImageQuality: Medium\n"
    for folder in folders:
        put(folder / f"Info_{chambers}.cfg", facts)


def put(path: Path, content: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def write_csv(path: Path, rows: list[dict[str, Any]], columns: list[str]) -> None:
    put(path, pd.DataFrame(rows, columns=columns).to_csv(index=False, lineterminator="\n"))


def write_png(path: Path, pixels: np.ndarray) -> None:
    buffer = io.BytesIO()
    PIL.Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    put(path, buffer.getvalue())


def write_metaimage(path: Path, pixels: np.ndarray, spacing: tuple[float, float]) -> None:
    """uint8 [T, H, W] as a header and a raw file beside it."""
    width, height, time = pixels.shape[::-1]
    put(
        path,
        "ObjectType = Image\nNDims = 3\nBinaryData = True\nBinaryDataByteOrderMSB = False\n"
        f"CompressedData = False\nElementSpacing = {spacing[0]:.6g} {spacing[1]:.6g} 1\n"
        f"DimSize = {width} {height} {time}\nElementType = MET_UCHAR\n"
        f"ElementDataFile = {path.with_suffix('.raw').name}\n",
    )
    put(path.with_suffix(".raw"), pixels.tobytes())


def write_nifti(path: Path, pixels: np.ndarray, spacing: float) -> None:
    """uint8 [T, H, W] with columns first, then rows, and time last if there is any."""
    nibabel = import_reader("nibabel", "NIfTI")
    frames = pixels.transpose(2, 1, 0) if len(pixels) > 1 else pixels[0].T
    image = nibabel.Nifti1Image(frames, np.diag([-spacing, -spacing, 1, 1]))
    image.header.set_xyzt_units("mm")
    put(path, gzip.compress(image.to_bytes(), compresslevel=1, mtime=0))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="fixastep phantom",
        description="Write synthetic echo studies in the layouts of TMED-2, Unity and CAMUS.",
    )
    parser.add_argument("--out", required=True, type=Path, help="Folder for the sets.")
    parser.add_argument("--patients", type=int, default=100, help="Patients with both labels in TMED-2.")
    parser.add_argument("--seed", type=int, default=0, help="The same seed gives the same files.")
    args = parser.parse_args(argv)
    try:
        counts = write_phantom(args.out, args.patients, args.seed)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    console = Console(highlight=False, markup=False, emoji=False)
    for name, count in counts.items():
        console.print(f"{args.out / name}: {count:,} phantom images as in {SETS[name]}", soft_wrap=True)
