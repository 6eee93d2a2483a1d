"""What a fit leaves behind: the model, its card, figures, and `fit.json` at the very end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from huggingface_hub import ModelCard
from numpy.typing import NDArray
from sklearn.metrics import confusion_matrix

from hf_fixastep.checkpoints import LOCK
from hf_fixastep.disk import write_atomically
from hf_fixastep.evaluation.calibration import Calibration, probabilities, write_calibration
from hf_fixastep.features.candidates import PROBE, Candidate
from hf_fixastep.features.verdict import against, percent
from hf_fixastep.hub.cards import FIX_A_STEP, describe_results, describe_use, header, table, usage
from hf_fixastep.hub.push import check_push, model_files
from hf_fixastep.hub.texts import escape, plain, shared, template_path
from hf_fixastep.methods import CITATIONS
from hf_fixastep.plots import RESOLUTION, plot_confusion, plot_differences
from hf_fixastep.runs.folder import CARD, RunFolder


FACTS, HELD_OUT, STATE, ABOUT = "fit.json", "held_out.csv", "state", "about.json"
FIGURES = {
    "candidates.png": "Candidates against the probe on held-out images",
    "confusion.png": "True and predicted classes of held-out images",
}


# ---- the output folder


def check_free(out: Path) -> None:
    """Refuse a folder that holds anything but a fit."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"output_dir is {out}, which is no folder; choose another.")
    ours = (out / FACTS).is_file() or (out / STATE / ABOUT).is_file()
    if out.is_dir() and not ours and (others := sorted({*os.listdir(out)} - {STATE, LOCK})):
        raise ValueError(
            f"output_dir is {out}, which holds {others[0]} and is no fit: choose an empty folder, or a new "
            "one."
        )


def open_state(out: Path, about: dict[str, Any]) -> dict[str, Any] | None:
    """Make room for what will be finished one by one; the facts of a fit that is finished already.

    Args:
        about: all that the outcome depends on; a folder of anything else is refused.
    """
    finished = json.loads((out / FACTS).read_text()) if (out / FACTS).is_file() else None
    record, state = out / STATE / ABOUT, out / STATE
    known = finished["about"] if finished else json.loads(record.read_text()) if record.is_file() else None
    if known is not None:
        about = json.loads(json.dumps(about))
        if changed := [name for name in {**about, **known} if known.get(name) != about.get(name)]:
            raise ValueError(
                f"{out} holds a {'finished' if finished else 'started'} fit with other {', '.join(changed)}: "
                "choose another output_dir, or delete it."
            )
        if finished:
            shutil.rmtree(state, ignore_errors=True)
        return finished
    state.mkdir(parents=True, exist_ok=True)
    with write_atomically(record) as partial:
        partial.write_text(json.dumps(about, indent=1))
    return None


def stage(out: Path) -> Path:
    """An empty folder to write all files in."""
    folder = out / STATE / "out"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def publish(staged: Path, out: Path) -> None:
    """Move finished files to where they belong, `fit.json` as the last one."""
    for path in sorted(staged.iterdir(), key=lambda path: path.name == FACTS):
        os.replace(path, out / path.name)
    shutil.rmtree(out / STATE)


# ---- its files


def save_network(model: Any, processor: Any, calibrated: bool, folder: Path) -> None:
    model.to("cpu", memory_format=torch.contiguous_format).save_pretrained(folder)
    processor.save_pretrained(folder)
    if calibrated:  # the temperature is in the head
        write_calibration(folder, Calibration(1.0))


def held_out_table(
    images: Sequence[Any],
    candidates: Sequence[Candidate],
    chosen: Candidate,
    names: Sequence[str],
    scaled: NDArray,
) -> pd.DataFrame:
    """What all candidates answer to each held-out image, and how sure the chosen one is."""
    classes = np.array(names, dtype=object)
    columns: dict[str, Any] = {"image": list(images), "label": classes[chosen.labels]}
    columns |= {each.name: classes[each.logits.mean(0).argmax(-1)] for each in candidates}
    shares = probabilities(scaled)
    return pd.DataFrame(columns | {f"p({name})": shares[:, at] for at, name in enumerate(names)})


def save_figures(
    candidates: Sequence[Candidate], chosen: Candidate, names: Sequence[str], folder: Path
) -> None:
    differences = {each.name: against(each, candidates[0]) for each in candidates[1:]}
    rows = {name: (found.mean, found.low, found.high) for name, found in differences.items()}
    label = "Balanced accuracy minus that of the probe, in points, with 95 % intervals for all at once"
    plot_differences(rows, label).savefig(folder / "candidates.png", dpi=RESOLUTION)
    answers = chosen.logits.mean(0).argmax(-1)
    counts = confusion_matrix(chosen.labels, answers, labels=range(len(names)))
    plot_confusion(counts, names).savefig(folder / "confusion.png", dpi=RESOLUTION)


