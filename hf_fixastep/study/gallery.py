"""Pictures from a finished run: its views, its mixed images, and the images that the gate kept or dropped.

fixastep gallery RUN [--out FOLDER]
"""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from accelerate.utils import send_to_device
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from transformers.utils import logging

from hf_fixastep.data.loader import generator_for
from hf_fixastep.data.views import VIEWS, Views
from hf_fixastep.plots import BLACK, ORANGE, WIDTH, percent, tidy
from hf_fixastep.runs import training
from hf_fixastep.runs.arguments import parse
from hf_fixastep.runs.folder import LOG, METRICS, RECIPE, as_saved
from hf_fixastep.step.mixing import draw_partners
from hf_fixastep.study.figures import SKY, save
from hf_fixastep.trainer import FixAStepTrainer


IN_A_ROW = 6  # pictures side by side


@dataclass
class GalleryArguments:
    """Where the pictures go."""

    out: str | None = field(default=None, metadata={"help": "Folder of the pictures, else that of the run."})


def load_run(folder: Path, scratch: str) -> tuple[FixAStepTrainer, dict[str, Any]]:
    """A trainer with the run's settings, data and model, which writes nothing to the run."""
    for name in (RECIPE, METRICS):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no finished run, for it has no {name}; give the folder of one.")
    quiet = {"report_to": "none", "disable_tqdm": True, "push_to_hub": False, "resume_from_checkpoint": False}
    changes = {"model": folder.resolve(), "output_dir": scratch} | quiet
    words = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    trainer, _, _ = training.prepare(["--config", str(folder / RECIPE), *words])
    if trainer.unlabeled is None:
        raise ValueError(f"{folder} is a labeled-only run, which has no unlabeled images and no gate.")
    return trainer, json.loads((folder / METRICS).read_text())


# ---- views and mixed images


@dataclass(frozen=True)
class Mixed:
    """Labeled images of a batch with their partners, in the order of the share that they keep."""

    images: Tensor
    partners: Tensor
    mixed: Tensor
    labels: Tensor  # [N, K] soft
    shares: Tensor


@torch.no_grad()
def mix_first_batch(trainer: FixAStepTrainer) -> Mixed | None:
    """Phase 1 on the first batch of the run, with the trained model as the guesser."""
    if not trainer.mix_labeled:
        return None
    args = trainer.args
    inputs: Any = send_to_device(next(iter(trainer.get_train_dataloader())), args.device)
    trainer.train_mode(trainer.model)  # guesses use the statistics of the batch, as in the training
    batch, step = trainer.make_batch(inputs), inputs["step"]
    mixed = trainer.mix(trainer.model, batch, step)
    rows = len(batch.y)
    pool = [batch.views[name][: None if args.mix_pool == "all" else rows] for name in ("weak", "weak_2")]
    partners, shares = draw_partners(
        *(rows, len(pool[1]), generator_for(args.seed, args.process_index, step, "mix")),
        alpha=args.mix_alpha,
        per_batch=args.mix_per_batch,
    )
    partner_images = torch.cat([batch.x, pool[0][: len(pool[1])], pool[1]])[partners.to(batch.x.device)]
    order = shares.argsort(stable=True)
    found = (batch.x, partner_images, mixed.x, mixed.y, shares)
    return Mixed(*(each.cpu()[order] for each in found))


def plot_augmentations(trainer: FixAStepTrainer) -> Figure:
    """Unlabeled images with three views of each; labeled images, partners, mixtures and their labels."""
    args, pixels, own = trainer.args, unlabeled_pixels(trainer)[:IN_A_ROW], cast(Views, trainer.views)
    views = own(VIEWS, pixels, generator_for(args.seed, args.process_index, 0, "unlabeled"))
    rows = [("unlabeled", own.plain(pixels)), ("weak", views["weak"]), ("weak", views["weak_2"])]
    rows += [("strong", views["strong"])]
    mixed = mix_first_batch(trainer)
    if mixed is not None:
        chosen = torch.linspace(0, len(mixed.shares) - 1, min(IN_A_ROW, len(mixed.shares))).long()
        mixing = {"labeled": mixed.images, "partner": mixed.partners, "mixed": mixed.mixed}
        rows += [(name, images[chosen]) for name, images in mixing.items()]
    heights = [1.0] * len(rows) + ([0.75] if mixed is not None else [])
    figure = Figure((WIDTH, 1.08 * sum(heights) + 0.4), facecolor="white", layout="constrained")
    grid = figure.subplots(len(heights), IN_A_ROW, squeeze=False, height_ratios=heights)
    for line, (name, images) in zip(grid, rows, strict=False):
        draw_row(line, name, [to_picture(image, trainer) for image in images])
    if mixed is not None:
        for axes, row in zip(grid[-2], chosen, strict=False):
            share = float(mixed.shares[row])
            axes.set_title(f"{share:.0%} + {1 - share:.0%}", size=9, pad=3)
        draw_labels(grid[-1], mixed.labels[chosen], trainer.class_names)
    return figure


