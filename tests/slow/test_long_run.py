"""A long run leaves nothing behind in its process, nor do many short ones.

LONG_RUN_STEPS=20000 makes it longer; `-s` shows the numbers.
"""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.short_runs import EAGER, logged, make_trainer, random_images


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/statm").exists(), reason="reads the memory of a process from /proc"
    ),
]

STEPS, SETTLED = int(os.environ.get("LONG_RUN_STEPS", "2000")), 200
TRAININGS = 20


def resident() -> int:
    """Bytes of memory in use, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else pieces that malloc keeps for later are counted
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> list[str]:
    folder = Path("/proc/self/fd")
    return sorted(os.readlink(link) for link in folder.iterdir() if link.is_symlink())


def threads() -> list[str]:
    """Names of all threads, also of those that Python knows nothing of."""
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


class Watch(TrainerCallback):
    """Looks at the process every 200 steps."""

    def __init__(self) -> None:
        self.memory: list[int] = []
        self.files: list[list[str]] = []
        self.threads: list[list[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % SETTLED == 0:
            self.look()

    def look(self) -> None:
        self.memory.append(resident())
        self.files.append(open_files())
        self.threads.append(threads())

    def report(self, what: str) -> None:
        """The numbers of all looks, for a note."""
        counts = {"files": self.files, "threads": self.threads}
        ends = {name: f"{len(found[0])} to {len(found[-1])}" for name, found in counts.items()}
        megabytes = [round(each / 1e6, 1) for each in self.memory]
        print(f"\n{what}: megabytes {megabytes}, {ends}")  # noqa: T201


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    folder, watch = tmp_path_factory.mktemp("long"), Watch()
    trainer = make_trainer(
        folder,
        objects={"eval_dataset": random_images(12, seed=3, labeled=True)},
        loss="fixmatch",
        loss_kwargs=EAGER,
        max_steps=STEPS,
        steps_per_epoch=120,  # epochs come and go as well
        logging_steps=100,
        eval_strategy="steps",
        eval_steps=400,
        save_strategy="steps",
        save_steps=400,
        save_total_limit=2,
    )
    trainer.add_callback(watch)
    trainer.train()
    assert trainer.state.global_step == STEPS
    assert len(logged(trainer)) == STEPS / 100
    assert len(list(folder.glob("checkpoint-*"))) == 2
    watch.report(f"{STEPS} steps")
    return watch


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    """One after the other in this process, each with workers, evaluations, checkpoints and a resume."""
    watch = Watch()
    settings: dict[str, Any] = {"loss": "fixmatch", "loss_kwargs": EAGER, "dataloader_num_workers": 1}
    settings |= {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 5, "save_steps": 5}
    for number in range(TRAININGS):
        folder = tmp_path_factory.mktemp(f"training-{number}")
        for steps, resume in ((10, None), (20, str(folder / "checkpoint-10"))):
            trainer = make_trainer(
                folder,
                objects={"eval_dataset": random_images(12, seed=3, labeled=True)},
                max_steps=steps,
                ignore_changed_settings=["max_steps"],
                **settings,
            )
            trainer.train(resume)
        del trainer
        watch.look()
    watch.report(f"{TRAININGS} trainings")
    return watch


def test_memory_does_not_grow(watched: Watch) -> None:
    assert len(watched.memory) == STEPS / SETTLED
    assert watched.memory[-1] < 1.02 * watched.memory[0], watched.memory


def test_no_file_stays_open(watched: Watch) -> None:
    assert len(watched.files[-1]) == len(watched.files[0]), set(watched.files[-1]) - set(watched.files[0])


def test_no_thread_is_left_behind(watched: Watch) -> None:
    """From step 600 on: the bar of the first checkpoint, after step 400, starts tqdm's one monitor."""
    before, settled = watched.threads[0], watched.threads[2]
    assert len(settled) <= len(before) + 1, settled
    assert {len(names) for names in watched.threads[2:]} == {len(settled)}


def test_twenty_trainings_leave_nothing_in_memory(trainings: Watch) -> None:
    """From the fifth on, when all that is imported late is there."""
    assert len(trainings.memory) == TRAININGS
    assert trainings.memory[-1] < 1.01 * trainings.memory[4], trainings.memory


def test_twenty_trainings_leave_no_file_open_and_no_thread(trainings: Watch) -> None:
    for found in (trainings.files, trainings.threads):
        assert len(found[-1]) == len(found[4]), found[-1]
