import itertools
import shutil
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pytest
from datasets.data_files import EmptyDatasetError

from hf_fixastep.data import cifar_files, export_dataset, list_datasets, load_dataset
from hf_fixastep.data.cifar import Cifar10SixAnimal, Cifar100FiftyClass
from hf_fixastep.data.digits import DigitsOpenSet
from hf_fixastep.data.fetal_planes import FetalPlanes
from hf_fixastep.data.registry import DATASETS, dataset_card


SPLITS = ["labeled", "unlabeled", "validation", "test"]
CONFIGS = ["zeta0", "zeta25", "zeta50", "zeta75", "zeta100"]
CARDS = Path(__file__).parents[2] / "hub_cards"
SHAREABLE = ["cifar100_fifty_class", "cifar10_six_animal", "digits_open_set", "fetal_planes"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def export(cache, tmp_path):
    def export_here(config: str | None = "zeta50", **settings) -> Path:
        return export_dataset("digits_open_set", config, tmp_path / "out", cache_dir=cache, **settings)

    return export_here


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


def read(out: Path, config: str | None = None) -> datasets.DatasetDict:
    return datasets.load_dataset(str(out), config, cache_dir=str(out.parent / "plain"))


def files(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


class TestExport:
    def test_plain_datasets_reads_the_same_rows(self, export, cache):
        exported = read(export(seed=3), "zeta50")
        built = load_dataset("digits_open_set", "zeta50", seed=3, cache_dir=cache)
        assert list(exported) == SPLITS
        for name in SPLITS:
            assert np.array_equal(exported[name]["image"], built[name]["image"])
        assert exported["labeled"].features == built["labeled"].features
        assert exported["labeled"]["label"][:] == built["labeled"]["label"][:]
        assert set(exported["unlabeled"]["label"]) == {None}

    def test_configs_share_a_folder(self, export, out):
        for config, seed in (("zeta100", 1), ("zeta0", 0), ("zeta50", 0)):
            export(config, seed=seed)
        assert files(out) == sorted(
            ["README.md", *(f"{c}/{s}.parquet" for c in ("zeta0", "zeta50", "zeta100") for s in SPLITS)]
        )
        assert datasets.get_dataset_config_names(str(out)) == ["zeta0", "zeta50", "zeta100"]
        assert datasets.get_dataset_default_config_name(str(out)) == "zeta50"
        sizes = {config: len(read(out, config)["unlabeled"]) for config in ("zeta0", "zeta50", "zeta100")}
        assert sizes == {"zeta0": 383, "zeta50": 383, "zeta100": 374}

    def test_the_card_tells_the_settings(self, export, out):
        export("zeta100", seed=1)
        export("zeta0", labels_per_class=2)
        header = huggingface_hub.metadata_load(out / "README.md")
        sizes = dict(zip(SPLITS, (12, 395, 120, 360), strict=True))
        assert header["hf_fixastep"]["configs"]["zeta0"] == {"labels_per_class": 2, "seed": 0} | sizes
        assert "| zeta100 | 5 | 1 | 30 | 374 | 120 | 360 |" in (out / "README.md").read_text()


class TestInterruption:
    def spoil(self, monkeypatch) -> None:
        write = datasets.Dataset.to_parquet

        def fail_at_the_third(part, path, *args, **kwargs):
            if part.split == "validation":
                Path(path).write_bytes(b"PAR1")
                raise OSError("No space left on device")
            return write(part, path, *args, **kwargs)

        monkeypatch.setattr(datasets.Dataset, "to_parquet", fail_at_the_third)

    def test_a_failed_export_leaves_nothing_and_earlier_ones_alone(self, export, out, monkeypatch):
        export("zeta0")
        before = {name: (out / name).read_bytes() for name in files(out)}
        self.spoil(monkeypatch)
        with pytest.raises(OSError, match="No space left"):
            export("zeta50")
        assert {name: (out / name).read_bytes() for name in files(out)} == before
        assert [path.name for path in out.iterdir() if path.is_dir()] == ["zeta0"]
        monkeypatch.undo()
        export("zeta50")
        assert datasets.get_dataset_config_names(str(out)) == ["zeta0", "zeta50"]

    def test_what_a_killed_export_leaves_is_not_read(self, export, out, monkeypatch):
        def die(path, target):
            shutil.copytree(path.parent, out / ".partial-left")
            raise KeyboardInterrupt

        monkeypatch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            export()
        assert len(files(out)) == 5
        for config in ("zeta50", None):
            with pytest.raises(EmptyDatasetError):
                read(out, config)
        monkeypatch.undo()
        assert len(read(export(), "zeta50")["labeled"]) == 30

    def test_a_config_is_read_only_when_the_card_names_it(self, export, out, monkeypatch):
        move = Path.replace

        def die(path, target):
            if path.name == "README.md":
                raise KeyboardInterrupt
            move(path, target)

        export("zeta0")
        monkeypatch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            export("zeta50")
        assert datasets.get_dataset_config_names(str(out)) == ["zeta0"]


class TestRefusals:
    def test_a_set_that_may_not_be_passed_on(self, export, out, monkeypatch):
        monkeypatch.setattr(DigitsOpenSet, "shareable", False)
        monkeypatch.setattr(DigitsOpenSet, "terms", "its owner gives it to approved persons alone.")
        with pytest.raises(
            ValueError, match=r"^digits_open_set may not be exported: its owner gives it to approved"
        ):
            export()
        assert not out.exists()

    def test_a_set_that_does_not_say(self, export, monkeypatch):
        monkeypatch.delattr(DigitsOpenSet, "shareable")
        monkeypatch.delattr(DigitsOpenSet, "terms")
        with pytest.raises(ValueError, match="exported: its builder does not state that it may be passed on"):
            export()

    def test_a_config_that_is_there(self, export, out):
        export()
        with pytest.raises(FileExistsError) as error:
            export(seed=1)
        assert (
            str(error.value) == f"{out / 'zeta50'} is already there: delete it, or export to another folder."
        )

    @pytest.mark.parametrize(
        "text", ["# My notes\n", "---\nlicense: mit\n---\n", "---\nhf_fixastep: {dataset: other}\n---\n"]
    )
    def test_a_folder_of_something_else(self, export, out, text):
        out.mkdir()
        (out / "README.md").write_text(text)
        with pytest.raises(FileExistsError) as error:
            export()
        assert str(error.value) == (
            f"{out / 'README.md'} belongs to something else than an export of digits_open_set: choose "
            "another folder."
        )
        assert files(out) == ["README.md"]

    def test_unknown_names(self, export, out):
        with pytest.raises(ValueError, match=r"Unknown dataset 'digits'\. Did you mean digits_open_set\?"):
            export_dataset("digits", "zeta50", out)
        with pytest.raises(ValueError, match="Unknown config of digits_open_set 'zeta5'"):
            export("zeta5")
        with pytest.raises(
            ValueError, match=r"Unknown setting of digits_open_set 'sed'\. Did you mean seed\?"
        ):
            export(sed=1)
        assert not out.exists()


class TestCards:
    def test_there_is_one_for_each_set_that_may_be_shared(self):
        assert [name for name in list_datasets() if DATASETS[name].shareable] == SHAREABLE
        assert all((CARDS / f"{name}.md").is_file() for name in SHAREABLE)

    def test_that_of_the_digits_is_what_an_export_of_all_configs_writes(self, cache, out):
        for config in [None, *CONFIGS[::-1]]:  # in any order; None is zeta50
            if config != "zeta50":
                export_dataset("digits_open_set", config, out, cache_dir=cache)
        assert (CARDS / "digits_open_set.md").read_text() == (out / "README.md").read_text()

    @pytest.mark.parametrize(
        ("builder_class", "name", "count", "sizes"),
        [
            (Cifar10SixAnimal, "cifar10_six_animal", 400, (2400, 16_400, 3000, 6000)),
            (Cifar100FiftyClass, "cifar100_fifty_class", 100, (5000, 17_500, 2500, 5000)),
        ],
    )
    def test_those_of_cifar_are_what_an_export_of_all_configs_writes(
        self, tmp_path, builder_class, name, count, sizes
    ):
        builder = builder_class(dataset_name=name, cache_dir=str(tmp_path))
        row = {"labels_per_class": count, "seed": 0, "oracle": False} | dict(zip(SPLITS, sizes, strict=True))
        card = dataset_card(builder, {config: dict(row) for config in builder_class.unlabeled_classes})
        assert (CARDS / f"{name}.md").read_text() == card

    @pytest.mark.parametrize("name", SHAREABLE)
    def test_headers_are_valid(self, name):
        card = huggingface_hub.DatasetCard.load(CARDS / f"{name}.md")
        licensed = name in ("digits_open_set", "fetal_planes")
        assert card.data.license == ("cc-by-4.0" if licensed else "unknown")
        assert [config["config_name"] for config in card.data.configs] == [
            config.name for config in DATASETS[name].BUILDER_CONFIGS
        ]
        assert "@" in card.content
        assert "## Licence" in card.content

    @pytest.mark.parametrize("name", SHAREABLE)
    def test_tables_of_classes_are_those_of_the_builder(self, name):
        lines = (CARDS / f"{name}.md").read_text().splitlines()
        told = dict(line.strip("| ").split(" | ") for line in lines if line.count("|") == 3)
        if name == "digits_open_set":
            expected = {c: ", ".join(map(str, d)) for c, d in DigitsOpenSet.unlabeled_classes.items()}
        elif name == "cifar10_six_animal":
            names = cifar_files.CIFAR10.class_names
            expected = {
                c: ", ".join(names[y] for y in ids) for c, ids in Cifar10SixAnimal.unlabeled_classes.items()
            }
        elif name == "fetal_planes":
            expected = {config: ", ".join(planes) for config, planes in FetalPlanes.classes.items()}
        else:
            names = cifar_files.CIFAR100.class_names
            expected = {
                c: f"{ids[0]} ({names[ids[0]]}) to {ids[-1]} ({names[ids[-1]]})"
                for c, ids in Cifar100FiftyClass.unlabeled_classes.items()
            }
        assert dict(itertools.islice(told.items(), 2, None)) == expected  # after the two lines of the head
