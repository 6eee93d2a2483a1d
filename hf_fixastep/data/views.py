"""Weak and strong views of whole `uint8` batches on any device, with the pixels that Pillow would give.

Chance lives in `draw_weak` and `draw_strong`, which run on the host and return a plan. All the rest carries a
plan out on the device of the images, without random numbers and without waiting for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


VIEWS = ("weak", "weak_2", "strong")


@dataclass(frozen=True)
class WeakPlan:
    """What happens to each image of a weak view; all on the host."""

    flips: Tensor  # [N] bool
    tops: Tensor  # [N] rows by which the crop is moved, negative into the upper padding
    lefts: Tensor  # [N] the same for columns


@dataclass(frozen=True)
class StrongPlan:
    """What happens to each image of a strong view; all on the host, one row per round of operations."""

    weak: WeakPlan
    operations: Tensor  # [2, N] indices into OPERATIONS
    levels: Tensor  # [2, N] 1 to 9
    signs: Tensor  # [2, N] -1 or 1; only the geometric operations look at it
    applied: Tensor  # [2, N] bool
    centers: Tensor  # [N, 2] y and x of the middle of the grey box, in pixels


@dataclass(frozen=True)
class Views:
    """Makes normalized float views of `uint8` batches; all chance comes from the generator that is passed in.

    A weak view is a flip and a crop. A strong one is that, two operations of RandAugment and Cutout, in the
    variant of the official code of Fix-A-Step: levels 1 to 9, each operation carried out half of the time.
    Images are [N, C, H, W] with a channel per entry of `mean`, or one grey channel that is repeated at the
    end. Weak and strong views are contiguous (channels_last would cost a copy), plain ones keep the memory
    format of the images.

    Args:
        mean: per output channel, of images in [0, 1].
        std: per output channel, of images in [0, 1].
        flip: mirror half of the images; switch it off for digits, text and wherever left and right differ.
        pad: reflected border of the random crop, as a share of each side.
        cutout: side of the grey box, below 1 as a share of the shorter side, otherwise in pixels; 0 is no
            box. The official code has 16 pixels for images of 32 pixels and of 112.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool = True
    pad: float = 0.125
    cutout: float = 0.5

    def __post_init__(self) -> None:
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean):
            raise ValueError(
                f"Found {len(self.mean)} values in mean and {len(self.std)} in std, expected 1 or 3 in both. "
                "Give one value per channel that the model takes."
            )

    def __call__(self, names: Iterable[str], images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """The named views, drawn in the order of VIEWS, whatever the order of the names."""
        names = set(names)
        if unknown := sorted(names - set(VIEWS)):
            raise ValueError(f"Unknown views {', '.join(unknown)}. Choose from {', '.join(VIEWS)}.")
        make = {"weak": self.weak, "weak_2": self.weak, "strong": self.strong}
        return {name: make[name](images, generator) for name in VIEWS if name in names}

    def plain(self, images: Tensor) -> Tensor:
        """The images as they are, for evaluation."""
        self._check(images)
        return self._normalize(images)

    def weak(self, images: Tensor, generator: torch.Generator) -> Tensor:
        self._check(images)
        return self.carry_out_weak(images, self.draw_weak(images.shape, generator))

    def strong(self, images: Tensor, generator: torch.Generator) -> Tensor:
        self._check(images)
        return self.carry_out_strong(images, self.draw_strong(images.shape, generator))

    def carry_out_weak(self, images: Tensor, plan: WeakPlan) -> Tensor:
        return self._normalize(crop(images, plan))

    def carry_out_strong(self, images: Tensor, plan: StrongPlan) -> Tensor:
        images = crop(images, plan.weak)
        operations = plan.operations.where(plan.applied, OPERATIONS.index("identity"))
        for each in zip(operations, plan.levels, plan.signs, strict=True):
            images = _apply(images, *each)
        return self._normalize(cut_out(images, plan.centers, self.box_side(*images.shape[2:])))

    def box_side(self, height: int, width: int) -> int:
        """Pixels of the grey box."""
        return int(self.cutout * min(height, width)) if self.cutout < 1 else int(self.cutout)

    def draw_weak(self, shape: torch.Size, generator: torch.Generator) -> WeakPlan:
        """Flips and crop offsets for a batch of this shape."""
        count, _, height, width = shape
        flips = torch.rand(count, generator=generator) < 0.5
        # Reflection cannot reach further than the far edge.
        rows, columns = (min(int(self.pad * side), side - 1) for side in (height, width))
        tops = torch.randint(-rows, rows + 1, (count,), generator=generator)
        lefts = torch.randint(-columns, columns + 1, (count,), generator=generator)
        return WeakPlan(flips & self.flip, tops, lefts)

    def draw_strong(self, shape: torch.Size, generator: torch.Generator) -> StrongPlan:
        """For each image a weak plan of its own, two operations with replacement, the centre of the box."""
        count, _, height, width = shape
        rounds = (2, count)
        return StrongPlan(
            weak=self.draw_weak(shape, generator),
            operations=torch.randint(len(OPERATIONS), rounds, generator=generator),
            levels=torch.randint(1, 10, rounds, generator=generator),
            signs=torch.randint(2, rounds, generator=generator) * 2 - 1,
            applied=torch.rand(rounds, generator=generator) < 0.5,
            centers=torch.rand(count, 2, dtype=torch.float64, generator=generator)
            * torch.tensor([height, width]),
        )

    def _check(self, images: Tensor) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, len(self.mean)):
            raise ValueError(
                f"Found {images.dtype} images of shape {list(images.shape)}, expected torch.uint8 [N, C, H, "
                f"W] with C either 1 or {len(self.mean)}. Convert the images, or give mean and std for their "
                "channels."
            )

    def _normalize(self, images: Tensor) -> Tensor:
        mean, std = torch.tensor([self.mean, self.std], dtype=torch.float64)[:, :, None, None]
        scale, shift = _send(torch.stack([1 / (255 * std), -mean / std]).float(), images)
        return images.expand(-1, len(self.mean), -1, -1).float().mul_(scale).add_(shift)


