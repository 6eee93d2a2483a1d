"""Synthetic echo studies in the directory layouts of TMED-2, Unity and CAMUS, for running the whole path
without them.

fixastep phantom --out phantom [--patients 100 --seed 0]

Hearts are ellipses, and nobody's: a drawing of each view in beam space, complex speckle blurred by the beam,
and a machine's depth, gain and gamma. A file PHANTOM.txt at the root of each set tells it from the real one.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from numpy.typing import NDArray
from rich.console import Console

from hf_fixastep.echo.files import MARKER


Floats = NDArray[np.floating]

NOTICE = """PHANTOM DATA. These images are synthetic: drawn by hf_fixastep.data.phantom, of no patient.
Files and folders are laid out as in {name}, but nothing here comes from it. Results on these images say nothing about
hearts, hospitals or the published benchmark.
Made with seed {seed} and {patients} patients.
"""

VIEWS = ("PLAX", "PSAX", "A4C", "A2C")
SETS = {"tmed2": "TMED-2", "unity": "Unity", "camus": "CAMUS", "camus_nifti": "CAMUS (NIfTI)"}
SMALLEST = 5  # patients

# TMED-2: of each folder, patients per patient with both labels, labeled views of a study, and its unlabeled
# images. Shares of views are those of the real set as far as they are known.
TMED2_PARTS: dict[str, tuple[float, list[str], int]] = {
    "view_and_diagnosis_labeled_set": (
        1,
        ["PLAX"] * 5 + ["PSAX"] * 2 + ["A4C"] * 3 + ["A2C"] * 2 + ["other"],
        5,
    ),
    "view_labeled_set": (0.5, ["PLAX"] * 2 + ["PSAX", "A4C", "A2C"], 2),
    "unlabeled_set": (3, [], 8),
}
PILE = {"PLAX": 0.16, "PSAX": 0.10, "A4C": 0.14, "A2C": 0.10, "other": 0.5}  # shares among unlabeled images
DEVS = {"DEV479": 1.0, "DEV165": 0.5, "DEV56": 0.12}  # shares of the patients that are not for the test
DIAGNOSES = ("no_AS", "mild_AS", "mildtomod_AS", "moderate_AS", "severe_AS")
FIRST_PATIENT, TWO_STUDIES = 1001, 8  # every eighth patient came twice

UNITY_VIEWS = {"PLAX": 0.4, "A4C": 0.27, "A2C": 0.23, "A3C": 0.05, "A5C": 0.05}
UNITY_SHAPES = ((180, 240), (216, 288), (240, 336))
UNITY_FRAMES = 3  # of a clip
# Square pixels; the older release has nearly twice the rows.
CAMUS_SHAPES = ((170, 224), (186, 240), (202, 264))
CAMUS_FRAMES = 5  # from the end of diastole to the end of systole
CAVITY, VESSEL_WALL, MUSCLE, TISSUE, LEAFLET = -54.0, -20.0, -21.0, -36.0, -16.0  # mean echo in decibels
BEAM_GRID = (120, 88)  # samples along a beam, and beams


@dataclass(frozen=True)
class Chamber:
    """An ellipse in centimetres, x to the right and z down from the probe, and its wall."""

    x: float
    z: float
    across: float  # half axes
    along: float
    turn: float = 0.0  # degrees
    wall: float = 0.25
    kind: str = "vessel"  # or ventricle, which shrinks in systole, and atrium, which grows
    inside: float = CAVITY


@dataclass(frozen=True)
class Leaflet:
    """A bright line from a hinge; it turns when the valve opens."""

    x: float
    z: float
    length: float
    closed: float  # degrees; 0 points right, 90 down
    opened: float


def lv(x: float, z: float, across: float, along: float, turn: float = 0.0) -> Chamber:
    return Chamber(x, z, across, along, turn, wall=0.95, kind="ventricle")


def rv(x: float, z: float, across: float, along: float, turn: float = 0.0) -> Chamber:
    return Chamber(x, z, across, along, turn, wall=0.4, kind="ventricle")


def atrium(x: float, z: float, across: float, along: float, turn: float = 0.0) -> Chamber:
    return Chamber(x, z, across, along, turn, kind="atrium")


def mitral(x: float, z: float, half: float = 1.35) -> list[Leaflet]:
    """Also the tricuspid valve: two leaflets that hang towards the apex and open upwards."""
    return [Leaflet(x - half, z, 1.05 * half, 15, -70), Leaflet(x + half, z, 1.05 * half, 165, 250)]


# What is drawn, layer upon layer: first the walls of a layer, then what is inside them. Apical views start
# with the left ventricle and the left atrium.
Drawing = tuple[list[list[Chamber]], list[Leaflet]]
FOUR_CHAMBERS = [
    lv(1.55, 6.7, 1.9, 3.9, -6),
    atrium(1.9, 12.1, 1.9, 1.8),
    rv(-2.0, 7.4, 1.45, 3.1, 10),
    atrium(-2.1, 11.9, 1.85, 1.8),
]
FOUR_VALVES = [*mitral(1.8, 10.3), *mitral(-2.0, 10.1, 1.15)]
TWO_CHAMBERS = [lv(0.0, 6.7, 2.15, 4.0, -2), atrium(0.25, 12.2, 2.2, 1.8), Chamber(-2.7, 11.0, 0.4, 0.4)]
LONG_AXIS = [
    rv(-0.4, 2.9, 3.0, 0.85, -6),
    lv(-2.3, 6.7, 3.7, 2.1, -8),
    Chamber(2.9, 5.2, 2.3, 1.3, -12),
    atrium(3.1, 8.4, 2.1, 1.6),
]
LONG_AXIS_VALVES = [
    Leaflet(1.0, 6.2, 1.9, 100, 165),
    Leaflet(1.6, 9.0, 1.0, 240, 170),
    Leaflet(1.3, 4.5, 1.0, 55, 5),
    Leaflet(1.5, 6.1, 1.0, -75, -15),
]
DRAWINGS: dict[str, Drawing] = {
    "PLAX": ([LONG_AXIS, [Chamber(3.3, 11.4, 0.95, 0.95)]], LONG_AXIS_VALVES),
    "PSAX valve": (
        [
            [rv(-0.3, 3.6, 3.6, 1.15), rv(-3.0, 5.3, 1.1, 1.5, 20), atrium(-2.9, 8.1, 1.5, 1.6)],
            [Chamber(2.6, 5.3, 0.95, 2.0, -20), atrium(0.5, 9.0, 2.3, 1.5)],
            [Chamber(0.1, 6.0, 1.4, 1.4)],
        ],
        [Leaflet(0.1, 6.0, 1.3, angle, angle + 35) for angle in (90, 210, 330)],
    ),
    "PSAX muscle": (
        [
            [rv(-1.7, 5.0, 3.5, 2.6, -25)],
            [lv(0.7, 7.0, 2.4, 2.4)],
            [
                Chamber(-0.5, 8.3, 0.5, 0.4, 0, 0.1, "vessel", MUSCLE),
                Chamber(2.0, 8.2, 0.5, 0.4, 0, 0.1, "vessel", MUSCLE),
            ],
        ],
        [],
    ),
    "A4C": ([FOUR_CHAMBERS], FOUR_VALVES),
    "A2C": ([TWO_CHAMBERS], mitral(0.2, 10.4, 1.5)),
    # of no class: among the unlabeled images, or with a label that is passed over
    "A5C": ([FOUR_CHAMBERS, [Chamber(0.1, 10.6, 0.8, 1.6)]], FOUR_VALVES),
    "A3C": (
        [[lv(0.0, 6.7, 2.1, 3.9), atrium(-1.3, 12.1, 1.9, 1.7), Chamber(1.9, 11.4, 1.0, 2.0, 15)]],
        mitral(-0.9, 10.3, 1.2),
    ),
    "arch": ([[Chamber(0.0, 7.6, 4.0, 3.9)], [Chamber(0.3, 8.9, 2.3, 3.0, 0, 0.25, "vessel", TISSUE)]], []),
    "cava": ([[Chamber(-0.5, 8.0, 5.5, 0.85, -10), atrium(4.0, 8.6, 1.9, 2.1)]], []),
    "subcostal": ([FOUR_CHAMBERS], FOUR_VALVES),
    "zoom": (
        [[Chamber(0.3, 5.5, 4.6, 2.7, -12), atrium(0.5, 12.0, 4.2, 3.0)]],
        [Leaflet(-2.7, 4.2, 2.0, 55, 5), Leaflet(-2.3, 7.5, 2.0, -75, -15)],
    ),
}
PSAX = ("PSAX valve", "PSAX muscle")
OTHER = ("A5C", "A3C", "arch", "cava", "subcostal", "zoom")
PARASTERNAL = ("PLAX", *PSAX)  # seen from nearby
VARIANTS = {"PSAX": PSAX, "other": OTHER}
TURNS = {"subcostal": -65.0}


@dataclass(frozen=True)
class Hospital:
    """How images of one place look; pairs are ranges."""

    depth: tuple[float, float]  # centimetres that fill the picture
    half_angle: tuple[float, float]  # degrees
    gain: tuple[float, float]  # decibels
    gamma: tuple[float, float]
    dynamic_range: float  # decibels from black to white
    haze: tuple[float, float]  # echo of nothing, in decibels
    beam: float  # width of a beam, in beams of BEAM_GRID


BOSTON = Hospital((14, 17.5), (37, 43), (-5, 5), (0.9, 1.15), 50, (-56, -40), 1.6)
UNITED_KINGDOM = Hospital((13.5, 16.5), (38, 45), (0, 9), (0.7, 1.0), 56, (-57, -43), 1.9)
FRANCE = Hospital((15, 19), (34, 39), (-9, -1), (1.25, 1.6), 46, (-58, -46), 1.3)


@dataclass
class Frames:
    """What differs from frame to frame; arrays of one entry per frame."""

    view: NDArray  # keys of DRAWINGS
    size: Floats  # of the heart
    squeeze: Floats  # how flat a cut of it is seen
    wall: Floats  # thickness, as a factor
    dilation: Floats  # of the ventricles
    systole: Floats  # 0 to 1
    turn: Floats  # radians
    x: Floats  # centimetres that the probe is off
    z: Floats
    depth: Floats
    half_angle: Floats  # radians
    gain: Floats
    gamma: Floats
    haze: Floats
    shadow: Floats  # direction of a rib or of lung, as a share of half the sector; beyond 1 there is none
    shadow_width: Floats

    def __len__(self) -> int:
        return len(self.view)

    def take(self, rows: Any) -> Frames:
        return Frames(*(getattr(self, field.name)[rows] for field in fields(self)))


def draw_frames(
    views: Sequence[str],
    patients: Sequence[int] | NDArray,
    studies: Sequence[int] | NDArray,
    hospital: Hospital,
    random: np.random.Generator,
    clips: Sequence[int] | NDArray | None = None,
    systole: NDArray | None = None,
) -> Frames:
    """Frames of these views: hearts differ by patient, machine and quality by study, the probe by clip.

    Args:
        views: keys of DRAWINGS.
        patients: numbers from 0, one per frame.
        studies: numbers from 0, one per frame.
        clips: numbers from 0, one per frame; by default every frame is from a clip of its own.
        systole: the moment of each frame, at random by default.
    """
    count = len(views)

    each, clips = np.arange(count), np.arange(count) if clips is None else clips

    def by(numbers: Any, low: float, high: float) -> Floats:
        return random.uniform(low, high, max(numbers) + 1).astype(np.float32)[numbers]

    lying = np.select(
        [np.array(views) == name for name in TURNS], [np.float32(turn) for turn in TURNS.values()], 0
    )
    return Frames(
        view=np.array(views),
        size=by(patients, 0.82, 1.15) * by(clips, 0.93, 1.07),
        squeeze=by(clips, 0.82, 1.18),
        wall=by(patients, 0.75, 1.35),
        dilation=by(patients, 0.82, 1.2),
        systole=by(each, 0, 1) if systole is None else np.asarray(systole, dtype=np.float32),
        turn=np.radians(lying + by(clips, -25, 25)).astype(np.float32),
        x=by(studies, -0.7, 0.7) + by(clips, -1.3, 1.3),
        z=by(studies, -0.5, 0.5) + by(clips, -1.0, 1.0),
        depth=by(studies, *hospital.depth)
        * np.where(np.isin(views, PARASTERNAL), np.float32(0.82), np.float32(1)),
        half_angle=np.radians(by(studies, *hospital.half_angle)),
        gain=by(studies, *hospital.gain) + by(clips, -2, 2),
        gamma=by(studies, *hospital.gamma),
        haze=by(studies, *hospital.haze) + by(clips, -3, 3),
        shadow=by(clips, -1.7, 1.7),
        shadow_width=by(clips, 0.1, 0.35),
    )


def render(
    frames: Frames,
    shape: tuple[int, int],
    hospital: Hospital,
    random: np.random.Generator,
    pixel_height: float = 1.0,
) -> NDArray[np.uint8]:
    """Pictures [N, *shape] whose sector reaches from the middle of the upper edge to the lower edge.

    Args:
        shape: height and width in pixels.
        pixel_height: of a pixel, in widths of one.
    """
    pictures = np.empty((len(frames), *shape), np.uint8)
    for rows in chunks(frames):
        beams = beam_image(frames.take(rows), hospital, random)
        pictures[rows] = scan_convert(beams, frames.half_angle[rows], shape, pixel_height)
    return pictures


def chunks(frames: Frames, size: int = 32) -> Iterable[NDArray]:
    """Rows of one view at a time, few enough for a processor's cache."""
    for view in np.unique(frames.view):
        rows = np.flatnonzero(frames.view == view)
        yield from np.split(rows, range(size, len(rows), size))


