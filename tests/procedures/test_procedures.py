from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_fixastep import FixAStepTrainer, Images, WideResNetConfig, run_procedure
from hf_fixastep import WideResNetForImageClassification as WideResNet
from hf_fixastep.checkpoints import only_run
from hf_fixastep.data.loader import generator_for
from hf_fixastep.losses import Supervised
from hf_fixastep.procedures import CurriculumLabeling, Procedure, SafeStudent
from hf_fixastep.procedures.curriculum_labeling import class_weights, confident_rows
from hf_fixastep.procedures.rounds import Round, Rounds
from hf_fixastep.procedures.safe_student import SafeStudentLoss, energy_discrepancy
from hf_fixastep.runs import training as train_recipe
from tests.losses.conftest import PixelModel, cross_entropy, pixel_batch
from tests.runs.test_training import arguments
from tests.short_runs import assert_equal, largest_difference, make_trainer, random_images, weights
from tests.test_resume import InterruptAfterSave, Interrupted


VALIDATION = random_images(30, seed=3, labeled=True)
UNLABELED = random_images(20, seed=2)
STEPS = 4


def new_model() -> WideResNet:
    """Unlike tiny_wide_resnet another one each time, unless the seed is set."""
    return WideResNet(WideResNetConfig(depth=10, width=1, image_size=8, num_labels=3))


def template(folder: Path, kind: type[FixAStepTrainer] = FixAStepTrainer, **settings: Any) -> FixAStepTrainer:
    defaults = {
        "loss": "supervised",
        "max_steps": STEPS,
        "learning_rate": 0.05,
        "teacher_decay": 0.5,
        "gate": "off",
        "mix_labeled": False,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
    }
    torch.manual_seed(7)
    return make_trainer(
        folder,
        new_model(),
        kind,
        {"eval_dataset": VALIDATION, "unlabeled_dataset": UNLABELED},
        **defaults | settings,
    )


def run(
    procedure: Procedure,
    folder: Path,
    resume: bool = False,
    kind: type[FixAStepTrainer] = FixAStepTrainer,
    **settings: Any,
) -> FixAStepTrainer:
    trainer = template(folder, kind, **settings)
    run_procedure(procedure, trainer, UNLABELED, new_model, resume)
    return trainer


def interrupting(round_name: str, step: int) -> type[FixAStepTrainer]:
    """A trainer whose training in that round ends right after that checkpoint."""

    class Interrupting(FixAStepTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if Path(self.args.output_dir).name == round_name:
                self.add_callback(InterruptAfterSave(step))

    return Interrupting


def plain(images: Images) -> Tensor:
    return (images.pixels / 255 - 0.5) / 0.25  # as tiny_processor has it


def outcome(folder: Path) -> dict[str, bytes]:
    """What a finished procedure leaves, without times."""
    names = [
        "rounds.json",
        "procedure.json",
        *(str(p.relative_to(folder)) for p in folder.rglob("*.safetensors")),
    ]
    found = {name: (folder / name).read_bytes() for name in names if "checkpoint" not in name}
    log = pd.read_csv(folder / "log.csv")
    found["log"] = log[[c for c in log if "second" not in c and "runtime" not in c]].to_csv().encode()
    return found


# ---- Curriculum Labeling


class FakeRounds:
    """Trains nothing; the confidence of unlabeled image i is the larger, the larger i is."""

    def __init__(self) -> None:
        self.labeled, self.unlabeled = random_images(3, seed=0, labeled=True), random_images(10, seed=1)
        self.trainer = SimpleNamespace(
            args=SimpleNamespace(loss="supervised", loss_kwargs={}), class_names=["a"] * 3
        )
        self.scores = iter([0.5, 0.7, 0.6, 0.7, 0.1, 0.2])
        self.sizes: list[int] = []
        self.settings: list[dict[str, Any]] = []

    def train(self, name: str, labeled: Images | None = None, **settings: Any) -> Round:
        self.sizes.append(3 if labeled is None else len(labeled))
        self.settings.append(settings)
        return Round(name, next(self.scores), 1, 1)

    def predict(self, done: Round) -> np.ndarray:
        return np.stack([np.arange(10.0), np.zeros(10), -np.ones(10)], 1).astype(np.float32)

    def keep(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        return make()

    pseudo_labeled = Rounds.pseudo_labeled


def test_the_share_of_pseudo_labels_grows_by_20_percent_a_round():
    rounds = FakeRounds()
    CurriculumLabeling()(rounds)
    # Percentile 80 of ten different values lies between the 8th and the 9th, 60 between the 6th and the 7th,
    # ...
    assert rounds.sizes == [3, 3 + 2, 3 + 4, 3 + 6, 3 + 8, 3 + 10]


def test_the_outcome_is_the_round_with_the_best_validation_the_earlier_of_two():
    assert CurriculumLabeling()(FakeRounds()).name == "round-1"


def test_steps_that_do_not_divide_100_end_with_all_images():
    rounds = FakeRounds()
    CurriculumLabeling(percent=40)(rounds)
    assert rounds.sizes == [3, 3 + 4, 3 + 8, 3 + 10]


def test_classes_have_weights_but_for_the_first_round():
    rounds = FakeRounds()
    CurriculumLabeling(mixup=0.3)(rounds)
    given = [settings["loss_kwargs"] for settings in rounds.settings]
    assert [kwargs["mixup"] for kwargs in given] == [0.3] * 6
    assert given[0]["class_weights"] is None
    # One labeled image of each class, and all pseudo-labels are 0.
    assert given[5]["class_weights"] == pytest.approx([2 / 11, 12 / 1, 12 / 1])


def test_confident_rows_are_at_or_above_the_percentile():
    probabilities = np.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.0625, 0.1875, 0.75], [0.9, 0.05, 0.05]])
    chosen = confident_rows(np.log(probabilities), 100 / 3)  # the second smallest of four, 0.75
    assert chosen["rows"].tolist() == [1, 2, 3]
    assert chosen["pseudo_labels"].tolist() == [1, 2, 0]