def crop(images: Tensor, plan: WeakPlan) -> Tensor:
    """Flip, pad by reflection and crop back to the size of the images."""
    count, channels, height, width = images.shape
    flips, tops, lefts = _send(torch.stack([plan.flips, plan.tops, plan.lefts]), images)[:, :, None]
    rows = _reflect(tops + torch.arange(height, device=images.device), height)
    columns = _reflect(lefts + torch.arange(width, device=images.device), width)
    columns = torch.where(flips == 1, width - 1 - columns, columns)
    # Whole rows first, then columns by a small index that is repeated: faster than one index of all pixels.
    planes = torch.arange(count * channels, device=images.device).view(count, channels, 1)
    moved = images.reshape(-1, width).index_select(0, (planes * height + rows[:, None]).flatten())
    return moved.view(images.shape).gather(3, columns[:, None, None].expand(images.shape))


def cut_out(images: Tensor, centers: Tensor, side: int) -> Tensor:
    """Draw a grey box into each image: one pixel more than `side`, cut only by the right and lower edges.

    Args:
        images: uint8 [N, C, H, W].
        centers: y and x of the middle of each box, [N, 2].
        side: pixels from one edge to the other; 0 is no box.
    """
    if not side:
        return images
    corners = (centers - side / 2).clamp(min=0).long()
    inside = []
    for size, corner in zip(images.shape[2:], _send(corners.T[:, :, None], images), strict=True):
        position = torch.arange(size, device=images.device)
        inside.append(((position >= corner) & (position <= corner + side)).to(torch.uint8))
    rows, columns = inside
    box = (rows[:, :, None] * columns[:, None])[:, None]
    return (images * (1 - box)).add_(127 * box)  # three times as fast as masked_fill on a CPU


def apply_op(images: Tensor, name: str, level: int, sign: int = 1) -> Tensor:
    """The images after one operation, for a look at what it does.

    Args:
        images: uint8 [N, C, H, W], grey or RGB.
        name: one of OPERATIONS.
        level: 1 to 9.
        sign: direction of the geometric operations, -1 or 1.
    """
    if name not in OPERATIONS:
        raise ValueError(f"Unknown operation {name!r}. Choose one of {', '.join(OPERATIONS)}.")
    plan = (torch.full((len(images),), number) for number in (OPERATIONS.index(name), level, sign))
    return _apply(images.contiguous(), *plan)


