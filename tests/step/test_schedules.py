from __future__ import annotations

import math

import pytest

from hf_fixastep.methods import preset
from hf_fixastep.step.schedules import cosine_7_16, ramp_length, unlabeled_ramp


# ---- the learning rate [12]


@pytest.mark.parametrize("cycle", [7, 1000, 390_600])
def test_the_cosine_starts_at_one(cycle: int) -> None:
    """[12]"""
    assert cosine_7_16(0, cycle) == 1


@pytest.mark.parametrize("cycle", [7, 1000, 390_600])
def test_the_cosine_ends_its_cycle_at_a_fifth(cycle: int) -> None:
    """[12]"""
    assert cosine_7_16(cycle, cycle) == pytest.approx(0.1951, abs=5e-5)
    assert cosine_7_16(cycle, cycle) == pytest.approx(math.sin(math.pi / 16))


@pytest.mark.parametrize("after", [1, 1.5, 2, 3, 5, 10])
def test_the_cosine_is_zero_from_eight_sevenths_of_its_cycle_on(after: float) -> None:
    """[12]; a bare cosine would come back at 24/7."""
    assert cosine_7_16(round(after * 8000), 7000) == pytest.approx(0, abs=1e-12)


def test_the_cosine_is_positive_just_before_eight_sevenths_of_its_cycle() -> None:
    assert cosine_7_16(7999, 7000) > 1e-5


def test_the_cosine_never_rises_and_never_is_negative() -> None:
    factors = [cosine_7_16(step, 100) for step in range(500)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] >= 0


def test_half_way_the_cosine_is_that_of_seven_thirty_seconds_of_pi() -> None:
    assert cosine_7_16(500, 1000) == pytest.approx(math.cos(7 * math.pi / 32))


# ---- ramps of the unlabeled weight


@pytest.mark.parametrize(
    ("step", "share"), [(1, 0.01), (50, 0.5), (99, 0.99), (100, 1), (101, 1), (10**6, 1)]
)
def test_the_linear_ramp_grows_by_equal_parts(step: int, share: float) -> None:
    assert unlabeled_ramp("linear", step, 100) == pytest.approx(share)


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (1, 0),
        (1023, 0),
        (1024, 1 / 1024),
        (2047, 1 / 1024),
        (2048, 2 / 1024),
        (500_000, 488 / 1024),
        (1_048_575, 1023 / 1024),
        (1_048_576, 1),
        (2_000_000, 1),
    ],
)
def test_the_staircase_counts_whole_epochs_of_1024_steps(step: int, share: float) -> None:
    assert unlabeled_ramp("staircase", step, 1_048_576) == share


@pytest.mark.parametrize(
    ("step", "share"),
    [(1, math.exp(-5 * 0.995**2)), (100, math.exp(-1.25)), (200, 1), (300, 1), (150, math.exp(-5 / 16))],
)
def test_the_sigmoid_ramp_follows_its_formula(step: int, share: float) -> None:
    assert unlabeled_ramp("sigmoid", step, 200) == pytest.approx(share)


@pytest.mark.parametrize("kind", ["linear", "staircase", "sigmoid"])
@pytest.mark.parametrize("step", [1, 7, 10**6])
def test_a_length_of_zero_means_no_ramp(kind: str, step: int) -> None:
    assert unlabeled_ramp(kind, step, 0) == 1


@pytest.mark.parametrize(
    ("setting", "steps"),
    [(0.4, 40_000), (1.0, 100_000), (1, 100_000), (0, 0), (419_430, 419_430), (1.5, 1.5)],
)
def test_up_to_one_a_length_is_a_share_of_the_run(setting: float, steps: float) -> None:
    assert ramp_length(setting, 100_000) == steps


# ---- what the official code does [16]: the table of section 2.8

