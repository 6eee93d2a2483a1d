"""Presets, settings that win over them, and how bad settings are refused."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest

from hf_fixastep import LOSSES, FixAStepConfig, FixAStepTrainer, get_loss
from hf_fixastep.losses.presets import PRESETS
from hf_fixastep.methods import RIVALS, preset
from hf_fixastep.procedures import PROCEDURES
from hf_fixastep.runs.arguments import parse


ADAM_LOSSES = ("vat", "mixmatch")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An output folder that does not exist, and must not after a refusal."""
    return tmp_path / "run"


def config(**settings: Any) -> FixAStepConfig:
    return FixAStepConfig(output_dir="unused", **settings)


def parsed(*argv: object) -> FixAStepConfig:
    return parse((FixAStepConfig,), [str(word) for word in argv])[0]


def from_yaml(tmp_path: Path, text: str, *argv: object) -> FixAStepConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"output_dir: unused\n{text}\n")
    return parsed("--config", path, *argv)


def message_of(error: pytest.ExceptionInfo) -> str:
    return str(error.value)


# ---- the paper preset: table of section 2.8


@pytest.mark.parametrize(
    ("loss", "learning_rate", "weight_decay", "weight", "ratio"),
    [
        ("supervised", 3e-3, 2e-3, None, None),
        ("pi_model", 3e-2, 5e-4, 10, 1),
        ("mean_teacher", 3e-2, 5e-4, 50, 1),
        ("pseudo_label", 3e-2, 5e-4, 1, 1),
        ("vat", 2e-3, 4e-5, 0.3, 1),  # trap 7: the 3e-2 of the paper's table was not run
        ("mixmatch", 2e-3, 4e-5, 75, 1),
        ("fixmatch", 3e-2, 5e-4, 1, 7),
    ],
)
@pytest.mark.parametrize("name", ["paper", "upstream"])
def test_both_presets_have_the_published_numbers(
    name: str, loss: str, learning_rate: float, weight_decay: float, weight: float | None, ratio: float | None
) -> None:
    args = config(preset=name, loss=loss)
    assert (args.learning_rate, args.weight_decay) == (learning_rate, weight_decay)
    if weight is not None:
        assert (args.unlabeled_weight, args.unlabeled_ratio) == (weight, ratio)
    assert args.per_device_train_batch_size == 64


@pytest.mark.parametrize("name", ["paper", "upstream"])
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss not in RIVALS])
def test_vat_and_mixmatch_use_adam_at_a_fixed_rate_and_the_others_sgd_with_the_cosine(
    name: str, loss: str
) -> None:
    args = config(preset=name, loss=loss)
    if loss in ADAM_LOSSES:
        assert (args.optim, args.optim_args, args.lr_cycle_steps) == ("adam", None, 0)
        assert args.lr_scheduler_type == "constant"
    else:
        assert (args.optim, args.optim_args) == ("sgd", "momentum=0.9,nesterov=true")
        assert args.lr_cycle_steps > 0


@pytest.mark.parametrize("name", ["paper", "upstream"])
@pytest.mark.parametrize(
    ("loss", "expected"),
    # Section 4: optimizer, learning rate, weight decay, unlabeled weight, its ramp and the steps of that,
    # cosine.
    [
        ("uasd", ("adam", 1e-3, 0, 1, "sigmoid", 200_000, 0)),
        ("ds3l", ("adam", 3e-4, 0, 10, "sigmoid", 200_000, 0)),
        ("mtcf", ("adamw_torch", 2e-3, 0.02, 75, "linear", 0, 0)),  # decays by 0.02 times the rate: 4e-5
        ("openmatch", ("sgd", 3e-2, 5e-4, 1, "linear", 0, None)),
        ("toor", ("adam", 3e-4, 0, 1, "sigmoid", 0, 0)),  # mtcf and toor have ramps of their own
    ],
)
def test_rivals_have_their_own_published_numbers(name: str, loss: str, expected: tuple[Any, ...]) -> None:
    args = config(preset=name, loss=loss)
    ramp = (args.unlabeled_weight, args.unlabeled_ramp, args.unlabeled_warmup_steps)
    cycle = None if args.lr_cycle_steps else 0
    assert (args.optim, args.learning_rate, args.weight_decay, *ramp, cycle) == expected


@pytest.mark.parametrize(
    ("loss", "batch"),
    [("openmatch", 128), ("mtcf", 64), ("fixmatch", 448), ("pi_model", 64), ("mixmatch", 64)],
)
def test_the_unlabeled_batch_has_the_published_size(loss: str, batch: int) -> None:
    assert config(loss=loss).unlabeled_batch_size == batch


