"""One call from images to a saved model: what it chooses, what it says, and that a kill changes nothing."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import PIL.Image
import pytest
import torch
from huggingface_hub import ModelCard
from scipy.special import softmax
from transformers import pipeline

from hf_fixastep import cli
from hf_fixastep.checkpoints import only_run
from hf_fixastep.data import load_dataset
from hf_fixastep.data.features import Features
from hf_fixastep.features import candidates as trainings
from hf_fixastep.features import fit as module
from hf_fixastep.features import fit_files, tuning
from hf_fixastep.features.candidates import (
    HEADS,
    LABELED_ONLY,
    PROBE,
    TUNED,
    Candidate,
    logits_of,
    train_head,
)
from hf_fixastep.features.fit import fit, seconds, with_tuned
from hf_fixastep.features.fit_data import Embedded, folds
from hf_fixastep.features.verdict import NOTHING, against, choose, verdict
from tests.features.networks import tiny_network, tiny_processor


COLOURS = {"blue": (40, 60, 200), "green": (40, 200, 60), "red": (200, 60, 40)}
FILES = {
    *("README.md", "candidates.png", "config.json", "confusion.png", "fit.json", "held_out.csv"),
    *("model.safetensors", "preprocessor_config.json"),
}


@pytest.fixture(autouse=True)
def short() -> Iterator[None]:
    datasets.disable_progress_bars()
    with pytest.MonkeyPatch.context() as patch:
        for settings in HEADS.values():
            patch.setitem(settings, "max_steps", 6)
            patch.setitem(settings, "per_device_train_batch_size", 8)
        yield
    datasets.enable_progress_bars()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("network")
    tiny_network().save_pretrained(folder)
    tiny_processor().save_pretrained(folder)
    return folder


def picture(path: Path, colour: str, seed: int, noise: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    pixels = np.array(COLOURS[colour]) + random.integers(-noise, noise + 1, (24, 24, 3))
    pixels += random.integers(-noise, noise + 1, 3)
    PIL.Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)


def make_sides(root: Path, noise: int, labels: int = 3) -> dict[str, Path]:
    for number, colour in enumerate(COLOURS):
        for at in range(labels):
            picture(root / f"labeled/{colour}/p{at // 2}_{at}.png", colour, 100 * number + at, noise)
        for at in range(6):
            picture(root / f"validation/{colour}/{at}.png", colour, 1000 + 100 * number + at, noise)
            picture(root / f"pile/{colour}{at}.png", colour, 2000 + 100 * number + at, noise)
    return {"labeled": root / "labeled", "unlabeled": root / "pile"}


@pytest.fixture(scope="module")
def easy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_sides(tmp_path_factory.mktemp("easy"), noise=5)


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_sides(tmp_path_factory.mktemp("hard"), noise=110)


@pytest.fixture
def run(network: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A fit into out/, without fine-tuning; what it says is in `said`."""

    def start(sides: dict[str, Path], out: str | Path = "out", **more: Any) -> dict[str, Any]:
        start.said = []  # type: ignore[attr-defined]
        given: dict[str, Any] = {"model": network, "time": "0", "seeds": 1, "cache_dir": tmp_path / "cache"}
        return fit(**sides, output_dir=tmp_path / out, say=start.said.append, **(given | more))  # type: ignore[attr-defined]

    return start


# ---- choice and verdict, with made-up numbers


def answering(name: str, *right: int, images: int = 100, loss: str = "fixmatch") -> Candidate:
    """A candidate that is right on the first images, `right` of them for each seed."""
    labels = np.arange(images) % 2
    wrong = np.arange(images)[None] >= np.array(right)[:, None]
    answers = np.where(wrong, 1 - labels, labels)
    return Candidate(name, {"loss": loss}, {}, np.eye(2)[answers], labels)


def test_features_of_another_length_give_the_same_heads() -> None:
    """Eight times the features, whose weights are an eighth and whose answers are the same."""
    torch.manual_seed(0)
    rows, labels, answers = torch.randn(40, 3, 6), torch.arange(8) % 2, []
    for length in (1.0, 8.0):
        labeled = Features.of(length * rows[:8], labels, ["a", "b"], weak=1)
        data = Embedded(["a", "b"], labeled, Features.of(length * rows, weak=1), None, None)
        start = {"weight": np.ones((2, 6)) / length, "bias": np.zeros(2)}
        found = train_head(data, np.arange(8), HEADS["vat"], tiny_processor(), start)
        answers.append(logits_of(found, length * rows[:, 0].numpy()))
    np.testing.assert_allclose(answers[0], answers[1], atol=1e-4)
    start = {"weight": np.ones((2, 6)), "bias": np.zeros(2)}
    assert np.abs(answers[0] - logits_of(start, rows[:, 0].numpy())).max() > 1e-3  # and something was learned