PI, FIXMATCH, MIXMATCH, SUPERVISED = "pi_model", "fixmatch", "mixmatch", "supervised"
# Loss, epochs, steps per epoch, iterations, final factor of the learning rate, final share of the weight.
RUNS = [
    (PI, 10_416, 37, 385_392, 0.875, 0.919),
    ("mean_teacher", 10_416, 37, 385_392, 0.875, 0.919),
    ("pseudo_label", 10_416, 37, 385_392, 0.875, 0.919),
    ("vat", 10_416, 37, 385_392, None, 0.919),
    (MIXMATCH, 10_416, 37, 385_392, None, 0.367),
    (FIXMATCH, 10_416, 37, 385_392, 0.213, 1),
    (SUPERVISED, 10_416, 37, 385_392, 0.213, None),
    (PI, 83_333, 4, 333_332, 0.906, 0.795),
    (MIXMATCH, 83_333, 4, 333_332, None, 0.317),
    (FIXMATCH, 83_333, 4, 333_332, 0.388, 1),
    (FIXMATCH, 123_333, 4, 493_332, 0, 1),
    (MIXMATCH, 223_696, 4, 894_784, None, 0.853),
    (PI, 10_416, 78, 812_448, 0.485, 1),
    ("vat", 10_416, 78, 812_448, None, 1),
    (FIXMATCH, 10_416, 78, 812_448, 0, 1),
    (SUPERVISED, 10_416, 78, 812_448, 0, None),
]


@pytest.mark.parametrize(("loss", "epochs", "steps", "iterations", "factor", "share"), RUNS)
def test_the_upstream_preset_ends_a_run_as_the_official_code_does(
    loss: str, epochs: int, steps: int, iterations: int, factor: float | None, share: float | None
) -> None:
    """[16]; None for a fixed learning rate, and for no unlabeled weight."""
    settings = preset("upstream", loss)
    assert epochs * steps == iterations
    cycle = ramp_length(settings["lr_cycle_steps"], iterations)
    assert (cosine_7_16(iterations, cycle) if cycle else None) == (
        None if factor is None else pytest.approx(factor, abs=6e-4)
    )
    if share is not None:
        length = ramp_length(settings["unlabeled_warmup_steps"], iterations)
        assert unlabeled_ramp(settings["unlabeled_ramp"], iterations, length) == pytest.approx(
            share, abs=6e-4
        )


@pytest.mark.parametrize("steps", [24, 25, 22])
def test_on_tmed2_the_cosine_of_the_official_code_is_flat(steps: int) -> None:
    """[16]"""
    cycle = ramp_length(preset("upstream", PI)["lr_cycle_steps"], 1000 * steps)
    assert cosine_7_16(1000 * steps, cycle) == pytest.approx(0.9995, abs=1e-4)


@pytest.mark.parametrize("loss", [FIXMATCH, SUPERVISED])
def test_the_shorter_cycle_of_the_official_code_reaches_zero_at_446400(loss: str) -> None:
    """[16]"""
    cycle = ramp_length(preset("upstream", loss)["lr_cycle_steps"], 812_448)
    assert cosine_7_16(446_399, cycle) > 1e-7
    assert cosine_7_16(446_400, cycle) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("loss", [PI, "mean_teacher", "pseudo_label", FIXMATCH, SUPERVISED])
@pytest.mark.parametrize("iterations", [1000, 385_392])
def test_the_paper_preset_fits_the_cosine_to_the_run(loss: str, iterations: int) -> None:
    cycle = ramp_length(preset("paper", loss)["lr_cycle_steps"], iterations)
    assert cosine_7_16(iterations, cycle) == pytest.approx(0.1951, abs=5e-5)


@pytest.mark.parametrize("loss", [PI, "mean_teacher", "pseudo_label", "vat"])
def test_the_paper_preset_ramps_over_the_first_two_fifths_of_the_run(loss: str) -> None:
    settings = preset("paper", loss)
    length = ramp_length(settings["unlabeled_warmup_steps"], 1000)
    shares = [unlabeled_ramp(settings["unlabeled_ramp"], step, length) for step in (100, 200, 399, 400, 1000)]
    assert shares == pytest.approx([0.25, 0.5, 0.9975, 1, 1])


def test_the_paper_preset_ramps_mixmatch_over_the_whole_run() -> None:
    settings = preset("paper", MIXMATCH)
    length = ramp_length(settings["unlabeled_warmup_steps"], 1000)
    assert [unlabeled_ramp(settings["unlabeled_ramp"], step, length) for step in (250, 1000)] == [0.25, 1]


@pytest.mark.parametrize("name", ["paper", "upstream"])
def test_fixmatch_has_no_ramp(name: str) -> None:
    settings = preset(name, FIXMATCH)
    assert (
        unlabeled_ramp(settings["unlabeled_ramp"], 1, ramp_length(settings["unlabeled_warmup_steps"], 1000))
        == 1
    )
