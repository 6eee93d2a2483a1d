"""Data sets by name, built once and cached by the `datasets` library."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
from pathlib import Path
from typing import Any

import datasets

from hf_fixastep.names import choose

from .digits import DigitsOpenSet


DATASETS: dict[str, type[datasets.DatasetBuilder]] = {"digits_open_set": DigitsOpenSet}


def list_datasets() -> list[str]:
    """Names that `load_dataset` knows."""
    return sorted(DATASETS)


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
    """A `DatasetDict` with the splits labeled, unlabeled, validation and test; only the unlabeled one has no labels.

    Args:
        name: one of `list_datasets()`.
        config: a variant of the data set, such as "zeta50".
        split: a split to be loaded alone, as a `Dataset`.
        streaming: generate the examples when they are read, as an `IterableDatasetDict` or `IterableDataset`.
        data_dir: the raw files, for data sets that need them.
        cache_dir: where to keep the built set; by default where `datasets` keeps its own.
        settings: whatever else the data set can vary, such as labels_per_class and seed.
    """
    builder_class = DATASETS[choose("dataset", name, DATASETS)]
    if config is not None:
        choose(f"config of {name}", config, [known.name for known in builder_class.BUILDER_CONFIGS])
    for setting in settings:
        choose(f"setting of {name}", setting, _settings(builder_class))
    builder = builder_class(
        config_name=config,
        dataset_name=name,
        hash=_source_hash(builder_class),  # else an edited builder would go on serving what it built before
        data_dir=None if data_dir is None else os.fspath(data_dir),
        cache_dir=None if cache_dir is None else os.fspath(cache_dir),
        **settings,
    )
    if streaming:
        return _without_labels(builder.as_streaming_dataset(split=split))
    builder.download_and_prepare()
    return _without_labels(builder.as_dataset(split=split))


def _settings(builder_class: type[datasets.DatasetBuilder]) -> list[str]:
    inherited = {field.name for field in dataclasses.fields(datasets.BuilderConfig)}
    own = [field.name for field in dataclasses.fields(builder_class.BUILDER_CONFIG_CLASS)]
    return [name for name in own if name not in inherited] + ["split", "streaming", "data_dir", "cache_dir"]


def _source_hash(builder_class: type[datasets.DatasetBuilder]) -> str:
    return hashlib.sha256(Path(inspect.getfile(builder_class)).read_bytes()).hexdigest()[:16]


def _without_labels(data: Any) -> Any:
    """Drop the label column, which holds only -1 there, from the unlabeled split."""
    if isinstance(data, dict):
        data.update({name: _without_labels(split) for name, split in data.items()})
        return data
    return data.remove_columns("label") if str(data.split).split("[")[0] == "unlabeled" else data
