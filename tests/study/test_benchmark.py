"""The instruments of the benchmark are right; how fast anything is, no test says."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hf_fixastep.study import benchmark
from hf_fixastep.study.benchmark import (
    GOALS,
    MODES,
    Alternate,
    Benchmark,
    BenchmarkArguments,
    Row,
    sparse_images,
)
from hf_fixastep.study.meters import (
    Activations,
    Convolutions,
    HostReads,
    interleave,
    over,
    peak_memory,
    silence,
)
from tests.short_runs import tiny_wide_resnet


TINY = [
    "--device",
    "cpu",
    "--model_kwargs",
    "{depth: 10, width: 1}",
    "--image_size",
    "8",
    "--batch_size",
    "4",
]
FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
# Of a Wide ResNet of depth 10 and width 1 on 8x8 images: channels in and out, side of the kernel and of the
# output.
LAYERS = [
    (3, 16, 3, 8),
    *[(16, 16, 3, 8), (16, 16, 3, 8)],
    *[(16, 32, 3, 4), (32, 32, 3, 4), (16, 32, 1, 4)],
    *[(32, 64, 3, 2), (64, 64, 3, 2), (32, 64, 1, 2)],
]
MULTIPLICATIONS = [inner * outer * kernel**2 * side**2 for inner, outer, kernel, side in LAYERS]


def run(*argv: str) -> tuple[list[str], dict[str, Any]]:
    """Lines of the output, and the last one read as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        benchmark.main([*TINY, *argv])
    lines = out.getvalue().splitlines()
    return lines, json.loads(lines[-1])


def make_benchmark(folder: Path, **settings: Any) -> Benchmark:
    settings = {
        "model_kwargs": {"depth": 10, "width": 1},
        "image_size": 8,
        "batch_size": 4,
        "rounds": 1,
    } | settings
    return Benchmark(BenchmarkArguments(device="cpu", **settings), str(folder))


# ---- the program


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("benchmark") / "ratios.json"
    sections = ["--only", "a,b,e,f,h", "--losses", "mean_teacher", "--rounds", "2"]
    return *run(*sections, "--out", str(out)), out


def test_the_last_line_holds_the_named_ratios(report: Any) -> None:
    expected = {
        f"{name}/mean_teacher/{mode}" for name in ("fix_over_base", "fix_over_convolutions") for mode in MODES
    }
    expected |= {f"gate/host_reads/mean_teacher/{mode}" for mode in MODES}
    expected |= {"gate/percent_of_step", "memory/activations/mean_teacher", "evaluation/trainer_over_bare"}
    if Path("/proc/self/clear_refs").exists():
        expected.add("memory/peak/mean_teacher")
    ratios = report[1]["ratios"]
    assert ratios.keys() == report[1]["quartiles"].keys() == expected
    assert all(math.isfinite(value) and (value > 0 or "host_reads" in name) for name, value in ratios.items())


def test_a_median_lies_between_its_quartiles(report: Any) -> None:
    for name, (low, high) in report[1]["quartiles"].items():
        assert low <= report[1]["ratios"][name] <= high


def test_the_file_holds_the_last_line(report: Any) -> None:
    assert report[2].read_text() == report[0][-1] + "\n"


def test_the_table_says_what_was_used_and_which_goals_are_reached(report: Any) -> None:
    table = "\n".join(report[0][:-1])
    assert "'depth': 10, 'width': 1} 8x8, cpu, 1 threads, 2 rounds" in table
    row = next(line for line in report[0] if "fix_over_base/mean_teacher/joint" in line)
    assert "4+4" in row
    assert "<= 1.9" in row
    assert ("yes" in row) == (report[1]["ratios"]["fix_over_base/mean_teacher/joint"] <= 1.9)


def test_separate_keeps_half_of_the_activations_of_mean_teacher(report: Any) -> None:
    """Four rows at a time instead of eight; what does not depend on the rows is small."""
    assert report[1]["ratios"]["memory/activations/mean_teacher"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--only", "a,z"], "Unknown section 'z'."),
        (["--losses", "fixmach"], "Unknown loss 'fixmach'. Did you mean fixmatch?"),
        (["--losses", "supervised"], "Unknown loss 'supervised'."),
        (["--device", "tpu"], "Unknown device 'tpu'."),
        (["--roundes", "3"], "Unknown argument 'roundes'. Did you mean rounds?"),
        (["--model_kwargs", "{depth: 11}", "--only", "a"], "depth is 11"),
    ],
)
def test_a_mistake_ends_in_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        benchmark.main(argv)
    assert str(stopped.value).startswith("error: ")
    assert sentence in str(stopped.value)
    assert "\n" not in str(stopped.value)


