"""A head stands for a linear classifier of raw features, and fits into a network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_fixastep.models.head import FeatureHead, FeatureHeadConfig, put_head
from hf_fixastep.step.forwards import classification_head, head_inputs
from tests.features.networks import tiny_network


def new_head(hidden_size: int = 0) -> FeatureHead:
    config = FeatureHeadConfig(size=5, hidden_size=hidden_size, num_labels=3)
    return FeatureHead(config)


def test_a_new_head_answers_the_same_for_every_image() -> None:
    for hidden_size in (0, 8):
        assert (new_head(hidden_size)(pixel_values=torch.randn(4, 5)).logits == 0).all()


def test_a_head_standardises_and_is_a_linear_classifier_of_raw_features() -> None:
    head, x = new_head(), torch.randn(20, 5).double() * 3 + 1
    x[:, 2] = 7  # a number that never changes
    head = head.double()
    head.standardise(x.mean(0), x.std(0))
    weight, bias = torch.randn(3, 5).double(), torch.randn(3).double()
    with torch.no_grad():
        head.classifier.weight.copy_(weight)
        head.classifier.bias.copy_(bias)
    deviation = x.std(0)
    deviation[2] = torch.inf  # so that it counts for nothing
    expected = (x - x.mean(0)) / deviation @ weight.T + bias
    torch.testing.assert_close(head(pixel_values=x).logits, expected, atol=1e-12, rtol=0)
    raw_weight, raw_bias = head.linear()
    torch.testing.assert_close(x @ raw_weight.T + raw_bias, expected, atol=1e-12, rtol=0)


def test_a_head_starts_from_a_linear_classifier() -> None:
    head, x = new_head().double(), torch.randn(20, 5).double() * 3 + 1
    head.standardise(x.mean(0), x.std(0))
    weight, bias = torch.randn(3, 5).double(), torch.randn(3).double()
    head.start_from(weight, bias)
    torch.testing.assert_close(head(pixel_values=x).logits, x @ weight.T + bias, atol=1e-12, rtol=0)


def test_a_hidden_layer_fits_into_no_network() -> None:
    with pytest.raises(ValueError, match="one linear layer there"):
        new_head(hidden_size=4).linear()
    with pytest.raises(ValueError, match="cannot start from a linear one"):
        new_head(hidden_size=4).start_from(torch.zeros(3, 5), torch.zeros(3))


def test_a_head_comes_back_from_a_folder(tmp_path: Path) -> None:
    head = new_head()
    head.start_from(torch.randn(3, 5), torch.randn(3))
    head.standardise(torch.randn(5), torch.rand(5))
    head.save_pretrained(tmp_path)
    x = torch.randn(4, 5)
    again = FeatureHead.from_pretrained(tmp_path)
    assert torch.equal(again(pixel_values=x).logits, head(pixel_values=x).logits)


def test_a_network_with_another_head_classifies_its_features(tmp_path: Path) -> None:
    model, images = tiny_network(num_labels=10), torch.randn(4, 3, 32, 32)
    weight, bias = torch.randn(2, 64), torch.randn(2)
    with torch.no_grad(), head_inputs(model, 10) as seen:
        model(pixel_values=images)
    put_head(model, classification_head(model, 10), weight, bias, ["cat", "dog"])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert again.config.id2label == {0: "cat", 1: "dog"}
    with torch.no_grad():
        logits = again(pixel_values=images).logits
    torch.testing.assert_close(logits, seen[0] @ weight.T + bias)
