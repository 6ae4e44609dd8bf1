"""WebDataset tars: members with one key are one sample.

The webdataset library's rule: the key is a member's path up to the first dot of its last part, and
neighbours with one key belong together. Only headers, `.json` and texts are read; images and audio
files stay where they are, as byte ranges. Compressed tars have no such ranges, so
the files' contents come with the records.

In a sample, `.json` is the record, `.txt` and `.caption` its caption. A JSON may name
its images by their members' names, or by paths from before they were put into the tar.

What a member of another suffix is, its first bytes tell. One that is of no use becomes a key of the
record with its dot, `.npy`, and its size as the value: nothing reads that, so it is reported.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import PurePosixPath
from typing import IO, Any

import numpy as np

from isobatch.common.errors import DataError
from isobatch.counting.headers.content_kind import HEAD_BYTES, kind_of_content
from isobatch.counting.records.media import Media
from isobatch.counting.records.record import TOO_DEEP, Chunk, RawRecord, is_deep
from isobatch.counting.records.schemas import RECORD_KEYS
from isobatch.packer.sources.base import (
    FilePiece,
    Located,
    OnBytes,
    Source,
    cut,
    opened,
    pieces_between,
    prefix_under,
)
from isobatch.packer.sources.tar_members import (
    MOST_PACKED_BYTES,
    BrokenTarError,
    Member,
    read_compressed,
    read_members,
)
from isobatch.packer.sources.trainers.energon import FieldMap
from isobatch.shards.folders import open_folder

WHOLE_TAR_BYTES = 512 << 20
"""Size of a tar that is one chunk at most, so that its headers are read where it is counted."""
SUFFIXES: dict[str, frozenset[str]] = {
    "image": frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "avif"}),
    "video": frozenset({"mp4", "m4v", "mov", "webm", "mkv", "avi", "mpg", "mpeg"}),
    "audio": frozenset({"wav", "flac", "mp3", "ogg", "opus", "m4a"}),
}
"""Kind of files -> suffixes that are believed without a look."""
PICTURE_SUFFIXES = frozenset(
    {"jfif", "jpe", "jif", "jp2", "j2k", "jpx", "jxl", "heic", "heif", "img", "ico", "svg", "dds"}
)
"""Images whatever is in them: one that cannot be read is rejected as such."""
DATA_SUFFIXES = frozenset(
    {"npy", "npz", "pt", "pth", "pkl", "pickle", "pyd", "ten", "tensor", "bin", "emb", "h5", "cls"}
)
"""Numbers, which might begin like some media file by chance."""
MASKS = frozenset({"seg", "mask", "depth", "normal", "edge"})
"""Names of images (`KEY.seg.png`) that say something of the sample's image: not pictures to see."""
FIRST_SAMPLES = 200
"""Samples of the first tar that say how large a sample is."""
MOST_TEXT_BYTES = 64 << 20
"""Bytes of a text or JSON file, all of which are read; of other files, only the first are."""
TEXT_SUFFIXES = ("txt", "caption")
QUESTION, ANSWERS = "context", "answers"
"""Names of Energon's VQA: `KEY.context.txt` and `KEY.answers.json`."""

_KEY = re.compile(r"((?:.*/)?[^./]+)\.[^/]*", re.DOTALL)


@dataclass(slots=True)
class _Sample:
    key: str
    members: list[Member] = field(default_factory=list)
    broken: str = ""