def test_the_default_is_fix_a_step_with_the_numbers_of_the_paper() -> None:
    args = config()
    assert (args.preset, args.loss, args.gate, args.mix_labeled) == ("paper", "fixmatch", "drop", True)
    assert (args.mix_alpha, args.mix_temperature, args.teacher_decay) == (0.5, 0.5, 0.999)
    assert (args.max_grad_norm, args.label_smoothing_factor, args.mix_pool) == (0, 0, "batch")


@pytest.mark.parametrize("loss", LOSSES)
def test_the_paper_preset_changes_nothing_about_a_loss(loss: str) -> None:
    assert config(loss=loss).loss_kwargs == {}


# ---- where upstream departs: the traps of section 8


@pytest.mark.parametrize(
    ("loss", "setting", "paper", "upstream"),
    [
        ("pi_model", "mix_per_batch", False, True),  # trap 1
        ("pi_model", "divide_by_all_rows", False, True),  # trap 2
        ("pi_model", "cutout", 0.5, 16),  # trap 14
        ("pi_model", "lr_cycle_steps", 1, 1_048_576),  # trap 4
        ("supervised", "lr_cycle_steps", 1, 390_600),
        ("fixmatch", "lr_cycle_steps", 1, 390_600),
        ("pi_model", "unlabeled_warmup_steps", 0.4, 419_430),
        ("mixmatch", "unlabeled_ramp", "linear", "staircase"),
        ("mixmatch", "unlabeled_warmup_steps", 1, 1_048_576),
    ],
)
def test_upstream_copies_what_the_official_code_executes(
    loss: str, setting: str, paper: Any, upstream: Any
) -> None:
    found = [getattr(config(preset=name, loss=loss), setting) for name in ("paper", "upstream")]
    assert found == [paper, upstream]


@pytest.mark.parametrize(
    ("loss", "argument", "paper", "upstream"),
    [
        ("pseudo_label", "multiplier", 1, None),  # trap 12: None is the number of classes
        ("vat", "xi", 1e-2, 1e-6),  # trap 31
        ("vat", "eps", 6, 6),
        ("vat", "safe_normalization", True, False),
        ("mixmatch", "update_statistics", False, True),  # trap 15
        ("mixmatch", "interleave", False, True),
        ("mixmatch", "per_example", True, False),  # trap 1
    ],
)
def test_upstream_losses_do_what_the_official_code_does(
    loss: str, argument: str, paper: Any, upstream: Any
) -> None:
    losses = [get_loss(loss, **config(preset=name, loss=loss).loss_kwargs) for name in ("paper", "upstream")]
    assert [getattr(each, argument) for each in losses] == [paper, upstream]


# ---- the preset for pretrained networks


@pytest.mark.parametrize("procedure", [None, *PROCEDURES])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_pretrained_preset_has_the_same_optimizer_for_all_methods(
    loss: str, procedure: str | None
) -> None:
    args = config(preset="pretrained", loss=loss, procedure=procedure)
    optimizer = (args.optim, args.optim_args, args.learning_rate, args.weight_decay, args.head_rate_factor)
    assert optimizer == ("adamw_torch", None, 1e-4, 0.05, 30)
    assert (args.warmup_steps, args.lr_cycle_steps, args.lr_scheduler_type) == (0.1, 0, "cosine")
    assert (args.mix_labeled, args.batchnorm, args.teacher_decay) == (False, "frozen", None)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_the_pretrained_preset_does_not_state_is_that_of_the_paper(loss: str) -> None:
    paper, found = preset("paper", loss), preset("pretrained", loss)
    same = ("unlabeled_ratio", "unlabeled_weight", "unlabeled_ramp", "unlabeled_warmup_steps", "labeled_view")
    assert {name: found[name] for name in same} == {name: paper[name] for name in same}
    assert config(preset="pretrained", loss=loss).loss_kwargs == {}


@pytest.mark.parametrize("name", ["paper", "upstream"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_other_presets_have_one_rate_no_warm_up_and_fix_a_step(name: str, loss: str) -> None:
    args = config(preset=name, loss=loss)
    assert (args.head_rate_factor, args.warmup_steps, args.teacher_decay) == (1, 0, 0.999)
    assert (args.mix_labeled, args.batchnorm) == (True, "joint")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("head_rate_factor", 1.0),
        ("warmup_steps", 0),
        ("warmup_steps", 7),
        ("mix_labeled", True),
        ("batchnorm", "joint"),
        ("teacher_decay", 0.0),
        ("lr_scheduler_type", "linear"),
    ],
)
def test_explicit_settings_win_over_the_pretrained_preset(setting: str, value: Any) -> None:
    assert getattr(config(preset="pretrained", **{setting: value}), setting) == value