def test_the_best_is_chosen_and_the_simpler_one_of_equals() -> None:
    probe, plain, other = answering(PROBE, 80), answering(LABELED_ONLY, 84, 84), answering("x", 84, 84)
    assert choose([probe, plain, other]) is plain
    assert choose([probe, answering(LABELED_ONLY, 80, 80), answering("x", 78, 82)]) is probe
    assert choose([probe, answering(LABELED_ONLY, 70, 72), best := answering("x", 80, 84)]) is best


def test_a_mean_of_heads_that_is_worse_than_the_probe_is_not_chosen() -> None:
    """The seeds are right on 60 % each, but where one is right, it is less sure than the others."""
    labels = np.zeros(10, np.int64)
    logits = np.zeros((5, 10, 2))
    logits[..., 1] = 10.0
    for seed in range(5):
        right = (np.arange(6) + 2 * seed) % 10
        logits[seed, right, 1] = -0.1
    probe = Candidate(
        PROBE, {}, {}, np.where(np.arange(10)[:, None] < 5, [1.0, 0.0], [0.0, 1.0])[None], labels
    )
    heads = Candidate("x", {}, {}, logits, labels)
    assert (probe.score, heads.score, heads.together) == (0.5, 0.6, 0.0)
    assert choose([probe, heads]) is probe
    said = "the probe: 50.0 % against 0.0 % of the mean of the heads of the best other candidate, x"
    assert said in verdict([probe, heads], probe, "images")


def test_a_sure_gain_is_called_help_with_numbers_and_the_interval() -> None:
    probe, plain, best = answering(PROBE, 60), answering(LABELED_ONLY, 62, 62), answering("x", 90, 90)
    found, beside = against(best, probe), against(best, plain)
    assert verdict([probe, plain, best], best, "validation images") == (
        "The pile helped: 90.0 % against 60.0 % of the probe (balanced accuracy on 100 validation images; "
        f"95 % interval of the difference {100 * found.low:+.1f} to {100 * found.high:+.1f}, 2 seeds). A "
        f"head of the labels alone reaches 62.0 % (95 % interval of the difference {100 * beside.low:+.1f} "
        f"to {100 * beside.high:+.1f}, 2 seeds)."
    )
    assert 0 < found.low < 0.3 < found.high


def test_a_gain_over_the_probe_alone_is_not_put_down_to_the_pile() -> None:
    probe, plain, best = answering(PROBE, 60), answering(LABELED_ONLY, 89, 89), answering("x", 90, 90)
    said = verdict([probe, plain, best], best, "images")
    assert said.startswith("Training helped: 90.0 % against 60.0 % of the probe")
    assert said.endswith("so that it cannot be told whether the pile helped.")


def test_intervals_hold_for_all_candidates_at_once() -> None:
    """As Bonferroni has it: four intervals that miss 1.25 % each miss at most 5 % together."""
    assert len(HEADS) + 1 == 4
    found = against(answering("x", 70), answering(PROBE, 60))  # 10 of 100 images are won
    won = np.random.default_rng(0).binomial(100, 0.1, 10**6) / 100
    expected = np.quantile(won, [0.025 / 4, 1 - 0.025 / 4])
    np.testing.assert_allclose([found.low, found.high], expected, atol=0.011)


def test_a_gain_that_chance_may_explain_is_called_so() -> None:
    probe, plain, best = answering(PROBE, 60), answering(LABELED_ONLY, 60), answering("x", 60, 62)
    assert verdict([probe, plain, best], best, "images").startswith(
        "The pile may have helped: 61.0 % against 60.0 %"
    )


def test_a_probe_that_stays_and_labels_alone_are_told() -> None:
    probe, worse, plain = answering(PROBE, 60), answering("x", 50), answering(LABELED_ONLY, 70, 70)
    assert verdict([probe, worse], probe, "images").startswith(
        "The pile did not help; the saved model is the probe: 60.0 % against 50.0 % of the best other"
    )
    assert verdict([probe, plain], plain, "images").startswith("The pile did not help beyond the labels;")


@pytest.mark.parametrize(("loss", "way"), [("fixmatch", "with"), ("supervised", "without")])
def test_a_tuned_network_says_whether_it_saw_the_pile(loss: str, way: str) -> None:
    probe, plain, tuned = answering(PROBE, 60), answering(LABELED_ONLY, 60), answering(TUNED, 90, loss=loss)
    start = f"Fine-tuning of the whole network, {way} the pile, helped: 90.0 %"
    assert verdict([probe, plain, tuned], tuned, "images").startswith(start)


