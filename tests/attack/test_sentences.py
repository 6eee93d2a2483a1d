"""What used to end in a traceback, or silently in something else, ends in one sentence or works."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from torch import nn

from hf_fixastep import load_dataset
from hf_fixastep.runs.recipe import read
from hf_fixastep.step.gate import LABELED, UNLABELED, GradientSlots


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: " + "[" * 20_000 + "]" * 20_000, "recipe is nested too deep"),
        ("a: 1\nb: 2\na: 3", "recipe is not YAML: the key a is there twice .*line 1"),
        ("b: {c: 1, c: 2}", "the key c is there twice"),
    ],
)
def test_yaml_that_nobody_means_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read("recipe", text)


def test_a_key_may_be_in_two_mappings_and_over_a_merged_one() -> None:
    text = "a: &one {c: 1, d: 2}\nb: {<<: *one, c: 3}"
    assert read("recipe", text) == {"a": {"c": 1, "d": 2}, "b": {"c": 3, "d": 2}}


def test_a_full_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pyarrow.ipc.RecordBatchStreamWriter, "write_table", full, raising=False)
    with pytest.raises(OSError, match=r"could not be written to .*No space left on device; make room there"):
        load_dataset("digits_open_set", cache_dir=tmp_path)


def test_sparse_gradients_count_like_dense_ones() -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        layer = nn.Embedding(6, 4, sparse=sparse)
        slots = GradientSlots(layer.parameters())
        for row, index in ((LABELED, [1, 2, 2]), (UNLABELED, [2, 5, 1])):
            with slots.fill(row):
                layer(torch.tensor(index)).square().sum().backward()
        gate = slots.gate(0.5)
        assert layer.weight.grad is not None
        found.append((gate.dot, gate.open, layer.weight.grad.clone()))
    for dense, other in zip(*found, strict=True):
        assert torch.equal(dense, other)
