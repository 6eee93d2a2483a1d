"""Splits of FETAL_PLANES_DB, from a small release and from the real one where it is at hand."""

import io
import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import PIL.Image
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import balanced_accuracy_score

from hf_fixastep.cli.evaluate import main as evaluate
from hf_fixastep.cli.predict import main as predict
from hf_fixastep.data import export_dataset, folder_report, list_datasets, load_dataset
from hf_fixastep.data.fetal_planes import FetalPlanes, draw
from hf_fixastep.data.registry import dataset_card
from hf_fixastep.features.fit_data import load_named
from hf_fixastep.runs.training import main as train
from hf_fixastep.study.results import read_run
from tests.data.fetal_release import BRAIN, BY_BYTES, PLANES, REAL, ROOT, ROWS, SPLITS, TRAIN, TWINS, UNCLEAR


def rows_of(split: datasets.Dataset) -> list[dict]:
    """The rows of the release that a split has, known by the bytes of the files."""
    encoded = split.cast_column("image", datasets.Image(decode=False))["image"]
    return [BY_BYTES[image["bytes"]] for image in encoded]


def names_of(split: datasets.Dataset) -> list[str]:
    return [row["name"] for row in rows_of(split)]


@pytest.mark.parametrize(("config", "classes"), [("planes", PLANES), ("brain", BRAIN)])
def test_splits_hold_what_they_should(load, config, classes):
    data = load(config, seed=1)
    assert list(data) == SPLITS
    kind = {r["name"]: r["plane" if config == "planes" else "brain"] for r in ROWS}
    unclear = UNCLEAR if config == "planes" else set()
    held_out = set(data["validation"]["patient"])
    assert len(held_out) in (6, 7)  # a fifth of 30; the other one of the twins may come on top
    assert len(held_out & TWINS) != 1
    expected: dict[str, set[str]] = defaultdict(set)
    for row in ROWS:
        name, known = row["name"], kind[row["name"]] in classes
        if not row["train"]:
            expected["test" if known else "unseen_foreign"].add(name)
        elif row["patient"] not in held_out:
            expected["others"].add(name)
        elif known:
            expected["validation"].add(name)
    for split in ("validation", "test", "unseen_foreign"):
        assert sorted(names_of(data[split])) == sorted(expected[split] - unclear)
    labeled, pile = set(names_of(data["labeled"])), set(names_of(data["unlabeled"]))
    missing = expected["others"] - labeled - pile
    assert not labeled & pile
    assert labeled | pile <= expected["others"]
    pixels = {r["name"]: np.asarray(PIL.Image.open(io.BytesIO(r["bytes"]))).astype(int) for r in ROWS}
    for name in missing:  # a copy of a labeled image, and nothing else, is left out
        assert any(np.abs(pixels[name] - pixels[other]).max() <= 1 for other in labeled)
    assert not labeled & unclear
    for split in ("labeled", "validation", "test"):
        assert data[split].features["label"].names == classes
        named = [classes[label] for label in data[split]["label"]]
        assert named == [kind[name] for name in names_of(data[split])]
    assert Counter(data["labeled"]["label"]) == dict.fromkeys(range(len(classes)), 3)


def test_patient_machine_and_operator_are_in_all_splits_and_labels_only_where_they_belong(load):
    data = load()
    for name, part in data.items():
        labels = [] if name in ("unlabeled", "unseen_foreign") else ["label"]
        assert part.column_names == ["image", *labels, "patient", "machine", "operator"]
        for column in ("patient", "machine", "operator"):
            assert part[column][:] == [row[column] for row in rows_of(part)]
        assert {
            image["path"] for image in part.cast_column("image", datasets.Image(decode=False))["image"]
        } == {None}


def test_validation_patients_depend_on_neither_labels_nor_config_and_labels_are_nested(load):
    few, many, brain = load(labels_per_class=2), load(labels_per_class=5), load("brain", labels_per_class=2)
    assert few["validation"]["patient"][:] == many["validation"]["patient"][:]
    assert set(few["validation"]["patient"]) == set(brain["validation"]["patient"])
    assert set(names_of(few["labeled"])) < set(names_of(many["labeled"]))
    assert set(names_of(few["labeled"])) != set(names_of(load(labels_per_class=2, seed=1)["labeled"]))