def test_a_tuned_network_has_to_be_better_on_its_own_images() -> None:
    """The best head is right on 44 of the first 50 images, and on 74 of all."""
    probe, best = answering(PROBE, 40), answering("x", 44)
    for right, name in ((44, "x"), (45, TUNED)):
        compared, chosen = with_tuned([probe, best], best, answering(TUNED, right, images=50))
        assert chosen.name == name
        assert len(compared[0].labels) == (50 if name == TUNED else 100)


# ---- folds


def test_no_group_is_parted_and_every_class_is_always_seen() -> None:
    random = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 20)
    groups = random.integers(0, 9, 60)
    parts = folds(labels, groups)
    assert len(parts) > 1
    for seen, held in parts:
        assert not set(groups[seen]) & set(groups[held])
        assert set(labels[seen]) == {0, 1, 2}
        assert sorted([*seen, *held]) == list(range(60))


def test_a_single_image_of_a_class_is_never_held_out_and_costs_no_folds() -> None:
    labels = np.array([0] * 5 + [1] * 5 + [2])
    parts = folds(labels, None)
    assert len(parts) == 5
    assert sorted(row for _, held in parts for row in held) == list(range(10))


def test_there_are_as_many_folds_as_the_smallest_class_has_images() -> None:
    assert len(folds(np.array([0] * 9 + [1] * 3), None)) == 3


def test_one_label_per_class_gives_no_folds() -> None:
    assert folds(np.arange(4), None) == []
    assert folds(np.array([0, 0, 1]), None) == []


# ---- whole fits


def test_separable_classes_give_a_model_that_a_pipeline_reads(run, easy, tmp_path) -> None:
    facts = run(easy)
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == FILES
    assert facts == json.loads((out / "fit.json").read_text())
    assert [*facts["candidates"]] == [PROBE, "shaped probe", *HEADS]
    assert facts["candidates"][PROBE]["balanced_accuracy"] == 1
    assert facts["chosen"] == PROBE  # nothing is better
    assert run.said[-2].startswith("The pile did not help; the saved model is the probe: 100.0 %")  # type: ignore[attr-defined]
    assert facts["held_out"] == "labeled images, each held out from one of 3 folds"
    classify = pipeline("image-classification", model=str(out))
    for colour in COLOURS:
        path = easy["labeled"].parent / f"validation/{colour}/0.png"
        assert classify(str(path))[0]["label"] == colour


def test_a_push_of_a_fit_leaves_images_groups_and_paths_at_home(run, easy, tmp_path, capsys) -> None:
    facts = run(easy, group=r"(p\d)_")
    assert facts["about"]["groups"] is not None
    out, given = tmp_path / "out", ("org/name", "mit", "Telling colours apart.")
    files = fit_files.prepare_push(out, *given)
    assert files.keys() == FILES - {"held_out.csv"}
    assert json.loads(files["fit.json"]) == {
        name: value for name, value in facts.items() if name != "about"
    } | {"model": Path(facts["model"]).name}
    texts = b"".join(content for content in files.values() if isinstance(content, bytes))
    assert str(tmp_path.parent).encode() not in texts
    card = ModelCard(files["README.md"].decode())
    assert (card.data.license, "Meant for: Telling colours apart." in card.text) == ("mit", True)
    cli.main(["push", str(out), "--hub_model_id", "org/name", "--hub_license", "mit", "--dry_run", "true"])
    assert f"Files: {', '.join(sorted(files))}" in capsys.readouterr().out
    (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-1] + b"\1")
    with pytest.raises(ValueError, match="is not the model that the numbers in its folder are about"):
        fit_files.prepare_push(out, *given)


def test_what_is_saved_is_never_worse_than_the_probe_on_held_out_images(run, hard) -> None:
    for out, validation in (("cross", None), ("given", hard["labeled"].parent / "validation")):
        facts = run(hard, out, validation=validation)
        chosen, probe = (facts["candidates"][name] for name in (facts["chosen"], PROBE))
        assert probe["balanced_accuracy"] < 1
        assert chosen["balanced_accuracy"] >= probe["balanced_accuracy"]
        assert chosen["of_mean_head"] >= probe["balanced_accuracy"]


