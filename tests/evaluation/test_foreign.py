"""What a model remembers of known images, against loops."""

from __future__ import annotations

import numpy as np
import pytest

from hf_fixastep.evaluation.foreign import KNOWN, KnownImages


def remembered() -> tuple[KnownImages, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labeled, held_out = random.normal(size=(7, 5)), random.normal(size=(20, 5))
    return KnownImages.fit(labeled, held_out), labeled, held_out


def score(row: np.ndarray, labeled: np.ndarray) -> float:
    cosines = [row @ other / np.sqrt(row @ row) / np.sqrt(other @ other) for other in labeled]
    return float(np.mean(sorted(cosines)[-3:]))


def test_foreignness_is_the_share_of_held_out_images_that_look_more_known():
    known, labeled, held_out = remembered()
    images = np.random.default_rng(1).normal(size=(9, 5))
    expected = [np.mean([score(own, labeled) > score(row, labeled) for own in held_out]) for row in images]
    # half precision may turn one comparison of the twenty
    np.testing.assert_allclose(known.foreignness(images), expected, atol=0.0501)
    assert len(set(expected)) > 3


def test_the_most_known_held_out_image_is_not_foreign_and_the_least_nearly_is():
    known, _, held_out = remembered()
    found = known.foreignness(held_out)
    assert sorted(found) == pytest.approx(np.arange(20) / 20)


def test_it_is_the_same_after_writing_and_reading(tmp_path):
    known, _, held_out = remembered()
    known.write(tmp_path)
    again = KnownImages.of(tmp_path)
    assert np.array_equal(again.labeled, known.labeled)
    assert np.array_equal(again.foreignness(held_out), known.foreignness(held_out))


def test_a_model_without_the_file_remembers_nothing(tmp_path):
    assert KnownImages.of(tmp_path) is None


def test_no_images_have_no_foreignness():
    assert remembered()[0].foreignness(np.empty((0, 0))).shape == (0,)


def test_a_damaged_file_and_one_of_another_model_are_refused_in_a_sentence(tmp_path):
    (tmp_path / KNOWN).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"known.safetensors cannot be read: remove it, or run"):
        KnownImages.of(tmp_path)
    KnownImages(np.zeros((0, 5), np.float16), np.zeros(3)).write(tmp_path)
    with pytest.raises(ValueError, match="is incomplete: remove it"):
        KnownImages.of(tmp_path)
    with pytest.raises(ValueError, match="features of 5 numbers, but the model has 4"):
        remembered()[0].foreignness(np.ones((1, 4)))