@pytest.mark.slow
def test_every_goal_belongs_to_a_number_of_some_section() -> None:
    lines, result = run("--losses", "mean_teacher,pi_model,vat,fixmatch,mixmatch", "--rounds", "1", "--quick")
    on_gpus_only = {"gate/device_waits/*"}
    for pattern in GOALS.keys() - on_gpus_only:
        assert any(fnmatch(name, pattern) for name in result["ratios"]), pattern
    assert {"processes/one_over_two", "views/strong/448/one_draw_over_ours"} <= result["ratios"].keys()
    assert "fix_over_base/mixmatch/joint" in result["ratios"]
    assert len(lines) > len(result["ratios"])


# ---- time


def test_jobs_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    durations = {"A": [9.0, 1.0, 2.0], "B": [9.0, 4.0, 4.0]}
    clock = [0.0]

    def job(name: str) -> None:
        clock[0] += durations[name][order.count(name)]
        order.append(name)

    times = interleave({"A": lambda: job("A"), "B": lambda: job("B")}, 2, lambda: clock[0])
    assert order == ["A", "B", "A", "B", "A", "B"]
    assert times == {"A": [1.0, 2.0], "B": [4.0, 4.0]}
    assert over(times["B"], times["A"], 10) == [40.0, 20.0]


def test_a_job_in_the_loop_is_not_part_of_the_loop() -> None:
    """Steps of 5 s, jobs of 3 s."""
    clock = [0.0]

    def spend(seconds: float) -> None:
        clock[0] += seconds

    alternate = Alternate(lambda: spend(3), lambda: clock[0])
    for _ in range(4):
        spend(5)
        alternate.on_step_end()
    assert alternate.times == {"loop": [5, 5, 5], "job": [3, 3, 3]}


def test_the_loop_is_the_one_of_the_trainer(tmp_path: Path) -> None:
    bench = make_benchmark(tmp_path)
    done: list[int] = []
    times = bench.in_loop(benchmark.Idle, lambda: done.append(1), 3)
    assert len(done) == 4
    assert [len(values) for values in times.values()] == [3, 3]


@pytest.mark.parametrize(
    ("name", "value", "reached"),
    [
        ("trainer/overhead_ms", 0.5, "yes"),
        ("trainer/overhead_ms", 0.6, "no"),
        ("views/weak/64/pil_over_ours", 24.0, "no"),
        ("views/weak/64/pil_over_ours", 26.0, "yes"),
        ("fix_over_base/pseudo_label/separate", 1.0, ""),
    ],
)
def test_a_goal_is_a_bound_from_above_or_below(name: str, value: float, reached: str) -> None:
    assert Row(name, value, value, value, "").reached == reached


# ---- convolutions


