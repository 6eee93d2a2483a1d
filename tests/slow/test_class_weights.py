"""Class weights on two processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.losses.test_class_weights import skewed
from tests.short_runs import assert_near, train
from tests.slow.test_two_processes import launch


pytestmark = pytest.mark.slow


def main(folder: Path) -> None:
    run = train(skewed(folder / "runs", per_device_train_batch_size=4))
    state = {name: value.contiguous() for name, value in run.raw[-1].items()}
    save_file(state, folder / f"{os.environ['RANK']}.safetensors")


def test_two_processes_with_class_weights_are_one_with_twice_the_batch(tmp_path: Path) -> None:
    result = launch("-m", "tests.slow.test_class_weights", str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    alone = train(skewed(tmp_path / "alone", per_device_train_batch_size=8)).raw[-1]
    for rank in range(2):
        assert_near(load_file(tmp_path / f"{rank}.safetensors"), alone)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