def unlabeled_pixels(trainer: FixAStepTrainer) -> Tensor:
    assert trainer.unlabeled is not None  # load_run has seen to that
    return trainer.unlabeled.pixels


def draw_row(line: Sequence[Axes], name: str, pictures: Sequence[NDArray]) -> None:
    for axes in line:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for axes, picture in zip(line, pictures, strict=False):
        axes.imshow(picture, interpolation="nearest", vmin=0, vmax=1)
    line[0].set_ylabel(name, size=10)


def draw_labels(line: Sequence[Axes], labels: Tensor, names: Sequence[str]) -> None:
    """The largest three shares of each soft label as bars with their class."""
    for axes, label in zip(line, labels, strict=False):
        values, classes = label.topk(min(3, len(label)))
        axes.barh(range(len(values)), values, color=SKY, height=0.85)
        for place, (value, number) in enumerate(zip(values.tolist(), classes.tolist(), strict=True)):
            if value >= 0.005:
                name = names[number] if len(names[number]) <= 10 else f"{names[number][:9]}…"
                axes.text(0.03, place, f"{name} {value:.0%}", va="center", size=8, color="black")
        axes.set(xlim=(0, 1), ylim=(2.5, -0.5))
    for axes in line:
        axes.set(xticks=[], yticks=[])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_visible(axes.has_data())
    line[0].set_ylabel("label", size=10)


def to_picture(image: Tensor, trainer: FixAStepTrainer) -> NDArray:
    """Back to 0..1, [H, W, 3]."""
    views = cast(Views, trainer.views)
    mean, std = (torch.tensor(values)[:, None, None] for values in (views.mean, views.std))
    return (image.cpu() * std + mean).clamp(0, 1).expand(3, -1, -1).permute(1, 2, 0).numpy()


# ---- what the gate did to each image


@dataclass(frozen=True)
class Tally:
    """In how many batches each unlabeled image was, and how many of these the gate kept.

    Args:
        kept_share: of all batches.
    """

    batches: NDArray
    kept: NDArray
    kept_share: float
    steps: int

    @property
    def surprise(self) -> NDArray:
        """How far each image is from what chance would give it, in standard deviations."""
        expected, spread = self.by_chance(self.batches).mean(), self.by_chance(self.batches).std()
        return np.divide(self.kept - expected, spread, out=np.zeros(len(spread)), where=spread > 0)

    def by_chance(self, batches: Any) -> Any:
        """How many kept batches an image would have if it made no difference: a sample of all batches.

        That is nearly the binomial distribution for an image in few batches, and narrower for one in many.
        """
        return stats.hypergeom(self.steps, round(self.kept_share * self.steps), batches)


def decisions(log: pd.DataFrame) -> dict[int, bool]:
    """Whether the gate was open, by step from 1 on; a window of the log ends with its own step."""
    found: dict[int, bool] = {}
    for step, words in log.dropna(subset=["gate/cosines"])[["step", "gate/cosines"]].itertuples(index=False):
        cosines = [float(word) for word in str(words).split()]
        found |= {int(step) - len(cosines) + 1 + i: cosine > 0 for i, cosine in enumerate(cosines)}
    return found


def check_gate(trainer: FixAStepTrainer, facts: dict[str, Any]) -> None:
    """Say what makes it impossible to tell which images a decision was about."""
    processes, reason = (facts["speed"] or {}).get("processes", 1), ""
    if trainer.args.procedure:
        reason = "the run is a procedure of several trainings"
    elif trainer.args.gate != "drop":
        reason = f"the gate was {trainer.args.gate}, so no batch was dropped as a whole"
    elif processes != 1:
        reason = f"the run had {processes} processes, whose draws are decided on together"
    elif trainer.args.gradient_accumulation_steps != 1:
        reason = "with gradient accumulation a decision is about several draws"
    if reason:
        raise ValueError(f"No gate_images: {reason}.")


