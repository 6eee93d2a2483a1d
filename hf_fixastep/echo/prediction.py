"""Tell the views of echocardiograms in a folder: PNG, JPEG, DICOM, MetaImage, NIfTI; stills and clips.

fixastep predict --model runs/tmed2-fixmatch --input FOLDER --out views.csv

Writes views.csv with a row per file, views_frames.csv with a row per frame, and views_skipped.csv with the
files that could not be used. No value of a file's header is written, except `study`: the first 16 digits of
the SHA-256 of a salt and the StudyInstanceUID. The salt is new for every call and thrown away, unless --salt
gives one.
For research only: not a medical device.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers.utils import logging

from hf_fixastep.checks import harmless
from hf_fixastep.data.files import UnreadableImage, printable
from hf_fixastep.data.trees import Tree
from hf_fixastep.echo.clips import PARTS, prepare_frames, read_clip
from hf_fixastep.evaluation.calibration import Calibration, probabilities
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.runs.arguments import parse


UNCALIBRATED = Calibration(1.0)


@dataclass
class PredictArguments:
    """What to classify, and where to write."""

    model: str = field(metadata={"help": "Folder of a finished run, or a Hub name."})
    input: str = field(metadata={"help": "Folder with echo files at any depth, or one file."})
    out: str = field(metadata={"help": "CSV file to write."})
    mask: bool = field(
        default=True, metadata={"help": "Make screen text outside the ultrasound sector black."}
    )
    salt: str | None = field(
        default=None, metadata={"help": "Secret that makes study ids equal between calls."}
    )
    uncalibrated: bool = field(
        default=False, metadata={"help": "Use a model whose config has no calibration."}
    )
    batch_size: int = field(default=64, metadata={"help": "Frames per forward."})


def vote(frames: np.ndarray) -> tuple[int, float, float]:
    """Class, mean probability of it, and share of the frames that it wins; of ties the more probable one.

    Args:
        frames: probabilities [T, K].
    """
    votes = np.bincount(frames.argmax(-1), minlength=frames.shape[1])
    means = frames.mean(0)
    winner = int(np.lexsort((means, votes))[-1])
    return winner, float(means[winner]), float(votes[winner] / len(frames))


def study_id(uid: str | None, salt: str) -> str:
    return hashlib.sha256(f"{salt}\0{uid}".encode()).hexdigest()[:16] if uid else ""


class ViewTables:
    """The three files, written row by row: what was found stays, whatever happens later."""

    def __init__(self, out: Path, classes: list[str]) -> None:
        shares = [f"probability_{view}" for view in classes]
        columns = {
            "clips": ["file", "study", "frames", "view", "probability", "votes", "abstain", *shares],
            "frames": ["file", "frame", "view", "probability", "abstain", *shares],
            "skipped": ["file", "reason"],
        }
        self.clips: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []
        self.paths = {
            part: out if part == "clips" else out.with_name(f"{out.stem}_{part}{out.suffix}")
            for part in columns
        }
        for part, names in columns.items():
            pd.DataFrame(columns=names).to_csv(self.paths[part], index=False)

    def add(self, part: str, *rows: dict[str, Any]) -> None:
        table = pd.DataFrame(rows)
        table.to_csv(self.paths[part], mode="a", header=False, index=False, float_format="%.6g")
        if part != "frames":  # of which there are many, and nobody asks for them again
            getattr(self, part).extend(rows)


def classify_files(
    args: PredictArguments, classifier: Classifier, calibration: Calibration, tree: Tree
) -> ViewTables:
    tables, salt = ViewTables(Path(args.out), classifier.classes), args.salt or secrets.token_hex(32)
    names = [name for name in tree if not name.lower().endswith(PARTS)]
    for name in tqdm(names, "Reading files", unit="file"):
        try:
            clip = read_clip(tree, name)
            pixels = torch.from_numpy(prepare_frames(clip, args.mask))[:, None]
        except (UnreadableImage, MemoryError) as error:
            reason = str(error) or "it does not fit into memory"
            tables.add("skipped", {"file": printable(name), "reason": reason})
            continue
        frames = probabilities(classifier.logits(pixels), calibration.temperature)
        winner, probability, share = vote(frames)
        below, columns = calibration.abstain_below, [f"probability_{view}" for view in classifier.classes]
        tables.add(
            "clips",
            {
                "file": printable(name),
                "study": study_id(clip.study, salt),
                "frames": len(frames),
                "view": classifier.classes[winner],
                "probability": probability,
                "votes": share,
                "abstain": probability < below,
                **dict(zip(columns, frames.mean(0), strict=True)),
            },
        )
        rows = [
            {
                "file": printable(name),
                "frame": number,
                "view": classifier.classes[row.argmax()],
                "probability": row.max(),
                "abstain": row.max() < below,
                **dict(zip(columns, row, strict=True)),
            }
            for number, row in enumerate(frames)
        ]
        tables.add("frames", *rows)
    return tables


def read_inputs(argv: list[str]) -> tuple[PredictArguments, Classifier, Calibration, Tree]:
    """Everything that can be wrong with what the user gave, except for single files, is found in here."""
    args, _ = parse((PredictArguments,), argv)
    if Path(args.out).is_dir():
        raise ValueError(f"out is {args.out}, which is a folder; give the name of a CSV file.")
    tree = Tree(args.input)
    if not any(True for _ in tree):
        raise ValueError(f"{args.input} holds no file; give a folder with echo files.")
    classifier = Classifier(args.model, batch_size=args.batch_size, calibrated=not args.uncalibrated)
    calibration = UNCALIBRATED if args.uncalibrated else classifier.calibration
    if calibration is None:
        raise ValueError(
            f"{args.model} has no calibration, so its probabilities mean little: run fixastep heart2heart "
            f"{args.model} --tmed2 FOLDER first, or add --uncalibrated true."
        )
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    return args, classifier, calibration, tree


def print_table(tables: ViewTables, classes: list[str], calibration: Calibration) -> None:
    clips = pd.DataFrame(tables.clips)
    table = Table("view", "files", "abstained")
    for view in classes:
        chosen = clips[clips["view"] == view]
        table.add_row(harmless(view), f"{len(chosen):,}", f"{int(chosen['abstain'].sum()):,}")
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(table)
    threshold = f"a probability of {calibration.abstain_below:.2f}, which {calibration.coverage:.0%}"
    console.print(f"abstained: below {threshold} of the validation images reach")
    for row in tables.skipped[:5]:
        console.print(harmless(f"skipped {row['file']}: {row['reason']}"))
    used = f"{len(clips):,} files used, {len(tables.skipped):,} skipped, written to"
    console.print(used, *tables.paths.values())
    console.print("For research only: not a medical device.")


def main(argv: list[str]) -> None:
    logging.disable_progress_bar()  # of the model's files
    try:
        args, classifier, calibration, tree = read_inputs(argv)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    tables = classify_files(args, classifier, calibration, tree)
    if not tables.clips:
        example = tables.skipped[0] if tables.skipped else {"file": "none", "reason": "there is none"}
        sys.exit(
            f"error: None of the {len(tables.skipped):,} files in {args.input} could be used, such as "
            f"{example['file']}: {example['reason']}. All of them are in {tables.paths['skipped']}."
        )
    print_table(tables, classifier.classes, calibration)
