"""Videos in every source and every format of a build: the same samples and original files."""

import io
import json
import tarfile

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting import pack_block
from isobatch.loaders import StreamingLoader
from isobatch.loaders.read.build import open_build
from isobatch.media.frame_archive import pack_frames
from isobatch.packer.inspect.view import inspect_group
from isobatch.packer.verify import verify_build
from isobatch.shards import arrow_shards
from support.builds.packed import build, quiet, read_samples
from support.odd_videos import encoded, picture

FILM, OTHER = encoded(12), encoded(9, container="webm", codec="libvpx")
FILES = {
    "film.mp4": FILM,
    "other.webm": OTHER,
    "still.png": picture(),
    **{f"frames/{number}.png": picture(shade=number) for number in (1, 2, 10)},
}
FRAMES = [name for name in FILES if name.startswith("frames/")]
MARKERS = {"image": "<image>", "video": "<video>"}
SAMPLES = {
    "one": [("video", "film.mp4")],
    "mixed": [("video", "film.mp4"), ("image", "still.png"), ("video", "other.webm")],
    "frames": [("video", FRAMES), ("image", "still.png")],
}
"""Id -> kind and file of each marker in the text."""
OPTIONS = {"model": "internvl3", "max_seq_len": 100_000, "workers": 1, "max_rejected": 0.0}


def records(given=lambda name: name):
    """Records whose files are `given(name)`."""
    for sample_id, files in SAMPLES.items():
        text = " ".join(MARKERS[kind] for kind, _ in files)
        turns = [("human", f"{text} what?"), ("gpt", "An answer.")]
        record = {
            "id": sample_id,
            "conversations": [{"from": role, "value": value} for role, value in turns],
        }
        for kind in MARKERS:
            names = [name for each, name in files if each == kind]
            found = [
                [given(one) for one in name] if isinstance(name, list) else given(name)
                for name in names
            ]
            record |= {kind: found} if found else {}
        yield record


def write_files(folder):
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_bytes(content)


def json_lines(folder):
    write_files(folder)
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, records())))


def message_parts(folder):
    """Contents of messages as lists of parts, as transformers takes them."""
    write_files(folder)
    lines = []
    for sample_id, files in SAMPLES.items():
        parts = [{"type": kind, kind: name} for kind, name in files]
        spaced = [part for each in parts for part in (each, {"type": "text", "text": " "})]
        content = [*spaced[:-1], {"type": "text", "text": " what?"}]
        messages = [("user", content), ("assistant", "An answer.")]
        lines.append(
            {"id": sample_id, "messages": [{"role": a, "content": b} for a, b in messages]}
        )
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))


def frame_folder(folder):
    """The list of images as a folder of them."""
    write_files(folder)
    lines = [json.dumps(each).replace(json.dumps(FRAMES), '"frames"') for each in records()]
    assert any('"frames"]' in line for line in lines)
    (folder / "a.jsonl").write_text("\n".join(lines))


def parquet(folder):
    """Bytes and names in cells, as `datasets` has them."""
    folder.mkdir()
    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = list(records(lambda name: {"bytes": FILES[name], "path": name}))
    for row in rows:  # one type: a list of videos, each a list of one file or of frames
        row["video"] = [each if isinstance(each, list) else [each] for each in row["video"]]
    plain = [row for row in rows if row["id"] != "frames"]
    for row in plain:
        row["video"] = [each for (each,) in row["video"]]
    turn = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
    kinds = [("id", pa.string()), ("conversations", turn), ("image", pa.list_(cell))]
    nested = pa.schema([*kinds, ("video", pa.list_(pa.list_(cell)))])
    flat = pa.schema([*kinds, ("video", pa.list_(cell))])
    pq.write_table(pa.Table.from_pylist(plain, flat), folder / "0.parquet")
    rest = [row for row in rows if row["id"] == "frames"]
    pq.write_table(pa.Table.from_pylist(rest, nested), folder / "1.parquet")


def saved_dataset(folder):
    rows = [row for row in records(lambda name: FILES[name]) if row["id"] != "frames"]
    rows = [{"image": None, **row} for row in rows]
    datasets.Dataset.from_list(rows).save_to_disk(folder)


def tar(folder, name="a.tar"):
    folder.mkdir()
    with tarfile.open(folder / name, "w:gz" if name.endswith("gz") else "w") as archive:

        def add(name, content):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))

        for record in records(lambda name: name.replace("/", "-")):
            add(f"{record['id']}.json", json.dumps(record).encode())
            for kind, given in SAMPLES[record["id"]]:
                for file in given if isinstance(given, list) else [given]:
                    add(f"{record['id']}.{file.replace('/', '-')}", FILES[file])
                assert kind in record


def compressed_tar(folder):
    tar(folder, "a.tar.gz")


