"""Pretrained networks of all kinds through the trainer, with the preset that is made for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, pipeline

from hf_fixastep import FixAStepTrainer
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.step.forwards import BATCH_NORM
from tests.hub.pretrained import NETWORKS, save_network
from tests.short_runs import (
    assert_equal,
    assert_near,
    largest_difference,
    make_config,
    random_images,
    tiny_processor,
    train,
    weights,
)


MOBILENET = Path(__file__).parents[3] / "shared/data/mobilenet_v2_imagenet"
SHORT = {"preset": "pretrained", "max_steps": 2, "unlabeled_warmup_steps": 0.0, "warmup_steps": 0}
KINDS = [name for name in NETWORKS if name not in ("DINOv2 with a head", "CLIP tower with projection")]


@pytest.fixture(autouse=True)
def needs_peft(request: pytest.FixtureRequest) -> None:
    if "lora" in request.node.name:
        pytest.importorskip("peft", reason="peft, the extra of the same name, is not installed")


def from_folder(network: Path, folder: Path, objects: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A trainer that gets the name of a network in place of a model."""
    sets = {
        "train_dataset": random_images(12, seed=1, labeled=True),
        "unlabeled_dataset": random_images(16, seed=2),
        "eval_dataset": random_images(6, seed=3, labeled=True),
    }
    args = make_config(folder, **SHORT | settings)
    return FixAStepTrainer(str(network), args, **sets | (objects or {}))