@pytest.mark.parametrize("optim", ["sgd", "adam"])
def test_rates_for_training_from_scratch_do_not_reach_a_pretrained_network(optim: str) -> None:
    with pytest.raises(ValueError, match=f"optim is {optim}, which preset pretrained does not know; give"):
        config(preset="pretrained", optim=optim)


# ---- all presets


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_preset_gives_arguments_that_its_loss_has(name: str, loss: str) -> None:
    settings = preset(name, loss)
    get_loss(loss, **settings.pop("loss_kwargs", {}))
    assert settings.keys() <= set(inspect.signature(FixAStepConfig).parameters)


def test_changing_a_preset_that_was_asked_for_changes_no_later_one() -> None:
    preset("upstream", "vat")["loss_kwargs"]["xi"] = 5
    assert preset("upstream", "vat")["loss_kwargs"]["xi"] == 1e-6


# ---- explicit settings


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("learning_rate", 0.5),
        ("learning_rate", 0.0),
        ("weight_decay", 0.0),
        ("unlabeled_weight", 0.0),
        ("unlabeled_warmup_steps", 0),
        ("lr_cycle_steps", 0),
        ("mix_per_batch", False),
        ("divide_by_all_rows", False),
        ("cutout", 0),
        ("unlabeled_ratio", 2),
        ("unlabeled_ramp", "sigmoid"),
        ("optim", "adam"),
        ("optim_args", "momentum=0.5"),
    ],
)
def test_explicit_settings_win_over_the_preset(setting: str, value: Any) -> None:
    assert getattr(config(preset="upstream", loss="pi_model"), setting) != value
    assert getattr(config(preset="upstream", loss="pi_model", **{setting: value}), setting) == value


def test_explicit_loss_arguments_win_one_by_one() -> None:
    args = config(preset="upstream", loss="vat", loss_kwargs={"xi": 0.1, "eps": 2.0})
    assert args.loss_kwargs == {"xi": 0.1, "eps": 2.0, "safe_normalization": False}


def test_another_optimizer_does_not_get_the_arguments_of_the_preset() -> None:
    assert config(optim="adamw_torch", learning_rate=1e-3, weight_decay=0.01).optim_args is None


def test_adam_in_place_of_the_preset_optimizer_comes_with_its_own_rate_and_decay() -> None:
    args = config(loss="fixmatch", optim="adam")
    assert (args.learning_rate, args.weight_decay, args.optim_args) == (2e-3, 4e-5, None)
    assert FixAStepTrainer.get_optimizer_cls_and_kwargs(args)[0].__name__ == "Adam"


def test_naming_the_optimizer_of_the_preset_changes_nothing() -> None:
    args, named = config(loss="fixmatch"), config(loss="fixmatch", optim="sgd")
    assert (named.optim, named.optim_args) == (args.optim, args.optim_args)


@pytest.mark.parametrize("loss", ["vat", "fixmatch"])
def test_a_config_becomes_a_dict_and_json(loss: str) -> None:
    args = config(preset="upstream", loss=loss, learning_rate=0.25)
    for found in (args.to_dict(), json.loads(args.to_json_string())):
        assert found["learning_rate"] == 0.25
        assert found["optim"] == ("adam" if loss == "vat" else "sgd")
        assert found["loss_kwargs"] == args.loss_kwargs


# ---- what is refused

