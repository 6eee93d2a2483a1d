"""A checkpoint is complete or not there, and what is not complete is named and not used."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback, TrainerState

from hf_fixastep import Images, checkpoints
from hf_fixastep.checkpoints import LOCK, damage, find_checkpoint, newest_complete, only_run, prune
from hf_fixastep.trainer import FixAStepTrainer
from tests.short_runs import assert_equal, logged, make_trainer, random_images, tiny_wide_resnet, train
from tests.test_callbacks import poisoned


SAVING = {"save_strategy": "steps", "save_steps": 1}
EVALUATED = {"eval_dataset": random_images(9, seed=3, labeled=True)}


class AfterStep(TrainerCallback):
    """Does something after a step, behind the callbacks of the trainer."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action()


def names(folder: Path) -> list[str]:
    """All but the lock, which is there during a run."""
    return sorted({path.name for path in folder.iterdir()} - {LOCK})


def empty_checkpoints(folder: Path, *steps: int) -> list[Path]:
    """Complete ones with one file each."""
    made = []
    for step in steps:
        made.append(folder / f"checkpoint-{step}")
        made[-1].mkdir(parents=True)
        (made[-1] / "weights").write_text(f"of step {step}")
        checkpoints.complete(made[-1])
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the checkpoints 1 and 2; to be left as it is."""
    folder = tmp_path_factory.mktemp("saved")
    make_trainer(folder, max_steps=2, **SAVING).train()
    return folder


# ---- damage


FILES = [
    "config.json",
    "fixastep.json",
    "log_window_0.safetensors",
    "manifest.txt",
    "model.safetensors",
    "optimizer.pt",
    "preprocessor_config.json",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_weights.safetensors",
]


def test_these_are_all_files_of_a_checkpoint(saved: Path) -> None:
    assert names(saved / "checkpoint-2") == FILES
    assert names(saved) == ["checkpoint-1", "checkpoint-2", "log.csv"]


@pytest.fixture
def content(saved: Path, name: str) -> Iterator[bytes]:
    path = saved / "checkpoint-2" / name
    before = path.read_bytes()
    yield before
    path.write_bytes(before)


@pytest.mark.parametrize("name", FILES)
def test_any_damage_to_any_file_is_found_and_the_checkpoint_before_is_used(
    name: str, content: bytes, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = saved / "checkpoint-2"
    random = torch.Generator().manual_seed(len(content))
    positions = torch.randint(len(content), (5,), generator=random).tolist()
    damages = [content[:-1], b"", *(content[:at] for at in positions)]
    damages += [content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :] for at in positions]
    for damaged in damages:
        (checkpoint / name).write_bytes(damaged)
        assert damage(checkpoint).startswith(f"{name} ")
    caplog.clear()
    assert find_checkpoint(saved) == str(saved / "checkpoint-1")
    assert f"checkpoint-2 ({name} " in caplog.text
    (checkpoint / name).unlink()
    assert damage(checkpoint) == f"{name} is missing"
    (checkpoint / name).write_bytes(content)
    assert damage(checkpoint) is None


def test_a_given_checkpoint_that_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=1, **SAVING).train()
    path = tmp_path / "checkpoint-1" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoint-1 is damaged: optimizer\.pt has 100 bytes instead of"):
        make_trainer(tmp_path, max_steps=1).train(str(path.parent))
    with pytest.raises(
        ValueError, match=r"no checkpoint to resume, only damaged ones: checkpoint-1 \(optimizer\.pt"
    ):
        make_trainer(tmp_path, max_steps=1).train(True)


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path: Path) -> None:
    expected = train(make_trainer(tmp_path, **SAVING))
    (tmp_path / "checkpoint-3" / "optimizer.pt").unlink()
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    found = train(make_trainer(tmp_path, tiny_wide_resnet(1), **SAVING), True)
    assert_equal(found.raw[-1], expected.raw[-1])
    assert newest_complete(tmp_path) == (str(tmp_path / "checkpoint-4"), [])


def best_at(trainer: FixAStepTrainer, *accuracies: float) -> FixAStepTrainer:
    """Evaluations find these accuracies, one after the other."""
    found, original = iter(accuracies), trainer._determine_best_metric

    def determine(metrics: dict[str, float], trial: Any) -> bool:
        return original({"eval_accuracy": next(found)}, trial)

    trainer._determine_best_metric = determine  # type: ignore[method-assign]
    return trainer


BEST = {
    **SAVING,
    "metric_for_best_model": "accuracy",
    "load_best_model_at_end": True,
    "eval_strategy": "steps",
    "eval_steps": 1,
}


def test_a_best_model_that_is_damaged_is_not_loaded(tmp_path: Path) -> None:
    def flip() -> None:
        path = tmp_path / "checkpoint-1" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    trainer = best_at(make_trainer(tmp_path, objects=EVALUATED, max_steps=2, **BEST), 0.5, 0.4)
    trainer.add_callback(AfterStep(2, flip))
    with pytest.raises(ValueError, match=r"best checkpoint .*checkpoint-1 is damaged: model\.safetensors"):
        trainer.train()


# ---- order of writing and removing


def test_what_a_killed_save_left_is_no_checkpoint_and_goes_at_the_next_save(tmp_path: Path) -> None:
    for name in ("checkpoint-1", "checkpoint-9"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.safetensors").write_text("half of it")
        (tmp_path / name / "of_another_loss.safetensors").write_text("not overwritten by the next save")
    assert checkpoints.checkpoints(tmp_path) == []
    assert newest_complete(tmp_path)[0] is None
    make_trainer(tmp_path, max_steps=1, **SAVING).train()
    assert names(tmp_path) == ["checkpoint-1", "log.csv"]
    assert damage(tmp_path / "checkpoint-1") is None
    assert not (tmp_path / "checkpoint-1" / "of_another_loss.safetensors").exists()


def test_older_checkpoints_go_when_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that dies before its last file, the manifest, has to leave the older checkpoint as it was."""

    def die(checkpoint: Path) -> None:
        raise KeyboardInterrupt

    trainer = make_trainer(tmp_path, max_steps=2, save_total_limit=1, **SAVING)
    trainer.add_callback(
        AfterStep(2, lambda: monkeypatch.setattr("hf_fixastep._compat.checkpointing.complete", die))
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert newest_complete(tmp_path)[0] == str(tmp_path / "checkpoint-1")
    monkeypatch.undo()
    make_trainer(tmp_path, max_steps=2, save_total_limit=1, **SAVING).train(True)
    assert names(tmp_path) == ["checkpoint-2", "log.csv"]


@pytest.mark.parametrize(
    ("steps", "newest", "limit", "best", "left"),
    [
        ([1, 2, 3], 3, None, None, [1, 2, 3]),
        ([1, 2, 3], 3, 0, None, [1, 2, 3]),
        ([1, 2, 3], 3, 1, None, [3]),
        ([1, 2, 10], 10, 2, None, [2, 10]),
        ([1, 2, 3], 3, 1, 1, [1, 3]),
        ([1, 2, 3], 3, 2, 1, [1, 3]),
        ([1, 2, 3], 3, 2, 3, [2, 3]),
        ([1, 2, 3], 3, 5, None, [1, 2, 3]),
        ([4, 5, 90, 91], 5, 2, None, [4, 5]),  # 90 and 91 are of a run that was given up
    ],
)
def test_the_oldest_go_but_never_the_newest_or_the_best(
    steps: list[int],
    newest: int,
    limit: int | None,
    best: int | None,
    left: list[int],
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    empty_checkpoints(tmp_path, *steps)
    monkeypatch.chdir(tmp_path)  # the best may be named from elsewhere
    prune(tmp_path / f"checkpoint-{newest}", limit, None if best is None else f"checkpoint-{best}")
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in left)


def test_the_best_checkpoint_is_kept_and_known_by_its_final_name(tmp_path: Path) -> None:
    trainer = best_at(
        make_trainer(tmp_path, objects=EVALUATED, save_total_limit=1, **BEST), 0.2, 0.5, 0.3, 0.4
    )
    seen, best = [], str(tmp_path / "checkpoint-2")

    def look() -> None:
        seen.extend(
            [names(tmp_path), TrainerState.load_from_json(f"{best}/trainer_state.json").best_model_checkpoint]
        )

    trainer.add_callback(AfterStep(4, look))
    trainer.train()
    assert seen == [["checkpoint-2", "checkpoint-3", "log.csv"], best]
    assert trainer.state.best_model_checkpoint == best
    assert names(tmp_path) == ["checkpoint-2", "log.csv"]


# ---- the disk


class Disk:
    """Refuses to change anything from the n-th change on; an audit hook stays for good, so there is one."""

    left: int | None = None
    kills = False

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[1], str) and set("wax+") & set(args[1])
        removes = self.kills and event in ("os.remove", "os.rmdir")
        if self.left is None or not (writes or removes or event in ("os.mkdir", "os.rename")):
            return
        self.left -= 1
        if self.left < 0 and self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextlib.contextmanager
    def room_for(self, changes: int) -> Iterator[None]:
        self.left = changes
        try:
            yield
        finally:
            self.left = None


