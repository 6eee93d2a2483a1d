"""Model cards from what a run left behind, and pushes of nothing but what is on a list."""

from __future__ import annotations

import json
import math
import re
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from string import Template
from typing import Any

import yaml
from huggingface_hub import CommitInfo, EvalResult, HfApi, ModelCardData
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError, safe_open

from hf_fixastep.data.registry import DATASETS, check_shareable, export_dataset
from hf_fixastep.disk import digest
from hf_fixastep.hub import client
from hf_fixastep.methods import CITATIONS, METHODS
from hf_fixastep.models import WideResNetConfig
from hf_fixastep.runs.folder import CARD, CONFIGS, FIGURES, LOG, METRICS, RECIPE, WEIGHTS, RunFolder


# All that a model on the Hub may consist of: no pickle, no optimizer, no image of the data.
ALLOWED = (WEIGHTS, *CONFIGS, CARD, METRICS, LOG, RECIPE, *FIGURES)
# Settings, said by nobody else.
PRIVATE = re.compile(r"output_dir|push_to_hub|hub_.*|.*_token|resume_from_checkpoint")
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{20,}")
NO_LICENSE = "Not stated yet."

FIX_A_STEP = """@inproceedings{huang2023fixastep,
  title = {Fix-A-Step: Semi-supervised Learning From Uncurated Unlabeled Data},
  author = {Huang, Zhe and Sidhom, Mary-Joy and Wessler, Benjamin S. and Hughes, Michael C.},
  booktitle = {Proceedings of the 26th International Conference on Artificial Intelligence and Statistics (AISTATS)},
  year = {2023}
}"""


# ---- texts that users give


def plain(value: Any, limit: int = 100) -> str:
    """One line without control, bidirectional or otherwise invisible characters, of limited length."""
    text = " ".join(str(value)[: 10 * limit].split())
    # categories: controls, formats such as right-to-left overrides, surrogates, private and unassigned;
    # separators
    text = "".join(
        "\ufffd" if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") else c for c in text
    )
    return (text if len(text) <= limit else f"{text[: limit - 1]}…") or "(empty)"


def escape(value: Any, limit: int = 100) -> str:
    """The same as Markdown that shows these very characters, behind other words: by entities, which are no
    markup.
    """
    # An underscore inside a word is none, nor is a colon before a space; a point before a letter could make a
    # link.
    markup = r"[^\w \-.,/()':;=+]|(?<![^\W_])_|_(?![^\W_])|:(?! )|\.(?=[^\W\d])"
    return re.sub(markup, lambda match: f"&#{ord(match[0])};", plain(value, limit))


