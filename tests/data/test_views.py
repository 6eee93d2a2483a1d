from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from hf_fixastep.data.views import OPERATIONS, VIEWS, Views, WeakPlan, apply_op, crop, cut_out


SIZES = [(32, 32), (8, 8), (28, 20), (112, 112)]
SIGNED = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
RAW = Views(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))  # times 255 the views are pixels again


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_images(count: int, channels: int, height: int, width: int) -> Tensor:
    """Noise of many ranges; the first image is constant, the second has two values."""
    generator = seeded(count + height)
    low, span = torch.rand(2, count, channels, 1, 1, generator=generator)
    noise = torch.rand(count, channels, height, width, generator=generator) ** 2
    images = ((low + noise * span).clamp(max=1) * 255).to(torch.uint8)
    images[0] = 77
    images[1] = (images[1] > images[1].float().mean()) * 255
    return images


def to_pixels(view: Tensor) -> Tensor:
    return (view * 255).round().to(torch.uint8)


def to_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy())


def from_pillow(image: Image.Image) -> Tensor:
    array = torch.from_numpy(np.array(image))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix)


def pillow_operation(image: Image.Image, name: str, level: int, sign: int) -> Image.Image:
    factor, share = 0.09 * level + 0.05, sign * 0.03 * level
    width, height = image.size
    return {
        "autocontrast": lambda: ImageOps.autocontrast(image),
        "brightness": lambda: ImageEnhance.Brightness(image).enhance(factor),
        "color": lambda: ImageEnhance.Color(image).enhance(factor),
        "contrast": lambda: ImageEnhance.Contrast(image).enhance(factor),
        "equalize": lambda: ImageOps.equalize(image),
        "identity": lambda: image,
        "posterize": lambda: ImageOps.posterize(image, int(0.4 * level) + 4),
        "rotate": lambda: image.rotate(sign * 3 * level),
        "sharpness": lambda: ImageEnhance.Sharpness(image).enhance(factor),
        "shear_x": lambda: affine(image, (1, share, 0, 0, 1, 0)),
        "shear_y": lambda: affine(image, (1, 0, 0, share, 1, 0)),
        "solarize": lambda: ImageOps.solarize(image, 256 - int(25.6 * level)),
        "translate_x": lambda: affine(image, (1, 0, int(share * width), 0, 1, 0)),
        "translate_y": lambda: affine(image, (1, 0, 0, 0, 1, int(share * height))),
    }[name]()


def reference_crop(images: Tensor, plan: WeakPlan, rows: int, columns: int) -> np.ndarray:
    """Flip, pad, slice, one image after the other; `rows` and `columns` are the padding."""
    height, width = images.shape[2:]
    views = []
    for image, flip, top, left in zip(
        images.numpy(), plan.flips, plan.tops.tolist(), plan.lefts.tolist(), strict=True
    ):
        image = image[..., ::-1] if flip else image
        padded = np.pad(image, ((0, 0), (rows, rows), (columns, columns)), mode="reflect")
        views.append(padded[:, rows + top : rows + top + height, columns + left : columns + left + width])
    return np.stack(views)


def reference_box(image: Tensor, center: Tensor, side: int) -> Tensor:
    """The box pixel by pixel, in the words of the specification."""
    height, width = image.shape[1:]
    y0, x0 = (int(max(0, middle - side / 2)) for middle in center.tolist())
    y1, x1 = min(height, y0 + side), min(width, x0 + side)
    image = image.clone()
    for y in range(height):
        for x in range(width):
            if y0 <= y <= y1 and x0 <= x <= x1:
                image[:, y, x] = 127
    return image


# Operations


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_gives_pillows_pixels_at_every_level_and_sign(
    name: str, channels: int, size: tuple[int, int]
) -> None:
    images = make_images(6 if max(size) > 32 else 16, channels, *size)
    for level in range(1, 10):
        for sign in (-1, 1) if name in SIGNED else (1,):
            found = apply_op(images, name, level, sign)
            expected = [
                from_pillow(pillow_operation(to_pillow(image), name, level, sign)) for image in images
            ]
            assert torch.equal(found, torch.stack(expected)), f"level {level}, sign {sign}"


def test_autocontrast_gives_pillows_pixels_for_any_darkest_and_brightest_value() -> None:
    pairs = [(low, high) for low in range(0, 255, 11) for high in range(low + 1, 256, 3)]
    images = torch.stack([torch.arange(256).clamp(*pair).view(1, 16, 16) for pair in pairs]).to(torch.uint8)
    expected = torch.stack([from_pillow(ImageOps.autocontrast(to_pillow(image))) for image in images])
    assert torch.equal(apply_op(images, "autocontrast", 1), expected)


