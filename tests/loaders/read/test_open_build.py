"""Builds on disk and what needs no server: requests are joined rightly, checksums are compared,
options are checked.
"""

import builtins
import io
import json
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.common.errors import ConfigError, DamagedShard
from isobatch.loaders.read.build import StorageOptions, default_cache_dir, open_build
from isobatch.loaders.read.remote import GAP_BYTES, REQUEST_BYTES, join_ranges
from isobatch.shards.arrow_shards import decode_arrow
from isobatch.shards.checksums import wrong_bytes
from isobatch.shards.tar_shards import decode_tar
from support.builds.remote_builds import is_as_written
from support.builds.shard_fixture import FORMATS, group_samples, make_samples, write_build

GROUPS = group_samples(make_samples(80))


@pytest.fixture(params=FORMATS)
def folder(request, tmp_path):
    return write_build(tmp_path / "build", GROUPS, request.param)


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_build_on_disk_is_read_by_many_threads(folder, prefix):
    build = open_build(f"{prefix}{folder}")
    build.shards.prefetch(range(3))
    numbers = [*range(len(GROUPS))] * 20
    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8, initializer=barrier.wait) as pool:
        found = [*pool.map(build.read, numbers)]
    assert all(
        is_as_written(raw, GROUPS[number]) for raw, number in zip(found, numbers, strict=True)
    )
    build.close()


def test_a_flipped_bit_is_found_when_checksums_are_compared(folder):
    shard = min((folder / "shards").iterdir())
    content = shard.read_bytes()
    index = open_build(folder).index
    rng = np.random.default_rng(0)
    for group in range(0, len(GROUPS) - 1, 3):
        offset, length = index.row(group, "offset", "length")
        damaged = bytearray(content)
        damaged[int(rng.integers(offset, offset + length))] ^= 1 << int(rng.integers(8))
        shard.write_bytes(damaged)
        build = open_build(folder, options=StorageOptions(verify="first"))
        with pytest.raises(
            DamagedShard, match=rf"^{shard.name}, group {group}: its bytes have another checksum"
        ):
            build.read(group)
        assert is_as_written(build.read(group + 1), GROUPS[group + 1])


def test_a_group_is_checked_once(folder, monkeypatch):
    checked = []
    build = open_build(folder, options=StorageOptions(verify="first"))
    monkeypatch.setattr(
        "isobatch.loaders.read.build.wrong_bytes",
        lambda *given: checked.append(1) or wrong_bytes(*given),
    )
    for number in [0, 1, 8, 0, 1, 8, 9]:
        build.read(number)
    assert len(checked) == 4


ranges = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([0, 1, GAP_BYTES, GAP_BYTES + 1]),
        st.integers(1, REQUEST_BYTES),
    ),
    max_size=30,
    unique=True,
)


@given(ranges, st.randoms())
def test_joined_requests_cover_each_group_once_and_waste_little(parts, rng):
    ends, rows = [0, 0, 0], []
    for shard, gap, length in parts:
        rows.append((len(rows), shard, ends[shard] + gap, length))
        ends[shard] += gap + length
    rng.shuffle(rows)
    groups, shards, offsets, lengths = np.array(rows, np.int64).reshape(-1, 4).T
    requests = join_ranges(groups, shards, offsets, lengths)
    place = {row[0]: row[1:] for row in rows}
    assert sorted(group for request in requests for group in request.groups) == sorted(place)
    for request in requests:
        spans = sorted((place[group][1], sum(place[group][1:])) for group in request.groups)
        assert all(place[group][0] == request.shard for group in request.groups)
        assert (request.start, request.end) == (spans[0][0], spans[-1][1])
        assert len(spans) == 1 or request.end - request.start <= REQUEST_BYTES
        assert all(start - end <= GAP_BYTES for (_, end), (start, _) in pairwise(spans))
    asked = [row[0] for row in rows]
    firsts = [min(map(asked.index, request.groups)) for request in requests]
    assert firsts == sorted(firsts)


# id, tokens, images with (width, height), clips with their lengths
AUDIO_SAMPLES = [
    ("a", [0, 1], {}, {"a.wav": (b"wav a", 100)}),
    ("b", [2, 3, 4], {"b.jpg": (b"jpeg b", 3, 5)}, {}),
    ("c", [5], {"c.jpg": (b"jpeg c", 4, 6)}, {"c.wav": (b"", 200), "c.flac": (b"flac c", 300)}),
]


