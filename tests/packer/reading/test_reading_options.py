"""--choices, --answers and --unknown-marks: in the build, in its identity and without a build."""

import pyarrow.parquet as pq
import pytest

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import BalancedLoader, StreamingLoader
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.shards.manifest import read_manifest
from support.builds.packed import digests, quiet
from support.builds.raw_data import options, write_dataset, write_image

READING = {"choices": "letters", "answers": "drawn", "unknown_marks": "text"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Questions with answers, options and marks that match no image."""
    folder = tmp_path_factory.mktemp("reading") / "raw"
    write_image(folder / "a.png", 40, 40, 0)
    rows = [
        {"id": f"q{k}", "question": f"Which {k}?", "answers": list("abcab"), "options": ["x", "y"]}
        for k in range(12)
    ]
    question = {"question": "See <image2>", "answer": "It.", "image": "a.png"}
    return write_dataset(folder, [*rows, {"id": "m", **question}])


def packed(folder, out, **changes):
    Builder(BuildConfig(**options(folder, out, max_rejected=0.5, **changes)), quiet()).build()
    return read_manifest(str(out)).values


def loaded(batches):
    """Id -> the tokens of its sample."""
    found = {}
    for batch in batches:
        ids = batch.input_ids.split(batch.cu_seqlens.diff().tolist())
        found |= {name: each.tolist() for name, each in zip(batch.sample_ids, ids, strict=True)}
    return found


def test_options_are_part_of_a_build_only_where_they_are_given(folder, tmp_path):
    plain = packed(folder, tmp_path / "plain")
    same = packed(folder, tmp_path / "same", choices="report", answers="first")
    other = packed(folder, tmp_path / "other", **READING)
    assert digests(tmp_path / "plain") == digests(tmp_path / "same")
    assert "reading" not in plain["config"]
    assert plain["config_hash"] == same["config_hash"] != other["config_hash"]
    assert other["config"]["reading"] == READING
    assert (plain["totals"]["num_rejected"], other["totals"]["num_rejected"]) == (1, 0)
    with pytest.raises(DataError, match="another --out"):
        packed(folder, tmp_path / "plain", answers="drawn")


def test_all_answers_are_samples_with_ids_of_their_own(folder, tmp_path):
    packed(folder, tmp_path / "all", answers="all", chunk_records=5)
    counts = pq.read_table(tmp_path / "all" / "counts.parquet")
    ids = [f"q{k}#a{number}" for k in range(12) for number in (1, 2, 3)]
    assert counts.column("sample_id").to_pylist() == ids


def test_a_loader_without_a_build_reads_as_the_build_does(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = {"max_seq_len": 2048, "seed": 3}
    packed(folder, tmp_path / "build", **given, **READING)
    built = StreamingLoader(tmp_path / "build", workers=0, dp_rank=0, dp_world_size=1)
    model = {"model": "tiny", "tokenizer": str(demo_tokenizer_path()), "max_tokens": 2048}
    ranks = {"workers": 0, "seed": 3, "dp_rank": 0, "dp_world_size": 1}
    loader = BalancedLoader(str(folder), **model, **ranks, **READING, max_rejected=0.5)
    own = loaded(batch for step in loader for batch in step)
    assert own == loaded(batch for step in built for batch in step)
    assert len(own) == 13
    loader.save_build(tmp_path / "saved")
    saved = digests(tmp_path / "saved")
    del saved["report.html"]  # the builder alone writes none
    assert saved == digests(tmp_path / "build")
    loader.close()


def test_a_loader_refuses_options_that_it_cannot_follow(folder):
    with pytest.raises(ConfigError, match="answers='all' makes several samples of a record"):
        BalancedLoader([{"text": "a"}], model="tiny", answers="all")
    with pytest.raises(ConfigError, match="answers: of no use with encode="):
        BalancedLoader([{"text": "a"}], encode=lambda record: record, answers="drawn")


def test_the_models_own_markup_in_a_text_is_an_image(folder, tmp_path):
    texts = {
        "marker": "<image>What?",
        "wrapped": "<|vision_start|><|image_pad|><|vision_end|>What?",
        "bare": "<|image_pad|>What?",
    }
    rows = [
        {"id": name, "question": text, "answer": "It.", "image": "a.png"}
        for name, text in texts.items()
    ]
    write_image(tmp_path / "raw" / "a.png", 40, 40, 0)
    packed(write_dataset(tmp_path / "raw", rows), tmp_path / "out", model="qwen2_vl")
    loader = StreamingLoader(tmp_path / "out", workers=0, dp_rank=0, dp_world_size=1)
    found = loaded(batch for step in loader for batch in step)
    assert found["wrapped"] == found["bare"] == found["marker"]
