"""Two processes are one run. All runs of this file share one launch, for starting takes longer than training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageClassification, TrainerCallback

from hf_fixastep import FixAStepTrainer
from hf_fixastep.data.loader import PairedSampler
from tests.short_runs import (
    EAGER,
    STATEFUL,
    assert_equal,
    assert_near,
    largest_difference,
    logged,
    make_trainer,
    random_images,
    tiny_vit,
    tiny_wide_resnet,
    train,
    weights,
    without_augmentation,
)


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LOSSES = ("mean_teacher", "fixmatch", "pi_model", *STATEFUL)
MODES = ("joint", "separate")
PROJECT = {"gate": "project"}
# Per process; one process has 8 at once.
PARTS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
LARGE_BATCHES: dict[str, dict[str, Any]] = {"drop": {}, "project": PROJECT, "parts": PARTS}
SAVING = {"save_strategy": "steps", "save_steps": 3}
LIMITED = ("head_and_norms", "lora")  # what is trained


# ---- what both the launched processes and this one can do


def with_batchnorm(folder: Path, loss: str, mode: str, **settings: Any) -> FixAStepTrainer:
    objects = {"eval_dataset": random_images(10, seed=3, labeled=True)}
    settings = {"loss": loss, "batchnorm": mode, "max_steps": 6, "teacher_decay": 0.9} | settings
    if loss == "fixmatch":
        settings["loss_kwargs"] = EAGER
    if loss in STATEFUL:
        settings |= {"loss_kwargs": STATEFUL[loss], "unlabeled_ratio": 4.0, "unlabeled_warmup_steps": 0.0}
    return make_trainer(folder, tiny_wide_resnet(bn_momentum=0.5), objects=objects, **settings)


def without_batchnorm(folder: Path, **settings: Any) -> FixAStepTrainer:
    defaults = {
        "loss": "fixmatch",
        "loss_kwargs": EAGER,
        "mix_labeled": False,
        "max_steps": 6,
        "teacher_decay": 0.9,
    }
    return without_augmentation(make_trainer(folder, tiny_vit(), **defaults | settings))


class CountReductions(TrainerCallback):
    """Counts the gradients that DDP reduces on its own; the gate does it already."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer, self.count = trainer, 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.model_wrapped.register_comm_hook(None, self.reduce)

    def reduce(self, state, bucket):  # torch would compare annotations, which are strings here
        self.count += 1
        dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


# ---- the launched script


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])

    def keep(name: str, state: dict[str, Tensor], **facts: Any) -> None:
        save_file(
            {key: value.contiguous() for key, value in state.items()}, folder / f"{name}-{rank}.safetensors"
        )
        (folder / f"{name}-{rank}.json").write_text(json.dumps(facts))

    for loss in LOSSES:
        for mode in MODES:
            trainer = with_batchnorm(folder / "runs", loss, mode)
            counter = CountReductions(trainer)
            trainer.add_callback(counter)
            run = train(trainer)
            keep(f"raw-{loss}-{mode}", run.raw[-1], reductions=counter.count)
            keep(f"average-{loss}-{mode}", run.averaged[-1])
            keep(f"loss-{loss}-{mode}", weights(trainer.loss))

    trainer.save_model(str(folder / "saved"))
    keep("saved", weights(trainer.model), **trainer.evaluate())

    trainer = without_augmentation(
        with_batchnorm(folder / "runs", "pi_model", "joint", mix_labeled=False, max_steps=1)
    )
    keep("statistics", train(trainer).raw[-1])

    for name, settings in LARGE_BATCHES.items():
        trainer = without_batchnorm(folder / "runs", **{"per_device_train_batch_size": 4} | settings)
        run = train(trainer)
        keep(f"large-{name}", run.raw[-1], open=logged(trainer, "gate/open"), loss=logged(trainer))

    for name in LIMITED if find_spec("peft") else LIMITED[:1]:
        trainer = without_batchnorm(folder / name, trainable=name, per_device_train_batch_size=4, **SAVING)
        keep(f"limited-{name}", train(trainer).raw[-1])
        trainer.save_model(str(folder / f"limited-{name}"))
        second = without_batchnorm(folder / "other", trainable=name, per_device_train_batch_size=4, **SAVING)
        keep(f"limited-{name}-resumed", train(second, str(folder / name / "checkpoint-3")).raw[-1])

    whole = train(with_batchnorm(folder / "whole", "fixmatch", "joint", steps_per_epoch=4, **SAVING))
    keep("whole", whole.raw[-1])
    second = with_batchnorm(folder / "other", "fixmatch", "joint", steps_per_epoch=4, **SAVING)
    keep("resumed", train(second, str(folder / "whole" / "checkpoint-3")).raw[-1])


# ---- the tests


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        *arguments,
    ]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    result = launch("-m", "tests.slow.test_two_processes", str(folder))
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def kept(folder: Path, name: str, rank: int = 0) -> dict[str, Tensor]:
    return load_file(folder / f"{name}-{rank}.safetensors")


def facts(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{name}-{rank}.json").read_text())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_both_processes_end_with_the_same_weights_and_statistics(
    loss: str, mode: str, launched: Path
) -> None:
    for what in ("raw", "average", "loss"):
        assert_equal(
            kept(launched, f"{what}-{loss}-{mode}", rank=1), kept(launched, f"{what}-{loss}-{mode}", rank=0)
        )
    assert largest_difference(kept(launched, f"raw-{loss}-{mode}"), weights(tiny_wide_resnet())) > 1e-2