def test_labels_of_a_class_come_from_as_many_patients_as_possible(load):
    labeled = load(labels_per_class=20)["labeled"]
    by_class = defaultdict(list)
    for label, patient in zip(labeled["label"], labeled["patient"], strict=True):
        by_class[label].append("twins" if patient in TWINS else patient)
    assert all(len(set(patients)) == 20 for patients in by_class.values())


def test_one_machine_alone_has_labels_pile_and_validation(load):
    data = load(machine="Aloka")
    machines = {name: set(part["machine"]) for name, part in data.items()}
    both = {"Aloka", "Voluson E6"}
    assert machines == {name: both if name in SPLITS[3:] else {"Aloka"} for name in SPLITS}
    assert names_of(data["test"]) == names_of(load()["test"])


def test_without_foreign_images_there_are_four_splits(load):
    assert list(load(foreign=False)) == SPLITS[:4]


def test_the_report_counts_classes_of_the_pile_for_an_analysis(load):
    data = load()
    report = folder_report(data)
    true = Counter(row["plane"] for row in rows_of(data["unlabeled"]))
    assert report["classes"]["unlabeled"] == {"foreign": true.pop("Other"), **true}
    numbers = [
        PLANES.index(row["plane"]) if row["plane"] in PLANES else -1 for row in rows_of(data["unlabeled"])
    ]
    assert report["unlabeled_classes"] == numbers
    assert report["images"] == {name: len(part) for name, part in data.items()}
    assert report["patients"] == {name: len(set(part["patient"])) for name, part in data.items()}
    assert sorted(report["two_classes"]) == sorted(UNCLEAR)
    assert report["copies"] == 1 + 4 + len(TRAIN)
    used = [name for part in data.values() for name in names_of(part)]
    assert sorted(used + report["left_out"]) == sorted(row["name"] for row in ROWS)


def test_streaming_gives_the_same_rows(load):
    built, streamed = load(), load(streaming=True)
    rows = list(streamed["labeled"])
    assert [row["image"].tobytes() for row in rows] == [
        image.tobytes() for image in built["labeled"]["image"]
    ]
    assert next(iter(streamed["unlabeled"])).keys() == {"image", "patient", "machine", "operator"}


# The draw, on numbers


def draw_toy(seed: int, **changes):
    """Forty training patients with three images each, of classes 0, 1 and foreign, and ten for the test."""
    patients = np.repeat(np.arange(50), 3)
    values = {
        "names": ["one", "two"],
        "labels": np.tile([0, 1, -1], 50),
        "train": patients < 40,
        "chosen": np.ones(150, bool),
        "copies": np.arange(150),
        "patients": patients,
        "labels_per_class": 4,
        "seed": seed,
    }
    return patients, draw(**values | changes)


@pytest.mark.parametrize("seed", range(20))
def test_no_patient_is_both_in_validation_and_in_what_is_trained_on(seed):
    patients, parts = draw_toy(seed)
    by_split = {name: set(patients[rows]) for name, rows in parts.items()}
    assert len(by_split["validation"]) == 8
    assert not by_split["validation"] & (by_split["labeled"] | by_split["unlabeled"])
    assert by_split["labeled"] < by_split["unlabeled"]
    assert by_split["test"] == by_split["unseen_foreign"] == set(range(40, 50))
    assert len(parts["labeled"]) + len(parts["unlabeled"]) == 32 * 3


def test_a_copy_in_common_moves_no_patient_but_the_two():
    copies = np.arange(150)
    copies[5] = copies[2]  # foreign images of the patients 0 and 1
    moved = []
    for seed in range(20):
        patients, without = draw_toy(seed)
        _, parts = draw_toy(seed, copies=copies)
        held_out, before = (set(patients[found["validation"]]) for found in (parts, without))
        assert len({0, 1} & held_out) != 1
        assert held_out - {0, 1} == before - {0, 1}
        moved.append(held_out != before)
    assert any(moved)


def test_training_images_with_a_copy_in_the_test_are_left_out():
    copies = np.arange(150)
    copies[0] = copies[120]  # the same class
    for seed in range(10):
        _, parts = draw_toy(seed, copies=copies)
        assert 0 not in np.concatenate([parts[name] for name in SPLITS[:3]])
        assert 120 in parts["test"]


# What data sets by name can do


def test_it_is_listed_with_a_line():
    assert "fetal_planes" in list_datasets()
    assert "fetal_planes          Fetal ultrasound: five known planes" in repr(list_datasets())