def test_certain_predictions_are_still_ranked():
    logits = np.array([[30.0, 0.0], [31.0, 0.0], [32.0, 0.0], [29.0, 0.0]], dtype=np.float32)
    assert confident_rows(logits, 50)["rows"].tolist() == [1, 2]


def test_weights_are_negatives_per_positive():
    assert class_weights(torch.tensor([0, 0, 0, 2, 2, 0]), 3) == pytest.approx([2 / 4, 6 / 1, 4 / 2])


def test_grey_labeled_images_join_coloured_ones():
    grey = Images(torch.full((1, 1, 2, 2), 7, dtype=torch.uint8), torch.tensor([0]), ["a", "b"])
    pile = Images(torch.arange(24, dtype=torch.uint8).view(2, 3, 2, 2))
    rounds = SimpleNamespace(labeled=grey, unlabeled=pile)
    joined = Rounds.pseudo_labeled(rounds, torch.tensor([1]), torch.tensor([1]))
    assert joined.labels.tolist() == [0, 1]
    assert torch.equal(joined.pixels[0], torch.full((3, 2, 2), 7, dtype=torch.uint8))
    assert torch.equal(joined.pixels[1], pile.pixels[1])


def test_two_rounds_are_two_trainings_of_a_plain_implementation(tmp_path: Path) -> None:
    found = run(CurriculumLabeling(percent=50), tmp_path / "found")

    def training(number: int, labeled: Images, **kwargs: Any) -> FixAStepTrainer:
        seed = found.args.seed + number
        base = template(tmp_path / f"naive-{number}", seed=seed)
        torch.manual_seed(seed)
        trainer = FixAStepTrainer(
            new_model(),
            base.args,
            train_dataset=labeled,
            eval_dataset=VALIDATION,
            processing_class=base.processing_class,
            loss=Supervised(mixup=1.0, **kwargs),
        )
        trainer.train()
        return trainer

    labeled, share = random_images(24, seed=1, labeled=True), 0
    trainers = [training(0, labeled)]
    for number in (1, 2):
        trainers[-1].model.eval()
        with torch.no_grad():
            probabilities = trainers[-1].model(pixel_values=plain(UNLABELED)).logits.double().softmax(-1)
        ordered = sorted(range(20), key=lambda row: -float(probabilities[row].max()))
        share = 10 * number  # percentile 50 of 20 values lies between the 10th and the 11th
        rows = torch.tensor(sorted(ordered[:share]))
        labels = torch.cat([labeled.labels, probabilities[rows].argmax(-1)])
        counts = [int((labels == c).sum()) for c in range(3)]
        ratios = [(len(labels) - count) / max(count, 1) for count in counts]
        pixels = torch.cat([labeled.pixels, UNLABELED.pixels[rows]])
        trainers.append(training(number, Images(pixels, labels, labeled.class_names), class_weights=ratios))

    for number, trainer in enumerate(trainers):
        assert_equal(load_file(tmp_path / f"found/round-{number}/model.safetensors"), weights(trainer.model))
    accuracies = [trainer.evaluate()["eval_accuracy"] for trainer in trainers]
    assert_equal(weights(found.model), weights(trainers[accuracies.index(max(accuracies))].model))
    assert found.state.global_step == 3 * STEPS


