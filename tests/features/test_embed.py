"""Features are computed once, are those of the network, and depend on the image alone."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch

from hf_fixastep.data.features import Features
from hf_fixastep.data.processing import with_size
from hf_fixastep.features import embed as module
from hf_fixastep.features.backbone import Backbone
from hf_fixastep.features.embed import CHUNK, embed
from hf_fixastep.step.forwards import head_inputs
from tests.features.networks import pictures, tiny_backbone, tiny_network, tiny_processor


def versions_of(features: Features) -> np.ndarray:
    return np.stack([features[at]["pixel_values"].numpy() for at in range(len(features))])


def test_plain_features_are_what_the_head_gets_of_the_processed_image(tmp_path: Path) -> None:
    split, model, processor = pictures(5), tiny_network(), tiny_processor()
    features = embed(split, tiny_backbone(), cache_dir=tmp_path).plain()
    for at, image in enumerate(split["image"]):
        with torch.no_grad(), head_inputs(model, 10) as seen:
            model(**processor(image, return_tensors="pt"))
        np.testing.assert_allclose(features[at], seen[0][0], rtol=2e-3, atol=1e-4)


def test_features_depend_on_the_image_and_not_on_its_neighbours(tmp_path: Path) -> None:
    split = pictures(7)
    one = versions_of(embed(split, tiny_backbone(), cache_dir=tmp_path / "one"))
    other = versions_of(embed(split.select([6, 2]), tiny_backbone(), cache_dir=tmp_path / "other"))
    np.testing.assert_array_equal(other, one[[6, 2]])


def test_views_differ_from_each_other_and_from_the_plain_image(tmp_path: Path) -> None:
    rows = versions_of(embed(pictures(3), tiny_backbone(), weak=3, strong=2, cache_dir=tmp_path))
    assert rows.shape == (3, 6, tiny_backbone().size)
    for row in rows:
        assert len(np.unique(row, axis=0)) >= 5  # two weak views may be the same crop


def test_a_view_is_the_one_of_views_py_with_the_generator_of_the_image(tmp_path: Path) -> None:
    split, backbone = pictures(1), tiny_backbone()
    rows = versions_of(embed(split, backbone, weak=1, strong=1, cache_dir=tmp_path))
    (hashes,) = (np.load(path) for path in tmp_path.glob("*/split-*.npy"))
    seed = int(np.frombuffer(hashes.tobytes(), np.int64)[0]) & (2**62 - 1)
    generator = torch.Generator().manual_seed(seed)
    views, pixels = backbone.views(), backbone.pixels([split[0]["image"]])
    expected = [backbone.features(view(pixels, generator)) for view in (views.weak, views.strong)]
    np.testing.assert_allclose(rows[0, 1:], torch.cat(expected), rtol=2e-3, atol=1e-4)


def test_a_second_call_and_a_grown_pile_run_the_network_on_new_images_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone, counted = tiny_backbone(), []
    before = versions_of(embed(pictures(4), backbone, cache_dir=tmp_path))
    pixels = backbone.pixels
    monkeypatch.setattr(backbone, "pixels", lambda images: counted.append(len(images)) or pixels(images))
    again = versions_of(embed(pictures(4), backbone, cache_dir=tmp_path))
    grown = datasets.concatenate_datasets([pictures(2, seed=1), pictures(4)])
    after = versions_of(embed(grown, backbone, cache_dir=tmp_path))
    assert counted == [2]
    np.testing.assert_array_equal(again, before)
    np.testing.assert_array_equal(after[2:], before)


def test_a_killed_call_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split, counted = pictures(3 * CHUNK + 5), []
    whole = versions_of(embed(split, tiny_backbone(), weak=1, strong=0, cache_dir=tmp_path / "whole"))
    features = module.Work.features

    def killed(self: Any, images: Any, seeds: Any) -> Any:
        counted.append(len(images))
        if len(counted) == 3:
            raise KeyboardInterrupt
        return features(self, images, seeds)

    monkeypatch.setattr(module.Work, "features", killed)
    with pytest.raises(KeyboardInterrupt):
        embed(split, tiny_backbone(), weak=1, strong=0, cache_dir=tmp_path / "killed")
    resumed = embed(split, tiny_backbone(), weak=1, strong=0, cache_dir=tmp_path / "killed")
    assert counted == [CHUNK, CHUNK, CHUNK, CHUNK, 5]
    np.testing.assert_array_equal(versions_of(resumed), whole)


def test_equal_images_are_embedded_once(tmp_path: Path) -> None:
    twice = datasets.concatenate_datasets([pictures(2), pictures(2)])
    features = embed(twice, tiny_backbone(), cache_dir=tmp_path)
    assert len(features) == 4
    assert len(features.parts[0]) == 2


def test_other_weights_another_size_and_other_views_have_caches_of_their_own(tmp_path: Path) -> None:
    for backbone, weak in (
        (tiny_backbone(), 4),
        (tiny_backbone(seed=1), 4),
        (Backbone(tiny_network(), tiny_processor(), image_size=48), 4),
        (tiny_backbone(), 2),
    ):
        embed(pictures(1), backbone, weak=weak, cache_dir=tmp_path)
    assert len(list(tmp_path.glob("*/part-*.hashes.npy"))) == 4


def test_the_classes_of_the_head_are_no_part_of_the_key(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    other = tiny_network(num_labels=3)
    other.load_state_dict(
        {
            **backbone.model.state_dict(),
            **{name: value for name, value in other.state_dict().items() if name.startswith("classifier")},
        }
    )
    assert Backbone(other, tiny_processor()).identity == backbone.identity


def test_labels_come_with_the_features(tmp_path: Path) -> None:
    features = embed(pictures(5, classes=3), tiny_backbone(), cache_dir=tmp_path)
    assert features.labels.tolist() == [0, 1, 2, 0, 1]
    assert features.class_names == ["class 0", "class 1", "class 2"]


def with_broken(count: int) -> datasets.Dataset:
    values = pictures(count).cast_column("image", datasets.Image(decode=False))["image"][:]
    values[1] = {"bytes": values[1]["bytes"][:60], "path": "pile/cut.png"}
    return datasets.Dataset.from_dict({"image": values}, features=datasets.Features(image=datasets.Image()))


def test_unreadable_images_are_skipped_and_listed_or_refused(tmp_path: Path) -> None:
    features = embed(with_broken(4), tiny_backbone(), cache_dir=tmp_path, skip_unreadable=True)
    assert (len(features), features.skipped) == (3, ["pile/cut.png"])
    assert np.isfinite(features.plain()).all()
    with pytest.raises(ValueError, match=r"1 of 4 images cannot be read, the first is pile/cut.png"):
        embed(with_broken(4), tiny_backbone(), cache_dir=tmp_path)


def test_no_room_is_said_before_the_first_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    monkeypatch.setattr(module.Work, "features", None)
    needed = 3 * 7 * tiny_backbone().size * 2
    with pytest.raises(OSError, match=f"3 images need {needed:,} bytes in .* but 1 are free"):
        embed(pictures(3), tiny_backbone(), cache_dir=tmp_path)


def test_a_cache_of_another_network_is_refused(tmp_path: Path) -> None:
    embed(pictures(1), tiny_backbone(), cache_dir=tmp_path)
    (about,) = tmp_path.glob("*/about.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"weights": "other"}))
    with pytest.raises(ValueError, match="holds features of another weights"):
        embed(pictures(1), tiny_backbone(), cache_dir=tmp_path)


def test_another_size_keeps_the_share_of_the_centre_crop() -> None:
    processor = with_size(tiny_processor(), 64)
    image = processor(PIL.Image.new("RGB", (100, 200)), return_tensors="pt")["pixel_values"]
    assert image.shape == (1, 3, 64, 64)
    assert processor.size["shortest_edge"] == 72


def test_features_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    backbone.features = lambda images: torch.full((len(images), backbone.size), 1e5)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="reach 1e"):
        embed(pictures(1), backbone, cache_dir=tmp_path)