DISK = Disk()
sys.addaudithook(DISK.hook)


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes behind this size fail, those of torch and safetensors as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def attempt_to_save(trainer: FixAStepTrainer, full: contextlib.AbstractContextManager[None]) -> bool:
    """Whether the disk had room for a new checkpoint; if not, all must be as if nothing had been tried."""
    folder, step = Path(trainer.args.output_dir), trainer.state.global_step
    raw = {name: value.clone() for name, value in trainer.core_model.state_dict().items()}
    message = None
    try:
        with full:
            trainer._save_checkpoint(trainer.model_wrapped, None)
    except OSError as error:
        message = str(error)
    if (folder / f"checkpoint-{step}").exists():  # even if an older one could not be removed
        return damage(folder / f"checkpoint-{step}") is None
    assert re.search(
        rf"checkpoint-{step} could not be saved, .*(No space left|File too large|write)", str(message)
    )
    assert names(folder) == ["checkpoint-2", "log.csv"]
    assert damage(folder / "checkpoint-2") is None
    assert_equal(trainer.core_model.state_dict(), raw)
    return False


@pytest.mark.parametrize("kind", ["changes", "sizes"])
def test_a_full_disk_leaves_the_checkpoints_there_were(kind: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=2, save_total_limit=1)
    attempts = []

    def try_all() -> None:
        if kind == "changes":
            while not attempts or not attempts[-1]:
                attempts.append(attempt_to_save(trainer, DISK.room_for(len(attempts))))
        else:
            for size in (0, 100, 1000, 3000, 5000, 20000, 10**7):
                attempts.append(attempt_to_save(trainer, largest_file(size)))

    trainer.add_callback(AfterStep(3, try_all))
    trainer.train()
    assert len(attempts) >= 7
    assert not any(attempts[:-1])
    assert attempts[-1]
    assert names(tmp_path) == ["checkpoint-4", "log.csv"]


