"""Checkpoints that are complete, which a manifest with the hashes of their files says, or do not count."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from hf_fixastep.checks import check_choice
from hf_fixastep.disk import digest, write_atomically


logger = logging.getLogger(__name__)

MANIFEST = "manifest.txt"  # its own hash, then one line per file: hash, size, name
RUN = "fixastep.json"  # what a checkpoint may be resumed with
LOCK = "_lock"  # the Trainer keeps names that begin like this from the Hub

OPTIMIZER_SETTINGS = (
    "learning_rate",
    "head_rate_factor",
    "weight_decay",
    "optim_args",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
)
# Settings that decide on the numbers of a run. How often it logs, evaluates and saves may change.
SETTINGS = (
    *OPTIMIZER_SETTINGS,
    *("max_steps", "num_train_epochs", "steps_per_epoch", "seed", "data_seed", "world_size", "bf16", "fp16"),
    *("per_device_train_batch_size", "unlabeled_ratio", "gradient_accumulation_steps", "max_grad_norm"),
    *("lr_cycle_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("loss_kwargs", "unlabeled_weight", "unlabeled_ramp", "unlabeled_warmup_steps", "divide_by_all_rows"),
    "class_weights",
    *("gate", "mix_labeled", "mix_alpha", "mix_temperature", "mix_per_batch", "mix_pool"),
    *("batchnorm", "teacher_decay", "trainable", "lora_rank", "labeled_view", "flip", "cutout"),
)


# ---- writing


@contextlib.contextmanager
def saving(checkpoint: Path) -> Iterator[None]:
    """Whatever goes wrong with the disk inside is one clear OSError, and leaves nothing of the checkpoint."""
    try:
        yield
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # torch and safetensors have errors of their own
        remove(checkpoint)
        raise OSError(
            f"{checkpoint} could not be saved, earlier checkpoints are as they were: {error}"
        ) from error


def complete(checkpoint: Path) -> None:
    """Make a checkpoint count, by listing its files with their hashes; by then all of it is on the disk."""
    lines = [
        f"{digest(path)} {path.stat().st_size} {path.relative_to(checkpoint)}\n" for path in files(checkpoint)
    ]
    body = "".join(lines).encode()
    for path in [*checkpoint.rglob("*"), checkpoint]:
        sync(path)
    with write_atomically(checkpoint / MANIFEST) as partial:
        partial.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        sync(partial)
    for path in (checkpoint, checkpoint.parent):
        sync(path)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint if it is there, its manifest first: a kill meanwhile leaves nothing that counts."""
    with contextlib.suppress(OSError):
        (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)


def prune(checkpoint: Path, limit: int | None, best: str | None) -> None:
    """Remove incomplete checkpoints, and the oldest beside this one, the newest; never it nor the best."""
    kept = {checkpoint.resolve(), *([Path(best).resolve()] if best else [])}
    found = checkpoints(checkpoint.parent)
    others = [folder for folder in found if folder.resolve() not in kept]
    # Those of later steps are of a run that was given up.
    others.sort(key=lambda folder: step_of(folder) <= step_of(checkpoint))
    surplus = len(found) - max(limit, len(found) - len(others)) if limit and limit > 0 else 0
    leftovers = [folder for folder in checkpoint_folders(checkpoint.parent) if folder not in found]
    for folder in [*others[: max(surplus, 0)], *leftovers]:
        remove(folder)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def only_run(output_dir: str | Path) -> Iterator[None]:
    """Hold the folder's lock, which the system takes back when the process dies."""
    path = Path(output_dir) / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        message = f"Another run is writing to {output_dir}; wait for its end or choose another output_dir."
        raise BlockingIOError(message) from None
    try:
        yield
    finally:
        # A folder that became read-only has a more important error to tell.
        with contextlib.suppress(OSError):
            path.unlink()
        lock.release()


# ---- reading


