"""From a few labels, a pile and a pretrained network to the best model by validation, in one call."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging as transformers_logging

from hf_fixastep.checkpoints import only_run
from hf_fixastep.data.features import Features
from hf_fixastep.data.files import Source
from hf_fixastep.data.registry import is_medical
from hf_fixastep.disk import digest
from hf_fixastep.evaluation.calibration import fit_temperature
from hf_fixastep.evaluation.intervals import split_intervals
from hf_fixastep.evaluation.metrics import evaluate_classifier
from hf_fixastep.features import fit_files
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.features.candidates import ALL, HEADS, TUNED, Candidate, logits_of, measure
from hf_fixastep.features.fit_data import Embedded, FitData, Say, labels_of, load_named, load_sides
from hf_fixastep.features.probe import TEMPERATURES
from hf_fixastep.features.tuning import LENGTHS, TUNING, Tuning, answers, tune
from hf_fixastep.features.verdict import choose, percent, verdict
from hf_fixastep.hub.loading import find_folder, load_network
from hf_fixastep.models.head import put_head
from hf_fixastep.runs.folder import CARD, WEIGHTS
from hf_fixastep.runs.report import versions
from hf_fixastep.step.forwards import classification_head


DEFAULT_MODEL = "facebook/dinov2-small"
UNITS = {"s": 1, "m": 60, "h": 3600}


def fit(
    labeled: Source | None = None,
    unlabeled: Source | Sequence[Source] | None = None,
    *,
    output_dir: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    dataset: str | None = None,
    config: str | None = None,
    validation: Source | None = None,
    test: Source | None = None,
    group: str | None = None,
    time: str = "10m",
    image_size: int | None = None,
    seeds: int = 3,
    cache_dir: str | os.PathLike[str] | None = None,
    say: Say = print,
    **settings: Any,
) -> dict[str, Any]:
    """Embed, probe, train heads with the pile, fine-tune if there is time, and save what is best by
    validation; what `fit.json` says.

    A call that was killed goes on where it was, to the same outcome.

    Args:
        labeled: a folder with one sub-folder per class, or a table.
        unlabeled: the pile: folders, globs or tables.
        output_dir: where to write a folder for `pipeline("image-classification")`.
        model: a folder or Hub name of a pretrained network.
        dataset: a name of `list_datasets()` instead of folders, with `config` and `settings` as in
            `load_dataset`.
        validation: as `labeled`; if not given, candidates are compared by cross-validation over the labels.
        test: as `labeled`; never used for a choice.
        group: column of the table, or regular expression with (the group) in file names.
        time: for all, such as 90s, 10m or 1h30m; what is left of it may go into fine-tuning, 0 for none.
        image_size: side of the images, if not that of the network's image processor.
        seeds: trainings of each head, whose mean is saved.
        cache_dir: where the features are kept.
        say: gets every sentence.
    """
    clock, out = Clock(monotonic(), seconds(time)), Path(output_dir)
    if not (isinstance(seeds, int) and seeds >= 1):
        raise ValueError(f"seeds is {seeds!r}, but expected a whole number of at least 1.")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            "A launcher started several processes, but a fit runs in one: start it without a launcher."
        )
    fit_files.check_free(out)
    with quietly():
        source = check_network(model)
        sides = {"labeled": labeled, "unlabeled": unlabeled, "validation": validation, "test": test}
        data = load(sides, group, dataset, config, settings, say)
        network, processor = load_network(source, len(data.class_names))
        backbone = Backbone(network, processor, image_size)
        embedded = Embedded.make(data, backbone, cache_dir, say)
        about = {
            "images or labels": embedded.hashes,
            "groups": None if data.groups is None else data.groups.tolist(),
            "seeds": seeds,
            "time": clock.limit,
            "settings": {"heads": HEADS, "tuning": TUNING, "lengths": LENGTHS},
        }
        with only_run(out):
            if finished := fit_files.open_state(out, about):
                say(f"{out} holds this fit already. {finished['verdict']}")
                return finished
            return Fit(data, embedded, backbone, out, clock, say).run(about, seeds)


@dataclass(frozen=True)
class Clock:
    start: float
    limit: float

    def left(self) -> float:
        return self.start + self.limit - monotonic()


@dataclass
class Fit:
    """One fit, with all that it needs."""

    data: FitData
    embedded: Embedded
    backbone: Backbone
    out: Path
    clock: Clock
    say: Say

    def run(self, about: dict[str, Any], seeds: int) -> dict[str, Any]:
        state = self.out / fit_files.STATE
        candidates = measure(self.embedded, seeds, state, self.backbone.processor)
        for each in candidates if self.embedded.parts else []:
            self.say(f"{each.name}: {percent(each.score)} balanced accuracy on held-out images")
        best = choose(candidates)
        tuned = None
        if self.embedded.parts and self.clock.limit:
            given = (self.data, self.embedded, self.backbone, candidates, best, state)
            tuned = tune(*given, self.clock.left)
            self.say(f"{TUNED}: {said_of(tuned)}")
        return self.finish(about, candidates, tuned, *with_tuned(candidates, best, tuned))

    def finish(
        self,
        about: dict[str, Any],
        candidates: list[Candidate],
        tuned: Candidate | None,
        compared: list[Candidate],
        chosen: Candidate,
    ) -> dict[str, Any]:
        """Write everything, test once, and say the verdict.

        Args:
            compared: candidates on the images that the chosen one was measured on.
        """
        names, temperature = self.embedded.class_names, 1.0
        if self.embedded.parts:
            found = fit_temperature(chosen.logits.mean(0), chosen.labels)
            temperature = float(np.clip(found, *TEMPERATURES))
        model = self._network(chosen, temperature)
        tests = self._tests(compared[0], chosen, model, temperature)
        staged = fit_files.stage(self.out)
        if self.embedded.parts:
            rows = np.concatenate([part.rows for part in self.embedded.parts])[: len(chosen.labels)]
            images, scaled = self._file_names(rows), chosen.logits.mean(0) / temperature
            answers_table = fit_files.held_out_table(images, compared, chosen, names, scaled)
            answers_table.to_csv(staged / fit_files.HELD_OUT, index=False)
            fit_files.save_figures(compared, chosen, names, staged)
        facts: dict[str, Any] = {
            "verdict": verdict(compared, chosen, self._images_in_words()),
            "chosen": chosen.name,
            "held_out": self._images_in_words(),
            "temperature": temperature if self.embedded.parts else None,
            "candidates": {each.name: fit_files.facts_of(each, candidates[0]) for each in candidates},
            "test": tests,
            "dataset": {
                "name": self.data.name,
                "medical": is_medical(self.data.name),
                "images": {name: len(found) for name, found in self.embedded.splits.items()},
                "hashes": self.embedded.hashes,
            },
            "model": str(self.backbone.model.config.name_or_path),
            "network": self.backbone.identity,
            "versions": versions(),
            "about": about,
        }
        if tuned is not None:
            probe = candidates[0].on(slice(len(tuned.labels)))
            facts["candidates"][TUNED] = fit_files.facts_of(tuned, probe)
        fit_files.save_network(model, self.backbone.processor, bool(self.embedded.parts), staged)
        facts["weights"] = digest(staged / WEIGHTS)
        card = fit_files.fit_card(fit_files.run_folder(facts, staged), facts, str(self.out))
        (staged / CARD).write_text(card, encoding="utf-8")
        (staged / fit_files.FACTS).write_text(json.dumps(facts, indent=1))
        fit_files.publish(staged, self.out)
        self._tell(facts)
        return json.loads(json.dumps(facts))

    def _network(self, chosen: Candidate, temperature: float) -> Any:
        """The network to be saved, with calibrated probabilities."""
        model, head = self.backbone.model, self.backbone.head
        weight, bias = (torch.from_numpy(chosen.heads[ALL][name]) for name in ("weight", "bias"))
        if chosen.name == TUNED:
            room = Tuning(self.data, self.embedded, self.backbone, self.out / fit_files.STATE)
            everything = np.arange(len(self.embedded.labels))
            model = room.train(chosen.settings, chosen.heads, ALL, everything)
            head = classification_head(model, len(self.embedded.class_names))
            weight, bias = head.weight.detach().double(), head.bias.detach().double()
        put_head(model, head, weight / temperature, bias / temperature, self.embedded.class_names)
        return model

    def _tests(
        self, probe: Candidate, chosen: Candidate, model: Any, temperature: float
    ) -> dict[str, dict[str, Any]]:
        """Numbers of the chosen model and of the probe on the test images."""
        test = self.embedded.test
        if test is None:
            return {}
        logits = {each.name: logits_of(each.heads[ALL], test.plain()) for each in (probe, chosen)}
        if chosen.name == TUNED:
            logits[TUNED] = answers(model, self.backbone, self.data.splits["test"])
        else:
            logits[chosen.name] = logits[chosen.name] / temperature
        return {name: numbers_of(found, test, self.embedded.class_names) for name, found in logits.items()}

    def _images_in_words(self) -> str:
        if self.embedded.validation is not None:
            return "validation images"
        if not self.embedded.parts:
            return "nothing"
        return f"labeled images, each held out from one of {len(self.embedded.parts)} folds"

    def _file_names(self, rows: NDArray) -> list[Any]:
        split = self.data.splits["labeled" if self.embedded.validation is None else "validation"]
        return split.select(rows)["file_name"][:] if "file_name" in split.column_names else rows.tolist()

    def _tell(self, facts: dict[str, Any]) -> None:
        self.say(facts["verdict"])
        for name, found in facts["test"].items():
            low, high = found["intervals"]["test_balanced_accuracy"]
            self.say(
                f"Test, {name}: balanced accuracy {percent(found['test_balanced_accuracy'])} "
                f"({100 * low:.1f} to {100 * high:.1f}), accuracy {percent(found['test_accuracy'])}"
            )
        self.say(f"Saved in {self.out}")


def with_tuned(
    candidates: list[Candidate], best: Candidate, tuned: Candidate | None
) -> tuple[list[Candidate], Candidate]:
    """All candidates to compare, and the chosen one: the tuned network only if it is better than the best
    head and the probe on the images that it was measured on.
    """
    if tuned is None:
        return candidates, best
    alike = [each.on(slice(len(tuned.labels))) for each in candidates]
    rivals = [alike[0], alike[candidates.index(best)]]
    if tuned.score > max(score for each in rivals for score in (each.score, each.together)):
        return [*alike, tuned], tuned
    return candidates, best


def said_of(tuned: Candidate | None) -> str:
    if tuned is None:
        return f"no time is left for {LENGTHS[-1]} steps"
    images = f"{len(tuned.labels):,} held-out images"
    return f"{percent(tuned.score)} balanced accuracy on {images} after {tuned.settings['max_steps']} steps"


def numbers_of(logits: NDArray, test: Features, names: Sequence[str]) -> dict[str, Any]:
    labels = labels_of(test)
    found = evaluate_classifier(logits, labels, names, "test_")
    support = {"test": np.bincount(labels, minlength=len(names)).tolist()}
    return {**found, "support": support, "intervals": split_intervals(found, support)}


def load(
    sides: dict[str, Any],
    group: str | None,
    dataset: str | None,
    config: str | None,
    settings: dict[str, Any],
    say: Say,
) -> FitData:
    """Images of one's own, or a data set by name."""
    given = [name for name, value in {**sides, "group": group}.items() if value is not None]
    if dataset in (None, "folders"):
        if extra := [*settings, *(["config"] if config else [])]:
            raise ValueError(f"{extra[0]} is given, but it is for a data set by name: leave it out.")
        return load_sides(sides, group, say)
    if given:
        raise ValueError(
            f"dataset is {dataset}, but {given[0]} is given as well, which is for images of your own: leave "
            "one of the two out."
        )
    return load_named(str(dataset), config, settings)


def check_network(model: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """Where the network is, once it is on this machine."""
    try:
        find_folder(model or DEFAULT_MODEL)
    except ValueError as error:
        if model:
            raise
        raise ValueError(
            f"No model was given, so that {DEFAULT_MODEL} is fetched from the Hub, which failed: give the "
            f"folder of a network with model, --model FOLDER on the command line ({error.__cause__})"
        ) from error
    return model or DEFAULT_MODEL


def seconds(text: str) -> float:
    """Of a time such as 90s, 10m or 1h30m."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", str(text))
    if str(text) != "0" and (not parts or "".join(map("".join, parts)) != str(text)):
        raise ValueError(f"time is {text!r}, but expected one such as 90s, 10m or 1h30m, or 0.")
    return sum(float(number) * UNITS[unit] for number, unit in parts)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of single trainings, which are about nothing that a user could change."""
    own, level = logging.getLogger("hf_fixastep"), logging.getLogger("hf_fixastep").level
    verbosity = transformers_logging.get_verbosity()
    own.setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        own.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