@pytest.mark.slow
def test_a_kill_before_any_change_of_the_disk_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    folder, copy = tmp_path / "run", tmp_path / "copy"
    trainer = make_trainer(folder, max_steps=3, save_strategy="steps", save_steps=2, save_total_limit=1)
    newest = []

    def save_and_die(changes: int) -> int:
        child = os.fork()
        if child == 0:
            DISK.kills = True
            with DISK.room_for(changes):
                trainer._save_checkpoint(trainer.model_wrapped, None)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def try_all() -> None:
        for stale in (False, True):  # an incomplete one of the same step is in the way, or not
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
            if stale:
                (copy / "checkpoint-3").mkdir()
            code, changes = -signal.SIGKILL, 0
            while code == -signal.SIGKILL:
                shutil.rmtree(folder)
                shutil.copytree(copy, folder)
                code, changes = save_and_die(changes), changes + 1
                found, skipped = newest_complete(folder)
                newest.append(Path(str(found)).name)
                assert skipped in ([], ["checkpoint-3 (manifest.txt is missing)"])
            assert code == 0
            assert names(folder) == ["checkpoint-3", "log.csv"]
            shutil.rmtree(folder)
            shutil.copytree(copy, folder)

    trainer.add_callback(AfterStep(3, try_all))
    trainer.train()
    assert len(newest) >= 40
    assert set(newest) == {"checkpoint-2", "checkpoint-3"}
    assert names(folder) == ["checkpoint-3", "log.csv"]


def test_a_full_disk_ends_the_run_with_what_and_where(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **SAVING)
    disk = largest_file(1000)
    trainer.add_callback(AfterStep(2, disk.__enter__))
    try:
        with pytest.raises(
            OSError, match="checkpoint-2 could not be saved, earlier checkpoints are as they were"
        ):
            trainer.train()
    finally:
        disk.__exit__(None, None, None)
    assert names(tmp_path) == ["checkpoint-1", "log.csv"]
    expected = train(make_trainer(tmp_path / "whole"))
    assert_equal(train(make_trainer(tmp_path, tiny_wide_resnet(1)), True).raw[-1], expected.raw[-1])


def test_a_folder_that_becomes_read_only_ends_the_run_with_what_and_where() -> None:
    with tempfile.TemporaryDirectory() as place:  # that of pytest is closed to other users
        folder, message = Path(place) / "run", Path(place) / "message"
        Path(place).chmod(0o777)
        child = os.fork()
        if child == 0:
            if os.getuid() == 0:  # who may write everywhere
                os.setuid(65534)
            try:
                callbacks = [AfterStep(2, lambda: folder.chmod(0o555))]
                make_trainer(folder, objects={"callbacks": callbacks}, **SAVING).train()
            except OSError as error:
                message.write_text(str(error))
            os._exit(0)
        os.waitpid(child, 0)
        assert re.search(r"run/checkpoint-2 could not be saved, .*Permission denied", message.read_text())
        folder.chmod(0o755)
        assert names(folder) == ["checkpoint-1", "log.csv"]
        assert damage(folder / "checkpoint-1") is None


