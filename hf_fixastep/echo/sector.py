"""The part of an ultrasound screen that shows the heart: text, scales and menus around it are made black."""

from __future__ import annotations

import numpy as np
import PIL.Image
import PIL.ImageDraw
from scipy import ndimage
from scipy.spatial import ConvexHull, QhullError


SMALLEST = 0.02  # share of a frame that a sector fills at least
CHANGE = 3  # grey levels; less is noise of the compression


def find_sector(frames: np.ndarray) -> np.ndarray | None:
    """Where the ultrasound sector is, as a mask [H, W]; None if nothing looks like one.

    A sector is dense: small windows in it are full of speckle, or, in a clip, of pixels that change. Strokes
    of letters, curves and rulers are thin, and filled boxes are flat and still, so few of their windows are
    full. The convex hull of the large dense patches is the sector, because chambers and shadows without echo
    are part of it. A still of very low gain may lose some of its dark side.

    Args:
        frames: uint8 [T, H, W]; a still has one.
    """
    side = max(3, min(frames.shape[1:]) // 32) | 1  # of the window: wider than two strokes of a letter
    moving = dense(np.ptp(frames, axis=0) > 2 * CHANGE, side)
    speckle = dense(is_speckle(frames[len(frames) // 2]), side)
    patches = sorted_patches(speckle | moving, moving if moving.mean() >= SMALLEST else speckle)
    sector = np.zeros(frames.shape[1:], bool)
    for patch in patches:
        wider = hull(sector | patch)
        # a menu below the sector fills less than that of what lies between
        if not sector.any() or (patch & ~sector).sum() >= 0.3 * (wider & ~sector).sum():
            sector = wider
    return grow(sector, side) if sector.mean() >= SMALLEST else None


def is_speckle(frame: np.ndarray) -> np.ndarray:
    """Pixels that are not black and differ from a neighbour."""
    values = frame.astype(np.int16)
    flat = ndimage.maximum_filter(values, 3) == ndimage.minimum_filter(values, 3)
    return (values > np.percentile(values, 5) + CHANGE) & ~flat


def dense(pixels: np.ndarray, side: int) -> np.ndarray:
    """Pixels with seven tenths of the window around them in the mask."""
    return ndimage.uniform_filter(pixels.astype(np.float32), side, mode="constant") > 0.7


def sorted_patches(mask: np.ndarray, evidence: np.ndarray) -> list[np.ndarray]:
    """The patches of a mask from the one with the most evidence to those with a twentieth of it."""
    labels, count = ndimage.label(mask)
    sizes = ndimage.sum_labels(evidence, labels, range(count + 1))
    order = np.argsort(-sizes, kind="stable")
    return [labels == label for label in order if label and sizes[label] > sizes.max() / 20]


def hull(mask: np.ndarray) -> np.ndarray:
    rows, columns = np.nonzero(mask)
    points = np.stack([columns, rows], axis=1)
    try:
        corners = points[ConvexHull(points).vertices]
    except QhullError:  # all on one line
        return mask
    picture = PIL.Image.new("1", mask.shape[::-1])
    PIL.ImageDraw.Draw(picture).polygon([(int(x), int(y)) for x, y in corners], fill=1)
    return np.asarray(picture) | mask


def grow(mask: np.ndarray, side: int) -> np.ndarray:
    """A little wider, for windows are not full at the border of a sector."""
    return ndimage.maximum_filter(mask, side)
