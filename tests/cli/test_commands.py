"""The command line as a whole: the list of commands, the help of each, and mistakes."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from hf_fixastep import cli
from hf_fixastep.cli import train
from hf_fixastep.cli.commands import COMMANDS
from hf_fixastep.runs import training


def output(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    cli.main(argv)
    return capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_the_list_has_a_line_per_command_and_an_example(argv, capsys):
    text = output(argv, capsys)
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", text, re.M)
    assert "  fixastep train --config digits/quickstart\n" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_usage_example_and_options_in_80_columns(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = output([name, "--help"], capsys)
    assert text.startswith(f"usage: fixastep {name}")
    assert f"example:\n  {COMMANDS[name].example}\n" in text
    assert max(map(len, text.splitlines())) <= 80
    for option in re.findall(r"--\w+", f"{COMMANDS[name].usage} {COMMANDS[name].example}"):
        assert option in ("--key", "--config") or re.search(rf"^ +{option} ", text, re.M) or option in text


def test_the_help_of_train_leaves_the_trainers_own_options_to_a_sentence(capsys):
    text = output(["train", "--help"], capsys)
    for option in ("num_processes", "labeled", "unlabeled", "model_kwargs", "gate", "mix_labeled"):
        assert f"\n  --{option} " in text
    assert "\n  --learning_rate " not in text
    assert "Every field of transformers.TrainingArguments is an option too" in text


def test_an_interrupted_command_says_so_in_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(training, "main", lambda argv: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as stop:
        cli.main(["train"])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "Interrupted; what is on the disk stays.\n"


def test_the_version_is_told(capsys):
    assert re.fullmatch(r"fixastep \d+\.\d+\.\d+\n", output(["--version"], capsys))


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["trian"], "Unknown command 'trian'. Did you mean train?"),
        (["--hlep"], "Unknown command '--hlep'. Did you mean --help?"),
        (
            ["train", "--config", "digits/quickstrat"],
            "Unknown recipe 'digits/quickstrat'. Did you mean digits/",
        ),
        (["train", "--lerning_rate", "1"], "Unknown argument 'lerning_rate'. Did you mean learning_rate?"),
        (["evaluate", "--split", "test"], "The first argument has to be the folder of a finished run"),
        (["predict", "model", "photos"], "No out was given: fixastep predict MODEL INPUT --out answers.csv"),
        (["predict", "a", "b", "c", "--out", "d"], "Found 3 words before the options"),
        (["env", "--all"], "fixastep env takes no arguments"),
        (["train", "--num_processes", "two"], "num_processes is two, but it has to be a whole number"),
        (["train", "--num_processes"], "num_processes is missing"),
        (["train", "--num_processes", "2", "--gaet", "off"], "Unknown argument 'gaet'. Did you mean gate?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_sentence(argv, sentence):
    with pytest.raises(SystemExit, match=re.escape(sentence)) as stopped:
        cli.main(argv)
    assert str(stopped.value).startswith("error: ")
    assert "\n" not in str(stopped.value)


def test_env_tells_versions_and_devices_and_nothing_private(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    text = output(["env"], capsys)
    for name in ("python", "hf_fixastep", "torch", "transformers", "accelerate", "datasets", "platform"):
        assert re.search(rf"^{name}: +\S", text, re.M)
    assert re.search(r"^memory: +\d+\.\d GiB$", text, re.M)
    for private in ("hf_secret", str(Path.home()), os.getcwd(), os.uname().nodename):
        assert private not in text


def test_several_processes_are_started_through_accelerate(monkeypatch, tmp_path):
    called = []
    monkeypatch.setattr(os, "execve", lambda *call: called.append(call))
    monkeypatch.setattr(training, "main", lambda argv: None)
    words = ["--config", "digits/quickstart", "--use_cpu", "true", "--output_dir", str(tmp_path)]
    train.main([*words, "--num_processes=2"])
    ((program, command, environment),) = called
    assert (program, command[:3]) == (sys.executable, [sys.executable, "-m", "accelerate.commands.launch"])
    assert command[command.index("--num_processes") + 1] == "2"
    assert command[-len(words) - 3 :] == ["-m", "hf_fixastep", "train", *words][-len(words) - 3 :]
    assert environment["ACCELERATE_USE_CPU"] == "true"


def test_a_process_of_a_launcher_starts_no_others(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit, match="give it to the launcher"):
        train.main(["--config", "digits/quickstart", "--num_processes", "2"])
