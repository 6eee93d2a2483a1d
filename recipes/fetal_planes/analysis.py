"""What the gate keeps of the pile, and how well images that show no known plane are told apart; a CSV.

    python recipes/fetal_planes/analysis.py 0 1 --config fetal_planes/mean_teacher --data_dir WHERE_PLANES_ARE

It trains heads as `fixastep train` does, once for every seed before the options, and counts for every
unlabeled image how often its gradient reached the head; only then it asks the report of the data which images
are foreign. For losses that give every image a gradient, such as Mean Teacher, `known` and `foreign` are what
the gate keeps. The other columns are AUROCs of test images against foreign ones, by the scores that `fixastep
evaluate` has, and by the largest probability of the probe of the same labels.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import numpy as np
import torch
from transformers import PrinterCallback

from hf_fixastep.data import folder_report
from hf_fixastep.evaluation.open_set import auroc, energy, max_probability, nearest_class, nearest_labeled
from hf_fixastep.runs import training
from hf_fixastep.runs.arguments import parse, positional
from hf_fixastep.runs.heads import answers_of, probe_of


COLUMNS = ("labels_per_class", "seed", "known", "foreign", "probe", "largest", "energy", "labeled", "class")


def watch(loss: Any, images: int) -> torch.Tensor:
    """How often each unlabeled image was looked at, and how often it counted, [2, images]; filled later."""
    counts, logits = torch.zeros(2, images, dtype=torch.int64), loss.logits

    def watched(model: Any, batch: Any, *views: str, **options: Any) -> Any:
        found = logits(model, batch, *views, **options)
        for values in found[1 : 1 + len(views)]:
            # After the hook of the gate, which has set the gradients that it rejects to 0.
            values.register_hook(lambda delta, rows=batch.index: count(counts, rows, delta))
        return found

    loss.logits = watched
    return counts


def count(counts: torch.Tensor, rows: torch.Tensor, delta: torch.Tensor) -> None:
    counts[0].index_add_(0, rows, torch.ones_like(rows))
    counts[1].index_add_(0, rows, delta.ne(0).any(1).long())


def shares(counts: Any, classes: Any) -> tuple[float, float]:
    """Of looks at images of known planes those that counted, and the same of foreign images."""
    known = np.asarray(classes) >= 0
    (seen, kept), (others, kept_others) = counts[:, known].sum(1), counts[:, ~known].sum(1)
    return float(kept / seen), float(kept_others / others)


def areas(trainer: Any, data: Any) -> list[float]:
    """AUROCs by the largest probability of the probe, then by the scores of the run."""
    both, labeled = [data[name].plain() for name in ("test", "unseen_foreign")], data["labeled"]
    own, logits = labeled.plain(), [answers_of(trainer, rows) for rows in both]
    pairs = [[max_probability(probe_of(labeled).logits(rows)) for rows in both]]
    pairs += [[score(rows) for rows in logits] for score in (max_probability, energy)]
    pairs.append([nearest_labeled(rows, own) for rows in both])
    pairs.append([nearest_class(rows, own, labeled.labels) for rows in both])
    return [auroc(*pair) for pair in pairs]


def analyse(seed: str, options: list[str]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        own = ["--seed", seed, "--split_seed", seed, "--output_dir", folder, "--keep", "numbers"]
        trainer, data, start = training.prepare([*options, *own])
        trainer.remove_callback(PrinterCallback)
        counts = watch(trainer.loss, len(data["unlabeled"]))
        start()
    data_args, *_ = parse(training.TYPES, [*options, *own])
    classes = folder_report(training.load_data(data_args))["unlabeled_classes"]
    labels = len(data["labeled"]) // len(trainer.class_names)
    return [labels, int(seed), *shares(counts.numpy(), classes), *areas(trainer, data)]


def main(argv: list[str]) -> None:
    seeds, options = positional(argv)
    print(*COLUMNS, sep=",")
    for seed in seeds:
        print(*(f"{value:.6g}" for value in analyse(seed, options)), sep=",", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
