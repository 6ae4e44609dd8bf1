"""Files of somebody who means harm: refused or used in bounded time and memory, and never obeyed.

`docs/reference/security.md` says what each may do. Files of tests/data/fuzz_seeds were findings of
`scripts/fuzz.py`, which has the processes and limits; a file's name begins with its target's.
"""

import gzip
import io
import json
import pickle
import shutil
import socket
import sqlite3
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from isobatch.common.errors import ConfigError, DataError
from isobatch.counting.text.chat_template import ChatTemplate, TemplateRefusedError
from isobatch.engine.runtime.checkpoints.training_state import load_state
from isobatch.engine.train.models._transformers_files import read_model
from isobatch.packer.sources.dataset import find_dataset
from isobatch.packer.sources.trainers import auxiliary
from isobatch.shards.local_folder import LocalFolder
from isobatch.shards.manifest import parse_manifest
from support import ROOT, TESTS

SEEDS = sorted((TESTS / "data" / "fuzz_seeds").iterdir())
NESTED = "{% set n = namespace(a=[0]) %}{% for i in range(60) %}{% set n.a = MADE %}{% endfor %}"
MB = 1 << 20


def replay(files):
    """What `scripts/fuzz.py` says of files, each in a process with its limits."""
    command = [sys.executable, str(ROOT / "scripts" / "fuzz.py"), "--replay", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def tar_of_zeros(sizes):
    """A compressed tar of files that hold nothing but zeros."""

    class Zeros(io.RawIOBase):
        def read(self, size=-1):
            return bytes(size)

    buffer = io.BytesIO()
    with gzip.open(buffer, "wb", 1) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for number, size in enumerate(sizes):
            info = tarfile.TarInfo(f"{number}.jpg")
            info.size = size
            archive.addfile(info, Zeros())
    return buffer.getvalue()


def test_what_fuzzing_found_is_refused_or_taken():
    assert len(SEEDS) > 5
    result = replay(SEEDS)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("\n") >= len(SEEDS)


def test_what_unpacks_to_gigabytes_takes_bounded_memory(tmp_path):
    """30 x 40 MB, a file of 600 MB, JSON that never closes, from a few MB."""
    (tmp_path / "tar-many").write_bytes(tar_of_zeros([40 * MB] * 30))
    (tmp_path / "tar-large").write_bytes(tar_of_zeros([600 * MB]))
    for name, start in (("open", b"["), ("text", b'{"text": "')):
        content = start + b"[" * (100 * MB) if name == "open" else start + b"a" * (100 * MB)
        (tmp_path / f"records-{name}").write_bytes(gzip.compress(content, 1))
    result = replay(sorted(tmp_path.iterdir()))
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_text_that_a_dictionary_repeats_is_read_a_few_rows_at_a_time(tmp_path):
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), ["a" * (8 * MB)])
    table = pa.table({"id": list(map(str, range(64))), "text": texts})
    pq.write_table(table, tmp_path / "data.parquet", compression="zstd")
    assert (tmp_path / "data.parquet").stat().st_size < 10_000
    chunks = find_dataset(str(tmp_path), None).parts[0].open().chunks(1024, lambda _: None)
    before = pa.total_allocated_bytes()
    sizes = [
        (len(record.value["text"]), pa.total_allocated_bytes() - before)
        for chunk in chunks
        for record in chunk.records()
    ]
    assert [size for size, _ in sizes] == [8 * MB] * 64
    assert max(allocated for _, allocated in sizes) < 200 * MB


@pytest.mark.parametrize("made", ["[n.a, n.a]", "(n.a, n.a)", "{'a': n.a, 'b': n.a}"])
@pytest.mark.parametrize(
    "used", ["n.a", "n.a|string|length", "n.a|tojson", "'x' ~ n.a", "'%s' % n.a", "n.a == [n.a]"]
)
def test_a_template_cannot_write_a_list_that_does_not_end(made, used):
    template = ChatTemplate(NESTED.replace("MADE", made) + "{{ " + used + " }}", {})
    with pytest.raises(TemplateRefusedError, match="lists in lists"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "files",
    [
        '"http://elsewhere.test/x.csv"',
        '[{split: train, path: ["s3://bucket/x.csv"]}]',
        '"/etc/passwd"',
        '["../../secret.csv"]',
        '"zip://*.csv::http://elsewhere.test/x.zip"',
    ],
)
@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_a_readme_sends_no_request_and_leads_nowhere(tmp_path, monkeypatch, files, name):
    def no_request(*place, **_):
        raise AssertionError(f"a request to {place[:2]}")

    monkeypatch.setattr(socket, "getaddrinfo", no_request)
    (tmp_path / "a.csv").write_text("text\nx\n")
    card = f"configs:\n- config_name: default\n  data_files: {files}\n"
    (tmp_path / name).write_text(f"---\n{card}---\n" if name == "README.md" else card)
    with pytest.raises(DataError, match="names files elsewhere"):
        find_dataset(str(tmp_path), None)


