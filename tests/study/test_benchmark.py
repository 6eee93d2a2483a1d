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

from hf_fixastep.study import benchmark, pretrained
from hf_fixastep.study.benchmark import GOALS, MODES, Benchmark, BenchmarkArguments
from hf_fixastep.study.meters import Alternate, Convolutions, HostReads, Idle, interleave, over, silence
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
# Of a Wide ResNet of depth 10 and width 1 on 8x8 images: channels in and out, sides of kernel and output.
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
    tiny = {"model_kwargs": {"depth": 10, "width": 1}, "image_size": 8, "batch_size": 4, "rounds": 1}
    return Benchmark(BenchmarkArguments(device="cpu", **tiny | settings), str(folder))


# ---- the program


def test_the_output_is_a_table_and_a_line_of_named_ratios(tmp_path: Path) -> None:
    out = tmp_path / "ratios.json"
    sections = ["--only", "a,b,e", "--losses", "mean_teacher", "--rounds", "2", "--out", str(out)]
    lines, result = run(*sections)
    names = ("fix_over_base", "fix_over_convolutions", "gate/host_reads")
    expected = {f"{name}/mean_teacher/{mode}" for name in names for mode in MODES} | {"gate/percent_of_step"}
    ratios, quartiles = result["ratios"], result["quartiles"]
    assert ratios.keys() == quartiles.keys() == expected
    for name, value in ratios.items():
        assert math.isfinite(value)
        assert value == 0 if "host_reads" in name else value > 0
        assert quartiles[name][0] <= value <= quartiles[name][1]
    assert out.read_text() == lines[-1] + "\n"

    assert "'depth': 10, 'width': 1} 8x8, cpu, 1 threads, 2 rounds" in "\n".join(lines)
    (row,) = [line for line in lines[:-1] if "fix_over_base/mean_teacher/joint" in line]
    assert "4+4" in row
    assert "<= 1.9" in row
    assert ("yes" in row) == (ratios["fix_over_base/mean_teacher/joint"] <= 1.9)


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
    losses = ("--losses", "mean_teacher,pi_model,vat,fixmatch,mixmatch")
    names: set[str] = set()
    for words in (losses, ("--only", "l,m")):  # the last two sections only if they are asked for
        names |= run(*words, "--rounds", "1", "--quick")[1]["ratios"].keys()
    on_gpus_only = {"gate/device_waits/*"}
    for pattern in GOALS.keys() - on_gpus_only:
        assert any(fnmatch(name, pattern) for name in names), pattern
    assert {"processes/one_over_two", "fix_over_base/mixmatch/joint"} <= names


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
    done: list[int] = []
    times = make_benchmark(tmp_path).in_loop(Idle, lambda: done.append(1), 3)
    assert len(done) == 4
    assert [len(values) for values in times.values()] == [3, 3]


# ---- convolutions


