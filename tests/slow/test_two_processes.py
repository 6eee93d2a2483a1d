"""Two processes are one run. All runs share one launch, for starting takes longer than training."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import AutoModelForImageClassification, TrainerCallback

from hf_fixastep import FixAStepConfig, FixAStepTrainer
from hf_fixastep.data.loader import PairedSampler
from hf_fixastep.step.gate import GATES
from tests.losses.test_class_weights import skewed
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
from tests.slow import test_kill
from tests.slow.launching import MODES, TWO_PROCESSES, assert_same, facts, keep, kept, launch


pytestmark = pytest.mark.slow

LOSSES = ("mean_teacher", "fixmatch", "pi_model", *STATEFUL)
PARTS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
# Of each process; the one process that they are compared with has 8 images at once.
LARGE_BATCHES: dict[str, dict[str, Any]] = {
    **{gate: {"gate": gate} for gate in GATES},
    **{f"{gate}-parts": {"gate": gate, **PARTS} for gate in ("drop", "project", "per_example")},
}
LOGGED = ("loss", "loss/labeled", "loss/unlabeled", "mask_rate", "gate/cosine", "gate/labeled_norm")
SAVING = {"save_strategy": "steps", "save_steps": 3}
RESUMED: dict[str, Any] = {
    "max_steps": 7,
    "steps_per_epoch": 5,  # in parts of a step: the interruption is inside an epoch
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 1,
    "eval_strategy": "steps",
    "eval_steps": 2,
    **SAVING,
}
LIMITED = ("head_and_norms", "lora")  # what is trained


# ---- what both the launched processes and this one can do


def with_batchnorm(
    folder: Path, loss: str, mode: str, kind: type[FixAStepTrainer] = FixAStepTrainer, **settings: Any
) -> FixAStepTrainer:
    objects = {"eval_dataset": random_images(10, seed=3, labeled=True)}
    settings = {"loss": loss, "batchnorm": mode, "max_steps": 6, "teacher_decay": 0.9} | settings
    if loss == "fixmatch":
        settings["loss_kwargs"] = EAGER
    if loss == "vat":
        settings["loss_kwargs"] = {"xi": 1.0}  # a smaller probe magnifies rounding
    if loss in STATEFUL:
        settings |= {"loss_kwargs": STATEFUL[loss], "unlabeled_ratio": 4.0, "unlabeled_warmup_steps": 0.0}
    return make_trainer(folder, tiny_wide_resnet(bn_momentum=0.5), kind, objects, **settings)


def without_batchnorm(
    folder: Path, kind: type[FixAStepTrainer] = FixAStepTrainer, objects: Any = None, **settings: Any
) -> FixAStepTrainer:
    """Rows do not meet, and there is nothing random: n processes are one with n times the batch."""
    defaults = {
        "loss": "fixmatch",
        "loss_kwargs": EAGER,
        "mix_labeled": False,
        "max_steps": 6,
        "teacher_decay": 0.9,
        "per_device_train_batch_size": 4,
    }
    return without_augmentation(make_trainer(folder, tiny_vit(), kind, objects, **defaults | settings))


def evaluations(trainer: FixAStepTrainer) -> list[float]:
    return [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]


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
    if not torch.cuda.is_available():  # there the processes find each other
        with pytest.raises(ValueError, match="launcher started 2 processes, but they are in groups of 1"):
            FixAStepConfig(output_dir=str(folder / "apart"))
        AcceleratorState._reset_state(reset_partial_state=True)

    for loss in LOSSES:
        for mode in MODES:
            trainer = with_batchnorm(folder / "runs", loss, mode)
            counter = CountReductions(trainer)
            trainer.add_callback(counter)
            run = train(trainer)
            keep(folder, f"raw-{loss}-{mode}", run.raw[-1], reductions=counter.count)
            keep(folder, f"average-{loss}-{mode}", run.averaged[-1])
            keep(folder, f"loss-{loss}-{mode}", weights(trainer.loss))

    trainer.save_model(str(folder / "saved"))
    keep(folder, "saved", weights(trainer.model), **trainer.evaluate())

    settings = {"mix_labeled": False, "max_steps": 1}
    trainer = without_augmentation(with_batchnorm(folder / "runs", "pi_model", "joint", **settings))
    keep(folder, "statistics", train(trainer).raw[-1])

    for name, settings in LARGE_BATCHES.items():
        trainer = without_batchnorm(folder / "runs", **settings)
        run = train(trainer)
        log = {key: logged(trainer, key) for key in ("gate/open", *LOGGED)}
        keep(folder, f"large-{name}", run.raw[-1], **log)
        keep(folder, f"large-{name}-average", run.averaged[-1])
    keep(folder, "weighted", train(skewed(folder / "runs", per_device_train_batch_size=4)).raw[-1])

    for name in LIMITED if find_spec("peft") else LIMITED[:1]:
        trainer = without_batchnorm(folder / name, trainable=name, **SAVING)
        keep(folder, f"limited-{name}", train(trainer).raw[-1])
        trainer.save_model(str(folder / f"limited-{name}"))
        second = without_batchnorm(folder / "other", trainable=name, **SAVING)
        run = train(second, str(folder / name / "checkpoint-3"))
        keep(folder, f"limited-{name}-resumed", run.raw[-1])

    for name, checkpoint in (("whole", None), ("resumed", str(folder / "whole/checkpoint-3"))):
        trainer = with_batchnorm(folder / name, "fixmatch", "joint", **RESUMED)
        run = train(trainer, checkpoint)
        keep(folder, name, run.raw[-1], evaluated=evaluations(trainer))
        keep(folder, f"{name}-average", run.averaged[-1])
    test_kill.main_of_two(folder / "signal")


# ---- the tests


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("launched"), "tests.slow.test_two_processes", *TWO_PROCESSES)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_both_processes_end_with_the_same_and_ddp_reduces_nothing_on_its_own(
    loss: str, mode: str, launched: Path
) -> None:
    for what in ("raw", "average", "loss"):
        assert_same(launched, f"{what}-{loss}-{mode}")
    assert largest_difference(kept(launched, f"raw-{loss}-{mode}"), weights(tiny_wide_resnet())) > 1e-2
    assert [facts(launched, f"raw-{loss}-{mode}", rank)["reductions"] for rank in (0, 1)] == [0, 0]


@pytest.mark.parametrize("mode", MODES)
def test_what_both_processes_see_of_an_image_is_remembered(mode: str, launched: Path) -> None:
    samplers = [PairedSampler((24, 40), (4, 16), 6, seed=42, rank=rank, world=2) for rank in (0, 1)]
    drawn = [[*first.unlabeled, *second.unlabeled] for first, second in zip(*samplers, strict=True)]
    assert any(len(set(rows)) < len(rows) for rows in drawn)  # an image may come twice in a step
    sums = kept(launched, f"loss-uasd-{mode}")["sums"].sum(1)
    seen = [float(sum(rows.count(row) for rows in drawn)) for row in range(40)]
    torch.testing.assert_close(sums, torch.tensor(seen))
    visited = kept(launched, f"loss-mtcf-{mode}")["visited"]
    assert visited.tolist() == [sum(row in rows for rows in drawn) for row in range(40)]


def assert_same_as_alone(folder: Path, name: str, alone: FixAStepTrainer) -> None:
    """Weights, average, decisions and log are those of one process that has all images of a step at once."""
    expected = train(alone)
    opened = logged(alone, "gate/open")
    # The keys' bias of an attention has no gradient but rounding, so its own gate is a toss of a coin.
    one_tensor = 1.1 / len(list(alone.model.parameters())) if alone.args.gate == "layerwise" else 0
    for rank in (0, 1):
        found = facts(folder, name, rank)
        assert found["gate/open"] == pytest.approx(opened, abs=one_tensor)
        for key in LOGGED:
            assert found[key] == pytest.approx(logged(alone, key), abs=1e-5)
        assert_near(kept(folder, name, rank), expected.raw[-1])
        assert_near(kept(folder, f"{name}-average", rank), expected.averaged[-1])
    if alone.args.gate in ("drop", "project"):
        assert set(opened) == {0.0, 1.0}
    if alone.args.gate == "per_example":
        assert len(set(opened) - {0.0, 1.0}) > 1


@pytest.mark.parametrize("name", LARGE_BATCHES)
def test_two_processes_are_one_with_twice_the_batch(name: str, launched: Path, tmp_path: Path) -> None:
    gate = LARGE_BATCHES[name]["gate"]
    alone = without_batchnorm(tmp_path, gate=gate, per_device_train_batch_size=8)
    assert_same_as_alone(launched, f"large-{name}", alone)


def test_class_weights_are_those_of_all_labels(launched: Path, tmp_path: Path) -> None:
    alone = train(skewed(tmp_path, per_device_train_batch_size=8)).raw[-1]
    for rank in (0, 1):
        assert_near(kept(launched, "weighted", rank), alone)


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
    assert_same(launched, f"limited-{name}", f"limited-{name}-resumed")
    alone.save_model(str(tmp_path / "saved"))
    folders = (launched / f"limited-{name}", tmp_path / "saved")
    assert_near(*(weights(AutoModelForImageClassification.from_pretrained(folder)) for folder in folders))


def test_running_statistics_are_the_mean_over_the_processes(launched: Path, tmp_path: Path) -> None:
    own: list[dict[str, Tensor]] = []
    for rank in (0, 1):
        settings = {"loss": "pi_model", "mix_labeled": False}
        trainer = without_augmentation(make_trainer(tmp_path, tiny_wide_resnet(bn_momentum=0.5), **settings))
        sampler = trainer.get_train_dataloader().batch_sampler
        sampler.rank, sampler.world = rank, 2
        images = trainer.get_train_dataloader().dataset.__getitems__(next(iter(sampler)))
        rows = torch.cat([images["pixel_values"], images["unlabeled"]]) / 255
        trainer.model.train()(pixel_values=(rows - 0.5) / 0.25)
        own.append({name: b for name, b in trainer.model.named_buffers() if b.is_floating_point()})
    expected = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    found = kept(launched, "statistics")
    assert_near({name: found[name] for name in expected}, expected, within=1e-5)
    assert largest_difference(own[0], own[1]) > 1e-2


def test_an_interrupted_run_of_two_processes_resumes_to_the_bit(launched: Path) -> None:
    """Inside an epoch, with a worker, in parts of a step."""
    assert_same(launched, "whole", "resumed")
    assert_same(launched, "whole-average", "resumed-average")
    assert facts(launched, "whole")["evaluated"] == facts(launched, "resumed")["evaluated"]
    saved = AutoModelForImageClassification.from_pretrained(launched / "whole/checkpoint-7")
    assert_equal(weights(saved), kept(launched, "whole-average"))


def test_two_processes_evaluate_what_one_finds_in_the_saved_model(launched: Path) -> None:
    model = AutoModelForImageClassification.from_pretrained(launched / "saved").eval()
    images = random_images(10, seed=3, labeled=True)
    with torch.no_grad():
        answers = model(pixel_values=(images.pixels / 255 - 0.5) / 0.25).logits.argmax(1)
    accuracy = float((answers == images.labels).float().mean())
    for rank in (0, 1):
        assert facts(launched, "saved", rank)["eval_accuracy"] == pytest.approx(accuracy)
        assert_equal(kept(launched, "saved", rank), weights(model))


def test_a_signal_to_one_of_two_processes_stops_both_after_the_same_step(launched: Path) -> None:
    folder = launched / "signal"
    for rank in (0, 1):
        found = facts(folder, "report", rank)
        assert found == {"code": 143, "checkpoints": ["checkpoint-2", "checkpoint-3"]}
    test_kill.assert_ends_like(folder / "stopped", folder / "whole", ranks=2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
