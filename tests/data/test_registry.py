import inspect
from pathlib import Path

import pytest
from datasets.utils import are_progress_bars_disabled

from hf_fixastep.data import DATASETS, list_datasets, load_dataset, registry
from hf_fixastep.data.digits import DigitsOpenSet


@pytest.fixture
def load(tmp_path):
    def load_here(*args, **kwargs):
        return load_dataset("digits_open_set", *args, cache_dir=tmp_path, **kwargs)

    return load_here


def folder(data) -> Path:
    return Path(data["test"].cache_files[0]["filename"]).parent


def test_every_name_is_listed():
    assert list_datasets() == sorted(DATASETS)
    assert "digits_open_set" in list_datasets()


def test_four_splits_are_loaded(load):
    assert list(load()) == ["labeled", "unlabeled", "validation", "test"]


def test_the_default_config_is_the_builders(load):
    assert folder(load()) == folder(load("zeta50"))
    assert folder(load()) != folder(load("zeta75"))


def test_the_second_load_uses_the_cache(load, monkeypatch):
    first = load(seed=3)
    monkeypatch.setattr(DigitsOpenSet, "_generate_examples", None)
    second = load(seed=3)
    assert first["unlabeled"]._fingerprint == second["unlabeled"]._fingerprint
    with pytest.raises(TypeError, match="not callable"):
        load(seed=4)


def test_each_setting_has_its_own_folder(load):
    variants = [load(), load(seed=1), load(labels_per_class=7), load(labels_per_class=7, seed=1)]
    assert len({folder(data) for data in variants}) == 4
    assert [len(data["labeled"]) for data in variants] == [30, 30, 42, 42]


def test_an_edited_builder_is_built_anew(load, monkeypatch, tmp_path):
    before = folder(load())
    edited = tmp_path / "digits.py"
    edited.write_text(Path(inspect.getfile(DigitsOpenSet)).read_text() + "# edited\n")
    monkeypatch.setattr(registry.inspect, "getfile", lambda builder_class: str(edited))
    after = folder(load())
    assert before != after
    assert before.parent == after.parent


@pytest.mark.parametrize("split", ["unlabeled", "unlabeled[:10]"])
def test_one_split_can_be_loaded_alone(load, split):
    assert load(split=split).column_names == ["image"]
    assert load(split="test").column_names == ["image", "label"]


def test_streaming_gives_the_same_rows(load):
    streamed, built = load(streaming=True), load()
    assert list(streamed) == list(built)
    for name in built:
        rows = list(streamed[name])
        assert rows[0].keys() == set(built[name].column_names)
        assert [row["image"].tobytes() for row in rows] == [image.tobytes() for image in built[name]["image"]]
    assert next(iter(load(split="unlabeled", streaming=True))).keys() == {"image"}


def test_a_small_set_is_built_in_silence(load, capfd):
    load(seed=11)
    assert capfd.readouterr() == ("", "")
    assert not are_progress_bars_disabled()


@pytest.mark.parametrize(
    ("args", "settings", "sentence"),
    [
        (
            ("digits_openset",),
            {},
            f"Unknown dataset 'digits_openset'. Did you mean digits_open_set? Choose one of {', '.join(DATASETS)}.",
        ),
        (
            ("digits_open_set", "zeta_100"),
            {},
            "Unknown config of digits_open_set 'zeta_100'. Did you mean zeta100? "
            "Choose one of zeta0, zeta25, zeta50, zeta75, zeta100.",
        ),
        (
            ("digits_open_set",),
            {"lables_per_class": 4},
            "Unknown setting of digits_open_set 'lables_per_class'. Did you mean labels_per_class? "
            "Choose one of labels_per_class, seed, foreign, split, streaming, data_dir, cache_dir.",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(args, settings, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011, the whole sentence is compared
        load_dataset(*args, **settings)
    assert str(error.value) == sentence
