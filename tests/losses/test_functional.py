"""What losses share."""

from __future__ import annotations

import torch

from hf_fixastep.losses.functional import masked_mean, mean_of_repeats, rows_of_all


def test_repeats_get_their_mean_and_others_stay() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 8.0], [0.5, 0.5]])
    found = mean_of_repeats(torch.tensor([7, 2, 7, 0]), values, rows=8)
    torch.testing.assert_close(found, torch.tensor([[3.0, 5.0], [3.0, 4.0], [3.0, 5.0], [0.5, 0.5]]))


def test_on_one_process_rows_are_its_own_without_what_is_not_finite() -> None:
    index, values = rows_of_all(torch.tensor([2, 1]), torch.tensor([[1.0, torch.nan], [torch.inf, 3.0]]))
    assert index.tolist() == [2, 1]
    assert values.tolist() == [[1, 0], [0, 3]]


def test_a_masked_mean_is_that_of_the_kept_and_zero_without_any() -> None:
    values = torch.tensor([1.0, 2.0, 6.0])
    assert masked_mean(values, torch.tensor([1.0, 0.0, 1.0])) == 3.5
    assert masked_mean(values, torch.zeros(3)) == 0
