from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, balanced_accuracy_score

from hf_fixastep.study.comparison import TEST_METRICS, as_dict, compare, details, name_of, sentences
from hf_fixastep.study.statistics import (
    DRAWS,
    difference,
    image_draws,
    image_weights,
    mean_interval,
    paired_runs,
    seed_weights,
    stretch,
)
from tests.study.tables import probes, run, study


T_975 = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622}  # as printed in every textbook


def table(*rows: dict) -> pd.DataFrame:
    return pd.DataFrame(rows).set_index(["seed", "split_seed"])


def answered(correct: np.ndarray, seed: int = 0, hash_test: str = "same") -> dict:
    """A run that is right on the images where `correct` is."""
    labels = np.arange(len(correct)) % 2
    given = np.where(correct, labels, 1 - labels)
    scores = {"test_accuracy": float(np.mean(correct)), "validation_accuracy": 0.5}
    return {**scores, "seed": seed, "split_seed": 0, "test_labels": labels, "test_predictions": given} | {
        "test_balanced_accuracy": balanced_accuracy_score(labels, given),
        "hash_test": hash_test,
    }


# ---- statistics


@pytest.mark.parametrize("metric", TEST_METRICS)
def test_resampled_images_give_what_a_loop_gives(metric: str) -> None:
    random = np.random.default_rng(3)
    labels, predictions = random.integers(3, size=50), random.integers(3, size=(2, 50))
    draws, weights = image_draws(labels, predictions, metric), image_weights(50)
    for row in range(0, DRAWS, 400):
        sample = np.repeat(np.arange(50), weights[row])
        assert len(sample) == 50
        for number, answers in enumerate(predictions):
            if metric == "test_accuracy":
                expected = np.mean(labels[sample] == answers[sample])
            else:
                expected = balanced_accuracy_score(labels[sample], answers[sample])
            assert draws[row, number] == pytest.approx(expected, abs=1e-12)


def test_an_image_is_in_a_sample_as_often_as_chance_has_it() -> None:
    weights = image_weights(40)
    assert weights.mean(0) == pytest.approx(np.ones(40), abs=0.1)
    assert weights.var() == pytest.approx(1 - 1 / 40, abs=0.02)  # of a multinomial count with mean 1


def test_the_mean_over_seeds_has_students_interval() -> None:
    values = [0.5, 0.53, 0.62]
    runs = table(*(answered(np.arange(100) < 100 * value, seed) for seed, value in enumerate(values)))
    found = mean_interval(runs, "test_accuracy")
    half = T_975[2] * np.std(values, ddof=1) / np.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((0.55, 0.55 - half, 0.55 + half), abs=1e-5)
    assert (found.seeds, found.over) == (3, "seeds")


def test_a_single_seed_has_the_interval_over_test_images_and_says_so() -> None:
    found = mean_interval(table(answered(np.arange(400) < 300)), "test_accuracy")
    half = 1.96 * np.sqrt(0.75 * 0.25 / 400)
    assert (found.low, found.high) == pytest.approx((0.75 - half, 0.75 + half), abs=0.004)
    assert (found.seeds, found.over) == (1, "test images")


@pytest.mark.parametrize("metric", TEST_METRICS)
@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_identical_runs_differ_by_nothing(metric: str, seeds: int) -> None:
    random = np.random.default_rng(0)
    runs = table(*(answered(random.random(77) < 0.7, seed) for seed in range(seeds)))
    found = difference(runs, runs, metric)
    assert (found.mean, found.low, found.high, found.answer) == (0, 0, 0, "cannot tell")


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_constant_difference_is_certain(seeds: int) -> None:
    right = table(*(answered(np.ones(50, bool), seed) for seed in range(seeds)))
    wrong = table(*(answered(np.zeros(50, bool), seed) for seed in range(seeds)))
    found = difference(right, wrong, "test_accuracy")
    assert (found.low, found.high) == (1, 1)
    assert difference(wrong, right, "test_accuracy").answer == "no"


