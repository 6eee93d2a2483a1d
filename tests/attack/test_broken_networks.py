"""Folders of networks that are broken, or made to hurt: one sentence, before memory or time are spent."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Dinov2Config, Dinov2Model, SwinConfig, SwinForImageClassification

from hf_fixastep import cli
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.hub import loading
from hf_fixastep.hub.loading import load_network
from tests.attack.plants import change, save_run
from tests.hub.pretrained import NETWORKS, save_network
from tests.short_runs import tiny_processor, tiny_wide_resnet


WEIGHTS = "model.safetensors"


def tensors(header: Any, data: bytes = b"\0" * 64) -> Callable[[Path], None]:
    """A file of weights with this header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return lambda run: (run / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data) and None


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def truncate(share: float) -> Callable[[Path], None]:
    return lambda run: os.truncate(run / WEIGHTS, int(share * (run / WEIGHTS).stat().st_size))


def replace(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)


def written(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda run: replace(run, name, content)


def config(**values: Any) -> Callable[[Path], None]:
    return lambda run: change(run / "config.json", **values)


def processor(**values: Any) -> Callable[[Path], None]:
    return lambda run: change(run / "preprocessor_config.json", **values)


def wide_resnet(**values: Any) -> Callable[[Path], None]:
    def save(run: Path) -> None:
        tiny_wide_resnet().save_pretrained(run)
        change(run / "config.json", **values)

    return save


def swin(**values: Any) -> Callable[[Path], None]:
    def save(run: Path) -> None:
        small = SwinConfig(image_size=8, patch_size=2, embed_dim=4, depths=[1], num_heads=[1], window_size=2)
        SwinForImageClassification(small).save_pretrained(run)
        change(run / "config.json", **values)

    return save


def giant(name: str) -> Callable[[Path], None]:
    """A file of many gigabytes, none of which is on the disk."""
    return lambda run: os.truncate(run / name, 2**36)


def directory(run: Path) -> None:
    (run / WEIGHTS).unlink()
    (run / WEIGHTS).mkdir()


def pipe(name: str) -> Callable[[Path], None]:
    def make(run: Path) -> None:
        (run / name).unlink()
        os.mkfifo(run / name)

    return make


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
DAMAGES: dict[str, Callable[[Path], None]] = {
    # weights
    "empty": written(WEIGHTS, b""),
    "seven bytes": written(WEIGHTS, b"1234567"),
    "cut in half": truncate(0.5),
    "last byte gone": lambda run: os.truncate(run / WEIGHTS, (run / WEIGHTS).stat().st_size - 1),
    "header cut": truncate(0.01),
    "header of an exabyte": written(WEIGHTS, struct.pack("<Q", 2**60) + b"{}"),
    "header of 90 megabytes": tensors(b'{"a":' + b" " * 90_000_000 + b"1}"),
    "header is no JSON": tensors(b"{not json"),
    "header is null": tensors(b"null"),
    "header is deep": tensors(DEEP),
    "overlapping": tensors({"a": entry(0, 64, [16]), "b": entry(32, 64, [8])}),
    "hole": tensors({"a": entry(0, 16, [4]), "b": entry(32, 64, [8])}),
    "outside": tensors({"a": entry(0, 2**40, [2**38])}),
    "shape that overflows": tensors({"a": entry(0, 64, [2**62, 2**62])}),
    "negative shape": tensors({"a": entry(0, 64, [-16])}),
    "unknown kind of numbers": tensors({"a": entry(0, 64, [16], "EVIL")}),
    "other weights": lambda run: save_file({"a": torch.zeros(3)}, run / WEIGHTS),
    "none": lambda run: (run / WEIGHTS).unlink(),
    "folder": directory,
    "pipe": pipe(WEIGHTS),
    "gigabytes": giant(WEIGHTS),
    # config
    "config empty": written("config.json", b""),
    "config null": written("config.json", b"null"),
    "config list": written("config.json", b"[1]"),
    "config text": written("config.json", b'"vit"'),
    "config of bytes": written("config.json", b"\xff\xfe\x00"),
    "config deep": written("config.json", DEEP),
    "config of gigabytes": giant("config.json"),
    "config is a pipe": pipe("config.json"),
    "config with a number of a million digits": written("config.json", b'{"a": ' + b"9" * 1_000_000 + b"}"),
    "type null": config(model_type=None),
    "type a list": config(model_type=["vit"]),
    "type unknown": config(model_type="evil"),
    "architectures a number": config(architectures=3),
    "hidden size null": config(hidden_size=None),
    "hidden size text": config(hidden_size="wide"),
    "hidden size zero": config(hidden_size=0),
    "hidden size negative": config(hidden_size=-16),
    "hidden size a billion": config(hidden_size=10**9),
    "hidden size a million": config(hidden_size=10**6),
    "heads zero": config(num_attention_heads=0),
    "layers negative": config(num_hidden_layers=-1),
    "layers a thousand": config(num_hidden_layers=1000),
    "layers a million": config(num_hidden_layers=10**6),
    "layers six million": config(num_hidden_layers=6_000_000),
    "layers infinite": written("config.json", b'{"model_type": "vit", "num_hidden_layers": Infinity}'),
    "patches of nothing": config(patch_size=0),
    "images of a billion pixels": config(image_size=10**9),
    "images of a million rows": config(image_size=10**6),
    "classes a billion": config(num_labels=10**9),
    "classes negative": config(num_labels=-3),
    "classes a number": config(id2label=5),
    "activation unknown": config(hidden_act="evil"),
    "our depth of six million": wide_resnet(depth=6_000_004),
    "our depth of half a million": wide_resnet(depth=600_004),
    "our depth negative": wide_resnet(depth=-2),
    "our width of a million": wide_resnet(width=10**6),
    "depths of a trillion": swin(depths=[10**12]),
    "depths of a million": swin(depths=[10**6]),
    # image processor
    "processor null": written("preprocessor_config.json", b"null"),
    "processor deep": written("preprocessor_config.json", DEEP),
    "processor with a type that is no text": processor(image_processor_type=7),
    "pictures of a million rows": processor(size={"height": 10**6, "width": 10**6}),
    "pictures of no row": processor(size={"height": 0, "width": 8}),
    "pictures negative": processor(crop_size={"height": -8, "width": 8}),
}
FEW = ("cut in half", "overlapping", "config null", "config deep", "layers six million")  # for all commands


@pytest.mark.parametrize("number", [3, None], ids=["train", "use"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_broken_ends_in_one_sentence(damage: str, number: int | None, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    DAMAGES[damage](run)
    with pytest.raises(ValueError, match=r"\.$") as error:
        load_network(run, number)
    message = str(error.value)
    assert str(run) in message
    assert "\n" not in message
    assert len(message) < 700


@pytest.mark.parametrize("damage", FEW)
@pytest.mark.parametrize("command", ["predict", "push", "train"])
def test_no_command_ends_in_a_traceback(damage: str, command: str, tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    DAMAGES[damage](run)
    words = {
        "predict": ["predict", str(run), str(tmp_path), "--out", str(tmp_path / "a.csv")],
        "push": ["push", str(run), "--hub_model_id", "org/name", "--hub_license", "mit"],
        "train": ["train", "--model", str(run), "--dataset", "digits_open_set", "--output_dir", "out"],
    }
    with pytest.raises(SystemExit, match=r"^error: .*\.$"):
        cli.main(words[command])


def test_a_network_that_is_too_large_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as its config asks for more tensors than its files could fill, the building ends."""
    run = save_run(tmp_path / "run")
    change(run / "config.json", num_hidden_layers=10**6)
    built: list[str] = []
    monkeypatch.setattr(loading, "MANY", 50)
    handle = torch.nn.modules.module.register_module_parameter_registration_hook(
        lambda module, name, value: built.append(name)
    )
    try:
        with pytest.raises(ValueError, match="describes more"):
            load_network(run, 3)
    finally:
        handle.remove()
    assert len(built) < 200


def test_a_network_that_answers_nan_is_not_asked(tmp_path: Path) -> None:
    """It would call every image by the name of its first class."""
    run = save_run(tmp_path / "run")
    state = load_file(run / WEIGHTS)
    save_file({**state, "classifier.bias": torch.full((3,), torch.nan)}, run / WEIGHTS, {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"answers with numbers that are infinite or NaN: train it again"
    ) as error:
        Classifier(run)
    assert str(run) in str(error.value)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_that_are_whole_are_within_the_bounds(name: str, tmp_path: Path) -> None:
    save_network(name, tmp_path)
    load_network(tmp_path, 3)


def test_a_new_head_may_be_larger_than_the_rest(tmp_path: Path) -> None:
    small = Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    Dinov2Model(small).save_pretrained(tmp_path)
    tiny_processor().save_pretrained(tmp_path)
    assert load_network(tmp_path, 20_000)[0].config.num_labels == 20_000