def beam_image(frames: Frames, hospital: Hospital, random: np.random.Generator) -> Floats:
    """Grey values 0..1 along the beams, [N, *BEAM_GRID]; all frames have the same view."""
    count = len(frames)
    share = np.linspace(0, 1, BEAM_GRID[0], dtype=np.float32)[:, None]
    angle = np.linspace(-1, 1, BEAM_GRID[1], dtype=np.float32)
    echo = anatomy(frames)
    waves = random.uniform(-12, 12, (3, 2, count, 1, 1)).astype(np.float32)
    phases = random.uniform(0, 2 * np.pi, (3, count, 1, 1)).astype(np.float32)
    for (down, sideways), phase in zip(waves, phases, strict=True):
        echo += 2.5 * np.cos(down * share + sideways * angle + phase)  # no tissue is even
    echo -= 8 * share  # lost on the way
    echo -= 22 * smooth((column(frames.shadow_width) - np.abs(angle - column(frames.shadow))) / 0.1)
    echo -= 9 * smooth((np.abs(angle) - 0.9) / 0.1)  # beams at the edges are weak
    near = np.exp(-np.square(share * column(frames.depth) / 1.2))
    noise = amplitude(column(frames.haze)) + 0.05 * near
    speckle = random.standard_normal((2, *echo.shape, 2), dtype=np.float32).view(np.complex64)[..., 0]
    scattered = blur(amplitude(echo) * speckle[0], 1, 0.8) + noise * speckle[1]
    scattered = blur(scattered, 2, hospital.beam)
    decibels = 20 * np.log10(np.abs(scattered) + 1e-6) + column(frames.gain)
    grey = np.clip(1 + (decibels + 8) / hospital.dynamic_range, 0, 1)
    return grey ** column(frames.gamma)