BAD = [  # settings, what the message must say
    ({"preset": "papper"}, ["preset", "'papper'", "Did you mean paper?"]),
    (
        {"gate": "dorp"},
        ["gate", "'dorp'", "Did you mean drop?", "drop, project, layerwise, per_example, off"],
    ),
    ({"gate": "per_example", "torch_compile": True}, ["per_example", "torch_compile", "switch it off"]),
    ({"batchnorm": "seperate"}, ["batchnorm", "'seperate'", "Did you mean separate?"]),
    ({"unlabeled_ramp": "linaer"}, ["unlabeled_ramp", "'linaer'", "Did you mean linear?"]),
    ({"mix_pool": "bach"}, ["mix_pool", "'bach'", "Did you mean batch?"]),
    (
        {"class_weights": "balancd"},
        ["class_weights", "'balancd'", "Did you mean balanced?", "none, balanced"],
    ),
    ({"head_rate_factor": 0.0}, ["head_rate_factor is 0.0", "positive"]),
    ({"mix_alpha": 0.0}, ["mix_alpha is 0.0", "positive"]),
    ({"mix_alpha": -1.0}, ["mix_alpha is -1.0", "positive"]),
    ({"mix_alpha": float("nan")}, ["mix_alpha is nan", "positive"]),
    ({"mix_temperature": 0.0}, ["mix_temperature is 0.0", "positive"]),
    ({"unlabeled_ratio": 0.0}, ["unlabeled_ratio is 0.0", "positive"]),
    ({"unlabeled_ratio": -7}, ["unlabeled_ratio is -7", "positive"]),
    ({"per_device_train_batch_size": 0}, ["per_device_train_batch_size is 0", "positive"]),
    ({"unlabeled_weight": -1.0}, ["unlabeled_weight is -1.0", "negative"]),
    ({"unlabeled_warmup_steps": -1.0}, ["unlabeled_warmup_steps is -1.0", "negative"]),
    ({"lr_cycle_steps": -1.0}, ["lr_cycle_steps is -1.0", "negative"]),
    ({"cutout": -1.0}, ["cutout is -1.0", "negative"]),
    ({"teacher_decay": 1}, ["teacher_decay is 1", "below 1"]),
    ({"teacher_decay": -0.1}, ["teacher_decay is -0.1", "at least 0"]),
    ({"steps_per_epoch": 0}, ["steps_per_epoch is 0", "at least one"]),
    (
        {"unlabeled_ratio": 0.1, "per_device_train_batch_size": 4},
        ["unlabeled_ratio 0.1", "4", "no unlabeled image"],
    ),
    ({"warmup_steps": 10}, ["warmup_steps is 10", "set it to 0", "lr_cycle_steps"]),
    ({"preset": "pretrained", "lr_cycle_steps": 1}, ["warmup_steps is 0.1", "set it to 0"]),
    ({"logging_strategy": "no"}, ["logging_strategy is no", "logging_steps"]),
    ({"cpu_threads": 0}, ["cpu_threads is 0", "at least 1"]),
    *(
        ({"learning_rate": rate}, [f"learning_rate is {rate}", "infinite or NaN"])
        for rate in (math.nan, math.inf)
    ),
    ({"unlabeled_ratio": math.inf}, ["unlabeled_ratio is inf", "finite"]),
    (
        {"unlabeled_ratio": 1e9},
        ["unlabeled_ratio 1000000000.0", "batch of 64", "131072 images per step", "lower"],
    ),
    ({"optim": "adamw_torch"}, ["adamw_torch", "learning_rate", "weight_decay"]),
    ({"loss_kwargs": "0.9"}, ["loss_kwargs", "'0.9'", "mapping"]),
]


@pytest.mark.parametrize(("settings", "words"), BAD)
def test_a_bad_setting_is_one_clear_sentence_before_anything_is_written(
    folder: Path, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"\S") as error:
        FixAStepConfig(output_dir=str(folder), **settings)
    assert all(word in message_of(error) for word in words), message_of(error)
    assert "\n" not in message_of(error)
    assert not folder.exists()


def test_processes_that_are_not_one_group_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"2 processes.*groups of 1.*use_cpu"):
        FixAStepConfig(output_dir=str(folder))
    assert not folder.exists()


def test_one_process_of_a_launcher_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert config().world_size == 1


def test_warmup_is_accepted_where_the_cosine_is_off() -> None:
    assert config(warmup_steps=10, lr_cycle_steps=0, lr_scheduler_type="linear").warmup_steps == 10


@pytest.mark.parametrize(
    "settings",
    [
        {"unlabeled_weight": 0.0},
        {"teacher_decay": 0.0},
        {"cutout": 0.0},
        {"unlabeled_ratio": 0.5},
        {"steps_per_epoch": 1},
        {"unlabeled_ratio": 0.2, "per_device_train_batch_size": 4},
    ],
)
def test_settings_at_the_edge_are_accepted(settings: dict[str, Any]) -> None:
    config(**settings)


# ---- files and command lines


def test_a_recipe_fills_the_config(tmp_path: Path) -> None:
    args = from_yaml(tmp_path, "loss: pi_model\nmax_steps: 12\nunlabeled_weight: 2.5\nmix_labeled: false")
    assert (args.loss, args.max_steps, args.unlabeled_weight, args.mix_labeled) == (
        "pi_model",
        12,
        2.5,
        False,
    )
    assert args.learning_rate == 3e-2


def test_the_command_line_wins_over_the_recipe(tmp_path: Path) -> None:
    text = "learning_rate: 0.1\ngate: project\nmax_steps: 7\nflip: false"
    args = from_yaml(tmp_path, text, "--learning_rate", 0.2, "--gate=off", "--flip", "true")
    assert (args.learning_rate, args.gate, args.flip, args.max_steps) == (0.2, "off", True, 7)


