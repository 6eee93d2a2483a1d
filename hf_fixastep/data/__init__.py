"""Images from the disk to the training step."""

from hf_fixastep.data.folders import folder_report
from hf_fixastep.data.images import Images
from hf_fixastep.data.loader import Draw, PairedDataset, PairedLoader, PairedSampler, as_is, generator_for
from hf_fixastep.data.registry import DATASETS, export_dataset, list_datasets, load_dataset


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
