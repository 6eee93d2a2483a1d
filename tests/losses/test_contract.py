"""What holds for every loss in `LOSSES`, and how they are found. A loss's own file has its formula."""

from __future__ import annotations

import copy
import inspect
import re
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_fixastep.losses import LOSSES, get_loss
from hf_fixastep.losses.presets import PRESETS
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
from tests.short_runs import known_arguments


# With these arguments, where a loss has them, every row counts from the first step on.
EAGER = {
    "threshold": 0.0,
    "warmup_steps": 0,
    "ramp_steps": 0,
    "visits": 1,
    "adversarial_start": 0,
    "adversarial_steps": 1,
    "reversal_start": 0,
}
# Numbers beside the bounds of an argument, where a loss has it; a negative or infinite one is wrong anywhere.
OUTSIDE = dict.fromkeys(("threshold", "decay", "momentum"), (1.5,))
OUTSIDE |= dict.fromkeys(("temperature", "alpha", "multiplier", "xi", "eps", "hidden", "visits"), (0,))
OUTSIDE |= dict.fromkeys(
    ("virtual_rate", "net_rate", "epoch_steps", "adversarial_steps", "reversal_steps"), (0,)
)
ALL = pytest.mark.parametrize("name", LOSSES)
BOTH_MODES = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def teacher():
    return make_model(seed=1).eval()


def new_loss(name, mode="joint"):
    return in_mode(prepared(get_loss(name, **known_arguments(name, EAGER)), make_model()), mode)


def make_loss(name, mode="joint"):
    """A loss that has seen every unlabeled image before, and takes it for an inlier."""
    loss = new_loss(name, mode)
    loss(make_model(seed=2), make_batch(), make_model(seed=1).eval())
    if name == "openmatch":
        loss.averaged[CLASSES:] += 9
    return loss


def run(loss, model, teacher, step=1):
    batch = make_batch()
    batch.step = step
    return loss(model, batch, teacher)


def values_of(losses):
    return [value for value in (losses.labeled, losses.unlabeled) if value is not None]


def state_of(loss):
    return copy.deepcopy(loss.state_dict())


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


# ---- what a loss says about itself


@ALL
def test_a_loss_states_its_key_title_paper_citation_and_presets(name):
    kind = LOSSES[name]
    assert type(get_loss(name)) is kind
    assert (kind.name, bool(kind.title), kind.settings.keys() <= set(PRESETS)) == (name, True, True)
    if kind.views:  # all but the baseline
        assert re.search(r"\b20\d\d\b", kind.paper)
        assert inspect.cleandoc(kind.citation).startswith("@")


@ALL
def test_a_loss_reads_exactly_the_views_it_declares(name, model, batch, teacher):
    batch.views = RecordingDict(batch.views)
    new_loss(name)(model, batch, teacher)
    assert batch.views.read == set(LOSSES[name].views)


# ---- gradients


@ALL
@BOTH_MODES
def test_both_gradients_reach_every_parameter_and_own_layers_get_one(name, mode, model, teacher):
    loss = make_loss(name, mode)
    values = values_of(run(loss, model, teacher))
    # The bias before a batch norm cancels out; all other gradients are far from zero.
    others = [p for n, p in model.named_parameters() if n != "convolution.bias"]
    for value in values:
        assert all(g.abs().max() > 1e-6 for g in torch.autograd.grad(value, others, retain_graph=True))
    for parameter in loss.parameters():
        assert torch.autograd.grad(sum(values), parameter, retain_graph=True)[0].abs().max() > 1e-9


@ALL
@BOTH_MODES
def test_the_two_losses_have_graphs_that_the_trainer_can_walk(name, mode, model, teacher):
    first, *second = values_of(run(make_loss(name, mode), model, teacher))
    first.backward(retain_graph=mode == "joint")  # separate: apart, so that each is freed at once
    for value in second:
        value.backward()


@ALL
def test_joint_and_separate_agree_without_batch_norm(name, plain_model):
    teacher = make_model(batchnorm=False, seed=1).eval()
    results = []
    for mode in MODES:
        loss, batch = make_loss(name, mode), make_batch()
        loss.load_state_dict(make_loss(name).state_dict())  # there the model has batch norm
        if name == "vat" and mode == "separate":  # the joint mode draws noise for the labeled rows first
            torch.empty_like(batch.x).normal_(generator=batch.generator)
        values = values_of(loss(plain_model, batch, teacher))
        results.append(torch.cat([torch.stack(values), *(gradient(v, plain_model) for v in values)]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].separable])
def test_a_separable_loss_is_the_sum_of_its_parts(name, model, batch, teacher):
    whole = make_loss(name, "separate")(model, batch, teacher)
    batch, parts = make_batch(), make_loss(name, "separate")
    unlabeled = parts(model, batch.unlabeled_part(), teacher)
    assert unlabeled.labeled is None
    torch.testing.assert_close(unlabeled.unlabeled, whole.unlabeled)
    torch.testing.assert_close(parts.labeled_part(model, batch), whole.labeled)


