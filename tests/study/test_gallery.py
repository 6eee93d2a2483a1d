from __future__ import annotations

import json
import shutil
from itertools import islice
from math import comb
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from hf_fixastep import FixAStepTrainer
from hf_fixastep.runs import training
from hf_fixastep.step.mixing import mixup
from hf_fixastep.study import gallery


ROOT = Path(__file__).parents[2]
STEPS, WINDOW = 40, 7


@pytest.fixture(scope="module")
def drawn() -> list[tuple[int, list[int]]]:
    """Steps taken and rows drawn in the run below."""
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory, drawn) -> Path:
    """A finished run over three of the Trainer's epochs, whose last steps are in no window of the log."""
    folder = tmp_path_factory.mktemp("runs") / "fixmatch"
    settings = {
        "max_steps": STEPS,
        "logging_steps": WINDOW,
        "eval_steps": 20,
        "save_steps": 20,
        "steps_per_epoch": 16,
    }
    settings |= {"disable_tqdm": "true", "output_dir": folder, "loss_kwargs": "{threshold: 0.2}"}
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    make_batch = FixAStepTrainer.make_batch

    def recorded(self, inputs):
        drawn.append((self.state.global_step + 1, inputs["unlabeled_index"].tolist()))
        return make_batch(self, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixAStepTrainer, "make_batch", recorded)
        training.main(["--config", str(ROOT / "recipes/digits/fixmatch.yaml"), *words])
    return folder


@pytest.fixture(scope="module")
def trainer(run, tmp_path_factory) -> FixAStepTrainer:
    return gallery.load_run(run, str(tmp_path_factory.mktemp("scratch")))[0]


def changed(run: Path, folder: Path, **settings) -> Path:
    """A copy of the run with other settings in its recipe."""
    copy = folder / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoint-*"))
    recipe = yaml.safe_load((copy / "recipe.yaml").read_text())
    (copy / "recipe.yaml").write_text(yaml.safe_dump(recipe | settings))
    return copy


def test_a_run_has_both_pictures_and_is_left_as_it_was(run, tmp_path, capsys) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    gallery.main([str(run), "--out", str(tmp_path / "out")])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"{name}.{kind}" for name in ("augmentations", "gate_images") for kind in ("png", "svg")}
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert "gate_images.svg" in capsys.readouterr().out


def test_decisions_are_those_of_the_steps_in_the_log(run) -> None:
    log = pd.read_csv(run / "log.csv")
    opened = gallery.decisions(log)
    assert list(opened) == list(range(1, 36))  # 36 to 40 are in no window
    windows = log.dropna(subset=["gate/open"])
    for end, share in zip(windows["step"], windows["gate/open"], strict=True):
        assert np.mean([opened[step] for step in range(end - WINDOW + 1, end + 1)]) == pytest.approx(share)


def test_a_cosine_of_zero_is_a_closed_gate_and_a_tiny_one_an_open_one() -> None:
    log = pd.DataFrame({"step": [2, 3, 4], "gate/cosines": ["0 1e-07", None, -0.5]})
    assert gallery.decisions(log) == {1: False, 2: True, 4: False}


def test_the_tally_is_that_of_the_draws_of_the_training(run, trainer, drawn) -> None:
    assert [step for step, _ in drawn] == list(range(1, STEPS + 1))
    log = pd.read_csv(run / "log.csv")
    opened, found = gallery.decisions(log), gallery.tally(trainer, log)
    batches, kept = np.zeros((2, len(trainer.unlabeled)), int)
    for step, rows in drawn:
        for row in set(rows) if step in opened else ():
            batches[row] += 1
            kept[row] += opened[step]
    np.testing.assert_array_equal(found.batches, batches)
    np.testing.assert_array_equal(found.kept, kept)
    assert (found.steps, found.kept_share) == (35, np.mean(list(opened.values())))