@dataclass(frozen=True, slots=True)
class TarChunk:
    """A tar, or successive samples of one."""

    folder: str
    name: str
    container: str
    """Name of the tar under the data root."""
    start: int = 0
    """Offset of the first member's header."""
    end: int | None = None
    """Offset of the first member after the chunk; None: the end of the tar."""
    first: int = 0
    """Number of samples before the chunk."""
    fields: FieldMap | None = None
    """Energon's, of the folder."""
    exclude: frozenset[str] = frozenset()
    """Keys of samples that are left out."""
    count: int | None = None
    """Samples of the whole tar, where its folder says it."""
    borders: tuple[int, int] | None = None
    """First sample of the tar that is read, and the one after the last; None: all."""

    def records(self) -> Iterator[RawRecord]:
        """The samples, in order. A damaged place is one broken record, and ends the tar."""
        with opened(open_folder(self.folder, follow_links=True), self.name) as file:
            if _is_compressed(self.name):
                members = read_compressed(file)
            else:
                members = read_members(file, self.start, self.end)
            samples = _not_torn(_samples(members), self.container)
            number = self.first
            is_whole = True
            for position, sample in enumerate(samples, self.first):
                number, is_whole = position + 1, is_whole and not sample.broken
                first, last = self.borders or (0, number)
                if sample.key not in self.exclude and first <= position < last:
                    yield self._record(sample, file, position)
            if self.end is None and is_whole and self.count not in (None, number):
                raise DataError(
                    f"{self.container}: has {number:,} samples, and .nv-meta says"
                    f" {self.count:,}; prepare it again"
                )

    def _record(self, sample: _Sample, file: IO[bytes], position: int) -> RawRecord:
        """The record of a sample of the open tar."""
        key = {"__key__": sample.key}
        try:
            if sample.broken:
                raise _BadMemberError(sample.broken)
            files = _by_suffix(sample)
            if self.fields is None:
                record = _record(files, file, self.container)
            else:
                record = _mapped_record(files, self.fields, file, self.container)
        except _BadMemberError as error:
            problem = f"{self.container}, {sample.key}: {error}"
            return RawRecord(position, key, problem, "broken_member")
        return RawRecord(position, key | record)


class TarSource(Source):
    """Samples of tar files."""

    def __init__(self, located: Located, name: str, data_root: str) -> None:
        """ConfigError for tars outside the data root."""
        super().__init__(located, name, data_root)
        self._prefix = prefix_under(located.folder, data_root, "tars")

    def raw_chunks(self, num_records: int, on_bytes: OnBytes) -> Iterator[Chunk]:
        """Tars, or `num_records` samples of large ones; compressed tars are read here."""
        options = dict(self.located.options)
        borders = self._borders(options)
        places = {name: place for place, name in enumerate(self.located.names)}
        for piece in self.pieces():
            place = places[piece.name]
            if borders and borders[place][0] >= borders[place][1]:
                on_bytes(piece.size)
                continue
            excluded = [name.partition(f"{piece.name}/") for name in options.get("exclude", ())]
            whole = TarChunk(
                self.located.folder,
                piece.name,
                self._prefix + piece.name,
                start=piece.start,
                end=piece.stop,
                first=piece.first,
                fields=options.get("fields"),
                exclude=frozenset(key for before, _, key in excluded if not before and key),
                count=options["counts"][place] if "counts" in options else None,
                borders=borders[place] if borders else None,
            )
            if _is_compressed(piece.name):
                yield from cut(whole.records(), num_records, _content_bytes)
                on_bytes(piece.size)
            elif piece.size <= WHOLE_TAR_BYTES:
                yield whole
                on_bytes(piece.size)
            else:
                yield from self._cut(whole, num_records, piece.size, on_bytes)

    def cut(self, num_bytes: int) -> list[FilePiece] | None:
        """Tars, and large ones between samples: the headers of those are read."""
        if "subset" in dict(self.located.options):
            return None
        pieces: list[FilePiece] = []
        for file in self.pieces():
            if file.size < 2 * num_bytes or _is_compressed(file.name):
                pieces.append(file)
                continue
            borders = [(0, 0)]
            whole = TarChunk(self.located.folder, file.name, file.name)
            for number, border in enumerate(self._sample_borders(whole)):
                if border - borders[-1][0] >= num_bytes:
                    borders.append((border, number))
            pieces += pieces_between(file, borders)
        return pieces

    def bytes_per_record(self) -> float:
        """By the first samples of the first tar."""
        info = self.files()[0]
        whole = TarChunk(self.located.folder, info.name, info.name)
        if _is_compressed(info.name):
            return super().bytes_per_record()
        borders = list(islice(self._sample_borders(whole), FIRST_SAMPLES + 1))
        if len(borders) <= FIRST_SAMPLES:
            return info.size / max(1, len(borders))
        return (borders[-1] - borders[0]) / FIRST_SAMPLES

    def _sample_borders(self, chunk: TarChunk) -> Iterator[int]:
        """Offset of the first header of each sample of a chunk."""
        with opened(self.folder, chunk.name) as file:
            members = read_members(file, chunk.start, chunk.end)
            for sample in _not_torn(_samples(members), chunk.container):
                if sample.members:
                    yield sample.members[0].header

    def _borders(self, options: dict[str, Any]) -> list[tuple[int, int]]:
        """First sample and the one after the last that are read of each tar; empty: all of all."""
        subset = options.get("subset")
        if subset is None:
            return []
        ends = np.cumsum([0, *options["counts"]])
        first, last = subset.borders(int(ends[-1]), self.located.folder)
        inside = np.clip([first, last], ends[:-1, None], ends[1:, None]) - ends[:-1, None]
        return [(start, end) for start, end in inside.tolist()]

    def _cut(
        self, whole: TarChunk, num_records: int, size: int, on_bytes: OnBytes
    ) -> Iterator[Chunk]:
        start, first = whole.start, whole.first
        for number, border in enumerate(self._sample_borders(whole), whole.first):
            if number - first == num_records:
                yield replace(whole, start=start, end=border, first=first)
                on_bytes(border - start)
                start, first = border, number
        yield replace(whole, start=start, first=first)
        on_bytes(size - (start - whole.start))