def anatomy(frames: Frames) -> Floats:
    """Mean echo in decibels along the beams."""
    x, z, step = heart_coordinates(frames)
    layers, leaflets = DRAWINGS[frames.view[0]]
    echo = np.full(x.shape, TISSUE, np.float32)
    for layer in layers:
        distances = [distance(chamber, frames, x, z) for chamber in layer]
        for chamber, outside in zip(layer, distances, strict=True):
            thickness = chamber.wall * column(frames.wall)
            slope = np.gradient(outside, axis=1) / step  # 1 where a beam meets the wall squarely
            bright = MUSCLE if chamber.kind == "ventricle" else VESSEL_WALL
            squarely = np.square(np.clip(slope, -1, 1))
            echo = blend(echo, bright - 9 * (1 - squarely), (thickness - outside) / 0.15)
            # blood on one side, muscle on the other: a line; behind the far wall the pericardium shines
            rim = np.maximum(
                smooth((0.12 - np.abs(outside - 0.08)) / 0.1) * squarely * 0.8,
                smooth((0.14 - np.abs(outside - thickness - 0.1)) / 0.1) * np.clip(slope, 0, 1) ** 2,
            )
            echo = echo + rim * (LEAFLET - echo)
        for chamber, outside in zip(layer, distances, strict=True):
            echo = blend(echo, chamber.inside, -outside / 0.15)
    for leaflet in leaflets:
        echo = blend(echo, LEAFLET, (0.1 - leaflet_distance(leaflet, frames, x, z)) / 0.12)
    return echo


