"""The one private method of `datasets` builders that we override."""

from __future__ import annotations

from typing import Any

import datasets


class ReportingBuilder(datasets.GeneratorBasedBuilder):
    """A builder that has the last word before its files become the cached data set.

    datasets 5.2 has no public moment between writing the splits and moving their folder into the cache. What
    is written or refused after the move could be missing from, or left in, a cache that counts as finished.
    This class can go when `datasets` has such a hook.
    """

    def finish(self, folder: str, place: str) -> None:
        """Check what was read, and write files beside the splits; an error leaves nothing in the cache.

        Args:
            folder: where to write.
            place: where the folder will be afterwards, for messages.
        """
        raise NotImplementedError

    def _download_and_prepare(self, *args: Any, **kwargs: Any) -> None:
        super()._download_and_prepare(*args, **kwargs)
        self.finish(self._output_dir, self._output_dir.removesuffix(".incomplete"))
