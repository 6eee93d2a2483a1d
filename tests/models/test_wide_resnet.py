from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, leaky_relu, linear
from transformers import AutoConfig, AutoModelForImageClassification, ViTImageProcessor, pipeline

from hf_fixastep.models import WideResNetConfig, WideResNetForImageClassification


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def small_model(**settings: object) -> WideResNetForImageClassification:
    torch.manual_seed(0)
    config = WideResNetConfig(**({"depth": 10, "width": 1, "image_size": 8, "num_labels": 3} | settings))
    return WideResNetForImageClassification(config)


def scrambled(model: nn.Module) -> nn.Module:
    """The model with every weight and running statistic away from its initial value."""
    for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
        tensor.data += 0.3 * torch.rand_like(tensor)
    return model


def images(count: int = 4, size: int = 8) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1))


def without_gradient(model: nn.Module) -> list[str]:
    model(images(), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
    return [name for name, parameter in model.named_parameters() if parameter.grad is None]


def naive_logits(state: dict[str, Tensor], x: Tensor, stages: int, training: bool, upstream: bool) -> Tensor:
    """Depth 10 (one block per stage), written out on the state dict."""

    def activate(name: str, x: Tensor) -> Tensor:
        statistics = (
            (None, None) if training else (state[f"{name}.running_mean"], state[f"{name}.running_var"])
        )
        return leaky_relu(
            batch_norm(x, *statistics, state[f"{name}.weight"], state[f"{name}.bias"], training), 0.1
        )

    x = conv2d(x, state["stem.weight"], padding=1)
    for index in range(stages):
        block, stride = f"stages.{index}.0", 1 if index == 0 else 2
        activated = activate(f"{block}.bn1", x)
        into_shortcut = activated if index == 0 else x
        into_convolution = x if upstream and index > 0 else activated
        y = conv2d(into_convolution, state[f"{block}.conv1.weight"], stride=stride, padding=1)
        y = conv2d(activate(f"{block}.bn2", y), state[f"{block}.conv2.weight"], padding=1)
        if f"{block}.shortcut.weight" in state:
            into_shortcut = conv2d(into_shortcut, state[f"{block}.shortcut.weight"], stride=stride)
        x = into_shortcut + y
    pooled = activate("bn", x).flatten(2).sum(-1) / (x.shape[2] * x.shape[3])
    return linear(pooled, state["classifier.weight"], state["classifier.bias"])


@pytest.mark.parametrize(
    ("settings", "parameters", "tensors"),
    [
        ({"num_labels": 6}, 1_467_094, 80),
        ({"num_labels": 10}, 1_467_610, 80),
        ({"num_labels": 50}, 1_472_770, 80),
        ({"num_labels": 4, "num_stages": 4}, 5_927_892, 105),
        ({"num_labels": 6, "upstream_block": True}, 1_467_094, 80),
    ],
)
def test_parameter_counts_are_those_of_the_official_networks(
    settings: dict, parameters: int, tensors: int
) -> None:
    with torch.device("meta"):
        model = WideResNetForImageClassification(WideResNetConfig(**settings))
    sizes = [parameter.numel() for parameter in model.parameters()]
    assert (sum(sizes), len(sizes)) == (parameters, tensors)


@pytest.mark.parametrize("stages", [3, 4])
def test_every_parameter_of_the_correct_block_gets_a_gradient(stages: int) -> None:
    assert without_gradient(small_model(num_stages=stages)) == []


@pytest.mark.parametrize("stages", [3, 4])
def test_the_first_norm_of_every_later_stage_gets_no_gradient_in_upstream_blocks(stages: int) -> None:
    missing = without_gradient(small_model(num_stages=stages, upstream_block=True))
    assert missing == [f"stages.{s}.0.bn1.{name}" for s in range(1, stages) for name in ("weight", "bias")]


def test_the_unused_norm_still_moves_its_running_statistics() -> None:
    model = small_model(upstream_block=True).train()
    model(images())
    assert model.stages[1][0].bn1.running_mean.abs().min() > 0
    assert model.stages[1][0].bn1.num_batches_tracked == 1


@pytest.mark.parametrize("upstream", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("width", "stages"), [(1, 3), (2, 4)])
def test_logits_equal_a_naive_forward(width: int, stages: int, training: bool, upstream: bool) -> None:
    model = scrambled(small_model(width=width, num_stages=stages, upstream_block=upstream)).train(training)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = naive_logits(state, images(), stages, training, upstream)
    torch.testing.assert_close(model(images()).logits, expected)


def test_running_statistics_move_by_a_thousandth() -> None:
    model = small_model().train()
    model(images())
    expected = 0.001 * conv2d(images(), model.stem.weight, padding=1).mean((0, 2, 3))
    torch.testing.assert_close(model.stages[0][0].bn1.running_mean, expected)


def test_initial_weights_have_the_statistics_of_the_paper() -> None:
    model = small_model(depth=16, width=4)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            spread = math.sqrt(2 / (module.kernel_size[0] ** 2 * module.out_channels))
            standard_error = spread / math.sqrt(2 * module.weight.numel())
            assert abs(module.weight.std().item() - spread) < 4 * standard_error
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
    features = model.classifier.in_features
    assert model.classifier.weight.std().item() == pytest.approx(math.sqrt(2 / (features + 3)), rel=0.15)
    assert (model.classifier.bias == 0).all()


def test_a_saved_folder_loads_by_the_auto_classes_with_equal_logits(tmp_path) -> None:
    model = scrambled(small_model(upstream_block=True)).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).upstream_block
    assert torch.equal(loaded(images()).logits, model(images()).logits)
    assert "auto_map" not in (tmp_path / "config.json").read_text()


