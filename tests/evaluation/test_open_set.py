from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from hf_fixastep import export_dataset, load_dataset
from hf_fixastep.cli import evaluate
from hf_fixastep.data.digits import read_digits
from hf_fixastep.evaluation.open_set import (
    Origins,
    auroc,
    auroc_estimate,
    energy,
    max_probability,
    nearest_class,
    nearest_labeled,
    open_set_metrics,
    risk_coverage,
    risk_coverage_area,
)
from hf_fixastep.plots import plot_risk_coverage
from hf_fixastep.runs import training
from hf_fixastep.runs.evaluation import SCORES
from tests.runs.test_training import arguments


def scores(seed: int, count: int, ties: bool) -> NDArray:
    values = np.random.default_rng(seed).normal(size=count)
    return np.round(values, 1) if ties else values


@pytest.mark.parametrize("ties", [False, True])
def test_the_auroc_counts_pairs_and_agrees_with_scikit_learn(ties):
    known, foreign = scores(0, 70, ties) + 0.5, scores(1, 40, ties)
    won = sum((k > f) + (k == f) / 2 for k in known for f in foreign)
    assert auroc(known, foreign) == pytest.approx(won / (70 * 40), abs=1e-12)
    labels = np.repeat([1, 0], [70, 40])
    assert auroc(known, foreign) == pytest.approx(
        roc_auc_score(labels, np.concatenate([known, foreign])), abs=1e-12
    )


def test_the_auroc_of_a_perfect_a_useless_and_a_wrong_score():
    assert auroc([2.0, 3.0], [0.0, 1.0]) == 1
    assert auroc([1.0, 1.0], [1.0]) == 0.5
    assert auroc([0.0], [1.0, 2.0]) == 0


def test_the_scores_are_the_log_odds_of_the_largest_probability_and_the_energy():
    logits = np.random.default_rng(2).normal(size=(9, 4)) * 3
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    largest = probabilities.max(1)
    np.testing.assert_allclose(max_probability(logits), np.log(largest / (1 - largest)), rtol=1e-9)
    np.testing.assert_allclose(energy(logits), np.log(np.exp(logits).sum(1)), rtol=1e-12)


def test_certain_predictions_do_not_tie():
    logits = np.array([[900.0, 0.0], [0.0, 950.0]], dtype=np.float32)
    np.testing.assert_allclose(max_probability(logits), [900, 950])
    np.testing.assert_allclose(energy(logits), [900, 950])


def test_the_nearest_labeled_images_are_those_of_a_loop_over_pairs():
    random = np.random.default_rng(5)
    features, labeled = random.normal(size=(6, 8)), random.normal(size=(9, 8))
    for count in (1, 4):
        expected = []
        for row in features:
            cosines = [row @ other / (row @ row) ** 0.5 / (other @ other) ** 0.5 for other in labeled]
            expected.append(sum(sorted(cosines, reverse=True)[:count]) / count)
        np.testing.assert_allclose(nearest_labeled(features, labeled, count), expected, rtol=1e-12)


def test_with_fewer_labeled_images_than_asked_for_all_of_them_count():
    np.testing.assert_allclose(nearest_labeled([[2.0, 0.0]], [[1.0, 0.0], [0.0, 3.0]], 5), [0.5])


def test_an_image_without_features_is_like_no_other():
    assert nearest_labeled([[0.0, 0.0]], [[1.0, 0.0]]).tolist() == [0]


def test_the_distance_to_a_class_is_that_of_the_formulas():
    """The shrinkage written out after Ledoit and Wolf, 2004, with the mean known to be zero."""
    random = np.random.default_rng(6)
    labels = np.repeat([3, 5], [7, 9])  # names, not places
    labeled, features = random.normal(size=(16, 4)) * [1, 2, 3, 4], random.normal(size=(5, 4))
    labeled[labels == 5] += 4
    means = [labeled[labels == label].mean(0) for label in (3, 5)]
    centred = np.array(
        [row - means[0 if label == 3 else 1] for row, label in zip(labeled, labels, strict=True)]
    )
    sample = sum(np.outer(row, row) for row in centred) / 16
    scale = np.trace(sample) / 4
    spread = np.sum((sample - scale * np.eye(4)) ** 2)
    noise = sum(np.sum((np.outer(row, row) - sample) ** 2) for row in centred) / 16**2
    share = min(noise, spread) / spread
    inverse = np.linalg.inv((1 - share) * sample + share * scale * np.eye(4))
    expected = [-min((row - mean) @ inverse @ (row - mean) for mean in means) for row in features]
    np.testing.assert_allclose(nearest_class(features, labeled, labels), expected, rtol=1e-9)


