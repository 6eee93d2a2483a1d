"""Fine-tuning of the whole network from the best head, where there is time for it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import datasets
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import TrainerCallback

from hf_fixastep.data.images import IN_MEMORY_BYTES, Images
from hf_fixastep.disk import write_atomically
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.features.candidates import ALL, HEADS, TUNED, Candidate, Head, train
from hf_fixastep.features.fit_data import Embedded, FitData, Part
from hf_fixastep.features.part import picture
from hf_fixastep.models.head import put_head


LENGTHS = (1000, 300, 100)  # steps; the longest that fits into the time is taken
TUNING: dict[str, Any] = {"preset": "pretrained", "trainable": "all", "batchnorm": "frozen", "seed": 0}
TIMED = 3  # steps, of which the first is left out
BATCH = 64


def tune(
    data: FitData,
    embedded: Embedded,
    backbone: Backbone,
    candidates: Sequence[Candidate],
    best: Candidate,
    state: Path,
    left: Callable[[], float],
) -> Candidate | None:
    """The network fine-tuned from the head of the best candidate, measured on the first part; None without
    time.

    Args:
        candidates: all, of which the best trained one says loss and gate.
        left: seconds that there are.
    """
    trained = max((each for each in candidates if each.name in HEADS), key=lambda each: each.score)
    settings = {**HEADS[trained.name], **TUNING}
    part, room = embedded.parts[0], Tuning(data, embedded, backbone, state)
    trainings = 1 if part.name == ALL else 2
    settings["max_steps"] = steps = room.decide(settings, best.heads, part, trainings, left)
    if not steps:
        return None
    model = room.train(settings, best.heads, part.name, part.seen)
    held = data.splits["labeled" if embedded.validation is None else "validation"].select(part.rows)
    logits = answers(model, backbone, held)
    return Candidate(TUNED, settings, best.heads, logits[None], part.labels)


class Tuning:
    """Trainings of the network, each kept once it is finished."""

    def __init__(self, data: FitData, embedded: Embedded, backbone: Backbone, state: Path) -> None:
        self.data, self.embedded, self.backbone, self.state = data, embedded, backbone, state

    def decide(
        self,
        settings: dict[str, Any],
        heads: dict[str, Head],
        part: Part,
        trainings: int,
        left: Callable[[], float],
    ) -> int:
        """How many steps; 0 for none. It is decided once: a restart has another clock."""
        known = self.state / "tuning.json"
        if known.is_file():
            return json.loads(known.read_text())["steps"]
        steps, seconds = 0, None
        if left() > 0:
            seconds = self._seconds_per_step(settings, heads[part.name], part.seen)
            fitting = [length for length in LENGTHS if trainings * length * seconds < left()]
            steps = max(fitting, default=0)
        with write_atomically(known) as partial:
            partial.write_text(json.dumps({"steps": steps, "seconds_per_step": seconds}))
        return steps

    def _seconds_per_step(self, settings: dict[str, Any], head: Head, seen: NDArray) -> float:
        clock = Clock()
        images = self._images(seen[:BATCH], rows=4 * BATCH)
        train(self.network(head), settings | {"max_steps": TIMED}, *images, self.backbone.processor, clock)
        return (clock.times[-1] - clock.times[0]) / (TIMED - 1)

    def train(self, settings: dict[str, Any], heads: dict[str, Head], part: str, seen: NDArray) -> Any:
        """A network that learned from these labeled images."""
        path, model = self.state / f"{TUNED}-{part}.safetensors", self.network(heads[part])
        if not path.is_file():
            train(model, settings, *self._images(seen), self.backbone.processor)
            with write_atomically(path) as partial:
                save_file({name: v.cpu().contiguous() for name, v in model.state_dict().items()}, partial)
        model.load_state_dict(load_file(path))
        return model.eval()

    def network(self, head: Head) -> Any:
        """A copy of the pretrained network with this head."""
        model = copy.deepcopy(self.backbone.model)
        own = next(
            module
            for module, first in zip(model.modules(), self.backbone.model.modules(), strict=True)
            if first is self.backbone.head
        )
        weight, bias = (torch.from_numpy(head[name]) for name in ("weight", "bias"))
        put_head(model, own, weight, bias, self.embedded.class_names)
        return model

    def _images(self, seen: NDArray, rows: int | None = None) -> tuple[Images, Images]:
        """Labeled images and the pile as the processor cuts them, of a large pile what memory may hold."""
        labeled, pile = self.data.splits["labeled"], self.data.splits["unlabeled"]
        pixels = self._pixels(labeled, seen)
        most = min(len(pile), rows or IN_MEMORY_BYTES // pixels[0].numel())
        spread = np.linspace(0, len(pile) - 1, most).astype(int)
        labels = torch.from_numpy(self.embedded.labels[seen])
        return Images(pixels, labels, self.embedded.class_names), Images(self._pixels(pile, spread))

    def _pixels(self, split: datasets.Dataset, rows: NDArray) -> Tensor:
        return torch.cat(list(batches(self.backbone, split.select(rows))))


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append(monotonic())


def batches(backbone: Backbone, split: datasets.Dataset) -> Iterator[Tensor]:
    """uint8 [N, C, H, W] of at most BATCH images each, without those that cannot be read."""
    images = split.with_format(None).select_columns("image")
    for batch in images.cast_column("image", datasets.Image(decode=False)).iter(batch_size=BATCH):
        if readable := [image for image in map(picture, batch["image"]) if image is not None]:
            yield backbone.pixels(readable)


@torch.inference_mode()
def answers(model: Any, backbone: Backbone, split: datasets.Dataset) -> NDArray:
    """Logits [N, K] of all images of a split."""
    views = backbone.views()
    found = [
        model(pixel_values=views.plain(pixels).to(backbone.device)).logits.double().cpu().numpy()
        for pixels in batches(backbone, split)
    ]
    return np.concatenate(found)
