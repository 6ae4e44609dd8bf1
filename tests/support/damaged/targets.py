"""What others may give us, one file each, with what reads it: `TARGETS`, for `scripts/fuzz.py`.

A target's `use(content, folder)` writes the file into an empty folder, where it needs one, and does
with it what a command would: count its samples, decode its pictures, load a build.
"""

import csv
import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile
from PIL import Image

from isobatch.common.errors import IsobatchError
from isobatch.counting.headers.audio_header import read_audio_header
from isobatch.counting.headers.content_kind import kind_of_content
from isobatch.counting.headers.image_header import read_header
from isobatch.counting.headers.video_header import read_video_header
from isobatch.counting.records.media import SampleProblem
from isobatch.counting.sample_counter import CountJob, CountSettings, count_chunk
from isobatch.counting.text.chat_template import ChatTemplate, TemplateRefusedError
from isobatch.engine.planning.plan import read_plan
from isobatch.loaders import StreamingLoader
from isobatch.loaders.decode.audio import decode_audio
from isobatch.loaders.decode.image import decode, decode_pixels
from isobatch.loaders.decode.video import decode_frames
from isobatch.models.audio_tokens import plan_audio
from isobatch.models.folder.find_model import find_model
from isobatch.models.presets import load_model
from isobatch.models.video_tokens import VideoFacts
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.packer.sources.dataset import find_dataset
from isobatch.shards.manifest import hash_json
from support import ROOT
from support.damaged.kinds import CONVERSATION, use_build, use_model

CACHE = Path(tempfile.gettempdir()) / f"isobatch-fuzz-seeds-{os.getuid()}"
DATA = ROOT / "tests" / "data"
SEEDS = DATA / "fuzz_seeds"
"""TARGET-what: files that were findings once."""


@dataclass(frozen=True)
class Target:
    """A file that others give, and what reads it."""

    name: str
    use: Callable[[bytes, Path], object]
    """Use a file in an empty folder; an answer is a text, for telling answers apart."""
    seeds: Callable[[], list[bytes]]
    tokens: tuple[bytes, ...] = ()
    """What the format knows."""
    seal: Callable[[bytes], bytes] | None = None
    """Makes a changed file's own checksum right."""


# --- datasets ---


def _picture(form: str = "PNG", size: tuple[int, int] = (40, 30), mode: str = "RGB", **options):
    pixels = np.random.default_rng(1).integers(0, 255, (size[1], size[0], 4), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels, "RGBA").convert(mode).save(buffer, form, **options)
    return buffer.getvalue()