def heart_coordinates(frames: Frames) -> tuple[Floats, Floats, Floats]:
    """x and z of every beam sample as the drawing has them, and the length of a sample."""
    r = np.linspace(0, 1, BEAM_GRID[0], dtype=np.float32)[:, None] * column(frames.depth)
    angle = np.linspace(-1, 1, BEAM_GRID[1], dtype=np.float32) * column(frames.half_angle)
    middle = 7.5
    x, z = r * np.sin(angle) - column(frames.x), r * np.cos(angle) - column(frames.z) - middle
    cosine, sine = np.cos(column(frames.turn)), np.sin(column(frames.turn))
    size = column(frames.size)
    x, z = (x * cosine + z * sine) / size, (z * cosine - x * sine) / (size * column(frames.squeeze))
    return x, z + middle, column(frames.depth) / (size * (BEAM_GRID[0] - 1))


def distance(chamber: Chamber, frames: Frames, x: Floats, z: Floats) -> Floats:
    """Centimetres to the edge of a chamber, negative inside."""
    growth = {
        "ventricle": frames.dilation * (1.04 - 0.2 * frames.systole),
        "atrium": 0.92 + 0.2 * frames.systole,
    }
    factor = column(growth.get(chamber.kind, np.ones(len(frames), np.float32)))
    across, along = chamber.across * factor, chamber.along * (0.5 + 0.5 * factor)
    cosine, sine = math.cos(math.radians(chamber.turn)), math.sin(math.radians(chamber.turn))
    u = (x - chamber.x) * cosine + (z - chamber.z) * sine
    v = (z - chamber.z) * cosine - (x - chamber.x) * sine
    radius = np.sqrt(np.square(u / across) + np.square(v / along)) + 1e-6
    return (radius - 1) * radius / (np.sqrt(np.square(u / across**2) + np.square(v / along**2)) + 1e-6)