def test_class_weights_for_other_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="There are 2 class_weights, but 3 classes"):
        template(tmp_path, loss_kwargs={"class_weights": [1.0, 2.0]})


# ---- Safe-Student


def test_the_energy_discrepancy_is_that_of_the_formula():
    logits = torch.randn(6, 4, dtype=torch.float64) * 9
    for row, value in zip(logits.tolist(), energy_discrepancy(logits, 10.0).tolist(), strict=True):
        powers = [math.exp(z / 10) for z in row]
        expected = 10 * math.log(sum(powers)) - 10 * math.log(sum(powers) - max(powers))
        assert value == pytest.approx(expected, rel=1e-9)


def test_the_energy_discrepancy_of_huge_logits_is_finite():
    assert energy_discrepancy(torch.tensor([[5000.0, 0, 0]]), 10.0).tolist() == pytest.approx(
        [5000 - 10 * math.log(2)]
    )


def test_masks_are_per_image_by_quantiles_of_the_batch():
    sure = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])  # its discrepancy grows with it
    loss = SafeStudentLoss(torch.empty(0, 2), seen_share=0.5, unseen_share=0.3)
    seen, unseen = loss.masks(torch.stack([sure, torch.zeros(5)], 1))
    assert seen.tolist() == [True, False, True, False, False]  # above the median, image 4
    assert unseen.tolist() == [False, True, False, True, False]  # below 0.3 * 4 = 1.2 steps above the lowest


def safe_student_batch() -> tuple[Any, Tensor, Tensor]:
    torch.manual_seed(0)
    teacher, strong = torch.randn(9, 3, dtype=torch.float64) * 4, torch.randn(5, 3, dtype=torch.float64)
    batch = pixel_batch(x=[[0.0, 1, 2]], y=[[1, 0, 0]], strong=strong.tolist())
    batch.index = torch.tensor([4, 8, 0, 3, 5])
    return batch, teacher, strong


@pytest.mark.parametrize("mode", ["joint", "separate"])
def test_the_student_agrees_on_known_images_and_is_undecided_on_foreign_ones(mode: str) -> None:
    batch, teacher, strong = safe_student_batch()
    loss = SafeStudentLoss(teacher, seen_share=0.5, unseen_share=0.3)
    loss.batchnorm = mode
    found = loss(PixelModel(), batch, None)
    answers = teacher[batch.index]
    order = energy_discrepancy(answers, 10.0).argsort().tolist()
    known = foreign = 0.0
    for row in order[3:]:  # the two above the median
        p, q = answers[row].softmax(-1), strong[row].softmax(-1)
        known += (-q[answers[row].argmax()].log() + (p * (p.log() - q.log())).sum()) / 2
    for row in order[:2]:
        foreign += (1 / 3 * (math.log(1 / 3) - strong[row].log_softmax(-1))).sum() / 2
    torch.testing.assert_close(found.unlabeled, 0.3 * known + 0.05 * foreign)
    torch.testing.assert_close(found.labeled, cross_entropy(batch.y, batch.x.flatten(1)))