def _sound(form: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    values = np.sin(np.arange(4000) / 20).astype(np.float32)
    soundfile.write(buffer, values, 16000, format=form, subtype=subtype)
    return buffer.getvalue()


@cache
def _settings() -> CountSettings:
    video = load_model("internvl3")
    model = replace(load_model("tiny_audio"), video=video.video, video_markup=video.video_markup)
    return CountSettings(model=model, tokenizer=str(demo_tokenizer_path()))


@cache
def _media_folder() -> Path:
    folder = CACHE / "media"
    if not folder.exists():
        work = CACHE / f"media-{os.getpid()}"
        work.mkdir(parents=True)
        (work / "a.jpg").write_bytes(_picture("JPEG"))
        (work / "b.png").write_bytes(_picture())
        (work / "c.wav").write_bytes(_sound())
        work.rename(folder)
    return folder


def count_place(place: Path) -> str:
    """Count all records of a dataset; -> the reasons of those that are of no use."""
    dataset = find_dataset(str(place), None)
    reasons = set()
    for number, part in enumerate(dataset.parts):
        source = part.open()
        source.unread_columns()
        source.cut(1000)
        for chunk in source.chunks(64, lambda _: None):
            job = CountJob(
                settings=_settings(),
                number=number,
                part=number,
                source=part.name,
                data_root=part.data_root,
                chunk=chunk,
            )
            reasons |= set(count_chunk(job).table.column("reason").to_pylist())
    return " ".join(sorted(map(str, reasons)))


def _with_media(folder: Path) -> None:
    for path in _media_folder().iterdir():
        os.link(path, folder / path.name)


def _dataset(name: str) -> Callable[[bytes, Path], object]:
    def use(content: bytes, folder: Path) -> str:
        _with_media(folder)
        is_packed = content[:2] == b"\x1f\x8b"
        (folder / (f"{name}.gz" if is_packed else name)).write_bytes(content)
        return count_place(folder)

    return use


RECORDS = [
    {
        "id": "one",
        "image": ["a.jpg", "b.png"],
        "conversations": [
            {"from": "human", "value": "<image>\n<image>\nWhat is it?"},
            {"from": "gpt", "value": "A cat."},
        ],
    },
    {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "a.jpg"}, "max_pixels": 401408},
                    {"type": "text", "text": "And this?"},
                ],
            },
            {"role": "assistant", "content": "A dog.", "weight": 1, "tool_calls": None},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
    {"text_list": ["a", None, "b"], "image_info": [{"image_name": "a.jpg"}], "images": ["a.jpg"]},
    {"texts": ["one", None, "two"], "images": [None, "b.png", None]},
    {"query": "<image>Q", "response": "A", "history": [["q", "a"]], "images": ["b.png"]},
    {"instruction": "I", "input": "J", "output": "O", "system": "S"},
    {"question": "Q?", "answers": ["a", "b"], "options": ["x", "y"], "image": "a.jpg"},
    {"caption": "A picture.", "image": "a.jpg"},
    {"text": "Only words."},
    {
        "messages": [
            {"role": "user", "content": "<image>Find <ref-object>"},
            {"role": "assistant", "content": "<bbox>"},
        ],
        "images": ["a.jpg"],
        "objects": {"ref": ["cat"], "bbox": [[1, 2, 3, 4]], "bbox_type": "real"},
    },
    {"id": 7, "audio": "c.wav", "conversations": [["<audio>Hear?", "Yes."]]},
    {"video": ["a.jpg", "a.jpg"], "conversations": [["<video>See?", "Yes."]]},
    {
        "image": {"<image_00>": "a.jpg", "<image_01>": "b.png"},
        "conversations": [
            {"role": "user", "content": "<image_00> or <image_01>?"},
            {"role": "assistant", "content": "Both."},
        ],
    },
    {"chosen": [{"role": "assistant", "content": "x"}], "rejected": [], "prompt": "p"},
    {"image": "data:image/png;base64,iVBORw0KGgo=", "text": "x"},
]
RECORD_TOKENS = (
    *(
        b"<image>",
        b"<video>",
        b"<audio>",
        b"<image_01>",
        b"<bbox>",
        b"<ref-object>",
        b"../../a.jpg",
    ),
    *(b'"/etc/passwd"', b"file:///a.jpg", b"https://x.test/a.jpg", b"null", b"NaN", b"1e999"),
    *(b'"role"', b'"content"', b'"from"', b'"value"', b'"messages"', b'"images"', b"\\ud800"),
    *(
        b"<|im_start|>",
        b"<IMG_CONTEXT>",
        b"\\u0000",
        b"data:image/png;base64,",
        b"}\n{",
        b"[",
        b"]",
    ),
)


def _record_seeds() -> list[bytes]:
    lines = "\n".join(map(json.dumps, RECORDS)).encode()
    return [
        json.dumps(RECORDS).encode(),
        lines,
        gzip.compress(lines),
        *(json.dumps([record]).encode() for record in RECORDS),
    ]