def _content_bytes(record: RawRecord) -> int:
    """Bytes of the files that came with a record."""
    values = record.value.values() if isinstance(record.value, dict) else ()
    files = (one for value in values for one in (value if isinstance(value, list) else [value]))
    return sum(len(one.data or b"") for one in files if isinstance(one, Media))


def _is_compressed(name: str) -> bool:
    return name.endswith((".gz", ".tgz"))


# --- members -> samples ---


def key_of(name: str) -> str | None:
    """The key of a member, without a leading `./`; None for one that belongs to no sample.

    >>> key_of("./a.b/0001.seg.png"), key_of("a/README"), key_of("a/.hidden")
    ('a.b/0001', None, None)
    """
    match = _KEY.fullmatch(name.removeprefix("./"))
    return match[1] if match else None


def _samples(members: Iterator[Member]) -> Iterator[_Sample]:
    """Neighbours with one key; a damaged place ends them with a broken sample."""
    sample: _Sample | None = None
    try:
        for member in members:
            key = key_of(member.name)
            if key is None:
                continue
            if sample is None or sample.key != key:
                if sample is not None:
                    yield sample
                sample = _Sample(key)
            if not sample.broken:
                sample.members.append(member)
            if sum(len(m.data or b"") for m in sample.members) > MOST_PACKED_BYTES:
                sample.members.clear()
                sample.broken = f"more than {MOST_PACKED_BYTES:,} bytes in a compressed tar"
    except BrokenTarError as error:
        if sample is not None and error.sample_is_whole:
            yield sample
            sample = None
        sample = sample or _Sample(f"byte {error.offset}")
        sample.broken = str(error)
    if sample is not None:
        yield sample


def _not_torn(samples: Iterable[_Sample], container: str) -> Iterator[_Sample]:
    """The samples; DataError at one whose other members were somewhere before it.

    Two samples of one key that have a suffix in common are two: tars are joined in that way.
    """
    earlier: dict[str, tuple[int, tuple[str, ...]]] = {}
    shapes: dict[tuple[str, ...], tuple[str, ...]] = {}
    for number, sample in enumerate(samples, 1):
        names = [member.name for member in sample.members]
        start = len(sample.key) + (3 if names and names[0].startswith("./") else 1)
        shape = tuple([name[start:].lower() for name in names])
        # samples have the same few shapes, so that little is kept of each
        entry = number, shapes.setdefault(shape, shape)
        first, first_shape = earlier.setdefault(sample.key, entry)
        if first != number and shape and set(first_shape).isdisjoint(shape):
            raise DataError(
                f"{container}: the members of {sample.key} are not next to each other:"
                f" {', '.join(first_shape)} in sample {first:,}, {', '.join(shape)} in sample"
                f" {number:,}; sort the tar by name"
            )
        yield sample


# --- a sample's members -> its record ---


class _BadMemberError(ValueError):
    """A member that makes its sample unusable."""


def _record(files: dict[str, Member], file: IO[bytes], container: str) -> dict[str, Any]:
    """The record of a sample; `container` is the name of the tar `file` under the data root."""
    kinds = _kinds(files, file)
    record = _texts(files, kinds, file)
    frames = _place_frames(record, files, kinds, container)
    for kind in SUFFIXES:
        ordered = [suffix for suffix in _ordered(kinds, kind) if suffix not in frames]
        _add_media(record, kind, {suffix: files[suffix] for suffix in ordered}, container)
    return record


