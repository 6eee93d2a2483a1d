"""FETAL_PLANES_DB, from a small release with its quirks, and from the real one where it is at hand."""

import io
import itertools
import json
import zipfile
from collections import Counter, defaultdict
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pyarrow.parquet as pq
import pytest

from hf_fixastep.cli.evaluate import main as evaluate
from hf_fixastep.data import export_dataset, folder_report, list_datasets, load_dataset
from hf_fixastep.data.fetal_files import difference_hash, find_persons, group_hashes
from hf_fixastep.data.fetal_planes import FetalPlanes, draw
from hf_fixastep.data.registry import dataset_card
from hf_fixastep.features.fit_data import load_named
from hf_fixastep.runs.training import main as train


ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared/data/fetal_planes"
PLANES = ["Fetal abdomen", "Fetal brain", "Fetal femur", "Fetal thorax", "Maternal cervix"]
BRAIN = ["Trans-thalamic", "Trans-cerebellum", "Trans-ventricular"]
SPLITS = ["labeled", "unlabeled", "validation", "test", "unseen_foreign"]
HEADER = "Image_name;Patient_num;Plane;Brain_plane;Operator;US_Machine;Train "  # with a space, as released
TRAIN, TEST = range(1, 31), range(31, 41)  # patients
TWINS = {"2", "3"}  # one examination under two numbers


def png(pixels: np.ndarray, compress_level: int = 6) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG", compress_level=compress_level)
    return file.getvalue()


def make_rows() -> list[dict]:
    """A row per image; no two files have the same bytes, which tell the rows of a built set."""
    random = np.random.default_rng(0)
    rows = []

    def add(patient: int, plane: str, brain: str, pixels: np.ndarray, compress_level: int = 6) -> None:
        number = sum(row["patient"] == str(patient) for row in rows) + 1
        rows.append(
            {
                "name": f"Patient{patient:05}_Plane_{number}",
                "patient": str(patient),
                "plane": plane,
                "brain": brain,
                "operator": f"Op. {patient % 3}",
                "machine": "Aloka" if patient % 2 else "Voluson E6",
                "train": patient in TRAIN,
                "bytes": png(pixels, compress_level),
            }
        )

    def noise() -> np.ndarray:
        return random.integers(0, 256, (40, 50), dtype=np.uint8)

    for patient in (*TRAIN, *TEST):
        for plane in (*PLANES, "Other"):
            brains = [*BRAIN, "Other"] if plane == "Fetal brain" else ["Not A Brain"]
            for brain in brains:
                add(patient, plane, brain, noise())
    add(2, "Fetal femur", "Not A Brain", shared := noise())
    near = shared.copy()
    near[3, 3] ^= 1
    add(3, "Fetal femur", "Not A Brain", near)
    for patient in (4, 5, *TEST[:2]):  # copies with two planes
        add(patient, "Fetal thorax", "Not A Brain", twice := noise())
        add(patient, "Other", "Not A Brain", twice, 1)
    for patient in TRAIN:  # copies with one
        add(patient, "Maternal cervix", "Not A Brain", twice := noise())
        add(patient, "Maternal cervix", "Not A Brain", twice, 1)
    return rows


ROWS = make_rows()
BY_BYTES = {row["bytes"]: row for row in ROWS}
# The names of images of which there is a copy with another plane.
UNCLEAR = {
    row["name"]
    for row in ROWS
    if (row["patient"] in ("4", "5", "31", "32"))
    and int(row["name"].rpartition("_")[2]) in (10, 11)  # after nine others
}


def write_table(folder: Path, lines: list[str], encoding: str = "utf-8") -> None:
    (folder / "FETAL_PLANES_DB_data.csv").write_text("\n".join(lines) + "\n", encoding=encoding)


def table(rows: list[dict] = ROWS) -> list[str]:
    columns = ("name", "patient", "plane", "brain", "operator", "machine")
    return [HEADER, *(";".join(row[c] for c in columns) + f";{int(row['train'])}" for row in rows)]


def write_folder(folder: Path) -> Path:
    (folder / "Images").mkdir(parents=True)
    for row in ROWS:
        (folder / "Images" / f"{row['name']}.png").write_bytes(row["bytes"])
    write_table(folder, table())
    return folder