def checkpoints(output_dir: str | Path) -> list[Path]:
    """All checkpoints that were completed, by their step."""
    return [folder for folder in checkpoint_folders(output_dir) if (folder / MANIFEST).is_file()]


def checkpoint_folders(output_dir: str | Path) -> list[Path]:
    """All folders named checkpoint-N, by N; those of a save that was killed are incomplete."""
    found = [
        path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)
    ]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None if it is as it was written."""
    if not (checkpoint / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    head, _, body = (checkpoint / MANIFEST).read_bytes().partition(b"\n")
    if head != hashlib.sha256(body).hexdigest().encode():
        return f"{MANIFEST} is damaged"
    for line in body.decode().splitlines():
        expected, size, name = line.split(" ", 2)
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != int(size):
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        try:
            if digest(path) != expected:
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


def newest_complete(output_dir: str | Path, before: float = math.inf) -> tuple[str | None, list[str]]:
    """The newest checkpoint without damage, and the newer ones with what is wrong with them.

    Args:
        before: a step; those of this one and of later ones do not count.
    """
    skipped: list[str] = []
    for checkpoint in reversed([each for each in checkpoint_folders(output_dir) if step_of(each) < before]):
        if (reason := damage(checkpoint)) is None:
            return str(checkpoint), skipped
        skipped.append(f"{checkpoint.name} ({reason})")
    return None, skipped


def find_checkpoint(output_dir: str | Path) -> str:
    """The checkpoint to resume, the same on all processes; says which it skipped and why."""
    is_main = PartialState().is_main_process
    newest, skipped = broadcast_object_list([newest_complete(output_dir) if is_main else None])[0]
    if newest is None:
        damaged = f", only damaged ones: {', '.join(skipped)}" if skipped else ""
        raise ValueError(
            f"{output_dir} holds no checkpoint to resume{damaged}; leave out resume_from_checkpoint."
        )
    if skipped and is_main:
        logger.warning("Skipped %s; resuming from %s.", ", ".join(skipped), newest)
    return newest


def check_run(checkpoint: str | Path, run: dict[str, Any], ignored: Iterable[str]) -> set[str]:
    """Refuse to continue a damaged checkpoint or one of another run; return the changed settings to be
    ignored.

    Args:
        run: what must not change, with the settings that may change where `ignored` names them in "settings".
    """
    folder = Path(checkpoint)
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"{folder} holds no {MANIFEST}, so it is not a checkpoint to resume; choose a checkpoint-N "
            "folder."
        )
    if reason := damage(folder):
        raise ValueError(f"{folder} is damaged: {reason}. Resume from another checkpoint.")
    if not (folder / RUN).is_file():
        raise ValueError(f"{folder} holds no {RUN}, so it is not a checkpoint to resume of this package.")
    for name in ignored:
        check_choice("setting to ignore", name, SETTINGS)
    saved, run = json.loads((folder / RUN).read_text()), as_json(run)
    old, new = saved.pop("settings"), run.pop("settings")
    if changed := {name for name in run if saved.get(name) != run[name]}:
        raise ValueError(
            f"{describe(folder, saved, run, changed)} Resume it with the same, or start a new run in another "
            "output_dir."
        )
    changed = {name for name in new if old.get(name) != new[name]}
    if refused := changed - set(ignored):
        raise ValueError(
            f"{describe(folder, old, new, refused)} Resume it with the same, or continue nevertheless with "
            f"ignore_changed_settings: {', '.join(sorted(refused))}."
        )
    return changed


def describe(folder: Path, old: dict[str, Any], new: dict[str, Any], names: Iterable[str]) -> str:
    was, now = (", ".join(f"{name} {values.get(name)}" for name in sorted(names)) for values in (old, new))
    return f"{folder} was trained with {was}, but this run has {now}."


def as_json(value: Any) -> Any:
    """As it comes back from a file: tuples are lists by then, enumerations text."""
    return json.loads(json.dumps(value))
