"""What a step costs, in ratios that anyone can repeat.

    fixastep benchmark [--quick] [--only a,b] [--losses mean_teacher,fixmatch] [--out ratios.json]

Jobs that are compared take turns in one process (A, B, C, A, B, C, ...); a ratio is the median over the
rounds. The unit is CPU seconds, to which other users of the machine cannot add, or on a GPU the time until
the device is done. Prints a table and one line of JSON. Goals are those for WRN-28-2 on two CPU cores;
missing one is no error.

a  Fix-A-Step / the base method         e  the gate / a step, and host reads
b  Fix-A-Step / its convolutions alone  g  two processes / one
c  the Trainer's loop / the bare step   k  every method / labeled-only, only with --only k
l  embedding / the bare network         m  seconds of a training on features; both only with --only l,m
"""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PrinterCallback

from hf_fixastep.checks import check_choice
from hf_fixastep.config import FixAStepConfig, own_field
from hf_fixastep.data.images import Images
from hf_fixastep.losses import LOSSES
from hf_fixastep.losses.base import SemiSupervisedLoss
from hf_fixastep.methods import preset
from hf_fixastep.procedures.safe_student import SafeStudentLoss
from hf_fixastep.runs.arguments import ModelArguments, parse
from hf_fixastep.runs.training import load_model
from hf_fixastep.step.gate import GradientSlots
from hf_fixastep.study import meters, pretrained
from hf_fixastep.study.meters import Convolutions, Idle, Job, Ready, interleave, over
from hf_fixastep.trainer import FixAStepTrainer


MODES = ("separate", "joint")
CLASSES = 10
LATE = 999_999  # steps, after all warm-ups
GOALS = {  # a number should be at most
    "fix_over_base/mean_teacher/separate": 1.15,
    "fix_over_base/pi_model/separate": 1.10,
    "fix_over_base/vat/separate": 1.10,
    "fix_over_base/fixmatch/separate": 1.05,
    "fix_over_base/*/joint": 1.9,
    "fix_over_convolutions/*": 1.12,
    "trainer/loop_over_step": 1.02,
    "trainer/overhead_ms": 0.5,
    "gate/percent_of_step": 0.5,
    "gate/host_reads/*": 0,
    "gate/device_waits/*": 0,
    "processes/exposed_percent": 3,
    "embedding/over_network": 1.15,
    "features/seconds_per_1000_steps/*": 5,
}


@dataclass
class BenchmarkArguments:
    """What to measure, and on what."""

    only: str = own_field("a,b,c,e,g", "Letters of the sections to run.")
    losses: str = own_field("mean_teacher,pi_model,vat,fixmatch", "Base losses; often only the first.")
    model: str = own_field("wide_resnet_fixastep", "As in a recipe.")
    model_kwargs: dict | str | None = own_field(None, "Such as {depth: 16, width: 4}.")
    image_size: int = own_field(32, "Side of the images.")
    batch_size: int | None = own_field(None, "Labeled images; on a CPU 64 with the unlabeled ones, else 64.")
    unlabeled_ratio: float | None = own_field(None, "If not given, as the preset of the loss says.")
    rounds: int | None = own_field(None, "If not given 3, with quick 2.")
    threads: int = own_field(1, "Threads on a CPU.")
    device: str = own_field("cuda" if torch.cuda.is_available() else "cpu", "cpu or cuda.")
    bf16: bool = own_field(False, "Mixed precision, for GPUs.")
    quick: bool = own_field(False, "A network of depth 10, half of the rows, fewer rounds.")
    out: str | None = own_field(None, "File for the line of JSON.")

    def __post_init__(self) -> None:
        if self.quick and self.model_kwargs is None and self.model == "wide_resnet_fixastep":
            self.model_kwargs = {"depth": 10}
        self.rounds = self.rounds or (2 if self.quick else 3)
        for letter in self.only.split(","):
            check_choice("section", letter, SECTIONS)
        for loss in self.losses.split(","):
            check_choice("loss", loss, [name for name, kind in LOSSES.items() if kind.views])
        check_choice("device", self.device, ("cpu", "cuda"))


# ---- sections


