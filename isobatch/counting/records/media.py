"""Images, videos and audio files of raw samples: where they are, and their bytes.

A file may be in the data root on its own, as a byte range of a container there (a member of a tar),
or come with the record (a cell of a Parquet table). The last kind is copied into the build's
staging folder when it is counted, so that the writers find any file in constant time. A video may
also be a list of images, or a folder of them; its content is then an archive of all of them
(`media.frame_archive`).
"""

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fsdecode
from os.path import abspath, join, normpath
from pathlib import PurePosixPath
from typing import IO, Any, Protocol
from urllib.parse import unquote, unquote_to_bytes

from isobatch.counting.headers.content_kind import kind_of_content
from isobatch.counting.records.fields import Fields
from isobatch.media.frame_archive import pack_frames
from isobatch.shards.folders import Folder
from isobatch.shards.local_folder import OutsideFolder
from isobatch.shards.stored_group import FRAMES

FILE_KEYS: dict[str, tuple[str, ...]] = {
    "image": ("image", "images", "jpg", "jpeg", "png", "webp"),
    "video": ("video", "videos", "mp4", "webm", "mkv", "avi", "mov"),
    "audio": ("audio", "audios", "wav", "flac", "mp3", "ogg"),
}
"""Keys of a record's files; suffixes are columns of tables made from WebDataset tars."""
_KEY_SETS = {kind: frozenset(keys) for kind, keys in FILE_KEYS.items()}
ASKED_KEYS = (
    *("min_pixels", "max_pixels", "resized_height", "resized_width", "total_pixels"),
    *("fps", "nframes", "min_frames", "max_frames", "video_start", "video_end"),
)
"""Keys of a part of a message by which qwen_vl_utils sizes that image or video."""
BLOB_SCHEME = "blob:"
"""Prefix of containers in the staging folder. That of a counted list of images is FRAMES, and its
name the JSON of the images' own places."""
LEAST_BASE64 = 120
"""Characters of a path that is looked at for being a file's content in base64."""
FRAME_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})
_FRAME_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"RIFF", b"BM")
_FILE_MARK = re.compile(r"<image_?([0-9]{1,4})>")
_NUMBER = re.compile(r"([0-9]+)")


class SampleProblem(ValueError):
    """A record or file that cannot be used: a key of `record.REASONS`, and the particulars."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Media:
    """An image, a video or an audio file of a raw sample."""

    name: str
    """Path under the data root; in a container, the file's name there."""
    container: str = ""
    """File under the data root of which this is a byte range; empty for a file of its own."""
    offset: int = 0
    size: int = -1
    """Bytes in the container; -1 for a file of its own, whose size is not known yet."""
    data: bytes | None = None
    """Content, if it came with the record."""
    frames: tuple["Media", ...] = ()
    """Images that are a video, in order; `name` is then that of the first."""
    asked: tuple[tuple[str, Any], ...] = ()
    """Keys of ASKED_KEYS that its part of a message has, and their values."""


# --- content ---


def open_media(root: Folder, media: Media, kind: str) -> IO[bytes]:
    """The content of a file, seekable. SampleProblem (`kind`) if missing or outside."""
    if media.data is not None:
        return io.BytesIO(media.data)
    try:
        if media.container:
            return io.BytesIO(root.read(media.container, media.offset, media.size))
        return root.open(_relative(media.name, kind))
    except OutsideFolder as error:
        raise SampleProblem("outside_data_root", str(error)) from None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise SampleProblem(f"missing_{kind}", media.container or media.name) from None
    except OSError as error:
        detail = f"{media.name}: {error.strerror or error}"
        raise SampleProblem(f"unreadable_{kind}", detail) from None


class Blobs(Protocol):
    """Content of files that came with the records, by `blob_name`."""

    def read(self, name: str, offset: int, size: int, /) -> bytes | memoryview:
        """A range of bytes."""


def read_into(root: Folder, media: Media, blobs: Blobs, view: memoryview) -> None:
    """Fill `view` with a counted file of that size; SampleProblem if the file has changed."""
    try:
        if media.container == FRAMES:
            data = pack_frames(_read_frames(root, media, blobs))
            num_bytes = len(data)
            view[:num_bytes] = data
        elif media.container:
            place: Blobs = root
            name = media.container
            if name.startswith(BLOB_SCHEME):
                place, name = blobs, name.removeprefix(BLOB_SCHEME)
            stored = place.read(name, media.offset, media.size)
            num_bytes = len(stored)
            view[:num_bytes] = stored
        else:
            num_bytes = root.read_into(media.name, view)
    except OSError as error:
        raise SampleProblem("media_changed", f"{media.name}: {error.strerror or error}") from None
    if num_bytes != media.size:
        changed = f"{media.name}: {media.size} bytes when counted, {num_bytes} now"
        raise SampleProblem("media_changed", changed)