def test_unknown_operation_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Unknown operation 'invert'\. Choose one of .*solarize"):
        apply_op(make_images(2, 3, 8, 8), "invert", 1)


# Weak views


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("size", "pad", "padding"),
    [
        ((32, 32), 0.125, (4, 4)),
        ((112, 112), 0.125, (14, 14)),
        ((28, 20), 0.125, (3, 2)),
        ((9, 8), 0.5, (4, 4)),
        ((8, 11), 2.0, (7, 10)),
        ((8, 8), 0.0, (0, 0)),
    ],
)
def test_weak_view_is_flip_then_reflect_pad_then_crop(
    size: tuple[int, int], pad: float, padding: tuple[int, int], channels: int
) -> None:
    images = make_images(64, channels, *size)
    views = Views(mean=(0.0,) * 3, std=(1.0,) * 3, pad=pad)
    plan = views.draw_weak(images.shape, seeded(3))
    found = to_pixels(views.weak(images, seeded(3)))
    assert np.array_equal(found.numpy(), np.broadcast_to(reference_crop(images, plan, *padding), found.shape))


def test_chance_is_even() -> None:
    """All bounds are five standard deviations."""
    plan = RAW.draw_strong(torch.Size((28_000, 3, 32, 16)), seeded())
    assert set(plan.weak.tops.tolist()) == set(range(-4, 5))
    assert set(plan.weak.lefts.tolist()) == {-2, -1, 0, 1, 2}
    assert plan.weak.flips.float().mean() == pytest.approx(0.5, abs=0.015)
    assert len(set(OPERATIONS)) == 14
    for operations, levels, signs, applied in zip(
        plan.operations, plan.levels, plan.signs, plan.applied, strict=True
    ):
        assert (operations.bincount(minlength=14) - 2000).abs().max() < 216
        assert levels.bincount(minlength=10)[0] == 0
        assert (levels.bincount(minlength=10)[1:] - 28_000 / 9).abs().max() < 263
        assert applied.float().mean() == pytest.approx(0.5, abs=0.015)
        assert signs.unique().tolist() == [-1, 1]
        assert signs.float().mean() == pytest.approx(0, abs=0.03)
    centers = plan.centers / torch.tensor([32, 16])
    for share in (0.01, 0.1, 0.5, 0.9, 0.99):
        assert (centers < share).double().mean(0).tolist() == pytest.approx([share, share], abs=0.015)
    assert centers.min() >= 0
    assert centers.max() <= 1


def test_without_flip_no_image_is_flipped() -> None:
    images = make_images(64, 3, 8, 8)
    views = Views(mean=RAW.mean, std=RAW.std, flip=False, pad=0.0)
    assert torch.equal(to_pixels(views.weak(images, seeded())), images)


# Strong views


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(32, 32), (28, 20)], ids=str)
def test_strong_view_is_pillow_carried_out_image_by_image(size: tuple[int, int], channels: int) -> None:
    images = make_images(400, channels, *size)
    plan = RAW.draw_strong(images.shape, seeded(5))
    side = min(size) // 2
    expected = []
    for index, image in enumerate(crop(images, plan.weak)):
        drawn = to_pillow(image)
        for turn in range(2):
            if plan.applied[turn, index]:
                name = OPERATIONS[plan.operations[turn, index]]
                drawn = pillow_operation(
                    drawn, name, int(plan.levels[turn, index]), int(plan.signs[turn, index])
                )
        y, x = (int(max(0, middle - side / 2)) for middle in plan.centers[index].tolist())
        drawn = drawn.copy()
        ImageDraw.Draw(drawn).rectangle((x, y, x + side, y + side), 127 if channels == 1 else (127, 127, 127))
        expected.append(from_pillow(drawn))
    found = to_pixels(RAW.strong(images, seeded(5)))
    assert torch.equal(found, torch.stack(expected).expand_as(found))


# Cutout


def test_box_equals_a_literal_loop_at_edges_and_elsewhere() -> None:
    images = torch.zeros(40, 3, 20, 28, dtype=torch.uint8)
    edges = torch.tensor(
        [[y, x] for y in (0.0, 4.9, 5.0, 19.99) for x in (0.0, 5.1, 27.99)], dtype=torch.float64
    )
    random = torch.rand(28, 2, generator=seeded(), dtype=torch.float64) * torch.tensor([20, 28])
    centers = torch.cat([edges, random])
    for side in (1, 9, 10, 40):
        expected = [reference_box(image, center, side) for image, center in zip(images, centers, strict=True)]
        assert torch.equal(cut_out(images, centers, side), torch.stack(expected))


