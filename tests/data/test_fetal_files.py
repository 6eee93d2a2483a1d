"""The files of FETAL_PLANES_DB: its three forms, copies among its images, and bad input."""

import itertools
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pytest

from hf_fixastep.data import load_dataset
from hf_fixastep.data.fetal_files import difference_hash, find_persons, group_hashes
from tests.data.fetal_release import HEADER, ROWS, table, write_folder, write_parquet, write_table


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


def test_an_edited_file_is_built_anew(tmp_path, cache):
    folder = write_folder(tmp_path / "release")

    def build():
        return load_dataset("fetal_planes", labels_per_class=2, data_dir=folder, cache_dir=cache)

    first = build()
    assert build()["test"].cache_files == first["test"].cache_files
    write_table(folder, table([row for row in ROWS if row["patient"] != "40"]))
    assert "40" not in build()["test"]["patient"][:]


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


# Copies


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