def signature(convolutions: Convolutions) -> list[Any]:
    """What was called, in order, tensors as shape, stride and type."""
    return [
        (call, [(a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in arguments], graded)
        for call, arguments, graded in convolutions.calls
    ]


def test_calls_and_operations_of_a_forward_and_backward_pass_are_those_counted_by_hand() -> None:
    model, rows = tiny_wide_resnet().to(memory_format=torch.channels_last), 5
    with Convolutions() as convolutions:
        model(pixel_values=torch.randn(rows, 3, 8, 8)).logits.sum().backward()
    classifier = 64 * 3
    # The gradient for weights everywhere, that for the input everywhere but in the first layer.
    by_hand = 2 * rows * (3 * (sum(MULTIPLICATIONS) + classifier) - MULTIPLICATIONS[0])
    calls = Counter(call[0] for call in convolutions.calls)
    assert (calls[FORWARD], calls[BACKWARD], calls.total()) == (len(LAYERS), len(LAYERS), 2 * len(LAYERS) + 3)
    assert convolutions.flops == by_hand
    assert any(a[0].is_contiguous(memory_format=torch.channels_last) for _, a, _ in convolutions.calls[1:9])
    with FlopCounterMode(display=False) as counter, Convolutions() as repeated:
        convolutions()
    assert counter.get_total_flops() == by_hand
    assert signature(repeated) == signature(convolutions)


def test_a_step_of_mean_teacher_is_the_forwards_and_backwards_of_the_method(tmp_path: Path) -> None:
    """Joint: both halves forward and twice backward, the teacher on one view, guesses for two views."""
    ready = make_benchmark(tmp_path).ready("mean_teacher", batchnorm="joint")
    with Convolutions() as convolutions:
        ready.step()
    calls = Counter(call[0] for call in convolutions.calls)
    assert (calls[FORWARD], calls[BACKWARD]) == (4 * len(LAYERS), 2 * len(LAYERS))
    forward = sum(MULTIPLICATIONS) + 64 * benchmark.CLASSES
    backward = 2 * forward - MULTIPLICATIONS[0]
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


# ---- reads and processes


def test_a_read_planted_in_a_step_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If torch changes what a read ends in, the benchmark sees none: adapt `_compat.dispatch`."""
    ready = make_benchmark(tmp_path).ready("mean_teacher")
    make_batch = ready.trainer.make_batch

    def reading(inputs: dict[str, Any]) -> Any:
        batch = make_batch(inputs)
        if batch.x.sum() > -1e9:
            batch.x.sum().item()
        return batch

    with HostReads() as before:
        ready.step()
    monkeypatch.setattr(ready.trainer, "make_batch", reading)
    with HostReads() as after:
        ready.step()
    assert after.count == before.count + 2


def test_silent_processes_do_not_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    spoken: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: spoken.append("all_reduce"))
    talk = dist.all_reduce
    with silence():
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        dist.broadcast(torch.ones(1), 0)
    assert not spoken
    assert dist.all_reduce is talk


# ---- costs of methods


def test_costs_are_those_of_the_losses_and_the_procedures(tmp_path: Path, monkeypatch) -> None:
    bench = make_benchmark(tmp_path, losses="uasd,mtcf")
    groups: list[dict[str, Any]] = []
    monkeypatch.setattr(bench, "time", lambda jobs: groups.append(jobs) or {name: [1.0] for name in jobs})
    bench.costs()
    methods = [
        f"{name}/{kind}/{mode}"
        for name in ("uasd", "mtcf", "safe_student")
        for mode in MODES
        for kind in ("base", "fix")
    ]
    assert bench.rows.keys() == {f"cost/{name}" for name in [*methods, "curriculum_labeling"]}
    uasd, _, student, _ = groups
    for kind, job in [*uasd.items(), *student.items()]:
        if kind != "alone":
            assert job.__self__.trainer.loss.batchnorm == kind.split("/")[1]
            assert job.__self__.trainer.mix_labeled is kind.startswith("fix")
    assert type(job.__self__.trainer.loss).__name__ == "SafeStudentLoss"


@pytest.mark.parametrize(("loss", "forwards"), [("supervised", 1), ("openmatch", 2), ("mtcf", 4)])
def test_costs_are_those_of_steps_after_all_warmups(loss: str, forwards: int, tmp_path: Path) -> None:
    """OpenMatch: all views at once, and the teacher. MTCF: two guesses, MixMatch, and the domain head."""
    bench = make_benchmark(tmp_path, losses="openmatch")
    ready = bench.late(loss, batchnorm="joint", gate="off", mix_labeled=False)
    counts: list[int] = []
    for network in (ready.model, ready.trainer.teacher.model):
        network.register_forward_hook(lambda *_: counts.append(1))
    ready.step() if loss == "supervised" else ready.base_step()
    assert len(counts) == forwards


def test_batches_are_those_of_the_presets_unless_given(tmp_path: Path) -> None:
    def sizes(loss: str, **settings: Any) -> tuple[int, float]:
        return Benchmark(BenchmarkArguments(**settings), "").sizes(loss)

    assert sizes("fixmatch", device="cpu") == (8, 7)
    assert sizes("mean_teacher", device="cpu") == (32, 1)
    assert sizes("fixmatch", device="cuda") == (64, 7)
    assert sizes("fixmatch", device="cpu", batch_size=64) == (64, 7)
    assert sizes("fixmatch", device="cpu", unlabeled_ratio=3.0, quick=True) == (8, 3)
    late = map(make_benchmark(tmp_path, batch_size=None).late, ("uasd", "fixmatch"))
    found = {(len(ready.inputs["labels"]), len(ready.inputs["unlabeled"])) for ready in late}
    assert found == {(16, 16), (16, 112)}  # all methods have the same labeled images


def test_embedding_and_a_training_on_features_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "CHUNK", 2)
    _, result = run("--only", "l,m", "--quick", "true", "--rounds", "1")
    names = {f"embedding/{name}" for name in ("over_network", "cpu_over_network")}
    names |= {f"features/seconds_per_1000_steps/{gate}" for gate in ("drop", "per_example")}
    assert result["ratios"].keys() == names
    assert all(value > 0 for value in result["ratios"].values())