@pytest.mark.parametrize("chosen", [PROBE, "mean_teacher"])
def test_the_pipeline_gives_the_probabilities_that_the_table_says(
    run, hard, tmp_path, monkeypatch, chosen
) -> None:
    monkeypatch.setattr(module, "choose", lambda found: {each.name: each for each in found}[chosen])
    validation = hard["labeled"].parent / "validation"
    facts = run(hard, validation=validation)
    table = pd.read_csv(tmp_path / "out/held_out.csv")
    classify = pipeline("image-classification", model=str(tmp_path / "out"))
    right = []
    for _, row in table.iterrows():
        found = {each["label"]: each["score"] for each in classify(str(validation / row["image"]))}
        for name in COLOURS:  # features are cached in float16
            assert found[name] == pytest.approx(row[f"p({name})"], abs=5e-3)
        assert max(found, key=found.__getitem__) == row[chosen]
        right.append(row["label"] == row[chosen])
    assert np.mean(right) == pytest.approx(
        facts["candidates"][chosen]["of_mean_head"]
    )  # as many of each class


def test_test_images_are_tested_once_with_the_probe_beside(run, hard) -> None:
    facts = run(hard, test=hard["labeled"].parent / "validation", seeds=2)
    assert facts["test"].keys() == {PROBE, facts["chosen"]}
    assert sum(sentence.startswith("Test, ") for sentence in run.said) == len(facts["test"])  # type: ignore[attr-defined]
    assert facts["dataset"]["images"]["test"] == 18
    assert facts["candidates"][PROBE]["held_out_images"] == 9


def test_a_data_set_by_name_is_judged_on_its_validation_split(run, tmp_path) -> None:
    named = {"dataset": "digits_open_set", "config": "zeta50", "labels_per_class": 3, "seed": 0}
    facts = run(named)
    data = load_dataset("digits_open_set", "zeta50", labels_per_class=3, seed=0)
    assert facts["held_out"] == "validation images"
    assert facts["candidates"][PROBE]["held_out_images"] == len(data["validation"])