def test_an_export_has_four_splits_and_a_card(places, cache, tmp_path):
    out = tmp_path / "out"
    for config in ("brain", "planes"):
        settings = {
            "labels_per_class": 2,
            "machine": "Aloka",
            "data_dir": places["folder"],
            "cache_dir": cache,
        }
        export_dataset("fetal_planes", config, out, **settings)
    data = datasets.load_dataset(str(out), "planes", cache_dir=str(tmp_path / "plain"))
    assert list(data) == SPLITS[:4]
    assert data["test"].column_names == ["image", "label", "patient", "machine", "operator"]
    card = (out / "README.md").read_text()
    assert f"| planes | 2 | 0 | Aloka | 256 | 10 | {len(data['unlabeled'])} |" in card
    assert "tags:\n- medical\n" in card


def test_a_network_is_trained_and_tested_among_foreign_images(places, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))
    words = f"""
        --dataset fetal_planes --dataset_config brain --labels_per_class 2 --data_dir {places["zip"]}
        --model wide_resnet_fixastep --image_size 16 --loss fixmatch --max_steps 2
        --per_device_train_batch_size 2 --unlabeled_ratio 2 --output_dir {tmp_path / "run"} --report_to none
    """
    train([*words.split(), "--model_kwargs", '{"depth": 10, "width": 1}'])
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())["dataset"]
    assert (found["name"], found["config"], found["medical"]) == ("fetal_planes", "brain", True)
    evaluate([str(tmp_path / "run"), "--open_set", "true"])
    assert "auroc_unseen_foreign_energy" in (tmp_path / "run" / "evaluation_open_set.json").read_text()
    check_report(
        tmp_path / "run", load_dataset("fetal_planes", "brain", labels_per_class=2, data_dir=places["zip"])
    )
    check_prediction(tmp_path / "run", places["folder"] / "Images", tmp_path / "planes.csv")


def check_report(run: Path, data) -> None:
    """Per machine against scikit-learn, and AUROCs against those of --open_set."""
    evaluate([str(run), "--draws", "100"])
    found = json.loads((run / "report" / "report.json").read_text())
    (of_run,) = found["methods"].values()
    answers = pd.read_csv(run / "test_predictions.csv", dtype={"patient": str})
    assert answers["patient"].tolist() == list(data["test"]["patient"])
    assert read_run(run)["test_patients"] == pd.to_numeric(answers["patient"]).tolist()
    machines = np.array(data["test"]["machine"])
    for name, machine in (("all", None), ("aloka", "Aloka"), ("voluson_e6", "Voluson E6")):
        rows = answers[[machine in (None, own) for own in machines]]
        expected = balanced_accuracy_score(rows["label"], rows["prediction"])
        numbers = of_run["machines"][name]
        assert numbers["balanced_accuracy"]["value"] == pytest.approx(expected)
        assert np.sum(numbers["confusion"]) == len(rows) == numbers["images"][0]
    open_set = json.loads((run / "evaluation_open_set.json").read_text())
    for score in ("max_probability", "energy"):
        area = of_run["auroc"][score]["all"]["value"]
        assert area == pytest.approx(open_set[f"auroc_unseen_foreign_{score}"], abs=0.02)
    assert {"nearest_labeled", "nearest_class"} <= of_run["auroc"].keys()
    assert "same_site" in of_run["auroc"]["energy"]
    names = {path.name for path in (run / "report").glob("*.png")}
    confusions = {f"confusion_{name}.png" for name in ("all", "aloka", "voluson_e6")}
    assert names == {"forest.png", "machines.png", *confusions}
    assert {"temperature", "abstain_below"} <= json.loads((run / "config.json").read_text())[
        "calibration"
    ].keys()
    compare_methods(run)


def compare_methods(run: Path) -> None:
    """Runs of one method are averaged, and another method stands beside them."""
    for name, loss in (("again", "fixmatch"), ("other", "pi_model")):
        shutil.copytree(run, run.parent / name)
        facts = json.loads((run / "metrics.json").read_text()) | {"loss": loss}
        (run.parent / name / "metrics.json").write_text(json.dumps(facts))
    out, folders = run.parent / "compared", [str(run.parent / name) for name in ("run", "again", "other")]
    evaluate([*folders, "--draws", "100", "--out", str(out)])
    first, second = json.loads((out / "report.json").read_text())["methods"].values()
    assert (first["runs"], second["runs"]) == (folders[:2], folders[2:])
    one, two = (found["machines"]["all"]["balanced_accuracy"] for found in (first, second))
    assert one["runs"] == two["runs"] * 2
    assert (one["value"], one["low"], one["high"]) == pytest.approx((two["value"], two["low"], two["high"]))
    assert {"machines.png", "forest_0.png", "forest_1.png"} <= {path.name for path in out.iterdir()}


