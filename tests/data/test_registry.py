import inspect
from pathlib import Path

import pytest
from datasets.utils import are_progress_bars_disabled

from hf_fixastep.data import DATASETS, list_datasets, load_dataset, registry
from hf_fixastep.data.base import ImageSet
from hf_fixastep.data.digits import DigitsOpenSet
from hf_fixastep.data.open_set import OpenSet
from hf_fixastep.data.registry import is_medical


@pytest.fixture
def load(tmp_path):
    def load_here(*args, **kwargs):
        return load_dataset("digits_open_set", *args, cache_dir=tmp_path, **kwargs)

    return load_here


def folder(data) -> Path:
    return Path(data["test"].cache_files[0]["filename"]).parent


def test_names_are_listed_with_a_line_on_each():
    assert list_datasets() == sorted(DATASETS)
    lines = dict(line.split(maxsplit=1) for line in repr(list_datasets()).splitlines())
    assert sorted(lines) == sorted(DATASETS)
    assert lines["cifar10_six_animal"] == (
        "CIFAR-10: six labeled animals; unlabeled images of four classes, of which zeta percent are vehicles."
    )


@pytest.mark.parametrize("name", DATASETS)
def test_every_builder_declares_its_traits(name):
    builder = DATASETS[name]
    assert issubclass(builder, ImageSet)
    assert "terms" in {
        trait for kind in builder.__mro__[: builder.__mro__.index(ImageSet)] for trait in vars(kind)
    }
    assert is_medical(name) == (name in ("camus", "fetal_planes", "tmed2", "unity"))
    assert (builder.medical and builder.shareable) == (name == "fetal_planes")  # CC BY 4.0


def test_a_name_that_is_not_there_is_no_key():
    assert "mnist" not in DATASETS
    assert len(DATASETS) == len(list(DATASETS))
    with pytest.raises(KeyError):
        DATASETS["mnist"]


def test_the_default_config_is_the_builders(load):
    assert folder(load()) == folder(load("zeta50"))
    assert folder(load()) != folder(load("zeta75"))


def test_the_second_load_uses_the_cache(load, monkeypatch):
    first = load(seed=3)
    monkeypatch.setattr(DigitsOpenSet, "_generate_examples", None)
    second = load(seed=3)
    assert first["unlabeled"].cache_files == second["unlabeled"].cache_files
    with pytest.raises(TypeError, match="not callable"):
        load(seed=4)


def test_each_setting_has_its_own_folder(load):
    variants = [load(), load(seed=1), load(labels_per_class=7), load(labels_per_class=7, seed=1)]
    assert len({folder(data) for data in variants}) == 4
    assert [len(data["labeled"]) for data in variants] == [30, 30, 42, 42]


def test_an_edited_builder_is_built_anew(load, monkeypatch, tmp_path):
    before = folder(load())
    edited, real = tmp_path / "edited.py", inspect.getfile
    edited.write_text("# edited\n")
    monkeypatch.setattr(
        registry.inspect, "getfile", lambda kind: str(edited) if kind is OpenSet else real(kind)
    )
    after = folder(load())
    assert before != after
    assert before.parent == after.parent


def test_streaming_and_one_split_alone_give_the_same_rows(load):
    streamed, built = load(streaming=True), load()
    assert list(streamed) == list(built) == ["labeled", "unlabeled", "validation", "test"]
    for name in built:
        rows = list(streamed[name])
        assert rows[0].keys() == set(built[name].column_names)
        assert [row["image"].tobytes() for row in rows] == [image.tobytes() for image in built[name]["image"]]
    assert next(iter(load(split="unlabeled", streaming=True))).keys() == {"image"}
    assert load(split="unlabeled[:10]").column_names == ["image"]


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
            "Unknown dataset 'digits_openset'. Did you mean digits_open_set? Choose one of "
            f"{', '.join(DATASETS)}.",
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
