"""Images from the disk to the training step."""

from .folders import folder_report
from .registry import DATASETS, export_dataset, list_datasets, load_dataset
from .streams import Draw, Images, PairedDataset, PairedLoader, PairedSampler, as_is, generator_for


__all__ = [
    "DATASETS",
    "Draw",
    "Images",
    "PairedDataset",
    "PairedLoader",
    "PairedSampler",
    "as_is",
    "export_dataset",
    "folder_report",
    "generator_for",
    "list_datasets",
    "load_dataset",
]