def two_machines(seed: int) -> tuple[NDArray, NDArray, Origins, Origins]:
    """Known and foreign images of 12 patients; machine A has higher scores and more of the known ones."""
    random = np.random.default_rng(seed)
    sites = np.array(["A"] * 6 + ["B"] * 6)
    known, foreign = (
        np.append(np.repeat(range(6), 5), range(6, 12)),
        np.append(range(6), np.repeat(range(6, 12), 4)),
    )
    values = [
        np.round(random.normal(size=len(part)) + 2 * (sites[part] == "A"), 1) for part in (known, foreign)
    ]
    return *values, *(Origins(np.array([f"p{at}" for at in part]), sites[part]) for part in (known, foreign))


@pytest.mark.parametrize("same_site", [False, True])
def test_the_auroc_of_images_of_one_site_counts_no_other_pairs(same_site):
    known, foreign, own, others = two_machines(0)
    won = pairs = 0.0
    for k, at in zip(known, own.sites, strict=True):
        for f, place in zip(foreign, others.sites, strict=True):
            if not same_site or at == place:
                won, pairs = won + (k > f) + (k == f) / 2, pairs + 1
    found = auroc_estimate([known, -known], [foreign, -foreign], own, others, same_site=same_site, draws=100)
    assert found.runs == pytest.approx([won / pairs, 1 - won / pairs], abs=1e-12)
    assert found.value == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("same_site", [False, True])
def test_the_interval_of_an_auroc_is_that_of_a_loop_over_samples_of_patients(same_site):
    known, foreign, own, others = two_machines(1)
    found = auroc_estimate([known], [foreign], own, others, same_site=same_site, draws=2000)
    names, random, areas = np.unique(own.patients), np.random.default_rng(7), []
    for _ in range(2000):
        drawn = random.choice(names, len(names))
        won = pairs = 0.0
        for site in ("A", "B") if same_site else (None,):
            sample = []
            for values, origins in ((known, own), (foreign, others)):
                chosen = np.concatenate([np.flatnonzero(origins.patients == name) for name in drawn])
                sample.append(values[[at for at in chosen if site in (None, origins.sites[at])]])
            difference = sample[0][:, None] - sample[1][None]
            won, pairs = won + np.sum(difference > 0) + np.sum(difference == 0) / 2, pairs + difference.size
        areas.append(won / pairs)
    assert [found.low, found.high] == pytest.approx(np.quantile(areas, [0.025, 0.975]), abs=0.02)


def test_an_auroc_of_one_patient_or_without_a_common_site_has_no_interval():
    one, two = (Origins(np.array(names), np.array(["A", "A"])) for names in (["p", "p"], ["p", "q"]))
    found = auroc_estimate([[2.0, 3.0]], [[0.0, 1.0]], one, two, draws=100)
    assert found.value == 1
    assert np.isnan([found.low, found.high]).all()
    apart = Origins(two.patients, np.array(["B", "B"]))
    assert np.isnan(auroc_estimate([[2.0, 3.0]], [[0.0, 1.0]], two, apart, same_site=True, draws=100).value)


@pytest.mark.parametrize("ties", [False, True])
def test_risk_and_coverage_are_those_of_a_loop_over_thresholds(ties):
    values = scores(3, 50, ties)
    correct = np.random.default_rng(4).random(50) < 0.7
    expected, area = [], 0.0
    for threshold in sorted(set(values), reverse=True):
        answered = [right for value, right in zip(values, correct, strict=True) if value >= threshold]
        expected.append((len(answered) / 50, answered.count(False) / len(answered)))
    for value in values:
        answered = [right for other, right in zip(values, correct, strict=True) if other >= value]
        area += answered.count(False) / len(answered) / 50
    coverage, risk = risk_coverage(values, correct)
    np.testing.assert_allclose(np.stack([coverage, risk], 1), expected, rtol=1e-12)
    assert risk_coverage_area(values, correct) == pytest.approx(area, abs=1e-12)


def test_the_risk_of_answering_all_is_the_error():
    correct = np.array([1, 1, 0, 1])
    coverage, risk = risk_coverage([0.9, 0.2, 0.4, 0.6], correct)
    assert (coverage[-1], risk[-1]) == (1, 0.25)
    assert risk.tolist() == [0, 0, 1 / 3, 1 / 4]


