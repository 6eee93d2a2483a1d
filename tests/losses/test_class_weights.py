"""Weights of the classes in the labeled loss: their values, and the scale of the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

from hf_fixastep import LOSSES, FixAStepTrainer, Images, get_loss
from hf_fixastep.losses.functional import class_weights
from tests.losses.conftest import CLASSES, make_batch, make_model, prepared
from tests.short_runs import (
    assert_near,
    logged,
    make_trainer,
    random_images,
    tiny_vit,
    train,
    without_augmentation,
)


COUNTS = (14, 7, 3)  # images per class


def skewed_images() -> Images:
    images = random_images(sum(COUNTS), seed=1, labeled=True)
    return Images(images.pixels, torch.arange(3).repeat_interleave(torch.tensor(COUNTS)), images.class_names)


def skewed(folder: Path, **settings: Any) -> FixAStepTrainer:
    """Neither random views nor batch norm, so that rows do not meet."""
    defaults = {"loss": "fixmatch", "mix_labeled": False, "class_weights": "balanced", "max_steps": 4}
    objects = {"train_dataset": skewed_images(), "eval_dataset": skewed_images()}
    return without_augmentation(make_trainer(folder, tiny_vit(), objects=objects, **defaults | settings))


def weighted(logits: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Row by row and class by class, over the number of rows."""
    total = torch.zeros((), dtype=logits.dtype)
    for row, target in zip(logits, y, strict=True):
        for c in range(len(row)):
            total = total - weights[c] * target[c] * (row[c] - row.exp().sum().log())
    return total / len(logits)


# ---- the weights


@pytest.mark.parametrize(
    ("counts", "published"),
    [
        ((632, 239, 405, 285), (0.135, 0.356, 0.210, 0.299)),
        ((650, 223, 462, 325), (0.137, 0.398, 0.192, 0.273)),
        ((572, 199, 379, 277), (0.134, 0.386, 0.203, 0.277)),
    ],
)
def test_weights_are_the_published_ones_of_tmed2(
    counts: tuple[int, ...], published: tuple[float, ...]
) -> None:
    assert class_weights(torch.tensor(counts)).tolist() == pytest.approx(published, abs=5.1e-4)


def test_weights_are_products_of_the_counts_of_the_other_classes() -> None:
    products = torch.tensor([7.0 * 3, 14 * 3, 14 * 7])
    torch.testing.assert_close(class_weights(torch.tensor(COUNTS)), products / products.sum())


def test_a_class_without_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Class 1 has no labeled image.*class_weights to none"):
        class_weights(torch.tensor([3, 0, 2]))


# ---- the loss


