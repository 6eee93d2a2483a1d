"""The card of a model, from what its run left behind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_fixastep.data.registry import DATASETS
from hf_fixastep.evaluation.intervals import recalls_of, wilson
from hf_fixastep.hub.texts import escape, plain, shared, template_path
from hf_fixastep.methods import CITATIONS, FITTED, METHODS
from hf_fixastep.models import WideResNetConfig
from hf_fixastep.runs.folder import FIGURES, RunFolder


NO_LICENSE = "Not stated yet."
COMPARED = ("validation_accuracy", "test_accuracy", "test_balanced_accuracy")
BESIDE = (
    "On the same images, without unlabeled ones: `probe` is logistic regression on the features of the "
    "network that the training started from, `labeled-only` the same training on the labeled images alone."
)
NO_HEARTS = "What the model learned says nothing about hearts."

FIX_A_STEP = """@inproceedings{huang2023fixastep,
  title = {Fix-A-Step: Semi-supervised Learning From Uncurated Unlabeled Data},
  author = {Huang, Zhe and Sidhom, Mary-Joy and Wessler, Benjamin S. and Hughes, Michael C.},
  booktitle = {International Conference on Artificial Intelligence and Statistics (AISTATS)},
  year = {2023}
}"""


def model_card(
    run: RunFolder, repo_id: str | None = None, license: str | None = None, intended_use: str | None = None
) -> str:
    """The README.md of a model; before it is pushed it speaks of the local folder.

    Jinja escapes nothing in Markdown: whatever a user could have written goes through `escape` here.
    """
    name = repo_id or str(run.folder)
    title = name.rsplit("/", 1)[-1] if repo_id else run.folder.resolve().name
    cited = [FIX_A_STEP, CITATIONS.get(run.metrics.get("procedure") or run.metrics["loss"])]
    figures = [f"![{text}]({file})" for file, text in FIGURES.items() if (run.folder / file).is_file()]
    card = ModelCard.from_template(
        header(run, plain(title), license),
        template_path=str(template_path("model_card.md")),
        title=escape(title),
        summary=summary(run),
        usage=usage(run, name),
        data=describe_data(run),
        training=describe_training(run),
        results=describe_results(run),
        figures="\n\n".join(figures),
        speed=describe_speed(run.metrics),
        intended_use=describe_use(run, intended_use),
        limits="\n".join(limits(run)),
        license=NO_LICENSE if license is None else escape(license),
        citations="\n\n".join(filter(None, cited)),
    )
    return f"{card}\n"  # jinja drops the end of the last line


def header(run: RunFolder, title: str, license: str | None) -> ModelCardData:
    """What the Hub reads: tags, licence and results."""
    metrics, data = run.metrics, run.metrics.get("dataset", {})
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=plain(data.get("name", "images")),
            dataset_name=plain(data.get("name", "images")) + " (phantom)" * bool(data.get("phantom")),
            dataset_config=plain(data["config"]) if data.get("config") else None,
            dataset_split=split,
            metric_type=metric,
            metric_name=metric.replace("_", " "),
            metric_value=round(metrics[f"{split}_{metric}"], 4),
            metric_args={
                "images": sum(counts),
                "interval_95": rounded(metrics["intervals"][f"{split}_{metric}"]),
            },
        )
        for split, counts in metrics.get("support", {}).items()
        for metric in ("accuracy", "balanced_accuracy")
        if f"{split}_{metric}" in metrics.get("intervals", {})
    ]
    return ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="image-classification",
        tags=["fix-a-step", "semi-supervised-learning", plain(metrics["loss"])],
        model_name=title or "model",
        eval_results=results or None,
    )


def summary(run: RunFolder) -> str:
    names, metrics = run.class_names, run.metrics
    images, data = metrics.get("images", {}), metrics.get("dataset", {})
    shown = ", ".join(escape(name, 40) for name in names[:12]) + (", and others" if len(names) > 12 else "")
    lines = [
        f"An image classifier of {len(names)} classes ({shown}), trained with {method(metrics)} on "
        f"{images.get('labeled', 'some')} labeled and {images.get('unlabeled', 'no')} unlabeled images"
        + (f" of {escape(data['name'])}." if "name" in data else "."),
        f"The network is {escape(run.config.get('model_type', 'unknown'))}"
        + (f" with {metrics['parameters']:,} parameters" if "parameters" in metrics else "")
        + (f", started from {escape(shared(start))}." if (start := metrics.get("started_from")) else "."),
    ]
    if data.get("phantom"):
        lines[0] = f"**Phantom data**: a program drew the images. {NO_HEARTS}\n\n{lines[0]}"
    if metrics.get("in_progress"):
        lines.append(f"**The training goes on**; this is step {metrics['steps']:,}.")
    return "\n".join(lines)


def method(metrics: Mapping[str, Any]) -> str:
    name = metrics.get("procedure") or metrics["loss"]
    if name in FITTED:
        how = ", scaled by what the unlabeled images say of them" if name == "shaped_probe" else ""
        return f"logistic regression on the features of the frozen network{how} (the {FITTED[name]})"
    base = METHODS.get(name) or escape(name)
    gate, mixing = metrics["gate"] != "off", metrics["mix_labeled"]
    if metrics["loss"] == "supervised" or not (gate or mixing):
        return base
    parts = "" if gate and mixing else " (its gate alone)" if gate else " (its mixing alone)"
    return f"{base} and Fix-A-Step{parts}"


def usage(run: RunFolder, name: str) -> str:
    ours = run.config.get("model_type") == WideResNetConfig.model_type
    lines = ["```python"]
    if ours:
        lines += ["import hf_fixastep  # knows the network; has to be installed"]
    lines += [
        "from transformers import pipeline",
        "",
        f'classify = pipeline("image-classification", model={json.dumps(name)}, revision="main")',
        'print(classify("image.png"))',
        "```",
    ]
    return "\n".join(lines)


def describe_data(run: RunFolder) -> str:
    data, images = run.metrics.get("dataset", {}), run.metrics.get("images", {})
    name = data.get("name")
    lines = []
    if name is not None:
        config = f", configuration {escape(data['config'])}" if data.get("config") else ""
        terms = getattr(DATASETS.get(name), "terms", None)
        lines.append(f"Name: {escape(name)}{config}." + (f" Terms: {escape(terms, 400)}" if terms else ""))
    hashes = data.get("hashes", {})
    rows = [[escape(split), f"{count:,}", escape(hashes.get(split, ""))] for split, count in images.items()]
    lines.append(table(["split", "images", "hash of images and labels"], rows))
    lines.append(
        "Equal hashes mean equal images, in this order, with equal labels (of 1,024 images spread over the "
        "split)."
    )
    return "\n\n".join(lines)


def describe_training(run: RunFolder) -> str:
    metrics = run.metrics
    lines = [f"Loss: {method(metrics)}, {metrics['steps']:,} steps."]
    if metrics["loss"] in FITTED:
        lines = ["Only the head is new, and it was fitted, not trained."]
    if metrics.get("best_step"):
        lines[0] += f" The weights are those of step {metrics['best_step']:,}, the best on validation images."
    if metrics.get("gate_open_rate") is not None:
        share = 100 * metrics["gate_open_rate"]
        lines[0] += (
            f" The gate kept {share:.1f} % of the unlabeled images that had a gradient."
            if metrics["gate"] == "per_example"
            else f" The gate let the unlabeled gradient pass in {share:.1f} % of the steps."
        )
    if (decay := metrics.get("teacher_decay")) is not None:
        lines[0] += f" The weights are averaged with a decay of {decay:.5g}."
    rows = [[escape(name), escape(value, 200)] for name, value in sorted(shared(run.recipe).items())]
    if rows:
        lines += ["Settings that differ from their defaults:", table(["setting", "value"], rows)]
    versions = ", ".join(
        f"{escape(name)} {escape(number)}" for name, number in metrics.get("versions", {}).items()
    )
    return "\n\n".join([*lines, *([f"Made with {versions}."] if versions else [])])


def describe_results(run: RunFolder) -> str:
    metrics = run.metrics
    rows = [
        [
            escape(split),
            f"{sum(counts):,}",
            *(percent(metrics, f"{split}_{m}") for m in ("accuracy", "balanced_accuracy")),
        ]
        for split, counts in metrics.get("support", {}).items()
        if f"{split}_accuracy" in metrics.get("intervals", {})
    ]
    if not rows:
        return "No accuracy was measured."
    lines = [
        table(["split", "images", "accuracy", "balanced accuracy"], rows),
        "In brackets: 95 % intervals over test images (Wilson; for the mean of the recalls Zou and Donner). "
        "They do not cover another training or another choice of labeled images.",
    ]
    if any(row[0] == "validation" for row in rows) and metrics.get("best_step"):
        lines[1] += " The step was chosen on the validation images, so that their numbers are too good."
    if beside := baseline_rows(metrics):
        names = [name.replace("_", " ") for name in COMPARED]
        lines += [BESIDE, table(["", *names], beside)]
    if per_class := recall_rows(run):
        lines.append(table(["class", "test images", "recall"], per_class))
    return "\n\n".join(lines)


def baseline_rows(metrics: Mapping[str, Any]) -> list[list[str]]:
    """This model and the baselines beside it, where the run has measured them."""
    rows = [
        [escape(name), *("" if scores.get(each) is None else percent(scores, each) for each in COMPARED)]
        for name, scores in {"this model": metrics, **(metrics.get("baselines") or {})}.items()
    ]
    return rows if len(rows) > 1 else []


def recall_rows(run: RunFolder) -> list[list[str]]:
    """Name, images and recall of each class in the test split, if they are few."""
    counts = run.metrics.get("support", {}).get("test", [])
    present = [(name, count) for name, count in zip(run.class_names, counts, strict=False) if count]
    recalls = recalls_of(run.metrics, "test")
    if len(recalls) != len(present) or len(present) > 20:
        return []
    return [
        [escape(name), f"{count:,}", bracketed(recall, wilson(recall, count))]
        for (name, count), recall in zip(present, recalls, strict=True)
    ]


def describe_speed(metrics: Mapping[str, Any]) -> str:
    speed = metrics.get("speed")
    if not speed:
        return "Not measured."
    processes = f"{speed['processes']} process{'es' if speed['processes'] > 1 else ''}"
    return (
        f"{speed['steps_per_second']:.3g} steps per second in training, evaluations and saving included "
        f"({escape(speed['device'])}, {processes})."
    )


def describe_use(run: RunFolder, intended_use: str | None) -> str:
    stated = f"Meant for: {escape(intended_use, 2000)}" if intended_use else None
    lines = [stated or "What it is meant for was not stated."]
    data = run.metrics.get("dataset", {})
    if data.get("name") == "tmed2" and not data.get("phantom"):
        lines += [template_path("view_classifier.md").read_text(encoding="utf-8").strip(), "### In general"]
    elif run.medical:
        lines.append("**Not a medical device.** For research; not for decisions about patients.")
    return "\n\n".join(lines)


def limits(run: RunFolder) -> Iterable[str]:
    labeled = run.metrics.get("images", {}).get("labeled")
    if labeled:
        yield (
            f"- Its classes are known from {labeled:,} labeled images. Another choice of them gives another "
            "model."
        )
    yield "- The unlabeled images were not sorted or checked; what they show may have shaped the model."
    calibration = run.config.get("calibration")
    if not calibration:
        yield "- Its probabilities were not calibrated."
        return
    yield (
        f"- Its probabilities are calibrated, on validation images, if the logits are divided by "
        f"{float(calibration['temperature']):.4g}, which `pipeline` does not do."
    )
    if "abstain_below" in calibration:
        least = float(calibration["abstain_below"])
        coverage = calibration.get("coverage")
        share = "" if coverage is None else f", which kept {100 * float(coverage):.1f} % of them"
        yield f"- It should abstain where the largest of them is below {least:.4g}{share}."


def percent(metrics: Mapping[str, Any], name: str) -> str:
    return bracketed(metrics[name], metrics.get("intervals", {}).get(name))


def bracketed(share: float, interval: Sequence[float] | None) -> str:
    ends = f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})" if interval else ""
    return f"{100 * share:.1f} %{ends}"


def rounded(interval: Sequence[float]) -> list[float]:
    return [round(end, 4) for end in interval]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))