@pytest.mark.parametrize(
    ("cutout", "size", "side"),
    [(0.5, (32, 32), 16), (0.5, (112, 112), 56), (0.5, (28, 20), 10), (16, (112, 112), 16)],
)
def test_cutout_is_a_share_of_the_shorter_side_below_one_and_pixels_above(
    cutout: float, size: tuple[int, int], side: int
) -> None:
    assert Views(mean=RAW.mean, std=RAW.std, cutout=cutout).box_side(*size) == side


def test_cutout_of_zero_draws_no_box() -> None:
    images = make_images(2, 3, 8, 8)
    assert torch.equal(cut_out(images, torch.tensor([[4.0, 4.0], [0.0, 0.0]]), 0), images)


# All views


def test_same_seed_gives_same_views_and_another_seed_others() -> None:
    images = make_images(16, 3, 32, 32)
    first, again, other = (RAW(VIEWS, images, seeded(seed)) for seed in (7, 7, 8))
    for name in VIEWS:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize("name", VIEWS)
def test_copies_of_one_image_get_different_views(name: str) -> None:
    images = make_images(3, 3, 32, 32)[2:].repeat(64, 1, 1, 1)
    assert len(RAW([name], images, seeded())[name].unique(dim=0)) > 32


def test_views_are_drawn_one_after_the_other_whatever_the_order_of_their_names() -> None:
    images = make_images(8, 3, 32, 32)
    views, generator = RAW(VIEWS[::-1], images, seeded()), seeded()
    assert torch.equal(views["weak"], RAW.weak(images, generator))
    assert torch.equal(views["weak_2"], RAW.weak(images, generator))
    assert torch.equal(views["strong"], RAW.strong(images, generator))
    assert not torch.equal(views["weak"], views["weak_2"])
    assert RAW(["strong", "weak"], images, seeded()).keys() == {"weak", "strong"}


@pytest.mark.parametrize("name", VIEWS)
def test_grey_images_give_the_views_of_their_colour_copies(name: str) -> None:
    views = Views(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    grey = make_images(300, 1, 28, 20)
    colour = grey.expand(-1, 3, -1, -1).contiguous()
    assert torch.equal(views([name], grey, seeded(2))[name], views([name], colour, seeded(2))[name])


def test_plain_view_is_the_image_minus_mean_over_std() -> None:
    views = Views(mean=(0.5, 0.4, 0.3), std=(0.25, 0.1, 0.2))
    for values, expected in (([0, 51, 255], [-2, -2, 3.5]), ([51], [-1.2, -2, -0.5])):  # colour, grey
        view = views.plain(torch.tensor(values, dtype=torch.uint8).view(1, -1, 1, 1))
        assert view.dtype == torch.float32
        assert view.flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_normalized_like_plain_images(name: str) -> None:
    views = Views(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    images = make_images(8, 3, 8, 8)
    pixels = to_pixels(RAW([name], images, seeded())[name])
    assert torch.equal(views([name], images, seeded())[name], views.plain(pixels))


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_contiguous_and_do_not_depend_on_the_memory_format_of_the_images(name: str) -> None:
    images = make_images(8, 3, 28, 20)
    view = RAW([name], images.contiguous(memory_format=torch.channels_last), seeded())[name]
    assert view.is_contiguous()
    assert torch.equal(view, RAW([name], images, seeded())[name])


def test_views_never_read_the_device() -> None:
    # Holds no values: reading one is an error.
    images = torch.empty(448, 3, 32, 32, dtype=torch.uint8, device="meta")
    assert {view.device.type for view in RAW(VIEWS, images, seeded()).values()} == {"meta"}


def test_views_leave_the_images_and_the_global_random_state_alone() -> None:
    images = make_images(32, 3, 8, 8)
    before, state = images.clone(), torch.get_rng_state()
    RAW(VIEWS, images, seeded())
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_unknown_view_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"Unknown views medium\. Choose from weak, weak_2, strong\."):
        RAW(["weak", "medium"], make_images(2, 3, 8, 8), seeded())


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(2, 3, 8, 8),
        torch.zeros(3, 8, 8, dtype=torch.uint8),
        torch.zeros(2, 4, 8, 8, dtype=torch.uint8),
    ],
    ids=["float", "no batch", "four channels"],
)
def test_images_that_are_not_a_uint8_batch_are_refused(images: Tensor) -> None:
    for make in (
        RAW.plain,
        lambda images: RAW.weak(images, seeded()),
        lambda images: RAW.strong(images, seeded()),
    ):
        with pytest.raises(ValueError, match=r"expected torch\.uint8 \[N, C, H, W\]"):
            make(images)


@pytest.mark.parametrize(("mean", "std"), [((0.5,), (0.5,) * 3), ((0.5,) * 2, (0.5,) * 2)])
def test_mean_and_std_of_unlike_or_odd_length_are_refused(
    mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="expected 1 or 3 in both"):
        Views(mean=mean, std=std)