def leaflet_distance(leaflet: Leaflet, frames: Frames, x: Floats, z: Floats) -> Floats:
    opening = np.clip(1 - 1.6 * frames.systole, 0, 1)
    angle = np.radians(
        column(leaflet.closed + (leaflet.opened - leaflet.closed) * opening).astype(np.float32)
    )
    u, v = x - leaflet.x, z - leaflet.z
    along = np.clip(u * np.cos(angle) + v * np.sin(angle), 0, leaflet.length)
    return np.hypot(u - along * np.cos(angle), v - along * np.sin(angle))


def scan_convert(
    beams: Floats, half_angle: Floats, shape: tuple[int, int], pixel_height: float, nearest: bool = False
) -> NDArray[np.uint8]:
    """From beams to a sector of 0..255, black outside of it; bilinear, or from the nearest sample."""
    height, width = shape
    samples, last = BEAM_GRID[0] - 1, BEAM_GRID[1] - 1
    x = np.arange(width, dtype=np.float32) - (width - 1) / 2
    z = np.arange(height, dtype=np.float32)[:, None] * pixel_height
    row = np.hypot(x, z) / ((height - 1) * pixel_height) * samples
    beam = (np.arctan2(x, z) / column(half_angle) + 1) / 2 * last
    inside = (row <= samples) & (beam >= 0) & (beam <= last)
    if nearest:
        row, beam = np.rint(row), np.rint(beam)
    top, left = np.clip(row, 0, samples - 1).astype(np.intp), np.clip(beam, 0, last - 1).astype(np.intp)
    down, right = (row - top).astype(np.float32), (beam - left).astype(np.float32)
    index = (np.arange(len(beams))[:, None, None] * BEAM_GRID[0] + top) * BEAM_GRID[1] + left
    flat = beams.ravel()
    upper, lower = (
        (1 - right) * flat.take(index + start) + right * flat.take(index + start + 1)
        for start in (0, BEAM_GRID[1])
    )
    return np.where(inside, 255 * (upper + (lower - upper) * down) + 0.5, 0).astype(np.uint8)


def column(values: Any) -> Any:
    return values[:, None, None]


def amplitude(decibels: Floats) -> Floats:
    return np.exp(decibels * (math.log(10) / 20))


def smooth(values: Floats) -> Floats:
    """0 below -1/2, 1 above 1/2."""
    return np.clip(values + 0.5, 0, 1)


def blend(echo: Floats, other: Any, mask: Floats) -> Floats:
    return echo + smooth(mask) * (other - echo)


