"""The fields of a record that give its images and audio files.

They are paths, bytes, base64 or Hugging Face's structs. For `packer.records.schemas`. Pure; what is
wrong with a field raises SampleProblem.
"""

import base64
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from packer.records.media import Media, SampleProblem

FILE_KEYS: dict[str, tuple[str, ...]] = {
    "image": ("image", "images", "jpg", "jpeg", "png", "webp"),
    "audio": ("audio", "audios", "wav", "flac", "mp3", "ogg"),
}
"""Keys of a record's files; suffixes are columns of tables made from WebDataset tars."""


def files_of(record: Mapping[str, Any], kind: str) -> list[Media]:
    """The files of a kind, `image` or `audio`: those under the first key that has any."""
    for key in FILE_KEYS[kind]:
        given = record.get(key)
        if not _is_empty(given):
            several = given if isinstance(given, list | tuple) else [given]
            return [media_of(one, kind) for one in several]
    return []


def _is_empty(given: Any) -> bool:
    """Whether a field gives no file: None, an empty text or list, a struct of nulls."""
    if isinstance(given, Mapping):
        return bool(given) and all(value is None for value in given.values())
    return given is None or (isinstance(given, str | list | tuple) and len(given) == 0)


def media_of(given: Any, kind: str) -> Media:
    """A file given by path, by content, as a `data:` URL, or as Hugging Face's {path, bytes}."""
    if isinstance(given, Media):
        return given
    if isinstance(given, bytes):
        return Media(kind, data=given)
    if isinstance(given, Mapping):
        data, path = given.get("bytes"), given.get("path")
        if isinstance(data, bytes):
            # a name here is for messages only
            named = path.encode("utf-8", "replace").decode() if isinstance(path, str) else ""
            return Media(named or kind, data=data)
        given = path
    if not isinstance(given, str) or not given:
        bad = f"`{kind}` is {str(given)[:80]!r}; give a path or a list of paths"
        raise SampleProblem(f"bad_{kind}_field", bad)
    if given.startswith("data:"):
        return _from_data_url(given, kind)
    try:
        given.encode()
    except UnicodeEncodeError:
        bad = f"the path {given[:80]!r} is not valid Unicode"
        raise SampleProblem(f"bad_{kind}_field", bad) from None
    return Media(given)


def media_of_base64(text: Any, kind: str) -> Media:
    """A file whose content is in the record as base64."""
    try:
        return Media(kind, data=base64.b64decode(text, validate=True))
    except (ValueError, TypeError):
        raise SampleProblem(f"bad_{kind}_field", f"the base64 of the {kind} is damaged") from None


def media_of_part(part: Mapping[str, Any], keys: tuple[str, ...], kind: str) -> Media | None:
    """The file of a message part under one of `keys`; None if it only marks its place."""
    given = next((part[key] for key in keys if part.get(key) is not None), None)
    if isinstance(given, Mapping):
        if given.get("url") is not None:
            given = given["url"]
        elif given.get("data") is not None:
            return media_of_base64(given["data"], kind)
    return None if given is None else media_of(given, kind)


def _from_data_url(url: str, kind: str) -> Media:
    head, comma, payload = url.partition(",")
    if not comma:
        raise SampleProblem(f"bad_{kind}_field", f"the URL {url[:40]!r}... has no content")
    if head.endswith(";base64"):
        return media_of_base64(payload, kind)
    try:
        return Media(kind, data=unquote_to_bytes(payload))
    except UnicodeEncodeError:
        bad = f"the URL {head[:40]!r} is not valid Unicode"
        raise SampleProblem(f"bad_{kind}_field", bad) from None