def test_the_recipe_may_stand_after_the_overrides(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("output_dir: unused\ngate: project\nmax_steps: 7")
    for given in (("--config", path), (f"--config={path}",)):
        args = parsed("--max_steps", 3, *given, "--loss", "vat")
        assert (args.max_steps, args.gate, args.loss) == (3, "project", "vat")


def test_without_a_recipe_the_command_line_is_enough() -> None:
    assert parsed("--output_dir", "unused", "--loss", "vat").learning_rate == 2e-3


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        *((f"learning_rate: {text}", "learning_rate", 0.03) for text in ("3e-2", "3.0e-2", "0.03", "'0.03'")),
        ("gate: off", "gate", "off"),
        ("gate: 'off'", "gate", "off"),
        ("save_strategy: no", "save_strategy", "no"),
        ("loss: vat\nloss_kwargs: {xi: 1e-6}", "loss_kwargs", {"xi": 1e-6}),
        ("loss: vat\nloss_kwargs:\n  xi: 0.001\n  eps: 2", "loss_kwargs", {"xi": 0.001, "eps": 2}),
    ],
)
def test_values_mean_what_they_say_though_yaml_reads_them_otherwise(
    text: str, name: str, value: Any, tmp_path: Path
) -> None:
    """YAML takes 3e-2 for a string, off and no for false."""
    assert getattr(from_yaml(tmp_path, text), name) == value


def test_loss_arguments_are_json_on_the_command_line() -> None:
    arguments = '{"xi": 1e-6, "reverse_kl": false}'
    args = parsed("--output_dir", "unused", "--loss", "vat", "--loss_kwargs", arguments)
    assert args.loss_kwargs == {"xi": 1e-6, "reverse_kl": False}


@pytest.mark.parametrize(
    ("word", "value"), [("false", False), ("False", False), ("0", False), ("true", True)]
)
def test_booleans_are_words_on_the_command_line(word: str, value: bool) -> None:
    args = parsed("--output_dir", "unused", "--mix_labeled", word, "--mix_per_batch", word)
    assert (args.mix_labeled, args.mix_per_batch) == (value, value)


def test_booleans_may_be_switched_on_against_the_recipe(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "mix_labeled: false", "--mix_labeled").mix_labeled is True


@pytest.mark.parametrize(
    "argv", [["--lerning_rate", "1"], ["--lerning_rate=1"], ["--learning_rat", "1"]], ids=" ".join
)
def test_a_misspelt_name_is_an_error_with_the_nearest_one(folder: Path, argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"'(lerning_rate|learning_rat)'.*Did you mean learning_rate\?"):
        parsed("--output_dir", folder, *argv)
    assert not folder.exists()


def test_a_misspelt_key_in_a_recipe_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"recipe\.yaml.*'lerning_rate'.*Did you mean learning_rate\?"):
        from_yaml(tmp_path, "lerning_rate: 1")


@pytest.mark.parametrize("word", ["loss=vat", "loss", "vat"])
def test_a_word_without_dashes_is_an_error(word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parsed("--output_dir", "unused", word)


def test_a_word_in_place_of_a_number_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"learning_rate.*'fast'"):
        parsed("--output_dir", "unused", "--learning_rate", "fast")


def test_a_config_without_a_path_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"--config needs a recipe"):
        parsed("--output_dir", "unused", "--config")


def test_a_missing_recipe_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*nothing\.yaml"):
        parsed("--config", tmp_path / "nothing.yaml")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "- a\n- b\n", "just words\n"])
def test_a_recipe_without_settings_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"odd\.yaml holds no settings.*key: value"):
        parsed("--config", path)


@pytest.mark.parametrize("text", ["loss: [vat\n", "loss: vat\n  gate: off\n", "\tloss: vat\n"])
def test_a_malformed_recipe_is_one_sentence_with_its_path_and_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.yaml is not YAML.*line \d") as error:
        parsed("--config", path)
    assert "\n" not in message_of(error)


@pytest.mark.parametrize(("given", "expected"), [(None, [True]), (False, [False])])
def test_tf32_is_on_where_there_is_any_and_nobody_says_otherwise(
    given: bool | None, expected: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to: list[bool] = []
    monkeypatch.setattr("hf_fixastep.config.is_torch_tf32_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.is_torch_tf32_available", lambda: True)
    monkeypatch.setattr("transformers.training_args.enable_tf32", set_to.append)
    FixAStepConfig(output_dir=str(tmp_path), tf32=given, use_cpu=True)
    assert set_to == expected