class _Harm:
    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return Path.mkdir, (self.place,)


def test_a_training_state_runs_nothing(tmp_path):
    shutil.copytree(TESTS / "data" / "old_training_state", tmp_path / "state")
    harm = tmp_path / "harm"
    (tmp_path / "state" / "step-3" / ".metadata").write_bytes(pickle.dumps(_Harm(harm)))
    layers = {place: torch.nn.Linear(2, 2) for place in range(3)}
    with pytest.raises(DataError, match=r"it names .*, which no state has"):
        load_state(tmp_path / "state", layers, torch.optim.AdamW(layers[0].parameters()))
    assert not harm.exists()


def test_an_sqlite_index_that_never_answers_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(auxiliary, "QUERY_S", 0.2)
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta" / ".info.json").write_text('{"shard_counts": {"0.tar": 1}}')
    with sqlite3.connect(tmp_path / ".nv-meta" / "index.sqlite") as index:
        index.execute("CREATE TABLE samples (tar_file_id, sample_index, sample_key)")
        index.execute("INSERT INTO samples VALUES (0, 0, '')")
        index.execute(
            "CREATE VIEW sample_parts AS"
            " WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
            " SELECT i AS tar_file_id, i AS sample_index, 'x' || i AS part_name,"
            " 0 AS content_byte_offset, 0 AS content_byte_size FROM n"
        )
    with pytest.raises(DataError, match="cannot be read: interrupted"):
        auxiliary._Members(str(tmp_path))


@pytest.mark.parametrize("name", ["../x.arrow", "/etc/passwd", "a/../../x", "shards/\0"])
@pytest.mark.parametrize("key", ["shards", "files", "tables"])
def test_a_manifest_names_no_file_outside_of_its_build(damaged_manifest, key, name):
    def change(values):
        if key == "tables":
            values["tables"] = name
        else:
            values[key][0]["name"] = name

    with pytest.raises(DataError, match="is not in the build"):
        parse_manifest(damaged_manifest(change), "place")


@pytest.fixture
def damaged_manifest(shared):
    from support.builds.packed import build  # noqa: PLC0415
    from support.builds.raw_data import good_records, write_dataset  # noqa: PLC0415

    def make(folder):
        build(write_dataset(folder / "raw", good_records(folder / "raw", 4)), folder / "out")

    values = json.loads((shared("hostile: a build", make) / "out" / "manifest.json").read_text())
    values.pop("content_hash")

    def damaged(change):
        copy = json.loads(json.dumps(values))
        change(copy)
        return json.dumps(copy).encode()

    return damaged


def test_a_folder_of_images_or_none_of_a_manifest_is_a_text(damaged_manifest):
    with pytest.raises(DataError, match="data_root is"):
        parse_manifest(damaged_manifest(lambda values: values.update(data_root=["x"])), "place")


def test_a_device_without_an_end_is_no_file():
    with pytest.raises(OSError, match="a device, not a file"):
        LocalFolder("/dev").read("zero")


def test_a_model_folder_runs_no_code_of_its_own(tmp_path):
    harm = tmp_path / "harm"
    (tmp_path / "own.py").write_text(f"import pathlib; pathlib.Path({str(harm)!r}).mkdir()\n")
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for place in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ConfigError):
            read_model("qwen2_vl", place, None)
    assert not harm.exists()


def test_weights_in_a_pickle_are_told_with_what_to_do(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Harm(tmp_path / "harm")))
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        read_model("qwen2_vl", tmp_path, None)
    assert not (tmp_path / "harm").exists()