def _mapped_record(
    files: dict[str, Member], fields: FieldMap, file: IO[bytes], container: str
) -> dict[str, Any]:
    """The record of a sample by its folder's field map; what that does not name is not read."""
    members = fields.members
    try:
        values = {
            suffix: _value(suffix, member, file, container)
            for suffix, member in files.items()
            if suffix in members
        }
        record = fields.record(values)
    except ValueError as error:
        raise _BadMemberError(str(error)) from None
    unused = {f".{suffix}": f"{files[suffix].size:,} bytes" for suffix in files.keys() - values}
    return record | dict(sorted(unused.items()))


def _value(suffix: str, member: Member, file: IO[bytes], container: str) -> Any:
    """What a member holds: JSON, a file, or a text."""
    kind = _kind(suffix)
    if kind == "json":
        return _json(suffix, member, file)
    if kind in SUFFIXES or (kind != "text" and _kind_inside(suffix, member, file)):
        return _media(member, container)
    return _read(file, member).decode("utf-8", "surrogateescape")


def _by_suffix(sample: _Sample) -> dict[str, Member]:
    """The members by what follows their key, in their order."""
    files: dict[str, Member] = {}
    for member in sample.members:
        suffix = member.name.removeprefix("./")[len(sample.key) + 1 :].lower()
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


def _kinds(files: Mapping[str, Member], file: IO[bytes]) -> dict[str, str]:
    """What the members are: json, text, image, video, audio, or empty for what is of no use."""
    kinds = {suffix: _kind(suffix) or _kind_inside(suffix, files[suffix], file) for suffix in files}
    masks = [suffix for suffix in kinds if kinds[suffix] == "image" and _name(suffix) in MASKS]
    if masks and any(kind == "image" and "." not in suffix for suffix, kind in kinds.items()):
        kinds |= dict.fromkeys(masks, "")
    return kinds


@lru_cache(1024)
def _kind(suffix: str) -> str:
    """What a member's suffix says; empty if nothing."""
    last = suffix.rpartition(".")[2]
    if last in TEXT_SUFFIXES:
        return "text"
    return (
        last if last == "json" else next((kind for kind in SUFFIXES if last in SUFFIXES[kind]), "")
    )


def _kind_inside(suffix: str, member: Member, file: IO[bytes]) -> str:
    """What a member's first bytes say."""
    last = suffix.rpartition(".")[2]
    if last in DATA_SUFFIXES:
        return ""
    head = replace(member, size=min(member.size, HEAD_BYTES))
    kind = kind_of_content(_read(file, head)[:HEAD_BYTES])
    return kind or ("image" if last in PICTURE_SUFFIXES else "")


def _name(suffix: str) -> str:
    """What precedes the last dot: `context` of `context.txt`."""
    return suffix.rpartition(".")[0]


def _texts(files: dict[str, Member], kinds: Mapping[str, str], file: IO[bytes]) -> dict[str, Any]:
    """What JSON files and texts say, and the sizes of what is of no use."""
    record: dict[str, Any] = {}
    for suffix in [suffix for suffix in files if kinds[suffix] == "json"]:
        value = _json(suffix, files[suffix], file)
        if isinstance(value, dict):
            record |= value
        elif name := _name(suffix):  # Energon's `answers.json`
            record[name] = value
        else:
            raise _BadMemberError(f"{suffix} is a {type(value).__name__}, not an object")
    texts = [suffix for suffix in files if kinds[suffix] == "text"]
    has_more = bool(record) or any(_ordered(kinds, kind) for kind in SUFFIXES)
    named_texts: dict[str, str] = {}
    for suffix in sorted(texts, key=lambda suffix: "." in suffix):
        # bad bytes become lone surrogates, and the sample is rejected by name
        text = _read(file, files[suffix]).decode("utf-8", "surrogateescape")
        key = "caption" if has_more else "text"
        if _name(suffix) == QUESTION and ANSWERS in record:
            key = "question"
        elif len(texts) > 1 and _name(suffix) in RECORD_KEYS:
            key = _name(suffix)
        # of two captions the first is learned, and the other one is reported
        named_texts[key if named_texts.get(key, text) == text else f".{suffix}"] = text
    return (record | named_texts) | {
        f".{suffix}": f"{files[suffix].size:,} bytes" for suffix in files if not kinds[suffix]
    }


