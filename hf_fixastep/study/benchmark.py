"""What a step costs, in ratios that anyone can repeat.

    fixastep benchmark [--quick] [--only a,b] [--losses mean_teacher,fixmatch] [--out ratios.json]

Jobs that are compared take turns in one process (A, B, C, A, B, C, ...); a ratio is the median over the
rounds. The unit is CPU seconds, to which other users of the machine cannot add, or on a GPU the time until
the device is done. Prints a table and one line of JSON. Goals are those for WRN-28-2 on two CPU cores;
missing one is no error.

a  Fix-A-Step / the base method         f  activations and peak memory, separate / joint
b  Fix-A-Step / its convolutions alone  g  two processes / one
c  the Trainer's loop / the bare step   h  evaluation / a bare inference loop
d  torchvision / our views              i  growth with the batch and with the number of images
e  the gate, host reads                 j  torch.compile / eager, only with --compile
k  every method / labeled images alone, only with --only k
"""

from __future__ import annotations

import json
import math
import mmap
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchvision.transforms import v2
from transformers import PrinterCallback, TrainerCallback

from hf_fixastep import LOSSES, FixAStepConfig, FixAStepTrainer, GradientSlots, Images
from hf_fixastep.checks import check_choice
from hf_fixastep.config import own_field
from hf_fixastep.data.loader import PairedLoader
from hf_fixastep.data.store import PixelFile, memory
from hf_fixastep.losses.base import SemiSupervisedLoss
from hf_fixastep.methods import preset
from hf_fixastep.procedures.safe_student import SafeStudentLoss
from hf_fixastep.runs.arguments import ModelArguments, parse
from hf_fixastep.runs.training import load_model
from hf_fixastep.study.meters import (
    Activations,
    Clock,
    Convolutions,
    HostReads,
    Job,
    count_device_waits,
    interleave,
    over,
    peak_memory,
    silence,
)


MODES = ("separate", "joint")
CLASSES = 10
LATE = 999_999  # steps, behind all warm-ups
GOALS = {
    "fix_over_base/mean_teacher/separate": "<= 1.15",
    "fix_over_base/pi_model/separate": "<= 1.10",
    "fix_over_base/vat/separate": "<= 1.10",
    "fix_over_base/fixmatch/separate": "<= 1.05",
    "fix_over_base/*/joint": "<= 1.9",
    "fix_over_convolutions/*": "<= 1.12",
    "trainer/loop_over_step": "<= 1.02",
    "trainer/overhead_ms": "<= 0.5",
    "views/weak/64/pil_over_ours": ">= 25",
    "views/weak/448/pil_over_ours": ">= 40",
    "views/strong/64/pil_over_ours": ">= 4",
    "views/strong/448/pil_over_ours": ">= 10",
    "gate/percent_of_step": "<= 0.5",
    "gate/host_reads/*": "<= 0",
    "gate/device_waits/*": "<= 0",
    "memory/activations/*": "<= 0.55",
    "processes/exposed_percent": "<= 3",
    "evaluation/trainer_over_bare": "<= 1.05",
    "growth/exponent_of_batch": "<= 1.05",
    "growth/draw_from_*": "<= 1",
}


@dataclass
class BenchmarkArguments:
    """What to measure, and on what."""

    only: str = own_field("a,b,c,d,e,f,g,h,i", "Letters of the sections to run.")
    losses: str = own_field(
        "mean_teacher,pi_model,vat,fixmatch", "Base losses; where one is enough, the first."
    )
    model: str = own_field("wide_resnet_fixastep", "As in train.py.")
    model_kwargs: dict | str | None = own_field(None, "Such as {depth: 16, width: 4}.")
    image_size: int = own_field(32, "Side of the images.")
    batch_size: int | None = own_field(
        None, "Labeled images. If not given 64; on a CPU 64 with the unlabeled ones."
    )
    unlabeled_ratio: float | None = own_field(None, "If not given, as the preset of the loss says.")
    rounds: int | None = own_field(None, "If not given 3, with quick 2.")
    threads: int = own_field(1, "Threads on a CPU.")
    device: str = own_field("cuda" if torch.cuda.is_available() else "cpu", "cpu or cuda.")
    bf16: bool = own_field(False, "Mixed precision, for GPUs.")
    quick: bool = own_field(False, "A network of depth 10, half of the rows, fewer rounds.")
    compile: bool = own_field(False, "Measure torch.compile as well, which takes minutes.")
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


# ---- measuring


