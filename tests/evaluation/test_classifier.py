from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import BertConfig, ViTImageProcessor, ViTModel, pipeline

from hf_fixastep.evaluation.calibration import Calibration, write_calibration
from hf_fixastep.evaluation.classifier import Classifier
from hf_fixastep.hub import loading
from tests.short_runs import tiny_processor, tiny_vit, tiny_wide_resnet


@pytest.fixture
def folder(tmp_path):
    """A model as a run leaves it."""
    tiny_vit().save_pretrained(tmp_path)
    tiny_processor().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def picture():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))


def set_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def test_probabilities_are_the_softmax_of_logits_over_the_temperature(folder, picture):
    write_calibration(folder, Calibration(2.5, abstain_below=0.8, coverage=0.9))
    found = Classifier(folder)
    # Mean and standard deviation of the processor.
    pixels = (np.asarray(picture, dtype=np.float32) / 255 - 0.5) / 0.25
    with torch.no_grad():
        logits = found.model(torch.tensor(pixels).permute(2, 0, 1)[None]).logits[0].double().numpy()
    shares = np.exp(logits / 2.5)
    np.testing.assert_allclose(found.probabilities([picture])[0], shares / shares.sum(), atol=1e-5)


def test_without_calibration_they_are_those_of_the_pipeline(folder, picture):
    names = pipeline("image-classification", model=str(folder))(picture, top_k=3)
    ours = Classifier(folder).probabilities([picture])[0]
    assert [name["score"] for name in names] == pytest.approx(sorted(ours, reverse=True), abs=1e-6)


def test_pictures_and_pixels_give_the_same_logits_in_batches_of_any_size(folder):
    pixels = torch.randint(256, (5, 3, 12, 10), dtype=torch.uint8)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
    whole = Classifier(folder).logits(pixels)
    assert whole.dtype == np.float64
    by_two = Classifier(folder, batch_size=2)
    np.testing.assert_allclose(by_two.logits(pixels), whole, atol=1e-5)
    np.testing.assert_allclose(by_two.logits(iter(pictures)), whole, atol=1e-5)
    assert by_two.logits([]).shape == (0, 3)


@pytest.mark.parametrize(
    "convert",
    [
        lambda grey: grey,
        lambda grey: grey.convert("P"),
        lambda grey: grey.convert("LA"),
        lambda grey: grey.convert("RGBA"),
        lambda grey: grey.convert("CMYK"),
        lambda grey: Image.fromarray(np.asarray(grey).astype(np.uint16) * 257),
        lambda grey: Image.fromarray(np.asarray(grey).astype(np.int32) * 257),
        lambda grey: Image.fromarray(np.asarray(grey).astype(np.float32) / 255),
    ],
    ids=["L", "P", "LA", "RGBA", "CMYK", "I;16", "I", "F"],
)
def test_the_mode_of_an_image_does_not_matter(convert, folder, picture):
    grey = picture.convert("L")
    grey.putpixel((0, 0), 255)  # so that 16 bits are not taken for 12
    expected, found = Classifier(folder).probabilities([grey.convert("RGB"), convert(grey)])
    np.testing.assert_allclose(found, expected, atol=2e-3, rtol=0)  # 8 bits of CMYK round


def test_images_of_several_sizes_are_taken_together(folder, picture):
    found = Classifier(folder)
    images = [picture, picture.resize((31, 17)), picture.resize((5, 40))]
    apart = [found.probabilities([image])[0] for image in images]
    np.testing.assert_allclose(found.probabilities(images), apart, atol=1e-6)


def test_a_model_of_grey_images_gets_one_channel(tmp_path, picture):
    tiny_wide_resnet(num_channels=1).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5]).save_pretrained(
        tmp_path
    )
    shares = Classifier(tmp_path).probabilities([picture, picture.convert("L")])
    np.testing.assert_allclose(shares[0], shares[1], atol=1e-6)


def test_a_model_on_the_hub_is_pulled_at_its_revision(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(loading, "pull", lambda *request: asked.append(request) or folder)
    model = Classifier("org/name", revision="v1").model
    assert asked == [("org/name", "v1")]
    assert torch.equal(model.classifier.bias, load_file(folder / "model.safetensors")["classifier.bias"])


def test_a_name_that_is_neither_folder_nor_on_the_hub(tmp_path):
    with pytest.raises(
        ValueError, match=r"There is no folder runs/quickstrat; as a model on the Hub: .*cache"
    ):
        Classifier("runs/quickstrat")
    with pytest.raises(ValueError, match=r"There is no folder .*nowhere; .*names such as org/name"):
        Classifier(tmp_path / "nowhere")


def test_a_folder_has_no_revision(folder):
    with pytest.raises(ValueError, match=r"revision is v1, but .* is a folder"):
        Classifier(folder, "v1")


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def with_code(folder):
    set_config(folder, model_type="theirs", auto_map={"AutoConfig": "theirs.Config"})
    (folder / "theirs.py").write_text("raise SystemExit('code of a model was run')")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (pickled, "holds no model.safetensors"),
        (with_code, "asks to run code"),
        (
            lambda folder: ViTModel(tiny_vit().config).save_pretrained(folder),
            "lacks classifier.bias, classifier.weight",
        ),
        (lambda folder: BertConfig().save_pretrained(folder), "BertConfig"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"broken"), "header"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not JSON"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "image processor"),
        (
            lambda folder: ViTImageProcessor(size={"height": 12, "width": 12}).save_pretrained(folder),
            "does not fit",
        ),
        (lambda folder: set_config(folder, id2label=["a"]), "No network could be loaded"),
        (lambda folder: write_calibration(folder, Calibration(0)), "a temperature above 0"),
    ],
    ids=[
        "pickle",
        "code",
        "head",
        "text",
        "weights",
        "json",
        "config",
        "processor",
        "size",
        "names",
        "calibration",
    ],
)
def test_what_is_wrong_with_a_folder_is_said_in_one_sentence(damage, sentence, folder):
    damage(folder)
    with pytest.raises(ValueError, match=sentence) as error:
        Classifier(folder)
    assert "\n" not in str(error.value)


class Config:
    def __init__(self, calibration) -> None:
        self.calibration = calibration


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"temperature": -1},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"temperature": "warm"},
        {"temperature": None},
        {"temperature": 1, "abstain_below": 1.2},
        {"temperature": 1, "coverage": -0.1},
        {"temperature": 1, "abstain": 0.5},
        2.5,
    ],
    ids=str,
)
def test_a_wrong_calibration_is_refused(found):
    with pytest.raises(ValueError, match="calibration in the model's config"):
        Calibration.of(Config(found))


def test_a_calibration_is_read_from_the_config():
    assert Calibration.of(Config(None)) is None
    assert Calibration.of(Config({"temperature": 2})) == Calibration(2.0, abstain_below=0.0, coverage=1.0)
    assert Calibration.of(Config({"temperature": 2, "abstain_below": 0.8, "coverage": 0.9})) == Calibration(
        2, 0.8, 0.9
    )
