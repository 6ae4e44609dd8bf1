"""The members of one sample of a tar -> its record.

`.json` is the record, `.txt` and `.caption` its caption, images and audio files are added as byte
ranges of the tar. A JSON may name its images by their members' names, or by paths from before they
were put into the tar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import IO, Any

from packer.records.media import Media
from packer.records.record import RawRecord
from packer.sources._tar_members import Member

SUFFIXES: dict[str, frozenset[str]] = {
    "image": frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif"}),
    "audio": frozenset({"wav", "flac", "mp3", "ogg", "opus", "m4a"}),
}
TEXT_SUFFIXES = ("txt", "caption")

_KEY = re.compile(r"((?:.*/)?[^./]+)\.[^/]*", re.DOTALL)


class _BadMemberError(ValueError):
    """A member that makes its sample unusable."""


def key_of(name: str) -> str | None:
    """The key of a member, without a `./` in front; None for one that is no part of a sample.

    >>> key_of("./a.b/0001.seg.png"), key_of("a/README"), key_of("a/.hidden")
    ('a.b/0001', None, None)
    """
    match = _KEY.fullmatch(name.removeprefix("./"))
    return match[1] if match else None


def make_record(
    key: str,
    members: Sequence[Member],
    file: IO[bytes],
    container: str,
    position: int,
    *,
    broken: str = "",
) -> RawRecord:
    """The record of a sample, `file` being the tar and `container` its name under the data root."""
    record: dict[str, Any] = {}
    try:
        if broken:
            raise _BadMemberError(broken)
        files = _by_suffix(key, members)
        record = _texts(files, file)
        for kind in SUFFIXES:
            _add_media(
                record,
                kind,
                [(suffix, files[suffix]) for suffix in _ordered(files, kind)],
                container,
            )
    except _BadMemberError as error:
        return RawRecord(
            position, {"__key__": key}, f"{container}, {key}: {error}", "broken_member"
        )
    return RawRecord(position, {"__key__": key} | record)


def _by_suffix(key: str, members: Sequence[Member]) -> dict[str, Member]:
    """The members by what stands behind their key, in their order."""
    files: dict[str, Member] = {}
    for member in members:
        suffix = member.name.removeprefix("./")[len(key) + 1 :].lower()
        if suffix in files:
            raise _BadMemberError(f"there are two members {suffix}")
        if not member.is_file:
            raise _BadMemberError(f"{suffix} is a link or the like, not a file")
        try:
            member.name.encode()
        except UnicodeEncodeError:
            raise _BadMemberError(f"the name of {suffix} is not valid UTF-8") from None
        files[suffix] = member
    return files


def _texts(files: dict[str, Member], file: IO[bytes]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for suffix in [suffix for suffix in files if _kind(suffix) == "json"]:
        try:
            value = json.loads(_read(file, files[suffix]))
        except (ValueError, RecursionError) as error:
            raise _BadMemberError(
                f"{suffix} is not valid JSON: {str(error).split(': line ', 1)[0]}"
            ) from None
        if not isinstance(value, dict):
            raise _BadMemberError(f"{suffix} is a {type(value).__name__}, not an object")
        record |= value
    has_more = bool(record) or any(_ordered(files, kind) for kind in SUFFIXES)
    for suffix in [suffix for suffix in files if _kind(suffix) in TEXT_SUFFIXES]:
        # bad bytes become lone surrogates, and the sample is rejected by name
        record["caption" if has_more else "text"] = _read(file, files[suffix]).decode(
            "utf-8", "surrogateescape"
        )
    return record


def _read(file: IO[bytes], member: Member) -> bytes:
    file.seek(member.offset)
    return file.read(member.size)


def _kind(suffix: str) -> str:
    """The suffix behind the last dot."""
    return suffix.rpartition(".")[2]


def _ordered(files: dict[str, Member], kind: str) -> list[str]:
    """The suffixes of a kind's files: by number if all are numbered, as `0.jpg`, `10.jpg`; else as
    they stand.
    """
    found = [suffix for suffix in files if _kind(suffix) in SUFFIXES[kind]]
    numbers = [suffix.partition(".")[0] for suffix in found]
    if all(number.isascii() and number.isdecimal() for number in numbers):
        found.sort(key=lambda suffix: int(suffix.partition(".")[0]))
    return found


def _add_media(
    record: dict[str, Any], kind: str, files: list[tuple[str, Member]], container: str
) -> None:
    """Put a sample's files into its record, in the place of the names that the record has for
    them.
    """
    media = {
        suffix: Media(m.name, container=container, offset=m.offset, size=m.size)
        for suffix, m in files
    }
    by_name = {PurePosixPath(one.name).name: one for one in media.values()} | media
    for info in record.get("image_info") or [] if kind == "image" else []:  # MMC4
        if isinstance(info, dict) and (found := _find(info.get("image_name"), by_name)) is not None:
            info["image_name"] = found
    key = kind if record.get(kind) else f"{kind}s"
    named = record.get(key)
    names: list[Any] = named if isinstance(named, list) else [named]
    if not media or "text_list" in record:
        return
    if not named:
        record[kind] = list(media.values())
    elif all(isinstance(name, str) for name in names):
        record[key] = _matched(names, by_name, list(media.values()))


def _matched(names: list[str], by_name: dict[str, Media], media: list[Media]) -> list[Media | str]:
    """The files that names mean; all in their order if the names are from elsewhere, and as
    many.
    """
    found = [_find(name, by_name) for name in names]
    if len(names) == len(media) and not any(found):
        return list(media)
    # a name that fits nothing stays a path under the data root, and has its own reason if that is
    # not there
    return [one or name for one, name in zip(found, names, strict=True)]


def _find(name: Any, by_name: dict[str, Media]) -> Media | None:
    if not isinstance(name, str):
        return None
    return by_name.get(name) or by_name.get(PurePosixPath(name).name)