@dataclass(frozen=True)
class Row:
    """A number of the table: a median, and the quartiles around it."""

    name: str
    value: float
    low: float
    high: float
    note: str

    @property
    def goal(self) -> str:
        return next((goal for pattern, goal in GOALS.items() if fnmatch(self.name, pattern)), "")

    @property
    def reached(self) -> str:
        if not self.goal:
            return ""
        sign, limit = self.goal.split()
        return "yes" if (self.value <= float(limit) if sign == "<=" else self.value >= float(limit)) else "no"


class Ready:
    """A trainer that is ready to step, and a batch to step on, without the Trainer's loop."""

    def __init__(self, trainer: FixAStepTrainer) -> None:
        self.trainer: Any = trainer
        loader = trainer.get_train_dataloader()
        self.model, _ = trainer._prepare_for_training(trainer.args.max_steps, loader, None)
        trainer.current_gradient_accumulation_steps = 1
        trainer.unlabeled_weight = trainer.args.unlabeled_weight
        self.inputs = trainer._prepare_inputs(next(iter(loader)))

    def step(self) -> None:
        self.trainer.training_step(self.model, self.inputs)
        self._update()

    def base_step(self) -> None:
        """The base method as one would write it alone: one backward pass of the weighted sum."""
        trainer = self.trainer
        self.model.train()
        losses = trainer.loss(self.model, trainer.make_batch(self.inputs), trainer.teacher.model)
        trainer.accelerator.backward(losses.labeled + trainer.unlabeled_weight * losses.unlabeled)
        self._update()

    def _update(self) -> None:
        self.trainer.optimizer.step()
        self.trainer.lr_scheduler.step()
        self.model.zero_grad()
        self.trainer.teacher.update(self.trainer.core_model)


class Idle(FixAStepTrainer):
    """Its steps compute nothing: what is left is the loop."""

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        for parameter, (gradient, _) in self.slots.gradients.items():
            parameter.grad = gradient
        return torch.zeros((), device=self.args.device)


class Alternate(TrainerCallback):
    """Runs a job after every step of the Trainer's loop and times both; the first of each warms up."""

    def __init__(self, job: Job, now: Clock) -> None:
        self.job, self.now = job, now
        self.start: float | None = None
        self.times: dict[str, list[float]] = {"loop": [], "job": []}

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        before = self.now()
        self.job()
        after = self.now()
        if self.start is not None:
            self.times["loop"].append(before - self.start)
            self.times["job"].append(after - before)
        self.start = self.now()


# ---- sections


