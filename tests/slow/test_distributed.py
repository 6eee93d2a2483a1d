"""One gate on several processes, in every way to launch them. All runs share one launch, for starting takes
long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForImageClassification, TrainerCallback

from hf_fixastep import FixAStepTrainer
from hf_fixastep.data.loader import generator_for
from hf_fixastep.losses.base import Losses
from hf_fixastep.losses.fixmatch import FixMatch
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.gate import LABELED, UNLABELED
from tests.short_runs import (
    EAGER,
    assert_equal,
    assert_near,
    largest_difference,
    logged,
    make_trainer,
    random_images,
    tiny_vit,
    tiny_wide_resnet,
    weights,
    without_augmentation,
)
from tests.slow.test_two_processes import MODES, ROOT, launch


pytestmark = pytest.mark.slow

STEPS = 20
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp-parts": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "fsdp": {},
    "fsdp-parts": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
}
GATES = ("drop", "project")
UNLABELED_OVERFLOW, LABELED_OVERFLOW = 2, 4  # steps
OTHER_GATES = ("layerwise", "off")
NORMALIZED = [(loss, mode) for loss in ("mean_teacher", "fixmatch", "vat") for mode in MODES]
RESUMED: dict[str, Any] = {
    "max_steps": 7,
    "steps_per_epoch": 5,  # in parts of a step: the interruption is inside an epoch
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 1,
    "save_strategy": "steps",
    "save_steps": 3,
    "eval_strategy": "steps",
    "eval_steps": 2,
}


# ---- what both the launched processes and this one can do


class Sharded(FixAStepTrainer):
    """On a CPU Accelerate (1.15) takes any FSDP launch for DDP, so FSDP2 is forced."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            state_dict_type="FULL_STATE_DICT",
            cpu_ram_efficient_loading=False,
        )
        self.is_fsdp_enabled = True


class Whole(TrainerCallback):
    """Keeps the raw and the averaged weights of the last step, whole."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.raw, self.averaged = whole(self.trainer.core_model), whole(self.trainer.teacher.model)


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in weights(model).items()
    }


def train(trainer: FixAStepTrainer, resume_from_checkpoint: str | None = None) -> Whole:
    seen = Whole(trainer)
    trainer.add_callback(seen)
    trainer.train(resume_from_checkpoint)
    return seen


def without_batchnorm(
    folder: Path, kind: type = FixAStepTrainer, objects: Any = None, **settings: Any
) -> Any:
    """Rows do not meet, and there is nothing random: n processes are one with n times the batch."""
    defaults = {
        "loss": "fixmatch",
        "loss_kwargs": EAGER,
        "mix_labeled": False,
        "unlabeled_ratio": 2.0,
        "max_steps": STEPS,
        "teacher_decay": 0.9,
        "per_device_train_batch_size": 8,
    }
    return without_augmentation(make_trainer(folder, tiny_vit(), kind, objects, **defaults | settings))


def with_batchnorm(folder: Path, loss: str, mode: str, kind: type = FixAStepTrainer, **settings: Any) -> Any:
    objects = {"eval_dataset": random_images(10, seed=3, labeled=True)}
    settings = {"loss": loss, "batchnorm": mode, "max_steps": 6, "teacher_decay": 0.9} | settings
    if loss == "fixmatch":
        settings["loss_kwargs"] = EAGER
    return make_trainer(folder, tiny_wide_resnet(bn_momentum=0.5), kind, objects, **settings)


class Learned(FixMatch):
    """Has a parameter and running statistics of its own."""

    separable = False

    def __init__(self, start: float = 1.0) -> None:
        super().__init__(**EAGER)
        self.scale = nn.Parameter(torch.tensor(start))
        self.register_buffer("confidence", torch.tensor(0.0))

    def forward(self, model: nn.Module, batch: SemiBatch, teacher: nn.Module | None) -> Losses:
        losses = super().forward(model, batch, teacher)
        self.confidence.lerp_(losses.labeled.detach(), 0.1)
        losses.labeled = losses.labeled * self.scale.square()
        losses.unlabeled = losses.unlabeled * self.scale
        return losses


class Overflowing(FixAStepTrainer):
    """Trains with the scaler of fp16; the last process alone overflows in two steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.args.mixed_precision = "fp16"
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def _backward(self, row: int, loss: Tensor, **kwargs: Any) -> None:
        bad = self.state.global_step + 1 == {LABELED: LABELED_OVERFLOW, UNLABELED: UNLABELED_OVERFLOW}[row]
        if bad and self.args.process_index == self.args.world_size - 1:
            loss = loss * torch.inf
        super()._backward(row, loss, **kwargs)


