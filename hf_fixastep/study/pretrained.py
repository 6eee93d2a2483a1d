"""Sections of the benchmark on pretrained networks: what embedding costs, and a training on features."""

from __future__ import annotations

import io
import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import PIL.Image
import torch
from transformers import (
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    MobileNetV2ImageProcessor,
    PrinterCallback,
    ViTImageProcessor,
)

from hf_fixastep.config import FixAStepConfig
from hf_fixastep.data.features import Features
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.features.embed import embed
from hf_fixastep.features.part import CHUNK
from hf_fixastep.models.head import FeatureHead, FeatureHeadConfig
from hf_fixastep.study.meters import interleave, over
from hf_fixastep.trainer import FixAStepTrainer


if TYPE_CHECKING:
    from hf_fixastep.study.benchmark import Benchmark

SIDE = 96  # of the images
NUMBERS, VERSIONS, WEAK, CLASSES = 1280, 7, 4, 10  # of the features of an image


def embedding(benchmark: Benchmark) -> None:
    """l: PNG files in memory to features on the disk, over the same network on batches that are ready"""
    count = (2 if benchmark.args.quick else 4) * CHUNK
    torch.manual_seed(0)
    model = MobileNetV2ForImageClassification(MobileNetV2Config(image_size=SIDE)).eval()
    size, crop = {"shortest_edge": SIDE * 8 // 7}, {"height": SIDE, "width": SIDE}
    backbone = Backbone(model, MobileNetV2ImageProcessor(size=size, crop_size=crop))
    files = png_files(count)
    batches = torch.randn(count, 3, SIDE, SIDE, device=backbone.device).split(CHUNK)
    caches = (Path(benchmark.folder, f"cache-{number}") for number in itertools.count())

    def embedded() -> None:
        embed(files, backbone, weak=0, strong=0, cache_dir=next(caches))

    @torch.inference_mode()
    def bare() -> None:
        for batch in batches:
            model.mobilenet_v2(batch.contiguous(memory_format=torch.channels_last)).pooler_output.cpu()

    for name, clock in (("over_network", benchmark.wall), ("cpu_over_network", time.process_time)):
        times = interleave({"embedded": embedded, "bare": bare}, benchmark.rounds, clock)
        unit = "wall time" if name == "over_network" else "CPU seconds"
        note = f"MobileNetV2, {count} PNG files of {SIDE}x{SIDE}, {unit}"
        benchmark.add(f"embedding/{name}", over(times["embedded"], times["bare"]), note)


def png_files(count: int) -> datasets.Dataset:
    """Smooth random images, encoded; no two are equal."""
    random, files = np.random.default_rng(0), []
    for _ in range(count):
        small = PIL.Image.fromarray(random.integers(0, 255, (SIDE // 8, SIDE // 8, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        small.resize((SIDE, SIDE)).save(buffer, "PNG")
        files.append({"bytes": buffer.getvalue(), "path": None})
    return datasets.Dataset.from_dict({"image": files}, datasets.Features(image=datasets.Image()))


def on_features(benchmark: Benchmark) -> None:
    """m: FixMatch with a linear head"""
    steps = 100 if benchmark.args.quick else 1000
    rows = torch.randn(2000, VERSIONS, NUMBERS, generator=torch.Generator().manual_seed(0)).half()
    labeled = Features.of(rows[:300], torch.arange(300) % CLASSES, weak=WEAK)
    unlabeled = Features.of(rows, weak=WEAK)
    config: dict[str, Any] = {"report_to": "none", "disable_tqdm": True, "log_level": "error"}
    config |= {"loss": "fixmatch", "per_device_train_batch_size": 32, "unlabeled_ratio": 4}
    config |= {"max_steps": steps, "save_strategy": "no", "mix_labeled": False, "use_cpu": benchmark.on_cpu}
    for gate in ("drop", "per_example"):
        seconds = []
        for _ in range(benchmark.rounds + 1):
            trainer = FixAStepTrainer(
                FeatureHead(FeatureHeadConfig(size=NUMBERS, num_labels=CLASSES)),  # type: ignore[call-arg]
                FixAStepConfig(output_dir=benchmark.folder, gate=gate, **config),
                train_dataset=labeled,
                unlabeled_dataset=unlabeled,
                processing_class=ViTImageProcessor(),
            )
            trainer.remove_callback(PrinterCallback)
            start = benchmark.now()
            trainer.train()
            seconds.append((benchmark.now() - start) * 1000 / steps)
        measured = seconds[1:]  # the first one warms up
        benchmark.add(f"features/seconds_per_1000_steps/{gate}", measured, "fixmatch 32+128")
