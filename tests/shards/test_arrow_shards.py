"""Groups of Arrow shards are decoded as pyarrow reads them, and damage never reaches outside."""

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

from isobatch.shards.arrow_shards import decode_arrow, shard_schema
from isobatch.shards.stored_group import DECODE_ERRORS

IDS = ["plain", "schön", "图片", ""]


class PathReader:
    """Gives the name of each file and its sample's as its content."""

    def read(self, names, owners, where):
        return [f"{owner}/{name}".encode() for name, owner in zip(names, owners, strict=True)]


def random_rows(rng, count, *, refs):
    """Rows of a shard, with 0 to 3 images and clips each."""
    rows = []
    for number in range(count):
        tokens, images, clips = rng.integers([0, 0, 0], [40, 4, 3]).tolist()
        row = {"sample_id": f"{IDS[int(rng.integers(4))]}{number}"}
        for name in ("input_ids", "labels"):
            row[name] = rng.integers(-100, 1 << 31, tokens).tolist()
        for kind, size in (("image", images), ("audio", clips)):
            contents = [rng.bytes(int(rng.integers(0, 50))) for _ in range(size)]
            names = [f"{IDS[place]}.bin" for place in range(size)]
            row[f"{kind}_paths" if refs else f"{kind}s"] = names if refs else contents
        for name, size in {"image_widths": images, "image_heights": images}.items():
            row[name] = rng.integers(1, 5000, size).tolist()
        row["audio_lengths"] = rng.integers(1, 5000, clips).tolist()
        rows.append(row)
    return rows


def flat(rows, name):
    return [value for row in rows for value in row[name]]


def owners(rows, name):
    return [place for place, row in enumerate(rows) for _ in row[name]]


@pytest.mark.parametrize("extras", [{}, {"note": "string", "scores": "list<double>"}])
@pytest.mark.parametrize("refs", [False, True])
def test_a_group_is_what_pyarrow_reads(refs, extras):
    rng = np.random.default_rng(0)
    schema = shard_schema(refs=refs, extras=extras)
    media = PathReader() if refs else None
    for _ in range(60):
        rows = random_rows(rng, int(rng.integers(1, 12)), refs=refs)
        for row in rows if extras else []:
            row["extras"] = {"note": None, "scores": [0.5]} if rng.random() < 0.5 else {"note": "n"}
        batch = pa.RecordBatch.from_pylist(rows, schema=schema)
        first = int(rng.integers(len(rows)))
        content = batch.slice(first).serialize()
        raw = decode_arrow(content, schema, "here", media, extras)
        rows = pa.ipc.read_record_batch(content, schema).to_pylist()
        assert raw.sample_ids == tuple(row["sample_id"] for row in rows)
        assert raw.input_ids.tolist() == flat(rows, "input_ids")
        assert raw.labels.tolist() == flat(rows, "labels")
        lengths = [len(row["input_ids"]) for row in rows]
        assert raw.cu_seqlens.tolist() == [0, *np.cumsum(lengths).tolist()]
        sizes = zip(flat(rows, "image_heights"), flat(rows, "image_widths"), strict=True)
        assert raw.image_sizes.tolist() == [list(size) for size in sizes]
        assert raw.audio_lengths.tolist() == flat(rows, "audio_lengths")
        for kind, found, samples in (
            ("image", raw.images, raw.image_samples),
            ("audio", raw.audios, raw.audio_samples),
        ):
            name = f"{kind}_paths" if refs else f"{kind}s"
            expected = flat(rows, name)
            if refs:
                ids = [raw.sample_ids[place] for place in owners(rows, name)]
                expected = [f"{a}/{b}".encode() for a, b in zip(ids, expected, strict=True)]
            assert [bytes(content) for content in found] == expected
            assert samples.tolist() == owners(rows, name)
        if extras:
            assert raw.extras == {
                name: [row["extras"][name] for row in rows] for name in ("note", "scores")
            }


def test_every_changed_byte_before_the_files_gives_an_error_or_views_into_the_group():
    rng = np.random.default_rng(1)
    schema = shard_schema(refs=False)
    content = pa.RecordBatch.from_pylist(random_rows(rng, 5, refs=False), schema=schema).serialize()
    plain, num_errors = content.to_pybytes(), 0
    for place in range(len(plain)):
        damaged = bytearray(plain)
        damaged[place] ^= int(rng.integers(1, 256))
        start = np.frombuffer(damaged, np.uint8).__array_interface__["data"][0]
        try:
            raw = decode_arrow(pa.py_buffer(damaged), schema, "here", None)
        except DECODE_ERRORS:
            num_errors += 1
            continue
        for view in (raw.input_ids, raw.labels, *raw.images, *raw.audios):
            found = np.frombuffer(view, np.uint8) if len(view) else np.frombuffer(damaged, np.uint8)
            begin = found.__array_interface__["data"][0]
            assert start <= begin <= begin + found.nbytes <= start + len(plain)
    assert num_errors > 300


def one_row(schema):
    (row,) = random_rows(np.random.default_rng(2), 1, refs=False)
    return pa.RecordBatch.from_pylist([row], schema=schema)


def test_messages_that_no_shard_has_are_refused():
    schema = shard_schema(refs=False)
    assert decode_arrow(one_row(schema).serialize(), schema, "here", None).sample_ids
    with pytest.raises(DECODE_ERRORS):
        decode_arrow(schema.serialize(), schema, "here", None)
    part = one_row(schema).select(["sample_id", "input_ids", "labels"])
    with pytest.raises(DECODE_ERRORS):
        decode_arrow(part.serialize(), schema, "here", None)
    for name in ("sample_id", "labels", "images"):
        missing = one_row(schema)
        place = schema.names.index(name)
        nothing = pa.nulls(1, schema.field(name).type)
        missing = missing.set_column(place, schema.field(name), nothing)
        with pytest.raises(ValueError, match="a value is missing"):
            decode_arrow(missing.serialize(), schema, "here", None)
