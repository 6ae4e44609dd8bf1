"""Records of a dataset in memory or on disk, by index: `Records`.

Any map-style dataset: a list, torch's `Dataset`, `datasets.Dataset`. A record that the dataset
cannot give is one that says why, and costs no run.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any, Protocol

import numpy as np
from PIL import Image

from isobatch.common.errors import ConfigError, first_line
from isobatch.common.types import IntArray
from isobatch.counting.record_counter import BrokenRecord
from isobatch.loaders.decode.image import to_rgb

FINGERPRINT_RECORDS = 64
"""Records, spread over a dataset, that tell it from others."""

Transform = Callable[[Any], Any]
"""record -> record."""


class MapDataset(Protocol):
    """What a dataset must have."""

    def __len__(self) -> int:
        """Number of records."""

    def __getitem__(self, index: int, /) -> Any:
        """A record."""


class Records:
    """The records of a dataset, after the user's `transform`."""

    as_files = True
    """Whether pictures are given as files."""
    places: Any = None
    """The packer's table of records, where the dataset is named by its place."""

    def __init__(
        self, dataset: Any, transform: Transform | None = None, *, as_files: bool = True
    ) -> None:
        """`as_files`: pictures are given as files. ConfigError without length or items."""
        if isinstance(dataset, str | bytes | Mapping) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            is_split = isinstance(dataset, Mapping) and is_hugging_face(dataset)
            split = "one of its splits, " if is_split else ""
            raise ConfigError(
                f"dataset is a {type(dataset).__name__}; give {split}a list of records, a map-"
                "style torch Dataset, a datasets.Dataset, the file, folder, bucket or Hub id of the"
                " data, or with measure='own' an IterableDataset"
            )
        if as_files and _has_columns(dataset):
            dataset = _Undecoded(dataset)
        self.as_files = as_files
        self._dataset: MapDataset = dataset
        self._transform = transform

    def __len__(self) -> int:
        return len(self._dataset)

    def take(self, indices: IntArray) -> list[Any]:
        """Records by index; a `BrokenRecord` for each that cannot be read."""
        chosen = indices.tolist()
        if isinstance(self._dataset, _Undecoded) or is_hugging_face(self._dataset):
            with suppress(Exception):  # of one of them: each by itself tells which
                values = self._dataset.__getitems__(chosen)  # type: ignore[attr-defined]
                return self.transformed(values)
        return [self._one(index) for index in chosen]

    def transformed(self, values: Sequence[Any]) -> list[Any]:
        """Records of the dataset's items; a `BrokenRecord` for each that cannot be read."""
        return [self._transformed(value) for value in values]

    def take_rows(self, rows: IntArray) -> list[Any]:
        """Records by their places in the dataset, which are their indices here."""
        return self.take(rows)

    def fingerprint(self) -> str:
        """Changes when the dataset does, as far as its length and some records tell."""
        digest = hashlib.sha256(f"{len(self)}".encode())
        spread = np.linspace(0, max(0, len(self) - 1), min(len(self), FINGERPRINT_RECORDS))
        for value in self.take(np.unique(spread.astype(np.int64))):
            # of a `RawRecord` its content
            text = json.dumps(getattr(value, "value", value), sort_keys=True, default=_digest)
            digest.update(text.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def _one(self, index: int) -> Any:
        try:
            value = self._dataset[index]
        except Exception as error:  # of the user's code, or of a file that is damaged
            return BrokenRecord(f"{type(error).__name__}: {first_line(error)}")
        return self._transformed(value)

    def _transformed(self, value: Any) -> Any:
        if self._transform is not None:
            try:
                value = self._transform(value)
            except Exception as error:
                return BrokenRecord(f"transform: {type(error).__name__}: {first_line(error)}")
        try:
            return with_files(value) if self.as_files else value
        except Exception as error:  # of a picture that was opened, and is decoded only now
            why = f"a picture: {type(error).__name__}: {first_line(error)}"
            return BrokenRecord(why, "corrupt_image")


def is_hugging_face(dataset: object) -> bool:
    """Whether this is a `datasets.Dataset`, without importing that library."""
    return type(dataset).__module__.partition(".")[0] == "datasets"


def _has_columns(dataset: Any) -> bool:
    """Whether this is a `datasets.Dataset` whose rows are its columns: no `with_transform`."""
    form = getattr(dataset, "format", None)
    return is_hugging_face(dataset) and isinstance(form, dict) and form["type"] != "custom"


class _Undecoded:
    """Rows of a `datasets.Dataset` with images and clips as files: who trains on one decodes it.

    Read as Arrow, since `cast_column` writes a dataset whose column has lists of images again.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        rows: list[Any] = self._dataset[indices].to_pylist()
        return rows


_IN_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of pictures that PNG has."""
_GREY_IN_PNG = ("1", "L", "I;16")
"""Those of which PNG has a number as the transparent colour."""


def with_files(value: Any) -> Any:
    """A record with PIL images as PNG files, which keep every pixel and what is transparent."""
    if isinstance(value, Image.Image):
        return {"bytes": _png(value), "path": None}
    if isinstance(value, Mapping):
        return {key: with_files(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [with_files(item) for item in value]
    return value


def _png(image: Image.Image) -> bytes:
    """A picture as a PNG file that decodes to what the picture itself would be converted to."""
    image.load()  # what a file says of its transparency may come last
    colour = image.info.get("transparency")
    if image.mode == "P" and isinstance(colour, bytes):
        image = image.convert("RGBA")  # of several, PNG would read one again as the only one
    elif colour is not None and not _has_room(image, colour):
        image = to_rgb(image.copy(), on_white=False)
    elif image.mode == "P" and colour is None and image.im.getpalettemode() != "RGB":
        image = image.convert("RGB")  # PNG would have the palette's alpha as transparent colours
    elif image.mode not in _IN_PNG:
        image = image.convert("RGBA" if image.mode in ("PA", "La", "RGBa") else "RGB")
    file = BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _has_room(image: Image.Image, colour: object) -> bool:
    """Whether PNG keeps a picture's one transparent colour as Pillow has it."""
    if image.mode == "RGB":
        return isinstance(colour, tuple) and len(colour) == 3
    if image.mode == "P":
        return isinstance(colour, int) and colour < len(image.getpalette() or ()) // 3
    return image.mode in _GREY_IN_PNG and isinstance(colour, int)


def _digest(value: object) -> str:
    """Of what JSON does not hold."""
    if isinstance(value, os.PathLike):
        value = os.fsencode(value)
    content = value if isinstance(value, bytes) else repr(type(value)).encode()
    if not isinstance(value, bytes):
        with suppress(Exception):  # of classes of the user's
            array = np.asarray(value)  # of a picture or a tensor too
            content = content if array.dtype == object else array.tobytes()
    return hashlib.sha256(content).hexdigest()