def test_an_image_that_is_neither_known_nor_foreign_has_no_gradient() -> None:
    batch, teacher, _ = safe_student_batch()
    loss = SafeStudentLoss(teacher, seen_share=0.5, unseen_share=0.3)
    batch.views["strong"].requires_grad_()
    loss(PixelModel(), batch, None).unlabeled.backward()
    moved = batch.views["strong"].grad.abs().sum((1, 2, 3)) > 0
    seen, unseen = loss.masks(teacher[batch.index])
    assert moved.tolist() == (seen | unseen).tolist()
    assert moved.sum() == 4


class Watching(FixAStepTrainer):
    """Keeps how each training began, by folder."""

    begun: dict[str, dict[str, Tensor]] = {}

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.begun[Path(self.args.output_dir).name] = weights(self.model)
        return super().train(*args, **kwargs)


def test_every_student_starts_from_its_teacher_and_hears_its_answers_to_plain_images(tmp_path: Path) -> None:
    Watching.begun.clear()
    trainer = run(SafeStudent(iterations=2, teacher_steps=3), tmp_path, kind=Watching)
    assert list(Watching.begun) == ["teacher", "student-1", "student-2"]
    for teacher, student in (("teacher", "student-1"), ("student-1", "student-2")):
        state = load_file(tmp_path / teacher / "model.safetensors")
        assert_equal(Watching.begun[student], state)
        model = new_model()
        model.load_state_dict(state)
        with torch.no_grad():
            expected = model.eval()(pixel_values=plain(UNLABELED)).logits
        found = load_file(tmp_path / student / "teacher.safetensors")["logits"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert_equal(weights(trainer.model), load_file(tmp_path / "student-2/model.safetensors"))
    assert largest_difference(Watching.begun["student-1"], Watching.begun["student-2"]) > 1e-4
    assert [each["steps"] for each in json.loads((tmp_path / "rounds.json").read_text())] == [3, STEPS, STEPS]


def test_the_first_teacher_is_labeled_only(tmp_path: Path) -> None:
    run(SafeStudent(iterations=1), tmp_path, gate="drop", mix_labeled=True)
    log = pd.read_csv(tmp_path / "log.csv")
    assert log[log["round"] == "teacher"]["loss/unlabeled"].isna().all()
    student = log[(log["round"] == "student-1") & log["loss"].notna()]
    assert student["gate/open"].isin([0.0, 1.0]).all()
    assert student["loss/unlabeled"].gt(0).all()


# ---- both


CASES = [
    ("round-1", 2, CurriculumLabeling(percent=50)),
    ("round-0", 4, CurriculumLabeling(percent=50)),
    ("student-1", 2, SafeStudent(iterations=2)),
    ("student-2", 4, SafeStudent(iterations=2)),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Procedure], dict[str, bytes]]:
    """What an uninterrupted run leaves, each procedure run once."""
    found: dict[str, dict[str, bytes]] = {}

    def outcome_of(procedure: Procedure) -> dict[str, bytes]:
        if str(procedure) not in found:
            folder = tmp_path_factory.mktemp("whole")
            run(procedure, folder)
            found[str(procedure)] = outcome(folder)
        return found[str(procedure)]

    return outcome_of


