"""The rate of the head and frozen batch norm on two processes, with DDP and with FSDP2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hf_fixastep import FixAStepTrainer
from tests.short_runs import (
    assert_near,
    largest_difference,
    make_trainer,
    tiny_wide_resnet,
    without_augmentation,
)
from tests.slow.launching import TWO_PROCESSES, assert_same, keep, kept, launch
from tests.slow.test_distributed import Sharded, train


pytestmark = pytest.mark.slow

WAYS = {"ddp": FixAStepTrainer, "fsdp": Sharded}  # the last one last, for there is no way back
SAVING = {"save_strategy": "steps", "save_steps": 2}


def tuned(folder: Path, kind: type[FixAStepTrainer] = FixAStepTrainer, **settings: Any) -> FixAStepTrainer:
    """Rows do not meet, and there is nothing random: n processes are one with n times the batch."""
    frozen = {"batchnorm": "frozen", "mix_labeled": False, "max_steps": 4, "teacher_decay": 0.5}
    rates = {"head_rate_factor": 5.0, "unlabeled_warmup_steps": 0.0}
    return without_augmentation(make_trainer(folder, tiny_wide_resnet(), kind, **frozen | rates | settings))


def main(folder: Path) -> None:
    for way, kind in WAYS.items():
        run = train(tuned(folder / way, kind, **SAVING))
        keep(folder, way, run.raw)
        keep(folder, f"{way}-average", run.averaged)
        run = train(tuned(folder / f"{way}-resumed", kind, **SAVING), str(folder / way / "checkpoint-2"))
        keep(folder, f"{way}-resumed", run.raw)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    return launch(folder, "tests.slow.test_fine_tuning", *TWO_PROCESSES, FSDP_VERSION="2")


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_are_one_with_twice_the_batch(way: str, launched: Path, tmp_path: Path) -> None:
    alone = train(tuned(tmp_path, per_device_train_batch_size=8))
    one_rate = train(tuned(tmp_path, per_device_train_batch_size=8, head_rate_factor=1.0))
    assert_near(kept(launched, way), alone.raw)
    assert_near(kept(launched, f"{way}-average"), alone.averaged)
    assert largest_difference(alone.raw, one_rate.raw) > 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_a_resumed_run_ends_with_the_same_to_the_bit(way: str, launched: Path) -> None:
    assert_same(launched, way, f"{way}-resumed")


@pytest.mark.parametrize("way", WAYS)
def test_the_running_statistics_stay_as_they_are(way: str, launched: Path) -> None:
    start = dict(tiny_wide_resnet().named_buffers())
    found = kept(launched, way)
    assert_near({name: found[name] for name in start}, start, within=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
