"""Look at folders of images before training on them.

fixastep doctor --labeled DIR --unlabeled DIR [--validation DIR --test DIR --group PATTERN]
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from hf_fixastep.data.files import Listing, UnreadableImage, digest, duplicates, read_picture
from hf_fixastep.data.folders import (
    FoldersConfig,
    check_classes,
    check_size,
    class_names,
    findings,
    list_sides,
    make_report,
    passed_over,
    split_sides,
)
from hf_fixastep.data.images import DEEP_MODES, GREY_MODES
from hf_fixastep.models import WideResNetConfig, WideResNetForImageClassification


SHARES = {"validation": FoldersConfig.validation_share, "test": FoldersConfig.test_share}
# FixMatch: a labeled batch, and two views of seven unlabeled images for each of it.
STEP_IMAGES = 64 + 2 * 7 * 64
# Pixels of the contact sheet: a picture, between two, for names, for a line.
CELL, GAP, MARGIN, LINE = 88, 6, 170, 20
COLUMNS, CLASS_ROWS, UNLABELED_ROWS, TEXT_ROWS = 10, 20, 3, 15


@dataclass
class Survey:
    """What reading all files of a side showed.

    Args:
        listing: the files.
        digests: of every file, 0 for broken ones.
        broken: names of the files that cannot be read, and why.
        sizes: how many images have each width and height.
        modes: how many images have each mode.
        samples: some of the images, small, by their row.
    """

    listing: Listing
    digests: np.ndarray
    broken: dict[str, str] = field(default_factory=dict)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    samples: dict[int, PIL.Image.Image] = field(default_factory=dict)

    @property
    def readable(self) -> np.ndarray:
        return np.flatnonzero(self.digests)


def survey(side: str, listing: Listing, console: Console) -> Survey:
    """Read every file once."""
    found = Survey(listing, np.zeros(len(listing), np.uint64))
    wanted = {row for rows in sample_rows(listing).values() for row in rows}
    for row in track(range(len(listing)), f"Reading {side}", console=console, transient=True):
        try:
            picture = read_picture(listing.path(row))
        except UnreadableImage as error:
            found.broken[listing.shown(row)] = str(error)
            continue
        found.digests[row] = digest(picture.image)
        found.sizes[picture.image.size] += 1
        found.modes[picture.mode] += 1
        if row in wanted:
            found.samples[row] = shrink(picture.image)
    return found


def shrink(image: PIL.Image.Image) -> PIL.Image.Image:
    """Fit into a cell; images smaller than it keep their pixels sharp."""
    small = max(image.size) < CELL
    method = PIL.Image.Resampling.NEAREST if small else PIL.Image.Resampling.BILINEAR
    return PIL.ImageOps.contain(image, (CELL, CELL), method).convert("RGB")


def sample_rows(listing: Listing) -> dict[str, list[int]]:
    """Rows to be shown, spread evenly over each class; an unlabeled side is one class without a name."""
    rows: dict[str, list[int]] = {name: [] for name in class_names(listing.labels)[:CLASS_ROWS]} or {"": []}
    for row, label in enumerate(listing.labels or [""] * len(listing)):
        if label in rows:
            rows[label].append(row)
    most = COLUMNS if listing.labels else COLUMNS * UNLABELED_ROWS
    return {
        label: [of[n * len(of) // most] for n in range(most)] if len(of) > most else of
        for label, of in rows.items()
    }


def file_table(surveys: Mapping[str, Survey]) -> Table:
    table = Table("side", "images", "broken", "width x height", "modes", title="Files", title_justify="left")
    for side, found in surveys.items():
        modes = ", ".join(f"{mode} {count:,}" for mode, count in found.modes.most_common(4))
        table.add_row(
            side, f"{len(found.readable):,}", f"{len(found.broken):,}", size_range(found.sizes), modes
        )
    return table


def size_range(sizes: Counter[tuple[int, int]]) -> str:
    if len(sizes) < 2:
        return "".join(f"{width} x {height}" for width, height in sizes)
    widths, heights = ([size[axis] for size in sizes.elements()] for axis in (0, 1))
    return (
        f"{min(widths)}-{max(widths)} x {min(heights)}-{max(heights)}, median "
        f"{statistics.median_low(widths)} x {statistics.median_low(heights)}"
    )


def class_table(splits: Mapping[str, Listing]) -> Table:
    """Images of each class in each split, the largest class first."""
    counts = {split: Counter(listing.labels) for split, listing in splits.items() if listing.labels}
    names = [name for name, _ in sum(counts.values(), Counter()).most_common()]
    table = Table("class", *counts, title="Classes", title_justify="left")
    for name in names[:40]:
        table.add_row(Text(name), *(f"{count[name]:,}" for count in counts.values()))
    if len(names) > 40:
        table.add_row(f"and {len(names) - 40:,} more")
    return table


def examine(surveys: Mapping[str, Survey]) -> tuple[dict[str, Listing], list[str], list[str]]:
    """The splits as training would see them, what would stop it, and what else deserves a look."""
    problems = [
        f"Broken files in {side}: {len(found.broken):,}, such as {name} ({why})."
        for side, found in surveys.items()
        for name, why in list(found.broken.items())[:1]
        if side != "unlabeled"
    ]
    splits = {side: found.listing.select(found.readable) for side, found in surveys.items()}
    digests = {side: found.digests[found.readable] for side, found in surveys.items()}
    try:
        for side, listing in splits.items():
            if not len(listing):
                raise ValueError(f"No file in {side} can be read.")
        check_classes(splits)
        splits, digests = split_sides(
            splits, digests, {n: s for n, s in SHARES.items() if n not in splits}, seed=0
        )
    except ValueError as error:
        problems.append(str(error))
    remarks = findings(make_report(splits, digests, surveys["unlabeled"].broken)) + copies(splits, digests)
    remarks += [
        f"Passed over in {side}: {passed_over(found.listing)}."
        for side, found in surveys.items()
        if found.listing.passed_over
    ]
    return splits, problems, remarks + imbalance(surveys["labeled"].listing)


def copies(splits: Mapping[str, Listing], digests: dict[str, np.ndarray]) -> list[str]:
    """A sentence for every split that holds the same image more than once."""
    sets = duplicates(digests)
    sentences = []
    for split, listing in splits.items():
        extra = len(listing) - len(np.unique(digests[split]))
        within = [same[split] for same in sets if len(same.get(split, [])) > 1]
        example = (
            f", such as {listing.shown(within[0][0])} and {listing.shown(within[0][1])}" if within else ""
        )
        if extra:
            sentences.append(f"Copies of other images within {split}: {extra:,}{example}.")
    return sentences


def imbalance(listing: Listing) -> list[str]:
    counts = Counter(listing.labels).most_common()
    (most, large), (least, small) = counts[0], counts[-1]
    if large < 3 * small:
        return []
    return [
        f"The class {most} has {large / small:.1f} times the images of {least}: judge by balanced accuracy."
    ]


def costs(surveys: Mapping[str, Survey], size: int) -> list[str]:
    """Memory of all images as the trainer holds them, and a time measured here."""
    count = sum(len(found.readable) for found in surveys.values())
    grey = all(mode in GREY_MODES + DEEP_MODES for found in surveys.values() for mode in found.modes)
    channels = 1 if grey else 3
    batch, seconds, device = time_of_pass(size, channels)
    return [
        f"Memory: {count:,} images of {size} x {size} pixels in {'grey' if grey else 'RGB'} take "
        f"{count * channels * size**2 / 1e6:,.1f} MB.",
        f"Time: forward and backward of {batch} such images through a WRN-28-2 took {seconds:.2f} s here ({device}). "
        "A FixMatch step of 64 labeled and 448 unlabeled images, these in two views, would take roughly "
        f"{seconds * STEP_IMAGES / batch:,.1f} s.",
    ]


def time_of_pass(size: int, channels: int) -> tuple[int, float, str]:
    """Images in a small batch, seconds for forward and backward of it (the second time), and the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    batch = min(64, max(2, 2**16 // size**2))
    config = WideResNetConfig(image_size=size, num_channels=channels)
    model = WideResNetForImageClassification(config).to(device)  # type: ignore[arg-type]
    x, y = torch.rand(batch, channels, size, size, device=device), torch.arange(batch, device=device) % 2
    start = 0.0
    for _ in range(2):
        start = time.perf_counter()
        model(pixel_values=x, labels=y).loss.backward()
        float(model.classifier.weight.grad.sum())  # waits for the device
    return batch, time.perf_counter() - start, device


def next_command(args: argparse.Namespace) -> str:
    names = ("labeled", "unlabeled", "validation", "test", "group", "image_size")
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if len(args.unlabeled) == 1:
        settings["unlabeled"] = args.unlabeled[0]
    return (
        "accelerate launch recipes/train.py --config recipes/folders/fixmatch.yaml "
        f"--dataset_kwargs {shlex.quote(json.dumps(settings))} --image_size {args.image_size}"
    )


def contact_sheet(surveys: Mapping[str, Survey]) -> Figure:
    """Labeled classes in rows, a sample of the unlabeled images, and the files that cannot be read."""
    rows, lines = picture_rows(surveys), text_lines(surveys)
    width = MARGIN + COLUMNS * (CELL + GAP) + GAP
    bottom = GAP + len(rows) * (CELL + GAP) + LINE
    height = bottom + LINE * len(lines) + GAP
    figure = Figure((width / 100, height / 100), dpi=100, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    canvas = PIL.Image.new("RGB", (width, height), "white")
    classes = len(sample_rows(surveys["labeled"].listing))
    for number, (name, pictures) in enumerate(rows):
        # The unlabeled ones stand apart.
        top = GAP + number * (CELL + GAP) + (LINE if number >= classes else 0)
        write(axes, MARGIN - 2 * GAP, top + CELL / 2, name, ha="right", size=9)
        for column, picture in enumerate(pictures):
            left = MARGIN + column * (CELL + GAP)
            paste(canvas, picture, left, top)
            if picture is None:
                write(axes, left + CELL / 2, top + CELL / 2, "broken", ha="center")
    for number, line in enumerate(lines):
        write(axes, 2 * GAP, bottom + (number + 0.5) * LINE, line)
    axes.imshow(canvas, extent=(0, width, height, 0), interpolation="none", aspect="auto")
    axes.set_axis_off()
    return figure


def write(axes: Axes, x: float, y: float, text: str, ha: str = "left", size: int = 8) -> None:
    axes.text(x, y, text, ha=ha, va="center", size=size, linespacing=1.5, parse_math=False)


def picture_rows(surveys: Mapping[str, Survey]) -> list[tuple[str, list[PIL.Image.Image | None]]]:
    labeled, pile = surveys["labeled"], surveys["unlabeled"]
    counts = Counter(labeled.listing.labels)
    rows = [
        (f"{shorten(label)}\n{counts[label]:,} files", [labeled.samples.get(row) for row in chosen])
        for label, chosen in sample_rows(labeled.listing).items()
    ]
    sample = [pile.samples.get(row) for row in sample_rows(pile.listing)[""]]
    for start in range(0, len(sample), COLUMNS):
        name = f"unlabeled\n{len(pile.listing):,} files" if start == 0 else ""
        rows.append((name, sample[start : start + COLUMNS]))
    return rows


def paste(canvas: PIL.Image.Image, picture: PIL.Image.Image | None, left: int, top: int) -> None:
    """Put a picture into the middle of its cell; that of a broken file is red."""
    canvas.paste("#F2F2F2" if picture else "#E8B4A8", (left, top, left + CELL, top + CELL))
    if picture:
        canvas.paste(picture, (left + (CELL - picture.width) // 2, top + (CELL - picture.height) // 2))


def text_lines(surveys: Mapping[str, Survey]) -> list[str]:
    broken = [
        f"{side}/{name}: {why}" for side, found in surveys.items() for name, why in found.broken.items()
    ]
    lines = [
        f"Files that cannot be read: {len(broken):,}",
        *(shorten(line, 150) for line in broken[:TEXT_ROWS]),
    ]
    if len(broken) > TEXT_ROWS:
        lines.append(f"and {len(broken) - TEXT_ROWS:,} more")
    hidden = len(set(surveys["labeled"].listing.labels)) - CLASS_ROWS
    return [f"{hidden:,} more classes are not shown", *lines] if hidden > 0 else lines


def shorten(text: str, length: int = 20) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("fixastep doctor", description="Look at folders of images.")
    parser.add_argument("--labeled", required=True, help="Folder with a sub-folder per class, or a table.")
    parser.add_argument("--unlabeled", required=True, nargs="+", help="Folders, globs or tables.")
    parser.add_argument("--validation", help="As --labeled; if not given, a tenth is cut off.")
    parser.add_argument("--test", help="As --labeled; if not given, a fifth is cut off.")
    parser.add_argument(
        "--group", help="Column of the table, or regular expression with (the group) in file names."
    )
    parser.add_argument("--image_size", type=int, default=32, help="Side of the images to train on.")
    parser.add_argument("--out", default="doctor.png", type=Path, help="Where to write the contact sheet.")
    args = parser.parse_args(argv)
    try:
        check_size(args.image_size)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        listings = list_sides(args.labeled, args.unlabeled, args.validation, args.test, args.group)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    console = Console(highlight=False, markup=False, emoji=False)
    surveys = {side: survey(side, listing, console) for side, listing in listings.items()}
    show(surveys, args, console)


def show(surveys: Mapping[str, Survey], args: argparse.Namespace, console: Console) -> None:
    splits, problems, remarks = examine(surveys)
    console.print(file_table(surveys))
    console.print(class_table(splits))
    sections = {
        "To be repaired before training": problems,
        "Worth a look": remarks,
        "Cost": costs(surveys, args.image_size),
        "Then train": [next_command(args)],
    }
    for title, sentences in sections.items():
        if sentences:
            console.print(Text(f"\n{title}", style="bold"))
        for sentence in sentences:
            # A command that is broken into lines cannot be copied.
            console.print(f"  {sentence}", soft_wrap=True)
    contact_sheet(surveys).savefig(args.out, format="png")
    console.print(f"\nContact sheet: {args.out}", soft_wrap=True)


if __name__ == "__main__":
    main()
