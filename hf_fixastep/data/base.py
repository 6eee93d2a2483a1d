"""What every data set is: a builder that declares its traits, and may leave a report beside its images."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import datasets

from hf_fixastep._compat.datasets_builder import ReportingBuilder


logger = logging.getLogger(__name__)
REPORT = "report.json"
# All splits of a builder have the same columns: in these the label is -1, and `load_dataset` drops it.
WITHOUT_LABELS = ("unlabeled", "seen_foreign", "unseen_foreign")


class ImageSet(ReportingBuilder):
    """Base of all data sets; the first line of a subclass's docstring is what `list_datasets()` shows.

    Splits are labeled, unlabeled, validation and test, or test alone; columns are image and label.
    """

    medical: ClassVar[bool] = False  # shows patients: the cards say so
    shareable: ClassVar[bool] = False  # may be exported and pushed
    terms: ClassVar[str] = "its builder does not state that it may be passed on."
    sources: ClassVar[tuple[ModuleType, ...]] = ()  # where the code lies that reads it, besides its classes

    def make_report(self) -> dict[str, Any] | None:
        """What was found in the files, ready for JSON; an error if it is too little."""
        return None

    def findings(self, report: dict[str, Any]) -> list[str]:
        """One sentence for everything in the report that a user may want to act on."""
        return []

    def finish(self, folder: str, place: str) -> None:
        report = self.make_report()
        if report is None:
            return
        Path(folder, REPORT).write_text(json.dumps(report, indent=1), encoding="utf-8")
        for sentence in self.findings(report):
            logger.warning("%s All of them are in %s.", sentence, Path(place, REPORT))
        logger.info("What was found in the files is in %s.", Path(place, REPORT))


def folder_report(data: datasets.DatasetDict | datasets.Dataset) -> dict[str, Any]:
    """What was found while a set was built: files left out, duplicates, classes, groups on two sides.

    It lies beside the cached images as `report.json`.
    """
    split = next(iter(data.values())) if isinstance(data, dict) else data
    return json.loads(Path(split.cache_files[0]["filename"]).with_name(REPORT).read_text(encoding="utf-8"))
