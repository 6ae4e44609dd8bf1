"""First bytes of a file -> whether it is an image, a video or an audio file. Pure.

For files whose name does not tell: members of a tar with an unusual suffix, such as `.jfif`,
`.jp2` or `.img`. It only sorts; whether a file can be read is found when it is counted. So HEIC is
an image here, also where nothing on the machine decodes it.
"""

from typing import Literal

ContentKind = Literal["image", "video", "audio"]

HEAD_BYTES = 192
"""First bytes that are enough for all kinds, transport streams included."""

_IMAGE_STARTS = (
    b"\xff\xd8\xff",  # JPEG, also as .jfif, .jpe
    b"\x89PNG\r\n\x1a\n",
    b"GIF87a",
    b"GIF89a",
    b"II*\0",  # TIFF, and raw files of cameras
    b"MM\0*",
    b"II+\0",  # BigTIFF
    b"MM\0+",
    b"\0\0\0\x0cjP  \r\n\x87\n",  # JPEG 2000, its file format
    b"\xff\x4f\xff\x51",  # its code stream alone
    b"\xff\x0a",  # JPEG XL
    b"\0\0\0\x0cJXL \r\n\x87\n",
    b"\0\0\1\0",  # ICO
    b"\0\0\2\0",  # CUR
    b"icns",
    b"8BPS",  # Photoshop
    b"DDS ",
    b"qoif",
    b"\x01\xda",  # SGI
    b"\x59\xa6\x6a\x95",  # Sun raster
    b"BPG\xfb",
    b"\x76\x2f\x31\x01",  # OpenEXR
)
_VIDEO_STARTS = (
    b"\x1a\x45\xdf\xa3",  # Matroska, WebM
    b"FLV\x01",
    b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",  # ASF: WMV, and WMA, which a look at its streams tells
    b"\0\0\1\xba",  # MPEG program stream
    b"\0\0\1\xb3",  # MPEG video without a container
)
_AUDIO_STARTS = (
    b"fLaC",
    b"ID3",  # a tag in front of MP3
    b"RF64",
    b"caff",
    b".snd",
    b"wvpk",
    b"MAC ",
    b"#!AMR",
)
_STARTS: dict[ContentKind, tuple[bytes, ...]] = {
    "image": _IMAGE_STARTS,
    "video": _VIDEO_STARTS,
    "audio": _AUDIO_STARTS,
}
_RIFF: dict[bytes, ContentKind] = {b"WEBP": "image", b"AVI ": "video", b"WAVE": "audio"}
_IMAGE_BRANDS = frozenset(
    {
        *(b"avif", b"avis", b"mif1", b"mif2", b"msf1", b"miaf"),
        *(b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"),
        b"crx ",
    }
)
"""Major brands of ISO media files that are pictures: AVIF, HEIF (ISO 23008-12), Canon's raw."""
_AUDIO_BRANDS = frozenset({b"M4A ", b"M4B ", b"M4P ", b"F4A ", b"F4B ", b"aax "})
_VIDEO_BOXES = frozenset({b"moov", b"mdat", b"free", b"skip", b"wide", b"styp", b"pnot"})
"""Boxes that an MP4 or MOV file without a brand may begin with."""
_TS_SYNC, _TS_BYTES = b"\x47", 188
"""First byte and length of each packet of an MPEG transport stream."""


def kind_of_content(head: bytes) -> ContentKind | None:
    """What a file is that begins with `head`; None if none of the kinds that are known here.

    Give 64 bytes or more; a transport stream (`.ts`) is told by 189.
    """
    head = bytes(head)
    for kind, starts in _STARTS.items():
        if head.startswith(starts):
            return kind
    for look in (_kind_of_chunks, _kind_of_boxes, _kind_without_magic):
        if (result := look(head)) is not None:
            return result
    return None


def _kind_of_chunks(head: bytes) -> ContentKind | None:
    """RIFF, AIFF and Ogg files: a container's name, and what it holds."""
    if head[:4] in (b"RIFF", b"RIFX"):
        return _RIFF.get(head[8:12])
    if head[:4] == b"FORM":
        return "audio" if head[8:12] in (b"AIFF", b"AIFC") else None
    if head[:4] != b"OggS":
        return None
    # the first packet, after its page's header, names the codec
    is_video = head[28:36].startswith((b"\x80theora", b"BBCD", b"\x01video", b"fishead"))
    return "video" if is_video else "audio"


def _kind_of_boxes(head: bytes) -> ContentKind | None:
    """ISO media files by their major brand: MP4 and MOV have many, pictures and sound few."""
    if head[4:8] in _VIDEO_BOXES:
        return "video"
    if head[4:8] != b"ftyp":
        return None
    if head[8:12] in _IMAGE_BRANDS:
        return "image"
    return "audio" if head[8:12] in _AUDIO_BRANDS else "video"


def _kind_without_magic(head: bytes) -> ContentKind | None:
    """Files that begin with less than could not begin a text."""
    if head[:1] == _TS_SYNC and head[_TS_BYTES : _TS_BYTES + 1] == _TS_SYNC:
        return "video"
    if _is_bmp(head) or _is_portable_map(head):
        return "image"
    return "audio" if _is_mpeg_audio(head) else None


def _is_bmp(head: bytes) -> bool:
    """BMP: two letters alone could begin a text, so the size of its second header is looked at."""
    sizes = (12, 40, 52, 56, 64, 108, 124)
    return head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in sizes


def _is_portable_map(head: bytes) -> bool:
    """PBM, PGM, PPM, PAM, PFM: a letter, a digit and white space."""
    letters = b"P1", b"P2", b"P3", b"P4", b"P5", b"P6", b"P7", b"PF", b"Pf"
    return head[:2] in letters and head[2:3] in (b"\n", b"\r", b" ", b"\t") and len(head) > 6


def _is_mpeg_audio(head: bytes) -> bool:
    """MP3 or AAC without a tag: eleven set bits, then values that are not reserved.

    A UTF-16 text begins with FF FE, whose layer bits are reserved together with its bit rate.
    """
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return False
    if head[1] & 0xF6 == 0xF0:  # ADTS, whose layer is always 0
        return head[2] >> 2 & 15 < 13
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    bit_rate, sampling_rate = head[2] >> 4, head[2] >> 2 & 3
    return version != 1 and layer == 1 and bit_rate not in (0, 15) and sampling_rate != 3
