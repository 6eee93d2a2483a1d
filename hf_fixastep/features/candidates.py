"""The candidates of a fit: probes, and heads trained on cached features with and without the pile."""

from __future__ import annotations

import contextlib
import gc
import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PrinterCallback

from hf_fixastep.config import FixAStepConfig
from hf_fixastep.disk import write_atomically
from hf_fixastep.evaluation.metrics import balanced_accuracy
from hf_fixastep.features.fit_data import Embedded
from hf_fixastep.features.probe import Probe, fit_probe
from hf_fixastep.features.shape import fit_shaped_probe
from hf_fixastep.models.head import FeatureHead, FeatureHeadConfig
from hf_fixastep.trainer import FixAStepTrainer


PROBE, LABELED_ONLY, TUNED, ALL = "probe", "labeled-only", "fine-tuned", "all"
STEPS: dict[str, Any] = {
    "preset": "pretrained",
    "head_rate_factor": 1.0,  # heads start from a probe
    "max_steps": 300,
    "per_device_train_batch_size": 32,
    "unlabeled_ratio": 4.0,
}
# Settings of the heads, simpler ones first.
HEADS: dict[str, dict[str, Any]] = {
    LABELED_ONLY: {**STEPS, "loss": "supervised"},
    "vat": {**STEPS, "loss": "vat", "gate": "per_example", "unlabeled_weight": 0.3},
    "mean_teacher": {
        **STEPS,
        "loss": "mean_teacher",
        "loss_kwargs": {"student_view": "strong"},
        "gate": "per_example",
        "unlabeled_weight": 20.0,
    },
}
VAT_REACH = 0.17  # VAT's step, as a share of the usual distance of features from their mean
QUIET: dict[str, Any] = {
    "report_to": [],
    "save_strategy": "no",
    "eval_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 50,
}

Head = dict[str, NDArray]  # weight [K, D] and bias [K] of a linear classifier of raw features


@dataclass(eq=False)
class Candidate:
    """A way to train, and what it answers to images that it has not seen.

    Args:
        settings: as in `FixAStepConfig`; of a probe its strength.
        heads: by part, the mean over seeds; "all" learned from all labels.
        logits: [seeds, M, K] of the held-out images.
        labels: [M] of the held-out images.
    """

    name: str
    settings: dict[str, Any]
    heads: dict[str, Head]
    logits: NDArray
    labels: NDArray

    @property
    def scores(self) -> list[float]:
        """Balanced accuracy of each seed."""
        return [balanced_accuracy(logits.argmax(-1), self.labels) for logits in self.logits]

    @property
    def score(self) -> float:
        return float(np.mean(self.scores))

    @property
    def together(self) -> float:
        """Balanced accuracy of the mean of the logits, which is what a mean of linear heads gives."""
        return balanced_accuracy(self.logits.mean(0).argmax(-1), self.labels)

    def on(self, rows: slice) -> Candidate:
        """The same on some of the held-out images."""
        return Candidate(self.name, self.settings, self.heads, self.logits[:, rows], self.labels[rows])


def measure(data: Embedded, seeds: int, state: Path, processor: Any) -> list[Candidate]:
    """All candidates, each on the same held-out images; simpler ones first.

    Args:
        seeds: trainings of each head, whose mean is the candidate.
        state: folder of the heads that are trained already.
    """
    plain = fitted(PROBE, data, state)
    if not data.parts:
        return [plain]
    shaped = fitted("shaped_probe", data, state)
    found, parts = [plain, shaped], rows_of_parts(data)
    bar = tqdm(total=len(HEADS) * len(parts) * seeds, desc="Training heads", unit=" heads")
    with bar, little_garbage():
        for name, settings in HEADS.items():
            by_part: dict[str, list[Head]] = {part: [] for part in parts}
            for part, seen in parts.items():
                for seed in range(seeds):
                    start = plain if name == LABELED_ONLY else shaped
                    own = {**settings, "seed": seed}
                    make = partial(train_head, data, seen, own, processor, start.heads[part])
                    by_part[part].append(recorded(state / f"{name}-{part}-{seed}.npz", make))
                    bar.update()
            found.append(candidate(name, settings, data, by_part))
    return found


