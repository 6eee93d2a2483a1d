"""What cannot work is refused before training, in one sentence, and nothing on the disk is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from transformers import TrainerCallback, TrainingArguments

from hf_fixastep import FixAStepTrainer, Images, Losses, SemiSupervisedLoss, load_dataset
from tests.short_runs import (
    make_trainer,
    random_images,
    tiny_processor,
    tiny_vit,
    tiny_wide_resnet,
)


class Begun(TrainerCallback):
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("training has begun")


class TwoStrongViews(SemiSupervisedLoss):
    views = ("weak", "strong_2")

    def forward(self, *args: Any) -> Losses:
        raise AssertionError("the loss was asked")


def labeled(labels: list[int], names: list[str] | None = None) -> Images:
    return Images(random_images(len(labels), seed=1).pixels, torch.tensor(labels, dtype=torch.int64), names)


def split(labels: list[int | str], label: datasets.Value | datasets.ClassLabel) -> datasets.Dataset:
    features = datasets.Features({"image": datasets.Image(), "label": label})
    pictures = [Image.new("RGB", (8, 8), color=(row, row, row)) for row in range(len(labels))]
    return datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)


def train(folder: Path, **arguments: Any) -> None:
    """Settings of the config and objects of the trainer, told apart by their names."""
    names = ("model", "loss_object", "train_dataset", "unlabeled_dataset", "eval_dataset", "processing_class")
    objects = {name: arguments.pop(name) for name in names if name in arguments}
    if "loss_object" in objects:
        objects["loss"] = objects.pop("loss_object")
    model = objects.pop("model", None)
    make_trainer(folder, model, objects={"callbacks": [Begun()], **objects}, **arguments).train()


@dataclass
class Case:
    """A call that must fail, and words of its message; data and models are functions that make them."""

    name: str
    words: list[str]
    arguments: dict[str, Any]
    call: Callable[..., Any] = train

    def attempt(self, folder: Path) -> None:
        self.call(
            folder, **{name: value() if callable(value) else value for name, value in self.arguments.items()}
        )


CASES = [
    # names and numbers; what the config refuses by itself is in test_config
    Case("unknown loss", ["fixmach", "fixmatch"], {"loss": "fixmach"}),
    Case(
        "unknown loss argument",
        ["treshold", "threshold"],
        {"loss": "fixmatch", "loss_kwargs": {"treshold": 0.9}},
    ),
    Case("unknown gate", ["dropp", "drop"], {"gate": "dropp"}),
    Case(
        "unknown dataset",
        ["digits", "digits_open_set"],
        {"name": "digits"},
        lambda folder, name: load_dataset(name, cache_dir=folder),
    ),
    Case(
        "unknown config",
        ["zeta51", "zeta50"],
        {"config": "zeta51"},
        lambda folder, config: load_dataset("digits_open_set", config, cache_dir=folder),
    ),
    Case("threshold 2", ["threshold", "2"], {"loss": "fixmatch", "loss_kwargs": {"threshold": 2}}),
    # losses and their data
    Case(
        "unknown view",
        ["TwoStrongViews", "strong_2", "weak, weak_2, strong"],
        {"loss_object": TwoStrongViews},
    ),
    Case(
        "FixMatch alone", ["FixMatch", "unlabeled_dataset"], {"loss": "fixmatch", "unlabeled_dataset": None}
    ),
    Case("label too large", ["3", "0..2"], {"train_dataset": lambda: labeled([0, 3], ["a", "b", "c"])}),
    Case("label negative", ["-1"], {"train_dataset": lambda: labeled([0, -1])}),
    Case(
        "labels are words",
        ["label", "string"],
        {"train_dataset": lambda: split(["a", "b"], datasets.Value("string"))},
    ),
    Case("no labels", ["label"], {"train_dataset": lambda: random_images(4, seed=1)}),
    Case(
        "no labeled image", ["labeled set is empty"], {"train_dataset": lambda: labeled([], ["a", "b", "c"])}
    ),
    Case(
        "no unlabeled image",
        ["unlabeled set is empty"],
        {"unlabeled_dataset": lambda: random_images(0, seed=2)},
    ),
    Case(
        "unlike sizes",
        ["[8, 8]", "[9, 9]"],
        {"unlabeled_dataset": lambda: Images(torch.zeros(4, 3, 9, 9, dtype=torch.uint8))},
    ),
    Case(
        "label too large in the evaluation set",
        ["3", "cat, dog, owl"],
        {"eval_dataset": lambda: labeled([0, 3])},
    ),
    Case(
        "other classes in the evaluation set",
        ["owl, dog, cat", "cat, dog, owl"],
        {"eval_dataset": lambda: labeled([0, 1], ["owl", "dog", "cat"])},
    ),
    # the model and the arguments
    Case(
        "five outputs",
        ["5 outputs", "3 classes", "num_labels=3"],
        {"model": lambda: tiny_wide_resnet(num_labels=5)},
    ),
    Case(
        "size unknown",
        ["longest_edge", "height"],
        {"processing_class": lambda: type(tiny_processor())(size={"longest_edge": 8})},
    ),
    Case(
        "OpenMatch with one class",
        ["OpenMatch", "one class", "choose another loss"],
        {
            "loss": "openmatch",
            "model": lambda: tiny_wide_resnet(num_labels=1),
            "train_dataset": lambda: labeled([0] * 8, ["cat"]),
        },
    ),
    Case(
        "a wrapped model",
        ["DataParallel", "give its .module"],
        {"model": lambda: torch.nn.DataParallel(tiny_vit())},
    ),
    Case(
        "checkpointing of a Wide ResNet",
        ["gradient_checkpointing is on", "WideResNetForImageClassification", "switch it off"],
        {"gradient_checkpointing": True},
    ),
    Case(
        "stock arguments",
        ["TrainingArguments", "FixAStepConfig"],
        {},
        lambda folder: FixAStepTrainer(
            tiny_vit(),
            TrainingArguments(output_dir=str(folder), use_cpu=True),
            train_dataset=random_images(4, seed=1, labeled=True),
            processing_class=tiny_processor(),
        ),
    ),
    Case(
        "no arguments",
        ["NoneType", "FixAStepConfig"],
        {},
        lambda folder: FixAStepTrainer(
            tiny_vit(),
            train_dataset=random_images(4, seed=1, labeled=True),
            processing_class=tiny_processor(),
        ),
    ),
]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_one_sentence(message: str, words: list[str]) -> None:
    assert "\n" not in message
    assert message.endswith((".", "?"))
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_cannot_work_is_one_clear_value_error_and_leaves_the_output_folder_alone(
    case: Case, tmp_path: Path
) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "model.safetensors").write_text("weights of an earlier run")
    (tmp_path / "log.csv").write_text("log of an earlier run")
    before = content(tmp_path)
    with pytest.raises(ValueError) as error:  # noqa: PT011, the words are compared below
        case.attempt(tmp_path)
    assert type(error.value) is ValueError
    assert_one_sentence(str(error.value), case.words)
    assert content(tmp_path) == before


# ---- resuming


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Mean Teacher run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    make_trainer(folder, max_steps=2, save_strategy="steps", save_steps=1).train()
    return folder


RESUMES = [
    Case("another loss", ["loss", "MeanTeacher", "PiModel"], {"loss": "pi_model"}),
    Case("another labeled set", ["labeled data"], {"train_dataset": random_images(24, seed=5, labeled=True)}),
    Case("another unlabeled set", ["unlabeled data"], {"unlabeled_dataset": random_images(40, seed=5)}),
    Case(
        "other labels", ["labeled data"], {"train_dataset": labeled([0, 1, 2, 2] * 6, ["cat", "dog", "owl"])}
    ),
    Case("no unlabeled set", ["MeanTeacher", "Supervised"], {"loss": "supervised"}),
]


@pytest.mark.parametrize("case", RESUMES, ids=lambda case: case.name)
def test_a_checkpoint_of_another_run_is_not_continued(case: Case, finished: Path) -> None:
    arguments, before = dict(case.arguments), content(finished)
    objects = {name: arguments.pop(name) for name in list(arguments) if name.endswith("dataset")}
    trainer = make_trainer(finished, objects={"callbacks": [Begun()], **objects}, max_steps=4, **arguments)
    with pytest.raises(ValueError, match=r"checkpoint-2 was trained with") as error:
        trainer.train(resume_from_checkpoint=str(finished / "checkpoint-2"))
    assert_one_sentence(str(error.value), case.words)
    assert content(finished) == before


@pytest.mark.parametrize("name", ["empty", "missing", "finished", "model"])
def test_a_folder_that_is_no_checkpoint_is_not_continued(name: str, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / name
    if name == "empty":
        folder.mkdir()
    elif name == "finished":  # the run's folder instead of one of its checkpoints
        folder = finished
    elif name == "model":  # to be fine-tuned perhaps, but there is nothing to continue
        tiny_wide_resnet().save_pretrained(folder)
    before = content(finished) | content(tmp_path)
    trainer = make_trainer(finished, objects={"callbacks": [Begun()]}, max_steps=4)
    with pytest.raises(ValueError, match="not a checkpoint") as error:
        trainer.train(resume_from_checkpoint=str(folder))
    assert_one_sentence(str(error.value), [str(folder), "checkpoint-N"])
    assert content(finished) | content(tmp_path) == before


def test_there_is_nothing_to_continue_in_a_new_folder(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, objects={"callbacks": [Begun()]})
    with pytest.raises(ValueError, match="checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    assert content(tmp_path) == {}


def test_a_refused_checkpoint_leaves_the_model_as_it_was(finished: Path) -> None:
    model = tiny_wide_resnet(seed=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="was trained with"):
        make_trainer(finished, model, loss="pi_model").train(resume_from_checkpoint=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
