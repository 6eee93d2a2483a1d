import itertools
import zlib

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from accelerate import skip_first_batches

from hf_fixastep.data.images import Images
from hf_fixastep.data.loader import PairedLoader, PairedSampler, generator_for


WEAK = 1060547780  # crc32 of b"weak"
SEED = 9300873264085854414


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def split_of(pictures: list, labels: list | None = None, label_feature=None) -> datasets.Dataset:
    if labels is None:
        return datasets.Dataset.from_dict(
            {"image": pictures}, features=datasets.Features({"image": datasets.Image()})
        )
    feature = label_feature or datasets.ClassLabel(names=["cat", "dog", "owl"])
    features = datasets.Features({"image": datasets.Image(), "label": feature})
    return datasets.Dataset.from_dict({"image": pictures, "label": labels}, features=features)


def numbered(count: int, labels: bool = True) -> Images:
    """Images whose pixels all hold their row number."""
    pixels = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).contiguous()
    return Images(pixels, torch.arange(count) if labels else None)


def loader(**changes) -> PairedLoader:
    arguments = {
        "labeled": numbered(10),
        "unlabeled": numbered(50),
        "batch_sizes": (3, 7),
        "steps_per_epoch": 5,
    }
    return PairedLoader(**arguments | {"seed": 1} | changes)


def assert_same_batches(first, second) -> None:
    for one, other in itertools.zip_longest(first, second):
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)