@pytest.mark.parametrize("mode", MODES)
def test_what_both_processes_see_of_an_image_is_remembered(mode: str, launched: Path) -> None:
    samplers = [PairedSampler((24, 40), (4, 16), 6, seed=42, rank=rank, world=2) for rank in (0, 1)]
    drawn = [[*first.unlabeled, *second.unlabeled] for first, second in zip(*samplers, strict=True)]
    assert any(len(set(rows)) < len(rows) for rows in drawn)  # an image may come twice in a step
    sums = kept(launched, f"loss-uasd-{mode}")["sums"].sum(1)
    torch.testing.assert_close(
        sums, torch.tensor([float(sum(rows.count(row) for rows in drawn)) for row in range(40)])
    )
    visited = kept(launched, f"loss-mtcf-{mode}")["visited"]
    assert visited.tolist() == [sum(row in rows for rows in drawn) for row in range(40)]


@pytest.mark.parametrize("name", LARGE_BATCHES)
def test_two_processes_are_one_with_twice_the_batch(name: str, launched: Path, tmp_path: Path) -> None:
    settings = {**LARGE_BATCHES[name], "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    trainer = without_batchnorm(tmp_path, **settings)
    run = train(trainer)
    assert set(logged(trainer, "gate/open")) == {0.0, 1.0}
    for rank in (0, 1):
        found = facts(launched, f"large-{name}", rank)
        assert found["open"] == logged(trainer, "gate/open")
        assert found["loss"] == pytest.approx(logged(trainer), abs=1e-5)
        assert_near(kept(launched, f"large-{name}", rank), run.raw[-1])


@pytest.mark.parametrize("name", LIMITED)
def test_a_part_of_a_network_trains_on_two_processes_as_on_one(
    name: str, launched: Path, tmp_path: Path
) -> None:
    if name == "lora":
        pytest.importorskip("peft", reason="peft, the extra of the same name, is not installed")
    alone = without_batchnorm(tmp_path, trainable=name, per_device_train_batch_size=8)
    expected = train(alone).raw
    assert largest_difference(expected[0], expected[-1]) > 1e-3
    assert_near(kept(launched, f"limited-{name}"), expected[-1])
    for run, rank in (("", 1), ("-resumed", 0), ("-resumed", 1)):
        assert_equal(kept(launched, f"limited-{name}{run}", rank), kept(launched, f"limited-{name}"))
    alone.save_model(str(tmp_path / "saved"))
    saved = (
        AutoModelForImageClassification.from_pretrained(f)
        for f in (launched / f"limited-{name}", tmp_path / "saved")
    )
    assert_near(*map(weights, saved))


def test_running_statistics_are_the_mean_over_the_processes(launched: Path, tmp_path: Path) -> None:
    own = []
    for rank in (0, 1):
        settings = {"loss": "pi_model", "mix_labeled": False}
        trainer = without_augmentation(make_trainer(tmp_path, tiny_wide_resnet(bn_momentum=0.5), **settings))
        sampler = trainer.get_train_dataloader().batch_sampler
        sampler.rank, sampler.world = rank, 2
        images = trainer.get_train_dataloader().dataset.__getitems__(next(iter(sampler)))
        rows = torch.cat([images["pixel_values"], images["unlabeled"]]) / 255
        trainer.model.train()(pixel_values=(rows - 0.5) / 0.25)
        own.append(
            {name: value for name, value in trainer.model.named_buffers() if value.is_floating_point()}
        )
    expected = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    found = kept(launched, "statistics")
    assert_near({name: found[name] for name in expected}, expected, within=1e-5)
    assert largest_difference(own[0], own[1]) > 1e-2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_travel_once_through_the_gate_and_never_through_ddp(
    loss: str, mode: str, launched: Path
) -> None:
    assert [facts(launched, f"raw-{loss}-{mode}", rank)["reductions"] for rank in (0, 1)] == [0, 0]


def test_an_interrupted_run_of_two_processes_resumes_to_the_bit(launched: Path) -> None:
    for rank in (0, 1):
        assert_equal(kept(launched, "resumed", rank), kept(launched, "whole", rank))


def test_two_processes_evaluate_what_one_finds_in_the_saved_model(launched: Path) -> None:
    model = AutoModelForImageClassification.from_pretrained(launched / "saved").eval()
    images = random_images(10, seed=3, labeled=True)
    with torch.no_grad():
        answers = model(pixel_values=(images.pixels / 255 - 0.5) / 0.25).logits.argmax(1)
    accuracy = float((answers == images.labels).float().mean())
    for rank in (0, 1):
        assert facts(launched, "saved", rank)["eval_accuracy"] == pytest.approx(accuracy)
        assert_equal(kept(launched, "saved", rank), weights(model))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the processes find each other")
def test_a_launch_of_two_processes_that_would_train_apart_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "apart.py"
    program.write_text(
        "import sys\nfrom hf_fixastep import FixAStepConfig\nFixAStepConfig(output_dir=sys.argv[1])\n"
    )
    result = launch(str(program), str(tmp_path), PYTHONPATH=str(ROOT))
    assert result.returncode != 0
    assert "ValueError: The launcher started 2 processes, but they are in groups of 1" in result.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]))