def shared(value: Any) -> Any:
    """What may leave this machine of a setting: paths that tell where files are here are cut to their last
    part.
    """
    if isinstance(value, Mapping):
        return {key: shared(item) for key, item in value.items() if not PRIVATE.fullmatch(str(key))}
    if isinstance(value, (list, tuple)):
        return [shared(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.lstrip()[:1] in ("{", "["):  # a mapping or list given on the command line
        try:
            inner = yaml.safe_load(value)
        except yaml.YAMLError:
            inner = None
        if isinstance(inner, (dict, list)):
            return shared(inner)
    if re.match(r"\s*([/~\\]|\.\.[/\\]|[A-Za-z]:[/\\]|file:)", value):
        kind = PureWindowsPath if "\\" in value else PurePosixPath
        return kind(value.strip()).name
    return value


# ---- numbers


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of `count` trials. Wilson, 1927."""
    z = 1.959963984540054
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def mean_interval(shares: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """95 % interval of the mean of independent shares, from the interval of each. Zou and Donner, 2008."""
    mean = sum(shares) / len(shares)
    ends = [wilson(share, count) for share, count in zip(shares, counts, strict=True)]
    below = math.hypot(*(share - low for share, (low, _) in zip(shares, ends, strict=True)))
    above = math.hypot(*(high - share for share, (_, high) in zip(shares, ends, strict=True)))
    return mean - below / len(shares), mean + above / len(shares)


def intervals(
    metrics: Mapping[str, Any], support: Mapping[str, Sequence[int]]
) -> dict[str, tuple[float, float]]:
    """95 % intervals of accuracy and balanced accuracy of every split.

    Args:
        metrics: as `classification_metrics` gives them, with the split and `_` in front.
        support: images of each class, by split.
    """
    found = {}
    for split, counts in support.items():
        recalls = recalls_of(metrics, split)
        counts = [count for count in counts if count]
        if len(recalls) == len(counts) > 0:
            found[f"{split}_accuracy"] = wilson(metrics[f"{split}_accuracy"], sum(counts))
            found[f"{split}_balanced_accuracy"] = mean_interval(recalls, counts)
    return found


def recalls_of(metrics: Mapping[str, Any], split: str) -> list[float]:
    """In the order of the classes that the split has."""
    return [value for name, value in metrics.items() if name.startswith(f"{split}_recall_")]


# ---- the card


def model_card(
    run: RunFolder, repo_id: str | None = None, license: str | None = None, intended_use: str | None = None
) -> str:
    """The README.md of a model; before it is pushed it speaks of the local folder."""
    name = repo_id or str(run.folder)
    title = name.rsplit("/", 1)[-1] if repo_id else run.folder.resolve().name
    return Template(template()).substitute(
        header=header(run, plain(title), license).to_yaml().rstrip(),
        title=escape(title),
        summary=summary(run),
        usage=usage(run, name),
        data=describe_data(run),
        training=describe_training(run),
        results=describe_results(run),
        figures="\n\n".join(
            f"![{text}]({name})" for name, text in FIGURES.items() if (run.folder / name).is_file()
        ),
        speed=describe_speed(run.metrics),
        intended_use=describe_use(run, intended_use),
        limits="\n".join(limits(run)),
        license=NO_LICENSE if license is None else escape(license),
        citations="\n\n".join(
            filter(None, [FIX_A_STEP, CITATIONS.get(run.metrics.get("procedure") or run.metrics["loss"])])
        ),
    )


def template(name: str = "model_card.md") -> str:
    """From `hub_cards`, which a wheel holds inside the package and a clone beside it."""
    package = Path(__file__).parents[1]
    place = next(f for f in (package / "hub_cards", package.parent / "hub_cards") if f.is_dir())
    return (place / name).read_text(encoding="utf-8")


def header(run: RunFolder, title: str, license: str | None) -> ModelCardData:
    """What the Hub reads."""
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
        + (
            f", started from {escape(shared(metrics['started_from']))}."
            if metrics.get("started_from")
            else "."
        ),
    ]
    if data.get("phantom"):
        lines.insert(
            0,
            "**Phantom data**: a program drew the images. What the model learned says nothing about hearts.\n",
        )
    if metrics.get("in_progress"):
        lines.append(f"**The training goes on**; this is step {metrics['steps']:,}.")
    return "\n".join(lines)


def method(metrics: Mapping[str, Any]) -> str:
    name = metrics.get("procedure") or metrics["loss"]
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
        "Equal hashes mean equal images, in this order, with equal labels (of 1,024 images spread over the split)."
    )
    return "\n\n".join(lines)


def describe_training(run: RunFolder) -> str:
    metrics = run.metrics
    lines = [f"Loss: {method(metrics)}, {metrics['steps']:,} steps."]
    if metrics.get("best_step"):
        lines[0] += f" The weights are those of step {metrics['best_step']:,}, the best on validation images."
    if metrics.get("gate_open_rate") is not None:
        lines[0] += (
            f" The gate let the unlabeled gradient pass in {100 * metrics['gate_open_rate']:.1f} % of the steps."
        )
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
        "In brackets: 95 % intervals over test images (Wilson; for the mean of the recalls Zou and Donner). They do "
        "not cover another training or another choice of labeled images.",
    ]
    if any(row[0] == "validation" for row in rows) and metrics.get("best_step"):
        lines[1] += " The step was chosen on the validation images, so that their numbers are too good."
    if per_class := recall_rows(run):
        lines.append(table(["class", "test images", "recall"], per_class))
    return "\n\n".join(lines)


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
    where = f"{escape(speed['device'])}, {speed['processes']} process{'es' if speed['processes'] > 1 else ''}"
    return f"{speed['steps_per_second']:.3g} steps per second in training, evaluations and saving included ({where})."


def describe_use(run: RunFolder, intended_use: str | None) -> str:
    lines = (
        [f"Meant for: {escape(intended_use, 2000)}"]
        if intended_use
        else ["What it is meant for was not stated."]
    )
    data = run.metrics.get("dataset", {})
    if data.get("name") == "tmed2" and not data.get("phantom"):
        lines += [template("view_classifier.md").strip(), "### In general"]
    elif run.medical:
        lines.append("**Not a medical device.** For research; not for decisions about patients.")
    return "\n\n".join(lines)


def limits(run: RunFolder) -> Iterable[str]:
    labeled = run.metrics.get("images", {}).get("labeled")
    if labeled:
        yield f"- Its classes are known from {labeled:,} labeled images. Another choice of them gives another model."
    yield "- The unlabeled images were not sorted or checked; what they show may have shaped the model."
    calibration = run.config.get("calibration")
    if not calibration:
        yield "- Its probabilities were not calibrated."
        return
    share = (
        f", which kept {100 * float(calibration['coverage']):.1f} % of them"
        if "coverage" in calibration
        else ""
    )
    yield (
        f"- Its probabilities are calibrated, on validation images, if the logits are divided by "
        f"{float(calibration['temperature']):.4g}, which `pipeline` does not do."
    )
    if "abstain_below" in calibration:
        least = float(calibration["abstain_below"])
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


# ---- pushes


def model_files(run: RunFolder, card: str) -> dict[str, bytes | Path]:
    """What a push of this run consists of, by name on the Hub; each file is checked for what it should be."""
    files: dict[str, bytes | Path] = {CARD: card.encode()}
    files[METRICS] = json.dumps(shared(run.metrics), indent=2).encode()
    files[RECIPE] = yaml.safe_dump(shared(run.recipe)).encode()
    for name in CONFIGS:
        files[name] = json.dumps(shared_config(run.folder / name), indent=2).encode()
    log = run.log or run.folder / LOG
    if log.is_file() and log.read_bytes().startswith(b"step"):
        files[LOG] = log.read_bytes()
    for name in FIGURES:
        if (run.folder / name).is_file() and (run.folder / name).read_bytes().startswith(
            b"\x89PNG\r\n\x1a\n"
        ):
            files[name] = (run.folder / name).read_bytes()
    files[WEIGHTS] = check_weights(run)
    for name, content in files.items():
        if isinstance(content, bytes) and TOKEN.search(content):
            raise ValueError(
                f"{name} holds what looks like an access token; remove it from the run before the push."
            )
    return files


def shared_config(path: Path) -> dict[str, Any]:
    config = json.loads(path.read_text())
    for key in ("auto_map", "custom_pipelines"):
        if key in config:
            raise ValueError(
                f"{path} has the key {key}, which asks to run code from the Hub, and such models are not pushed: "
                "train a network that transformers or this package knows."
            )
    # Names are no paths.
    classes = {key: config.pop(key) for key in ("id2label", "label2id") if key in config}
    return shared(config) | classes


def check_weights(run: RunFolder) -> Path:
    path = run.folder / WEIGHTS
    try:
        with safe_open(path, framework="numpy") as weights:
            notes = str(weights.metadata())
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no safetensors file ({error}), and no other kind of weights is pushed."
        ) from None
    if TOKEN.search(notes.encode()):
        raise ValueError(f"{path} holds what looks like an access token; save the model again without it.")
    if run.metrics.get("weights") != digest(path):
        raise ValueError(
            f"{path} is not the model that {METRICS} tells about; train it again, so that the card says what is true."
        )
    return path


def check_intended_use(medical: bool, intended_use: str | None) -> None:
    if medical and not (intended_use or "").strip():
        raise ValueError(
            "hub_intended_use is not given, and these data are medical: say in a sentence what the model is for and "
            "who may use it."
        )


def prepare_model(
    run: RunFolder, repo_id: str | None, license: str | None, intended_use: str | None
) -> dict[str, bytes | Path]:
    """The files of a push, once everything that a card cannot know was given."""
    client.check_repo_id(repo_id)
    client.check_license(license)
    check_intended_use(run.medical, intended_use)
    return model_files(run, model_card(run, repo_id, license, intended_use))


def push_dataset(
    name: str,
    config: str | None,
    repo_id: str,
    *,
    license: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    **settings: Any,
) -> CommitInfo:
    """Export a data set that may be passed on, beside the configurations that the repository has already.

    Args:
        license: of data of your own; that of the others is known.
        settings: as in `load_dataset`.
    """
    client.check_repo_id(repo_id, "hub_dataset_id")
    check_shareable(name, license)
    where: dict[str, Any] = {"private": private, "revision": revision, "token": token}
    with tempfile.TemporaryDirectory() as folder:
        fetch_card(repo_id, Path(folder), revision, token)
        export_dataset(name, config, folder, license=license, **settings)
        files: dict[str, bytes | Path] = {
            path.relative_to(folder).as_posix(): path for path in Path(folder).glob("*/*.parquet")
        }
        card = (Path(folder) / CARD).read_text(encoding="utf-8")
        files[CARD] = card.replace('"this folder or repository"', json.dumps(repo_id)).encode()
        return client.push_files(files, repo_id, kind="dataset", message=f"Export {name}", **where)


def fetch_card(repo_id: str, folder: Path, revision: str | None, token: str | None) -> None:
    """The card of a repository, if it has one: the export adds to it, or refuses to write over another's."""
    try:
        client.check_online()
        with client.limits(other_hosts=True), tempfile.TemporaryDirectory() as place:
            api = HfApi(token=token)
            where: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
            (folder / CARD).write_bytes(
                Path(api.hf_hub_download(repo_id, CARD, local_dir=place, **where)).read_bytes()
            )
    except (RepositoryNotFoundError, RevisionNotFoundError, RemoteEntryNotFoundError):
        return
    except client.FAILURES as error:
        raise OSError(f"{repo_id} was not pushed: {client.reason(error)}.") from error