@pytest.mark.parametrize("labels", ["one-hot", "mixed"])
def test_every_row_counts_by_the_weights_of_its_labels(labels: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    y = F.one_hot(torch.tensor([0, 1, 2, 0, 0, 1])).double()
    if labels == "mixed":
        y = 0.7 * y + 0.3 * torch.rand(6, 3, generator=generator, dtype=torch.float64).softmax(-1)
    loss = get_loss("supervised")
    loss.class_weights = torch.tensor([0.2, 0.5, 1.7], dtype=torch.float64)
    torch.testing.assert_close(loss.labeled_loss(logits, y), weighted(logits, y, loss.class_weights))


def test_the_weighted_mean_is_that_of_torch_for_hard_labels() -> None:
    logits, labels = (
        torch.randn(6, 3, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 2, 0, 0, 1]),
    )
    loss = get_loss("supervised")
    loss.class_weights, loss.weighted_mean = torch.tensor([0.2, 0.5, 1.7]), True
    expected = F.cross_entropy(logits, labels, weight=loss.class_weights)
    torch.testing.assert_close(loss.labeled_loss(logits, F.one_hot(labels).float()), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_weights_reach_the_labeled_part_of_every_loss_and_no_other(name: str) -> None:
    labeled, unlabeled = [], []
    for weights in (None, torch.full((CLASSES,), 2.0, dtype=torch.float64)):
        loss = prepared(get_loss(name), make_model())
        loss.class_weights = weights
        losses = loss(make_model(), make_batch(), make_model(seed=1))
        labeled.append(losses.labeled)
        unlabeled.append(losses.unlabeled)
    # Which also tell known from foreign, MTCF at first nothing else, unweighted.
    if name in ("openmatch", "mtcf"):
        assert labeled[0] <= labeled[1] < 2 * labeled[0]
    else:
        torch.testing.assert_close(labeled[1], 2 * labeled[0])
    torch.testing.assert_close(unlabeled[1], unlabeled[0])


# ---- the trainer


def test_balanced_weights_are_those_of_scikit_learn_with_mean_one_over_the_images(tmp_path: Path) -> None:
    trainer = skewed(tmp_path)
    labels = skewed_images().labels.numpy()
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    torch.testing.assert_close(trainer.loss.class_weights, torch.tensor(expected, dtype=torch.float32))
    assert trainer.loss.class_weights[labels].mean() == pytest.approx(1, abs=1e-6)


def test_weights_are_off_by_default(tmp_path: Path) -> None:
    assert make_trainer(tmp_path).loss.class_weights is None


def test_equal_classes_train_as_without_weights(tmp_path: Path) -> None:
    with_weights, without = (
        train(make_trainer(tmp_path, class_weights=name)) for name in ("balanced", "none")
    )
    assert_near(with_weights.raw[-1], without.raw[-1], within=1e-6)


def test_micro_batches_with_weights_are_one_large_batch(tmp_path: Path) -> None:
    one = skewed(tmp_path, per_device_train_batch_size=8)
    four = skewed(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert_near(train(four).raw[-1], train(one).raw[-1])
    assert logged(four, "loss/labeled") == pytest.approx(logged(one, "loss/labeled"), rel=1e-5)


def first_labeled_loss(folder: Path, **settings: Any) -> float:
    """Of all labeled images at once, by a model that knows nothing yet."""
    trainer = skewed(folder, per_device_train_batch_size=sum(COUNTS), max_steps=1, **settings)
    trainer.train()
    return logged(trainer, "loss/labeled")[0]


def test_over_all_labeled_images_the_loss_is_the_mean_of_the_classes(tmp_path: Path) -> None:
    """The scale of the official base methods, which divide by the weights of the batch."""
    paper = first_labeled_loss(tmp_path)
    assert first_labeled_loss(tmp_path, preset="upstream") == pytest.approx(paper, rel=1e-5)
    images, model = skewed_images(), tiny_vit().eval()
    trainer = skewed(tmp_path)
    logits = model(pixel_values=trainer.views.plain(images.pixels)).logits.detach()
    rows = F.cross_entropy(logits, images.labels, reduction="none")
    classes = [rows[images.labels == label].mean() for label in range(3)]
    assert paper == pytest.approx(float(sum(classes)) / 3, rel=1e-5)


def test_upstream_keeps_the_sum_one_once_labels_are_mixed(tmp_path: Path) -> None:
    trainer = skewed(tmp_path, preset="upstream", mix_labeled=True)
    torch.testing.assert_close(trainer.loss.class_weights, class_weights(torch.tensor(COUNTS)))
    assert not trainer.loss.weighted_mean


@pytest.mark.parametrize("loss", ["pi_model", "vat"])
def test_upstream_divides_a_weighted_labeled_loss_by_its_weights_alone(loss: str, tmp_path: Path) -> None:
    upstream, own = (
        first_labeled_loss(tmp_path, preset="upstream", loss=loss, divide_by_all_rows=by_all)
        for by_all in (True, False)
    )
    assert upstream == pytest.approx(own, rel=1e-5)


def test_a_class_without_labeled_images_cannot_be_weighed(tmp_path: Path) -> None:
    images = skewed_images()
    few = Images(images.pixels[:5], images.labels[:5], images.class_names)
    with pytest.raises(ValueError, match="Class 1 has no labeled image"):
        make_trainer(tmp_path, objects={"train_dataset": few}, class_weights="balanced")


def test_balanced_accuracy_can_choose_the_best_model(tmp_path: Path) -> None:
    trainer = skewed(
        tmp_path,
        load_best_model_at_end=True,
        metric_for_best_model="balanced_accuracy",
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        loss="supervised",
        learning_rate=0.1,
        teacher_decay=0.0,
        max_steps=10,
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    balanced, plain = ([row[f"eval_{name}"] for row in rows] for name in ("balanced_accuracy", "accuracy"))
    assert balanced[-1] < max(balanced)
    assert balanced.index(max(balanced)) != plain.index(max(plain))
    assert trainer.state.best_global_step == 1 + balanced.index(max(balanced))
    assert trainer.evaluate()["eval_balanced_accuracy"] == max(balanced)
