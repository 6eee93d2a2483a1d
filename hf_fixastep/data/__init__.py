"""Images from the disk to the training step."""

from .registry import DATASETS, list_datasets, load_dataset
from .streams import Draw, Images, PairedDataset, PairedLoader, PairedSampler, as_is, generator_for


__all__ = [
    "DATASETS",
    "Draw",
    "Images",
    "PairedDataset",
    "PairedLoader",
    "PairedSampler",
    "as_is",
    "generator_for",
    "list_datasets",
    "load_dataset",
]