class TestImages:
    @pytest.mark.parametrize("mode", ["1", "L", "RGB", "RGBA", "P", "CMYK"])
    def test_grey_modes_take_one_channel_and_others_three(self, mode):
        picture = PIL.Image.fromarray(noise(5, 6, 3)).convert(mode)
        stored = split_of([picture], [2])
        assert stored[0]["image"].mode == mode
        images = Images.from_dataset(stored, (5, 6))
        expected = np.array(picture.convert("L" if mode in ("1", "L") else "RGB"))
        assert np.array_equal(
            images.pixels[0], expected[None] if expected.ndim == 2 else expected.transpose(2, 0, 1)
        )
        assert images.labels.tolist() == [2]
        assert images.class_names == ["cat", "dog", "owl"]

    @pytest.mark.parametrize("grey_first", [True, False])
    def test_mixed_images_become_rgb(self, grey_first):
        grey, colour = noise(5, 6), noise(5, 6, 3)
        expected = [np.stack([grey] * 3), colour.transpose(2, 0, 1)]
        pictures = [PIL.Image.fromarray(grey), PIL.Image.fromarray(colour)]
        order = [0, 1] if grey_first else [1, 0]
        images = Images.from_dataset(split_of([pictures[i] for i in order]), (5, 6))
        assert np.array_equal(images.pixels, np.stack([expected[i] for i in order]))

    def test_channels_can_be_asked_for(self):
        grey, colour = PIL.Image.fromarray(noise(5, 6)), PIL.Image.fromarray(noise(5, 6, 3))
        assert Images.from_dataset(split_of([grey]), (5, 6), channels=3).pixels.shape == (1, 3, 5, 6)
        stored = Images.from_dataset(split_of([colour]), (5, 6), channels=1).pixels
        assert np.array_equal(stored[0, 0], np.array(colour.convert("L")))

    @pytest.mark.parametrize("channels", [1, 3])
    def test_resizing_agrees_with_the_image_processor(self, channels):
        from transformers import ViTImageProcessor

        array = noise(40, 31, 3)[..., :channels].squeeze()
        picture = PIL.Image.fromarray(array)
        processor = ViTImageProcessor(size={"height": 16, "width": 16}, do_rescale=False, do_normalize=False)
        expected = processor(picture.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        images = Images.from_dataset(split_of([picture]), (16, 16))
        assert torch.equal(images.pixels[0].expand(3, -1, -1).float(), expected.float())

    def test_other_columns_are_not_read(self):
        pictures = [PIL.Image.fromarray(noise(5, 6))]
        split = datasets.Dataset.from_dict(
            {"photo": pictures, "kind": [3], "path": ["nowhere.png"]},
            features=datasets.Features(
                {"photo": datasets.Image(), "kind": datasets.Value("int8"), "path": datasets.Image()}
            ),
        )
        images = Images.from_dataset(split, (5, 6), image="photo", label="kind")
        assert images.labels.tolist() == [3]
        assert images.labels.dtype == torch.int64

    def test_formats_and_transforms_do_not_matter(self):
        split = split_of([PIL.Image.fromarray(noise(5, 6))], [1])
        for changed in (split.with_transform(lambda batch: {"image": ["?"]}), split.with_format("torch")):
            images = Images.from_dataset(changed, (5, 6))
            assert np.array_equal(images.pixels[0, 0], noise(5, 6))
            assert images.labels.tolist() == [1]

    def test_an_empty_split_gives_an_empty_store(self):
        images = Images.from_dataset(split_of([]), (5, 6))
        assert (len(images), images.labels, images.class_names) == (0, None, None)
        assert len(images.fingerprint) == 16

    def test_rows_come_in_the_order_asked_for(self):
        batch = numbered(9).__getitems__([4, 0, 4])
        assert batch["pixel_values"][:, 0, 0, 0].tolist() == batch["labels"].tolist() == [4, 0, 4]
        assert batch["pixel_values"].dtype == torch.uint8
        assert numbered(9, labels=False)[4].keys() == {"pixel_values"}


class TestFingerprint:
    def test_the_same_images_have_the_same_fingerprint(self):
        assert numbered(9).fingerprint == numbered(9).fingerprint
        reordered = Images(numbered(9).pixels.to(memory_format=torch.channels_last), torch.arange(9))
        assert numbered(9).fingerprint == reordered.fingerprint

    def test_every_change_shows(self):
        pixel, label = numbered(9), numbered(9)
        pixel.pixels[8, 0, 1, 1] += 1
        label.labels[5] = 0
        flat = Images(numbered(9).pixels.view(9, 1, 1, 4), torch.arange(9))
        stores = [numbered(9), numbered(8), numbered(9, labels=False), pixel, label, flat]
        assert len({store.fingerprint for store in stores}) == len(stores)

    def test_large_stores_are_sampled_evenly(self):
        images = Images(torch.zeros(4096, 1, 1, 1, dtype=torch.uint8))
        before = images.fingerprint
        images.pixels[1] = 1
        assert images.fingerprint == before
        images.pixels[4092] = 1
        assert images.fingerprint != before


class TestPairedSampler:
    def test_every_image_comes_once_per_turn(self):
        draws = list(PairedSampler((12, 30), (4, 6), steps_per_epoch=15, seed=3))
        labeled = np.array([draw.labeled for draw in draws]).reshape(5, 12)
        unlabeled = np.array([draw.unlabeled for draw in draws]).reshape(3, 30)
        assert (np.sort(labeled) == np.arange(12)).all()
        assert (np.sort(unlabeled) == np.arange(30)).all()
        assert len({tuple(turn) for turn in labeled}) == 5

    @pytest.mark.parametrize("batch_sizes", [(5, 35), (4, 2), (25, 3), (1, 100)])
    def test_any_batch_sizes_cut_the_same_stream(self, batch_sizes):
        draws = list(PairedSampler((10, 33), batch_sizes, steps_per_epoch=40, seed=3))
        for stream, (size, name) in enumerate([(10, "labeled"), (33, "unlabeled")]):
            rows = [row for draw in draws for row in getattr(draw, name)]
            turns = [
                np.random.default_rng([3, stream, turn]).permutation(size)
                for turn in range(1 + len(rows) // size)
            ]
            assert rows == np.concatenate(turns)[: 40 * batch_sizes[stream]].tolist()

    def test_a_draw_depends_on_seed_and_step_alone(self):
        whole = list(PairedSampler((10, 33), (3, 7), steps_per_epoch=20, seed=3))
        epochs = PairedSampler((10, 33), (3, 7), steps_per_epoch=5, seed=3)
        for epoch in (2, 0, 3, 1):
            epochs.set_epoch(epoch)
            assert list(epochs) == whole[5 * epoch : 5 * epoch + 5]
        assert [draw.number for draw in whole] == list(range(20))
        assert list(PairedSampler((10, 33), (3, 7), steps_per_epoch=20, seed=4)) != whole

    def test_two_ranks_see_what_one_sees_with_twice_the_batch(self):
        ranks = [PairedSampler((10, 33), (3, 7), 6, seed=5, rank=rank, world=2) for rank in (0, 1)]
        alone = PairedSampler((10, 33), (6, 14), 6, seed=5)
        for sampler in (*ranks, alone):
            sampler.set_epoch(2)
        steps = []
        for first, second, both in zip(*ranks, alone, strict=True):
            assert first.labeled + second.labeled == both.labeled
            assert first.unlabeled + second.unlabeled == both.unlabeled
            steps += [first.number, second.number]
        assert steps == list(range(24, 36))

    @pytest.mark.parametrize("unlabeled_size", [0, 33])
    def test_the_unlabeled_stream_may_be_absent(self, unlabeled_size):
        draws = list(PairedSampler((10, unlabeled_size), (3, 0), steps_per_epoch=4))
        assert [draw.unlabeled for draw in draws] == [[]] * 4
        assert len(draws[0].labeled) == 3


class TestPairedLoader:
    def test_a_batch_holds_the_rows_of_its_draw(self):
        batches = list(loader())
        draws = list(PairedSampler((10, 50), (3, 7), 5, seed=1))
        assert len(batches) == len(loader()) == 5
        for batch, draw in zip(batches, draws, strict=True):
            assert batch["pixel_values"][:, 0, 0, 0].tolist() == batch["labels"].tolist() == draw.labeled
            assert (
                batch["unlabeled"][:, 0, 0, 0].tolist() == batch["unlabeled_index"].tolist() == draw.unlabeled
            )
            assert batch["step"] == draw.number
            assert batch["pixel_values"].dtype == batch["unlabeled"].dtype == torch.uint8
            assert batch["labels"].dtype == batch["unlabeled_index"].dtype == torch.int64

    def test_labels_of_unlabeled_images_stay_inside(self):
        secret = Images(numbered(50).pixels, torch.full((50,), 77))
        batch = next(iter(loader(unlabeled=secret)))
        assert batch.keys() == {"pixel_values", "labels", "step", "unlabeled", "unlabeled_index"}
        assert all(77 not in np.asarray(values) for values in batch.values())

    def test_without_an_unlabeled_store_batches_are_labeled_only(self):
        batch = next(iter(loader(unlabeled=None, batch_sizes=(3, 0))))
        assert batch.keys() == {"pixel_values", "labels", "step"}

    def test_a_new_epoch_goes_on_where_the_last_one_ended(self):
        parts = loader()
        first = list(parts)
        parts.set_epoch(1)
        assert_same_batches([*first, *parts], loader(steps_per_epoch=10))

    def test_skipped_batches_leave_the_tail(self):
        skipped = skip_first_batches(loader(), 2)
        assert_same_batches(skipped, list(loader())[2:])
        skipped.batch_sampler.batch_sampler.set_epoch(1)  # as the Trainer does it
        assert_same_batches(skipped, list(loader(steps_per_epoch=10))[7:])

    @pytest.mark.parametrize("persistent_workers", [False, True])
    def test_workers_change_nothing(self, persistent_workers):
        alone, helped = loader(), loader(num_workers=2, persistent_workers=persistent_workers)
        for epoch in (0, 1):
            alone.set_epoch(epoch)
            helped.set_epoch(epoch)
            assert_same_batches(alone, helped)
        assert_same_batches(skip_first_batches(alone, 2), skip_first_batches(helped, 2))

    def test_the_global_generator_is_left_alone(self):
        before = torch.get_rng_state()
        list(loader())
        assert torch.equal(torch.get_rng_state(), before)


class TestGeneratorFor:
    def test_the_seed_is_that_of_the_seed_sequence(self):
        assert zlib.crc32(b"weak") == WEAK
        low, high = np.random.SeedSequence([1, 2, 3, WEAK]).generate_state(2, np.uint32).tolist()
        assert generator_for(1, 2, 3, "weak").initial_seed() == low + (high << 32) == SEED

    def test_each_key_counts(self):
        keys = [
            (1, 2, 3, "weak"),
            (0, 2, 3, "weak"),
            (1, 0, 3, "weak"),
            (1, 2, 0, "weak"),
            (1, 2, 3, "strong"),
        ]
        numbers = {tuple(torch.rand(5, generator=generator_for(*key)).tolist()) for key in keys * 2}
        assert len(numbers) == len(keys)


class TestBadInput:
    """Each sentence says what was found, what was expected and what to do."""

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"batch_sizes": (0, 7)}, "The labeled batch size is 0, but expected 1 or more: raise it."),
            ({"batch_sizes": (3, -1)}, "The unlabeled batch size is -1, but expected 0 or more: raise it."),
            (
                {"steps_per_epoch": 0},
                "There are 0 steps per epoch, but expected 1 or more: raise the number.",
            ),
            (
                {"labeled": numbered(0)},
                "The labeled set is empty, but each batch takes 3 of its images: add images.",
            ),
            (
                {"unlabeled": None},
                "The unlabeled set is empty, but each batch takes 7 of its images: "
                "add images or set the unlabeled batch size to 0.",
            ),
            (
                {"labeled": numbered(9, labels=False)},
                "The labeled images have no labels, but each needs one: give labels to Images.",
            ),
            (
                {"unlabeled": Images(torch.zeros(9, 1, 3, 2, dtype=torch.uint8))},
                "Unlabeled images are [3, 2] and labeled ones [2, 2], but expected the same: build both by "
                "Images.from_dataset with the same size, or embed both with the same network.",
            ),
        ],
    )
    def test_of_the_loader(self, changes, sentence):
        with pytest.raises(ValueError) as error:  # noqa: PT011, the whole sentence is compared
            loader(**changes)
        assert str(error.value) == sentence

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (
                (torch.zeros(4, 3, 2, 2),),
                "Pixels are torch.float32 of shape [4, 3, 2, 2], but expected torch.uint8 of shape [N, C, H, "
                "W]: scale them to 0..255 and convert them with .to(torch.uint8).",
            ),
            (
                (numbered(4).pixels, torch.zeros(4)),
                "Labels are torch.float32 of shape [4], but expected torch.int64 of shape [4]: "
                "give one class number per image.",
            ),
            (
                (numbered(4).pixels, torch.tensor([0, 1, 2, 0]), ["cat", "dog"]),
                "Label 2 in row 2 is outside 0..1, the range of the 2 class names: correct the label or the "
                "names.",
            ),
            (
                (numbered(4).pixels, torch.tensor([0, -1, 1, 0]), ["cat", "dog"]),
                "Label -1 in row 1 is outside 0..1, the range of the 2 class names: correct the label or the "
                "names.",
            ),
        ],
    )
    def test_of_the_store(self, arguments, sentence):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            Images(*arguments)
        assert str(error.value) == sentence

    def test_images_of_more_than_8_bits(self):
        deep = PIL.Image.fromarray(noise(5, 6).astype(np.uint16) * 200)
        with pytest.raises(
            ValueError, match=r"row 1 has mode 'I;16', but expected 8 bits .* scale it to 0..255"
        ):
            Images.from_dataset(split_of([PIL.Image.fromarray(noise(5, 6)), deep]), (5, 6))

    def test_labels_that_are_words(self):
        split = split_of([PIL.Image.fromarray(noise(5, 6))], ["cat"], datasets.Value("string"))
        with pytest.raises(
            ValueError, match=r"'label' holds .*string.*: convert it with .*class_encode_column\('label'\)"
        ):
            Images.from_dataset(split, (5, 6))

    @pytest.mark.parametrize(
        ("value", "reason"),
        [(None, "the row is empty"), ({"bytes": b"GIF89a", "path": None}, "cannot identify .*")],
    )
    def test_rows_without_an_image(self, value, reason):
        split = split_of([PIL.Image.fromarray(noise(5, 6)), value])
        with pytest.raises(
            ValueError, match=rf"^The image in row 1 cannot be read \({reason}\): replace it or remove"
        ):
            Images.from_dataset(split, (5, 6))

    def test_a_column_that_holds_no_images(self):
        split = datasets.Dataset.from_dict({"image": ["a.png"]})
        with pytest.raises(
            ValueError, match=r"'image' holds .*string.*: convert it with .*cast_column\('image', data"
        ):
            Images.from_dataset(split, (5, 6))