def test_a_channels_last_model_can_be_saved(tmp_path) -> None:
    model = scrambled(small_model()).eval()
    expected = model(images()).logits
    model.to(memory_format=torch.channels_last).save_pretrained(tmp_path)
    assert torch.equal(AutoModelForImageClassification.from_pretrained(tmp_path)(images()).logits, expected)
    torch.testing.assert_close(model(images().contiguous(memory_format=torch.channels_last)).logits, expected)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_the_pipeline_gives_the_probabilities_of_the_normalized_image(tmp_path, mode: str) -> None:
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
    names = {0: "cat", 1: "dog", 2: "frog"}
    model = scrambled(small_model(id2label=names, label2id={name: i for i, name in names.items()})).eval()
    model.save_pretrained(tmp_path)
    processor = ViTImageProcessor(
        size={"height": 8, "width": 8}, image_mean=mean, image_std=std, do_convert_rgb=True
    )
    processor.save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8) if mode == "L" else (8, 8, 3), dtype=np.uint8)

    scores = pipeline("image-classification", model=str(tmp_path))(Image.fromarray(pixels), top_k=3)

    colours = np.stack([pixels] * 3, -1) if mode == "L" else pixels
    x = torch.tensor((colours / 255 - mean) / std, dtype=torch.float32).permute(2, 0, 1)[None]
    expected = dict(zip(names.values(), model(x).logits.softmax(-1)[0].tolist(), strict=True))
    assert {score["label"]: score["score"] for score in scores} == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("size", [7, 8, 33])
def test_any_image_size_gives_logits(size: int) -> None:
    assert small_model()(images(2, size)).logits.shape == (2, 3)


def test_hard_labels_give_the_mean_negative_log_probability() -> None:
    model = small_model().eval()
    output = model(images(), labels=torch.tensor([0, 1, 2, 1]))
    expected = -output.logits.softmax(-1).log()[range(4), [0, 1, 2, 1]].mean()
    torch.testing.assert_close(output.loss, expected)


def test_soft_labels_weigh_the_log_probabilities() -> None:
    model = small_model().eval()
    y = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.0, 0.4, 0.6], [0.1, 0.1, 0.8]])
    output = model(images(), labels=y)
    torch.testing.assert_close(output.loss, -(y * output.logits.softmax(-1).log()).sum() / 4)


def test_the_mean_of_the_last_hidden_state_is_what_the_classifier_sees() -> None:
    model = small_model().eval()
    output = model(images(), output_hidden_states=True)
    assert [tuple(h.shape[1:]) for h in output.hidden_states] == [
        (16, 8, 8),
        (16, 8, 8),
        (32, 4, 4),
        (64, 2, 2),
    ]
    assert torch.equal(model.classifier(output.hidden_states[-1].mean((2, 3))), output.logits)


def test_a_tuple_is_returned_on_request() -> None:
    model = small_model().eval()
    loss, logits = model(images(), labels=torch.tensor([0, 1, 2, 1]), return_dict=False)
    assert (loss.shape, logits.shape) == ((), (4, 3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 27}, "depth is 27, but must be 6n"),
        ({"depth": 4}, "depth is 4, but must be 6n"),
        ({"width": 0}, "width is 0"),
        ({"num_stages": 0}, "num_stages is 0"),
        ({"depth": "28"}, "expected int"),
    ],
)
def test_impossible_shapes_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(StrictDataclassError, match=message):
        WideResNetConfig(**settings)