SOURCES = [json_lines, message_parts, frame_folder, parquet, saved_dataset, tar, compressed_tar]


def contents(sample_id):
    """The files that a build must store for a sample, in the order of the text."""
    return [
        pack_frames([FILES[one] for one in name]) if isinstance(name, list) else FILES[name]
        for _, name in SAMPLES[sample_id]
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(raw data, build) of JSON lines."""
    folder = tmp_path_factory.mktemp("videos")
    json_lines(folder / "raw")
    build(folder / "raw", folder / "out", **OPTIONS)
    return folder / "raw", folder / "out"


def test_every_source_gives_the_same_samples(tmp_path, plain):
    expected = {row["sample_id"]: row for row in read_samples(plain[1])}
    assert expected.keys() == SAMPLES.keys()
    for row in expected.values():
        assert row["images"] == contents(row["sample_id"])
    for write in SOURCES:
        raw, out = tmp_path / write.__name__, tmp_path / f"{write.__name__}-out"
        write(raw)
        build(raw, out, **OPTIONS)
        found = {row["sample_id"]: row for row in read_samples(out)}
        assert len(found) == (2 if write is saved_dataset else 3), write
        for sample_id, row in found.items():
            assert row == expected[sample_id], (write.__name__, sample_id)


def test_every_format_holds_the_files_and_the_loader_decodes_them(tmp_path, plain):
    seen = {}
    for number, form in enumerate(("arrow", "webdataset", "refs")):
        out = tmp_path / form
        build(plain[0], out, **OPTIONS, format=form, seed=5)
        with_files = open_build(out)
        groups = [with_files.read(group) for group in range(len(with_files.index))]
        stored = {}
        for group in groups:
            for place, sample_id in enumerate(group.sample_ids):
                own = group.image_samples == place
                files = [bytes(each) for each, mine in zip(group.images, own, strict=True) if mine]
                facts = group.image_frames[own].tolist(), group.image_rates[own].tolist()
                stored[sample_id] = files, group.image_sizes[own].tolist(), *facts
                assert files == contents(sample_id), form
        loader = StreamingLoader(out, dp_rank=0, dp_world_size=1, pixel_dtype=torch.uint8)
        batches = {batch.sample_ids: batch for (batch,) in loader}
        assert sorted(each for ids in batches for each in ids) == sorted(SAMPLES)
        pixels = [batches[key].pixel_values for key in sorted(batches)]
        if number == 0:
            seen = stored
            first = pixels
        assert stored == seen, form
        assert all(torch.equal(a, b) for a, b in zip(pixels, first, strict=True)), form
        with_files.close()
    assert not verify_build(out, quiet(), workers=1, media=True).problems
    shown = [each for g in range(len(groups)) for each in inspect_group(out, g).samples]
    assert [image.problem for each in shown for image in each.images] == [""] * 6
    (plain[0] / FRAMES[1]).write_bytes(picture(size=(20, 20)))
    (problem,) = verify_build(out, quiet(), workers=1, media=True).problems
    (plain[0] / FRAMES[1]).write_bytes(FILES[FRAMES[1]])
    assert "sample 'frames': frame_sizes" in problem
    tar(tmp_path / "tar")
    with pytest.raises(ConfigError, match="is no file of its own"):
        build(tmp_path / "tar", tmp_path / "refused", **OPTIONS, format="refs")


def test_more_bytes_than_a_group_holds_are_one_line(tmp_path, plain, monkeypatch):
    monkeypatch.setattr(pack_block, "MOST_FILE_BYTES", len(FILM) + 10)
    summary = build(plain[0], tmp_path / "one", **OPTIONS | {"max_rejected": 1.0})
    assert summary.rejected["too_many_bytes"].number == 1
    assert "--format webdataset" in summary.rejected["too_many_bytes"].first
    build(plain[0], tmp_path / "tar", **OPTIONS, format="webdataset")
    monkeypatch.undo()
    monkeypatch.setattr(arrow_shards, "MOST_FILE_BYTES", len(FILM) + 10)
    with pytest.raises(DataError, match="a group of an Arrow shard holds 2 GiB"):
        build(plain[0], tmp_path / "group", **OPTIONS)


def test_a_tar_of_clips_and_captions_is_documents(tmp_path):
    """As video2dataset writes them: a clip, its caption, and what was downloaded."""
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    with tarfile.open(raw / "a.tar", "w") as archive:
        about = json.dumps({"caption": "A film.", "status": "success", "url": "x"}).encode()
        for name, content in (("0.mp4", FILM), ("0.json", about), ("0.txt", b"A film.")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    build(raw, out, **OPTIONS)
    (sample,) = read_samples(out)
    assert sample["images"] == [FILM]
    assert sample["image_frames"] == [12]