def test_foreign_images_are_wrong_answers():
    by_split = {"test": [3.0, 2.0], "seen_foreign": [2.5], "unseen_foreign": [1.0]}
    found = open_set_metrics({"energy": by_split}, [True, True])
    assert found["accuracy"] == 1
    assert (found["auroc_seen_foreign_energy"], found["auroc_unseen_foreign_energy"]) == (0.5, 1)
    assert found["risk_coverage_area_energy"] == 0
    assert found["risk_coverage_area_with_foreign_energy"] == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Four steps of a loss that has a score of its own."""
    folder = tmp_path_factory.mktemp("runs") / "openmatch"
    training.main(arguments("digits/openmatch.yaml", folder))
    return folder


def test_a_run_is_evaluated_among_foreign_images_by_every_score(run):
    evaluate.main([str(run), "--open_set", "true"])
    found = json.loads((run / "evaluation_open_set.json").read_text())
    reported = json.loads((run / "metrics.json").read_text())
    assert found["accuracy"] == pytest.approx(reported["test_accuracy"], abs=1e-6)
    names = {
        f"auroc_{split}_foreign_{score}" for split in ("seen", "unseen") for score in (*SCORES, "own_score")
    }
    assert names <= found.keys()
    assert (run / "risk_coverage.png").stat().st_size > 10_000


def test_a_score_of_the_loss_is_that_of_the_best_checkpoint(run):
    best = json.loads((run / "metrics.json").read_text())["best_step"]
    checkpoint = run / f"checkpoint-{best}"
    assert (run / "loss.safetensors").read_bytes() == (checkpoint / "loss.safetensors").read_bytes()
    assert (run / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()


def test_where_no_class_is_unseen_only_the_seen_ones_are_compared(run):
    evaluate.main([str(run), "--open_set", "true", "--zeta", "100"])
    found = json.loads((run / "evaluation_open_set.json").read_text())
    assert "auroc_seen_foreign_energy" in found
    assert "auroc_unseen_foreign_energy" not in found


def test_data_without_foreign_images_say_so():
    with pytest.raises(ValueError, match="Unknown setting of folders 'foreign'"):
        load_dataset("folders", labeled="labeled", unlabeled="pile", foreign=True)


def test_a_loss_without_a_score_leaves_no_state_behind(tmp_path):
    training.main(arguments("digits/uasd.yaml", tmp_path / "run"))
    assert (tmp_path / "run/checkpoint-4/loss.safetensors").is_file()
    assert not (tmp_path / "run/loss.safetensors").exists()


@pytest.mark.parametrize(
    ("zeta", "seen", "unseen"), [(0, (), (6, 7, 8, 9)), (50, (6, 7), (8, 9)), (100, (6, 7, 8, 9), ())]
)
def test_foreign_digits_are_the_test_images_of_digits_that_are_not_labeled(zeta, seen, unseen, tmp_path):
    pixels, labels = read_digits()
    data = load_dataset("digits_open_set", f"zeta{zeta}", foreign=True, cache_dir=tmp_path)
    digit_of = {image.tobytes(): int(label) for image, label in zip(pixels, labels, strict=True)}
    for name, digits in (("seen_foreign", seen), ("unseen_foreign", unseen)):
        if not digits:
            assert name not in data
            continue
        assert data[name].column_names == ["image"]
        found = [digit_of[np.asarray(image).tobytes()] for image in data[name]["image"]]
        assert sorted(found) == sorted(digits * 60)


def test_foreign_images_are_in_no_other_split_and_change_none(tmp_path):
    plain = load_dataset("digits_open_set", cache_dir=tmp_path)
    data = load_dataset("digits_open_set", foreign=True, cache_dir=tmp_path)
    assert list(plain) == ["labeled", "unlabeled", "validation", "test"]
    contents = {name: {np.asarray(image).tobytes() for image in data[name]["image"]} for name in data}
    for name in plain:
        assert {np.asarray(image).tobytes() for image in plain[name]["image"]} == contents[name]
        assert not contents[name] & (contents["seen_foreign"] | contents["unseen_foreign"])


def test_foreign_images_are_not_exported(tmp_path):
    with pytest.raises(ValueError, match="not exported"):
        export_dataset("digits_open_set", "zeta50", tmp_path / "out", foreign=True)


def test_the_figure_draws_every_curve_under_its_name():
    curves = {"known": ([0.5, 1.0], [0.0, 0.2]), "all": ([0.25, 1.0], [0.1, 0.4])}
    axes = plot_risk_coverage(curves).axes[0]
    assert {line.get_label(): tuple(map(list, line.get_data())) for line in axes.lines} == curves
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["known", "all"]