class Row(NamedTuple):
    """A number of the table: a median, and the quartiles around it."""

    value: float
    low: float
    high: float
    note: str


class Benchmark:
    """Runs sections and keeps their rows."""

    def __init__(self, args: BenchmarkArguments, folder: str) -> None:
        self.args, self.folder = args, folder
        self.losses = args.losses.split(",")
        self.loss = self.losses[0]
        self.rounds = args.rounds or 1
        self.rows: dict[str, Row] = {}
        self.on_cpu = args.device == "cpu"
        torch.set_num_threads(args.threads)

    def now(self) -> float:
        return time.process_time() if self.on_cpu else self.wall()

    def wall(self) -> float:
        if not self.on_cpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def time(self, jobs: dict[str, Job]) -> dict[str, list[float]]:
        return interleave(jobs, self.rounds, self.now)

    def add(self, name: str, values: Sequence[float], note: str = "") -> None:
        low, high = np.percentile(values, [25, 75])
        self.rows[name] = Row(median(values), float(low), float(high), note)

    @property
    def full_size(self) -> int:
        """Labeled images where no time has to be saved."""
        return self.args.batch_size or (32 if self.args.quick else 64)

    @property
    def small_size(self) -> int:
        """Labeled images that leave time for many unlabeled ones."""
        return self.full_size if self.args.batch_size or not self.on_cpu else self.full_size // 4

    @property
    def rank_size(self) -> int:
        """Labeled images of one of two processes."""
        return max(2, self.sizes(self.loss)[0] // 2)

    def sizes(self, loss: str) -> tuple[int, float]:
        """Labeled images, and unlabeled ones for each of them."""
        ratio = self.args.unlabeled_ratio or preset("paper", loss)["unlabeled_ratio"]
        whole = self.args.batch_size or not self.on_cpu
        return (self.full_size if whole else max(2, round(self.full_size / (1 + ratio)))), ratio

    def note(self, loss: str, labeled: int | None = None) -> str:
        default, ratio = self.sizes(loss)
        return f"{labeled or default}+{round(ratio * (labeled or default))}"

    def images(self, count: int, labeled: bool = False) -> Images:
        side = self.args.image_size
        pixels = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator())
        return Images(pixels, torch.arange(count) % CLASSES if labeled else None)

    def trainer(
        self,
        loss: str,
        labeled: int | None = None,
        kind: type[FixAStepTrainer] = FixAStepTrainer,
        objective: SemiSupervisedLoss | None = None,
        **settings: Any,
    ) -> FixAStepTrainer:
        """On random images, with a learning rate that changes nothing; `objective` replaces the loss."""
        args, (default, ratio) = self.args, self.sizes(loss)
        labeled = labeled or default
        config: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "log_level": "error"}
        config |= {"loss": loss, "per_device_train_batch_size": labeled, "unlabeled_ratio": ratio}
        config |= {"max_steps": 10**6, "learning_rate": 1e-6, "save_strategy": "no"}
        config |= {"batchnorm": "separate", "use_cpu": self.on_cpu, "bf16": args.bf16, **settings}
        network = ModelArguments(args.model, args.model_kwargs, args.image_size, [0.5] * 3, [0.25] * 3)
        torch.manual_seed(0)
        model, processor = load_model(network, CLASSES, "paper")
        trainer = kind(
            model,
            FixAStepConfig(output_dir=self.folder, **config),
            train_dataset=self.images(max(4 * labeled, CLASSES), labeled=True),
            unlabeled_dataset=self.images(math.ceil(4 * labeled * ratio)),
            processing_class=processor,
            loss=objective,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def ready(self, *args: Any, **settings: Any) -> Ready:
        return Ready(self.trainer(*args, **settings))

    def steps(self) -> None:
        """a and b"""
        for loss in self.losses:
            jobs: dict[str, Job] = {}
            for mode in MODES:
                fix = self.ready(loss, batchnorm=mode)
                jobs[f"fix {mode}"] = fix.step
                if "a" in self.args.only:
                    base = self.ready(loss, batchnorm=mode, gate="off", mix_labeled=False)
                    jobs[f"base {mode}"] = base.base_step
                if "b" in self.args.only:
                    with Convolutions() as convolutions:
                        fix.step()
                    jobs[f"convolutions {mode}"] = convolutions
            times = self.time(jobs)
            for name, job in jobs.items():
                kind, mode = name.split()
                if kind != "fix":
                    work = f", {job.flops / 1e9:.3g} GFLOP" if isinstance(job, Convolutions) else ""
                    ratios = over(times[f"fix {mode}"], times[name])
                    self.add(f"fix_over_{kind}/{loss}/{mode}", ratios, self.note(loss) + work)

    def loop(self) -> None:
        """c"""
        ready = self.ready(self.loss)
        times = self.in_loop(FixAStepTrainer, ready.step, self.rounds)
        note = f"{self.loss} {self.note(self.loss)}"
        self.add("trainer/loop_over_step", over(times["loop"], times["job"]), note)

        idle = self.ready(self.loss, kind=Idle)
        batches = iter(idle.trainer.get_train_dataloader())

        def bare() -> None:
            next(batches)
            idle.step()

        times = self.in_loop(Idle, bare, 100 if self.args.quick else 300)
        overhead = [1000 * (loop - job) for loop, job in zip(*times.values(), strict=True)]
        self.add("trainer/overhead_ms", overhead, "steps that compute nothing")

    def in_loop(self, kind: type[FixAStepTrainer], job: Job, rounds: int) -> dict[str, list[float]]:
        alternate = meters.Alternate(job, self.now)
        trainer = self.trainer(self.loss, kind=kind, max_steps=rounds + 1)
        trainer.add_callback(alternate)
        trainer.train()
        return alternate.times

    def gate(self) -> None:
        """e"""
        ready, repeats = self.ready(self.loss, self.full_size), 10
        slots = GradientSlots(ready.trainer.core_model.parameters())
        for buffer in slots.buffers:
            buffer.normal_()
        times = self.time({"step": ready.step, "gate": lambda: [slots.gate(0.0) for _ in range(repeats)]})
        size = sum(buffer.shape[1] for buffer in slots.buffers)
        note = f"{self.loss} {self.note(self.loss, self.full_size)}, {size:,} parameters"
        self.add("gate/percent_of_step", over(times["gate"], times["step"], 100 / repeats), note)
        for loss in self.losses:
            for mode in MODES:
                ready = self.ready(loss, 2, batchnorm=mode)
                with meters.HostReads() as reads:
                    ready.step()
                self.add(f"gate/host_reads/{loss}/{mode}", [reads.count])
                if not self.on_cpu:
                    self.add(f"gate/device_waits/{loss}/{mode}", [meters.count_device_waits(ready.step)])

    def processes(self) -> None:
        """g"""
        if not self.on_cpu and torch.cuda.device_count() < 2:
            print("processes: needs two GPUs, left out", file=sys.stderr)
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # Threads that spin while they wait would slow down each other on a busy machine.
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
        torch.multiprocessing.spawn(run_rank, (self.args, port, self.folder), nprocs=2)
        ranks = [json.loads(Path(self.folder, f"rank-{rank}.json").read_text()) for rank in range(2)]
        together, silent = (
            list(map(max, *(rank[name] for rank in ranks))) for name in ("together", "silent")
        )
        note = f"{self.loss} {self.note(self.loss, self.rank_size)} each, wall time"
        self.add("processes/exposed_percent", [100 * (ratio - 1) for ratio in over(together, silent)], note)
        self.add("processes/one_over_two", over(ranks[0]["alone"], together), f"{note}, as many threads")

    def costs(self) -> None:
        """k: base methods and Fix-A-Step over labeled-only steps on as many labeled images"""
        alone = self.late("supervised")
        answers = torch.randn(4 * self.small_size, CLASSES)
        objectives: dict[str, Any] = dict.fromkeys(self.losses, lambda: None)
        objectives["safe_student"] = lambda: SafeStudentLoss(answers)
        for name, objective in objectives.items():
            jobs: dict[str, Job] = {"alone": alone.step}
            loss = name if name in LOSSES else "supervised"
            for mode in MODES:
                base = self.late(loss, batchnorm=mode, objective=objective(), gate="off", mix_labeled=False)
                jobs[f"base/{mode}"] = base.base_step
                jobs[f"fix/{mode}"] = self.late(loss, batchnorm=mode, objective=objective()).step
            times = self.time(jobs)
            for kind in list(jobs)[1:]:
                ratios, note = over(times[kind], times["alone"]), self.note(loss, self.small_size)
                self.add(f"cost/{name}/{kind}", ratios, note)
        mixup = {"mixup": 1.0, "class_weights": [1.0] * CLASSES}
        curriculum = self.late("supervised", loss_kwargs=mixup, labeled_view="strong")
        times = self.time({"curriculum": curriculum.step, "alone": alone.step})
        self.add(
            "cost/curriculum_labeling", over(times["curriculum"], times["alone"]), f"{self.small_size}+0"
        )

    def late(self, loss: str, **settings: Any) -> Ready:
        """As it steps after all warm-ups."""
        ready = self.ready(loss, self.small_size, **settings)
        ready.trainer.state.global_step = LATE
        return ready


SECTIONS = {
    "a": Benchmark.steps,
    "b": Benchmark.steps,
    "c": Benchmark.loop,
    "e": Benchmark.gate,
    "g": Benchmark.processes,
    "k": Benchmark.costs,
    "l": pretrained.embedding,
    "m": pretrained.on_features,
}


def run_rank(rank: int, args: BenchmarkArguments, port: int, folder: str) -> None:
    """One of two processes: steps with and without talking; the first also steps on both batches alone."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    benchmark = Benchmark(args, folder)
    ready = benchmark.ready(benchmark.loss, benchmark.rank_size)
    batch = ready.inputs
    both = {name: torch.cat([v, v]) if isinstance(v, Tensor) else v for name, v in batch.items()}

    def silent() -> None:
        with meters.silence():
            ready.step()

    def alone() -> None:
        if rank == 0:
            ready.inputs = both
            torch.set_num_threads(2 * args.threads)
            silent()
            torch.set_num_threads(args.threads)
            ready.inputs = batch

    jobs: dict[str, Job] = {"together": ready.step, "silent": silent, "alone": alone}
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(3 * benchmark.rounds + 1):
        for name, job in jobs.items():
            dist.barrier()
            start = benchmark.wall()
            job()
            times[name].append(benchmark.wall() - start)
    measured = {name: seconds[1:] for name, seconds in times.items()}  # the first round warms up
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


# ---- reporting


def goal_of(name: str) -> float | None:
    return next((goal for pattern, goal in GOALS.items() if fnmatch(name, pattern)), None)


def show(rows: dict[str, Row], args: BenchmarkArguments) -> None:
    network = f"{args.model} {args.model_kwargs or ''} {args.image_size}x{args.image_size}"
    title = f"{network}, {args.device}, {args.threads} threads, {args.rounds} rounds"
    table = Table("", "median", "middle half", "goal", "reached", "with", title=title)
    for name, (value, low, high, note) in rows.items():
        middle, goal = "" if low == high else f"{low:.4g} to {high:.4g}", goal_of(name)
        words = ["", ""] if goal is None else [f"<= {goal}", "yes" if value <= goal else "no"]
        table.add_row(name, f"{value:.4g}", middle, *words, note)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main(argv: list[str]) -> None:
    try:
        args, _ = parse((BenchmarkArguments,), argv)
        with tempfile.TemporaryDirectory() as folder:
            benchmark = Benchmark(args, folder)
            for section in dict.fromkeys(SECTIONS[letter] for letter in args.only.split(",")):
                start = time.perf_counter()
                section(benchmark)
                print(f"{section.__name__}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    show(benchmark.rows, args)
    ratios = {name: round(row.value, 5) for name, row in benchmark.rows.items()}
    quartiles = {name: [round(row.low, 5), round(row.high, 5)] for name, row in benchmark.rows.items()}
    line = json.dumps({"ratios": ratios, "quartiles": quartiles, "settings": asdict(args)})
    if args.out:
        Path(args.out).write_text(f"{line}\n")
    print(line)