def _read_frames(root: Folder, media: Media, blobs: Blobs) -> list[memoryview]:
    frames = [Media(*place) for place in json.loads(media.name)]
    contents = [memoryview(bytearray(frame.size)) for frame in frames]
    for frame, content in zip(frames, contents, strict=True):
        read_into(root, frame, blobs, content)
    return contents


def frames_in_folder(root: Folder, name: str) -> tuple[Media, ...]:
    """The images in a folder, by the numbers in their names; none if there is no such folder."""
    if not root.has_folder(name):
        return ()
    paths = [info.name for info in root.files(name)]
    names = [path for path in paths if PurePosixPath(path).suffix.lower() in FRAME_SUFFIXES]
    names.sort(key=_natural)
    return tuple(map(Media, names))


def _natural(name: str) -> list[str | int]:
    """A key that sorts frame 2 before frame 10: text, number, text, number, ..., text."""
    return [int(part) if place % 2 else part for place, part in enumerate(_NUMBER.split(name))]


def _relative(name: str, kind: str) -> str:
    """The name, if it stays under the data root.

    >>> _relative("coco/1.jpg", "image")
    'coco/1.jpg'
    """
    if "://" in name:
        raise SampleProblem(f"{kind}_url", f"{name[:120]}: download it first and give its path")
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise SampleProblem("outside_data_root", f"{name[:120]}: not below the data root")
    return name


def below(media: Media, root: str) -> Media:
    """A file by its path under the data root, if an absolute one leads there; else as it is.

    >>> below(Media("/data/a/1.jpg"), "/data").name, below(Media("/etc/1.jpg"), "/data").name
    ('a/1.jpg', '/etc/1.jpg')
    """
    if media.data is not None or media.container or not media.name.startswith("/"):
        return media
    if "://" in root:
        return media
    start = join(abspath(root), "")
    frames = tuple(below(frame, root) for frame in media.frames)
    return replace(media, name=media.name.removeprefix(start), frames=frames)


def from_base(media: Media, base: str) -> Media:
    """A file given by any path, as one under `/`; relative paths begin at `base`.

    >>> from_base(Media("../a.jpg"), "/data/b").name, from_base(Media("/c.jpg"), "/data").name
    ('data/a.jpg', 'c.jpg')
    """
    if media.data is not None or "://" in media.name:
        return media
    frames = tuple(from_base(frame, base) for frame in media.frames)
    return replace(media, name=normpath(join(base, media.name)).lstrip("/"), frames=frames)


# --- the fields of a record that give its files ---


def files_of(record: Fields, kind: str) -> list[Media]:
    """The files of a kind, a key of FILE_KEYS: those under the one key that has any.

    If several have, one of them must list the files of the others too; else SampleProblem.
    """
    if _KEY_SETS[kind].isdisjoint(record):
        return []
    by_key: dict[str, list[Media]] = {}
    for key in FILE_KEYS[kind]:
        if key in record and (files := files_under(record, key, kind)):
            by_key[key] = files
    if not by_key:
        return []
    files = max(by_key.values(), key=len)
    for others in by_key.values():
        if any(file not in files for file in others):
            keys = " and ".join(f"`{name}`" for name in by_key)
            bad = f"{keys} hold different files; give all of them under one key, in order"
            raise SampleProblem(f"bad_{kind}_field", bad)
    return files


def files_under(record: Fields, key: str, kind: str) -> list[Media]:
    """The files that a record has under one key, if any."""
    value = record.peek(key)
    if value is None or _is_empty(value):
        return []
    values = _inside(record, record[key], key)
    if isinstance(values, Fields) and (marks := marked_files(values)) is not None:
        values = [values.inner(values[mark], mark) for mark in marks.values()]
    return _several(values, kind)


def marked_files(value: Any) -> dict[int, str] | None:
    """Number -> key of files by their marks, as MiniCPM-V has them; None for anything else.

    >>> marked_files({"<image_01>": "b.jpg", "<image_00>": "a.jpg"})
    {0: '<image_00>', 1: '<image_01>'}
    """
    if not isinstance(value, Mapping) or not value:
        return None
    matches = [_FILE_MARK.fullmatch(key) for key in value if isinstance(key, str)]
    if len(matches) < len(value) or not all(matches):
        return None
    marks = {int(match[1]): match[0] for match in matches if match}
    return dict(sorted(marks.items())) if len(marks) == len(value) else None


def _inside(record: Fields, value: Any, key: str) -> Any:
    """Objects in a field of files, as fields of their own."""
    if isinstance(value, list | tuple):
        return [_inside(record, item, f"{key}[]") for item in value]
    return record.inner(value, key)


