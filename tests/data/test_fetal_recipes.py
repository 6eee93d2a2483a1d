"""The recipes of fetal planes, a few steps each, and the analysis of the pile."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification, MobileNetV2ImageProcessor

from hf_fixastep.data import folder_report
from hf_fixastep.features.probe import fit_probe
from hf_fixastep.runs import training


RECIPES = Path(__file__).parents[2] / "recipes/fetal_planes"


@pytest.fixture
def options(places, cache, tmp_path, monkeypatch) -> list[str]:
    """Few labels of the small release, a small network of the right kind, few steps."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    torch.manual_seed(0)
    network = MobileNetV2Config(depth_multiplier=0.35, image_size=32, num_labels=7)
    MobileNetV2ForImageClassification(network).save_pretrained(tmp_path / "network")
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    MobileNetV2ImageProcessor(**sizes).save_pretrained(tmp_path / "network")
    words = f"""
        --data_dir {places["zip"]} --labels_per_class 2 --per_device_train_batch_size 4 --image_size 32
        --max_steps 4 --logging_steps 1 --cache_dir {tmp_path / "features"} --use_cpu true --disable_tqdm true
    """
    return words.split()


@pytest.mark.parametrize("name", ["scratch_fixmatch", "tuning_mean_teacher", "mean_teacher"])
def test_a_recipe_of_each_kind_trains(name: str, options: list[str], tmp_path: Path) -> None:
    more = ["--eval_steps", "2", "--save_steps", "2", "--output_dir", str(tmp_path / "run")]
    if not name.startswith("scratch"):
        more += ["--model", str(tmp_path / "network")]
    training.main(["--config", str(RECIPES / f"{name}.yaml"), *options, *more])
    facts = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert facts["steps"] == 4
    assert ("baselines" in facts) == (not name.startswith("scratch"))
    answers = pd.read_csv(tmp_path / "run" / "test_predictions.csv")
    assert answers.columns.tolist() == ["label", "prediction", "patient"]


def test_the_analysis_counts_what_the_gate_keeps_and_scores_foreign_images(
    options, tmp_path, monkeypatch, capsys
) -> None:
    """The shares add up to what the log says, and the probe's AUROC is that of a probe run."""
    spec = importlib.util.spec_from_file_location("analysis", RECIPES / "analysis.py")
    analysis = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(analysis)
    trainers, counted, prepare, watch = [], [], training.prepare, analysis.watch
    monkeypatch.setattr(training, "prepare", lambda argv: trainers.append(prepare(argv)) or trainers[-1])
    monkeypatch.setattr(analysis, "watch", lambda *given: counted.append(watch(*given)) or counted[-1])
    recipe = ["--config", str(RECIPES / "mean_teacher.yaml"), "--model", str(tmp_path / "network"), *options]
    analysis.main(["3", *recipe])
    found = pd.read_csv(io.StringIO(capsys.readouterr().out)).iloc[0]
    assert (found["labels_per_class"], found["seed"]) == (2, 3)
    ((trainer, data, _),) = trainers
    logged = [row["gate/open"] for row in trainer.state.log_history if "gate/open" in row]
    looks, passed = counted[0].numpy()
    assert len(logged) == 4
    assert passed.sum() / looks.sum() == pytest.approx(sum(logged) / 4)
    data_args, *_ = analysis.parse(training.TYPES, [*recipe, "--split_seed", "3"])
    classes = np.array(folder_report(training.load_data(data_args))["unlabeled_classes"])
    for name, rows in (("known", classes >= 0), ("foreign", classes < 0)):
        assert found[name] == pytest.approx(passed[rows].sum() / looks[rows].sum(), abs=1e-5)
    labeled = data["labeled"]
    probe = fit_probe(labeled.plain(), np.asarray(labeled.labels), 5)
    scores = [probe.probabilities(data[name].plain()).max(1) for name in ("test", "unseen_foreign")]
    above = np.mean(np.sign(scores[0][:, None] - scores[1]) / 2 + 0.5)
    assert found["probe"] == pytest.approx(above, abs=1e-5)