def write_parquet(folder: Path, rows: list[dict] = ROWS, **changes) -> Path:
    names = {
        "label": sorted({row["plane"] for row in ROWS}),
        "brain_plane": sorted({r["brain"] for r in ROWS}),
    }
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=names["label"]),
        "brain_plane": datasets.ClassLabel(names=names["brain_plane"]),
        "patient": datasets.Value("int64"),
        "operator": datasets.Value("string"),
        "machine": datasets.Value("string"),
    }
    (folder / "data").mkdir(parents=True)
    for side in ("train", "test"):
        part = [row for row in rows if row["train"] == (side == "train")]
        columns = {
            "image": [{"bytes": row["bytes"], "path": f"{row['name']}.jpg"} for row in part],
            "label": [row["plane"] for row in part],
            "brain_plane": [row["brain"] for row in part],
            "patient": [int(row["patient"]) for row in part],
            "operator": [row["operator"] for row in part],
            "machine": [row["machine"] for row in part],
        }
        half = len(part) // 2
        for shard, rows_of in enumerate((slice(half), slice(half, None))):
            data = datasets.Dataset.from_dict(
                {name: values[rows_of] for name, values in columns.items()},
                features=datasets.Features(features),
            )
            for column, change in changes.items():
                data = change(data, column)
            data.to_parquet(folder / "data" / f"{side}-{shard:05}-of-00002.parquet")
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Path]:
    """The release in its three forms."""
    folder = write_folder(tmp_path_factory.mktemp("release") / "FETAL_PLANES_ZENODO")
    archive = folder.parent / "zipped" / "FETAL_PLANES_ZENODO.zip"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                zipped.write(path, path.relative_to(folder))
    return {"folder": folder, "zip": archive, "parquet": write_parquet(folder.parent / "parquet")}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def load(places, cache):
    def load_here(config: str = "planes", source: str = "folder", labels_per_class: int = 3, **settings):
        return load_dataset(
            "fetal_planes",
            config,
            labels_per_class=labels_per_class,
            data_dir=places[source],
            cache_dir=cache,
            **settings,
        )

    return load_here


def rows_of(split: datasets.Dataset) -> list[dict]:
    """The rows of the release that a split has, known by the bytes of the files."""
    encoded = split.cast_column("image", datasets.Image(decode=False))["image"]
    return [BY_BYTES[image["bytes"]] for image in encoded]


def names_of(split: datasets.Dataset) -> list[str]:
    return [row["name"] for row in rows_of(split)]


def contents(data) -> dict[str, list]:
    return {
        name: [
            tuple(str(row[column]) for column in sorted(row))
            for row in part.cast_column("image", datasets.Image(decode=False))
        ]
        for name, part in data.items()
    }


@pytest.mark.parametrize("source", ["zip", "parquet"])
def test_every_form_of_the_release_gives_the_same_splits(load, source):
    assert contents(load(source=source)) == contents(load())


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


def test_an_edited_file_is_built_anew(tmp_path, cache):
    folder = write_folder(tmp_path / "release")

    def build():
        return load_dataset("fetal_planes", labels_per_class=2, data_dir=folder, cache_dir=cache)

    first = build()
    assert build()["test"].cache_files == first["test"].cache_files
    write_table(folder, table([row for row in ROWS if row["patient"] != "40"]))
    assert "40" not in build()["test"]["patient"][:]


def test_streaming_gives_the_same_rows(load):
    built, streamed = load(), load(streaming=True)
    rows = list(streamed["labeled"])
    assert [row["image"].tobytes() for row in rows] == [
        image.tobytes() for image in built["labeled"]["image"]
    ]
    assert next(iter(streamed["unlabeled"])).keys() == {"image", "patient", "machine", "operator"}


def test_images_become_grey_and_not_larger_than_asked_for(tmp_path, cache):
    folder = write_folder(tmp_path / "release")
    large = np.random.default_rng(1).integers(0, 256, (300, 600), dtype=np.uint8)
    coloured = PIL.Image.fromarray(large).convert("RGBA")
    row = next(row for row in ROWS if row["patient"] == "33" and row["plane"] == "Fetal femur")
    coloured.save(folder / "Images" / f"{row['name']}.png")

    def find(**settings) -> PIL.Image.Image:
        data = load_dataset("fetal_planes", labels_per_class=2, data_dir=folder, cache_dir=cache, **settings)
        places = [
            at
            for at, name in enumerate(data["test"]["patient"])
            if name == "33" and data["test"]["label"][at] == 2
        ]
        return data["test"][places[0]]["image"]

    assert (find().mode, find().size) == ("L", (256, 128))
    assert find(longest_side=100).size == (100, 50)
    kept = find(longest_side=0)
    assert np.array_equal(np.asarray(kept), large)