def _apply(images: Tensor, operations: Tensor, levels: Tensor, signs: Tensor) -> Tensor:
    """Carry out one operation per image, sorted by operation, so that each kernel sees its own together."""
    order = operations.argsort()
    operations, levels, signs = operations[order], levels[order], signs[order]
    strengths = STRENGTHS[operations, levels] * torch.where(operations >= GEOMETRIC, signs, 1)
    sizes = torch.bincount(KINDS[operations], minlength=len(KERNELS)).tolist()
    groups = (
        part.split(sizes) for part in (images.index_select(0, _send(order, images)), operations, strengths)
    )
    done = [kernel(*group) for kernel, *group in zip(KERNELS, *groups, strict=True) if len(group[0])]
    return torch.cat(done).index_select(0, _send(order.argsort(), images))


# Kernels: uint8 images [n, C, H, W], and on the host their operations and strengths [n], in the order of
# OPERATIONS.


def _identity(images: Tensor, operations: Tensor, strengths: Tensor) -> Tensor:
    return images


def _tone(images: Tensor, operations: Tensor, strengths: Tensor) -> Tensor:
    """Map values by a table of 256 entries per image and channel."""
    sizes = torch.bincount(operations, minlength=len(TABLES)).tolist()
    strengths = _send(strengths.float()[:, None, None], images)
    groups = zip(TABLES, images.split(sizes), strengths.split(sizes), strict=True)
    tables = [
        table(some, strength).expand(-1, images.shape[1], -1) for table, some, strength in groups if len(some)
    ]
    return torch.cat(tables).gather(2, images.flatten(2).long()).view_as(images)


def _color(images: Tensor, operations: Tensor, strengths: Tensor) -> Tensor:
    return _blend(_grey(images), images, _send(strengths.float(), images)[:, None, None, None])


def _sharpness(images: Tensor, operations: Tensor, strengths: Tensor) -> Tensor:
    """Blend with a smoothed copy: weight 5 in the middle, 1 around it; the border stays as it is."""
    values = images.float()
    across = values[..., :-2] + values[..., 1:-1] + values[..., 2:]
    center = values[..., 1:-1, 1:-1]
    total = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :] + 4 * center
    smooth = (total / 13 + 0.5).floor()  # thirteenths are never halfway, so rounding is safe in float32
    images[..., 1:-1, 1:-1] = _blend(smooth, center, _send(strengths.float(), images)[:, None, None, None])
    return images


def _geometry(images: Tensor, operations: Tensor, strengths: Tensor) -> Tensor:
    """Fetch each pixel from where its image's matrix points, in 16.16 fixed point; outside it is black."""
    height, width = images.shape[2:]
    names = (OPERATIONS[operation] for operation in operations.tolist())
    matrices = [_matrix(*each, height, width) for each in zip(names, strengths.tolist(), strict=True)]
    xx, xy, x0, yx, yy, y0 = _send(torch.tensor(matrices, dtype=torch.int32).T[:, :, None, None], images)
    x = torch.arange(width, dtype=torch.int32, device=images.device)
    y = torch.arange(height, dtype=torch.int32, device=images.device)[:, None]
    column = (xx * x + xy * y + x0) >> 16
    row = (yx * x + yy * y + y0) >> 16
    near_column, near_row = column.clamp(0, width - 1), row.clamp(0, height - 1)
    index = (near_row * width + near_column).long().flatten(1)[:, None].expand(-1, images.shape[1], -1)
    inside = (column == near_column) & (row == near_row)
    return images.flatten(2).gather(2, index).view_as(images) * inside[:, None]


@lru_cache(maxsize=4096)
def _matrix(name: str, strength: float, height: int, width: int) -> tuple[int, ...]:
    """Source x is (a, b, c) . (x, y, 1), source y (d, e, f) . (x, y, 1), at pixel centres, times 65536."""
    a, b, c, d, e, f = 1.0, 0.0, 0.0, 0.0, 1.0, 0.0
    if name == "rotate":
        angle = -math.radians(strength % 360)
        a = e = round(math.cos(angle), 15)
        b, d = round(math.sin(angle), 15), round(-math.sin(angle), 15)
        c = a * (-width / 2) + b * (-height / 2) + width / 2
        f = d * (-width / 2) + e * (-height / 2) + height / 2
    elif name == "shear_x":
        b = strength
    elif name == "shear_y":
        d = strength
    elif name == "translate_x":
        c = int(strength * width)
    else:
        f = int(strength * height)
    exact = (a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5)
    return tuple(math.floor(number * 65536 + 0.5) for number in exact)


# Tables: uint8 images [n, C, H, W] and their strengths [n, 1, 1] to uint8 [n, C or 1, 256].