def test_one_seed_has_the_interval_of_paired_images() -> None:
    """The pairing shows: 40 images more right and 10 more wrong are certain, though both are near 50 %."""
    first, second = np.arange(1000) < 530, np.arange(1000) < 500
    second[520:530] = True
    first[:10] = False
    found = difference(table(answered(first)), table(answered(second)), "test_accuracy")
    gain = first.astype(float) - second
    half = 1.96 * gain.std() / np.sqrt(1000)
    assert (found.low, found.high) == pytest.approx((gain.mean() - half, gain.mean() + half), abs=0.001)
    assert found.over == "test images"


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_seeds_with_images_of_their_own_have_an_interval_as_wide_as_students(seeds: int) -> None:
    gains = np.linspace(-0.1, 0.2, seeds)
    first = [answered(np.arange(1000) < round(1000 * (0.5 + g)), s, f"test {s}") for s, g in enumerate(gains)]
    second = [answered(np.arange(1000) < 500, s, f"test {s}") for s in range(seeds)]
    found = difference(table(*first), table(*second), "test_accuracy")
    half = T_975[seeds - 1] * np.std(gains, ddof=1) / np.sqrt(seeds)
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.12)
    assert found.over == "seeds"


def test_the_draws_of_seeds_and_of_shared_images_add_up_as_in_a_loop() -> None:
    random = np.random.default_rng(1)
    first, second = random.random((3, 60)) < 0.7, random.random((3, 60)) < 0.6
    found = difference(
        table(*(answered(row, seed) for seed, row in enumerate(first))),
        table(*(answered(row, seed) for seed, row in enumerate(second))),
        "test_accuracy",
    )
    gains = first.astype(float) - second
    mean, draws = gains.mean(), []
    for images, shares in zip(image_weights(60), seed_weights(3), strict=True):
        by_seed = sum(share * row.mean() for share, row in zip(shares, gains, strict=True))
        by_image = np.mean([row[np.repeat(np.arange(60), images)].mean() for row in gains])
        draws.append(mean + stretch(3) * (by_seed - mean) + (by_image - mean))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(draws, [0.025, 0.975])), abs=1e-9)
    assert found.over == "seeds and test images"


@pytest.mark.parametrize("metric", TEST_METRICS)
def test_images_of_a_patient_are_resampled_together(metric: str) -> None:
    random = np.random.default_rng(2)
    patients = np.array([f"p{number}" for number in random.integers(12, size=60)])
    first, second = (
        answered(random.random(60) < share) | {"test_patients": patients.tolist()} for share in (0.8, 0.6)
    )
    found = difference(table(first), table(second), metric)
    names, score, draws = np.unique(patients), {"test_accuracy": accuracy_score}, []
    for times in image_weights(len(names)):
        sample = np.concatenate([np.flatnonzero(patients == name) for name in np.repeat(names, times)])
        ends = (
            score.get(metric, balanced_accuracy_score)(
                each["test_labels"][sample], each["test_predictions"][sample]
            )
            for each in (first, second)
        )
        draws.append(next(ends) - next(ends))
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(draws, [0.025, 0.975])), abs=1e-9)
    assert found.over == mean_interval(table(first), metric).over == "patients"


