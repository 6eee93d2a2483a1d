"""What holds for every loss in `LOSSES`, and how they are found."""

from __future__ import annotations

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fixastep.losses import LOSSES, get_loss
from tests.losses.conftest import (
    CLASSES,
    MODES,
    assert_buffers,
    buffers_after,
    gradient,
    in_mode,
    make_batch,
    make_model,
    prepared,
)


EAGER = {  # every row counts, from the first step on
    "pseudo_label": {"threshold": 0.0},
    "fixmatch": {"threshold": 0.0},
    "uasd": {"threshold": 0.0, "warmup_steps": 0},
    "mtcf": {"warmup_steps": 0, "ramp_steps": 0, "visits": 1},
    "openmatch": {"warmup_steps": 0},
    "toor": {
        "threshold": 0.0,
        "ramp_steps": 0,
        "adversarial_start": 0,
        "adversarial_steps": 1,
        "reversal_start": 0,
    },
}
ALL = pytest.mark.parametrize("name", LOSSES)
BOTH_MODES = pytest.mark.parametrize("mode", MODES)


def make_loss(name, mode="joint"):
    """A loss that has seen every unlabeled image before, and takes it for an inlier."""
    loss = in_mode(prepared(get_loss(name, **EAGER.get(name, {})), make_model()), mode)
    for state in ("sums", "averages", "history", "visited"):
        if state in dict(loss.named_buffers()):
            values = torch.rand(getattr(loss, state).shape, generator=torch.Generator().manual_seed(4))
            getattr(loss, state).copy_(values if state != "visited" else torch.ones(len(values)))
    if name == "openmatch":
        loss.averaged[CLASSES:] += 9
    return loss


class RecordingDict(dict):
    def __init__(self, *args):
        super().__init__(*args)
        self.read = set()

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)


