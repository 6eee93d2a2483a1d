from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BertConfig,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    MobileNetV2ForImageClassification,
    Siglip2Config,
    TimmWrapperConfig,
    TimmWrapperForImageClassification,
    ViTForImageClassification,
    ViTMAEConfig,
)
from transformers.utils import logging

from hf_fixastep.data.processing import views_of
from hf_fixastep.hub import loading
from hf_fixastep.hub.loading import load_network
from tests.hub.pretrained import NETWORKS, TIMM, VISION, save_network
from tests.short_runs import assert_equal, tiny_processor, tiny_vit, tiny_wide_resnet, weights


MOBILENET = Path(__file__).parents[3] / "shared/data/mobilenet_v2_imagenet"


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A classifier of three classes."""
    tiny_vit().save_pretrained(tmp_path)
    tiny_processor().save_pretrained(tmp_path)
    return tmp_path


def change_weights(folder: Path, **changed: Tensor | None) -> None:
    state = load_file(folder / "model.safetensors") | changed
    left = {name: value.contiguous() for name, value in state.items() if value is not None}
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})


def features(model: Any, images: Tensor) -> Tensor:
    """What the last block of a network makes of images, by its own code."""
    body = getattr(model, "vision_model", getattr(model, "dinov2", model))
    with torch.no_grad():
        if hasattr(model, "timm_model"):
            return model.timm_model.forward_features(images)
        return body(pixel_values=images).last_hidden_state


# ---- what is loaded


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_gets_a_new_head_and_keeps_its_body(name: str, images: Tensor, tmp_path: Path) -> None:
    saved = save_network(name, tmp_path)
    model, processor = load_network(tmp_path, num_labels=3)
    assert type(model).__name__ == NETWORKS[name][2]
    assert not model.training
    with torch.no_grad():
        assert model(pixel_values=images).logits.shape == (2, 3)
    torch.testing.assert_close(features(model, images), features(saved, images), rtol=0, atol=1e-6)
    assert views_of(processor)[0] == (8, 8)


def test_the_older_names_of_the_weights_of_a_tower_are_known(images: Tensor, tmp_path: Path) -> None:
    saved = save_network("CLIP tower", tmp_path)
    state = {name.removeprefix("vision_model."): value for name, value in weights(saved).items()}
    save_file(
        {f"vision_model.{name}": value for name, value in state.items()}, tmp_path / "model.safetensors"
    )
    found = features(load_network(tmp_path, num_labels=3)[0], images)
    torch.testing.assert_close(found, features(saved, images), rtol=0, atol=1e-6)


def test_a_head_of_as_many_classes_is_kept(folder: Path) -> None:
    assert_equal(weights(load_network(folder, num_labels=3)[0]), weights(tiny_vit()))


def test_a_head_of_other_classes_is_new_and_nothing_else(folder: Path) -> None:
    found, saved = weights(load_network(folder, num_labels=7)[0]), weights(tiny_vit())
    assert found["classifier.weight"].shape == (7, 16)
    for name in ("classifier.weight", "classifier.bias"):
        del found[name], saved[name]
    assert_equal(found, saved)


def test_both_heads_of_a_distilled_network_may_be_new(tmp_path: Path) -> None:
    DeiTForImageClassificationWithTeacher(DeiTConfig(**VISION, num_labels=5)).save_pretrained(tmp_path)
    tiny_processor().save_pretrained(tmp_path)
    model, _ = load_network(tmp_path, num_labels=3)
    assert (model.cls_classifier.out_features, model.distillation_classifier.out_features) == (3, 3)


def test_weights_in_half_precision_are_loaded_in_full(folder: Path) -> None:
    tiny_vit().to(torch.bfloat16).save_pretrained(folder)
    assert {value.dtype for value in weights(load_network(folder)[0]).values()} == {torch.float32}


def test_the_network_remembers_where_it_came_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "pull", lambda *_: folder)
    assert load_network("org/name", 3)[0].config.name_or_path == "org/name"


def test_our_own_networks_are_loaded_too(tmp_path: Path) -> None:
    tiny_wide_resnet().save_pretrained(tmp_path)
    tiny_processor().save_pretrained(tmp_path)
    assert_equal(weights(load_network(tmp_path, 3)[0]), weights(tiny_wide_resnet()))


@pytest.mark.skipif(not MOBILENET.is_dir(), reason="../shared/data/mobilenet_v2_imagenet is not there")
def test_a_real_network_is_what_transformers_loads() -> None:
    model, processor = load_network(MOBILENET)
    expected = MobileNetV2ForImageClassification.from_pretrained(MOBILENET, use_safetensors=True)
    assert_equal(weights(model), weights(expected))
    image = torch.full((40, 50, 3), 90, dtype=torch.uint8).numpy()
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        assert torch.equal(model(pixels).logits, expected.eval()(pixels).logits)


# ---- what is refused


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def without_linear_head(folder: Path) -> None:
    """A network of timm whose head is a convolution."""
    pytest.importorskip("timm", reason="timm is not installed")
    config = TimmWrapperConfig(**TIMM | {"architecture": "dla46_c"})
    TimmWrapperForImageClassification(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            as_pickle,
            ["holds no model.safetensors", "ViTForImageClassification.from_pretrained(FOLDER)."],
        ),
        (
            lambda folder: change_weights(folder, **{"vit.embeddings.cls_token": None}),
            ["lacks vit.embeddings.cls_token, so it is not whole", "only the head may be new"],
        ),
        (
            lambda folder: change_weights(folder, **{"vit.layernorm.bias": torch.zeros(5)}),
            ["lacks vit.layernorm.bias of shape [16] (it has [5])"],
        ),
        (without_linear_head, ["no linear layer with 4 outputs"]),
        (lambda folder: BertConfig().save_pretrained(folder), ["no image classifier of its type bert"]),
        (lambda folder: ViTMAEConfig().save_pretrained(folder), ["no image classifier", "vit_mae"]),
        (lambda folder: Siglip2Config().save_pretrained(folder), ["siglip2 takes patches"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["JSON"]),
        (lambda folder: (folder / "preprocessor_config.json").unlink(), ["image processor"]),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"broken"), ["header"]),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_sentence(damage: Any, words: list[str], folder: Path) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=r"\.$") as error:
        load_network(folder, num_labels=4)
    message = str(error.value)
    assert str(folder) in message
    assert all(word in message for word in words), message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["CLIP tower", "DINOv2", "timm without a head"])
def test_without_a_number_of_classes_the_head_has_to_be_there(name: str, tmp_path: Path) -> None:
    save_network(name, tmp_path)
    head = "timm_model.fc" if name.startswith("timm") else "classifier"
    with pytest.raises(ValueError, match=rf"lacks {head}.bias, {head}.weight, so it is not a trained class"):
        load_network(tmp_path)


def test_many_missing_weights_are_counted(folder: Path) -> None:
    names = [name for name in load_file(folder / "model.safetensors") if "encoder" in name or "layer" in name]
    change_weights(folder, **dict.fromkeys(names))
    with pytest.raises(ValueError, match=rf"lacks vit\.\S+, vit\.\S+, vit\.\S+ and {len(names) - 3} more"):
        load_network(folder, 3)


def test_the_weights_of_a_pickle_are_what_the_sentence_converts(folder: Path) -> None:
    as_pickle(folder)
    ViTForImageClassification.from_pretrained(folder).save_pretrained(folder)
    assert_equal(weights(load_network(folder)[0]), weights(tiny_vit()))


def test_no_code_of_a_network_is_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text("raise SystemExit('code of a model was run')")
    with pytest.raises(ValueError, match="asks to run code"):
        load_network(folder, 3)


def test_loading_is_silent_and_leaves_the_log_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    before = logging.get_verbosity()
    save_network("CLIP", tmp_path)
    capfd.readouterr()
    load_network(tmp_path, 3)
    assert "text_model" not in "".join(capfd.readouterr())
    assert logging.get_verbosity() == before