def facts_of(each: Candidate, probe: Candidate) -> dict[str, Any]:
    """A candidate as `fit.json` has it.

    Args:
        probe: on the same images.
    """
    facts: dict[str, Any] = {"settings": each.settings, "held_out_images": len(each.labels)}
    if len(each.labels):
        facts |= {"balanced_accuracy": each.score, "by_seed": each.scores, "of_mean_head": each.together}
        if each.name != PROBE:
            found = against(each, probe)
            ends = [None if np.isnan(end) else end for end in (found.low, found.high)]
            over = found.over.replace("test", "held-out")
            facts["minus_probe"] = {"mean": found.mean, "interval_95": ends, "over": over}
    return facts


def run_folder(facts: dict[str, Any], folder: Path) -> RunFolder:
    """The folder of a fit as that of a run."""
    settings = facts["candidates"][facts["chosen"]]["settings"]
    known = {"loss": settings["loss"], "dataset": facts["dataset"], "weights": facts["weights"]}
    return RunFolder(folder, {**known, **facts["test"].get(facts["chosen"], {})}, {})


def fit_card(
    run: RunFolder,
    facts: dict[str, Any],
    place: str,
    license: str | None = None,
    intended_use: str | None = None,
) -> str:
    """The README.md of a fit.

    Args:
        place: the folder or the name on the Hub where the model will be.
    """
    tested, title = facts["chosen"] in facts["test"], Path(place).resolve().name
    figures = [f"![{text}]({file})" for file, text in FIGURES.items() if (run.folder / file).is_file()]
    images, hashes = facts["dataset"]["images"], facts["dataset"]["hashes"]
    rows = [[escape(name), f"{number:,}", hashes[name]] for name, number in images.items()]
    card = ModelCard.from_template(
        header(run, plain(title), license),
        template_path=str(template_path("fit_card.md")),
        title=escape(title),
        summary=summary(facts, run.class_names),
        verdict=facts["verdict"],
        usage=usage(run, place),
        data="\n\n".join(
            [f"Name: {escape(facts['dataset']['name'])}.", table(["split", "images", "hash"], rows)]
        ),
        candidates=describe_candidates(facts),
        figures="\n\n".join(figures),
        results=describe_results(run) if tested else "There were no test images.",
        intended_use=describe_use(run, intended_use),
        limits=limits(facts),
        citations="\n\n".join(filter(None, [FIX_A_STEP, CITATIONS.get(run.metrics["loss"])])),
    )
    return f"{card}\n"


def prepare_push(
    folder: Path, repo_id: str | None, license: str | None, intended_use: str | None
) -> dict[str, bytes | Path]:
    """The files of a push, without the names of images and groups."""
    facts = json.loads((folder / FACTS).read_text())
    run = run_folder(facts, folder)
    repo_id = check_push(run, repo_id, license, intended_use)
    del facts["about"]
    card = fit_card(run, facts, repo_id, license, intended_use)
    return model_files(run, {CARD: card, FACTS: json.dumps(shared(facts), indent=1)}, FIGURES)


def summary(facts: dict[str, Any], names: Sequence[str]) -> str:
    shown = ", ".join(escape(name, 40) for name in names[:12]) + (", and others" if len(names) > 12 else "")
    images = facts["dataset"]["images"]
    return (
        f"An image classifier of {len(names)} classes ({shown}) on top of {escape(shared(facts['model']))}, "
        f"from {images['labeled']:,} labeled and {images['unlabeled']:,} unlabeled images. It is the best of "
        f"several candidates on held-out images: {facts['chosen']}."
    )


def describe_candidates(facts: dict[str, Any]) -> str:
    rows = []
    for name, each in facts["candidates"].items():
        if "balanced_accuracy" in each:
            low, high = each.get("minus_probe", {}).get("interval_95", (None, None))
            ends = "" if low is None else f"{100 * low:+.1f} to {100 * high:+.1f}"
            images, seeds = f"{each['held_out_images']:,}", str(len(each["by_seed"]))
            rows.append([name, images, seeds, percent(each["balanced_accuracy"]), ends])
    if not rows:
        return "There were too few labels to compare any."
    columns = ["", "held-out images", "seeds", "balanced accuracy", "minus probe, 95 % interval"]
    return "\n\n".join(
        [
            table(columns, rows),
            f"Held out: {facts['held_out']}. The chosen one is the best of these, so that its number is too "
            "good, the more so the fewer these images are. `probe` is logistic regression on the features "
            "of the frozen network, `labeled-only` a head trained on the labels alone; the others use "
            "the pile.",
        ]
    )


def limits(facts: dict[str, Any]) -> str:
    labeled = facts["dataset"]["images"]["labeled"]
    lines = [
        f"- Its classes are known from {labeled:,} labeled images. Another choice of them gives another "
        "model.",
        "- The unlabeled images were not sorted or checked; what they show may have shaped the model.",
        "- Its probabilities were calibrated on the held-out images; the temperature is in the head."
        if facts["temperature"] is not None
        else "- Its probabilities were not calibrated.",
    ]
    return "\n".join(lines)
