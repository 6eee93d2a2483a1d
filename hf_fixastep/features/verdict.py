"""Which candidate is saved, and what is said about it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from hf_fixastep.features.candidates import HEADS, LABELED_ONLY, PROBE, TUNED, Candidate
from hf_fixastep.study.statistics import TAIL, Interval, count, difference


METRIC = "test_balanced_accuracy"  # as `difference` calls it; of images that were held out
CHOICES = len(HEADS) + 2  # heads, the shaped probe and a fine-tuned network: the best may replace the probe
NOTHING = (
    "Nothing can be compared, as fewer than two classes have two labeled images and there are no validation "
    "images; the saved model is the probe with its default strength."
)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The one of the highest balanced accuracy on held-out images, the simpler one of equals.

    Another one replaces the probe only if it is better on the mean over its seeds, and if the mean of its
    heads, which would be saved, is not worse.

    Args:
        candidates: the probe first, and simpler ones before others.
    """
    probe = candidates[0]
    better = [each for each in candidates[1:] if each.score > probe.score and each.together >= probe.score]
    return max(better, key=lambda each: each.score, default=probe)  # max gives the first of equals


def against(first: Candidate, second: Candidate) -> Interval:
    """Of the paired difference over seeds and held-out images; a probe has no seeds and stands for all.

    The best of several candidates is lucky as well, so the interval is wide enough to hold for all at once.
    """

    def table(each: Candidate) -> pd.DataFrame:
        seeds = max(len(first.logits), len(second.logits))
        scores, answers = each.scores, [logits.argmax(-1) for logits in each.logits]
        at = [seed % len(scores) for seed in range(seeds)]
        return pd.DataFrame(
            {
                METRIC: [scores[seed] for seed in at],
                "hash_test": "the same",
                "test_labels": [each.labels] * seeds,
                "test_predictions": [answers[seed] for seed in at],
            }
        )

    return difference(table(first), table(second), METRIC, tail=TAIL / CHOICES)


def verdict(candidates: Sequence[Candidate], chosen: Candidate, images: str) -> str:
    """Whether the pile helped, in words and numbers.

    Args:
        candidates: all that were measured on the images that `chosen` was measured on, the probe first.
        images: what these are, such as "validation images".
    """
    probe, others = candidates[0], {each.name: each for each in candidates[1:]}
    if not len(probe.labels):
        return NOTHING
    measured = f"balanced accuracy on {len(probe.labels):,} {images}"
    if chosen.name == PROBE:
        best = max(others.values(), key=lambda each: each.score)
        # Seeds may be better where their mean, which would be saved, is not.
        kind = "the mean of the heads of " if best.score > probe.score else ""
        other = percent(best.together if kind else best.score)
        return (
            f"The pile did not help; the saved model is the probe: {percent(probe.score)} against {other} of "
            f"{kind}the best other candidate, {best.name} ({measured}; {between(probe, best)})."
        )
    numbers = (
        f"{percent(chosen.score)} against {percent(probe.score)} of the probe ({measured}; "
        f"{between(chosen, probe)})"
    )
    if chosen.name == LABELED_ONLY:
        return (
            "The pile did not help beyond the labels; the saved model is a head trained on the labels alone: "
            f"{numbers}."
        )
    labels = others[LABELED_ONLY]
    alone = f"A head of the labels alone reaches {percent(labels.score)} ({between(chosen, labels)})"
    is_better, pile_is_why = (against(chosen, each).low > 0 for each in (probe, labels))
    if not is_better:
        doubt = "The interval reaches below 0, so that chance may explain it."
        return f"{subject_of(chosen)} may have helped: {numbers}. {doubt} {alone}."
    if chosen.name == TUNED or pile_is_why:
        return f"{subject_of(chosen)} helped: {numbers}. {alone}."
    return f"Training helped: {numbers}. {alone}, so that it cannot be told whether the pile helped."


def subject_of(chosen: Candidate) -> str:
    if chosen.name != TUNED:
        return "The pile"
    way = "without" if chosen.settings["loss"] == "supervised" else "with"
    return f"Fine-tuning of the whole network, {way} the pile,"


def between(first: Candidate, second: Candidate) -> str:
    found = against(first, second)
    seeds = count(found.seeds, "seed")
    if not np.isfinite(found.low):
        return f"difference {100 * found.mean:+.1f}, {seeds}"
    return f"95 % interval of the difference {100 * found.low:+.1f} to {100 * found.high:+.1f}, {seeds}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"
