"""A fit that is killed at any moment ends, when it is started again, in the same bits.

All killed fits are forks of one launched process that has imported everything and computed nothing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from hf_fixastep.features import candidates
from hf_fixastep.features.fit import fit
from tests.features.test_fit import make_sides
from tests.slow.launching import launch
from tests.slow.test_embed import save_network
from tests.slow.test_kill import fork, kill_within, wait


pytestmark = pytest.mark.slow

KILLS = 10


def fit_all(folder: Path, name: str) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for settings in candidates.HEADS.values():
        settings |= {"max_steps": 20, "per_device_train_batch_size": 8}
    os.chdir(folder / name)  # so that all have the same output_dir
    sides = {"labeled": folder / "sides/labeled", "unlabeled": folder / "sides/pile"}
    fit(**sides, output_dir="out", model=folder / "network", time="0", seeds=2, cache_dir="cache")


def main(folder: Path) -> None:
    save_network(folder)
    make_sides(folder / "sides", noise=110, labels=4)
    names = ["first", "whole", *(f"kill-{number}" for number in range(KILLS))]
    for name in names:
        (folder / name).mkdir()
    assert wait(fork(lambda: fit_all(folder, "first"))) == 0  # builds the data set
    start = time.perf_counter()
    assert wait(fork(lambda: fit_all(folder, "whole"))) == 0
    seconds, chance, ended = time.perf_counter() - start, random.Random(0), []
    for name in names[2:]:

        def one_fit(name: str = name) -> None:
            fit_all(folder, name)

        def empty(path: Path = folder / name) -> None:
            shutil.rmtree(path)
            path.mkdir()

        ended.append([kill_within(one_fit, chance.uniform(0, seconds), empty), wait(fork(one_fit))])
    (folder / "report.json").write_text(json.dumps(ended))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("fits"), "tests.slow.test_fit")


def test_all_fits_were_killed_and_then_finished(folder: Path) -> None:
    ended = json.loads((folder / "report.json").read_text())
    assert ended == [[-signal.SIGKILL, 0]] * KILLS


@pytest.mark.parametrize("number", range(KILLS))
def test_a_killed_fit_ends_in_the_same_bits(number: int, folder: Path) -> None:
    assert contents(folder / f"kill-{number}/out") == contents(folder / "whole/out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