# Copies and the draw, on numbers


def test_a_difference_hash_tells_where_it_gets_brighter():
    pixels = np.zeros((16, 17), np.uint8)
    pixels[2, 5] = 9
    assert np.flatnonzero(difference_hash(pixels)).tolist() == [2 * 16 + 4]
    assert np.array_equal(
        difference_hash(np.kron(pixels, np.ones((20, 30), np.uint8))), difference_hash(pixels)
    )


def test_hashes_are_grouped_as_by_comparing_all_of_them():
    random = np.random.default_rng(2)
    hashes = random.random((60, 256)) < 0.5
    for row in range(1, 60, 2):  # a relative of the one before, 0 to 9 bits away
        hashes[row] = hashes[row - 1]
        flipped = random.permutation(256)[: row % 10]
        hashes[row, flipped] ^= True
    hashes[59] = hashes[57]
    found = group_hashes(hashes)
    near = (hashes[:, None] != hashes[None]).sum(2) <= 4
    groups = [{row} for row in range(60)]
    for one, other in itertools.combinations(range(60), 2):
        if near[one, other] and groups[one] is not groups[other]:
            joined = groups[one] | groups[other]
            for row in joined:
                groups[row] = joined
    assert [set(np.flatnonzero(found == found[row])) for row in range(60)] == groups


def test_patients_with_a_copy_in_common_are_one_person():
    persons = find_persons(np.array(["a", "a", "b", "c", "c", "d"]), np.array([0, 1, 2, 1, 3, 4]))
    assert persons[0] == persons[1] == persons[3] == persons[4]
    assert len(set(persons)) == 3


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


# Bad input


def change_row(number: int, **values) -> list[str]:
    rows = [dict(row) for row in ROWS]
    rows[number] |= values
    return table(rows)


@pytest.mark.parametrize(
    ("lines", "encoding", "sentence"),
    [
        (
            [line.replace(";", ",") for line in table()],
            "utf-8",
            "has ',' between the columns, but expected ';'",
        ),
        (
            [line.replace(";", "\t") for line in table()],
            "utf-8",
            r"has '\t' between the columns, but expected ';'",
        ),
        (table(), "utf-16", "cannot be read as UTF-8 text"),
        (table(), "utf-16-le", "is not UTF-8 text, as it has bytes of 0"),
        (change_row(0, operator="Jordi Fernández"), "latin-1", "cannot be read as UTF-8 text"),
        (
            [HEADER.replace("US_Machine", "Machine"), *table()[1:]],
            "utf-8",
            "but expected one called US_Machine",
        ),
        ([HEADER], "utf-8", "has no rows"),
        (change_row(4, patient=""), "utf-8", "Row 5 of"),
        (change_row(0, plane="Foetal abdomen"), "utf-8", "Unknown plane in"),
        (change_row(0, plane="Foetal abdomen"), "utf-8", "'Foetal abdomen'. Did you mean Fetal abdomen?"),
        (change_row(0, brain="Trans-lunar"), "utf-8", "Unknown brain plane in"),
        ([*table()[:-1], table()[-1][:-1] + "2"], "utf-8", f"Row {len(ROWS)} of"),
        (
            change_row(0, patient="40"),
            "utf-8",
            "patients among both the training and the test images, such as patient 40, but expected none",
        ),
        ([*table(), table()[1]], "utf-8", "2 times: keep one row for each file"),
        (
            change_row(0, name="Patient00001_Plane_77"),
            "utf-8",
            "names 1 images that are not in Images/, such as Images/Patient00001_Plane_77.png",
        ),
    ],
)
def test_a_wrong_table_is_refused_in_one_sentence(tmp_path, places, lines, encoding, sentence):
    (tmp_path / "Images").symlink_to(places["folder"] / "Images")
    write_table(tmp_path, lines, encoding)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_dataset("fetal_planes", data_dir=tmp_path, cache_dir=tmp_path / "cache")
    assert sentence in str(error.value)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


