from __future__ import annotations

import math

import pytest

from hf_fixastep.methods import preset
from hf_fixastep.step.schedules import cosine_7_16, fitted_decay, ramp_length, unlabeled_ramp


# ---- the learning rate [12]


@pytest.mark.parametrize(
    ("step", "factor"),
    [
        (0, 1),
        (3500, math.cos(7 * math.pi / 32)),
        (7000, math.sin(math.pi / 16)),  # 0.1951, a fifth
        (7999, math.sin(math.pi / 16000)),
        (8000, 0),
        (24_000, 0),  # a bare cosine would come back here
        (80_000, 0),
    ],
)
def test_the_cosine_goes_through_seven_sixteenths_of_its_circle(step: int, factor: float) -> None:
    """[12]"""
    assert cosine_7_16(step, 7000) == pytest.approx(factor, abs=1e-12)


def test_the_cosine_never_rises_and_never_is_negative() -> None:
    factors = [cosine_7_16(step, 100) for step in range(500)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] >= 0


# ---- ramps of the unlabeled weight


@pytest.mark.parametrize(("step", "share"), [(1, 0.01), (99, 0.99), (100, 1), (101, 1)])
def test_the_linear_ramp_grows_by_equal_parts(step: int, share: float) -> None:
    assert unlabeled_ramp("linear", step, 100) == pytest.approx(share)


@pytest.mark.parametrize(
    ("step", "share"),
    [
        (1023, 0),
        (1024, 1 / 1024),
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
def test_a_length_of_zero_means_no_ramp(kind: str) -> None:
    assert unlabeled_ramp(kind, 1, 0) == 1


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
def test_the_paper_preset_fits_the_cosine_to_the_run(loss: str) -> None:
    cycle = ramp_length(preset("paper", loss)["lr_cycle_steps"], 1000)
    assert cosine_7_16(1000, cycle) == pytest.approx(0.1951, abs=5e-5)


@pytest.mark.parametrize(
    ("loss", "shares"),
    [
        *((loss, [0.25, 0.5, 0.9975, 1, 1]) for loss in (PI, "mean_teacher", "pseudo_label", "vat")),
        (MIXMATCH, [0.1, 0.2, 0.399, 0.4, 1]),  # over the whole run instead of two fifths
        (FIXMATCH, [1, 1, 1, 1, 1]),
    ],
)
def test_the_paper_preset_ramps_the_unlabeled_weight(loss: str, shares: list[float]) -> None:
    settings = preset("paper", loss)
    length = ramp_length(settings["unlabeled_warmup_steps"], 1000)
    found = [unlabeled_ramp(settings["unlabeled_ramp"], step, length) for step in (100, 200, 399, 400, 1000)]
    assert found == pytest.approx(shares)


@pytest.mark.parametrize(
    ("steps", "decay"), [(1, 0), (20, 0), (40, 0.5), (400, 0.95), (20_000, 0.999), (10**6, 0.999)]
)
def test_a_fitted_teacher_averages_a_twentieth_of_the_run_and_at_most_a_thousand_steps(
    steps: int, decay: float
) -> None:
    assert fitted_decay(steps) == pytest.approx(decay, abs=1e-12)
