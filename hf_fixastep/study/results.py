"""Finished runs as rows of one table, which carries what every figure and comparison needs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hf_fixastep.config import FixAStepConfig
from hf_fixastep.disk import write_atomically
from hf_fixastep.methods import FITTED, preset
from hf_fixastep.runs.folder import LOG, METRICS, PREDICTIONS, RECIPE, as_saved
from hf_fixastep.runs.recipe import read_mapping, read_yaml


TABLE = "results.parquet"
FINISHED = "finished.json"  # written last; a run without it is not finished for a sweep
SETTING_COLUMNS = (
    *("dataset", "labels_per_class", "batchnorm", "mix_alpha", "mix_temperature", "mix_per_batch", "preset"),
    *("seed", "split_seed", "max_steps"),
)
# Settings that are no part of a run's fingerprint: where it lies, and how it was watched and continued.
NOT_FINGERPRINTED = ("data_dir", "output_dir", "resume_from_checkpoint", "disable_tqdm")
FACTS = (
    *("procedure", "loss", "gate", "mix_labeled"),
    *("steps", "best_step", "gate_open_rate", "test_calibration_error"),
)
SPLITS = ("labeled", "unlabeled", "validation", "test")
MEASURES = ("accuracy", "balanced_accuracy")
SCORES = tuple(
    f"{raw}{split}_{name}" for raw in ("", "raw_") for split in ("validation", "test") for name in MEASURES
)


def read_runs(paths: Sequence[str | Path]) -> pd.DataFrame:
    """All runs in tables, folders of sweeps and folders of runs; a run that is named twice counts once."""
    tables = []
    for path in map(Path, paths):
        if path.suffix == ".parquet" and path.is_file():
            tables.append(pd.read_parquet(path))
        elif (path / TABLE).is_file():
            tables.append(pd.read_parquet(path / TABLE))
        elif (path / METRICS).is_file():
            tables.append(pd.DataFrame([read_run(path)]))
        else:
            raise ValueError(
                f"{path} is no table of results, no folder of a sweep and no finished run; give a {TABLE}, a "
                f"folder that holds one, or the folder of a run that has a {METRICS}."
            )
    if not tables:
        raise ValueError("No runs are named; give tables of results, folders of sweeps, or folders of runs.")
    return pd.concat(tables, ignore_index=True).drop_duplicates(["run", "settings"], ignore_index=True)


def write_table(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The table, whole or not at all."""
    frame = pd.DataFrame(sorted(rows, key=lambda row: row["run"]))
    with write_atomically(path) as partial:
        frame.to_parquet(partial, index=False, compression="zstd")


def read_run(folder: Path) -> dict[str, Any]:
    """The row of a finished run."""
    if not (folder / PREDICTIONS).is_file():
        raise ValueError(
            f"{folder} has no {PREDICTIONS}, so it is not finished or of an older version; run it again."
        )
    with as_saved(folder):
        return row_of(folder)


def row_of(folder: Path) -> dict[str, Any]:
    facts, recipe = json.loads((folder / METRICS).read_text()), read_yaml(folder / RECIPE)
    answers = pd.read_csv(folder / PREDICTIONS)
    finished = json.loads((folder / FINISHED).read_text()) if (folder / FINISHED).is_file() else {}
    data, speed = facts["dataset"], facts["speed"] or {}
    return {
        "run": folder.name,
        "variant": variant(facts),
        **{name: facts[name] for name in FACTS},
        **settings_of(recipe, facts["loss"]),
        "dataset_config": data["config"],
        "zeta": zeta_of(data["config"]),
        "oracle": bool(read_mapping("dataset_kwargs", recipe.get("dataset_kwargs")).get("oracle")),
        "settings": json.dumps(
            {name: recipe[name] for name in sorted(recipe) if name not in NOT_FINGERPRINTED}
        ),
        **{name: facts.get(name) for name in SCORES},
        "test_labels": answers["label"].tolist(),
        "test_predictions": answers["prediction"].tolist(),
        "test_patients": answers["patient"].tolist() if "patient" in answers else None,
        **{f"hash_{name}": data["hashes"].get(name) for name in SPLITS},
        **curves(read_log(folder / LOG)),
        "seconds": finished.get("seconds"),
        "resumed": finished.get("resumed"),
        "steps_per_second": speed.get("steps_per_second"),
        "device": speed.get("device"),
        "processes": speed.get("processes"),
        "versions": json.dumps(facts["versions"], sort_keys=True),
    }


def variant(facts: dict[str, Any]) -> str:
    if facts["loss"] in FITTED:
        return facts["loss"]
    if facts["loss"] == "supervised" and not facts["procedure"]:
        return "labeled-only"
    names = {(False, False): "base", (True, False): "+G", (False, True): "+A", (True, True): "Fix-A-Step"}
    return names[facts["gate"] != "off", facts["mix_labeled"]]


def settings_of(recipe: dict[str, Any], loss: str) -> dict[str, Any]:
    """What was given, and otherwise what the preset and the defaults say."""
    filled = preset(recipe.get("preset", "paper"), loss, recipe.get("procedure"))
    defaults = {name: getattr(FixAStepConfig, name, None) for name in SETTING_COLUMNS} | {"split_seed": 0}
    return {name: {**defaults, **filled, **recipe}[name] for name in SETTING_COLUMNS}


def zeta_of(config: str | None) -> float:
    """Percent of foreign classes, for the data sets that count them."""
    number = (config or "").removeprefix("zeta").split("-")[0]
    return float(number) if number.isdigit() else float("nan")


def read_log(path: Path) -> pd.DataFrame:
    """Without rows for what was fitted and not trained."""
    return pd.read_csv(path) if path.is_file() else pd.DataFrame({"step": []})


def curves(log: pd.DataFrame) -> dict[str, list[float]]:
    """The gate over the training, and the accuracy on validation images."""
    log = log.reindex(columns=log.columns.union(["gate/open", "gate/cosine", "eval_accuracy"]))
    gate, tested = log.dropna(subset=["gate/open"]), log.dropna(subset=["eval_accuracy"])
    return {
        "log_step": gate["step"].tolist(),
        "log_gate_open": gate["gate/open"].round(6).tolist(),
        "log_cosine": gate["gate/cosine"].round(6).tolist(),
        "eval_step": tested["step"].tolist(),
        "eval_accuracy": tested["eval_accuracy"].round(6).tolist(),
    }