def drop(data: datasets.Dataset, column: str) -> datasets.Dataset:
    return data.remove_columns(column)


def misname(data: datasets.Dataset, column: str) -> datasets.Dataset:
    names = ["Foetal brain", *data.features[column].names[1:]]
    return data.cast_column(column, datasets.ClassLabel(names=names))


def both_sides(data: datasets.Dataset, column: str) -> datasets.Dataset:
    return data.map(lambda row: {column: 7 if row[column] in (7, 33) else row[column]})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"machine": drop}, "but expected encoded images in image, and label, brain_plane, patient"),
        ({"image": drop}, "but expected encoded images in image, and label, brain_plane, patient"),
        ({"label": misname}, "'Foetal brain'. Did you mean Fetal brain?"),
        ({"patient": both_sides}, "such as patient 7, but expected none"),
    ],
)
def test_wrong_parquet_files_are_refused_in_one_sentence(tmp_path, changes, sentence):
    folder = write_parquet(tmp_path / "parquet", ROWS, **changes)
    with pytest.raises(ValueError, match="parquet") as error:
        load_dataset("fetal_planes", data_dir=folder, cache_dir=tmp_path / "cache")
    assert sentence in str(error.value)


def wrong_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """A data_dir of each kind that is refused, and what is said."""
    half = write_parquet(folder / "half")
    for path in (half / "data").glob("test-*"):
        path.unlink()
    broken = write_parquet(folder / "broken")
    path = broken / "data" / "train-00000-of-00002.parquet"
    path.write_bytes(path.read_bytes()[:1000])
    (folder / "empty").mkdir()
    (folder / "photo.png").write_bytes(ROWS[0]["bytes"])
    (folder / "set.zip").write_bytes(b"no zip file")
    image = write_folder(folder / "image") / "Images" / f"{ROWS[5]['name']}.png"
    image.write_bytes(b"words")
    return {
        "half": (half, "has no parquet file of the test images"),
        "broken": (broken, "is no complete parquet file"),
        "empty": (folder / "empty", "holds neither FETAL_PLANES_DB_data.csv nor parquet files"),
        "photo": (folder / "photo.png", "holds neither FETAL_PLANES_DB_data.csv nor parquet files"),
        "zip": (folder / "set.zip", "cannot be read as a zip file"),
        "nowhere": (folder / "nowhere", "There is no folder"),
        "image": (folder / "image", f"The image {ROWS[5]['name']} cannot be read: it is no image of a known"),
    }


@pytest.mark.parametrize("kind", ["half", "broken", "empty", "photo", "zip", "nowhere", "image"])
def test_wrong_files_are_refused_in_one_sentence(tmp_path, kind):
    place, sentence = wrong_files(tmp_path)[kind]
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_dataset("fetal_planes", data_dir=place, cache_dir=tmp_path / "cache")
    assert sentence in str(error.value)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"labels_per_class": 25},
            r"^labels_per_class is 25, but the training patients have 2\d different images of "
            r"Fetal \w+ outside validation: choose at most 2\d\.$",
        ),
        (
            {"labels_per_class": 0},
            r"^labels_per_class is 0, but expected a whole number from 1 to 4294967295\.$",
        ),
        ({"labels_per_class": 2.5}, r"^labels_per_class is 2\.5, but expected a whole number"),
        ({"seed": -1}, r"^seed is -1, but expected a whole number from 0"),
        ({"longest_side": -5}, r"^longest_side is -5, but expected a whole number from 0"),
        ({"machine": "aloka"}, r"^Unknown machine 'aloka'\..* Choose one of Aloka, Voluson E6\.$"),
        (
            {"machine": "Aloka", "labels_per_class": 20},
            r"the training patients of this machine have \d+ different",
        ),
    ],
)
def test_wrong_settings_are_refused_in_one_sentence(load, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        load(**settings)


def test_without_files_it_is_told_where_to_get_them(cache):
    with pytest.raises(
        ValueError, match=r"^fetal_planes needs data_dir=.*download FETAL_PLANES_ZENODO\.zip from"
    ):
        load_dataset("fetal_planes", cache_dir=cache)


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