def tar_of(members: list[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """A tar of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _tar_seeds() -> list[bytes]:
    record = json.dumps(RECORDS[0]).encode()
    members = [
        *(("0.jpg", _picture("JPEG")), ("0.json", record), ("1.txt", b"A cat."), ("1.png", b"x")),
        *(("2.wav", _sound()), ("2.txt", b"<audio>"), ("3.0.jpg", _picture("JPEG", (8, 8)))),
        *(("3.1.jpg", _picture("JPEG", (8, 8))), ("3.json", b'{"video": ["0.jpg", "1.jpg"]}')),
        *(("4.context.txt", b"Q"), ("4.answers.json", b'["a"]'), ("x/5.npy", b"123")),
    ]
    links = io.BytesIO()
    with tarfile.open(fileobj=links, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(f"{number}.jpg")
            info.type, info.linkname = kind, "../../../etc/passwd"
            archive.addfile(info)
        archive.addfile(tarfile.TarInfo("../../up.txt"))
        archive.addfile(tarfile.TarInfo("/abs.txt"))
        archive.addfile(tarfile.TarInfo("long/" * 40 + "0.txt"))
    plain = tar_of(members)
    pax = tar_of([(f"{name}é" * 20, content) for name, content in members], tarfile.PAX_FORMAT)
    return [plain, gzip.compress(plain, 1), links.getvalue(), gzip.compress(links.getvalue()), pax]


def _table(rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(rows)


def _tables() -> list[pa.Table]:
    turns = [{"from": "human", "value": "<image>Q"}, {"from": "gpt", "value": "A"}]
    picture = {"bytes": _picture(size=(8, 8)), "path": "x.png"}
    return [
        _table([{"id": str(n), "image": picture, "conversations": turns} for n in range(20)]),
        _table([{"text": "abc"}, {"text": None}]),
        _table([{"messages": RECORDS[1]["messages"][:1], "images": [picture]}] * 3),
        pa.table({"text": pa.array(["x", "y"] * 50).dictionary_encode(), "id": range(100)}),
    ]


def _parquet_seeds() -> list[bytes]:
    seeds = []
    for table in _tables():
        for options in (
            {"compression": "snappy"},
            {"compression": "zstd", "row_group_size": 5},
            {"compression": "gzip", "use_dictionary": False, "data_page_version": "2.0"},
            {"compression": "none", "write_statistics": False},
        ):
            sink = io.BytesIO()
            pq.write_table(table, sink, **options)
            seeds.append(sink.getvalue())
    return seeds


def _stream_seeds() -> list[bytes]:
    seeds = []
    for table in _tables():
        for compression in (None, "zstd"):
            sink = io.BytesIO()
            options = pa.ipc.IpcWriteOptions(compression=compression)
            with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
                writer.write_table(table, 7)
            seeds.append(sink.getvalue())
    return seeds


def _saved_dataset(content: bytes, folder: Path) -> str:
    (folder / "data-00000-of-00001.arrow").write_bytes(content)
    (folder / "state.json").write_text(
        '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}'
    )
    (folder / "dataset_info.json").write_text("{}")
    return count_place(folder)


def _csv_seeds() -> list[bytes]:
    sink = io.StringIO()
    writer = csv.writer(sink)
    writer.writerows([("image", "text"), ("a.jpg", "A cat."), ("b.png", 'A "dog",\nand more')])
    return [sink.getvalue().encode()]


def _csv(content: bytes, folder: Path) -> str:
    _with_media(folder)
    (folder / "data.csv").write_bytes(content)
    return count_place(folder / "data.csv")


def _yaml_seeds() -> list[bytes]:
    return [
        b"datasets:\n- json_path: a.json\n  sampling_strategy: 'first:50%'\n- json_path: b.json\n",
        b"datasets: [{json_path: a.json, sampling_strategy: 'random:3'}]\n",
        b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\ndatasets: [*a]\n",
    ]


def _yaml(content: bytes, folder: Path) -> str:
    for name in ("a.json", "b.json"):
        (folder / name).write_bytes(b'[{"text": "x"}, {"text": "y"}]')
    (folder / "mix.yaml").write_bytes(content)
    return count_place(folder / "mix.yaml")


def _info_seeds() -> list[bytes]:
    columns = {"messages": "conversations", "images": "image"}
    tags = {"role_tag": "from", "content_tag": "value", "user_tag": "human"}
    entry = {"file_name": "data.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    return [json.dumps({"mine": entry}).encode(), json.dumps({"a": {"file_name": "b"}}).encode()]


def _info(content: bytes, folder: Path) -> str:
    _with_media(folder)
    (folder / "data.json").write_text(json.dumps(RECORDS[:1]))
    (folder / "dataset_info.json").write_bytes(content)
    return count_place(folder)


def _mds_seeds() -> list[bytes]:
    shard = _mds_shard()
    entry = {
        **{"column_encodings": ["jpeg", "str"], "column_names": ["image", "text"]},
        **{"column_sizes": [None, None], "compression": None, "format": "mds", "hashes": []},
        **{"raw_data": {"basename": "shard.00000.mds", "bytes": len(shard), "hashes": {}}},
        **{"samples": 2, "size_limit": 1 << 20, "version": 2, "zip_data": None},
    }
    return [json.dumps({"shards": [entry], "version": 2}).encode()]


def _mds_shard() -> bytes:
    samples = []
    for number in range(2):
        values = [_picture("JPEG", (8, 8)), f"text {number}".encode()]
        samples.append(np.array([*map(len, values)], "<u4").tobytes() + b"".join(values))
    header = 4 + 4 * 3
    offsets = np.cumsum([header, *map(len, samples)]).astype("<u4")
    return np.array([2], "<u4").tobytes() + offsets.tobytes() + b"".join(samples)


def _mds_index(content: bytes, folder: Path) -> str:
    (folder / "index.json").write_bytes(content)
    (folder / "shard.00000.mds").write_bytes(_mds_shard())
    return count_place(folder)


def _mds_data(content: bytes, folder: Path) -> str:
    index = json.loads(_mds_seeds()[0])
    index["shards"][0]["raw_data"]["bytes"] = len(content)
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "shard.00000.mds").write_bytes(content)
    return count_place(folder)


# --- files of pictures, videos and sounds ---


def _image_seeds() -> list[bytes]:
    seeds = [_picture("JPEG"), _picture("JPEG", progressive=True), _picture("JPEG", mode="L")]
    seeds += [_picture("PNG", mode=mode) for mode in ("RGB", "RGBA", "P", "1", "LA")]
    seeds += [_picture("GIF", mode="P"), _picture("BMP"), _picture("TGA"), _picture("PPM")]
    for compression in ("raw", "tiff_lzw", "tiff_deflate", "jpeg", "packbits", "group4"):
        mode = "1" if compression == "group4" else "RGB"
        seeds.append(_picture("TIFF", mode=mode, compression=compression))
    for form in ("WEBP", "AVIF", "JPEG2000", "ICO", "SGI", "PCX", "IM", "DDS", "QOI", "ICNS"):
        with suppress(OSError, KeyError, ValueError):
            seeds.append(_picture(form))
    exif = Image.Exif()
    exif[0x0112] = 6
    seeds += [_picture(form, exif=exif) for form in ("JPEG", "PNG", "WEBP", "TIFF")]
    frames = [Image.new("RGB", (20, 20), (n, 0, 0)) for n in range(3)]
    for form in ("GIF", "WEBP", "PNG", "TIFF"):
        sink = io.BytesIO()
        frames[0].save(sink, form, save_all=True, append_images=frames[1:])
        seeds.append(sink.getvalue())
    return [seed for seed in seeds if len(seed) < 100_000]


def _image(content: bytes, folder: Path) -> str:
    kind_of_content(content[:192])
    said = []
    for look in (
        lambda: read_header(io.BytesIO(content), "x"),
        lambda: read_header(io.BytesIO(content), "x", decode=True),
        lambda: decode(content, on_white=True).size,
        lambda: decode_pixels(content).shape,
    ):
        try:
            said.append(str(type(look()).__name__))
        except (IsobatchError, SampleProblem) as error:
            said.append(str(error))
    return " | ".join(said)


IMAGE_TOKENS = (
    *(b"IHDR", b"IDAT", b"IEND", b"eXIf", b"iTXt", b"zTXt", b"acTL", b"fcTL", b"fdAT", b"iCCP"),
    *(b"tRNS", b"PLTE", b"Exif\0\0", b"MM\0*", b"II*\0", b"ALPH", b"VP8L", b"VP8X", b"ANIM"),
    *(b"ANMF", b"\xff\xda", b"\xff\xc0", b"\xff\xc2", b"\xff\xe1", b"\xff\xe2MPF\0", b"ftypavif"),
    *(b"jp2h", b"ihdr", b"jp2c", b"GIF89a", b"\x21\xff\x0bNETSCAPE2.0", b"Raw profile type exif"),
)


def _video_seeds() -> list[bytes]:
    path = CACHE / "videos.pickle"
    if not path.exists():
        code = (
            "import pickle, sys; from pathlib import Path\n"
            "from support.clips import make_clip; from support.odd_videos import encoded\n"
            "kinds = [('mp4', 'libx264'), ('matroska', 'libx264'), ('avi', 'mpeg4'),"
            " ('mpegts', 'mpeg2video'), ('mov', 'mjpeg'), ('webm', 'libvpx'), ('flv', 'flv'),"
            " ('asf', 'msmpeg4'), ('mpeg', 'mpeg1video'), ('ogg', 'libtheora')]\n"
            "clips = [make_clip(4, codec='h264').content, make_clip(20, codec='mpeg4').content,"
            " make_clip(3, rotation=90).content]\n"
            "for container, codec in kinds:\n"
            "    try: clips.append(encoded(4, (32, 32), container=container, codec=codec))\n"
            "    except Exception as error: print(container, error, file=sys.stderr)\n"
            f"Path({str(path)!r}).write_bytes(pickle.dumps(clips))\n"
        )
        _in_another_process(code)
    clips: list[bytes] = pickle.loads(path.read_bytes())
    return clips


def _video(content: bytes, folder: Path) -> str:
    said = []
    try:
        header = read_video_header(io.BytesIO(content), "x")
        said.append("header")
    except SampleProblem as error:
        header = None
        said.append(str(error))
    with suppress(SampleProblem):
        read_video_header(io.BytesIO(content), "x", decode=True)
    facts = VideoFacts(64, 48, 4, 30.0)
    if header is not None:
        facts = VideoFacts(header.width, header.height, header.num_frames, header.frames_per_second)
    wanted = sorted({0, facts.num_frames // 2, facts.num_frames - 1})
    try:
        said.append(str(sum(1 for _ in decode_frames(content, facts, wanted))))
    except IsobatchError as error:
        said.append(str(error))
    return " | ".join(said)


VIDEO_TOKENS = (
    *(b"moov", b"mdat", b"stsz", b"stts", b"stco", b"co64", b"stsd", b"trak", b"tkhd", b"elst"),
    *(b"ctts", b"stss", b"idx1", b"movi", b"avih", b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"),
    *(b"#EXTM3U\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"),
    *(b"\x1f\x43\xb6\x75", b"\xa3", b"rmra", b"rdrf", b"alis", b"dref", b"url "),
)


def _sound_seeds() -> list[bytes]:
    forms = [("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "PCM_24"), ("WAV", "PCM_U8")]
    forms += [("WAV", "ULAW"), ("WAVEX", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS")]
    forms += [("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III"), ("AIFF", "PCM_16"), ("CAF", "ALAC_16")]
    forms += [("AU", "PCM_16"), ("W64", "PCM_16"), ("RF64", "PCM_16")]
    seeds = []
    for form, subtype in forms:
        with suppress(soundfile.LibsndfileError, ValueError):
            seeds.append(_sound(form, subtype))
    return seeds


def _audio(content: bytes, folder: Path) -> str:
    said = []
    length = 4000
    try:
        header = read_audio_header(io.BytesIO(content), "x")
        length = header.num_samples
        said.append("header")
    except SampleProblem as error:
        said.append(str(error))
    try:
        rule = _settings().model.audio
        plan_audio(rule, length, 16000)
        said.append(str(tuple(decode_audio(rule, content, length).shape)))
    except IsobatchError as error:
        said.append(str(error))
    return " | ".join(said)


# --- builds, plans, states ---


def _in_another_process(code: str) -> None:
    """Libraries start threads, which a fork would lack: so only other processes use them."""
    CACHE.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@cache
def _builds() -> tuple[Path, ...]:
    top = CACHE / "builds"
    if not (top / "whole").exists():
        shutil.rmtree(top, ignore_errors=True)
        code = (
            "from pathlib import Path\n"
            "from support.builds.packed import build\n"
            "from support.builds.raw_data import good_records, write_dataset\n"
            f"top = Path({str(top)!r})\n"
            "raw = write_dataset(top / 'raw', good_records(top / 'raw', 6))\n"
            "for form in ('arrow', 'webdataset', 'refs'):\n"
            "    build(raw, top / form, format=form)\n"
            "(top / 'whole').touch()\n"
        )
        _in_another_process(code)
    return tuple(top / name for name in ("arrow", "webdataset", "refs"))


def _copied(build: Path, folder: Path, name: str, content: bytes) -> str:
    shutil.copytree(build, folder, dirs_exist_ok=True, copy_function=os.link)
    path = folder / name
    path.unlink()
    path.write_bytes(content)
    return str(folder)


def _manifest_seeds() -> list[bytes]:
    return [(build / "manifest.json").read_bytes() for build in _builds()]


def _seal_manifest(content: bytes) -> bytes:
    with suppress(ValueError, TypeError, RecursionError):
        values = json.loads(content)
        values["content_hash"] = hash_json({k: v for k, v in values.items() if k != "content_hash"})
        return json.dumps(values).encode()
    return content


def _manifest(content: bytes, folder: Path) -> None:
    text = content[:2000].decode("latin-1") + content[-2000:].decode("latin-1")
    form = next(
        (k for k, name in enumerate(("arrow", "webdataset", "refs")) if f'"{name}"' in text), 0
    )
    use_build(_copied(_builds()[form], folder, "manifest.json", content))


def _table_names() -> list[tuple[int, str]]:
    names = []
    for number, build in enumerate(_builds()):
        paths = [path for path in sorted(build.rglob("*")) if path.is_file()]
        kinds = (".parquet", ".arrow", ".tar")
        names += [(number, str(p.relative_to(build))) for p in paths if p.suffix in kinds]
    return names


def _table_seeds() -> list[bytes]:
    """The number of the file in a byte, and the file."""
    seeds = []
    for number, (build, name) in enumerate(_table_names()):
        seeds.append(bytes([number]) + (_builds()[build] / name).read_bytes())
    return [seed for seed in seeds if len(seed) < 400_000]


def _build_table(content: bytes, folder: Path) -> None:
    names = _table_names()
    build, name = names[content[0] % len(names)] if content else names[0]
    place = _copied(_builds()[build], folder, name, content[1:])
    # no checksum protects from whoever writes the manifest, too
    path = Path(place, "manifest.json")
    values = json.loads(path.read_bytes())
    path.unlink()
    path.write_bytes(_seal_manifest(json.dumps(_with_digests(values, name, content[1:])).encode()))
    use_build(place)


def _with_digests(values, name: str, content: bytes):
    """A manifest whose sizes and SHA-256 of a file are those of its new content."""
    if isinstance(values, list):
        return [_with_digests(value, name, content) for value in values]
    if not isinstance(values, dict):
        return values
    values = {key: _with_digests(value, name, content) for key, value in values.items()}
    if str(values.get("name", "")).endswith(Path(name).name):
        for key in ("size", "bytes", "num_bytes"):
            if key in values:
                values[key] = len(content)
        if "sha256" in values:
            values["sha256"] = hashlib.sha256(content).hexdigest()
    return values


def _plan_seeds() -> list[bytes]:
    return [(DATA / "plan_version_1.json").read_bytes()]


def _seal_plan(content: bytes) -> bytes:
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        values = json.loads(content)
        inputs = json.dumps(values["inputs"], sort_keys=True).encode()
        values["inputs_hash"] = hashlib.sha256(inputs).hexdigest()
        return json.dumps(values).encode()
    return content


def _plan(content: bytes, folder: Path) -> None:
    (folder / "plan.json").write_bytes(content)
    read_plan(folder / "plan.json")


def _loader(build: Path) -> StreamingLoader:
    return StreamingLoader(str(build), workers=0, dp_rank=0, dp_world_size=1)


def _state_seeds() -> list[bytes]:
    path = CACHE / "states.json"
    if not path.exists():
        code = (
            "import json\nfrom pathlib import Path\nfrom isobatch.loaders import StreamingLoader\n"
            "states = []\n"
            f"for build in {[str(build) for build in _builds()]!r}:\n"
            "    for steps in (0, 1):\n"
            "        loader = StreamingLoader(build, workers=0, dp_rank=0, dp_world_size=1)\n"
            "        iterator = iter(loader)\n"
            "        [next(iterator) for _ in range(steps)]\n"
            "        states.append(loader.state_dict()); loader.close()\n"
            f"Path({str(path)!r}).write_text(json.dumps(states))\n"
        )
        _in_another_process(code)
    return [json.dumps(state).encode() for state in json.loads(path.read_text())]


def _state(content: bytes, folder: Path) -> None:
    try:
        state = json.loads(content)
    except (ValueError, RecursionError):
        return
    hashes = [hashlib.sha256(manifest).hexdigest().encode() for manifest in _manifest_seeds()]
    build = next((k for k, digest in enumerate(hashes) if digest in content), 0)
    loader = _loader(_builds()[build])
    try:
        loader.load_state_dict(state)
        next(iter(loader))
    finally:
        loader.close()


# --- models and templates ---


def _template_seeds() -> list[bytes]:
    names = sorted((DATA / "tokenizers").rglob("*.jinja"))
    seeds = [path.read_bytes() for path in names]
    for path in sorted((DATA / "tokenizers").rglob("*.json")):
        with suppress(ValueError, AttributeError):
            template = json.loads(path.read_text("utf-8")).get("chat_template")
            if isinstance(template, str):
                seeds.append(template.encode())
    return [*seeds, *TEMPLATES]


TEMPLATES = (
    b"{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    b"{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    b"{%- macro f(m) -%}{% if m.content is string %}{{ m.content|trim }}{% else %}"
    b"{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{%- endmacro -%}"
    b"{% set ns = namespace(n=0, t='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    b"{% set ns.t = ns.t ~ m.role %}{{ bos_token + f(m) }}{% generation %}x{% endgeneration %}"
    b"{% endfor %}{{ ns.t }}{{ messages|tojson(indent=2) }}{{ tools|length if tools }}",
    b"{% for i in range(10**9) %}{{ i }}{% endfor %}",
    b"{% set a = [0] %}{% for i in range(9) %}{% set a = a + a %}{% endfor %}{{ a|join('x' * 9) }}",
    b"{% for m in messages recursive %}{{ loop.depth }}{{ loop(messages) }}{% endfor %}",
)
TEMPLATE_TOKENS = (
    *(b"{{", b"}}", b"{%", b"%}", b"{% for i in range(10**9) %}", b"{% endfor %}", b"{% if ", b"~"),
    *(b"10**9", b"'x' * 10**9", b"[[0] * 1000] * 1000", b"|join('x' * 1000)", b"|tojson", b"|list"),
    *(
        b"|string",
        b"|length",
        b"|sort",
        b"|unique|list",
        b"|groupby('a')",
        b"|batch(2)",
        b"|map('upper')",
    ),
    *(b"{% set a = [a, a, a, a] %}", b"{{ a }}", b"|pprint", b"|format(1)", b"'%1000000000d' % 1"),
    *(
        b"''.__class__.__mro__",
        b".__globals__",
        b"|attr('__class__')",
        b"namespace(a=1)",
        b"cycler(1)",
    ),
    *(
        b"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        b"messages",
        b"loop",
        b"raise_exception('x')",
    ),
    *(
        b"strftime_now('%Y')",
        b"lipsum(n=10**6)",
        b"dict(a=1)",
        b"joiner()",
        b"|truncate(9)",
        b"|indent",
    ),
    *(b"{% filter upper %}", b"{% endfilter %}", b"{% call f() %}", b"|urlize", b"|wordwrap(1)"),
    *(
        b"{% include '/etc/passwd' %}",
        b"{% import 'os' as os %}",
        b"|int",
        b"|round(10**9)",
        b"|xmlattr",
    ),
)


def _template(content: bytes, folder: Path) -> str:
    template = ChatTemplate(content.decode("utf-8", "replace"), {"bos_token": "<s>"})
    messages = [{"role": turn.role, "content": turn.text} for turn in CONVERSATION]
    parts = [{"type": "image"}, {"type": "text", "text": "x"}]
    said = []
    for several in (messages, [*messages, *messages], [{"role": "user", "content": parts}]):
        try:
            template.render_with_answers(several)
            said.append("ok")
        except TemplateRefusedError as error:
            said.append(str(error))
    return " | ".join(said)


def _model_seeds() -> list[bytes]:
    top = CACHE / "models"
    if not top.exists():
        work = CACHE / f"models-{os.getpid()}"
        code = (
            "from pathlib import Path\n"
            "from support.models.saved_folders import FAMILIES, save_folder\n"
            f"for name in FAMILIES: save_folder(name, Path({str(work)!r}) / name)\n"
        )
        _in_another_process(code)
        work.rename(top)
    names = ("config.json", "preprocessor_config.json", "processor_config.json")
    seeds = []
    for folder in sorted(top.iterdir()):
        files = {n: json.loads((folder / n).read_text()) for n in names if (folder / n).exists()}
        seeds.append(json.dumps(files).encode())
    return seeds


def _model(content: bytes, folder: Path) -> None:
    try:
        files = json.loads(content)
    except (ValueError, RecursionError):
        files = {"config.json": content.decode("utf-8", "replace")}
    if not isinstance(files, dict):
        return
    for name in ("config.json", "preprocessor_config.json", "processor_config.json"):
        if name in files:
            value = files[name]
            text = value if isinstance(value, str) else json.dumps(value)
            (folder / name).write_text(text, "utf-8", "replace")
    use_model(find_model(str(folder)))


TARGETS = {
    target.name: target
    for target in (
        Target("records", _dataset("annotations.json"), _record_seeds, RECORD_TOKENS),
        Target("images", _image, _image_seeds, IMAGE_TOKENS),
        Target("template", _template, _template_seeds, TEMPLATE_TOKENS),
        Target("tar", _dataset("data.tar"), _tar_seeds, (b"ustar", b"../", b"0" * 11)),
        Target("parquet", _dataset("data.parquet"), _parquet_seeds, (b"PAR1",)),
        Target("videos", _video, _video_seeds, VIDEO_TOKENS),
        Target("audio", _audio, _sound_seeds, (b"RIFF", b"data", b"fmt ", b"fLaC", b"OggS")),
        Target("manifest", _manifest, _manifest_seeds, (), _seal_manifest),
        Target("index", _build_table, _table_seeds, (b"ARROW1", b"PAR1")),
        Target("state", _state, _state_seeds),
        Target("plan", _plan, _plan_seeds, (), _seal_plan),
        Target("arrow", _saved_dataset, _stream_seeds, (b"\xff\xff\xff\xff",)),
        Target("mds_index", _mds_index, _mds_seeds),
        Target("mds_data", _mds_data, lambda: [_mds_shard()]),
        Target("yaml", _yaml, _yaml_seeds, (b"&a ", b"*a", b"!!python/object:os.system ", b"<<: ")),
        Target("dataset_info", _info, _info_seeds),
        Target("csv", _csv, _csv_seeds, (b'"', b",", b"\n", b"\0")),
        Target("model", _model, _model_seeds),
    )
}