class Benchmark:
    """Runs sections and keeps their rows."""

    def __init__(self, args: BenchmarkArguments, folder: str) -> None:
        self.args, self.folder = args, folder
        self.losses = args.losses.split(",")
        self.loss = self.losses[0]
        self.rounds: int = args.rounds  # type: ignore[assignment]
        self.rows: list[Row] = []
        torch.set_num_threads(args.threads)

    def now(self) -> float:
        return time.process_time() if self.args.device == "cpu" else self.wall()

    def wall(self) -> float:
        if self.args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def time(self, jobs: dict[str, Job], rounds: int | None = None) -> dict[str, list[float]]:
        return interleave(jobs, rounds or self.rounds, self.now)

    def add(self, name: str, values: Sequence[float], note: str = "") -> None:
        low, high = np.percentile(values, [25, 75])
        self.rows.append(Row(name, median(values), float(low), float(high), note))

    def sizes(self, loss: str) -> tuple[int, float]:
        """Labeled images, and unlabeled ones for each of them."""
        ratio = self.args.unlabeled_ratio or preset("paper", loss)["unlabeled_ratio"]
        if self.args.batch_size or self.args.device == "cuda":
            return self.full_size, ratio
        return max(2, round(self.full_size / (1 + ratio))), ratio

    @property
    def full_size(self) -> int:
        """Labeled images where no time has to be saved."""
        return self.args.batch_size or (32 if self.args.quick else 64)

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
        """On random images, with a learning rate that leaves the network as it is; `objective` replaces the
        loss.
        """
        args, (default, ratio) = self.args, self.sizes(loss)
        labeled = labeled or default
        config: dict[str, Any] = {
            "report_to": "none",
            "disable_tqdm": True,
            "log_level": "error",
            "save_strategy": "no",
        }
        config |= {"loss": loss, "per_device_train_batch_size": labeled, "unlabeled_ratio": ratio}
        config |= {"max_steps": 10**6, "batchnorm": "separate", "learning_rate": 1e-6, **settings}
        network = ModelArguments(args.model, args.model_kwargs, args.image_size, [0.5] * 3, [0.25] * 3)
        torch.manual_seed(0)
        model, processor = load_model(network, CLASSES, "paper")
        trainer = kind(
            model,
            FixAStepConfig(output_dir=self.folder, use_cpu=args.device == "cpu", bf16=args.bf16, **config),
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
                    jobs[f"base {mode}"] = self.ready(
                        loss, batchnorm=mode, gate="off", mix_labeled=False
                    ).base_step
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
        alternate = Alternate(job, self.now)
        trainer = self.trainer(self.loss, kind=kind, max_steps=rounds + 1)
        trainer.add_callback(alternate)
        trainer.train()
        return alternate.times

    def views(self) -> None:
        """d"""
        trainer = self.trainer(self.loss)
        for kind, reference in reference_views(self.args.image_size).items():
            for count in (64, 448):
                images = self.images(count).pixels.to(self.args.device)
                jobs = view_jobs(getattr(trainer.views, kind), reference, images)
                times = self.time(jobs, 2 * self.rounds)
                rates = {name: f"{count / median(seconds):,.0f} images/s" for name, seconds in times.items()}
                for name in list(jobs)[1:]:
                    note = f"{rates[name]}, ours {rates['ours']}"
                    self.add(f"views/{kind}/{count}/{name}_over_ours", over(times[name], times["ours"]), note)

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
                with HostReads() as reads:
                    ready.step()
                self.add(f"gate/host_reads/{loss}/{mode}", [reads.count])
                if self.args.device == "cuda":
                    self.add(f"gate/device_waits/{loss}/{mode}", [count_device_waits(ready.step)])

    def memory(self) -> None:
        """f"""
        for loss in self.losses:
            found: dict[str, list[Any]] = {"activations": [], "peak": []}  # bytes in each of MODES
            for mode in MODES:
                ready = self.ready(loss, batchnorm=mode)
                found["peak"].append(peak_memory(ready.step, self.args.device))
                activations = Activations(ready.model.parameters())
                with activations:
                    ready.step()
                found["activations"].append(activations.peak)
            for name, (separate, joint) in found.items():
                if separate is not None:
                    note = f"{self.note(loss)}, {separate / 2**20:.0f} MB / {joint / 2**20:.0f} MB"
                    self.add(f"memory/{name}/{loss}", [separate / joint], note)

    def processes(self) -> None:
        """g"""
        if self.args.device == "cuda" and torch.cuda.device_count() < 2:
            print("processes: needs two GPUs, left out", file=sys.stderr)
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # Threads that spin while they wait would slow down each other on a busy machine.
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
        torch.multiprocessing.start_processes(
            run_rank, (self.args, port, self.folder), nprocs=2, start_method="spawn"
        )
        ranks = [json.loads(Path(self.folder, f"rank-{rank}.json").read_text()) for rank in range(2)]
        together, silent = (
            [max(pair) for pair in zip(*(r[name] for r in ranks), strict=True)] for name in JOBS[:2]
        )
        note = f"{self.loss} {self.note(self.loss, self.rank_size)} each, wall time"
        self.add("processes/exposed_percent", [100 * (ratio - 1) for ratio in over(together, silent)], note)
        self.add(
            "processes/one_over_two", over(ranks[0]["one process"], together), f"{note}, as many threads"
        )

    @property
    def rank_size(self) -> int:
        """Labeled images of one of two processes."""
        return max(2, self.sizes(self.loss)[0] // 2)

    def evaluation(self) -> None:
        """h"""
        count = 256 if self.args.device == "cpu" else 8192
        images = self.images(count, labeled=True)
        trainer = self.trainer(self.loss, per_device_eval_batch_size=count // 2)
        model = trainer.model.eval()

        @torch.inference_mode()
        def bare() -> Tensor:
            batches = (
                trainer.views.plain(part.to(self.args.device)) for part in images.pixels.split(count // 2)
            )
            return torch.cat([model(pixel_values=batch).logits for batch in batches]).argmax(-1).cpu()

        times = self.time({"trainer": lambda: trainer.evaluate(images), "bare": bare})
        note = f"batches of {count // 2}, {count / median(times['trainer']):,.0f} images/s"
        self.add("evaluation/trainer_over_bare", over(times["trainer"], times["bare"]), note)

    def growth(self) -> None:
        """i"""
        largest, ratio = self.sizes(self.loss)
        sizes = [size for size in (largest // 8, largest // 4, largest // 2, largest) if size > 1]
        times = self.time({str(size): self.ready(self.loss, size).step for size in sizes})
        slopes = [
            np.polyfit(np.log(sizes), np.log(seconds), 1)[0] for seconds in zip(*times.values(), strict=True)
        ]
        self.add("growth/exponent_of_batch", slopes, f"{self.loss}, {', '.join(times)} labeled images")
        self.draws(
            [10**4, 10**5, 10**6, 10**7], (largest, round(largest * ratio)), median(times[str(largest)])
        )

    def draws(self, counts: list[int], sizes: tuple[int, int], step: float) -> None:
        """Batches from stores of several sizes, in memory if they fit, against a step that takes `step`
        seconds.
        """
        jobs: dict[str, Job] = {}
        first = []
        for count in counts:
            images = sparse_images(Path(self.folder, "pixels"), (count, 3, *[self.args.image_size] * 2))
            if images.pixels.nbytes < memory() / 2:
                images.pixels.flatten()[:: mmap.PAGESIZE].sum()  # as a first epoch would
            batches = iter(PairedLoader(self.images(64, labeled=True), images, sizes, 10**6))
            start = self.now()
            next(batches)  # draws the order of all images
            first.append(self.now() - start)
            jobs[f"{count:.0e}"] = batches.__next__
        times = self.time(jobs, 10)
        for (name, seconds), count, order in zip(times.items(), counts, first, strict=True):
            shuffling = f"{1e3 * order * sizes[1] / count:.2g} ms for the order"
            note = f"{sizes[0]}+{sizes[1]}, {1e3 * median(seconds):.2g} ms and {shuffling}"
            self.add(
                f"growth/draw_from_{name}_percent_of_step", over(seconds, [step] * len(seconds), 100), note
            )

    def compilation(self) -> None:
        """j"""
        for loss in self.losses:
            for mode in MODES:
                compiled, eager = (self.ready(loss, batchnorm=mode, torch_compile=on) for on in (True, False))
                start = self.wall()
                compiled.step()
                note = f"{self.note(loss)}, first step {self.wall() - start:.0f} s"
                times = self.time({"compiled": compiled.step, "eager": eager.step})
                self.add(f"compiled_over_eager/{loss}/{mode}", over(times["compiled"], times["eager"]), note)

    def costs(self) -> None:
        """k"""
        alone = self.late("supervised")
        for loss in self.losses:
            self.cost(loss, alone, loss)
        answers = torch.randn(4 * self.small_size, CLASSES)
        self.cost("safe_student", alone, "supervised", lambda: SafeStudentLoss(answers))
        mixup = {"mixup": 1.0, "class_weights": [1.0] * CLASSES}
        curriculum = self.late("supervised", loss_kwargs=mixup, labeled_view="strong")
        times = self.time({"curriculum": curriculum.step, "alone": alone.step})
        self.add("cost/curriculum_labeling", over(*times.values()), f"{self.small_size}+0")

    def cost(
        self,
        name: str,
        alone: Ready,
        loss: str,
        objective: Callable[[], SemiSupervisedLoss | None] = lambda: None,
    ) -> None:
        """Steps of the base method, and of Fix-A-Step over it, against steps on as many labeled images alone."""
        jobs: dict[str, Job] = {"alone": alone.step}
        for mode in MODES:
            base = self.late(loss, batchnorm=mode, objective=objective(), gate="off", mix_labeled=False)
            jobs[f"base/{mode}"] = base.base_step
            jobs[f"fix/{mode}"] = self.late(loss, batchnorm=mode, objective=objective()).step
        times = self.time(jobs)
        for kind in list(jobs)[1:]:
            ratios = over(times[kind], times["alone"])
            self.add(f"cost/{name}/{kind}", ratios, self.note(loss, self.small_size))

    @property
    def small_size(self) -> int:
        """Labeled images that leave time for many unlabeled ones."""
        return self.full_size if self.args.batch_size or self.args.device == "cuda" else self.full_size // 4

    def late(self, loss: str, **settings: Any) -> Ready:
        """Behind all warm-ups."""
        ready = self.ready(loss, self.small_size, **settings)
        ready.trainer.state.global_step = LATE
        return ready


SECTIONS = {
    "a": Benchmark.steps,
    "b": Benchmark.steps,
    "c": Benchmark.loop,
    "d": Benchmark.views,
    "e": Benchmark.gate,
    "f": Benchmark.memory,
    "g": Benchmark.processes,
    "h": Benchmark.evaluation,
    "i": Benchmark.growth,
    "j": Benchmark.compilation,
    "k": Benchmark.costs,
}


def reference_views(side: int) -> dict[str, Callable[..., Tensor]]:
    """The work of our views in torchvision's words."""
    weak = [v2.RandomHorizontalFlip(), v2.RandomCrop(side, padding=side // 8, padding_mode="reflect")]
    operation = v2.RandomApply([v2.RandAugment(num_ops=1)], p=0.5)
    to_float, normalize = (
        [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)],
        v2.Normalize([0.5] * 3, [0.25] * 3),
    )
    box = v2.RandomErasing(p=1, scale=(0.25, 0.25), ratio=(1, 1), value=0.5)
    return {
        "weak": v2.Compose([*weak, *to_float, normalize]),
        "strong": v2.Compose([*weak, operation, operation, *to_float, box, normalize]),
    }


def view_jobs(
    ours: Callable[..., Tensor], reference: Callable[..., Tensor], images: Tensor
) -> dict[str, Job]:
    """Torchvision on PIL images, on tensors one by one, and on the batch as a whole, which gets one draw for
    all.
    """
    arrays, generator = (
        images.cpu().permute(0, 2, 3, 1).contiguous().numpy(),
        torch.Generator().manual_seed(0),
    )
    return {
        "ours": lambda: ours(images, generator),
        "pil": lambda: torch.stack([reference(Image.fromarray(array)) for array in arrays]).to(images.device),
        "tensors": lambda: torch.stack([reference(image) for image in images]),
        "one_draw": lambda: reference(images),
    }


def sparse_images(path: Path, shape: tuple[int, ...]) -> Images:
    """A store as `Images.from_dataset` writes it, of black images that take no room; its file is gone with
    it.
    """
    file = PixelFile(path, "benchmark", "", shape)  # type: ignore[arg-type]
    with open(path, "wb") as out:
        out.write(file.header)
        out.truncate(file.size)
    images = Images(file.map())
    path.unlink()  # the mapping still holds it
    return images


JOBS = ("together", "silent", "one process")  # of run_rank


def run_rank(rank: int, args: BenchmarkArguments, port: int, folder: str) -> None:
    """One of two processes: steps with and without talking and, in the first, steps of both batches at once."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    benchmark = Benchmark(args, folder)
    ready = benchmark.ready(benchmark.loss, benchmark.rank_size)
    batch = ready.inputs
    both = {name: torch.cat([v, v]) if isinstance(v, Tensor) else v for name, v in batch.items()}

    def silent() -> None:
        with silence():
            ready.step()

    def one_process() -> None:
        if rank == 0:
            ready.inputs = both
            torch.set_num_threads(2 * args.threads)
            silent()
            torch.set_num_threads(args.threads)
            ready.inputs = batch

    times: dict[str, list[float]] = {name: [] for name in JOBS}
    for _ in range(3 * benchmark.rounds + 1):
        for name, job in zip(JOBS, (ready.step, silent, one_process), strict=True):
            dist.barrier()
            start = benchmark.wall()
            job()
            times[name].append(benchmark.wall() - start)
    Path(folder, f"rank-{rank}.json").write_text(
        json.dumps({name: values[1:] for name, values in times.items()})
    )
    dist.barrier()
    dist.destroy_process_group()


# ---- reporting


def show(rows: list[Row], args: BenchmarkArguments) -> None:
    network = f"{args.model} {args.model_kwargs or ''} {args.image_size}x{args.image_size}"
    title = f"{network}, {args.device}, {args.threads} threads, {args.rounds} rounds"
    table = Table("", "median", "middle half", "goal", "reached", "with", title=title)
    for row in rows:
        middle = "" if row.low == row.high else f"{row.low:.4g} to {row.high:.4g}"
        table.add_row(row.name, f"{row.value:.4g}", middle, row.goal, row.reached, row.note)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def to_json(rows: list[Row], args: BenchmarkArguments) -> str:
    ratios = {row.name: round(row.value, 5) for row in rows}
    quartiles = {row.name: [round(row.low, 5), round(row.high, 5)] for row in rows}
    return json.dumps({"ratios": ratios, "quartiles": quartiles, "settings": asdict(args)})


def main(argv: list[str]) -> None:
    try:
        args, _ = parse((BenchmarkArguments,), argv)
        letters = [*args.only.split(","), *("j" if args.compile else "")]
        with tempfile.TemporaryDirectory() as folder:
            benchmark = Benchmark(args, folder)
            for section in dict.fromkeys(SECTIONS[letter] for letter in letters):
                start = time.perf_counter()
                section(benchmark)
                print(f"{section.__name__}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    show(benchmark.rows, args)
    line = to_json(benchmark.rows, args)
    if args.out:
        Path(args.out).write_text(f"{line}\n")
    print(line)
