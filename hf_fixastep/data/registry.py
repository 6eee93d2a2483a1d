"""Data sets by name, built once and cached by the `datasets` library."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
from datasets.exceptions import DatasetGenerationError

from hf_fixastep.checks import check_choice
from hf_fixastep.data.base import WITHOUT_LABELS, ImageSet
from hf_fixastep.hub.texts import template_path


class Registry(Mapping[str, type[ImageSet]]):
    """Builders by name, each imported when it is first asked for."""

    def __init__(self, homes: dict[str, str]) -> None:
        self.homes = homes

    def __getitem__(self, name: str) -> type[ImageSet]:
        module, _, kind = self.homes[name].partition(":")
        return getattr(importlib.import_module(f"hf_fixastep.{module}"), kind)

    def __contains__(self, name: object) -> bool:
        return name in self.homes

    def __iter__(self) -> Iterator[str]:
        return iter(self.homes)

    def __len__(self) -> int:
        return len(self.homes)


DATASETS = Registry(
    {
        "camus": "echo.heart2heart:Camus",
        "cifar100_fifty_class": "data.cifar:Cifar100FiftyClass",
        "cifar10_six_animal": "data.cifar:Cifar10SixAnimal",
        "digits_open_set": "data.digits:DigitsOpenSet",
        "fetal_planes": "data.fetal_planes:FetalPlanes",
        "folders": "data.folders:Folders",
        "tmed2": "echo.heart2heart:Tmed2",
        "unity": "echo.heart2heart:Unity",
    }
)


class Names(list[str]):
    """Names of data sets, shown with a line on each."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        summaries = [(DATASETS[name].__doc__ or "").partition("\n")[0] for name in self]
        return "\n".join(f"{name:{width}}  {summary}" for name, summary in zip(self, summaries, strict=True))


def list_datasets() -> list[str]:
    """Names that `load_dataset` knows."""
    return Names(sorted(DATASETS))


def is_medical(name: str) -> bool:
    """Whether a data set holds images of patients."""
    return find_builder(name).medical


def find_builder(name: str) -> type[ImageSet]:
    return DATASETS[check_choice("dataset", name, DATASETS)]


def load_dataset(
    name: str,
    config: str | None = None,
    *,
    split: str | None = None,
    streaming: bool = False,
    data_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Any:
    """A `DatasetDict` with the splits labeled, unlabeled (without labels), validation and test.

    Sets that are only for testing, unity and camus, have the split test alone. Sets with the setting
    `foreign` can add one or two more without labels: test images of foreign classes.

    Args:
        name: one of `list_datasets()`.
        config: a variant of the data set, such as "zeta50".
        split: a split to be loaded alone, as a `Dataset`.
        streaming: generate the examples when they are read, as an `IterableDatasetDict` or `IterableDataset`.
        data_dir: the raw files, for data sets that need them.
        cache_dir: where to keep the built set; by default where `datasets` keeps its own.
        settings: whatever else the data set can vary, such as labels_per_class and seed.
    """
    builder = _builder(name, config, data_dir, cache_dir, settings)
    if streaming:
        return _without_labels(builder.as_streaming_dataset(split=split))
    _build(builder)
    return _without_labels(builder.as_dataset(split=split))


def _build(builder: Any) -> None:
    try:
        builder.download_and_prepare()
    except DatasetGenerationError as error:
        cause: BaseException | None = error
        while isinstance(cause, DatasetGenerationError):
            cause = cause.__cause__
        if not isinstance(cause, OSError):
            raise
        raise OSError(
            f"The data set could not be written to {builder.cache_dir}: {cause}; make room there, or name "
            "another place with the environment variable HF_DATASETS_CACHE."
        ) from error


def export_dataset(
    name: str,
    config: str | None,
    out_dir: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    license: str | None = None,
    **settings: Any,
) -> Path:
    """Write parquet files that `datasets.load_dataset(out_dir, config)` reads without this package.

    Several configs may go into one folder, one after another. Its README.md is also the card for the Hub.

    Args:
        name: one of `list_datasets()`, if it may be passed on.
        config: a variant of the data set; the builder's own default if None.
        out_dir: folder to write to, made if it is not there.
        license: under which you pass on images of your own; that of the others is known.
        data_dir, cache_dir, settings: as in `load_dataset`.
    """
    builder_class = check_shareable(name, license)
    if settings.pop("foreign", False):
        raise ValueError("foreign=True adds images for an evaluation, which are not exported: leave it out.")
    if "foreign" in _own_settings(builder_class):
        settings["foreign"] = False  # not the default of every set
    builder = _builder(name, config, data_dir, cache_dir, settings)
    out, config = Path(out_dir), builder.config.name
    if (out / config).exists():
        raise FileExistsError(f"{out / config} is already there: delete it, or export to another folder.")
    rows = _exported(name, out)
    builder.download_and_prepare()
    data, terms = _without_labels(builder.as_dataset()), ""
    if license is not None:
        builder.info.license = license
        terms = f"Passed on under {license}, as stated by those who exported it."
        data = {split: _pixels_alone(part) for split, part in data.items()}
    own = {setting: getattr(builder.config, setting) for setting in _own_settings(builder_class)}
    own.pop("foreign", None)
    if license is not None:  # no paths of here
        own = {setting: value for setting, value in own.items() if isinstance(value, (int, float))}
    rows[config] = own | {split: len(part) for split, part in data.items()}
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".partial-") as partial:
        folder, card = Path(partial, config), Path(partial, "README.md")
        folder.mkdir()
        for split, part in data.items():
            part.to_parquet(folder / f"{split}.parquet")
        card.write_text(dataset_card(builder, rows, terms), encoding="utf-8")
        folder.replace(out / config)
        card.replace(out / "README.md")  # the last step: what it does not name, `datasets` does not load
    return out