def signature(convolutions: Convolutions) -> list[Any]:
    """What was called, in order, tensors as shape, stride and type."""
    return [
        (
            operation,
            [(a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments],
            graded,
        )
        for operation, arguments, graded in convolutions.calls
    ]


def test_the_repetition_makes_the_same_calls() -> None:
    model = tiny_wide_resnet().to(memory_format=torch.channels_last)
    with Convolutions() as first:
        model(pixel_values=torch.randn(5, 3, 8, 8)).logits.sum().backward()
    with Convolutions() as second:
        first()
    assert signature(first) == signature(second)
    assert any(a[0].is_contiguous(memory_format=torch.channels_last) for _, a, _ in first.calls[1:9])


def test_calls_and_operations_of_a_forward_and_backward_pass_are_those_counted_by_hand() -> None:
    model, rows = tiny_wide_resnet(), 5
    with Convolutions() as convolutions:
        model(pixel_values=torch.randn(rows, 3, 8, 8)).logits.sum().backward()
    classifier = 64 * 3
    # The gradient for weights everywhere, that for the input everywhere but in the first layer.
    by_hand = 2 * rows * (3 * (sum(MULTIPLICATIONS) + classifier) - MULTIPLICATIONS[0])
    assert Counter(call[0] for call in convolutions.calls)[FORWARD] == len(LAYERS)
    assert Counter(call[0] for call in convolutions.calls)[BACKWARD] == len(LAYERS)
    assert len(convolutions.calls) == 2 * len(LAYERS) + 3
    assert convolutions.flops == by_hand
    with FlopCounterMode(display=False) as counter:
        convolutions()
    assert counter.get_total_flops() == by_hand


def test_a_step_of_mean_teacher_is_the_forwards_and_backwards_of_the_method(tmp_path: Path) -> None:
    """Joint: both halves forward and twice backward, the teacher on one view, guesses for two views."""
    ready = make_benchmark(tmp_path).ready("mean_teacher", batchnorm="joint")
    with Convolutions() as convolutions:
        ready.step()
    calls = Counter(call[0] for call in convolutions.calls)
    assert (calls[FORWARD], calls[BACKWARD]) == (4 * len(LAYERS), 2 * len(LAYERS))
    classifier = 64 * benchmark.CLASSES
    forward, backward = (
        sum(MULTIPLICATIONS) + classifier,
        2 * (sum(MULTIPLICATIONS) + classifier) - MULTIPLICATIONS[0],
    )
    assert convolutions.flops == 2 * ((8 + 4 + 4 + 4) * forward + 2 * 8 * backward)


def test_the_base_method_needs_one_backward_pass(tmp_path: Path) -> None:
    ready = make_benchmark(tmp_path).ready("mean_teacher", batchnorm="joint", gate="off", mix_labeled=False)
    before = [p.clone() for p in ready.model.parameters()]
    with Convolutions() as convolutions:
        ready.base_step()
    calls = Counter(call[0] for call in convolutions.calls)
    assert (calls[FORWARD], calls[BACKWARD]) == (2 * len(LAYERS), len(LAYERS))
    assert any(not torch.equal(old, new) for old, new in zip(before, ready.model.parameters(), strict=True))


def test_gradients_that_nobody_asked_for_are_not_repeated() -> None:
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8, requires_grad=True)
    with Convolutions() as convolutions:
        torch.autograd.grad(layer(x).sum(), x)
        with torch.no_grad():
            layer(x)
    masks = [arguments[-1] for operation, arguments, _ in convolutions.calls if operation is BACKWARD]
    assert masks == [[True, False, False]]
    assert [graded for operation, _, graded in convolutions.calls if operation is FORWARD] == [True, False]


# ---- reads and memory


def test_a_planted_read_is_seen() -> None:
    value = torch.ones(3)
    with HostReads() as reads:
        total = (value * 2).sum()
        assert reads.count == 0
        total.item()
        assert reads.count == 1
        if total > 1:
            float(total)
    assert reads.count == 3


def test_a_read_planted_in_a_step_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = make_benchmark(tmp_path).ready("mean_teacher")
    make_batch = ready.trainer.make_batch

    def reading(inputs: dict[str, Any]) -> Any:
        batch = make_batch(inputs)
        batch.x.sum().item()
        return batch

    with HostReads() as before:
        ready.step()
    monkeypatch.setattr(ready.trainer, "make_batch", reading)
    with HostReads() as after:
        ready.step()
    assert after.count == before.count + 1


def test_activations_are_what_a_small_graph_keeps() -> None:
    """exp keeps its result, the product keeps that again and the parameter: 400 bytes in all."""
    x, weight = torch.randn(100, requires_grad=True), nn.Parameter(torch.randn(100))
    activations = Activations([weight])
    with activations:
        result = (x.exp() * weight).sum()
        assert activations.now == 400
        result.backward()
    assert (activations.now, activations.peak) == (0, 400)


def test_the_peak_of_graphs_one_by_one_is_below_that_of_both_at_once() -> None:
    x = torch.randn(100, requires_grad=True)
    apart, at_once = Activations([]), Activations([])
    with apart:
        for _ in range(2):
            x.exp().sum().backward()
    with at_once:
        first, second = x.exp().sum(), x.exp().sum()
        (first + second).backward()
    assert (apart.peak, at_once.peak) == (400, 800)


def test_peak_memory_is_what_a_job_takes_for_a_moment() -> None:
    grown = peak_memory(lambda: torch.ones(2**25).sum(), "cpu")  # 128 MB
    if grown is None:
        pytest.skip("this system does not tell a process its memory")
    assert 0.9 * 2**27 < grown < 1.3 * 2**27


def test_silent_processes_do_not_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    spoken: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: spoken.append("all_reduce"))
    talk = dist.all_reduce
    with silence():
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        dist.broadcast(torch.ones(1), 0)
    assert not spoken
    assert dist.all_reduce is talk


