"""What an image processor and a labeled set say about a training: size, views, class names."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import datasets

from hf_fixastep.data.features import Examples
from hf_fixastep.data.images import read_labels
from hf_fixastep.data.views import VIEWS, Views


def views_of(processor: Any, **settings: Any) -> tuple[tuple[int, int], Views]:
    """Image size and views as an image processor describes them; `settings` are further ones of the views."""
    if hasattr(processor, "data_config"):  # of timm
        data = processor.data_config
        return tuple(data["input_size"][1:]), Views(mean=data["mean"], std=data["std"], **settings)
    size = processor.crop_size if getattr(processor, "do_center_crop", None) else processor.size
    height = size.get("height") or size.get("shortest_edge")
    width = size.get("width") or size.get("shortest_edge")
    if not height or not width:
        raise ValueError(f"The image processor's size is {dict(size)}, but it should give height and width.")
    mean, std = ((0.0,) * 3, (1.0,) * 3)
    if processor.do_normalize:
        mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    return (height, width), Views(mean=mean, std=std, **settings)


def class_names(labeled: datasets.Dataset | Examples) -> list[str]:
    """The names of the classes, or their numbers where they have none; no image is decoded."""
    if isinstance(labeled, datasets.Dataset):
        labels, names = read_labels(labeled)
    else:
        labels, names = labeled.labels, labeled.class_names
    if labels is None or len(labeled) == 0:
        raise ValueError(
            "The labeled set is empty or has no label column; it needs at least one labeled image."
        )
    if names is not None:
        return names
    if labels.min() < 0:
        raise ValueError(f"A label is {int(labels.min())}, but labels count from 0.")
    return [str(number) for number in range(int(labels.max()) + 1)]


def check_classes(images: Examples, expected: Sequence[str]) -> None:
    """Labels of images to evaluate on have to mean what those of the training mean."""
    names = list(expected) if images.labels is None else class_names(images)
    if names != list(expected)[: None if images.class_names else len(names)]:
        raise ValueError(
            f"The evaluation data have the classes {', '.join(names)}, but the labeled data have "
            f"{', '.join(expected)}. Give both the same classes in the same order."
        )


def check_views(needed: Sequence[str], has_unlabeled: bool, loss: str) -> None:
    """A loss can ask only for views that there are, of images that there are."""
    if unknown := set(needed) - set(VIEWS):
        raise ValueError(
            f"{loss} needs the view {', '.join(sorted(unknown))}, but an image has the views "
            f"{', '.join(VIEWS)}."
        )
    if not has_unlabeled:
        raise ValueError(
            f"{loss} needs the views {', '.join(needed)} of unlabeled images, but there is no "
            "unlabeled_dataset. Pass one, or train with loss='supervised'."
        )


def with_size(processor: Any, size: int) -> Any:
    """The same processor for images of another side; the share that a centre crop keeps stays."""
    if hasattr(processor, "data_config"):  # of timm
        data = processor.data_config
        data = {**data, "input_size": (data["input_size"][0], size, size)}
        return type(processor)(pretrained_cfg=data, architecture=processor.architecture)
    changed = copy.deepcopy(processor)
    if getattr(processor, "do_center_crop", None):
        edge = processor.size.get("shortest_edge") or processor.size.get("height")
        crop = processor.crop_size.get("height") or processor.crop_size.get("shortest_edge")
        changed.size = type(processor.size)(shortest_edge=round(size * edge / crop))
        changed.crop_size = type(processor.crop_size)(height=size, width=size)
    else:
        changed.size = type(processor.size)(height=size, width=size)
    return changed
