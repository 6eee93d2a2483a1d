"""Cards say what is true, and nothing that users give breaks out of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from safetensors.torch import save_file
from scipy.stats import binomtest

from hf_fixastep import LOSSES
from hf_fixastep.disk import digest
from hf_fixastep.evaluation.intervals import split_intervals
from hf_fixastep.hub.cards import FIX_A_STEP, model_card
from hf_fixastep.hub.checks import check_repo_id
from hf_fixastep.hub.push import ALLOWED, prepare_model, run_files
from hf_fixastep.hub.texts import escape, plain, shared
from hf_fixastep.methods import CITATIONS, METHODS
from hf_fixastep.runs.folder import FIGURES, RunFolder


ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "Planted7" * 4
PNG = b"\x89PNG\r\n\x1a\n and so on"

HOSTILE = [
    "---",
    "a\n---\nlicense: apache-2.0\n---\n",
    "\n---\n# Owned",
    "key: value",
    "- item",
    "!!python/object/apply:os.system ['id']",
    "&anchor *anchor",
    "{a: b}",
    "[a](https://evil.example)",
    "![a](https://evil.example/x.png)",
    "<https://evil.example>",
    "https://evil.example/a?b=c",
    "www.evil.example",
    "someone@evil.example",
    "<script>alert(1)</script>",
    "</td></table><img src=x onerror=alert(1)>",
    "<!-- hidden",
    "&lt;b&gt;",
    "&#60;b&#62;",
    "`code`",
    "``` \n```\n# out of the code",
    "~~~",
    "a | b | c |",
    "\\| \\\\|",
    "# Heading",
    "> quote",
    "1. first",
    "**bold** __bold__ *i* _i_",
    "~~gone~~ $x^2$ :tada:",
    "[ref]: https://evil.example",
    "a\tb\r\nc\x0bd\x0ce",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "\x9b31m",
    "a\x00b",
    "\u202egnp.exe",
    "\u2066isolate\u2069\u200b\ufeff",
    "line\u2028separator\u2029here\x85",
    "\ud800 lone surrogate",
    "x" * 10_000,
    "`" * 10_000,
    "../../../../etc/passwd",
    "C:\\Windows\\..\\..\\secret",
    "$header ${title} $$",
    "{0} {title!r} %s %(a)s {{ jinja }} {% raw %}",
    "😀👩‍👩‍👧 é 名 ß",
    " ",
    "",
    "null",
    "%YAML 1.2",
    "? complex",
]
READABLE = [
    "digit 3",
    "digits_open_set",
    "A4C",
    "it's 3.5 cm (left), or so",
    "zeta50",
    "café",
    "a-b/c_d+e=f;",
]


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """A finished run, without a training: three classes, two of them in the test split."""
    folder = tmp_path / "run"
    folder.mkdir()
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, ["cat", "dog", "owl"])
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 8, "width": 8}}))
    (folder / "log.csv").write_text("step,loss\n2,1.0\n")
    for name in FIGURES:
        (folder / name).write_bytes(PNG)
    results = {
        "test_accuracy": 0.875,
        "test_balanced_accuracy": 0.85,
        "test_recall_cat": 0.9,
        "test_recall_dog": 0.8,
    }
    support = {"test": [30, 10, 0]}
    metrics = {
        "loss": "fixmatch",
        "gate": "drop",
        "mix_labeled": True,
        "steps": 600,
        "best_step": 500,
        "images": {"labeled": 30, "unlabeled": 383, "test": 40},
        "gate_open_rate": 0.625,
        **results,
        "support": support,
        "intervals": split_intervals(results, support),
        "dataset": {"name": "digits_open_set", "config": "zeta50", "hashes": {"labeled": "0123456789abcdef"}},
        "speed": {"steps_per_second": 12.5, "device": "CPU with 2 threads", "processes": 1},
        "versions": {"torch": "2.15.0"},
        "weights": digest(folder / "model.safetensors"),
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump({"loss": "fixmatch", "zeta": 50, "data_dir": "/home/me/data"})
    )
    return RunFolder.read(folder)


def write_config(folder: Path, names: list[str], **more: object) -> None:
    labels = {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "wide_resnet_fixastep", **labels, **more}))


def body(card: str) -> str:
    return re.fullmatch(r"---\n.*?\n---\n(.*)", card, re.DOTALL)[1]


def structure(text: str) -> list[str]:
    """All that a Markdown parser sees but the text itself."""
    kinds = []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text):
        kinds.append(token.type)
        kinds += [f"{child.type} {child.attrs}" for child in token.children or [] if "text" not in child.type]
    return kinds


def shown_text(text: str) -> str:
    """The text that a reader sees."""
    pieces = []
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text):
        pieces += ["".join(child.content for child in token.children or [])]
    return "\n".join(pieces)


# ---- what it tells


def test_the_results_are_read_back_from_the_header(run):
    found = ModelCard(model_card(run, "org/name", "mit")).data
    assert (found.license, found.library_name, found.pipeline_tag) == (
        "mit",
        "transformers",
        "image-classification",
    )
    results = {result.metric_type: result for result in found.eval_results}
    assert {name: result.metric_value for name, result in results.items()} == {
        "accuracy": 0.875,
        "balanced_accuracy": 0.85,
    }
    accuracy = results["accuracy"]
    assert (accuracy.dataset_name, accuracy.dataset_config, accuracy.dataset_split) == (
        "digits_open_set",
        "zeta50",
        "test",
    )
    exact = binomtest(35, 40).proportion_ci(method="wilson")
    assert accuracy.metric_args == {"images": 40, "interval_95": [round(exact.low, 4), round(exact.high, 4)]}


def test_the_card_tells_what_the_run_knows(run):
    card = model_card(run, "org/name", "mit", "Sorting digits.")
    assert "\n\n\n" not in card  # jinja leaves out a name that was not given
    text = shown_text(body(card))
    for fact in (
        "3 classes (cat, dog, owl)",
        "FixMatch and Fix-A-Step",
        "30 labeled and 383 unlabeled",
        "62.5 % of the steps",
        "0123456789abcdef",
        "step 500",
        "12.5 steps per second",
        "torch 2.15.0",
        "Sorting digits.",
        "not calibrated",
    ):
        assert fact in text
    assert "/home" not in text


@pytest.mark.parametrize(
    ("gate", "mixing", "words"),
    [
        ("drop", True, "FixMatch and Fix-A-Step on"),
        ("drop", False, "FixMatch and Fix-A-Step (its gate alone) on"),
        ("off", True, "FixMatch and Fix-A-Step (its mixing alone) on"),
        ("off", False, "FixMatch on"),
    ],
)
def test_the_card_names_the_method_that_was_used(run, gate, mixing, words):
    run.metrics |= {"gate": gate, "mix_labeled": mixing}
    assert words in model_card(run)


def test_the_baselines_stand_beside_the_model_where_they_were_measured(run):
    assert "| this model |" not in model_card(run)
    run.metrics["baselines"] = {"probe": {"validation_accuracy": 0.77, "test_accuracy": 0.8125}}
    lines = model_card(run).splitlines()
    first = lines.index("|  | validation accuracy | test accuracy | test balanced accuracy |")
    assert lines[first + 2].startswith("| this model |  | 87.5 % (")
    assert lines[first + 3] == "| probe | 77.0 % | 81.2 % |  |"


def test_a_probe_has_neither_gate_nor_mixing_in_its_name(run):
    run.metrics |= {"loss": "probe", "gate": "drop", "mix_labeled": False}
    card = model_card(run)
    assert "trained with logistic regression on the features of the frozen network (the probe) on 30" in card
    assert "Only the head is new, and it was fitted, not trained." in card


def test_only_classes_that_were_tested_have_a_recall(run):
    rows = [line for line in model_card(run).splitlines() if re.match(r"\| (cat|dog|owl) ", line)]
    assert [row.split(" | ")[:2] for row in rows] == [["| cat", "30"], ["| dog", "10"]]
    # By hand, with z = 1.96: (0.8 + 0.192 ± 0.314) / 1.384.
    assert rows[1].endswith("| 80.0 % (49.0 to 94.3) |")


def test_a_run_without_results_says_so(run):
    for name in ("intervals", "test_balanced_accuracy", "speed"):  # as with metrics of a user's own
        del run.metrics[name]
    card = model_card(run)
    assert "No accuracy was measured." in card
    assert ModelCard(card).data.eval_results is None


def test_the_card_of_a_gate_per_example_counts_images(run):
    run.metrics["gate"] = "per_example"
    text = shown_text(body(model_card(run, "org/name", "mit", "Sorting digits.")))
    assert "The gate kept 62.5 % of the unlabeled images that had a gradient." in text


def test_a_training_that_goes_on_says_so(run):
    assert "training goes on" not in model_card(run)
    run.metrics["in_progress"] = True
    assert "**The training goes on**; this is step 600." in model_card(run)


def test_a_calibrated_model_tells_its_numbers(run):
    write_config(
        run.folder, ["cat"], calibration={"temperature": 1.7, "abstain_below": 0.61, "coverage": 0.9}
    )
    text = model_card(run)
    assert "divided by 1.7" in text
    assert "below 0.61, which kept 90.0 % of them" in text
    assert "not calibrated" not in text


def test_only_our_network_needs_our_package(run):
    assert "import hf_fixastep" in model_card(run, "org/name")
    config = run.config | {"model_type": "vit"}
    (run.folder / "config.json").write_text(json.dumps(config))
    assert "import hf_fixastep" not in model_card(run, "org/name")


@pytest.mark.parametrize("loss", LOSSES)
def test_every_method_is_named_and_cited(run, loss):
    run.metrics["loss"] = loss
    card = model_card(run)
    assert METHODS[loss] in card
    assert FIX_A_STEP in card
    assert loss == "supervised" or CITATIONS[loss] in card


def test_the_readme_cites_fix_a_step_in_the_same_words():
    assert FIX_A_STEP in (ROOT / "README.md").read_text()


# ---- hostile texts


@pytest.mark.parametrize("text", READABLE)
def test_ordinary_names_stay_readable(text):
    assert escape(text) == text


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:20]))
def test_a_text_is_shown_as_it_is_and_does_nothing(text):
    markdown = escape(text)
    assert structure(f"| a |\n| - |\n| x{markdown}x |") == structure("| a |\n| - |\n| xyx |")
    assert " ".join(shown_text(f"x{markdown}x").split()) == " ".join(f"x{plain(text)}x".split())
    assert plain(text).isprintable()
    assert len(plain(text)) <= 100


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:20]))
def test_nothing_breaks_out_of_the_card(run, text):
    run.metrics["baselines"] = {"probe": {"test_accuracy": 0.5}}
    ordinary = model_card(run, "org/name", "mit", "word")
    run.metrics["baselines"] = {text: {"test_accuracy": 0.5}}
    write_config(run.folder, [text, "dog", "owl"])
    run.metrics["dataset"] |= {"name": text, "config": text or "x", "hashes": {"labeled": text}}
    run.metrics["versions"] = {"torch": text}
    run.metrics["started_from"] = text or "x"
    run.recipe = {"loss": text, "zeta": [text], "data_dir": {text: text}}
    card = model_card(run, "org/name", "mit", text or "x")
    before, after = ModelCard(ordinary), ModelCard(card)
    assert after.data.to_dict().keys() == before.data.to_dict().keys()
    assert after.data.license == "mit"
    assert len(after.data.eval_results) == len(before.data.eval_results)
    assert after.data.tags == before.data.tags
    assert structure(body(card)) == structure(body(ordinary))
    assert {c for c in card if not c.isprintable()} == {"\n"}
    card.encode("utf-8")
    assert yaml.safe_load(run_files(run, card)["recipe.yaml"]) is not None


@pytest.mark.parametrize("name", ["a`b", "it's", "```", 'quote " and \\ back', "new\nline", "<b>", "---"])
def test_the_name_of_a_folder_stays_inside_the_code(run, tmp_path, name):
    ordinary = structure(body(model_card(run)))
    moved = run.folder.rename(tmp_path / name)
    card = model_card(RunFolder.read(moved))
    assert structure(body(card)) == ordinary
    code = re.search(r"```python\n(.*?)\n```", card, re.DOTALL)[1]
    called = {}
    fake = {"pipeline": lambda task, model, revision: called.update(model=model) or print}
    exec(code.replace("from transformers import pipeline", "").replace("import hf_fixastep", ""), fake)
    assert called["model"] == str(moved)


@pytest.mark.parametrize(
    "text", sorted(set(HOSTILE) - {"null", "www.evil.example"}), ids=lambda text: ascii(text[:20])
)
def test_a_hostile_model_id_is_refused_in_one_short_line(text):
    with pytest.raises(ValueError, match=r"^hub_model_id is ") as refused:
        check_repo_id(text)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


# ---- what leaves the machine


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/home/me/secret project/data", "data"),
        ("~/data", "data"),
        ("../../me/data/", "data"),
        ("C:\\Users\\me\\data", "data"),
        ("file:///home/me/data", "data"),
        ("data/here", "data/here"),
        ("org/name", "org/name"),
        (
            "{labeled: /home/me/labeled, unlabeled: [/home/me/pile, b]}",
            {"labeled": "labeled", "unlabeled": ["pile", "b"]},
        ),
        ('["/home/me/a"]', ["a"]),
        ("{not yaml: [", "{not yaml: ["),
        ({"hub_token": "x", "hub_model_id": "o/n", "output_dir": "runs", "seed": 1}, {"seed": 1}),
        ({"kwargs": {"api_token": "x", "size": (1, 2)}}, {"kwargs": {"size": [1, 2]}}),
        (0.5, 0.5),
        (None, None),
    ],
)
def test_paths_are_cut_and_private_settings_left_out(value, expected):
    assert shared(value) == expected


def test_only_what_is_listed_is_pushed(run):
    for name in (
        "optimizer.pt",
        "training_args.bin",
        "sample.png",
        ".env",
        "pytorch_model.bin",
        "model.py",
        "x.safetensors",
    ):
        (run.folder / name).write_bytes(PNG)
    (run.folder / "checkpoint-4").mkdir()
    (run.folder / "checkpoint-4" / "optimizer.pt").write_bytes(b"x")
    assert set(run_files(run, "card")) == set(ALLOWED)


def test_a_file_is_not_pushed_for_its_name_alone(run):
    (run.folder / "gate.png").write_bytes(b"\x80\x04 a pickle")
    (run.folder / "log.csv").write_bytes(b"\x80\x04 a pickle")
    assert set(ALLOWED) - set(run_files(run, "card")) == {"gate.png", "log.csv"}


def test_class_names_are_no_paths(run):
    write_config(run.folder, ["/m/01g317", "~", "../up"], _name_or_path="/home/me/model")
    pushed = json.loads(run_files(run, "card")["config.json"])
    assert list(pushed["id2label"].values()) == ["/m/01g317", "~", "../up"]
    assert pushed["_name_or_path"] == "model"


PLANTS = {
    "recipe": lambda run: run.recipe.update(note=f"mine is {TOKEN}"),
    "metrics": lambda run: run.metrics.update(note=[TOKEN]),
    "config": lambda run: write_config(run.folder, [TOKEN]),
    "log": lambda run: (run.folder / "log.csv").write_text(f"step,{TOKEN}\n"),
    "figure": lambda run: (run.folder / "gate.png").write_bytes(PNG + TOKEN.encode()),
    "weights": lambda run: save_file(
        {"w": torch.zeros(1)}, run.folder / "model.safetensors", metadata={"note": TOKEN}
    ),
}


@pytest.mark.parametrize("place", PLANTS)
def test_a_token_is_never_pushed(run, place):
    PLANTS[place](run)
    with pytest.raises(ValueError, match="looks like an access token") as refused:
        run_files(run, "card")
    assert TOKEN not in str(refused.value)


def test_weights_that_are_a_pickle_are_refused(run):
    torch.save({"weight": torch.zeros(2)}, run.folder / "model.safetensors")
    with pytest.raises(ValueError, match="is no safetensors file"):
        run_files(run, "card")


def test_a_card_belongs_to_one_model(run):
    save_file({"weight": torch.ones(2)}, run.folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="is not the model that the numbers in its folder are about"):
        run_files(run, "card")


@pytest.mark.parametrize("key", ["auto_map", "custom_pipelines"])
def test_a_model_that_wants_code_from_the_hub_is_refused(run, key):
    write_config(run.folder, ["cat"], **{key: {"AutoModel": "modeling.Model"}})
    with pytest.raises(ValueError, match="asks to run code from the Hub"):
        run_files(run, "card")


def test_a_push_asks_for_what_a_card_cannot_know(run):
    with pytest.raises(ValueError, match="hub_license is not given"):
        prepare_model(run, "org/name", None, None)
    run.metrics["dataset"]["medical"] = True
    with pytest.raises(ValueError, match="hub_intended_use is not given, and these data are medical"):
        prepare_model(run, "org/name", "mit", " ")
    card = prepare_model(run, "org/name", "mit", "Research on views.")["README.md"].decode()
    assert "Not a medical device" in card
    assert "Research on views." in card


def test_the_card_of_a_view_classifier_tells_population_and_failures(run):
    run.metrics["dataset"] |= {"name": "tmed2", "medical": True, "phantom": False}
    card = model_card(run, "org/name", "mit", "Sorting archives.")
    assert "### Out of scope" in card
    assert (
        card.index("### Known failures") < card.index("### In general") < card.index("Every image gets one")
    )


def test_the_card_of_a_phantom_says_so_and_claims_nothing_of_hospitals(run):
    run.metrics["dataset"] |= {"name": "tmed2", "medical": True, "phantom": True}
    card = model_card(run, "org/name", "mit", "Trying it out.")
    assert "**Phantom data**" in card.split("## How to use it")[0]
    assert "Boston" not in card
    assert "Not a medical device" in card
    assert "name: tmed2 (phantom)" in card


@pytest.mark.parametrize("name", ["model.safetensors", "metrics.json", "recipe.yaml", "config.json"])
def test_a_folder_that_is_no_finished_run_is_refused(run, name):
    (run.folder / name).unlink()
    with pytest.raises(ValueError, match=f"holds no {re.escape(name)}, so it is no finished run"):
        RunFolder.read(run.folder)