def test_the_stretch_is_students_over_the_normal_width() -> None:
    assert stretch(3) == pytest.approx(T_975[2] / 1.959964 * np.sqrt(3 / 2), rel=1e-4)
    assert stretch(1000) == pytest.approx(1, abs=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("spread", [0.0, 0.4])
@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_cover_the_truth(seeds: int, spread: float, shared: bool) -> None:
    """A model of the world: an image's difficulty, what the method does for it, and luck in training."""
    random = np.random.default_rng([seeds, int(10 * spread), shared])

    def world(shape: tuple[int, ...], trainings: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        easy, help_ = random.normal(0, 1.2, shape), random.normal(0.2, 0.6, shape)
        luck = random.normal(0, spread, (2, *trainings))
        return 1 / (1 + np.exp(-easy - help_ - luck[0])), 1 / (1 + np.exp(-easy - luck[1]))

    truth = np.subtract(*world((1_000_000,), (1_000_000,))).mean()
    covered = []
    for _ in range(300):
        chances = world((1 if shared else seeds, 200), (seeds, 1))
        first, second = (
            [
                answered(random.random(200) < row, s, "same" if shared else str(s))
                for s, row in enumerate(chance)
            ]
            for chance in chances
        )
        found = difference(table(*first), table(*second), "test_accuracy")
        covered.append(found.low <= truth <= found.high)
    assert np.mean(covered) > 0.95 - 3 * np.sqrt(0.95 * 0.05 / 300)


# ---- which runs belong together


def test_runs_that_differ_in_their_seeds_only_are_one_group() -> None:
    found = compare(study(seeds=3))
    assert len(found.groups) == 1 + 2 * 4 * 3
    assert {mean.seeds for mean in found.means} == {3}
    assert (len(found.gains), len(found.helps), found.notes) == (2 * 3 * 3, 2 * 4 * 3, [])


def test_a_group_has_the_mean_of_its_runs() -> None:
    runs = study()
    found = compare(runs)
    chosen = runs[(runs.loss == "fixmatch") & (runs.variant == "+A") & (runs.zeta == 50)]
    (mean,) = [
        mean.mean
        for group, mean in zip(found.groups, found.means, strict=True)
        if name_of(group) == "FixMatch +A" and group.settings["zeta"] == 50
    ]
    assert mean == pytest.approx(chosen["test_accuracy"].mean())


def test_differences_are_those_of_the_table() -> None:
    runs = study().set_index(["loss", "variant", "zeta", "seed"])["test_accuracy"].sort_index()
    found = compare(study())
    for each in found.gains:
        loss, variant, zeta = (each.first.settings[name] for name in ("loss", "variant", "zeta"))
        expected = (runs[loss, variant, zeta] - runs[loss, "base", zeta]).mean()
        assert each.interval.mean == pytest.approx(expected)
    alone = runs["supervised"].mean()
    for each in found.helps:
        expected = (
            runs[each.first.settings["loss"], each.first.variant, each.first.settings["zeta"]].mean() - alone
        )
        assert each.interval.mean == pytest.approx(expected)


def test_labeled_only_is_one_row_for_all_zeta() -> None:
    rows = [run("supervised", "labeled-only", 0.6, seed, zeta) for seed in (0, 1) for zeta in (0, 100)]
    rows += [run("vat", "base", 0.7, seed, zeta) for seed in (0, 1) for zeta in (0, 100)]
    found = compare(pd.DataFrame(rows))
    assert [name_of(group) for group in found.groups] == ["labeled-only", "VAT", "VAT"]
    assert len(found.helps) == 2
    assert found.notes == ["Left out: 2 runs with the settings and seeds of another one."]


@pytest.mark.parametrize(
    "change",
    [
        {"labels_per_class": 400},
        {"dataset": "photos"},
        {"settings": {"model_kwargs": {"depth": 28}}},
        {"settings": {"dataset_kwargs": {"labeled": "elsewhere"}}},
    ],
    ids=str,
)
def test_labeled_only_of_other_data_or_networks_is_not_compared_with(change: dict) -> None:
    found = compare(pd.DataFrame([run("supervised", "labeled-only", 0.6, **change), run("vat", "base", 0.7)]))
    assert found.helps == []
    assert found.notes == [
        "There is no labeled-only run of the same kind for: VAT, pictures, zeta 50, 50 labels per class."
    ]


def test_of_several_labeled_only_runs_validation_decides() -> None:
    rates = {"learning_rate": 0.1}
    better = run("supervised", "labeled-only", 0.5, validation_accuracy=0.9, settings=rates)
    found = compare(pd.DataFrame([run("supervised", "labeled-only", 0.6), better, run("vat", "base", 0.7)]))
    assert found.helps[0].interval.mean == pytest.approx(0.2)
    assert any("best one by validation accuracy" in note for note in found.notes)


def test_perfect_filtering_is_a_row_of_its_own() -> None:
    rows = [
        run("vat", "base", 0.6),
        run("vat", "base", 0.7, oracle=True, settings={"dataset_kwargs": "{oracle: true}"}),
    ]
    found = compare(pd.DataFrame([*rows, run("vat", "Fix-A-Step", 0.65)]))
    assert [name_of(group) for group in found.groups] == [
        "VAT",
        "VAT + Fix-A-Step",
        "VAT with perfect filtering",
    ]
    assert found.gains[0].second is found.groups[0]


def test_settings_of_the_mixing_share_one_base_and_are_told_apart() -> None:
    rows = [run("vat", "base", 0.6, mix_alpha=alpha) for alpha in (0.5, 0.75)]
    rows += [run("vat", "Fix-A-Step", 0.6 + alpha / 10, mix_alpha=alpha) for alpha in (0.5, 0.75)]
    found = compare(pd.DataFrame(rows))
    assert details(found.groups) == ["", "mix_alpha 0.5", "mix_alpha 0.75"]
    assert [each.interval.mean for each in found.gains] == pytest.approx([0.05, 0.075])


def test_what_changes_no_result_makes_no_group() -> None:
    settings = [
        {"logging_steps": 5, "cpu_threads": 1},
        {"output_dir": "elsewhere", "dataloader_num_workers": 3},
    ]
    rows = [run("vat", "base", 0.6, seed, settings=given) for seed, given in enumerate(settings)]
    assert len(compare(pd.DataFrame(rows)).groups) == 1


def test_only_common_seeds_are_paired() -> None:
    rows = [run("vat", "base", 0.6, seed) for seed in (0, 1, 2)] + [
        run("vat", "Fix-A-Step", 0.7, seed) for seed in (2, 3, 1)
    ]
    first, second = paired_runs(*(group.runs for group in compare(pd.DataFrame(rows)).groups))
    assert [list(each.index) for each in (first, second)] == [[(1, 1), (2, 2)]] * 2


def test_no_common_seed_is_said() -> None:
    found = compare(pd.DataFrame([run("vat", "base", 0.6, 0), run("vat", "Fix-A-Step", 0.7, 1)]))
    assert found.gains == []
    assert found.notes[1].startswith(
        "No seeds in common with base, so not compared with it: VAT + Fix-A-Step"
    )


def test_other_test_images_are_said_and_pairs_are_by_seed_only() -> None:
    rows = [run("vat", "base", 0.6 + 0.01 * seed, seed, hash_test="one") for seed in range(3)]
    rows += [run("vat", "Fix-A-Step", 0.7 + 0.02 * seed, seed, hash_test="other") for seed in range(3)]
    found = compare(pd.DataFrame(rows))
    assert found.gains[0].interval.over == "seeds"
    assert any(
        note.startswith("Tested on other images than base, so paired by seed only: VAT")
        for note in found.notes
    )
    single = compare(pd.DataFrame([rows[0], rows[3]]))
    assert "no interval" in sentences(single)[0]
    assert "cannot tell" in sentences(single)[0]


def test_tables_without_runs_or_columns_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="hold no runs"):
        compare(study().iloc[:0])
    with pytest.raises(ValueError, match=r"no column test_predictions, hash_test; write it by"):
        compare(study().drop(columns=["hash_test", "test_predictions"]))


# ---- the probe


def test_everything_else_is_compared_with_the_probe() -> None:
    runs = pd.concat([study(losses=("vat",)), probes(), probes(accuracy=0.58, loss="neighbours")])
    found = compare(runs)
    assert [name_of(group) for group in found.groups[:3]] == ["labeled-only", "probe", "k nearest neighbours"]
    assert (len(found.beats), len(found.helps), len(found.gains)) == (len(found.groups) - 1, 4 * 3, 3 * 3)
    assert found.notes == []
    expected = runs.groupby("variant")["test_accuracy"].mean()
    for each in found.beats:
        assert each.second.variant == "probe"
        if each.first.settings["zeta"] is None:
            own = expected[each.first.variant]
            assert each.interval.mean == pytest.approx(own - expected["probe"])


def test_a_shaped_probe_has_seen_the_pile_but_has_no_base() -> None:
    shaped = [probes(loss="shaped_probe", accuracy=0.7 - zeta / 1000, zeta=zeta) for zeta in (0, 50)]
    runs = pd.concat([study(losses=("vat",), variants=("labeled-only", "base")), probes(), *shaped])
    runs["settings"] = [json.dumps({**json.loads(each), "trainable": "head"}) for each in runs["settings"]]
    found = compare(runs)
    for differences in (found.beats, found.helps):
        own = [each for each in differences if each.first.variant == "shaped_probe"]
        assert [each.first.settings["zeta"] for each in own] == [0, 50]
        assert {name_of(each.first) for each in own} == {"shaped probe"}
    assert found.gains == []
    assert found.notes == []


def test_without_a_probe_nothing_is_said_of_it() -> None:
    found = as_dict(compare(study()))
    assert found["against_probe"] == []
    assert not any("probe" in sentence for sentence in (*found["sentences"], *found["notes"]))


def test_the_probe_is_one_row_for_all_that_has_no_effect_in_it() -> None:
    other = {
        "learning_rate": 0.1,
        "per_device_train_batch_size": 8,
        "unlabeled_ratio": 3,
        "trainable": "lora",
    }
    changes = {"max_steps": 5, "preset": "upstream", "batchnorm": "joint", "mix_labeled": True, "zeta": 0}
    rows = pd.concat([probes(1), probes(2, settings=other, **changes).iloc[1:]])
    (group,) = compare(rows).groups
    assert len(group.runs) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"labels_per_class": 400},
        {"dataset": "photos"},
        {"settings": {"model": "another"}},
        {"settings": {"image_size": 224}},
        {"settings": {"loss_kwargs": {"folds": 3}}},
    ],
    ids=str,
)
def test_probes_of_other_data_or_networks_are_rows_of_their_own(change: dict) -> None:
    assert len(compare(pd.concat([probes(1), probes(1, **change)])).groups) == 2


