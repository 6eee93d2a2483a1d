"""FSDP2, overflows, bf16, procedures and compiled models. All launched runs share one launch."""

from __future__ import annotations

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
from hf_fixastep.losses.base import Losses
from hf_fixastep.losses.fixmatch import FixMatch
from hf_fixastep.procedures import CurriculumLabeling, Procedure, SafeStudent
from hf_fixastep.step.batch import SemiBatch
from hf_fixastep.step.gate import LABELED, UNLABELED
from tests.procedures import test_procedures
from tests.short_runs import (
    EAGER,
    assert_equal,
    assert_near,
    largest_difference,
    logged,
    tiny_wide_resnet,
    weights,
)
from tests.slow.launching import MODES, ROOT, TWO_PROCESSES, assert_same, facts, keep, kept, launch
from tests.slow.test_two_processes import (
    LARGE_BATCHES,
    LOGGED,
    RESUMED,
    assert_same_as_alone,
    evaluations,
    with_batchnorm,
    without_batchnorm,
)
from tests.test_resume import Interrupted


pytestmark = pytest.mark.slow

UNLABELED_OVERFLOW, LABELED_OVERFLOW = 2, 4  # steps
NORMALIZED = [(loss, mode) for loss in ("mean_teacher", "fixmatch", "vat") for mode in MODES]
# A procedure, and the training after whose second step it breaks off.
PROCEDURES: dict[str, tuple[Procedure, str]] = {
    "curriculum": (CurriculumLabeling(percent=50), "round-1"),
    "safe": (SafeStudent(iterations=2), "student-1"),
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
    def keep_run(name: str, trainer: FixAStepTrainer, checkpoint: str | None = None) -> None:
        run = train(trainer, checkpoint)
        found = {name for row in trainer.state.log_history for name in row}
        log = {key: logged(trainer, key) for key in ("gate/open", *LOGGED) if key in found}
        keep(folder, name, run.raw, **log)
        keep(folder, f"{name}-average", run.averaged, evaluated=evaluations(trainer))

    keep_run("bf16", with_batchnorm(folder / "runs", "mean_teacher", "joint", bf16=True))
    AcceleratorState._reset_state()  # its precision cannot be changed
    learned = Learned(start=1.0 + int(os.environ["RANK"]))  # rank 0's counts
    keep_run("learned", without_batchnorm(folder / "runs", objects={"loss": learned}))
    keep(folder, "learned-loss", learned.state_dict())
    run_procedures(folder)

    for way, kind, overflowing in (
        ("ddp", FixAStepTrainer, Overflowing),
        ("fsdp", Sharded, ShardedOverflowing),  # last, for there is no way back
    ):
        trainer = without_batchnorm(folder / "runs", overflowing, max_steps=5)
        steps = Steps(trainer)
        trainer.add_callback(steps)
        trainer.train()
        keep(folder, f"{way}-overflow", steps.seen)
        for loss, mode in NORMALIZED:
            trainer = with_batchnorm(folder / "runs", loss, mode, kind, eval_strategy="steps", eval_steps=2)
            keep_run(f"{way}-{loss}-{mode}", trainer)

    trainer.save_model(str(folder / "saved"))
    keep(folder, "saved", whole(trainer.model))
    for name, settings in LARGE_BATCHES.items():
        keep_run(f"large-{name}", without_batchnorm(folder / "runs", Sharded, **settings))
    for name, checkpoint in (("whole", None), ("resumed", str(folder / "whole/checkpoint-3"))):
        keep_run(name, with_batchnorm(folder / name, "mean_teacher", "joint", Sharded, **RESUMED), checkpoint)
    refusal = "^A procedure predicts between its trainings, which FSDP2 cannot do"
    with pytest.raises(ValueError, match=refusal):
        test_procedures.run(PROCEDURES["safe"][0], folder / "refused", kind=Sharded)
    with pytest.raises(ValueError, match=refusal):  # as in a recipe
        test_procedures.template(folder / "refused", Sharded, procedure="safe_student")


def run_procedures(folder: Path) -> None:
    for name, (procedure, broken_off) in PROCEDURES.items():
        whole_run = test_procedures.run(procedure, folder / name / "whole")
        keep(folder, f"{name}-whole", weights(whole_run.model))
        with pytest.raises(Interrupted):
            test_procedures.run(
                procedure, folder / name / "parts", kind=test_procedures.interrupting(broken_off, 2)
            )
        resumed = test_procedures.run(procedure, folder / name / "parts", resume=True)
        keep(folder, f"{name}-parts", weights(resumed.model))


def compiled(folder: Path) -> None:
    """In a process of its own: the Trainer leaves the setting in the environment."""
    for mode in MODES:
        run = train(with_batchnorm(folder, "mean_teacher", mode, max_steps=3, torch_compile=True))
        state = {name: value.contiguous() for name, value in run.raw.items()}
        save_file(state, folder / f"{mode}.safetensors")


# ---- the tests


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    return launch(folder, "tests.slow.test_distributed", *TWO_PROCESSES, FSDP_VERSION="2")


@pytest.mark.parametrize("gate", ["drop", "project"])
def test_one_process_in_four_parts_is_one_at_once(gate: str, tmp_path: Path) -> None:
    trainers, runs = [], []
    for batch, parts in ((16, 1), (4, 4)):
        settings = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": parts}
        trainers.append(without_batchnorm(tmp_path, gate=gate, max_steps=20, unlabeled_ratio=2.0, **settings))
        runs.append(train(trainers[-1]))
    assert_near(runs[1].raw, runs[0].raw)
    assert logged(trainers[1], "gate/open") == logged(trainers[0], "gate/open")
    assert set(logged(trainers[0], "gate/open")) == {0.0, 1.0}


@pytest.mark.parametrize("name", LARGE_BATCHES)
def test_two_shards_are_one_process_with_twice_the_batch(name: str, launched: Path, tmp_path: Path) -> None:
    gate = LARGE_BATCHES[name]["gate"]
    alone = without_batchnorm(tmp_path, gate=gate, per_device_train_batch_size=8)
    assert_same_as_alone(launched, f"large-{name}", alone)


@pytest.mark.parametrize(("loss", "mode"), NORMALIZED)
def test_sharding_changes_nothing(loss: str, mode: str, launched: Path) -> None:
    """With batch norm, mixing, augmentation, teacher and evaluations in between."""
    # FSDP2 has no channels_last, and VAT magnifies the other order of sums.
    within = 5e-4 if loss == "vat" else 4e-6  # of running variances, up to 5
    for what in ("", "-average"):
        for way in ("ddp", "fsdp"):
            assert_same(launched, f"{way}-{loss}-{mode}{what}")
        found, expected = (kept(launched, f"{way}-{loss}-{mode}{what}") for way in ("fsdp", "ddp"))
        assert_near(found, expected, within)
        assert largest_difference(found, weights(tiny_wide_resnet())) > 1e-2
    evaluated = [facts(launched, f"{way}-{loss}-{mode}-average")["evaluated"] for way in ("fsdp", "ddp")]
    assert len(evaluated[0]) == 3
    assert evaluated[0] == pytest.approx(evaluated[1], abs=5 * within)


def test_an_interrupted_run_of_shards_resumes_to_the_bit(launched: Path) -> None:
    """Inside an epoch, with a worker, in parts of a step."""
    assert_same(launched, "whole", "resumed")
    assert_same(launched, "whole-average", "resumed-average")
    evaluated = [facts(launched, f"{run}-average")["evaluated"] for run in ("resumed", "whole")]
    assert evaluated[0] == evaluated[1]


def test_what_shards_save_is_the_whole_average(launched: Path) -> None:
    loss, mode = NORMALIZED[-1]
    for folder, average in (
        ("saved", f"fsdp-{loss}-{mode}-average"),
        ("whole/checkpoint-7", "whole-average"),
    ):
        model = AutoModelForImageClassification.from_pretrained(launched / folder)
        assert_equal(weights(model), kept(launched, average))
    assert_same(launched, f"fsdp-{loss}-{mode}-average", "saved")


def test_what_a_loss_learns_is_the_same_on_two_processes_and_on_one(launched: Path, tmp_path: Path) -> None:
    loss = Learned()
    run = train(without_batchnorm(tmp_path, objects={"loss": loss}, per_device_train_batch_size=8))
    for rank in (0, 1):
        assert_near(kept(launched, "learned", rank), run.raw)
        assert_near(kept(launched, "learned-loss", rank), loss.state_dict())
    assert abs(loss.scale.item() - 1) > 1e-2


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_an_overflow_on_one_process_skips_the_step_on_all(way: str, launched: Path) -> None:
    steps = kept(launched, f"{way}-overflow")
    assert_same(launched, f"{way}-overflow")
    for step in range(2, 6):
        overflow = step in (UNLABELED_OVERFLOW, LABELED_OVERFLOW)
        assert (steps[f"scale {step}"] == steps[f"scale {step - 1}"] / 2) == overflow
        for name in ("raw", "average"):
            assert torch.equal(steps[f"{name} {step}"], steps[f"{name} {step - 1}"]) == overflow
    assert steps["raw 5"].isfinite().all()


def test_bf16_on_two_processes_is_near_float32(launched: Path) -> None:
    assert_same(launched, "bf16")
    found, expected = kept(launched, "bf16"), kept(launched, "ddp-mean_teacher-joint")
    assert found.keys() == expected.keys()
    assert 1e-5 < largest_difference(found, expected) < 0.5
    assert all(value.dtype != torch.bfloat16 for value in found.values())


@pytest.mark.parametrize("name", PROCEDURES)
def test_a_procedure_on_two_processes_resumes_to_the_bit(name: str, launched: Path, tmp_path: Path) -> None:
    assert_same(launched, f"{name}-whole", f"{name}-parts")
    assert not list((launched / "refused").glob("*"))  # what FSDP2 refuses leaves nothing
    alone = test_procedures.run(PROCEDURES[name][0], tmp_path)  # which sees half of the images
    assert largest_difference(weights(alone.model), kept(launched, f"{name}-whole")) > 1e-5


def test_a_compiled_model_trains_to_the_same_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.slow.test_distributed", str(tmp_path), "compiled"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=variables, stderr=subprocess.PIPE)
    assert result.returncode == 0, result.stderr[-3000:]
    for mode in MODES:
        expected = train(with_batchnorm(tmp_path, "mean_teacher", mode, max_steps=3)).raw
        assert_near(load_file(tmp_path / f"{mode}.safetensors"), expected, within=1e-5)


if __name__ == "__main__":
    (compiled if "compiled" in sys.argv else main)(Path(sys.argv[1]))