def _brightness(images: Tensor, factors: Tensor) -> Tensor:
    return _blend(torch.zeros_like(factors), _ramp(images), factors)


def _contrast(images: Tensor, factors: Tensor) -> Tensor:
    grey = _grey(images).flatten(1)
    pixels = grey.shape[1]
    mean = (2 * grey.sum(1) + pixels) // (2 * pixels)  # rounded, halves up
    return _blend(mean[:, None, None], _ramp(images), factors)


def _posterize(images: Tensor, bits: Tensor) -> Tensor:
    lost = (8 - bits).int()
    return ((_ramp(images).int() >> lost) << lost).to(torch.uint8)


def _solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    ramp = _ramp(images)
    return torch.where(ramp < thresholds, ramp, 255 - ramp)


def _autocontrast(images: Tensor, unused: Tensor) -> Tensor:
    # Float64 is what Pillow computes in. Apple's devices have none: a few of their pixels are off by one.
    precise = torch.float32 if images.device.type == "mps" else torch.float64
    low, high = (side.to(precise) for side in images.flatten(2).aminmax(dim=2, keepdim=True))
    ramp = _ramp(images).to(precise)
    # A Python 255 would multiply by the reciprocal: off by one ulp.
    scale = torch.full_like(low, 255) / (high - low)
    stretched = (ramp * scale + -low * scale).clamp(0, 255)
    return torch.where(high > low, stretched, ramp).to(torch.uint8)


def _equalize(images: Tensor, unused: Tensor) -> Tensor:
    pixels = images.flatten(2).long()
    histogram = pixels.new_zeros(*images.shape[:2], 256).scatter_add_(
        2, pixels, pixels.new_ones(1).expand_as(pixels)
    )
    brightest = histogram.gather(2, pixels.amax(2, keepdim=True))
    step = (pixels.shape[2] - brightest) // 255
    table = (step // 2 + histogram.cumsum(2) - histogram) // step.clamp(min=1)
    return torch.where(step > 0, table.clamp(max=255), _ramp(images)).to(torch.uint8)


def _blend(base: Tensor, images: Tensor, factors: Tensor) -> Tensor:
    """Float32 and cut off, not rounded, as Pillow does it."""
    return (base + factors * (images.float() - base)).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Luma in integers, [n, 1, H, W]."""
    if images.shape[1] == 1:
        return images.int()
    red, green, blue = images.int().split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


def _ramp(images: Tensor) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=images.device)


def _reflect(position: Tensor, size: int) -> Tensor:
    return size - 1 - (size - 1 - position.abs()).abs()


def _send(tensor: Tensor, images: Tensor) -> Tensor:
    return tensor.to(images.device, non_blocking=True)


def _factor(level: int) -> float:
    return level * 0.9 / 10 + 0.05


def _share(level: int) -> float:
    """Multiplied, then divided, like the official code: 9 * 0.3 / 10 of 100 pixels is 26, 9 * 0.03 is 27."""
    return level * 0.3 / 10


# The parameter of each operation at a level: an enhancement factor, bits kept, a threshold, degrees, or a
# share of the image. Ordered by kind, as KERNELS are; the order within the first kind is that of TABLES.
STRENGTH_AT: dict[str, Callable[[int], float]] = {
    "brightness": _factor,
    "contrast": _factor,
    "posterize": lambda level: int(level * 4 / 10) + 4,
    "solarize": lambda level: 256 - int(level * 256 / 10),
    "autocontrast": lambda level: 0,
    "equalize": lambda level: 0,
    "color": _factor,
    "sharpness": _factor,
    "rotate": lambda level: int(level * 30 / 10),
    "shear_x": _share,
    "shear_y": _share,
    "translate_x": _share,
    "translate_y": _share,
    "identity": lambda level: 0,
}
OPERATIONS = tuple(STRENGTH_AT)
GEOMETRIC = OPERATIONS.index("rotate")  # from here on the sign matters
STRENGTHS = torch.tensor(
    [[float(at(level)) for level in range(10)] for at in STRENGTH_AT.values()], dtype=torch.float64
)
TABLES = (_brightness, _contrast, _posterize, _solarize, _autocontrast, _equalize)
KERNELS = (_tone, _color, _sharpness, _geometry, _identity)
KINDS = torch.tensor([0] * len(TABLES) + [1, 2] + [3] * 5 + [4])  # of each operation
