"""Folders full of links to each other: every real folder and file is visited once."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from hf_fixastep.data.files import AGAIN, walk


def names(root: Path) -> list[str]:
    return [name for name, _ in walk(root)]


def chain(root: Path, levels: int) -> None:
    """Folders in a row, each with two links to the next one: 2 ** levels paths lead to the last."""
    for level in range(levels):
        (root / f"{level:02}").mkdir(parents=True)
        (root / f"{level:02}/file").touch()
        if level:
            for link in "ab":
                (root / f"{level - 1:02}" / link).symlink_to(f"../{level:02}")


def test_the_walk_through_twenty_five_folders_with_two_links_each_ends(tmp_path: Path) -> None:
    chain(tmp_path, 25)
    passed_over: Counter[str] = Counter()
    found = walk(tmp_path, passed_over)
    assert [name for name, _ in found] == [f"{level:02}/file" for level in range(25)]
    assert passed_over == {AGAIN: 48}


def test_a_walk_from_the_first_folder_finds_all_others_behind_the_links_once(tmp_path: Path) -> None:
    chain(tmp_path, 25)
    assert names(tmp_path / "00") == sorted("a/" * level + "file" for level in range(25))


def test_what_is_no_link_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    (tmp_path / "z/file").touch()
    (tmp_path / "a").symlink_to("z")
    (tmp_path / "b").symlink_to("z/file")
    assert names(tmp_path) == ["z/file"]


@pytest.mark.parametrize("target", ["folder", "folder/file"])
def test_of_several_links_to_one_thing_outside_the_first_counts(target: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").touch()
    (tmp_path / "root").mkdir()
    for link in "cab":
        (tmp_path / "root" / link).symlink_to(tmp_path / target)
    assert names(tmp_path / "root") == ["a/file" if target == "folder" else "a"]


def test_two_names_of_one_file_that_are_no_links_both_count(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    os.link(tmp_path / "a", tmp_path / "b")
    assert names(tmp_path) == ["a", "b"]
