"""Canaries: they fail when `datasets` changes what we rely on."""

import inspect

import datasets

from hf_fixastep._compat.datasets_private import row_numbers


def test_the_folder_of_a_set_is_unfinished_until_download_and_prepare_returns() -> None:
    source = inspect.getsource(datasets.DatasetBuilder.download_and_prepare)
    order = [
        'dirname + ".incomplete"',
        'temporary_assignment(self, "_output_dir", tmp_output_dir)',
        "self._download_and_prepare(",
    ]
    places = [source.find(line) for line in order]
    assert -1 not in places, "datasets builds sets in another way: see _compat/datasets_builder.py."
    assert places == sorted(places)


def test_row_numbers_tell_which_rows_a_split_shows() -> None:
    split = datasets.Dataset.from_dict({"row": range(5)})
    assert row_numbers(split) is None, "datasets tells rows in another way: see _compat/datasets_private.py."
    assert row_numbers(split.select([3, 1])).column(0).to_pylist() == [3, 1]