@pytest.mark.parametrize(("name", "step", "procedure"), CASES, ids=lambda value: str(value).split("(")[0])
def test_a_resumed_procedure_equals_an_uninterrupted_one(
    name: str, step: int, procedure: Procedure, whole: Callable, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        run(procedure, tmp_path / "parts", kind=interrupting(name, step))
    torch.manual_seed(12345)
    Watching.begun.clear()
    run(procedure, tmp_path / "parts", resume=True, kind=Watching)
    assert next(iter(Watching.begun)) == name  # those before it are not repeated
    found, expected = outcome(tmp_path / "parts"), whole(procedure)
    assert found.keys() == expected.keys()
    assert [key for key in expected if found[key] != expected[key]] == []


def test_a_procedure_that_broke_off_between_two_rounds_equals_an_uninterrupted_one(
    whole: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    procedure = CurriculumLabeling(percent=50)

    def refuse(*args: Any) -> None:
        raise Interrupted

    for name, resume in (("predict", False), ("report", True)):
        with monkeypatch.context() as patch:
            patch.setattr(Rounds, name, refuse)
            with pytest.raises(Interrupted):
                run(procedure, tmp_path / "parts", resume)
    Watching.begun.clear()
    run(procedure, tmp_path / "parts", resume=True, kind=Watching)
    assert Watching.begun == {}
    found, expected = outcome(tmp_path / "parts"), whole(procedure)
    assert [key for key in expected if found[key] != expected[key]] == []


def test_what_was_chosen_is_read_and_not_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    procedure = CurriculumLabeling(percent=100)
    with pytest.raises(Interrupted):
        run(procedure, tmp_path, kind=interrupting("round-1", 2))
    monkeypatch.setattr(Rounds, "predict", lambda *args: pytest.fail("predicted again"))
    run(procedure, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("procedure", "settings", "sentence"),
    [
        (
            CurriculumLabeling(percent=100),
            {},
            "was trained with procedure_kwargs .*50.*, but this run has .*100",
        ),
        (SafeStudent(), {}, "but this run has procedure SafeStudent"),
        (CurriculumLabeling(percent=50), {"learning_rate": 0.01}, "but this run has learning_rate 0.01"),
    ],
)
def test_a_procedure_is_not_continued_with_other_settings(
    procedure: Procedure, settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        run(CurriculumLabeling(percent=50), tmp_path, kind=interrupting("round-0", 2))
    with pytest.raises(ValueError, match=sentence):
        run(procedure, tmp_path, resume=True, **settings)


def test_a_procedure_is_neither_written_over_nor_resumed_from_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no procedure to resume"):
        run(CurriculumLabeling(), tmp_path, resume=True)
    with pytest.raises(Interrupted):
        run(CurriculumLabeling(), tmp_path, kind=interrupting("round-0", 2))
    with pytest.raises(ValueError, match="holds a procedure already"):
        run(CurriculumLabeling(), tmp_path)


def test_a_folder_takes_one_procedure_at_a_time(tmp_path: Path) -> None:
    with only_run(tmp_path), pytest.raises(BlockingIOError, match="Another run is writing"):
        run(CurriculumLabeling(), tmp_path)


def test_without_validation_images_there_is_nothing_to_choose_by(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, loss="supervised")
    with pytest.raises(ValueError, match="validation images"):
        run_procedure(CurriculumLabeling(), trainer, UNLABELED, new_model)


def test_curriculum_labeling_runs_with_fix_a_step_on_the_unlabeled_images(tmp_path: Path) -> None:
    settings = {"loss": "mean_teacher", "gate": "drop", "mix_labeled": True}
    run(CurriculumLabeling(percent=100), tmp_path, **settings)
    log = pd.read_csv(tmp_path / "log.csv").dropna(subset="loss")
    assert log["gate/open"].isin([0.0, 1.0]).all()
    assert list(log["step"]) == list(range(1, 2 * STEPS + 1))


@pytest.mark.parametrize(
    ("name", "few", "last"),
    [("curriculum_labeling", "{percent: 100}", "round-1"), ("safe_student", "{iterations: 1}", "student-1")],
)
def test_a_recipe_of_a_procedure_leaves_what_others_leave_and_is_resumed_like_them(
    name: str, few: str, last: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = arguments(f"digits/{name}.yaml", folder, "--procedure_kwargs", few)
    train_recipe.main(command)
    wanted = ["model.safetensors", "config.json", "preprocessor_config.json", "metrics.json", "log.csv"]
    wanted += ["recipe.yaml", "losses.png", "confusion.png"]
    assert [file for file in wanted if not (folder / file).is_file()] == []
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (metrics["procedure"], metrics["steps"]) == (name, 8)
    with pytest.raises(SystemExit, match="holds a run already"):
        train_recipe.main(command)

    expected = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / last / "round.json").unlink()
    train_recipe.main([*command, "--resume_from_checkpoint", "true"])
    assert (folder / "model.safetensors").read_bytes() == expected


def test_labeled_images_can_have_strong_views(tmp_path: Path) -> None:
    images = {"pixel_values": VALIDATION.pixels, "labels": VALIDATION.labels, "step": 3}
    trainers = {name: template(tmp_path, labeled_view=name) for name in ("weak", "strong")}
    for name, trainer in trainers.items():
        generator = generator_for(trainer.args.seed, 0, 3, "labeled")
        assert torch.equal(
            trainer.make_batch(images).x, getattr(trainer.views, name)(VALIDATION.pixels, generator)
        )