def _several(value: Any, kind: str) -> list[Media]:
    """The files of a field; of videos, a list of images or a list in the list is one."""
    if not isinstance(value, list | tuple):
        return [media_of(value, kind)]
    several = [media_of(one, kind) for one in value]
    if kind == "video" and all(map(_is_frame, several)):
        return [_film(several)]
    return several


def _film(frames: Sequence[Media]) -> Media:
    """A list of images as one video."""
    if not frames:
        raise SampleProblem("bad_video_field", "a list of no frames; leave it out, or name them")
    return Media(frames[0].name, frames=tuple(frames))


def _is_frame(media: Media) -> bool:
    if media.data is not None:
        return media.data.startswith(_FRAME_MAGIC) and media.data[8:11] != b"AVI"
    return not media.frames and PurePosixPath(media.name).suffix.lower() in FRAME_SUFFIXES


def _is_empty(content: Any) -> bool:
    """Whether a field gives no file: None, an empty text or list, a struct of nulls."""
    if isinstance(content, Mapping):
        return bool(content) and all(value is None for value in content.values())
    return content is None or (isinstance(content, str | list | tuple) and len(content) == 0)


def media_of(value: Any, kind: str) -> Media:
    """A file given by path, by content, as a `data:` URL, or as Hugging Face's {path, bytes}.

    A video also as a list of images.
    """
    if isinstance(value, Media):
        return value
    if isinstance(value, PathLike):
        value = fsdecode(value)
    if kind == "video" and isinstance(value, list | tuple):
        return _film([media_of(one, "image") for one in value])
    if isinstance(value, bytes):
        return Media(kind, data=value)
    if isinstance(value, Mapping):
        data, path = value.get("bytes"), value.get("path")
        if not isinstance(data, bytes):
            return media_of(data if path is None else path, kind)
        # a name here is for messages only
        name = path.encode("utf-8", "replace").decode() if isinstance(path, str) else ""
        return Media(name or kind, data=data)
    if not isinstance(value, str) or not value:
        is_short = isinstance(value, str | int | float | None)
        shown = f"{value!r:.80}" if is_short else f"a {type(value).__name__}"
        bad = f"`{kind}` is {shown}; give a path, a file's content, or a list of them"
        raise SampleProblem(f"bad_{kind}_field", bad)
    return _from_text(value, kind)


def _from_text(text: str, kind: str) -> Media:
    """A file by its path or URL, or by its content as text."""
    if text.startswith("data:"):
        return _from_data_url(text, kind)
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://").removeprefix("localhost"))
    elif len(text) > LEAST_BASE64 and _is_base64(text):
        return media_of_base64(text, kind)
    try:
        text.encode()
    except UnicodeEncodeError:
        bad = f"the path {text[:80]!r} is not valid Unicode"
        raise SampleProblem(f"bad_{kind}_field", bad) from None
    return Media(text)


def is_relative_path(text: str) -> bool:
    """Whether a text names a file under a folder; else it is empty, a URL, or a file's content.

    >>> [is_relative_path(text) for text in ("a/1.jpg", "/a/1.jpg", "https://x/1.jpg", "data:,x")]
    [True, False, False, False]
    """
    if not text or text.startswith(("/", "data:")) or "://" in text:
        return False
    return len(text) <= LEAST_BASE64 or not _is_base64(text)


def _is_base64(text: str) -> bool:
    """Whether a text is the content of a media file, and not the path of one."""
    try:
        head = base64.b64decode("".join(text[:LEAST_BASE64].split())[:88], validate=True)
    except ValueError:
        return False
    return kind_of_content(head) is not None


def media_of_base64(text: Any, kind: str) -> Media:
    """A file whose content is in the record as base64, in one line or in many."""
    try:
        joined = "".join(text.split()) if isinstance(text, str) else text
        return Media(kind, data=base64.b64decode(joined, validate=True))
    except (ValueError, TypeError):
        raise SampleProblem(f"bad_{kind}_field", f"the base64 of the {kind} is damaged") from None


def media_of_part(part: Fields, keys: tuple[str, ...], kind: str) -> Media | None:
    """The file of a message part under one of `keys`; None if it only marks its place."""
    every = (*keys, "url", "path", "base64", "source")
    key = next((key for key in every if part.peek(key) is not None), None)
    value = None if key is None else _inside(part, part[key], key)
    if key == "base64" and isinstance(value, str) and not value.startswith("data:"):
        return media_of_base64(value, kind)
    if isinstance(value, Fields):
        if value.peek("url") is not None:
            value = value["url"]
        elif value.peek("data") is not None:
            for about in ("type", "media_type"):  # Anthropic's, which the content tells too
                value.get(about)
            return media_of_base64(value["data"], kind)
    if value is None:
        return None
    asked = tuple((key, part[key]) for key in ASKED_KEYS if part.peek(key) is not None)
    return replace(media_of(value, kind), asked=asked)


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
