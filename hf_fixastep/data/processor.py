"""From an image processor of transformers to image size and views."""

from __future__ import annotations

from typing import Any

from hf_fixastep.data.views import Views


def views_of(processor: Any, **settings: Any) -> tuple[tuple[int, int], Views]:
    """Image size and views as an image processor describes them; `settings` are further ones of the views."""
    size = processor.crop_size if getattr(processor, "do_center_crop", None) else processor.size
    height = size.get("height") or size.get("shortest_edge")
    width = size.get("width") or size.get("shortest_edge")
    if not height or not width:
        raise ValueError(f"The image processor's size is {dict(size)}, but it should give height and width.")
    mean, std = ((0.0,) * 3, (1.0,) * 3)
    if processor.do_normalize:
        mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    return (height, width), Views(mean=mean, std=std, **settings)