@pytest.mark.parametrize(
    ("name", "trainable"),
    [
        *((name, "all") for name in KINDS),
        *((name, "head_and_norms") for name in KINDS),
        *((name, "lora") for name in KINDS if not name.startswith("timm")),  # test_resnet has no linear layer
    ],
)
def test_a_network_is_trained_and_saved_as_a_plain_one(name: str, trainable: str, tmp_path: Path) -> None:
    save_network(name, tmp_path / "network")
    trainer = from_folder(tmp_path / "network", tmp_path / "run", trainable=trainable)
    run = train(trainer)
    assert largest_difference(run.raw[0], run.raw[2]) > 1e-4
    trainer.save_model()
    found = AutoModelForImageClassification.from_pretrained(tmp_path / "run").eval()
    assert type(found).__name__ == NETWORKS[name][2]
    assert list(found.config.id2label.values()) == ["cat", "dog", "owl"]
    images = random_images(6, seed=3, labeled=True)
    logits = torch.from_numpy(trainer.predict(images).predictions)
    with torch.no_grad():
        own = found(pixel_values=trainer.views.plain(images.pixels)).logits
    torch.testing.assert_close(own, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_network_is_read_by_the_commands_and_by_the_pipeline(name: str, tmp_path: Path) -> None:
    save_network(name, tmp_path / "network")
    trainer = from_folder(tmp_path / "network", tmp_path / "run", loss="supervised")
    trainer.train()
    trainer.save_model()
    picture = Image.fromarray(np.full((8, 8, 3), 120, dtype=np.uint8))
    classifier = Classifier(tmp_path / "run")
    ours = dict(zip(classifier.classes, classifier.probabilities([picture])[0], strict=True))
    theirs = pipeline("image-classification", model=str(tmp_path / "run"))(picture, top_k=3)
    assert {row["label"]: row["score"] for row in theirs} == pytest.approx(ours, abs=1e-5)


def test_a_checkpoint_of_a_timm_network_is_resumed(tmp_path: Path) -> None:
    save_network("timm", tmp_path / "network")
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(from_folder(tmp_path / "network", tmp_path / "whole", **settings))
    checkpoint = str(tmp_path / "whole/checkpoint-2")
    rest = train(from_folder(tmp_path / "network", tmp_path / "rest", **settings), checkpoint)
    assert_equal(rest.averaged[-1], whole.averaged[-1])
    assert_equal(rest.raw[-1], whole.raw[-1])


def test_the_running_statistics_of_a_timm_network_stay_as_they_are(tmp_path: Path) -> None:
    save_network("timm", tmp_path / "network")
    trainer = from_folder(tmp_path / "network", tmp_path / "run")
    layers = [name for name, module in trainer.model.named_modules() if isinstance(module, BATCH_NORM)]
    assert layers
    run = train(trainer)
    for name in layers:
        for value in ("running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(run.raw[2][f"{name}.{value}"], run.raw[0][f"{name}.{value}"])


# ---- a name in place of a model


def test_the_head_depends_on_the_seed_alone(tmp_path: Path) -> None:
    save_network("DINOv2", tmp_path / "network")
    found = []
    for seed, state in ((1, 10), (1, 20), (2, 10)):
        torch.manual_seed(state)
        trainer = from_folder(tmp_path / "network", tmp_path / "run", seed=seed)
        found.append(weights(trainer.model))
    assert_equal(found[0], found[1])
    assert largest_difference(found[0], found[2]) > 1e-4


def test_a_given_image_processor_wins_over_that_of_the_network(tmp_path: Path) -> None:
    save_network("DINOv2", tmp_path / "network")
    trainer = from_folder(
        tmp_path / "network", tmp_path / "run", objects={"processing_class": tiny_processor()}
    )
    assert trainer.views.std == pytest.approx((0.25,) * 3)
    assert type(trainer.processing_class).__name__.startswith("ViT")


def test_the_classes_are_those_of_a_data_set_that_is_not_decoded_yet(tmp_path: Path) -> None:
    save_network("DINOv2", tmp_path / "network")
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in random_images(8, seed=1).pixels]
    columns = {"image": pictures, "label": [0, 1, 2, 3] * 2}
    named = datasets.ClassLabel(names=["a", "b", "c", "d", "never seen"])
    for label, count in ((datasets.Value("int64"), 4), (named, 5)):
        features = datasets.Features({"image": datasets.Image(), "label": label})
        labeled = datasets.Dataset.from_dict(columns, features=features)
        sets = {"train_dataset": labeled, "eval_dataset": None}
        trainer = from_folder(tmp_path / "network", tmp_path / "run", objects=sets)
        assert trainer.model.config.num_labels == count


def test_without_a_name_the_image_processor_has_to_be_given(tmp_path: Path) -> None:
    model = AutoModelForImageClassification.from_config(save_network("DINOv2", tmp_path).config)
    with pytest.raises(ValueError, match="processing_class is None, but the image processor"):
        FixAStepTrainer(
            model, make_config(tmp_path / "run"), train_dataset=random_images(12, seed=1, labeled=True)
        )


def test_a_name_that_is_nowhere_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"There is no folder .*nowhere; as a model on the Hub"):
        from_folder(tmp_path / "nowhere", tmp_path / "run")


@pytest.mark.skipif(not MOBILENET.is_dir(), reason="../shared/data/mobilenet_v2_imagenet is not there")
def test_a_real_network_of_imagenet_learns_new_classes(tmp_path: Path) -> None:
    """Colours, which its features tell apart at once."""
    shades = torch.randint(150, 250, (24, 1, 1), generator=torch.Generator().manual_seed(0)).byte()
    pixels = torch.zeros(24, 3, 224, 224, dtype=torch.uint8)
    for row in range(24):
        pixels[row, row % 3] = shades[row]
    labeled = type(random_images(1, 1))(pixels, torch.arange(24) % 3, ["red", "green", "blue"])
    sets = {"train_dataset": labeled, "unlabeled_dataset": None, "eval_dataset": labeled}
    settings = {"loss": "supervised", "trainable": "head_and_norms", "max_steps": 8, "teacher_decay": 0.0}
    trainer = from_folder(MOBILENET, tmp_path, objects=sets, **settings)
    before = {name: value.clone() for name, value in trainer.model.named_buffers()}
    trainer.train()
    assert trainer.evaluate()["eval_accuracy"] == 1
    assert_near(dict(trainer.model.named_buffers()), before, within=0)