def test_a_run_without_a_probe_of_its_kind_is_noted() -> None:
    rows = pd.concat([probes(1, settings={"model": "another"}), pd.DataFrame([run("vat", "base", 0.6)])])
    found = compare(rows)
    assert found.beats == []
    assert any(note.startswith("There is no probe run of the same kind for: VAT") for note in found.notes)


def test_fine_tuning_in_part_is_compared_with_the_probe_of_its_network() -> None:
    tuned = run("vat", "base", 0.7, settings={"trainable": "lora", "lora_rank": 4})
    assert len(compare(pd.concat([probes(1), pd.DataFrame([tuned])])).beats) == 1


def test_gates_are_told_apart_by_name() -> None:
    gates = ("drop", "per_example", "project")
    rows = [run("vat", variant, 0.6, gate=gate) for gate in gates for variant in ("+G", "Fix-A-Step")]
    found = compare(pd.DataFrame([run("vat", "base", 0.5), *rows]))
    names = ["+G", "+G per example", "+G project", "+ Fix-A-Step"]
    names += ["+ Fix-A-Step per example", "+ Fix-A-Step project"]
    assert sorted(map(name_of, found.groups)) == sorted(["VAT", *(f"VAT {name}" for name in names)])
    assert len(found.gains) == 6
    assert set(details(found.groups)) == {""}


