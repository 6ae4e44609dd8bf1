"""The samples of a group whose files cannot be used: an error, or skipped."""

from isobatch.common.errors import DataError
from isobatch.loaders.config import LoaderConfig
from isobatch.shards.stored_group import StoredGroup


class BrokenFiles:
    """The samples of a group whose files cannot be used: an error, or to be skipped."""

    def __init__(self, raw: StoredGroup, config: LoaderConfig) -> None:
        self._raw = raw
        # a rank that encodes others' files has no labels to remove
        self._may_skip = config.on_error == "skip" and len(raw.input_ids) > 0
        self._places: set[int] = set()
        self.skipped: dict[str, str] = {}
        """Sample id -> what is wrong with its file."""

    def add(self, error: DataError, sample: int) -> None:
        """Skip a sample; DataError with its name if that is not allowed."""
        raw = self._raw
        named = f"sample {raw.sample_ids[sample]!r} ({raw.where}): {error}"
        if not self._may_skip:
            raise DataError(f"{named}; restore it, or build again without it") from error
        self.skipped[raw.sample_ids[sample]] = named
        self._places.add(sample)

    def token_spans(self) -> list[tuple[int, int]]:
        """The tokens of the skipped samples."""
        borders = self._raw.cu_seqlens
        return [(int(borders[place]), int(borders[place + 1])) for place in sorted(self._places)]