def tally(trainer: FixAStepTrainer, log: pd.DataFrame) -> Tally:
    """Replay the draws, which are a pure function of the seed and the step, without touching an image."""
    opened = decisions(log) if "gate/cosines" in log else {}
    if len(set(opened.values())) < 2:
        did = "kept" if any(opened.values()) else "dropped" if opened else "decided on"
        raise ValueError(f"No gate_images: the gate {did} all of the {len(opened)} batches in the log.")
    sampler: Any = trainer.get_train_dataloader().batch_sampler
    batches, kept_batches = np.zeros((2, len(unlabeled_pixels(trainer))), dtype=np.int64)
    for epoch in range(-(-max(opened) // sampler.steps_per_epoch)):
        sampler.set_epoch(epoch)
        for draw in sampler:
            if draw.number + 1 in opened:  # an image that is in a batch twice counts once
                batches[draw.unlabeled] += 1
                kept_batches[draw.unlabeled] += opened[draw.number + 1]
    return Tally(batches, kept_batches, float(np.mean(list(opened.values()))), len(opened))


def plot_gate_images(found: Tally, trainer: FixAStepTrainer) -> Figure:
    """The images most often in dropped and in kept batches, over the shares of all images."""
    seen = np.flatnonzero(found.batches)
    order = seen[np.argsort(found.surprise[seen], kind="stable")]
    figure = Figure((WIDTH, 6.2), facecolor="white", layout="constrained")
    halves: Any = figure.subfigures(2, height_ratios=[1, 1])
    upper, lower = halves
    grid = upper.subplots(2, IN_A_ROW, squeeze=False)
    for line, name, rows in zip(grid, ("dropped", "kept"), (order, order[::-1]), strict=True):
        images = cast(Views, trainer.views).plain(unlabeled_pixels(trainer)[rows[:IN_A_ROW].copy()])
        draw_row(line, f"most often\n{name}", [to_picture(image, trainer) for image in images])
        for axes, row in zip(line, rows, strict=False):
            share = found.kept[row] / found.batches[row]
            axes.set_title(f"{share:.0%} of {found.batches[row]}", size=9, pad=3)
    draw_shares(lower.subplots(), found, seen)
    lower.supxlabel(chance_in_words(found, seen), size=9)
    return figure


def draw_shares(axes: Axes, found: Tally, seen: NDArray) -> None:
    tidy(axes)
    shares = found.kept[seen] / found.batches[seen]
    expected, weights = chance(found, seen)
    width = max(1 / np.median(found.batches[seen]), 0.01)  # one batch more or less
    low, high = np.round(shares.min() / width) - 2, np.round(shares.max() / width) + 2
    edges = width * (np.arange(max(low, 0), min(high, np.round(1 / width)) + 2) - 0.5)
    axes.hist(shares, edges, color=SKY, label="images")
    by_chance = np.histogram(expected, edges, weights=weights)[0]
    axes.stairs(by_chance, edges, color=ORANGE, linewidth=1.8, label="by chance")
    axes.axvline(found.kept_share, color=BLACK, linewidth=1.2, linestyle="--", label="all batches")
    axes.xaxis.set_major_formatter(percent)
    axes.set(ylabel="Unlabeled images", xlabel="Share of an image's batches that the gate kept")
    axes.legend(frameon=False)


def chance(found: Tally, seen: NDArray) -> tuple[NDArray, NDArray]:
    """Shares that can occur, and how many images chance alone would give each of them."""
    shares, weights = [], []
    for batches, images in zip(*np.unique(found.batches[seen], return_counts=True), strict=True):
        kept = np.arange(batches + 1)
        shares.append(kept / batches)
        weights.append(images * found.by_chance(batches).pmf(kept))
    return np.concatenate(shares), np.concatenate(weights)


def chance_in_words(found: Tally, seen: NDArray) -> str:
    batches, images = int(np.median(found.batches[seen])), len(seen)
    chances, shares = found.by_chance(batches), found.kept[seen] / found.batches[seen]
    low, high = chances.ppf([1 / (images + 1), images / (images + 1)]) / batches
    text = (
        f"The gate kept {found.kept_share:.0%} of {found.steps:,} batches. By chance alone an image in "
        f"{batches} of them would be at {found.kept_share:.0%}, give or take "
        f"{100 * chances.std() / batches:.1f} points (found: {100 * shares.std():.1f}), and the most "
        f"extreme of {images:,} images near {low:.0%} and "
        f"{high:.0%} (found: {shares.min():.0%} and {shares.max():.0%})."
    )
    return textwrap.fill(text, 90)


def main(argv: list[str]) -> None:
    logging.disable_progress_bar()
    try:
        if not argv or argv[0].startswith("--"):
            raise ValueError("Give the folder of a finished run first, such as runs/quickstart.")
        folder, (args, _) = Path(argv[0]), parse((GalleryArguments,), argv[1:])
        out = Path(args.out) if args.out else folder
        with tempfile.TemporaryDirectory() as scratch, as_saved(folder):
            trainer, facts = load_run(folder, scratch)
        out.mkdir(parents=True, exist_ok=True)
        print("Figure:", *save(plot_augmentations(trainer), out / "augmentations"))
        if not trainer.mix_labeled:
            print("The run did not mix labeled images, so augmentations shows views only.")
        try:
            with as_saved(folder):
                check_gate(trainer, facts)
                found = tally(trainer, pd.read_csv(folder / LOG))
        except ValueError as reason:
            print(reason)
        else:
            print("Figure:", *save(plot_gate_images(found, trainer), out / "gate_images"))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