# ---- data


def test_a_sparse_store_is_a_store_without_a_file(tmp_path: Path) -> None:
    images = sparse_images(tmp_path / "pixels", (10**6, 3, 32, 32))  # 3 GB
    assert images.pixels.shape == (10**6, 3, 32, 32)
    assert not images[10**6 - 1]["pixel_values"].any()
    assert not list(tmp_path.iterdir())


def test_draws_are_compared_with_a_step(tmp_path: Path) -> None:
    bench = make_benchmark(tmp_path)
    bench.draws([100, 1000, 10000], (4, 8), step=2.0)
    assert [row.name for row in bench.rows] == [
        f"growth/draw_from_1e+0{n}_percent_of_step" for n in (2, 3, 4)
    ]


def test_views_are_compared_at_equal_work(tmp_path: Path) -> None:
    pixels = torch.randint(256, (6, 3, 16, 16), dtype=torch.uint8)
    views = make_benchmark(tmp_path, image_size=16).trainer("fixmatch").views
    for kind, reference in benchmark.reference_views(16).items():
        jobs = benchmark.view_jobs(getattr(views, kind), reference, pixels)
        outputs = {name: job() for name, job in jobs.items()}
        assert {(o.shape, o.dtype) for o in outputs.values()} == {(torch.Size([6, 3, 16, 16]), torch.float32)}
        assert all(o.abs().max() <= 2 + 1e-5 for o in outputs.values())  # normalized alike


# ---- costs of methods


def test_costs_are_those_of_the_losses_and_the_procedures() -> None:
    _, result = run("--only", "k", "--losses", "openmatch,mtcf", "--rounds", "1")
    methods = [
        f"{name}/{kind}/{mode}"
        for name in ("openmatch", "mtcf", "safe_student")
        for kind in ("base", "fix")
        for mode in MODES
    ]
    assert result["ratios"].keys() == {f"cost/{name}" for name in [*methods, "curriculum_labeling"]}
    assert all(value > 0 for value in result["ratios"].values())


@pytest.mark.parametrize(("loss", "forwards"), [("supervised", 1), ("openmatch", 2), ("mtcf", 4)])
def test_costs_are_those_of_steps_behind_all_warmups(loss: str, forwards: int, tmp_path: Path) -> None:
    """OpenMatch: all views at once, and the teacher. MTCF: two guesses, MixMatch, and the domain head."""
    ready = make_benchmark(tmp_path, losses="openmatch").late(
        loss, batchnorm="joint", gate="off", mix_labeled=False
    )
    counts: list[int] = []
    for network in (ready.model, ready.trainer.teacher.model):
        network.register_forward_hook(lambda *_: counts.append(1))
    ready.step() if loss == "supervised" else ready.base_step()
    assert len(counts) == forwards


def test_costs_are_those_of_both_ways_to_normalize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_benchmark(tmp_path, losses="uasd")
    groups: list[dict[str, Any]] = []
    monkeypatch.setattr(bench, "time", lambda jobs: groups.append(jobs) or {name: [1.0] for name in jobs})
    bench.costs()
    uasd, student, _ = groups
    for kind, job in [*uasd.items(), *student.items()]:
        if kind != "alone":
            assert job.__self__.trainer.loss.batchnorm == kind.split("/")[1]
            assert job.__self__.trainer.mix_labeled is kind.startswith("fix")
    assert type(job.__self__.trainer.loss).__name__ == "SafeStudentLoss"


def test_all_methods_have_the_same_labeled_images(tmp_path: Path) -> None:
    bench = make_benchmark(tmp_path, batch_size=None)
    sizes = {
        (len(r.inputs["labels"]), len(r.inputs["unlabeled"])) for r in map(bench.late, ("uasd", "fixmatch"))
    }
    assert sizes == {(16, 16), (16, 112)}


def test_batches_are_those_of_the_presets_unless_given() -> None:
    def sizes(loss: str, **settings: Any) -> tuple[int, float]:
        return Benchmark(BenchmarkArguments(**settings), "").sizes(loss)

    assert sizes("fixmatch", device="cpu") == (8, 7)
    assert sizes("mean_teacher", device="cpu") == (32, 1)
    assert sizes("fixmatch", device="cuda") == (64, 7)
    assert sizes("fixmatch", device="cpu", batch_size=64) == (64, 7)
    assert sizes("fixmatch", device="cpu", unlabeled_ratio=3.0, quick=True) == (8, 3)