class ShardedOverflowing(Overflowing, Sharded):
    pass


class Steps(TrainerCallback):
    """Keeps the classifier, its average and the scale of every step."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer, self.seen = trainer, {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, model in (("raw", self.trainer.core_model), ("average", self.trainer.teacher.model)):
            self.seen[f"{name} {state.global_step}"] = whole(model)["classifier.weight"]
        self.seen[f"scale {state.global_step}"] = torch.tensor(self.trainer.accelerator.scaler.get_scale())


# ---- the launched script


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])

    def keep(name: str, state: dict[str, Tensor], **facts: Any) -> None:
        save_file(
            {key: value.contiguous() for key, value in state.items()}, folder / f"{name}-{rank}.safetensors"
        )
        (folder / f"{name}-{rank}.json").write_text(json.dumps(facts))

    def keep_run(name: str, trainer: FixAStepTrainer, checkpoint: str | None = None) -> None:
        run = train(trainer, checkpoint)
        names = {name for row in trainer.state.log_history if "loss" in row for name in row}
        names -= {"gate/cosines", "grad_norm"}
        keep(name, run.raw, **{name: logged(trainer, name) for name in sorted(names)})
        keep(f"{name}-average", run.averaged, evaluated=evaluations(trainer))

    keep_run("bf16", with_batchnorm(folder / "runs", "mean_teacher", "joint", bf16=True))
    AcceleratorState._reset_state()  # its precision cannot be changed
    learned = Learned(start=1.0 + rank)  # rank 0's counts
    keep_run("learned", without_batchnorm(folder / "runs", objects={"loss": learned}, max_steps=6))
    keep("learned-loss", learned.state_dict())
    keep("draws", {"draws": torch.rand(4, generator=generator_for(0, rank, 5, "mix"))})

    for kind, ways in ((FixAStepTrainer, ("ddp", "ddp-parts")), (Sharded, ("fsdp", "fsdp-parts"))):
        for way in ways:
            for gate in GATES:
                keep_run(f"{way}-{gate}", without_batchnorm(folder / "runs", kind, gate=gate, **WAYS[way]))
        way = ways[0]
        for gate in OTHER_GATES:
            keep_run(f"{way}-{gate}", without_batchnorm(folder / "runs", kind, gate=gate, max_steps=6))
        overflowing = Overflowing if kind is FixAStepTrainer else ShardedOverflowing
        trainer = without_batchnorm(folder / "runs", overflowing, max_steps=5)
        steps = Steps(trainer)
        trainer.add_callback(steps)
        trainer.train()
        keep(f"{way}-overflow", steps.seen, nonfinite=logged(trainer, "nonfinite/unlabeled"))
        for loss, mode in NORMALIZED:
            trainer = with_batchnorm(folder / "runs", loss, mode, kind, eval_strategy="steps", eval_steps=2)
            keep_run(f"{way}-{loss}-{mode}", trainer)
        trainer.save_model(str(folder / f"{way}-saved"))
        keep(f"{way}-saved", whole(trainer.model))
        keep_run(
            f"{way}-whole", with_batchnorm(folder / f"{way}-whole", "mean_teacher", "joint", kind, **RESUMED)
        )
        second = with_batchnorm(folder / f"{way}-other", "mean_teacher", "joint", kind, **RESUMED)
        keep_run(f"{way}-resumed", second, str(folder / f"{way}-whole" / "checkpoint-3"))


def compiled(folder: Path) -> None:
    """In a process of its own: the Trainer leaves the setting in the environment."""
    for mode in MODES:
        run = train(with_batchnorm(folder, "mean_teacher", mode, max_steps=3, torch_compile=True))
        save_file(
            {name: value.contiguous() for name, value in run.raw.items()}, folder / f"{mode}.safetensors"
        )


def evaluations(trainer: FixAStepTrainer) -> list[float]:
    return [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]


# ---- the tests


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    result = launch("-m", "tests.slow.test_distributed", str(folder), FSDP_VERSION="2")
    assert result.returncode == 0, result.stderr[-6000:]
    return folder


def kept(folder: Path, name: str, rank: int = 0) -> dict[str, Tensor]:
    return load_file(folder / f"{name}-{rank}.safetensors")


def facts(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    return json.loads((folder / f"{name}-{rank}.json").read_text())


@pytest.fixture(scope="module", params=GATES)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Whole]:
    """One process with all the images of a step at once."""
    settings = {"gate": request.param, "per_device_train_batch_size": 16}
    trainer = without_batchnorm(tmp_path_factory.mktemp("alone"), **settings)
    return request.param, trainer, train(trainer)


def test_one_process_in_four_parts_is_one_at_once(alone: tuple[str, Any, Whole], tmp_path: Path) -> None:
    gate, whole_run, expected = alone
    trainer = without_batchnorm(
        tmp_path, gate=gate, per_device_train_batch_size=4, gradient_accumulation_steps=4
    )
    assert_near(train(trainer).raw, expected.raw)
    assert logged(trainer, "gate/open") == logged(whole_run, "gate/open")
    assert set(logged(trainer, "gate/open")) == {0.0, 1.0}


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_are_one_with_twice_the_batch(
    way: str, alone: tuple[str, Any, Whole], launched: Path
) -> None:
    gate, trainer, expected = alone
    for rank in (0, 1):
        assert facts(launched, f"{way}-{gate}", rank)["gate/open"] == logged(trainer, "gate/open")
        assert_near(kept(launched, f"{way}-{gate}", rank), expected.raw)
        assert_near(kept(launched, f"{way}-{gate}-average", rank), expected.averaged)


@pytest.mark.parametrize(
    "name", ["loss", "loss/labeled", "loss/unlabeled", "mask_rate", "gate/cosine", "gate/labeled_norm"]
)
@pytest.mark.parametrize("way", WAYS)
def test_the_log_of_two_processes_is_that_of_one(
    way: str, name: str, alone: tuple[str, Any, Whole], launched: Path
) -> None:
    gate, trainer, _ = alone
    for rank in (0, 1):
        assert facts(launched, f"{way}-{gate}", rank)[name] == pytest.approx(logged(trainer, name), abs=1e-5)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("gate", OTHER_GATES)
def test_the_other_gates_do_the_same_on_two_processes(
    gate: str, way: str, launched: Path, tmp_path: Path
) -> None:
    trainer = without_batchnorm(tmp_path, gate=gate, max_steps=6, per_device_train_batch_size=16)
    assert_near(kept(launched, f"{way}-{gate}"), train(trainer).raw)
    # The keys' bias of an attention has no gradient but rounding, so its own gate is a toss of a coin.
    one_tensor = 1.1 / len(list(trainer.model.parameters()))
    assert facts(launched, f"{way}-{gate}")["gate/open"] == pytest.approx(
        logged(trainer, "gate/open"), abs=one_tensor
    )


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize(("loss", "mode"), NORMALIZED)
def test_both_processes_end_with_the_same_weights_and_statistics(
    loss: str, mode: str, way: str, launched: Path
) -> None:
    for name in (f"{way}-{loss}-{mode}", f"{way}-{loss}-{mode}-average"):
        assert_equal(kept(launched, name, rank=1), kept(launched, name, rank=0))
    assert largest_difference(kept(launched, name), weights(tiny_wide_resnet())) > 1e-2


@pytest.mark.parametrize(("loss", "mode"), NORMALIZED)
def test_sharding_changes_nothing(loss: str, mode: str, launched: Path) -> None:
    """With batch norm, mixing, augmentation, teacher and evaluations in between."""
    # FSDP2 has no channels_last, and VAT looks so close at differences that it sees the other order of sums.
    within = 5e-3 if loss == "vat" else 2e-6
    for what in ("", "-average"):
        found, expected = (kept(launched, f"{way}-{loss}-{mode}{what}") for way in ("fsdp", "ddp"))
        assert_near(found, expected, within)
    evaluated = [facts(launched, f"{way}-{loss}-{mode}-average")["evaluated"] for way in ("fsdp", "ddp")]
    assert len(evaluated[0]) == 3
    assert evaluated[0] == pytest.approx(evaluated[1], abs=5 * within)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_an_interrupted_run_resumes_to_the_bit(way: str, launched: Path) -> None:
    """Inside an epoch, with a worker, in parts of a step."""
    for what in ("", "-average"):
        for rank in (0, 1):
            assert_equal(
                kept(launched, f"{way}-resumed{what}", rank), kept(launched, f"{way}-whole{what}", rank)
            )
    evaluated = [facts(launched, f"{way}-{run}-average")["evaluated"] for run in ("resumed", "whole")]
    assert evaluated[0] == evaluated[1]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_the_saved_model_is_the_average(way: str, launched: Path) -> None:
    model = AutoModelForImageClassification.from_pretrained(launched / f"{way}-saved")
    loss, mode = NORMALIZED[-1]
    assert_equal(weights(model), kept(launched, f"{way}-{loss}-{mode}-average"))
    assert_equal(weights(model), kept(launched, f"{way}-saved", rank=1))


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_checkpoint_holds_the_average(way: str, launched: Path) -> None:
    model = AutoModelForImageClassification.from_pretrained(launched / f"{way}-whole" / "checkpoint-7")
    assert_equal(weights(model), kept(launched, f"{way}-whole-average"))


def test_what_a_loss_learns_is_the_same_on_two_processes_and_on_one(launched: Path, tmp_path: Path) -> None:
    loss = Learned()
    trainer = without_batchnorm(tmp_path, objects={"loss": loss}, max_steps=6, per_device_train_batch_size=16)
    run = train(trainer)
    for rank in (0, 1):
        assert_near(kept(launched, "learned", rank), run.raw)
        assert_near(kept(launched, "learned-loss", rank), loss.state_dict())
    assert abs(loss.scale.item() - 1) > 1e-2


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_an_overflow_on_one_process_skips_the_step_on_all(way: str, launched: Path) -> None:
    steps = kept(launched, f"{way}-overflow")
    assert_equal(kept(launched, f"{way}-overflow", rank=1), steps)
    for step in range(2, 6):
        overflow = step in (UNLABELED_OVERFLOW, LABELED_OVERFLOW)
        assert (steps[f"scale {step}"] == steps[f"scale {step - 1}"] / 2) == overflow
        for name in ("raw", "average"):
            assert torch.equal(steps[f"{name} {step}"], steps[f"{name} {step - 1}"]) == overflow
    assert steps["raw 5"].isfinite().all()


def test_bf16_on_two_processes_is_near_float32(launched: Path) -> None:
    assert_equal(kept(launched, "bf16", rank=1), kept(launched, "bf16", rank=0))
    found, expected = kept(launched, "bf16"), kept(launched, "ddp-mean_teacher-joint")
    assert found.keys() == expected.keys()
    assert 1e-5 < largest_difference(found, expected) < 0.5
    assert all(value.dtype != torch.bfloat16 for value in found.values())


def test_a_compiled_model_trains_to_the_same_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.slow.test_distributed", str(tmp_path), "compiled"]
    result = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for mode in MODES:
        expected = train(with_batchnorm(tmp_path, "mean_teacher", mode, max_steps=3)).raw
        assert_near(load_file(tmp_path / f"{mode}.safetensors"), expected, within=1e-5)


def test_processes_draw_different_numbers(launched: Path) -> None:
    assert not torch.equal(kept(launched, "draws", 0)["draws"], kept(launched, "draws", 1)["draws"])


if __name__ == "__main__":
    (compiled if "compiled" in sys.argv else main)(Path(sys.argv[1]))
