"""Columns of other names: without a build as in one, in memory, at a place and as a stream."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import IterableDataset

from isobatch.common.errors import ConfigError
from isobatch.loaders import BalancedLoader, StreamingLoader
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo.dataset import demo_tokenizer_path
from support.builds.packed import digests, quiet
from support.builds.raw_data import options, write_dataset, write_image

COLUMNS = {"messages": "chat", "images": "pics"}
NUM = 24
LOADING = {
    "model": "tiny",
    "tokenizer": str(demo_tokenizer_path()),
    "columns": COLUMNS,
    "workers": 0,
    "dp_rank": 0,
    "dp_world_size": 1,
}


def rows(folder):
    """Half of the records have a picture, by an absolute path."""
    return [
        {
            "id": f"r{number}",
            "chat": [
                {"role": "user", "content": f"What {number}?"},
                {"role": "assistant", "content": "word " * (number + 1)},
            ],
            "pics": [str(folder / "a.png")] if number % 2 else [],
        }
        for number in range(NUM)
    ]


class Stream(IterableDataset):
    def __init__(self, records):
        self.records = records

    def __iter__(self):
        return iter(self.records)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("columns") / "raw"
    write_image(folder / "a.png", 40, 40, 0)
    return write_dataset(folder, rows(folder))


def loaded(loader):
    found = {}
    for batch in (batch for step in loader for batch in step):
        ids = batch.input_ids.split(batch.cu_seqlens.diff().tolist())
        found |= {name: each.tolist() for name, each in zip(batch.sample_ids, ids, strict=True)}
    loader.close()
    return found


@pytest.fixture(scope="module")
def built(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("columns-built") / "out"
    columns = tuple(f"{ours}={theirs}" for ours, theirs in COLUMNS.items())
    config = options(folder, out, columns=columns, max_seq_len=1024)
    Builder(BuildConfig(**config), quiet()).build()
    return out


@pytest.mark.parametrize("route", ["list", "datasets", "place", "stream"])
def test_samples_are_those_of_the_build(folder, built, tmp_path, monkeypatch, route):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data = {
        "list": lambda: rows(folder),
        "datasets": lambda: datasets.Dataset.from_list(rows(folder)),
        "place": lambda: str(folder),
        "stream": lambda: Stream(rows(folder)),
    }[route]()
    own = {"measure": "own"} if route == "stream" else {}
    found = loaded(BalancedLoader(data, **LOADING, **own))
    expected = loaded(StreamingLoader(built, workers=0, dp_rank=0, dp_world_size=1))
    assert len(found) == NUM
    assert found == expected


def test_a_saved_build_is_the_packers(folder, built, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loader = BalancedLoader(str(folder), **LOADING, max_tokens=1024)
    loader.save_build(tmp_path / "saved")
    loader.close()
    saved = digests(tmp_path / "saved")
    del saved["report.html"]
    assert saved == digests(built)


@pytest.mark.filterwarnings("error:no .* .keep_columns.")
@pytest.mark.parametrize("layout", ["json", "parquet"])
def test_a_kept_column_is_known_by_its_old_name_and_by_ours(tmp_path, monkeypatch, layout):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    raw = tmp_path / "raw"
    values = [{"id": str(n), "ask": f"Why {n}?", "reply": f"So {n}."} for n in range(4)]
    if layout == "json":
        write_dataset(raw, values)
    else:
        raw.mkdir()
        pq.write_table(pa.Table.from_pylist(values), raw / "a.parquet")
    columns = {"question": "ask", "answer": "reply"}
    given = tuple(f"{ours}={theirs}" for ours, theirs in columns.items())
    config = options(raw, tmp_path / "out", columns=given, keep_columns=("ask", "answer"))
    Builder(BuildConfig(**config, max_seq_len=1024), quiet()).build()
    ranks = {"workers": 0, "dp_rank": 0, "dp_world_size": 1}
    keep = {**LOADING, "columns": columns, "keep_columns": ("ask", "answer"), "max_tokens": 1024}
    loaders = [BalancedLoader(str(raw), **keep), StreamingLoader(tmp_path / "out", **ranks)]
    loaders += [BalancedLoader(values, **keep)]
    for loader in loaders:
        found = {}
        for batch in (batch for step in loader for batch in step):
            kept = batch.extras["ask"], batch.extras["answer"]
            found |= zip(batch.sample_ids, zip(*kept, strict=True), strict=True)
        assert found == {v["id"]: (v["ask"], v["reply"]) for v in values}
        loader.close()


def test_names_that_nobody_has_are_refused(folder):
    given = LOADING | {"columns": {"messages": "chat", "images": "pictures"}}
    with pytest.raises(ConfigError, match="columns: no 'pictures' in the first records: chat, id,"):
        BalancedLoader(rows(folder), **given)
    with pytest.raises(ConfigError, match="columns: no field 'talk'; known: "):
        BalancedLoader(rows(folder), **LOADING | {"columns": {"talk": "chat"}})
    with pytest.raises(ConfigError, match="columns: of no use with encode="):
        BalancedLoader(rows(folder), encode=dict, columns=COLUMNS)