def test_the_question_about_the_probe_is_answered_for_every_row() -> None:
    runs = pd.concat([study(losses=("fixmatch",), zetas=(0,)), probes()])
    told = [
        sentence for sentence in sentences(compare(runs)) if sentence.startswith("Did it beat the probe?")
    ]
    assert len(told) == 5
    assert told[0].startswith("Did it beat the probe? labeled-only, pictures, 50 labels per class: ")
    assert told[-1].startswith("Did it beat the probe? FixMatch + Fix-A-Step, pictures, zeta 0, 50 labels")


# ---- words


def test_a_sentence_for_each_question_method_and_data() -> None:
    found = compare(study(losses=("fixmatch",), zetas=(100,)))
    told = sentences(found)
    assert len(told) == 3
    gain = found.gains[-1].interval
    assert gain.answer == "yes"
    expected = (
        "Did Fix-A-Step help its base? FixMatch + Fix-A-Step, pictures, zeta 100, 50 labels per class: yes, "
    )
    assert told[-1].startswith(f"{expected}{100 * gain.mean:+.1f} points (95 % interval ")
    assert told[-1].endswith("over seeds and test images; 3 seeds).")
    low, high = map(float, re.search(r"interval (\S+) to (\S+) ", told[-1]).groups())
    assert (low, high) == pytest.approx((100 * gain.low, 100 * gain.high), abs=0.051)


def test_all_of_it_is_plain_json() -> None:
    rows = [run("vat", "base", 0.6, hash_test="one"), run("vat", "Fix-A-Step", 0.7, hash_test="other")]
    text = json.dumps(as_dict(compare(pd.DataFrame(rows))), allow_nan=False)
    assert json.loads(text)["against_base"][0]["low"] is None