def check_prediction(run: Path, images: Path, out: Path) -> None:
    """Pictures by the reader of ultrasound: a class, whether it is sure, and how foreign it looks."""
    predict([str(run), str(images), "--out", str(out)])
    found = pd.read_csv(out)
    assert list(found.columns[:5]) == ["file", "class", "probability", "abstain", "foreign"]
    assert set(found["class"]) <= set(BRAIN)
    assert found["foreign"].between(0, 1).all()
    assert len(found) == len(list(images.iterdir()))


def test_a_fit_finds_its_splits(places, cache):
    settings = {"labels_per_class": 2, "data_dir": places["folder"], "cache_dir": cache}
    found = load_named("fetal_planes", "planes", settings)
    assert (list(found.splits), found.class_names) == (SPLITS[:4], PLANES)


# The real release


@pytest.mark.skipif(not REAL.is_dir(), reason="../shared/data/fetal_planes is not there")
def test_the_real_release(tmp_path):
    tables = {
        side: pq.read_table(REAL / "data" / f"{side}-00000-of-00001.parquet").to_pandas()
        for side in ("train", "test")
    }
    official = {side: set(rows["patient"].astype(str)) for side, rows in tables.items()}
    assert {side: len(rows) for side, rows in tables.items()} == {"train": 7129, "test": 5271}
    assert len(official["train"] | official["test"]) == 1792
    truth: dict[bytes, set] = defaultdict(set)  # copies have the same bytes
    planes: Counter = Counter()
    for rows in tables.values():
        planes.update(rows["label"])
        for image, plane, brain in zip(rows["image"], rows["label"], rows["brain_plane"], strict=True):
            truth[image["bytes"]].add((plane, brain))
    assert [planes[number] for number in range(6)] == [711, 3092, 1040, 1718, 1626, 4213]
    sizes = {
        "planes": {
            "labeled": 100,
            "unlabeled": 5464,
            "validation": 941,
            "test": 3647,
            "unseen_foreign": 1608,
        },
        "brain": {"labeled": 60, "unlabeled": 5513, "validation": 319, "test": 1391, "unseen_foreign": 3864},
    }
    for config, expected in sizes.items():
        data = load_dataset("fetal_planes", config, data_dir=REAL, cache_dir=tmp_path)
        assert {name: len(part) for name, part in data.items()} == expected
        patients = {name: set(part["patient"]) for name, part in data.items()}
        assert patients["test"] | patients["unseen_foreign"] <= official["test"]
        seen = patients["labeled"] | patients["unlabeled"]
        assert seen | patients["validation"] <= official["train"]
        assert not seen & patients["validation"]
        for pair in ("778 790", "779 791", "781 793", "786 799", "820 830"):  # one examination, two numbers
            assert len({patient in seen for patient in pair.split()}) == 1
        contents = {
            name: [
                image["bytes"] for image in part.cast_column("image", datasets.Image(decode=False))["image"]
            ]
            for name, part in data.items()
        }
        assert not set(contents["labeled"]) & set(contents["unlabeled"])
        known = {"planes": lambda kind: kind[0] < 5, "brain": lambda kind: kind[1] >= 2}[config]
        for name in ("labeled", "validation", "test", "unseen_foreign"):
            kinds = {known(kind) for image in contents[name] for kind in truth[image]}
            assert kinds == {name != "unseen_foreign"}
        foreign = np.mean([not known(min(truth[image])) for image in contents["unlabeled"]])
        of_all = 1 - {"planes": 4528, "brain": 873 + 375 + 295}[config] / 7129  # known planes of all patients
        assert foreign == pytest.approx(of_all, abs=0.01)


def test_the_card_is_what_an_export_of_both_configs_writes(tmp_path):
    builder = FetalPlanes(dataset_name="fetal_planes", cache_dir=str(tmp_path))
    row = {"labels_per_class": 20, "seed": 0, "machine": None, "longest_side": 256}
    sizes = {"planes": (100, 5464, 941, 3647), "brain": (60, 5513, 319, 1391)}  # as in the test above
    rows = {config: row | dict(zip(SPLITS[:4], numbers, strict=True)) for config, numbers in sizes.items()}
    assert (ROOT / "hub_cards" / "fetal_planes.md").read_text() == dataset_card(builder, rows)