# ---- what a step leaves behind


@ALL
@BOTH_MODES
def test_one_forward_with_the_labeled_images_updates_the_running_statistics(
    name, mode, model, batch, teacher
):
    new_loss(name, mode)(model, batch, teacher)
    together = mode == "joint" and LOSSES[name].views
    candidates = [s for s in model.seen if (len(s) > len(batch.x) if together else len(s) == len(batch.x))]
    found = dict(model.named_buffers())
    assert model.norm.num_batches_tracked == 1
    assert any(
        all(torch.equal(found[key], value) for key, value in buffers_after(make_model(), images).items())
        for images in candidates
    )


@ALL
@BOTH_MODES
def test_a_step_waits_for_nothing_and_touches_nothing_but_its_own_state(name, mode, model, teacher):
    loss, random = make_loss(name, mode), torch.get_rng_state()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in teacher.named_buffers()}
    with NoHostSync():
        losses = run(loss, model, teacher)
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert not any(teacher.graded)
    assert_buffers(teacher, buffers)
    assert not any(buffer.requires_grad for buffer in loss.buffers())
    assert all(value.isfinite() for value in [*values_of(losses), *losses.stats.values()])


@ALL
@BOTH_MODES
def test_a_second_step_is_the_same_after_a_resume(name, mode, model, teacher):
    whole, resumed = make_loss(name, mode), new_loss(name, mode)
    resumed.load_state_dict(state_of(whole))
    results = []
    for loss in (whole, resumed):
        losses = run(loss, copy.deepcopy(model), teacher)
        results.append([*values_of(losses), *losses.stats.values(), *loss.state_dict().values()])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


@ALL
def test_preparing_again_forgets_everything(name):
    fresh, used = new_loss(name), make_loss(name)
    prepared(used, make_model())
    assert all(torch.equal(value, used.state_dict()[key]) for key, value in fresh.state_dict().items())


@ALL
def test_state_outlives_a_step_that_is_not_finite(name, model, batch, teacher):
    loss = new_loss(name)
    batch.views = {view: images * float("nan") for view, images in batch.views.items()}
    loss(model, batch, teacher)
    assert all(value.isfinite().all() for value in loss.state_dict().values())


# ---- bad input


@ALL
def test_a_loss_that_draws_or_asks_the_teacher_refuses_to_go_without(name, model, batch, teacher):
    new_loss(name)(model, batch, teacher)
    draws = not torch.equal(batch.generator.get_state(), make_batch().generator.get_state())
    batch.generator = None
    with pytest.raises(ValueError, match="needs a batch with a generator") if draws else nullcontext():
        new_loss(name)(model, batch, teacher)
    with pytest.raises(ValueError, match="needs a teacher") if teacher.seen else nullcontext():
        new_loss(name)(model, make_batch(), None)


@ALL
def test_every_number_is_checked_at_construction(name):
    """YAML 1.1 reads 1e-6 as text."""
    parameters = inspect.signature(LOSSES[name]).parameters.values()
    for argument in (p.name for p in parameters if type(p.default) in (int, float)):
        for value in (float("nan"), float("inf"), -0.1, "1e-6", *OUTSIDE.get(argument, ())):
            with pytest.raises(ValueError, match=f"^{argument} must be a .*, not {value!r}.$"):
                get_loss(name, **{argument: value})


def test_get_loss_passes_arguments_on():
    assert get_loss("fixmatch", threshold=0.7).threshold == 0.7


@pytest.mark.parametrize(
    ("wrong", "right"), [("fixmach", "fixmatch"), ("VAT", "vat"), ("Mean-Teacher", "mean_teacher")]
)
def test_an_unknown_loss_is_refused_with_the_nearest_and_all_names(wrong, right):
    with pytest.raises(ValueError, match=rf"Unknown loss '{wrong}'\. Did you mean {right}\?") as error:
        get_loss(wrong)
    assert ", ".join(LOSSES) in str(error.value)


@pytest.mark.parametrize(
    ("name", "argument", "sentence"),
    [
        ("xyzzy", None, f"Unknown loss 'xyzzy'. Choose one of {', '.join(LOSSES)}."),
        (
            "fixmatch",
            "treshold",
            "Unknown argument of fixmatch 'treshold'. Did you mean threshold? "
            "Choose one of threshold, temperature.",
        ),
        ("pi_model", "threshold", "Unknown argument of pi_model 'threshold'. There is none"),
    ],
)
def test_what_a_loss_does_not_know_is_refused_in_one_sentence(name, argument, sentence):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        get_loss(name, **({argument: 0.9} if argument else {}))