# ---- kills and restarts


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stopped(work: Callable[..., Any], last: int) -> Callable[..., Any]:
    """The same work, which is interrupted at this call."""
    calls = itertools.count(1)

    def start(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == last:
            raise KeyboardInterrupt
        return work(*args, **kwargs)

    return start


def publish_half(staged: Path, out: Path) -> None:
    for path in sorted(staged.iterdir())[:3]:
        path.replace(out / path.name)
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One place for all, as the card names it."""
    return tmp_path_factory.mktemp("same") / "out"


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    """What a fit leaves that nobody stopped, once there is one."""
    return {}


@pytest.mark.parametrize("place", ["training", "writing", "publishing"])
def test_a_fit_that_was_stopped_ends_in_the_same_bits(run, hard, out, whole, monkeypatch, place) -> None:
    if not whole:
        run(hard, out)
        whole |= contents(out)
    shutil.rmtree(out)
    if place == "publishing":
        monkeypatch.setattr(module.fit_files, "publish", publish_half)
    else:
        home, name, last = {
            "training": (trainings, "train", 5),
            "writing": (module.fit_files, "fit_card", 1),
        }[place]
        monkeypatch.setattr(home, name, stopped(getattr(home, name), last))
    with pytest.raises(KeyboardInterrupt):
        run(hard, out)
    assert not (out / "fit.json").exists()
    monkeypatch.undo()
    run(hard, out)
    assert contents(out) == whole


def test_a_finished_fit_is_told_again_and_not_of_other_data(run, easy, hard, tmp_path, monkeypatch) -> None:
    facts = run(easy)
    monkeypatch.setattr(trainings, "train", None)
    assert run(easy) == facts
    assert facts["verdict"] in run.said[0]
    with pytest.raises(ValueError, match="holds a finished fit with other images or labels: choose"):
        run(hard)
    with pytest.raises(ValueError, match="holds a finished fit with other seeds: choose"):
        run(easy, seeds=2)


# ---- fine-tuning


@pytest.fixture
def four_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LENGTHS", (4,))


@pytest.mark.parametrize("given", [True, False], ids=["validation", "cross-validation"])
def test_a_tuned_network_that_is_better_is_saved(run, hard, tmp_path, monkeypatch, four_steps, given) -> None:
    monkeypatch.setattr(
        module,
        "with_tuned",
        lambda all, best, tuned: ([*(each.on(slice(len(tuned.labels))) for each in all), tuned], tuned),
    )
    validation = hard["labeled"].parent / "validation"
    facts = run(hard, time="1h", **({"validation": validation} if given else {"test": validation}))
    assert facts["chosen"] == TUNED
    tuned = facts["candidates"][TUNED]
    assert tuned["settings"]["max_steps"] == 4
    assert tuned["settings"]["trainable"] == "all"
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    classify = pipeline("image-classification", model=str(tmp_path / "out"))
    files = sorted(validation.rglob("*.png"))
    right = np.mean([classify(str(path))[0]["label"] == path.parent.name for path in files])
    claimed = tuned["balanced_accuracy"] if given else facts["test"][TUNED]["test_balanced_accuracy"]
    assert right == pytest.approx(claimed)
    assert tuned["held_out_images"] == (18 if given else 3)


def test_without_time_left_nothing_is_tuned_and_a_restart_knows(run, easy, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(module.Clock, "left", lambda self: 0.0)
    monkeypatch.setattr(module.fit_files, "fit_card", None)
    with pytest.raises(TypeError):
        run(easy, time="1s")
    assert run.said[-1] == "fine-tuned: no time is left for 100 steps"
    monkeypatch.undo()
    assert json.loads((tmp_path / "out/state/tuning.json").read_text())["steps"] == 0


# ---- bad input


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("0", 0), ("0.5h", 1800), ("0s", 0)]
)
def test_times_are_read(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["10", "ten minutes", "10 m", "m", "", "-5m", "10mm"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"time is '{re.escape(text)}', but expected one such as 90s"):
        seconds(text)


def test_one_label_per_class_saves_the_probe_and_compares_nothing(run, easy, tmp_path) -> None:
    labeled = tmp_path / "one"
    for colour in COLOURS:
        picture(labeled / colour / "0.png", colour, 7, 5)
    facts = run({**easy, "labeled": labeled})
    assert (facts["chosen"], facts["verdict"], facts["temperature"]) == (PROBE, NOTHING, None)
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES - {
        "candidates.png",
        "confusion.png",
        "held_out.csv",
    }


def test_mistakes_end_in_one_sentence_before_anything_is_written(run, easy, tmp_path) -> None:
    only = tmp_path / "only"
    picture(only / "red/0.png", "red", 0, 5)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    digits = {"dataset": "digits_open_set"}
    for sides, more, sentence in [
        ({**easy, "labeled": only}, {}, "labeled has one class, red, but expected at least two"),
        ({**easy, "unlabeled": tmp_path / "empty"}, {}, "where no image was found"),
        ({"labeled": easy["labeled"]}, {}, "unlabeled is not given"),
        (easy, {"out": "full"}, "which holds notes.txt and is no fit: choose an empty folder"),
        (easy, {"seeds": 0}, "seeds is 0, but expected a whole number of at least 1"),
        (easy, {"time": "soon"}, "time is 'soon', but expected one such as 90s"),
        (easy, {"zeta": 50}, "zeta is given, but it is for a data set by name"),
        ({**easy, **digits}, {}, "dataset is digits_open_set, but labeled is given as well"),
        (
            easy,
            {"model": None},
            "No model was given, so that facebook/dinov2-small is fetched from the Hub, which failed",
        ),
    ]:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            run(sides, **more)
    assert not (tmp_path / "out").exists()


def test_a_launcher_of_several_processes_is_refused(run, easy, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="but a fit runs in one"):
        run(easy)


def test_the_command_does_the_same(easy, network, tmp_path, capsys) -> None:
    words = ["--labeled", str(easy["labeled"]), "--unlabeled", str(easy["unlabeled"]), "--seeds", "1"]
    words += ["--model", str(network), "--time", "0", "--group", r"(p\d)_"]
    cli.main(["fit", *words, "--output_dir", str(tmp_path / "out"), "--cache_dir", str(tmp_path / "cache")])
    facts = json.loads((tmp_path / "out/fit.json").read_text())
    assert capsys.readouterr().out.splitlines()[-2] == facts["verdict"]
    assert facts["held_out"].endswith("from one of 2 folds")  # two groups
    with pytest.raises(SystemExit, match=r"error: No output_dir was given"):
        cli.main(["fit", *words])
    with pytest.raises(SystemExit, match=r"error: No images were named"):
        cli.main(["fit", "--output_dir", str(tmp_path / "other")])


def test_the_figure_of_probabilities_is_a_softmax_of_scaled_logits() -> None:
    probe = answering(PROBE, 60)
    scaled = probe.logits.mean(0) / 2
    table = module.fit_files.held_out_table(range(100), [probe], probe, ["a", "b"], scaled)
    np.testing.assert_allclose(table[["p(a)", "p(b)"]], softmax(scaled, axis=1))


def test_a_second_fit_in_the_same_folder_is_refused(
    run: Callable[..., dict[str, Any]], easy: dict[str, Path], tmp_path: Path
) -> None:
    with only_run(tmp_path / "out"), pytest.raises(BlockingIOError, match=r"Another run is writing to .*out"):
        run(easy)
    assert run(easy)["chosen"]
