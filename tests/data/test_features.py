"""Cached features as rows to train on: which versions are drawn, and that a training is the plain one."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import ViTImageProcessor

from hf_fixastep import FixAStepConfig, FixAStepTrainer
from hf_fixastep.data.features import CachedViews, Features, Rows
from hf_fixastep.data.loader import PairedSampler, generator_for
from hf_fixastep.features.embed import embed
from hf_fixastep.models.head import FeatureHead, FeatureHeadConfig
from tests.features.networks import pictures, tiny_backbone


def numbered(rows: int, weak: int, strong: int) -> Rows:
    """The only number of version v of row r is 100 r + v."""
    versions = 1 + weak + strong
    return Rows.of((100 * torch.arange(rows)[:, None] + torch.arange(versions))[..., None].half())


def test_views_are_drawn_from_their_own_versions_and_the_second_weak_one_is_another() -> None:
    rows = numbered(10, weak=3, strong=2)
    seen: dict[str, set[int]] = {"weak": set(), "weak_2": set(), "strong": set()}
    for seed in range(40):
        views = CachedViews(3, 2)(("strong", "weak", "weak_2"), rows, torch.Generator().manual_seed(seed))
        assert (views["weak"] != views["weak_2"]).all()
        for name, drawn in views.items():
            assert torch.equal(drawn[:, 0] // 100, torch.arange(10.0))
            seen[name] |= set((drawn[:, 0] % 100).int().tolist())
    assert seen == {"weak": {1, 2, 3}, "weak_2": {1, 2, 3}, "strong": {4, 5}}


def test_the_plain_view_is_the_first_version() -> None:
    assert CachedViews(3, 2).plain(numbered(4, 3, 2))[:, 0].tolist() == [0, 100, 200, 300]


def test_a_cache_without_the_views_of_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 2 weak and 0 strong views"):
        CachedViews(2, 0)(("strong",), numbered(1, 2, 0), torch.Generator())


def test_rows_of_several_parts_are_those_of_one() -> None:
    values = torch.randn(9, 3, 4).half()
    places = torch.tensor([[1, 0], [0, 3], [0, 0], [1, 4]])
    features = Features([values[:4], values[4:]], places, 1, "name")
    rows = values[[4, 3, 0, 8]]
    batch = features.__getitems__([3, 0, 1])["pixel_values"]
    assert torch.equal(batch.read(), rows[[3, 0, 1]])
    assert torch.equal(batch.version(torch.tensor([2, 0, 1])), rows[[3, 0, 1], [2, 0, 1]].float())
    np.testing.assert_array_equal(features.plain(), rows[:, 0].float())


def test_a_batch_that_a_worker_process_sends_holds_no_more_than_its_own_rows() -> None:
    values = torch.randn(9, 3, 400).half()
    batch = Features.of(values, weak=1).__getitems__([5, 2])["pixel_values"]
    sent = pickle.dumps(batch[1:])
    assert len(sent) < values[0].nbytes + 1500
    assert torch.equal(pickle.loads(sent).read(), values[[2]])


def test_worker_processes_map_the_files_themselves(tmp_path: Path) -> None:
    features = embed(pictures(3), tiny_backbone(), cache_dir=tmp_path)
    sent = pickle.dumps(features)
    assert len(sent) < features.parts[0].numel()
    assert torch.equal(pickle.loads(sent)[2]["pixel_values"], features[2]["pixel_values"])


def config(folder: Path, **settings: object) -> FixAStepConfig:
    return FixAStepConfig(
        output_dir=str(folder),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        per_device_train_batch_size=4,
        save_strategy="no",
        optim="sgd",
        lr_cycle_steps=0.0,
        learning_rate=0.1,
        weight_decay=0.0,
        mix_labeled=False,
        **settings,
    )


def test_a_training_on_features_is_gradient_descent_on_the_drawn_versions(tmp_path: Path) -> None:
    values, labels = torch.randn(12, 4, 5).half(), torch.arange(12) % 3
    labeled = Features.of(values, labels, list("abc"), weak=3)
    head = FeatureHead(FeatureHeadConfig(size=5, num_labels=3))
    args = config(tmp_path, loss="supervised", max_steps=3, optim_args="momentum=0.0", teacher_decay=0.0)
    FixAStepTrainer(head, args, train_dataset=labeled, processing_class=ViTImageProcessor()).train()

    weight, bias = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    sampler = PairedSampler((12, 0), (4, 0), 1024, seed=args.seed)
    for _, draw in zip(range(3), sampler, strict=False):
        version = torch.randint(3, (4,), generator=generator_for(args.seed, 0, draw.number, "labeled"))
        x = torch.stack([values[r, 1 + v] for r, v in zip(draw.labeled, version, strict=True)]).double()
        error = ((x @ weight.T + bias).softmax(-1) - torch.eye(3)[labels[draw.labeled]]) / 4
        weight, bias = weight - 0.1 * error.T @ x, bias - 0.1 * error.sum(0)
    torch.testing.assert_close(head.classifier.weight.double(), weight, atol=1e-6, rtol=0)
    torch.testing.assert_close(head.classifier.bias.double(), bias, atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss", ["fixmatch", "mean_teacher", "vat", "mixmatch"])
def test_losses_train_and_resume_on_features(loss: str, tmp_path: Path) -> None:
    values = torch.randn(30, 7, 5, generator=torch.Generator().manual_seed(0)).half()
    labeled = Features.of(values[:9], torch.arange(9) % 3, list("abc"), weak=4)
    unlabeled = Features.of(values[9:], weak=4)
    kwargs = {"train_dataset": labeled, "unlabeled_dataset": unlabeled, "eval_dataset": labeled}
    weights = []
    for steps in (6, 3):
        args = config(tmp_path / str(steps), loss=loss, max_steps=6, unlabeled_ratio=1.0)
        args.save_strategy, args.save_steps = "steps", steps
        head = FeatureHead(FeatureHeadConfig(size=5, num_labels=3))
        trainer = FixAStepTrainer(head, args, processing_class=ViTImageProcessor(), **kwargs)
        trainer.train()
        weights.append(head.classifier.weight.detach().clone())
        if steps == 3:
            trainer.train(resume_from_checkpoint=str(tmp_path / "3/checkpoint-3"))
            weights.append(head.classifier.weight.detach().clone())
    assert weights[0].abs().sum() > 0
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[1], weights[2])


def test_features_and_images_do_not_mix(tmp_path: Path) -> None:
    labeled = Features.of(torch.randn(3, 3, 5).half(), torch.arange(3), list("abc"), weak=1)
    head = FeatureHead(FeatureHeadConfig(size=5, num_labels=3))
    args = config(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="embed them with the same network"):
        FixAStepTrainer(
            head,
            args,
            train_dataset=labeled,
            unlabeled_dataset=pictures(3),
            processing_class=ViTImageProcessor(),
        )