class NoHostSync(TorchDispatchMode):
    """Refuses what would make the host wait for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero):
            raise AssertionError(f"{function} waits for the device")
        if function.overloadpacket is torch.ops.aten.index and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        ):
            raise AssertionError("a boolean index waits for the device")
        return function(*args, **(kwargs or {}))


@ALL
def test_a_loss_reads_exactly_the_views_it_declares(name, model, batch):
    batch.views = RecordingDict(batch.views)
    loss = make_loss(name)
    loss(model, batch, make_model(seed=1).eval())
    assert batch.views.read == set(loss.views)


@ALL
@BOTH_MODES
def test_both_gradients_reach_every_parameter(name, mode, model, batch):
    losses = make_loss(name, mode)(model, batch, make_model(seed=1).eval())
    for value in (losses.labeled, losses.unlabeled):
        if value is not None:
            # The bias before a batch norm cancels out; all other gradients are far from zero.
            others = [p for n, p in model.named_parameters() if n != "convolution.bias"]
            assert all(g.abs().max() > 1e-6 for g in torch.autograd.grad(value, others, retain_graph=True))


@ALL
def test_joint_and_separate_agree_without_batch_norm(name, plain_model):
    teacher = make_model(batchnorm=False, seed=1).eval()
    results = []
    for mode in MODES:
        batch = make_batch()
        if name == "vat" and mode == "separate":  # the joint mode draws noise for the labeled rows first
            torch.empty_like(batch.x).normal_(generator=batch.generator)
        losses = make_loss(name, mode)(plain_model, batch, teacher)
        values = [v for v in (losses.labeled, losses.unlabeled) if v is not None]
        results.append(torch.cat([torch.stack(values), *(gradient(v, plain_model) for v in values)]))
    torch.testing.assert_close(*results)


@ALL
def test_separate_mode_updates_the_running_statistics_with_one_labeled_forward(name, model, batch):
    loss = make_loss(name, "separate")
    initial = make_model()
    loss(model, batch, make_model(seed=1).eval())
    labeled = next(images for images in model.seen if len(images) == len(batch.x))
    assert model.norm.num_batches_tracked == 1
    assert_buffers(model, buffers_after(initial, labeled))


@ALL
@BOTH_MODES
def test_a_loss_leaves_the_global_generator_alone(name, mode, model, batch):
    before = torch.get_rng_state()
    make_loss(name, mode)(model, batch, make_model(seed=1).eval())
    assert torch.equal(before, torch.get_rng_state())


@ALL
@BOTH_MODES
def test_a_loss_never_waits_for_the_device(name, mode, model, batch):
    teacher = make_model(seed=1).eval()
    with NoHostSync():
        make_loss(name, mode)(model, batch, teacher)


@ALL
@BOTH_MODES
def test_a_loss_leaves_no_gradient_behind(name, mode, model, batch):
    make_loss(name, mode)(model, batch, make_model(seed=1).eval())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["vat", "mixmatch", "mtcf", "toor"])
def test_a_loss_that_draws_refuses_a_batch_without_generator(name, model, batch):
    batch.generator = None
    with pytest.raises(ValueError, match="needs a batch with a generator"):
        make_loss(name)(model, batch, None)


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].separable])
def test_a_separable_loss_is_the_sum_of_its_parts(name, model, batch):
    teacher = make_model(seed=1).eval()
    whole = make_loss(name, "separate")(model, batch, teacher)
    batch, parts = make_batch(), make_loss(name, "separate")
    unlabeled = parts(model, batch.unlabeled_part(), teacher)
    assert unlabeled.labeled is None
    torch.testing.assert_close(unlabeled.unlabeled, whole.unlabeled)
    torch.testing.assert_close(parts.labeled_part(model, batch), whole.labeled)


@ALL
@BOTH_MODES
def test_the_two_losses_of_a_loss_have_graphs_that_the_trainer_can_walk(name, mode, model, batch):
    losses = make_loss(name, mode)(model, batch, make_model(seed=1).eval())
    if losses.unlabeled is not None:
        # Separate: apart, so that each is freed at once.
        losses.labeled.backward(retain_graph=mode == "joint")
        losses.unlabeled.backward()


@ALL
@BOTH_MODES
def test_own_parameters_of_a_loss_get_a_gradient(name, mode, model, batch):
    batch.step = 1
    loss = make_loss(name, mode)
    losses = loss(model, batch, make_model(seed=1).eval())
    total = losses.labeled if losses.unlabeled is None else losses.labeled + losses.unlabeled
    for parameter in loss.parameters():
        assert torch.autograd.grad(total, parameter, retain_graph=True)[0].abs().max() > 1e-9


@ALL
def test_get_loss_gives_the_class_of_that_name(name):
    assert type(get_loss(name)) is LOSSES[name]


def test_get_loss_passes_arguments_on():
    assert get_loss("fixmatch", threshold=0.7).threshold == 0.7


@pytest.mark.parametrize(
    ("wrong", "right"), [("fixmach", "fixmatch"), ("VAT", "vat"), ("Mean-Teacher", "mean_teacher")]
)
def test_an_unknown_loss_is_refused_with_the_nearest_and_all_names(wrong, right):
    with pytest.raises(ValueError, match=rf"Unknown loss '{wrong}'\. Did you mean {right}\?") as error:
        get_loss(wrong)
    assert ", ".join(LOSSES) in str(error.value)


def test_a_loss_like_no_other_is_refused_without_a_suggestion():
    with pytest.raises(ValueError, match=r"^Unknown loss 'xyzzy'\. Choose one of supervised,"):
        get_loss("xyzzy")


def test_an_unknown_argument_is_refused_with_the_nearest_and_all_arguments():
    sentence = "Unknown argument of fixmatch 'treshold'. Did you mean threshold? Choose one of threshold, temperature."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        get_loss("fixmatch", treshold=0.9)


def test_an_argument_of_a_loss_without_arguments_is_refused():
    with pytest.raises(ValueError, match=r"Unknown argument of pi_model 'threshold'\. There is none"):
        get_loss("pi_model", threshold=0.9)


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        ("fixmatch", "threshold", 1.5),
        ("fixmatch", "threshold", float("nan")),
        ("fixmatch", "temperature", 0),
        ("pseudo_label", "threshold", -0.1),
        ("pseudo_label", "multiplier", 0),
        ("vat", "xi", 0.0),
        ("vat", "xi", "1e-6"),  # YAML 1.1 reads 1e-6 as text
        ("vat", "eps", float("inf")),
        ("mixmatch", "temperature", -1.0),
        ("mixmatch", "alpha", 0.0),
        ("uasd", "threshold", 1.1),
        ("uasd", "warmup_steps", -1),
        ("ds3l", "virtual_rate", 0.0),
        ("ds3l", "net_rate", -1.0),
        ("ds3l", "hidden", 0),
        ("mtcf", "temperature", 0.0),
        ("mtcf", "alpha", -1.0),
        ("mtcf", "visits", 0),
        ("mtcf", "epoch_steps", 0),
        ("mtcf", "warmup_steps", float("nan")),
        ("mtcf", "ramp_steps", -1),
        ("openmatch", "entropy_weight", -0.1),
        ("openmatch", "consistency_weight", float("inf")),
        ("openmatch", "threshold", 2.0),
        ("openmatch", "warmup_steps", -5),
        ("openmatch", "decay", 1.5),
        ("toor", "weight", -1.0),
        ("toor", "ramp_steps", -1),
        ("toor", "threshold", 1.2),
        ("toor", "recycling", -0.5),
        ("toor", "adversarial_start", -1),
        ("toor", "adversarial_steps", 0),
        ("toor", "reversal_start", -1),
        ("toor", "reversal_steps", 0),
        ("toor", "hidden", 0),
    ],
)
def test_a_bad_value_is_refused_at_construction(name, argument, value):
    with pytest.raises(ValueError, match=f"^{argument} must be a .*, not {value!r}.$"):
        get_loss(name, **{argument: value})
