from __future__ import annotations

import copy
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn.functional import cosine_similarity

from hf_fixastep.losses import VAT
from hf_fixastep.losses.vat import full_precision
from tests.losses.conftest import (
    MODES,
    PixelModel,
    cross_entropy,
    forward,
    gradient,
    in_mode,
    make_batch,
    make_model,
    pixel_batch,
    predict,
)


def kl(first, second):
    """KL(first || second) of two probability vectors, class by class."""
    return sum(first[c] * (first[c].log() - second[c].log()) for c in range(len(first)))


def official_unit(v):
    v = torch.stack([row / (1e-12 + row.abs().max()) for row in v])
    return torch.stack([row / (1e-6 + (row * row).sum()).sqrt() for row in v])


def exact_unit(v):
    return torch.stack([row / (row * row).sum().sqrt() for row in v])


def forward_of(model, images):
    return forward(model, images)[0].softmax(-1)


def perturbation(model, images):
    """What the last forward added to the images."""
    return model.seen[-1] - images


def to_float32(model, batch):
    batch.x, batch.y = batch.x.float(), batch.y.float()
    batch.views = {name: view.float() for name, view in batch.views.items()}
    return model.float()


def exact_direction(model, images, noise):
    """Second derivative of the divergence at the clean image along the noise, in float64."""
    model = copy.deepcopy(model).double()
    images, noise = images.double(), noise.double()
    clean = forward_of(model, images).detach()

    def divergence(step):
        moved = model(pixel_values=images + step).logits.log_softmax(-1)
        return (clean * (clean.log() - moved)).sum()

    _, product = torch.autograd.functional.hvp(divergence, torch.zeros_like(images), noise)
    return product


def same_noise(images):
    return torch.randn(images.shape, generator=make_batch().generator, dtype=images.dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reverse_kl", [True, False])
@pytest.mark.parametrize("safe", [True, False])
def test_losses_and_gradients_are_those_of_the_formula(mode, reverse_kl, safe, model, batch):
    xi, eps, weak = 1e-3, 2.0, batch.views["weak"]
    normalize = exact_unit if safe else official_unit
    images = torch.cat([batch.x, weak]) if mode == "joint" else weak
    clean = forward_of(model, images).detach()
    noise = normalize(same_noise(images)).requires_grad_()
    moved = forward_of(model, images + xi * noise)
    change = sum(kl(c, m) for c, m in zip(clean, moved, strict=True)) / len(images)
    direction = normalize(torch.autograd.grad(change, noise)[0])
    perturbed = forward_of(model, images + eps * direction)
    pairs = [
        (p, c) if reverse_kl else (c, p) for p, c in list(zip(perturbed, clean, strict=True))[-len(weak) :]
    ]
    unlabeled = sum(kl(*pair) for pair in pairs) / len(weak)
    labeled, _ = predict(mode, model, batch.x, weak)

    losses = in_mode(VAT(xi, eps, reverse_kl, safe), mode)(model, batch, None)
    for value, expected in [(losses.labeled, cross_entropy(batch.y, labeled)), (losses.unlabeled, unlabeled)]:
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(gradient(value, model), gradient(expected, model), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_every_perturbation_has_norm_6(mode, model, batch):
    model = to_float32(model, batch)
    images = torch.cat([batch.x, batch.views["weak"]]) if mode == "joint" else batch.views["weak"]
    in_mode(VAT(), mode)(model, batch, None)
    norms = perturbation(model, images).flatten(1).norm(dim=1)
    torch.testing.assert_close(norms, torch.full_like(norms, 6.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_perturbation_points_along_the_exact_direction(mode, autocast, model, batch):
    model = to_float32(model, batch)
    images = torch.cat([batch.x, batch.views["weak"]]) if mode == "joint" else batch.views["weak"]
    exact = exact_direction(model, images, exact_unit(same_noise(images)))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        in_mode(VAT(), mode)(model, batch, None)
    found = perturbation(model, images).double()
    assert cosine_similarity(found.flatten(1), exact.flatten(1)).min() > 0.95


def test_a_small_gradient_is_shortened_by_the_official_constants_only(model, batch):
    for parameter in model.head.parameters():
        parameter.data *= 1e-9  # predictions hardly depend on the image
    lengths = []
    for safe in (True, False):
        VAT(safe_normalization=safe)(model, make_batch(), None)
        lengths.append(perturbation(model, torch.cat([batch.x, batch.views["weak"]])).flatten(1).norm(dim=1))
    torch.testing.assert_close(lengths[0], torch.full_like(lengths[0], 6.0))
    assert lengths[1].max() < 5.9


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_an_image_without_gradient_is_not_moved(safe, mode, plain_model, batch):
    batch.views["weak"][2] = 0
    # A black image switches every unit off, and xi does not revive one.
    plain_model.convolution.bias.data.fill_(-1.0)
    images = torch.cat([batch.x, batch.views["weak"]]) if mode == "joint" else batch.views["weak"]
    losses = in_mode(VAT(safe_normalization=safe), mode)(plain_model, batch, None)
    moved = perturbation(plain_model, images).flatten(1).norm(dim=1)[-6:]
    assert moved[2] == 0
    assert moved[[0, 1, 3, 4, 5]].min() > 1
    assert losses.unlabeled.isfinite()
    assert gradient(losses.unlabeled, plain_model).isfinite().all()


def test_a_prediction_that_no_image_changes_costs_nothing(model, batch):
    model.head.weight.data.zero_()
    assert VAT()(model, batch, None).unlabeled == 0


@pytest.fixture
def prepared_model():
    """As accelerate leaves it under bf16."""
    # A trainer of another test may have set another precision.
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="bf16", cpu=True).prepare_model(make_model().float())
    AcceleratorState._reset_state(reset_partial_state=True)


def test_only_the_main_forward_runs_in_the_precision_of_accelerate(prepared_model, batch):
    to_float32(prepared_model, batch)
    dtypes = []
    prepared_model.convolution.register_forward_hook(
        lambda module, inputs, output: dtypes.append(output.dtype)
    )
    forward_method = prepared_model.forward
    VAT()(prepared_model, batch, None)
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    assert prepared_model.forward is forward_method


def test_without_mixed_precision_the_main_forward_gives_the_target(model, batch):
    VAT()(model, batch, None)
    assert len(model.seen) == 3


def test_two_logits_move_apart_or_together():
    batch = pixel_batch(x=[[0, 0]], y=[[1, 0]], weak=[[1, 2]])
    unlabeled = VAT(eps=0.5)(PixelModel(), batch, None).unlabeled
    expected = []
    # Along (1, -1) / sqrt(2) the difference of the logits moves by sqrt(2) eps; noise gives the sign.
    for sign in (-1, 1):
        p, q = [1 / (1 + math.exp(-difference)) for difference in (1 + sign * 0.5 * math.sqrt(2), 1)]
        expected.append(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))
    assert min(abs(unlabeled.item() - value) for value in expected) < 1e-6


def test_tf32_is_off_inside_and_back_afterwards(model):
    """It keeps ten bits of a pixel, less than the trial step changes."""
    conv, matmul = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    kept = conv.fp32_precision, matmul.fp32_precision
    assert "tf32" in kept  # torch's default
    with full_precision(model, "cuda") as was_mixed:
        assert was_mixed
        assert (conv.fp32_precision, matmul.fp32_precision) == ("ieee", "ieee")
    assert (conv.fp32_precision, matmul.fp32_precision) == kept
    with full_precision(model, "cpu") as was_mixed:
        assert not was_mixed