def rows_of_parts(data: Embedded) -> dict[str, NDArray]:
    """The labeled images that are seen, of all of them and of each part."""
    return {ALL: np.arange(len(data.labels)), **{part.name: part.seen for part in data.parts}}


def fitted(loss: str, data: Embedded, state: Path) -> Candidate:
    """The probe or the shaped probe, by the name that it has as a loss."""

    def make(seen: NDArray) -> Head:
        given = data.labels[seen], len(data.class_names)
        groups = None if data.groups is None else data.groups[seen]
        made: Probe
        if loss == PROBE:
            made = fit_probe(data.plain[seen], *given, groups=groups)
        else:
            versions = data.labeled.select(seen).weak_versions()
            made = fit_shaped_probe(versions, *given, data.shape, groups=groups)
        return {"weight": made.weight, "bias": made.bias, "strength": np.array(made.strength)}

    by_part = {
        part: [recorded(state / f"{loss}-{part}.npz", partial(make, seen))]
        for part, seen in rows_of_parts(data).items()
    }
    strength = float(by_part[ALL][0]["strength"])
    return candidate(loss.replace("_", " "), {"loss": loss, "strength": strength}, data, by_part)


def candidate(
    name: str, settings: dict[str, Any], data: Embedded, by_part: dict[str, list[Head]]
) -> Candidate:
    """From the heads of all parts and seeds."""
    seeds = len(by_part[ALL])
    logits = [
        np.concatenate(
            [np.empty((0, len(data.class_names)))]
            + [logits_of(by_part[part.name][seed], part.features) for part in data.parts]
        )
        for seed in range(seeds)
    ]
    labels = np.concatenate([np.empty(0, np.int64), *(part.labels for part in data.parts)])
    heads = {part: mean_head(heads) for part, heads in by_part.items()}
    return Candidate(name, settings, heads, np.stack(logits), labels)


def logits_of(head: Head, features: NDArray) -> NDArray:
    return features.astype(np.float64) @ head["weight"].T + head["bias"]


def mean_head(heads: Sequence[Head]) -> Head:
    return {name: np.mean([head[name] for head in heads], axis=0) for name in ("weight", "bias")}


def recorded(path: Path, make: Callable[[], Head]) -> Head:
    """What an earlier call has made, or else made now and kept."""
    if not path.is_file():
        with write_atomically(path) as partial, open(partial, "wb") as file:
            np.savez(file, **make())  # type: ignore[arg-type]
    with np.load(path) as found:
        return dict(found)


def train_head(data: Embedded, seen: NDArray, settings: dict[str, Any], processor: Any, start: Head) -> Head:
    """A linear head on standardised features.

    Args:
        start: a probe of the same images.
    """
    shape: dict[str, Any] = {"size": data.plain.shape[1], "num_labels": len(data.class_names)}
    head = FeatureHead(FeatureHeadConfig(**shape))
    head.standardise(*data.scale)
    head.start_from(start["weight"], start["bias"])
    if settings["loss"] == "vat":  # networks differ in the length of their features
        settings = {**settings, "loss_kwargs": {"eps": VAT_REACH * data.spread}}
    train(head, {**settings, "cpu_threads": 1}, data.labeled.select(seen), data.pile, processor)
    weight, bias = head.linear()
    return {"weight": weight.cpu().numpy(), "bias": bias.cpu().numpy()}


def train(
    model: Any, settings: dict[str, Any], labeled: Any, pile: Any, processor: Any, *callbacks: Any
) -> None:
    """A short training that says and leaves nothing."""
    with tempfile.TemporaryDirectory() as folder, same_threads(), contextlib.redirect_stdout(io.StringIO()):
        trainer = FixAStepTrainer(
            model,
            FixAStepConfig(output_dir=folder, **QUIET, **settings),
            train_dataset=labeled,
            unlabeled_dataset=pile,
            processing_class=processor,
            callbacks=list(callbacks),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


@contextlib.contextmanager
def little_garbage() -> Iterator[None]:
    """Every training collects garbage, which takes as long as its steps if all that the libraries have loaded
    is looked at.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def same_threads() -> Iterator[None]:
    """A training may set the number of threads, which is that of the whole process."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