def _json(suffix: str, member: Member, file: IO[bytes]) -> Any:
    """The value of a JSON file."""
    try:
        value = json.loads(_read(file, member))
        why = TOO_DEEP if is_deep(value) else ""
    except ValueError as error:
        why = str(error).split(": line ", 1)[0]
    except RecursionError:
        why = TOO_DEEP
    if why:
        raise _BadMemberError(f"{suffix} is not valid JSON: {why}")
    return value


def _read(file: IO[bytes], member: Member) -> bytes:
    if member.size > MOST_TEXT_BYTES:
        raise _BadMemberError(f"{member.name} has {member.size:,} bytes, too many for a text")
    if member.data is not None:
        return member.data
    file.seek(member.offset)
    return file.read(member.size)


def _ordered(kinds: Mapping[str, str], kind: str) -> list[str]:
    """The suffixes of a kind's files: by number if all have one (`0.jpg`, `10.jpg`), else as is."""
    suffixes = [suffix for suffix in kinds if kinds[suffix] == kind]
    numbers = [suffix.partition(".")[0] for suffix in suffixes]
    if all(number.isascii() and number.isdecimal() for number in numbers):
        suffixes.sort(key=lambda suffix: int(suffix.partition(".")[0]))
    return suffixes


def _place_frames(
    record: dict[str, Any], files: dict[str, Member], kinds: Mapping[str, str], container: str
) -> set[str]:
    """Put the images that a record names as a video's frames in their place; their suffixes."""
    suffixes = {_media(files[suffix], container): suffix for suffix in _ordered(kinds, "image")}
    by_name = {PurePosixPath(media.name).name: media for media in suffixes}
    by_name |= {suffix: media for media, suffix in suffixes.items()}
    used: set[Media] = set()
    for key in ("video", "videos"):
        if isinstance(record.get(key), list):
            record[key] = _with_frames(record[key], by_name, used)
    return {suffixes[frame] for frame in used}


# no function inside the one above: that would keep all contents until cycles are collected
def _with_frames(value: Any, by_name: dict[str, Media], used: set[Media]) -> Any:
    """A value with files in place of their names; adds them to `used`."""
    if isinstance(value, list):
        return [_with_frames(entry, by_name, used) for entry in value]
    if (frame := _find(value, by_name)) is None:
        return value
    used.add(frame)
    return frame


def _add_media(record: dict[str, Any], kind: str, files: dict[str, Member], container: str) -> None:
    """Put a sample's files into its record, in the place of the record's names for them."""
    media = {suffix: _media(member, container) for suffix, member in files.items()}
    by_name = {PurePosixPath(one.name).name: one for one in media.values()} | media
    for info in record.get("image_info") or [] if kind == "image" else []:  # MMC4
        if isinstance(info, dict) and (match := _find(info.get("image_name"), by_name)) is not None:
            info["image_name"] = match
    key = kind if record.get(kind) else f"{kind}s"
    named = record.get(key)
    names: list[Any] = named if isinstance(named, list) else [named]
    if not media or "text_list" in record:
        return
    if not named:
        record[kind] = list(media.values())
    elif all(isinstance(name, str | None) for name in names):
        record[key] = _matched(names, by_name, list(media.values()))


def _media(member: Member, container: str) -> Media:
    if member.data is not None:
        return Media(member.name, data=member.data)
    return Media(member.name, container=container, offset=member.offset, size=member.size)


def _matched(
    names: list[str | None], by_name: dict[str, Media], media: list[Media]
) -> list[Media | str | None]:
    """The files that names mean; all in their order if none fits and the numbers are equal.

    None stays: the place of a text, as in OBELICS.
    """
    matches = [_find(name, by_name) for name in names]
    if len(names) - names.count(None) == len(media) and not any(matches):
        files = iter(media)
        return [None if name is None else next(files) for name in names]
    # a name that fits none stays a path under the data root, with its own reason if that is missing
    return [one or name for one, name in zip(matches, names, strict=True)]


def _find(name: Any, by_name: dict[str, Media]) -> Media | None:
    if not isinstance(name, str):
        return None
    return by_name.get(name) or by_name.get(PurePosixPath(name).name)
