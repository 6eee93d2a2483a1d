import hashlib
import io
import itertools
import socket

import datasets
import numpy as np
import PIL.Image
import pytest
from sklearn.datasets import load_digits

from hf_fixastep.data import load_dataset
from hf_fixastep.data.digits import DigitsOpenSet
from hf_fixastep.data.open_set import split_rows, split_test


LABELS = load_digits().target
UNLABELED_DIGITS = DigitsOpenSet.unlabeled_classes
SPLITS = ["labeled", "unlabeled", "validation", "test"]


def rows(zeta: str = "zeta50", labels_per_class: int = 5, seed: int = 0) -> dict[str, np.ndarray]:
    shown = UNLABELED_DIGITS[zeta]
    rows = split_rows(LABELS, range(6), shown, DigitsOpenSet.per_class | {"labeled": labels_per_class}, seed)
    return {**rows, "test": rows["test"][split_test(LABELS[rows["test"]], range(6), shown)["test"]]}


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return load_dataset("digits_open_set", cache_dir=tmp_path_factory.mktemp("cache"))


class TestRows:
    @pytest.mark.parametrize("seed", [0, 1, 7])
    def test_the_split_follows_the_recipe(self, seed):
        expected = {name: set() for name in SPLITS}
        for digit in range(10):
            mine = [row for row in np.random.RandomState(seed).permutation(1797) if LABELS[row] == digit]
            if digit < 6:
                expected["test"].update(mine[:60])
                expected["validation"].update(mine[60:80])
                expected["labeled"].update(mine[80:85])
            if digit in (6, 7, 4, 5):
                expected["unlabeled"].update(mine[85:])
        assert {name: set(part) for name, part in rows(seed=seed).items()} == expected

    @pytest.mark.parametrize(("zeta", "foreign"), [(f"zeta{25 * n}", n) for n in range(5)])
    def test_zeta_is_the_share_of_foreign_digits_and_changes_no_other_split(self, zeta, foreign):
        found, half = rows(zeta, labels_per_class=93), rows(labels_per_class=93)
        unlabeled = set(LABELS[found["unlabeled"]])
        assert len(unlabeled) == 4  # each of them has an image left
        assert len(unlabeled - set(range(6))) == foreign
        assert unlabeled.isdisjoint({0, 1})
        assert all(np.array_equal(found[name], half[name]) for name in SPLITS if name != "unlabeled")

    def test_rows_and_their_order_are_those_of_the_published_results(self):
        found = [rows()[name].astype(np.int64).tobytes() for name in SPLITS]
        assert [hashlib.sha256(part).hexdigest()[:12] for part in found] == [
            "53bc0d69f916",
            "693cd5722867",
            "709b5343bfe9",
            "4e8c1285d13f",
        ]

    def test_labeled_sets_are_nested(self):
        sets = [set(rows(labels_per_class=count)["labeled"]) for count in (1, 5, 20, 93)]
        assert all(small < large for small, large in itertools.pairwise(sets))
        assert [len(labeled) for labeled in sets] == [6, 30, 120, 558]

    @pytest.mark.parametrize("zeta", UNLABELED_DIGITS)
    def test_the_order_of_unlabeled_rows_hides_their_labels(self, zeta):
        labels = LABELS[rows(zeta)["unlabeled"]]
        assert np.mean(labels[1:] != labels[:-1]) == pytest.approx(0.75, abs=0.07)  # four digits, shuffled
        for digit in UNLABELED_DIGITS[zeta]:
            assert np.mean(np.flatnonzero(labels == digit)) / len(labels) == pytest.approx(0.5, abs=0.09)

    @pytest.mark.parametrize("labels_per_class", [94, 0, -1])
    def test_an_impossible_number_of_labels_is_refused(self, labels_per_class, tmp_path):
        sentence = (
            f"labels_per_class is {labels_per_class}, but the digits suffice for 1 to 93: "
            "choose a number in that range."
        )
        for streaming in (False, True):
            with pytest.raises(ValueError) as error:  # noqa: PT011, the whole sentence is compared
                load_dataset(
                    "digits_open_set",
                    cache_dir=tmp_path,
                    labels_per_class=labels_per_class,
                    streaming=streaming,
                )
            assert str(error.value) == sentence


class TestBuiltSet:
    def test_sizes(self, digits):
        assert {name: len(digits[name]) for name in SPLITS} == {
            "labeled": 30,
            "unlabeled": sum(np.bincount(LABELS)[[6, 7, 4, 5]] - 85),
            "validation": 120,
            "test": 360,
        }

    def test_unlabeled_images_have_no_label_not_even_on_the_disk(self, digits):
        assert digits["unlabeled"].column_names == ["image"]
        assert all(digits[name].column_names == ["image", "label"] for name in SPLITS if name != "unlabeled")
        stored = datasets.Dataset.from_file(digits["unlabeled"].cache_files[0]["filename"])
        assert set(stored["label"]) == {-1}

    @pytest.mark.parametrize(
        ("zeta", "seen", "unseen"), [("zeta0", 0, 4), ("zeta50", 2, 2), ("zeta100", 4, 0)]
    )
    def test_foreign_test_images_can_be_added(self, zeta, seen, unseen, tmp_path):
        data = load_dataset("digits_open_set", zeta, foreign=True, cache_dir=tmp_path)
        sizes = {"seen_foreign": 60 * seen, "unseen_foreign": 60 * unseen}
        assert {name: len(data[name]) for name in data if name not in SPLITS} == {
            n: s for n, s in sizes.items() if s
        }
        assert all(data[name].column_names == ["image"] for name in data if name not in SPLITS)

    def test_images_and_labels_are_those_of_scikit_learn(self, digits):
        for name, part in rows().items():
            pixels = np.stack([np.array(image) for image in digits[name]["image"]])
            assert np.array_equal(
                pixels,
                [
                    [[round(v * 255 / 16) for v in line] for line in image]
                    for image in load_digits().images[part]
                ],
            )
            if name != "unlabeled":
                assert np.array_equal(digits[name]["label"], LABELS[part])

    def test_images_are_grey_png(self, digits):
        cell = digits["test"].cast_column("image", datasets.Image(decode=False))[0]["image"]
        picture = PIL.Image.open(io.BytesIO(cell["bytes"]))
        assert (picture.format, picture.mode, picture.size) == ("PNG", "L", (8, 8))
        assert cell["path"] is None
        assert digits["labeled"].features["label"].names == ["0", "1", "2", "3", "4", "5"]

    def test_no_network_is_needed(self, tmp_path, monkeypatch):
        def refuse(*args):
            raise AssertionError("a connection was tried")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        assert len(load_dataset("digits_open_set", "zeta0", cache_dir=tmp_path)) == 4