# ---- one run per folder


def test_a_second_run_in_the_same_folder_is_refused_at_once(tmp_path: Path) -> None:
    messages = []

    def start_another() -> None:
        for resume in (None, True, str(tmp_path / "checkpoint-1")):
            with pytest.raises(BlockingIOError, match="Another run is writing to") as error:
                make_trainer(tmp_path, tiny_wide_resnet(1)).train(resume)
            messages.append(str(error.value))

    trainer = make_trainer(tmp_path, objects={"callbacks": [AfterStep(2, start_another)]}, **SAVING)
    trainer.train()
    assert len(messages) == 3
    assert all(str(tmp_path) in message for message in messages)
    assert logged(trainer, "step") == [1, 2, 3, 4]


def test_the_folder_is_free_again_after_an_error_and_after_a_kill(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), only_run(tmp_path):
        raise ZeroDivisionError
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with only_run(tmp_path):
            os.write(writer, b"locked")
            time.sleep(60)
        os._exit(0)
    assert os.read(reader, 6) == b"locked"
    with pytest.raises(BlockingIOError, match="Another run"), only_run(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with only_run(tmp_path):
        assert os.listdir(tmp_path) == [LOCK]
    assert os.listdir(tmp_path) == []


# ---- settings


@pytest.mark.parametrize(
    ("changed", "was"),
    [
        ({"gate": "off"}, "gate drop"),
        ({"learning_rate": 0.01}, "learning_rate 0.03"),
        ({"max_steps": 8}, "max_steps 2"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size 4"),
        ({"unlabeled_ratio": 2.0}, "unlabeled_ratio 1.0"),
        ({"seed": 7}, "seed 42"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps 1"),
        ({"batchnorm": "separate"}, "batchnorm joint"),
        ({"mix_alpha": 0.75}, "mix_alpha 0.5"),
        ({"lr_cycle_steps": 0.0}, "lr_cycle_steps 1.0"),
        ({"optim_args": "momentum=0.5"}, "optim_args momentum=0.9,nesterov=true"),
    ],
    ids=str,
)
def test_a_changed_setting_is_refused_by_name_unless_it_is_to_be_ignored(
    changed: dict[str, Any], was: str, saved: Path, tmp_path: Path
) -> None:
    (name, value) = next(iter(changed.items()))
    settings = {"max_steps": 2} | changed
    with pytest.raises(ValueError, match="was trained with") as error:
        make_trainer(tmp_path, **settings).check_checkpoint(saved / "checkpoint-1")
    message = str(error.value)
    assert f"was trained with {was}, but this run has {name} {value}." in message
    assert message.endswith(f"ignore_changed_settings: {name}.")
    trainer = make_trainer(tmp_path, **settings, ignore_changed_settings=[name])
    assert trainer.check_checkpoint(saved / "checkpoint-1") == {name}


def test_nothing_is_ignored_but_what_is_named_and_only_settings_can_be(saved: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 2, "gate": "off", "seed": 7, "ignore_changed_settings": ["gate"]}
    with pytest.raises(ValueError, match="was trained with seed 42, but this run has seed 7"):
        make_trainer(tmp_path, **settings).check_checkpoint(saved / "checkpoint-1")
    for name in ("loss", "labeled data", "optim"):
        with pytest.raises(ValueError, match=f"Unknown setting to ignore '{name}'"):
            make_trainer(tmp_path, ignore_changed_settings=[name]).check_checkpoint(saved / "checkpoint-1")


def test_logging_and_saving_may_change(saved: Path, tmp_path: Path) -> None:
    settings = {"max_steps": 2, "logging_steps": 7, "save_steps": 5, "per_device_eval_batch_size": 3}
    assert make_trainer(tmp_path, **settings).check_checkpoint(saved / "checkpoint-1") == set()


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("classes", {"train_dataset": lambda: renamed("cat", "dog", "yak")}),
        ("model WideResNetForImageClassification of", {"model": lambda: tiny_wide_resnet(width=2)}),
        (
            "optim sgd",
            {"optim": "adam", "ignore_changed_settings": ["learning_rate", "weight_decay", "optim_args"]},
        ),
    ],
)
def test_another_model_optimizer_or_set_of_classes_is_never_continued(
    what: str, changed: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    built = {name: value() if callable(value) else value for name, value in changed.items()}
    objects = {"train_dataset": built.pop("train_dataset")} if "train_dataset" in built else {}
    trainer = make_trainer(tmp_path, built.pop("model", None), objects=objects, max_steps=2, **built)
    with pytest.raises(ValueError, match=f"was trained with .*{what}.*start a new run"):
        trainer.check_checkpoint(saved / "checkpoint-1")


def renamed(*class_names: str) -> Images:
    images = random_images(24, seed=1, labeled=True)
    return Images(images.pixels, images.labels, list(class_names))


def test_a_changed_learning_rate_and_momentum_are_really_used(saved: Path, tmp_path: Path) -> None:
    changed = {"learning_rate": 0.003, "optim_args": "momentum=0.5", "max_steps": 2}
    trainer = make_trainer(tmp_path, **changed, ignore_changed_settings=["learning_rate", "optim_args"])
    trainer.train(str(saved / "checkpoint-1"))
    whole = make_trainer(tmp_path, max_steps=2)
    whole.train()
    assert logged(trainer, "learning_rate")[1] == pytest.approx(logged(whole, "learning_rate")[1] / 10)
    for group in trainer.optimizer.param_groups:
        assert group["momentum"] == 0.5
        assert group["initial_lr"] == 0.003


# ---- signals


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    number: signal.Signals, code: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    expected = train(make_trainer(tmp_path / "whole"))
    callbacks = [AfterStep(2, send(number))]
    trainer = make_trainer(tmp_path, objects={"callbacks": callbacks}, logging_steps=3)
    with pytest.raises(SystemExit) as stopped:
        trainer.train()
    assert stopped.value.code == code
    assert f"Stopped by {number.name} after step 2" in caplog.text
    assert str(tmp_path) in caplog.text
    assert "resume_from_checkpoint" in caplog.text
    assert names(tmp_path) == ["checkpoint-2", "log.csv", "whole"]
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before
    found = train(make_trainer(tmp_path, tiny_wide_resnet(1), logging_steps=3), True)
    assert_equal(found.raw[-1], expected.raw[-1])


def test_a_signal_during_an_evaluation_saves_the_step_that_was_evaluated(tmp_path: Path) -> None:
    class DuringEvaluation(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    objects = {**EVALUATED, "callbacks": [DuringEvaluation()]}
    with pytest.raises(SystemExit):
        make_trainer(tmp_path, objects=objects, eval_strategy="steps", eval_steps=2).train()
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-2"]


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)

    trainer = make_trainer(tmp_path, objects={"callbacks": [AfterStep(1, twice)]})
    child = os.fork()
    if child == 0:
        trainer.train()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_signal_behind_the_last_step_is_passed_on(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

    class AtTheEnd(TrainerCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            make_trainer(tmp_path, objects={"callbacks": [AtTheEnd()]}).train()
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_are_restored_after_an_error_and_left_alone_in_a_thread(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def fail() -> None:
        seen.append(signal.getsignal(signal.SIGTERM) == before)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, objects={"callbacks": [AfterStep(1, fail)]}).train()
    assert signal.getsignal(signal.SIGTERM) is before
    trainer = make_trainer(
        tmp_path,
        objects={
            "callbacks": [AfterStep(1, lambda: seen.append(signal.getsignal(signal.SIGTERM) == before))]
        },
    )
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert seen == [False, True]
    assert trainer.state.global_step == 4


# ---- counters


def test_a_resumed_log_repairs_no_loss_and_keeps_the_counts(tmp_path: Path) -> None:
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "logging_steps": 3}
    for loss in ("labeled", "unlabeled"):
        whole = make_trainer(tmp_path / f"whole-{loss}", kind=poisoned(loss, 1), **settings)
        whole.train()
        folder = tmp_path / loss
        make_trainer(
            folder, kind=poisoned(loss, 1), objects={"callbacks": [StopAfter(2)]}, **settings
        ).train()
        resumed = make_trainer(folder, kind=poisoned(loss, 1), **settings)
        resumed.train(True)
        assert logged(resumed, f"nonfinite/{loss}") == [1, 0]
        assert [math.isnan(value) for value in logged(resumed)] == [True, False]
        for name in (
            "loss",
            f"loss/{loss}",
            "gate/open",
            "gate/cosines",
            "nonfinite/labeled",
            "nonfinite/unlabeled",
        ):
            assert repr(logged(resumed, name)) == repr(logged(whole, name))


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step
