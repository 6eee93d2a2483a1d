"""The small release of FETAL_PLANES_DB, for two files of tests."""

import zipfile
from pathlib import Path

import pytest

from hf_fixastep.data import load_dataset
from tests.data.fetal_release import write_folder, write_parquet


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