def check_shareable(name: str, license: str | None) -> type[ImageSet]:
    """The builder of a set that may be passed on: as it says, or as users say of images of their own."""
    builder_class = find_builder(name)
    if builder_class.shareable and license is not None:
        raise ValueError(
            f"The licence of {name} is known, and not yours to choose: leave it out. {builder_class.terms}"
        )
    if not builder_class.shareable and not (license is not None and name == "folders"):
        advice = " State the licence under which you pass them on." if name == "folders" else ""
        raise ValueError(f"{name} may not be exported: {builder_class.terms}{advice}")
    return builder_class


def dataset_card(builder: ImageSet, rows: dict[str, dict[str, Any]], terms: str = "") -> str:
    """The README.md of an export, with the header that `datasets` and the Hub read.

    Args:
        rows: settings and sizes of the splits, by config.
        terms: those of the set itself if not given.
    """
    name, info = builder.dataset_name, builder.info
    rows = {config: rows[config] for config in builder.builder_configs or rows if config in rows}
    splits = ("labeled", "unlabeled", "validation", "test")
    header: dict[str, Any] = {
        "license": info.license,
        "task_categories": ["image-classification"],
        "configs": [
            {
                "config_name": config,
                "data_files": [{"split": split, "path": f"{config}/{split}.parquet"} for split in splits],
                "default": config == (builder.DEFAULT_CONFIG_NAME or config),
            }
            for config in rows
        ],
        "hf_fixastep": {"dataset": name, "configs": rows},
    }
    if builder.medical:
        header["tags"] = ["medical"]
    card = huggingface_hub.DatasetCard.from_template(
        huggingface_hub.DatasetCardData(**header),
        template_path=str(template_path("dataset_card.md")),
        name=name,
        description=info.description,
        columns=list(next(iter(rows.values()))),
        rows=rows,
        default=next(iter(rows)),
        terms=terms or builder.terms,
        source=info.homepage,
        citation=info.citation,
    )
    return f"{card}\n"


def _exported(name: str, out: Path) -> dict[str, dict[str, Any]]:
    """What earlier exports to this folder wrote into its card."""
    card = out / "README.md"
    if not card.exists():
        return {}
    record = (huggingface_hub.metadata_load(card) or {}).get("hf_fixastep", {})
    if record.get("dataset") != name:
        raise FileExistsError(
            f"{card} belongs to something else than an export of {name}: choose another folder."
        )
    return record["configs"]


def _builder(name: str, config: str | None, data_dir: Any, cache_dir: Any, settings: dict) -> ImageSet:
    builder_class = find_builder(name)
    if config is not None:
        check_choice(f"config of {name}", config, [known.name for known in builder_class.BUILDER_CONFIGS])
    for setting in settings:
        valid = [*_own_settings(builder_class), "split", "streaming", "data_dir", "cache_dir"]
        check_choice(f"setting of {name}", setting, valid)
    return builder_class(
        config_name=config,
        dataset_name=name,
        hash=_source_hash(builder_class),  # else an edited builder would go on serving what it built before
        data_dir=None if data_dir is None else os.fspath(data_dir),
        cache_dir=None if cache_dir is None else os.fspath(cache_dir),
        **settings,
    )


def _own_settings(builder_class: type[ImageSet]) -> list[str]:
    inherited = {field.name for field in dataclasses.fields(datasets.BuilderConfig)}
    own = [field.name for field in dataclasses.fields(builder_class.BUILDER_CONFIG_CLASS)]
    return [name for name in own if name not in inherited]


def _source_hash(builder_class: type[ImageSet]) -> str:
    """Changes with the code of the builder, of our classes it comes from, and of what reads its files."""
    own = [kind for kind in builder_class.__mro__ if kind.__module__.startswith("hf_fixastep.")]
    paths = {inspect.getfile(kind) for kind in own} | {
        inspect.getfile(code) for code in builder_class.sources
    }
    content = hashlib.sha256()
    for path in sorted(paths):
        content.update(Path(path).read_bytes())
    return content.hexdigest()[:16]


def _pixels_alone(data: datasets.Dataset) -> datasets.Dataset:
    """Images and labels without file names, and without what a camera wrote into them, such as the place."""

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        image = row["image"].copy()
        image.info = {}
        return {"image": image}

    columns = [column for column in data.column_names if column not in ("image", "label")]
    return data.remove_columns(columns).map(encode, features=data.remove_columns(columns).features)


def _without_labels(data: Any) -> Any:
    """Drop the label column from splits that have no labels: it holds only -1 there."""
    if isinstance(data, dict):
        data.update({name: _without_labels(split) for name, split in data.items()})
        return data
    unlabeled = str(data.split).split("[")[0] in WITHOUT_LABELS
    return data.remove_columns("label") if unlabeled else data
