from __future__ import annotations

import pytest
import torch

from hf_fixastep.losses import FlexMatch
from tests.losses.conftest import (
    CLASSES,
    MODES,
    assert_same,
    cross_entropy,
    gradient,
    in_mode,
    make_batch,
    make_model,
    predict,
    prepared,
)


def thresholds_by_hand(selected, tau):
    """Of each class, from the last confident label of each image or None."""
    counts = [sum(label == c for label in selected) for c in range(CLASSES)]
    largest = max(*counts, selected.count(None))
    return [tau * (n / largest) / (2 - n / largest) for n in counts]


@pytest.mark.parametrize("mode", MODES)
def test_three_steps_are_those_of_a_literal_loop(mode):
    loss = in_mode(prepared(FlexMatch(threshold=0.75), make_model(), unlabeled_rows=8), mode)
    selected, rates = [None] * 8, []
    for seed, index in [(0, [0, 1, 2, 3, 4, 5]), (3, [7, 4, 3, 2, 6, 0]), (0, [1, 5, 6, 0, 4, 3])]:
        model, batch = make_model(seed=seed), make_batch()
        batch.index = torch.tensor(index)
        labeled, weak, strong = predict(mode, model, batch.x, batch.views["weak"], batch.views["strong"])
        thresholds, total, kept = thresholds_by_hand(selected, 0.75), torch.zeros(()).double(), 0
        for target, row in zip(weak.detach().softmax(-1), strong, strict=True):
            if target.max() > thresholds[target.argmax()]:
                total, kept = total - row.log_softmax(-1)[target.argmax()], kept + 1
        losses = loss(model, batch, None)
        assert_same(losses, cross_entropy(batch.y, labeled), total / 6, model)
        assert losses.stats["mask_rate"].item() == pytest.approx(kept / 6)
        for row, target in zip(index, weak.detach().softmax(-1), strict=True):
            if target.max() > 0.75:
                selected[row] = int(target.argmax())
        assert loss.selected.tolist() == [CLASSES if label is None else label for label in selected]
        rates.append(kept / 6)
    assert rates[0] == 1  # nothing is learned yet, so that every class has the threshold 0
    assert min(rates) < 1
    assert None in selected


def test_thresholds_of_a_case_worked_out_by_hand(model):
    loss = prepared(FlexMatch(threshold=0.9), model, unlabeled_rows=10)
    assert loss.thresholds().tolist() == [0, 0, 0]
    loss.selected.copy_(torch.tensor([0, 0, 0, 0, 1, 1, 3, 3, 3, 3]))
    # learned: 4 of 4, 2 of 4, 0 of 4; mapped 1, 1/3, 0
    assert loss.thresholds().tolist() == pytest.approx([0.9, 0.3, 0.0])
    loss.selected.copy_(torch.tensor([0, 0, 0, 0, 3, 3, 3, 3, 3, 3]))  # more without a label: 4 of 6
    assert loss.thresholds().tolist() == pytest.approx([0.9 * (2 / 3) / (4 / 3), 0, 0])


def test_below_the_thresholds_the_loss_and_its_gradient_are_zero(model, batch):
    loss = prepared(FlexMatch(threshold=1.0), model)
    loss.selected.copy_(torch.arange(6) % CLASSES)  # all classes are learned equally well
    unlabeled = loss(model, batch, None).unlabeled
    assert unlabeled == 0
    assert not gradient(unlabeled, model).any()


def test_an_image_keeps_its_label_until_it_gets_another_confident_one(model):
    loss = prepared(FlexMatch(), model, unlabeled_rows=4)
    loss.record(torch.tensor([2, 0]), torch.tensor([1, -1]))
    assert loss.selected.tolist() == [3, 3, 1, 3]
    loss.record(torch.tensor([2, 0]), torch.tensor([-1, 0]))
    assert loss.selected.tolist() == [0, 3, 1, 3]
    loss.record(torch.tensor([2, 3, 2]), torch.tensor([0, 2, -1]))  # row 2 twice, once confident
    assert loss.selected.tolist() == [0, 3, 0, 2]