def blur(field: NDArray, axis: int, width: float) -> NDArray:
    """Gaussian along an axis, which leaves the variance of white noise as it is."""
    offsets = range(-int(3 * width), int(3 * width) + 1)
    weights = np.exp(-0.5 * np.square(np.array(offsets) / width))
    weights /= np.sqrt(np.square(weights).sum())
    padding = [(0, 0)] * 3
    padding[axis] = (len(offsets) // 2,) * 2
    padded = np.pad(field, padding, "reflect")
    size = field.shape[axis]
    blurred = np.zeros_like(field)
    for at, weight in enumerate(weights.astype(np.float32)):
        blurred += weight * (padded[:, at : at + size] if axis == 1 else padded[:, :, at : at + size])
    return blurred


# ---- from frames to the files of the three sets


def write_phantom(out: str | os.PathLike[str], patients: int = 100, seed: int = 0) -> dict[str, int]:
    """Write the sets tmed2, unity, camus (MetaImage) and camus_nifti below `out`.

    Args:
        patients: with both labels in TMED-2; the other parts grow with it.
        seed: the same seed gives the same files.

    Returns:
        the images of each set.
    """
    if patients < SMALLEST:
        raise ValueError(
            f"patients is {patients}, but three splits and three hospitals need at least {SMALLEST}."
        )
    if seed < 0:
        raise ValueError(f"seed is {seed}, but it cannot be negative.")
    roots = {name: Path(out) / name for name in SETS}
    for root in roots.values():
        if root.exists():
            raise FileExistsError(f"{root} is already there: delete it, or write to another folder.")
    for root, real in zip(roots.values(), SETS.values(), strict=True):
        write_text(root / MARKER, NOTICE.format(name=real, seed=seed, patients=patients))
    generators = [np.random.default_rng([seed, hospital]) for hospital in range(3)]
    return {
        "tmed2": write_tmed2(roots["tmed2"], patients, generators[0]),
        "unity": write_unity(roots["unity"], patients, generators[1]),
        "camus": (count := write_camus(roots, max(5, patients // 3), generators[2])),
        "camus_nifti": count,
    }


def write_tmed2(root: Path, patients: int, random: np.random.Generator) -> int:
    rows, orders = [], []
    first = FIRST_PATIENT
    for place, (share, labeled, unlabeled) in TMED2_PARTS.items():
        orders.append(first + random.permutation(round(share * patients)))
        for patient in np.sort(orders[-1]).tolist():
            for study in range(1, 3 if patient % TWO_STUDIES == 0 else 2):
                rows += tmed2_study(place, patient, f"{patient}s{study}", labeled, unlabeled, random)
        first += len(orders[-1])
    pictures = furnished_pictures(rows, (84, 112), BOSTON, random)
    padded = np.pad(pictures, ((0, 0), (0, 28), (0, 0)))  # at the bottom alone, as the real ones
    for row, picture in zip(rows, padded, strict=True):
        write_png(root / row["SourceFolder"] / row["query_key"], picture)
    labeled_rows = [row for row in rows if row["SourceFolder"].endswith("/labeled")]
    write_csv(root / "labels_per_image.csv", ("query_key", "view_label", "diagnosis_label"), labeled_rows)
    for fold in range(3):
        for dev, share in DEVS.items():
            write_fold(root / dev / f"TMED2_fold{fold}", rows, fold_of(orders[0], orders[1], fold, share))
    return len(rows)


def tmed2_study(
    place: str, patient: int, study: str, labeled: list[str], unlabeled: int, random: np.random.Generator
) -> list[dict[str, Any]]:
    """The images of one study, with the columns of the tables."""
    pile = random.choice(list(PILE), unlabeled, p=list(PILE.values()))
    views = [str(view) for view in (*random.permutation(labeled), *pile)]
    diagnosis = str(random.choice(DIAGNOSES)) if place == "view_and_diagnosis_labeled_set" else "Not_Provided"
    rows = []
    for index, view in enumerate(views):
        is_labeled = index < len(labeled)
        view_label = view if view in VIEWS else "A4CorA2CorOther"
        rows.append(
            {
                "patient": patient,
                "study": study,
                "view": view,
                "query_key": f"{study}_{index}.png",
                "view_label": view_label if is_labeled else "Not_Provided",
                "diagnosis_label": diagnosis if is_labeled else "Not_Provided",
                "SourceFolder": f"{place}/{'labeled' if is_labeled else 'unlabeled'}" if labeled else place,
            }
        )
    return rows


def fold_of(both: NDArray, views_only: NDArray, fold: int, share: float) -> dict[int, str]:
    """The part of each patient: a fifth for the test, and of `share` of the others half for validation.

    Args:
        both: patients with both labels.
        views_only: patients without a diagnosis, who are all for training.
    """
    both = np.roll(both, -fold * len(both) // 3)
    test, rest = np.split(both, [max(1, len(both) // 5)])
    chosen = rest[: max(2, round(share * len(rest)))]
    validation, train = np.split(chosen, [len(chosen) // 2])
    views_only = np.roll(views_only, -fold)[: max(1, round(share * len(views_only)))]
    parts = {"test": test, "val": validation, "train": np.concatenate([train, views_only])}
    return {int(patient): part for part, some in parts.items() for patient in some}


def write_fold(stem: Path, rows: list[dict[str, Any]], parts: dict[int, str]) -> None:
    columns = (
        "query_key",
        "view_label",
        "diagnosis_label",
        "view_classifier_split",
        "diagnosis_classifier_split",
    )
    tables: dict[str, list[dict[str, Any]]] = {"labeled": [], "unlabeled": []}
    for row in rows:
        part, pile = parts.get(row["patient"]), row["SourceFolder"].rpartition("/")[2]
        if pile == "unlabeled":
            part = "unlabeled" if part == "train" else None  # those of tested patients would give them away
        if part is not None:
            diagnosed = part if row["SourceFolder"].startswith("view_and_diagnosis") else "not_used"
            tables[pile].append(
                {**row, "view_classifier_split": part, "diagnosis_classifier_split": diagnosed}
            )
    for pile, table in tables.items():
        write_csv(stem.with_name(f"{stem.name}_{pile}part.csv"), (*columns, "SourceFolder"), table)


def write_unity(root: Path, patients: int, random: np.random.Generator) -> int:
    index: list[dict[str, str]] = []
    count = 0
    views = [str(view) for view in random.choice(list(UNITY_VIEWS), patients, p=list(UNITY_VIEWS.values()))]
    views[:3] = "PLAX", "A4C", "A2C"
    for size, shape in enumerate(UNITY_SHAPES):
        rows: list[dict[str, Any]] = []
        for clip in range(size, patients, len(UNITY_SHAPES)):
            code = f"{'02' if clip % 5 == 4 else '01'}-{random.bytes(32).hex()}"
            for frame in sorted(random.choice(60, UNITY_FRAMES, replace=False)):
                rows.append({"patient": clip, "study": clip, "clip": clip, "view": views[clip]})
                rows[-1]["file"] = f"{code}-{frame:04d}.png"
        for row, picture in zip(rows, furnished_pictures(rows, shape, UNITED_KINGDOM, random), strict=True):
            name = row["file"]
            place = root / "png-cache" / name[:2] / name[3:5] / name[5:7] / name
            # Some in colour.
            write_png(place, picture if row["clip"] % 4 else np.repeat(picture[..., None], 3, -1))
        index += [
            {"file": row["file"], "view": row["view"].lower()} for row in rows if row["clip"] != patients - 1
        ]
        count += len(rows)
    write_csv(root / "view_index.csv", ("file", "view"), index)
    return count


def write_camus(roots: dict[str, Path], patients: int, random: np.random.Generator) -> int:
    """Both releases of the same patients; the newer one has every second row of the older one."""
    training = patients - max(1, patients // 10)
    names = [f"patient{number + 1:04d}" for number in range(patients)]
    newer = roots["camus_nifti"] / "CAMUS_public"
    for size, (height, width) in enumerate(CAMUS_SHAPES):
        shape, some = (2 * height - 1, width), range(size, patients, len(CAMUS_SHAPES))
        for number, chambers, clip, masks, depth in camus_clips(some, shape, random):
            place = (
                f"testing/{names[number - training]}" if number >= training else f"training/{names[number]}"
            )
            folders = roots["camus"] / place, newer / "database_nifti" / names[number]
            files = {"ED": slice(0, 1), "ES": slice(-1, None), "sequence": slice(None)}
            for end, rows in files.items():
                spacing = 10 * depth / (height - 1)  # millimetres
                for kind, pixels in (("", clip[rows]), ("_gt", masks[rows])):
                    if not kind or (number < training and end != "sequence"):
                        stem = folders[0] / f"{folders[0].name}_{chambers}_{end}{kind}"
                        write_metaimage(stem, pixels, (spacing, spacing / 2))
                    stem = folders[1] / f"{folders[1].name}_{chambers}_{end.replace('seq', 'half_seq')}{kind}"
                    write_nifti(stem, pixels[:, ::2], spacing)
            facts = {"ED": 1, "ES": CAMUS_FRAMES, "NbFrame": CAMUS_FRAMES, "ImageQuality": "Medium"}
            for folder in folders:
                write_text(
                    folder / f"Info_{chambers}.cfg", "".join(f"{key}: {facts[key]}\n" for key in facts)
                )
            write_text(folders[1] / "MANDATORY_CITATION.md", "Phantom data: nothing to cite.\n")
    parts = np.split(np.array(names), [patients - 2 * (patients - training), training])
    for part, group in zip(("training", "validation", "testing"), parts, strict=True):
        write_text(newer / f"database_split/subgroup_{part}.txt", "".join(f"{name}\n" for name in group))
    return 4 * patients


def camus_clips(
    patients: Sequence[int], shape: tuple[int, int], random: np.random.Generator
) -> Iterator[tuple[int, str, NDArray, NDArray, float]]:
    """Patient, chambers, frames and masks [T, *shape] from the end of diastole to that of systole, and the
    depth.
    """
    numbers = np.tile(np.repeat(patients, CAMUS_FRAMES), 2)
    views = np.repeat(["A2C", "A4C"], len(numbers) // 2).tolist()
    clips = np.arange(len(numbers)) // CAMUS_FRAMES
    systole = np.tile(np.linspace(0, 1, CAMUS_FRAMES), len(numbers) // CAMUS_FRAMES)
    frames = draw_frames(views, numbers, numbers, FRANCE, random, clips, systole)
    pictures = render(frames, shape, FRANCE, random, 0.5)
    for rows in np.split(np.arange(len(numbers)), len(numbers) // CAMUS_FRAMES):
        masks = segmentation(frames.take(rows), shape, 0.5)
        chambers = {"A2C": "2CH", "A4C": "4CH"}[frames.view[rows[0]]]
        yield int(numbers[rows[0]]), chambers, pictures[rows], masks, float(frames.depth[rows[0]])


def furnished_pictures(
    rows: list[dict[str, Any]], shape: tuple[int, int], hospital: Hospital, random: np.random.Generator
) -> NDArray[np.uint8]:
    """Pictures with the marks that machines leave beside the sector: two lines of text and a scale."""
    views = [
        str(random.choice(VARIANTS[row["view"]])) if row["view"] in VARIANTS else row["view"] for row in rows
    ]
    patients, studies = (
        np.unique([row[key] for row in rows], return_inverse=True)[1] for key in ("patient", "study")
    )
    clips = np.unique([row["clip"] for row in rows], return_inverse=True)[1] if "clip" in rows[0] else None
    frames = draw_frames(views, patients, studies, hospital, random, clips)
    pictures = render(frames, shape, hospital, random)
    pixel = shape[1] // 112
    letters = (170 * (random.random((len(rows), 7, 18)) < 0.45)).astype(np.uint8)
    letters[:, 3] = 0
    pictures[:, pixel : 8 * pixel, pixel : 19 * pixel] |= letters.repeat(pixel, 1).repeat(pixel, 2)
    for tick in np.arange(1, 15, 2):
        lines = np.minimum(shape[0] - pixel, tick * shape[0] / frames.depth).astype(int)
        pictures[np.arange(len(rows)), lines, -4 * pixel : -pixel] = 200
    return pictures


def segmentation(frames: Frames, shape: tuple[int, int], pixel_height: float) -> NDArray[np.uint8]:
    """1 in the left ventricle, 2 in its muscle, 3 in the left atrium."""
    x, z, _ = heart_coordinates(frames)
    ventricle, atrium = DRAWINGS[frames.view[0]][0][0][:2]
    outside = distance(ventricle, frames, x, z)
    labels = np.select(
        [outside < 0, distance(atrium, frames, x, z) < 0, outside < ventricle.wall * column(frames.wall)],
        [np.float32(label) for label in (1, 3, 2)],
        np.float32(0),
    )
    return scan_convert(labels / 255, frames.half_angle, shape, pixel_height, nearest=True)


def write_png(path: Path, picture: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(picture).save(path, compress_level=1)


def write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_metaimage(stem: Path, pixels: NDArray[np.uint8], spacing: tuple[float, float]) -> None:
    """uint8 [T, H, W] as a header and a raw file beside it."""
    header = {
        "ObjectType": "Image",
        "NDims": 3,
        "BinaryData": True,
        "BinaryDataByteOrderMSB": False,
        "CompressedData": False,
        "ElementSpacing": f"{spacing[0]:.6g} {spacing[1]:.6g} 1",
        "DimSize": " ".join(map(str, pixels.shape[::-1])),
        "ElementType": "MET_UCHAR",
        "ElementDataFile": f"{stem.name}.raw",
    }
    write_text(stem.with_suffix(".mhd"), "".join(f"{key} = {value}\n" for key, value in header.items()))
    stem.with_suffix(".raw").write_bytes(pixels.tobytes())


def write_nifti(stem: Path, pixels: NDArray[np.uint8], spacing: float) -> None:
    """uint8 [T, H, W] as NIfTI-1: x fastest, then y, and time last if there is any."""
    shape = pixels.shape[::-1] if len(pixels) > 1 else pixels.shape[:0:-1]
    header = bytearray(352)
    struct.pack_into("<i", header, 0, 348)
    struct.pack_into("<8h", header, 40, len(shape), *shape, *[1] * (7 - len(shape)))
    struct.pack_into("<2h", header, 70, 2, 8)  # unsigned bytes
    struct.pack_into("<8f", header, 76, 1, spacing, spacing, *[1] * 5)
    struct.pack_into("<2f", header, 108, 352, 1)  # where the pixels start, and their scale
    header[123] = 2  # millimetres
    struct.pack_into("<h", header, 254, 1)
    struct.pack_into("<12f", header, 280, -spacing, 0, 0, 0, 0, -spacing, 0, 0, 0, 0, 1, 0)
    header[344:348] = b"n+1\0"
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".nii.gz").write_bytes(
        gzip.compress(bytes(header) + pixels.tobytes(), compresslevel=1, mtime=0)
    )


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


if __name__ == "__main__":
    main()
