from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image
from transformers import TrainerCallback, pipeline

from hf_fixastep import LOSSES, PROCEDURES, load_dataset
from hf_fixastep.checkpoints import only_run
from hf_fixastep.cli import evaluate
from hf_fixastep.echo import phantom
from hf_fixastep.runs import network, training
from hf_fixastep.runs.arguments import parse
from tests.short_runs import SHORT


ROOT = Path(__file__).parents[2]
RECIPES = sorted(
    path
    for path in (ROOT / "recipes").rglob("*.yaml")
    if path.parent.name not in ("accelerate", "search", "sweeps")
)


def arguments(recipe: str, folder: Path, *more: str) -> list[str]:
    return ["--config", str(ROOT / "recipes" / recipe), "--output_dir", str(folder), *SHORT, *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run of four steps."""
    folder = tmp_path_factory.mktemp("runs") / "quickstart"
    training.main(arguments("digits/quickstart.yaml", folder))
    return folder


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_parses(path):
    *_, args, given = parse(training.TYPES, ["--config", str(path), "--disable_tqdm", "true"])
    assert args.loss in LOSSES
    assert given["dataset"] == yaml.safe_load(path.read_text())["dataset"]


# The official settings for TMED-2, by recipe and split: optim, learning rate, weight decay, unlabeled weight,
# cosine or fixed, steps of the ramp, temperature and alpha of the mixing.
HEART2HEART = {
    "supervised": [
        ("adam", 0.01, 0, None, "cosine", None, None, None),
        ("adam", 0.003, 0, None, "cosine", None, None, None),
        ("adam", 0.003, 0, None, "fixed", None, None, None),
    ],
    "pi_model": [
        ("adam", 0.003, 0, 1, "cosine", 0, 0.5, 0.75),
        ("adam", 0.003, 0, 1, "cosine", 17000, 0.95, 0.5),
        ("adam", 0.003, 0, 1, "cosine", 34000, 0.5, 0.5),
    ],
    "vat": [
        ("adam", 0.002, 4e-6, 0.1, "cosine", 17000, 0.5, 0.5),
        ("adam", 0.002, 4e-6, 3, "fixed", 34000, 0.5, 0.5),
        ("adam", 0.006, 4e-6, 0.1, "fixed", 0, 0.5, 0.5),
    ],
    "fixmatch": [
        ("sgd", 0.1, 5e-4, 0.5, "cosine", 0, 0.95, 0.75),
        ("sgd", 0.1, 5e-4, 0.5, "fixed", 0, 0.95, 0.75),
        ("sgd", 0.1, 5e-4, 1, "cosine", 0, 0.5, 0.5),
    ],
}


@pytest.mark.parametrize("split", range(3))
@pytest.mark.parametrize("name", HEART2HEART)
def test_the_recipes_of_heart2heart_have_the_official_settings_of_every_split(name, split):
    path = ROOT / f"recipes/heart2heart/{name}.yaml"
    more = re.findall(rf"^# Split {split}: add  (.*)$", path.read_text(), re.M)
    assert len(more) == (split > 0)
    data, model_args, args, _ = parse(training.TYPES, ["--config", str(path), *" ".join(more).split()])
    schedule = "cosine" if args.lr_cycle_steps == 1 else "fixed" if args.lr_cycle_steps == 0 else "other"
    found = (args.optim, args.learning_rate, args.weight_decay, args.unlabeled_weight, schedule)
    found += (args.unlabeled_warmup_steps, args.mix_temperature, args.mix_alpha)
    wanted = HEART2HEART[name][split]
    assert tuple(value for value, known in zip(found, wanted, strict=True) if known is not None) == tuple(
        value for value in wanted if value is not None
    )
    epoch = {0: 1561, 1: 1660, 2: 1427}[split] // 64  # labeled images, in batches
    assert (args.max_steps, args.eval_steps, args.save_steps) == (1000 * epoch, 8 * epoch, 8 * epoch)
    assert (data.dataset, data.dataset_config, args.class_weights) == ("tmed2", f"split{split}", "balanced")
    assert (args.per_device_train_batch_size, args.teacher_decay, args.flip) == (64, 0.999, True)
    assert args.unlabeled_batch_size == (320 if name == "fixmatch" else 64)
    assert args.metric_for_best_model == "balanced_accuracy"
    assert args.output_dir == f"runs/heart2heart-{name}-{split}"
    built = network.build_config(model_args, 4, "paper")
    assert (built.depth, built.width, built.num_stages, built.image_size) == (28, 2, 4, 112)
    assert not network.build_processor(model_args).do_normalize


def test_every_loss_and_procedure_has_a_digits_recipe():
    assert {path.stem for path in (ROOT / "recipes/digits").glob("*.yaml")} == {
        *LOSSES,
        *PROCEDURES,
        "quickstart",
    }


def test_a_run_leaves_model_numbers_log_and_figures(run):
    wanted = [
        "model.safetensors",
        "config.json",
        "preprocessor_config.json",
        "metrics.json",
        "log.csv",
        "recipe.yaml",
    ]
    figures = ["losses.png", "gate.png", "cosines.png", "confusion.png"]
    assert [name for name in [*wanted, *figures] if not (run / name).is_file()] == []


def test_the_log_has_every_number_to_watch(run):
    log = pd.read_csv(run / "log.csv").dropna(subset="loss")
    assert list(log["step"]) == [2, 4]
    columns = {"loss/labeled", "loss/unlabeled", "unlabeled_weight", "gate/open", "gate/cosine", "mask_rate"}
    assert columns | {"learning_rate"} <= set(log.columns)
    assert [len(cosines.split()) for cosines in log["gate/cosines"]] == [2, 2]


def test_the_saved_folder_works_in_a_pipeline_and_knows_the_classes(run):
    test = load_dataset("digits_open_set", "zeta50", split="test")
    answers = pipeline("image-classification", model=str(run))(
        [row["image"] for row in test.select(range(20))]
    )
    assert {answer[0]["label"] for answer in answers} <= set("012345")


def test_the_evaluation_of_a_run_repeats_its_test_numbers(run):
    evaluate.main([str(run)])
    repeated = json.loads((run / "evaluation_test.json").read_text())
    reported = json.loads((run / "metrics.json").read_text())
    for name, value in repeated.items():
        assert value == pytest.approx(reported[f"test_{name}"], abs=1e-6)


def test_the_pipeline_sees_the_pixels_that_the_trainer_saw(run):
    """Accuracy by the pipeline, which resizes and normalizes on its own way, equals the reported one."""
    test = load_dataset("digits_open_set", "zeta50", split="test")
    answers = pipeline("image-classification", model=str(run), batch_size=90)(list(test["image"]))
    right = [answer[0]["label"] == str(label) for answer, label in zip(answers, test["label"], strict=True)]
    assert np.mean(right) == pytest.approx(
        json.loads((run / "metrics.json").read_text())["test_accuracy"], abs=1e-6
    )


def test_the_table_shows_baselines_beside_the_run(run, capsys):
    metrics = json.loads((run / "metrics.json").read_text())
    training.print_table(metrics, run, [])
    assert "this run" not in capsys.readouterr().out
    metrics |= {"test_accuracy": 0.8125, "baselines": {"probe": {"test_accuracy": 0.774}, "labeled-only": {}}}
    training.print_table(metrics, run, [])
    lines = [re.split(r"\s*[│┃]\s*", line.strip())[1:-1] for line in capsys.readouterr().out.splitlines()]
    assert ["", "this run", "probe", "labeled-only"] in lines
    assert ["test accuracy", "81.2 %", "77.4 %", ""] in lines


def test_baselines_that_were_measured_are_facts_of_the_run(tmp_path):
    trainer, *_ = training.prepare(arguments("digits/quickstart.yaml", tmp_path / "run"))
    assert "baselines" not in trainer.card.facts({})
    trainer.card.baselines = {"probe": {"test_accuracy": 0.774}}
    assert trainer.card.facts({})["baselines"] == {"probe": {"test_accuracy": 0.774}}


def test_a_finished_run_is_not_written_over(run):
    before = contents(run)
    with pytest.raises(SystemExit, match="holds a run already"):
        training.main(arguments("digits/quickstart.yaml", run))
    assert contents(run) == before


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--gate", "dorp"], "Unknown gate 'dorp'. Did you mean drop?"),
        (["--lerning_rate", "1"], "Unknown argument 'lerning_rate'. Did you mean learning_rate?"),
        (["--loss", "fixmach"], "Unknown loss 'fixmach'. Did you mean fixmatch?"),
        (
            ["--loss_kwargs", "{treshold: 0.9}"],
            "Unknown argument of fixmatch 'treshold'. Did you mean threshold?",
        ),
        (["--procedure", "save_student"], "Unknown procedure 'save_student'. Did you mean safe_student?"),
        (
            ["--procedure", "safe_student", "--procedure_kwargs", "{iteration: 2}"],
            "Unknown argument of safe_student 'iteration'. Did you mean iterations?",
        ),
        (
            ["--procedure", "safe_student", "--procedure_kwargs", "{iterations: 0}"],
            "iterations must be a positive",
        ),
        (["--trainable", "heads"], "Unknown trainable 'heads'. Did you mean"),
        (["--labeled_view", "stong"], "Unknown labeled_view 'stong'. Did you mean strong?"),
        (["--dataset", "digit_open_set"], "Unknown dataset 'digit_open_set'. Did you mean digits_open_set?"),
        (["--zeta", "51"], "Unknown config of digits_open_set 'zeta51'. Did you mean"),
        (["--dataset_config", "zeta25"], "dataset_config is zeta25 and zeta is 50; give one of the two."),
        (["--labels_per_class", "500"], "labels_per_class is 500"),
        (["--labeled", "photos"], "labeled is photos, but dataset is digits_open_set: --labeled is for"),
        (["--dataset", "cifar10_six_animal", "--data_dir", "nowhere"], "There is no folder nowhere"),
        (["--max_steps", "many"], "Argument --max_steps"),
        (["--model_kwargs", "{dept: 10}"], "Unknown key of wide_resnet_fixastep in model_kwargs: 'dept'."),
        (["--model_kwargs", "{depth: 11}"], "depth is 11, but must be 6n + 4"),
        (["--model", "wide_resnet"], "wide_resnet is no model type, and no model could be loaded from it"),
        (["--per_device_train_batch_size", "0"], "per_device_train_batch_size is 0"),
        (["--mix_temperature", "0"], "mix_temperature is 0"),
        (["--resume_from_checkpoint", "true"], "holds no checkpoint to resume"),
        (["--resume_from_checkpoint", "elsewhere"], "elsewhere holds no manifest.txt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_sentence_and_writes_nothing(more, sentence, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(SystemExit, match=re.escape(sentence)) as stopped:
        training.main(arguments("digits/quickstart.yaml", folder, *more))
    assert "\n" not in str(stopped.value)
    assert stopped.value.code != 0
    assert not folder.exists() or contents(folder) == {}


def test_an_unknown_key_in_the_yaml_is_an_error_with_a_suggestion(tmp_path):
    (tmp_path / "mine.yaml").write_text("dataset: digits_open_set\nlerning_rate: 0.1\n")
    with pytest.raises(SystemExit, match=r"'lerning_rate'\. Did you mean learning_rate\?"):
        training.main(["--config", str(tmp_path / "mine.yaml")])


def test_a_run_continues_from_its_last_checkpoint(tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    training.main(arguments("digits/quickstart.yaml", whole, "--load_best_model_at_end", "false"))
    stop = arguments("digits/quickstart.yaml", halves, "--load_best_model_at_end", "false")
    trainer, *_ = training.prepare(stop)
    trainer.add_callback(StopAfter(2))
    trainer.train()
    training.main([*stop, "--resume_from_checkpoint", "true"])
    assert (whole / "model.safetensors").read_bytes() == (halves / "model.safetensors").read_bytes()


def test_a_second_run_in_the_same_folder_ends_in_one_sentence(tmp_path):
    with only_run(tmp_path), pytest.raises(SystemExit, match=f"error: Another run is writing to {tmp_path}"):
        training.main(arguments("digits/quickstart.yaml", tmp_path))


def test_a_folder_in_use_is_not_looked_through_for_a_checkpoint(tmp_path, monkeypatch):
    """Its run may prune what was found in the next moment, and the sentence would be about that."""
    monkeypatch.setattr(training, "find_checkpoint", lambda folder: pytest.fail("it was looked through"))
    words = [*arguments("digits/quickstart.yaml", tmp_path), "--resume_from_checkpoint", "true"]
    with only_run(tmp_path), pytest.raises(SystemExit, match=f"error: Another run is writing to {tmp_path}"):
        training.main(words)


class StopAfter(TrainerCallback):
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args, state, control, **kwargs) -> None:
        control.should_training_stop = state.global_step == self.steps


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (
            "vit",
            "{patch_size: 4, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, "
            "intermediate_size: 16}",
        ),
        ("resnet", "{embedding_size: 8, hidden_sizes: [8, 16], depths: [1, 1], layer_type: basic}"),
    ],
)
def test_a_model_of_the_library_can_be_built_from_scratch(model, settings, tmp_path):
    folder = tmp_path / model
    training.main(arguments("digits/supervised.yaml", folder, "--model", model, "--model_kwargs", settings))
    grey = Image.fromarray(np.zeros((8, 8), dtype=np.uint8))
    assert len(pipeline("image-classification", model=str(folder))(grey, top_k=6)) == 6


def test_a_saved_model_can_be_trained_further(run, tmp_path):
    training.main(arguments("digits/supervised.yaml", tmp_path / "more", "--model", str(run)))
    assert (tmp_path / "more" / "metrics.json").is_file()


def test_folders_train_by_name(tmp_path):
    for row, example in enumerate(load_dataset("digits_open_set", split="validation")):
        folder = tmp_path / "labeled" / f"digit {example['label']}"
        folder.mkdir(parents=True, exist_ok=True)
        example["image"].save(folder / f"{row}.png")
    (tmp_path / "pile").mkdir()
    for row, example in enumerate(load_dataset("digits_open_set", split="unlabeled").select(range(20))):
        example["image"].save(tmp_path / "pile" / f"{row}.png")
    (tmp_path / "pile" / "broken.png").write_bytes(b"no image")
    sides = ["--labeled", str(tmp_path / "labeled"), "--unlabeled", str(tmp_path / "pile")]
    settings = [
        "--image_size",
        "8",
        "--model_kwargs",
        "{depth: 10, width: 1}",
        "--per_device_train_batch_size",
        "8",
    ]
    training.main(arguments("folders/fixmatch.yaml", tmp_path / "run", *sides, *settings))
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    assert metrics["images"]["unlabeled"] == 20
    assert "test_recall_digit_3" in metrics


def test_phantom_hearts_train_by_the_split_and_are_called_phantom(tmp_path, capsys):
    root = tmp_path / "tmed2"
    phantom.write_tmed2(root, phantom.SMALLEST, np.random.default_rng(0))
    (root / phantom.MARKER).write_text("synthetic")
    more = ["--data_dir", str(root), "--dataset_config", "split1", "--per_device_train_batch_size", "4"]
    training.main(arguments("heart2heart/phantom_fixmatch.yaml", tmp_path / "run", *more))
    metrics = json.loads((tmp_path / "run/metrics.json").read_text())
    assert metrics["dataset"]["phantom"]
    assert {"test_recall_PLAX", "test_recall_PSAX", "test_recall_A4C", "test_recall_A2C"} <= metrics.keys()
    assert "PHANTOM DATA, fixmatch" in capsys.readouterr().out
    with (root / "DEV56/TMED2_fold1_labeledpart.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["view_label"] in ("PLAX", "PSAX", "A4C", "A2C")]
    for part, split in (("train", "labeled"), ("val", "validation"), ("test", "test")):
        assert metrics["images"][split] == sum(row["view_classifier_split"] == part for row in rows)


def test_other_data_are_not_called_phantom(run):
    assert not json.loads((run / "metrics.json").read_text())["dataset"]["phantom"]


def test_test_images_need_not_show_every_class(tmp_path, monkeypatch):
    load = training.load_data

    def one_image(args):
        data = load(args)
        data["test"] = data["test"].select([0])
        return data

    monkeypatch.setattr(training, "load_data", one_image)
    shapes = []
    monkeypatch.setattr(
        training, "save_figures", lambda log, confusion, *rest: shapes.append(confusion.shape) or []
    )
    training.main(arguments("digits/supervised.yaml", tmp_path / "run"))
    assert shapes == [(6, 6)]


def test_folders_on_the_command_line_go_before_those_of_the_recipe():
    words = ["--labeled", "a", "--unlabeled", "b", "c/*.png", "--group", "(.*)_"]
    sides = {"labeled": "a", "unlabeled": ["b", "c/*.png"], "group": "(.*)_"}
    recipe = ["--config", "folders/fixmatch"]
    data, _, _, given = parse(training.TYPES, [*recipe, *words, "--dataset_kwargs", "{seed: 3, labeled: d}"])
    assert (data.dataset, data.settings) == ("folders", {"seed": 3, **sides})
    assert given["dataset_kwargs"] == {"seed": 3, **sides}
    assert not given.keys() & sides.keys()
    data, _ = parse((training.DataArguments,), words)
    assert (data.dataset, data.settings) == ("folders", sides)


def test_a_training_without_data_or_without_its_folder_ends_in_one_sentence(tmp_path):
    words = ["--labeled", "nowhere", "--unlabeled", "no"]
    with pytest.raises(SystemExit, match="nowhere"):
        training.main(arguments("folders/fixmatch.yaml", tmp_path / "run", *words))
    with pytest.raises(SystemExit, match="No data were named: give --dataset NAME, or --labeled DIR"):
        training.main(["--model", "vit", "--output_dir", str(tmp_path / "run")])


def test_a_labeled_only_run_has_no_gate_figures(tmp_path):
    folder = tmp_path / "run"
    training.main(arguments("digits/supervised.yaml", folder))
    assert sorted(path.name for path in folder.glob("*.png")) == ["confusion.png", "losses.png"]
    assert json.loads((folder / "metrics.json").read_text())["gate_open_rate"] is None


def test_a_data_set_without_test_images_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="folders has the splits labeled, unlabeled, validation here, but"):
        training.check_splits("folders", dict.fromkeys(["labeled", "unlabeled", "validation"]))