def arrow_group(refs):
    """The samples as a record batch; -> (its message, its schema)."""
    rows = [
        {
            "sample_id": name,
            "input_ids": tokens,
            "labels": tokens,
            "image_paths" if refs else "images": [*images]
            if refs
            else [file[0] for file in images.values()],
            "image_widths": [width for _, width, _ in images.values()],
            "image_heights": [height for _, _, height in images.values()],
            "audio_paths" if refs else "audios": [*clips]
            if refs
            else [file[0] for file in clips.values()],
            "audio_lengths": [length for _, length in clips.values()],
        }
        for name, tokens, images, clips in AUDIO_SAMPLES
    ]
    files = pa.list_(pa.string() if refs else pa.binary())
    names = {name: pa.list_(pa.int32()) for name in rows[0]} | {"sample_id": pa.string()}
    names |= {
        name: files for name in names if name in {"images", "audios", "image_paths", "audio_paths"}
    }
    batch = pa.RecordBatch.from_pylist(rows, schema=pa.schema(names))
    return batch.serialize(), batch.schema


def tar_group():
    """The samples as tar members."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for place, (name, tokens, images, clips) in enumerate(AUDIO_SAMPLES):
            about = {
                "sample_id": name,
                "image_widths": [width for _, width, _ in images.values()],
                "image_heights": [height for _, _, height in images.values()],
                "images": [*images],
                "audio_lengths": [length for _, length in clips.values()],
                "audios": [*clips],
            }
            numbers = io.BytesIO()
            np.save(numbers, np.array(tokens, np.int32))
            members = {"json": json.dumps(about).encode(), "input_ids.npy": numbers.getvalue()}
            members["labels.npy"] = numbers.getvalue()
            members |= {key: file[0] for key, file in [*images.items(), *clips.items()]}
            for suffix, content in members.items():
                info = tarfile.TarInfo(f"g000000000-s{place:05d}.{suffix}")
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return pa.py_buffer(buffer.getvalue())


class NamedMedia:
    """Files whose content says for whom they were read."""

    def read(self, names, owners, where):
        return [
            f"{where} {owner} {name}".encode() for name, owner in zip(names, owners, strict=True)
        ]

    def close(self):
        pass


@pytest.mark.parametrize("format", FORMATS)
def test_audio_comes_with_its_lengths_and_samples(format):
    refs = format == "refs"
    if format == "webdataset":
        raw = decode_tar(tar_group(), "here")
    else:
        content, schema = arrow_group(refs)
        raw = decode_arrow(content, schema, "here", NamedMedia() if refs else None)
    expected = (
        [b"here a a.wav", b"here c c.wav", b"here c c.flac"] if refs else [b"wav a", b"", b"flac c"]
    )
    assert [bytes(audio) for audio in raw.audios] == expected
    expected = [b"here b b.jpg", b"here c c.jpg"] if refs else [b"jpeg b", b"jpeg c"]
    assert [bytes(image) for image in raw.images] == expected
    assert raw.audio_lengths.tolist() == [100, 200, 300]
    assert raw.audio_samples.tolist() == [0, 2, 2]
    assert raw.image_samples.tolist() == [1, 2]
    assert raw.image_sizes.tolist() == [[5, 3], [6, 4]]
    assert raw.cu_seqlens.tolist() == [0, 2, 5, 6]
    assert {raw.audio_lengths.dtype, raw.audio_samples.dtype, raw.image_sizes.dtype} == {
        np.dtype(np.int32)
    }


def test_without_the_extra_it_is_named(monkeypatch, tmp_path):
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("obstore"):
            raise ModuleNotFoundError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"s3://bucket/build: .*pip install obstore"):
        open_build("s3://bucket/build", options=StorageOptions(cache_dir=tmp_path))


@pytest.mark.parametrize("url", ["ftp://host/build", "hdfs://host/build"])
def test_an_unknown_scheme_lists_the_known(url):
    with pytest.raises(
        ConfigError, match="unknown scheme; use a folder, file:// or s3://, gs://, az://"
    ):
        open_build(url)


def test_a_uri_without_a_bucket_is_refused():
    with pytest.raises(ConfigError, match="names a bucket"):
        open_build("s3://")


@pytest.mark.parametrize("options", [{"cache_bytes": -1}, {"timeout_s": 0}, {"verify": "always"}])
def test_a_wrong_option_is_named(options):
    (name,) = options
    with pytest.raises(ConfigError, match=f"^{name} is "):
        StorageOptions(**options)


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "here"))
    assert default_cache_dir() == tmp_path / "here"
    monkeypatch.delenv("ISOBATCH_CACHE")
    monkeypatch.setattr("isobatch.loaders.read.build.tempfile.gettempdir", lambda: "/scratch")
    assert str(default_cache_dir()).startswith("/scratch/isobatch-")
