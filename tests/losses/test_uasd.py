from __future__ import annotations

import pytest
import torch

from hf_fixastep.losses import UASD
from tests.losses.conftest import (
    CLASSES,
    MODES,
    assert_same,
    cross_entropy,
    in_mode,
    make_batch,
    make_model,
    predict,
    prepared,
)


def soft_cross_entropy(target, row):
    return -sum(target[c] * row.log_softmax(-1)[c] for c in range(len(row)))


@pytest.mark.parametrize("mode", MODES)
def test_three_steps_are_those_of_a_literal_loop(mode):
    """Sums of predictions per image, their mean as target, a threshold, a mean over the kept."""
    loss = in_mode(prepared(UASD(threshold=0.7, warmup_steps=0), make_model(), unlabeled_rows=8), mode)
    sums = {row: [0.0] * CLASSES for row in range(8)}
    kept_rows = set()
    # Row 1 twice at last.
    for step, index in enumerate([[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [1, 1, 6, 0, 4, 3]]):
        model, batch = make_model(seed=step // 2), make_batch()
        batch.index = torch.tensor(index)
        labeled, weak = predict(mode, model, batch.x, batch.views["weak"])
        kept = []
        for row, logits in zip(index, weak, strict=True):
            target = torch.tensor(
                [value / max(sum(sums[row]), 1) for value in sums[row]], dtype=torch.float64
            )
            if max(target) >= 0.7:
                kept.append(soft_cross_entropy(target, logits))
                kept_rows.add(row)
        expected = sum(kept) / len(kept) if kept else 0 * weak.sum()
        losses = loss(model, batch, None)
        assert_same(losses, cross_entropy(batch.y, labeled), expected, model)
        assert losses.stats["mask_rate"] == len(kept) / 6
        for row, logits in zip(index, weak, strict=True):
            sums[row] = [s + p for s, p in zip(sums[row], logits.softmax(-1).tolist(), strict=True)]
    assert 0 < len(kept_rows) < 6
    torch.testing.assert_close(
        loss.sums, torch.tensor(list(sums.values()), dtype=torch.float64), atol=1e-6, rtol=0
    )


def test_an_image_that_was_never_seen_does_not_count(model, batch):
    losses = prepared(UASD(warmup_steps=0), model)(model, batch, None)
    assert losses.unlabeled == 0
    assert losses.stats["mask_rate"] == 0


def test_before_the_warmup_is_over_predictions_are_only_collected(model, batch):
    loss = prepared(UASD(threshold=0.0, warmup_steps=2), model)
    values = []
    for batch.step in range(3):
        values.append(loss(model, batch, None).unlabeled.item())
    assert values[:2] == [0, 0]
    assert values[2] > 0
    torch.testing.assert_close(loss.sums.sum(1), torch.full((6,), 3.0, dtype=torch.float64))


def test_the_threshold_is_the_mean_confidence_of_the_mean_validation_predictions():
    loss = prepared(UASD(), make_model(), validation_rows=2)
    assert loss.limit.item() == pytest.approx(0.9)
    loss.validated(torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.2, 0.6]]).log())
    assert loss.limit.item() == pytest.approx((0.8 + 0.6) / 2)
    loss.validated(torch.tensor([[0.2, 0.7, 0.1], [0.1, 0.3, 0.6]]).log())
    # means: [0.5, 0.4, 0.1] and [0.15, 0.25, 0.6]
    assert loss.limit.item() == pytest.approx((0.5 + 0.6) / 2)


def test_the_threshold_stays_if_it_is_not_to_be_calibrated():
    loss = prepared(UASD(0.95, calibrate=False), make_model(), validation_rows=2)
    loss.validated(torch.zeros(2, CLASSES))
    assert loss.limit.item() == pytest.approx(0.95)


def test_a_confidence_equal_to_the_threshold_counts(model, batch):
    loss = prepared(UASD(0.75, warmup_steps=0), model)
    loss.sums.copy_(torch.tensor([1.5, 0.25, 0.25]).expand(6, 3))
    assert loss(model, batch, None).stats["mask_rate"] == 1
