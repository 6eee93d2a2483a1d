"""Finished runs, tested per machine with intervals over patients, and among foreign images of these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console

from hf_fixastep.evaluation.calibration import Calibration, calibrate, write_calibration
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.evaluation.foreign import KnownImages
from hf_fixastep.evaluation.intervals import Estimate
from hf_fixastep.evaluation.open_set import (
    Area,
    Origins,
    auroc_estimate,
    energy,
    max_probability,
    nearest_class,
    nearest_labeled,
)
from hf_fixastep.evaluation.report import (
    Wording,
    area_numbers,
    as_numbers,
    make_figures,
    plot_methods,
    print_open_set,
    print_tables,
    save,
)
from hf_fixastep.evaluation.sites import LEVEL, Answers, SiteResult, summarize
from hf_fixastep.methods import FITTED, METHODS
from hf_fixastep.runs.folder import METRICS, as_saved


COLUMNS = ("patient", "machine")
FOREIGN = "unseen_foreign"
ALL = "all"  # machines together
WORDS = Wording("machine", "class", "Classification")
REPORT = "report.json"


@dataclass
class AskedRun:
    """What a run says about the images of its data.

    Args:
        scores: of known and of foreign images, by score.
    """

    folder: Path
    method: str
    calibration: Calibration
    answers: Answers
    scores: dict[str, tuple[NDArray, NDArray]]


def has_machines(split: Any) -> bool:
    return {"label", *COLUMNS} <= set(split.column_names)


def method_of(folder: Path) -> str:
    """Loss and gate of a run; runs of the same method are averaged."""
    with as_saved(folder):
        facts = json.loads((folder / METRICS).read_text()) if (folder / METRICS).is_file() else {}
        name, gate = str(facts.get("procedure") or facts.get("loss") or folder.name), facts.get("gate")
    title = {**METHODS, **FITTED}.get(name, name)
    has_pile = name not in ("supervised", *FITTED)  # without one there is nothing to gate
    return f"{title}, gate {gate}" if has_pile and gate not in (None, "off") else title


def ask_run(folder: Path, data: Any, batch_size: int, coverage: float, write: bool) -> AskedRun:
    """Ask the model of a run, and calibrate it on the validation images.

    Args:
        write: leave the calibration in the run, and what `predict` needs to tell foreign images.
    """
    classifier = Classifier(folder, batch_size=batch_size, calibrated=False)
    names = data["test"].features["label"].names
    if names != classifier.classes:
        raise ValueError(
            f"{folder} knows {', '.join(classifier.classes)}, but the data have {', '.join(names)}: expected "
            "the same."
        )
    splits = [split for split in ("labeled", "validation", "test", FOREIGN) if split in data]
    asked = {split: classifier.logits_and_features(data[split]["image"]) for split in splits}
    labels = {split: np.array(data[split]["label"]) for split in splits if split != FOREIGN}
    calibration = calibrate(asked["validation"][0], labels["validation"], coverage)
    if write:
        write_calibration(folder, calibration)
        KnownImages.fit(asked["labeled"][1], asked["validation"][1]).write(folder)
    scores = {}
    if FOREIGN in asked:
        labeled = asked["labeled"][1]
        both = asked["test"], asked[FOREIGN]
        scores = {
            "max_probability": tuple(max_probability(logits) for logits, _ in both),
            "energy": tuple(energy(logits) for logits, _ in both),
            "nearest_labeled": tuple(nearest_labeled(features, labeled) for _, features in both),
            "nearest_class": tuple(nearest_class(found, labeled, labels["labeled"]) for _, found in both),
        }
    answers = Answers(asked["test"][0], labels["test"], np.array(data["test"]["patient"]))
    return AskedRun(folder, method_of(folder), calibration, answers, scores)  # type: ignore[arg-type]


def origins(split: Any) -> Origins:
    return Origins(np.array(split["patient"]), np.array(split["machine"]))


def by_machine(runs: Sequence[AskedRun], machines: NDArray, draws: int, seed: int) -> list[SiteResult]:
    """All machines together, then each, the one with most images first."""
    names, counts = np.unique(machines, return_counts=True)
    sites = {ALL: np.ones(len(machines), bool)}
    sites |= {str(names[at]): machines == names[at] for at in np.argsort(-counts, kind="stable")}
    calibrations = [run.calibration for run in runs]
    return [
        summarize(
            file_name(name),
            "all machines" if name == ALL else f"machine {name}",
            [run.answers.select(rows) for run in runs],
            calibrations,
            draws=draws,
            seed=seed,
        )
        for name, rows in sites.items()
    ]


def file_name(machine: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in machine).lower()


def open_set(runs: Sequence[AskedRun], data: Any, draws: int, seed: int) -> dict[str, dict[str, Area]]:
    """The AUROC of every score: of all pairs, and of those of one machine."""
    own, others = origins(data["test"]), origins(data[FOREIGN])
    found = {}
    for name in runs[0].scores:
        known, foreign = ([run.scores[name][side] for run in runs] for side in (0, 1))
        found[name] = {
            part: auroc_estimate(
                known, foreign, own, others, same_site=part != ALL, draws=draws, level=LEVEL, seed=seed
            )
            for part in (ALL, "same_site")
        }
    return found


def group_by_method(runs: Sequence[AskedRun]) -> dict[str, list[AskedRun]]:
    methods: dict[str, list[AskedRun]] = {}
    for run in runs:
        if not np.array_equal(run.answers.patients, runs[0].answers.patients):
            raise ValueError(
                f"{run.folder} and {runs[0].folder} have other test images: compare runs of the same ones."
            )
        methods.setdefault(run.method, []).append(run)
    return methods


def report(
    runs: Sequence[AskedRun], data: Any, out: Path, draws: int, seed: int, console: Console
) -> Mapping[str, Any]:
    """Table in the terminal; numbers and figures in a folder."""
    classes, methods = list(data["test"].features["label"].names), group_by_method(runs)
    machines = np.array(data["test"]["machine"])
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "classes": classes,
        "bootstrap": {"over": "patients", "draws": draws, "level": LEVEL, "seed": seed},
        "methods": {},
    }
    figures: dict[str, Figure] = {}
    estimates: dict[str, dict[str, Estimate]] = {}
    for number, (method, own) in enumerate(methods.items()):
        results = by_machine(own, machines, draws, seed)
        estimates[method] = {result.title: result.estimate for result in results}
        source = method if len(own) == 1 else f"{method}, mean of {len(own)} runs"
        print_tables(results, source, classes, console, WORDS)
        found["methods"][method] = {
            "runs": [str(run.folder) for run in own],
            "calibration": {str(run.folder): asdict(run.calibration) for run in own},
            "machines": {result.name: as_numbers(result, classes) for result in results},
        }
        if own[0].scores:
            areas = open_set(own, data, draws, seed)
            print_open_set(areas, console, WORDS)
            found["methods"][method]["auroc"] = {
                name: {part: area_numbers(area) for part, area in parts.items()}
                for name, parts in areas.items()
            }
        ending = f"_{number}" if len(methods) > 1 else ""
        made = make_figures(results, classes, WORDS)
        figures |= {f"{name}{ending}": figure for name, figure in made.items()}
    figures["machines"] = plot_methods(estimates, WORDS)
    (out / REPORT).write_text(json.dumps(found, indent=2, allow_nan=False))
    paths = save(figures, out)
    console.print(f"{out}: {REPORT}, {', '.join(path.name for path in paths)}", soft_wrap=True)
    return found
