"""The hand-written loop of recipes/accelerate_loop.py takes the steps of the Trainer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor
from transformers import PrinterCallback

from hf_fixastep import FixAStepConfig, FixAStepTrainer, get_loss, load_dataset
from hf_fixastep.runs.arguments import DataArguments, ModelArguments, parse
from hf_fixastep.runs.training import load_model
from recipes import accelerate_loop
from tests.short_runs import Recorder, assert_near, largest_difference, logged, train, weights


ROOT = Path(__file__).parents[1]
STEPS = 20
THRESHOLD = 0.3  # instead of 0.95, which an untrained network does not reach


@pytest.fixture(scope="module")
def data() -> Any:
    return load_dataset("digits_open_set", "zeta50", labels_per_class=5, seed=0)


@pytest.fixture(scope="module")
def by_trainer(data: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[FixAStepTrainer, Recorder]:
    """Twenty steps of the recipe for train.py."""
    recipe, folder = ROOT / "recipes/digits/fixmatch.yaml", tmp_path_factory.mktemp("run")
    quiet = "--disable_tqdm true --report_to none --log_level error --logging_steps 1 --use_cpu true"
    lean = "--save_strategy no --eval_strategy no --load_best_model_at_end false"
    settings = [*quiet.split(), *lean.split(), "--loss_kwargs", f"{{threshold: {THRESHOLD}}}"]
    argv = ["--config", str(recipe), "--max_steps", str(STEPS), "--output_dir", str(folder), *settings]
    _, model_args, args, _ = parse((DataArguments, ModelArguments, FixAStepConfig), argv)
    set_seed(args.seed)
    model, processor = load_model(model_args, accelerate_loop.CLASSES, args.preset)
    parts = {
        "train_dataset": data["labeled"],
        "unlabeled_dataset": data["unlabeled"],
        "processing_class": processor,
    }
    trainer = FixAStepTrainer(model, args, **parts)
    trainer.remove_callback(PrinterCallback)
    return trainer, train(trainer)


@pytest.fixture(scope="module")
def by_loop(data: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Raw and averaged weights after the same steps of the loop."""
    set_seed(accelerate_loop.SEED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate_loop, "get_loss", partial(get_loss, threshold=THRESHOLD))
        model, teacher = accelerate_loop.train(Accelerator(cpu=True), data, STEPS)
    return weights(model), weights(teacher.model)


def test_the_loop_ends_with_the_weights_of_the_trainer(by_trainer: Any, by_loop: Any) -> None:
    trainer, run = by_trainer
    assert len(set(logged(trainer, "gate/open"))) == 2  # both decisions occurred
    assert_near(by_loop[0], run.raw[STEPS])
    assert largest_difference(run.raw[0], run.raw[STEPS]) > 1e-2


def test_the_loop_ends_with_the_average_of_the_trainer(by_trainer: Any, by_loop: Any) -> None:
    assert_near(by_loop[1], by_trainer[1].averaged[STEPS])


def test_the_program_prints_the_test_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    accelerate_loop.main(steps=2)
    label, _, number, unit = capsys.readouterr().out.split()[-4:]
    assert (label, unit) == ("test", "%")
    assert 0 <= float(number) <= 100


def test_the_accuracy_is_the_share_of_right_answers(data: Any) -> None:
    images = accelerate_loop.Images.from_dataset(data["test"], (8, 8))

    class Always(torch.nn.Module):
        def forward(self, pixel_values: Tensor) -> Any:
            logits = torch.nn.functional.one_hot(torch.full((len(pixel_values),), 2), accelerate_loop.CLASSES)
            return type("Output", (), {"logits": logits})

    share = sum(label == 2 for label in data["test"]["label"]) / len(data["test"])
    assert accelerate_loop.accuracy(Always(), images, torch.device("cpu")) == pytest.approx(share)


def test_processes_that_would_train_apart_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="train apart"):
        accelerate_loop.main(steps=1)


def test_the_loop_is_short() -> None:
    assert len((ROOT / "recipes/accelerate_loop.py").read_text().splitlines()) < 120
