"""Look at folders of images before training on them.

fixastep doctor --labeled DIR --unlabeled DIR [--validation DIR --test DIR --group PATTERN]
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL.Image
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from hf_fixastep.checks import harmless
from hf_fixastep.data.files import UnreadableImage, digest, read_picture
from hf_fixastep.data.folders import (
    FoldersConfig,
    check_classes,
    check_size,
    class_names,
    findings,
    make_report,
    split_sides,
)
from hf_fixastep.data.images import DEEP_MODES, GREY_MODES
from hf_fixastep.data.listings import Listing, duplicates, list_sides, passed_over


SHARES = {"validation": FoldersConfig.validation_share, "test": FoldersConfig.test_share}
# Of the contact sheet; broken files are listed below the images.
COLUMNS, CLASS_ROWS, UNLABELED_ROWS, BROKEN_LINES = 10, 20, 3, 15
SIDE = 128  # pixels of a sample that is kept


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
            picture.image.thumbnail((SIDE, SIDE))
            found.samples[row] = picture.image.convert("RGB")
    return found


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
        table.add_row(Text(harmless(name)), *(f"{count[name]:,}" for count in counts.values()))
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


def memory(surveys: Mapping[str, Survey], size: int) -> str:
    """What all images take as the trainer holds them."""
    count = sum(len(found.readable) for found in surveys.values())
    grey = all(mode in GREY_MODES + DEEP_MODES for found in surveys.values() for mode in found.modes)
    return (
        f"Memory: {count:,} images of {size} x {size} pixels in {'grey' if grey else 'RGB'} take "
        f"{count * (1 if grey else 3) * size**2 / 1e6:,.1f} MB."
    )


def next_command(args: argparse.Namespace) -> str:
    words = ["fixastep", "train", "--config", "folders/fixmatch", "--labeled", args.labeled]
    words += ["--unlabeled", *args.unlabeled]
    for name in ("validation", "test", "group", "image_size"):
        if getattr(args, name) is not None:
            words += [f"--{name}", str(getattr(args, name))]
    return shlex.join(words)


def contact_sheet(surveys: Mapping[str, Survey]) -> Figure:
    """Labeled classes in rows, a sample of the unlabeled images, and the files that cannot be read."""
    rows = [*labeled_rows(surveys["labeled"]), *unlabeled_rows(surveys["unlabeled"])]
    figure = Figure((COLUMNS, len(rows)), dpi=100)
    grid = figure.add_gridspec(len(rows), COLUMNS, wspace=0.05, hspace=0.05)
    for number, (name, pictures) in enumerate(rows):
        for column, picture in enumerate(pictures):
            show_picture(figure.add_subplot(grid[number, column]), picture)
        box = grid[number, 0].get_position(figure)
        figure.text(0.115, (box.y0 + box.y1) / 2, name, ha="right", va="center", size=9, parse_math=False)
    figure.text(0.125, 0.1, "\n".join(text_lines(surveys)), va="top", size=8, parse_math=False)
    return figure


def labeled_rows(found: Survey) -> list[tuple[str, list[PIL.Image.Image | None]]]:
    """Name and images of each class, None for those that cannot be read."""
    counts = Counter(found.listing.labels)
    return [
        (f"{shorten(label)}\n{counts[label]:,} files", [found.samples.get(row) for row in rows])
        for label, rows in sample_rows(found.listing).items()
    ]


def unlabeled_rows(found: Survey) -> list[tuple[str, list[PIL.Image.Image | None]]]:
    sample = [found.samples.get(row) for row in sample_rows(found.listing)[""]]
    names = [f"unlabeled\n{len(found.listing):,} files", *[""] * UNLABELED_ROWS]
    lines = [sample[start : start + COLUMNS] for start in range(0, len(sample), COLUMNS)]
    return list(zip(names, lines, strict=False))


def show_picture(cell: Axes, picture: PIL.Image.Image | None) -> None:
    cell.set_axis_off()
    if picture is None:
        cell.text(0.5, 0.5, "broken", ha="center", va="center", size=8, color="red")
    else:
        cell.imshow(picture)


def text_lines(surveys: Mapping[str, Survey]) -> list[str]:
    broken = [
        f"{side}/{name}: {why}" for side, found in surveys.items() for name, why in found.broken.items()
    ]
    lines = [f"Files that cannot be read: {len(broken):,}"]
    lines += [shorten(line, 150) for line in broken[:BROKEN_LINES]]
    if len(broken) > BROKEN_LINES:
        lines.append(f"and {len(broken) - BROKEN_LINES:,} more")
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
        parser.error(harmless(str(error)))
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
        "Cost": [memory(surveys, args.image_size)],
        "Then train": [next_command(args)],
    }
    for title, sentences in sections.items():
        if sentences:
            console.print(Text(f"\n{title}", style="bold"))
        for sentence in sentences:
            # A command that is broken into lines cannot be copied.
            console.print(harmless(f"  {sentence}"), soft_wrap=True)
    contact_sheet(surveys).savefig(args.out, format="png", bbox_inches="tight")
    console.print(f"\nContact sheet: {args.out}", soft_wrap=True)