def test_replayed_draws_are_those_of_the_loader(trainer, drawn) -> None:
    loader = trainer.get_train_dataloader()
    batches = [batch["unlabeled_index"].tolist() for batch in islice(loader, 16)]
    assert batches == [rows for _, rows in drawn[:16]]


def test_chance_is_a_sample_of_the_batches() -> None:
    found = gallery.Tally(np.array([3, 3, 4]), np.array([3, 1, 2]), 0.4, 10)
    shares, weights = gallery.chance(found, np.arange(3))
    expected = [2 * comb(4, k) * comb(6, 3 - k) / comb(10, 3) for k in range(4)]
    expected += [comb(4, k) * comb(6, 4 - k) / comb(10, 4) for k in range(5)]
    np.testing.assert_allclose(weights, expected)
    np.testing.assert_allclose(shares, [*np.arange(4) / 3, *np.arange(5) / 4])
    assert found.surprise[0] > found.surprise[2] > found.surprise[1]


def test_partners_and_shares_make_the_mixed_images_of_the_training(trainer) -> None:
    mixed = gallery.mix_first_batch(trainer)
    torch.testing.assert_close(mixup(mixed.images, mixed.partners, mixed.shares), mixed.mixed)
    torch.testing.assert_close(mixed.labels.sum(1), torch.ones(len(mixed.labels)))
    assert (mixed.shares >= 0.5).all()
    assert (mixed.shares.diff() >= 0).all()


def test_pictures_have_the_pixels_of_the_data(trainer) -> None:
    pixels = trainer.unlabeled.pixels[:2]
    picture = gallery.to_picture(trainer.views.plain(pixels)[1], trainer)
    np.testing.assert_allclose(picture[..., 0], pixels[1, 0] / 255, atol=1e-6)


def test_what_is_not_possible_is_said_and_the_rest_is_drawn(run, tmp_path, capsys) -> None:
    copy = changed(run, tmp_path, gate="off", mix_labeled=False)
    gallery.main([str(copy)])
    told = capsys.readouterr().out
    assert "The run did not mix labeled images, so augmentations shows views only." in told
    assert "No gate_images: the gate was off, so no batch was dropped as a whole." in told
    assert (copy / "augmentations.png").is_file()
    assert not (copy / "gate_images.png").is_file()


def test_gates_whose_decisions_are_not_about_one_batch_are_told_apart(run, trainer, monkeypatch) -> None:
    facts = json.loads((run / "metrics.json").read_text())
    for name, value, reason in [
        ("gate", "layerwise", "the gate was layerwise, so no batch"),
        ("gradient_accumulation_steps", 2, "with gradient accumulation a decision"),
        ("procedure", "safe_student", "a procedure of several trainings"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(trainer.args, name, value)
            with pytest.raises(ValueError, match=reason):
                gallery.check_gate(trainer, facts)
    facts["speed"]["processes"] = 2
    with pytest.raises(ValueError, match="the run had 2 processes"):
        gallery.check_gate(trainer, facts)
    with pytest.raises(ValueError, match="kept all of the 2 batches"):
        gallery.tally(trainer, pd.DataFrame({"step": [2], "gate/cosines": ["0.1 0.2"]}))
    with pytest.raises(ValueError, match="decided on all of the 0 batches"):
        gallery.tally(trainer, pd.DataFrame({"step": [2]}))


def test_mistakes_end_in_one_sentence(run, tmp_path) -> None:
    with pytest.raises(SystemExit, match="error: Give the folder of a finished run first"):
        gallery.main([])
    with pytest.raises(SystemExit, match=r"error: .* is no finished run, for it has no recipe.yaml"):
        gallery.main([str(tmp_path)])
    with pytest.raises(SystemExit, match=r"error: Unknown argument 'ot'\. Did you mean out"):
        gallery.main([str(run), "--ot", "x"])
    with pytest.raises(SystemExit, match=r"error: .* is a labeled-only run, which has no unlabeled"):
        gallery.main([str(changed(run, tmp_path, loss="supervised", loss_kwargs={}))])
