"""`pad_each_to`: samples count with their padding, so caps hold after it, with a build or none."""

import json
from math import ceil

import numpy as np
import pytest
import torch

from isobatch.balance.steps.step_planner import StepAssignment
from isobatch.common.errors import ConfigError
from isobatch.common.types import Counts, Groups, Limits
from isobatch.loaders import BalancedLoader, StreamingLoader, packed_batch, packed_length
from isobatch.packer.report.figures import make_report
from isobatch.packer.verify import require_intact, verify_build
from isobatch.shards.index import open_index
from isobatch.shards.manifest import read_manifest
from support.builds.command import run_packer
from support.builds.packed import build, digests, quiet
from support.builds.raw_data import write_dataset
from support.builds.sample_tables import llm_tokens
from support.loading.online_data import OPTIONS, open_ranks, records
from support.ranks import run_ranks

CAP = 448
MULTIPLES = (8, 64)
SHOWN = {"pixel_dtype": torch.uint8, "workers": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("padding") / "raw"
    return write_dataset(folder, records(folder, 90))


@pytest.fixture(scope="module")
def builds(folder, tmp_path_factory):
    """Multiple -> a build of the same dataset."""
    out = tmp_path_factory.mktemp("builds")
    for multiple in (1, *MULTIPLES):
        build(folder, out / str(multiple), max_seq_len=CAP, pad_each_to=multiple, max_rejected=0.5)
    return {multiple: out / str(multiple) for multiple in (1, *MULTIPLES)}


def lengths_of(loaders):
    """Lengths of the samples of each micro-batch that any rank gives."""
    steps = zip(*loaders, strict=True)
    batches = [batch for step in steps for rank in step for batch in rank]
    return [batch.cu_seqlens.diff().tolist() for batch in batches], batches


def assert_within_cap(loaders, multiple):
    lengths, batches = lengths_of(loaders)
    padded = [sum(ceil(length / multiple) * multiple for length in part) for part in lengths]
    assert max(padded) <= CAP
    for batch, total in zip(batches, padded, strict=True):
        result = packed_batch(batch, pad_each_to=multiple)
        assert result.num_tokens == (total if batch.num_samples else multiple)
        fixed = packed_length(CAP, pad_each_to=multiple)
        assert packed_batch(batch, pad_each_to=multiple, pad_total_to=fixed).num_tokens == fixed
    ids = [sample_id for batch in batches for sample_id in batch.sample_ids]
    assert len(ids) == len(set(ids))
    return ids


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_caps_of_a_build_hold_after_padding(builds, multiple):
    routes = {
        "stored": {},
        "regrouped": {"regroup": "epoch"},
        "chosen": {"split": "train", "validation_fraction": 0.3},
        "in order": {"shuffle": False, "remainder": "split"},
    }
    for route, options in routes.items():
        loaders = [
            StreamingLoader(builds[multiple], dp_rank=rank, dp_world_size=2, **SHOWN | options)
            for rank in range(2)
        ]
        assert {loader.pad_each_to for loader in loaders} == {multiple}, route
        ids = assert_within_cap(loaders, multiple)
        packed = read_manifest(builds[multiple]).num_packed
        assert len(ids) == packed or route == "chosen", route


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_caps_hold_after_padding_without_a_build(folder, multiple):
    rows = json.loads((folder / "annotations.json").read_text())
    routes = {
        "given": {"max_tokens": CAP},
        "both given, in order": {"max_tokens": CAP, "shuffle": False},
        "own": {"max_tokens": CAP, "measure": "own"},
    }
    for route, options in routes.items():
        settings = SHOWN | options | {"pad_each_to": multiple, "max_rejected": 0.5}
        num_ranks = 1 if route == "own" else 2
        loaders = open_ranks(rows, num_ranks, folder, **settings)
        ids = assert_within_cap(loaders, multiple)
        assert len(ids) + len(loaders[0].rejected) == len(rows), route
        assert loaders[0].limits.pad_each_to == loaders[0].pad_each_to == multiple
        report = loaders[0].report()
        assert 0 < report["padding"] < 0.5
        assert report["token_fill"] <= 1


def load_own(said, folder, rows):
    """What this rank gives of its half, for each multiple."""
    for multiple in MULTIPLES:
        settings = OPTIONS | SHOWN | {"measure": "own", "max_tokens": CAP, "max_rejected": 0.5}
        loader = BalancedLoader(rows, data_root=folder, pad_each_to=multiple, **settings)
        batches = [batch for step in loader for batch in step]
        said[str(multiple)] = {
            "ids": [name for batch in batches for name in batch.sample_ids],
            "tokens": [packed_batch(batch, pad_each_to=multiple).num_tokens for batch in batches],
            "rejected": len(loader.rejected),
        }


def test_caps_hold_after_padding_where_each_rank_measures_its_samples(folder, tmp_path):
    rows = json.loads((folder / "annotations.json").read_text())
    ranks = run_ranks(tmp_path, 2, load_own, folder, rows)
    for multiple in map(str, MULTIPLES):
        ids = [name for rank in ranks for name in rank[multiple]["ids"]]
        assert len(ids) == len(set(ids))
        assert all(rank[multiple]["ids"] for rank in ranks)
        # each rank tells what it could not use of its half
        assert len(ids) + sum(rank[multiple]["rejected"] for rank in ranks) == len(rows)
        assert max(count for rank in ranks for count in rank[multiple]["tokens"]) <= CAP


@pytest.mark.parametrize("multiple", MULTIPLES)
def test_a_chosen_cap_is_of_padded_lengths(folder, multiple):
    rows = json.loads((folder / "annotations.json").read_text())
    (loader,) = open_ranks(rows, 1, folder, max_tokens=None, pad_each_to=multiple, **SHOWN)
    batches = [batch for step in loader for batch in step]
    for batch in batches:
        padded = packed_batch(batch, pad_each_to=multiple).num_tokens
        # a later sample over a chosen cap is alone
        assert padded <= loader.limits.max_seq_len or batch.num_samples == 1
    assert any(f"multiple of {multiple}" in line for line in loader.explained)


def test_loads_of_groups_are_those_of_their_samples_with_padding(builds):
    """What the order is made of, in all tables of groups, is a loop over samples."""
    for multiple in MULTIPLES:
        out = builds[multiple]
        manifest = read_manifest(out)
        index = open_index(manifest)
        loader = StreamingLoader(out, **SHOWN)
        regrouped = StreamingLoader(out, regroup="epoch", **SHOWN)
        paddings = index.column("num_padding")
        for opened in (loader, regrouped):
            table = opened._source.table(0)
            everyone = np.arange(len(table))
            names = ("num_image_tokens", "num_text_tokens", "num_audio_tokens")
            tokens = sum(table.column(name, everyone) for name in names)
            padded = {}
            for step in StreamingLoader(out, shuffle=False, **SHOWN):
                for batch in step:
                    lengths = batch.cu_seqlens.diff().tolist()
                    rounded = [ceil(length / multiple) * multiple for length in lengths]
                    padded |= zip(batch.sample_ids, rounded, strict=True)
            assert tokens.sum() == sum(padded.values())
            assert tokens.max() <= CAP
            refs = table.samples(everyone)
            of_samples = sum(table.sample_column(name, refs) for name in names)
            assert of_samples.sum() == tokens.sum()
            assert (of_samples % multiple == 0).all()
        for group in range(len(index)):
            raw = int(llm_tokens(index, np.array([group]))[0])
            ids = index.sample_ids(group)
            assert raw + paddings[group] == sum(padded[name] for name in ids)


def test_a_build_without_it_keeps_its_bytes(folder, builds, tmp_path):
    build(folder, tmp_path / "again", max_seq_len=CAP, max_rejected=0.5)
    assert digests(tmp_path / "again") == digests(builds[1])
    values = read_manifest(builds[1]).values
    assert "pad_each_to" not in json.dumps(values)
    assert "num_padding" not in json.dumps(values)


def test_a_manifest_and_a_report_say_what_samples_count(builds, folder):
    for multiple in MULTIPLES:
        out = builds[multiple]
        manifest = read_manifest(out)
        assert manifest.limits.pad_each_to == multiple
        assert manifest.values["config"]["pad_each_to"] == multiple
        assert any(
            f"a multiple of {multiple} tokens" in line
            for line in manifest.values["limits_explained"]
        )
        require_intact(verify_build(str(out), quiet(), workers=1))
        report = make_report(out, dp=2)
        assert report.limits.pad_each_to == multiple
        assert report.methods["ours"].longest_seq_len <= CAP
        assert 0 < report.methods["ours"].pad_ratio < 0.5
        assert report.fill <= 1
    with pytest.raises(Exception, match="finished build of other data or settings"):
        build(folder, builds[8], max_seq_len=CAP, pad_each_to=64, max_rejected=0.5)


@pytest.mark.parametrize("format", ["webdataset", "refs"])
def test_other_formats_have_it_too(folder, tmp_path, format):
    out = tmp_path / "out"
    build(folder, out, max_seq_len=CAP, pad_each_to=64, max_rejected=0.5, format=format)
    assert_within_cap([StreamingLoader(out, **SHOWN)], 64)
    require_intact(verify_build(str(out), quiet(), workers=1))


def test_a_build_of_a_loader_has_the_loader_s(folder, tmp_path, builds):
    rows = json.loads((folder / "annotations.json").read_text())
    options = SHOWN | {"model": "tiny", "max_tokens": CAP, "max_rejected": 0.5, "pad_each_to": 8}
    loader = BalancedLoader(rows, data_root=folder, **options)
    loader.save_build(tmp_path / "saved")
    saved = read_manifest(tmp_path / "saved")
    assert saved.limits == read_manifest(builds[8]).limits
    assert_within_cap([StreamingLoader(tmp_path / "saved", **SHOWN)], 8)


def test_lengths_are_grouped_with_it(builds, tmp_path, capsys, monkeypatch):
    counts = builds[1] / "counts.parquet"
    figures = {}
    for multiple in (1, 64):
        command = ["group", str(counts), "--out", str(tmp_path / str(multiple)), "--json"]
        command += ["--max-seq-len", str(CAP), "--pad-each-to", str(multiple)]
        code, output = run_packer(capsys, monkeypatch, *command)[:2]
        assert code == 0
        figures[multiple] = json.loads(output)
    assert figures[64]["limits"]["pad_each_to"] == 64
    assert "pad_each_to" not in figures[1]["limits"]
    assert figures[64]["methods"]["ours"]["longest_seq_len"] <= CAP
    assert figures[64]["methods"]["ours"]["longest_seq_len"] % 64 == 0


def test_a_planner_is_asked_with_padded_lengths(builds):
    asked = []

    def planner(request):
        asked.append(request.counts.seq_len)
        groups = Groups(np.arange(len(request.counts)), request.offsets)
        return StepAssignment(micro_batches=(groups,))

    for step in StreamingLoader(builds[64], planner=planner, **SHOWN):
        assert step
    assert all((lengths % 64 == 0).all() for lengths in asked)


def test_several_builds_have_the_multiple_that_holds_in_all(builds):
    loader = StreamingLoader([builds[8], builds[64]], **SHOWN)
    assert loader.pad_each_to == 8
    assert StreamingLoader([builds[1], builds[64]], **SHOWN).pad_each_to == 1
    for step in loader:
        for batch in step:
            assert packed_batch(batch, pad_each_to=8).num_tokens <= max(CAP, 8)


def test_a_run_resumes_with_its_multiple_alone(folder):
    rows = json.loads((folder / "annotations.json").read_text())

    def opened(**options):
        settings = OPTIONS | SHOWN | {"max_tokens": CAP, "max_rejected": 0.5} | options
        return BalancedLoader(rows, data_root=folder, **settings)

    whole = [batch.sample_ids for step in opened(pad_each_to=8) for batch in step]
    loader = opened(pad_each_to=8)
    steps = iter(loader)
    first = [batch.sample_ids for _ in range(3) for batch in next(steps)]
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = opened(pad_each_to=8)
    resumed.load_state_dict(state)
    rest = [batch.sample_ids for step in resumed for batch in step]
    assert first + rest == whole
    with pytest.raises(ConfigError, match="window, caps and packing of the run that saved it"):
        opened(pad_each_to=64).load_state_dict(state)
    with pytest.raises(ConfigError, match="window, caps and packing"):
        opened().load_state_dict(state)
    assert "pad_each_to" not in json.dumps(opened().state_dict())


def test_lengths_that_are_kept_serve_every_multiple(folder, tmp_path):
    """They are without padding, so that nothing is measured again."""
    rows = json.loads((folder / "annotations.json").read_text())
    measured = []
    for multiple in (1, 8, 64):
        settings = OPTIONS | SHOWN | {"max_tokens": CAP, "max_rejected": 0.5}
        loader = BalancedLoader(
            rows, data_root=folder, lengths_cache=tmp_path, pad_each_to=multiple, **settings
        )
        measured.append(loader._lengths.num_measured)
        assert_within_cap([loader], multiple)
    assert measured[0] == 0
    assert measured[1] > 0
    assert measured[2] >= measured[1]


def test_wrong_multiples_are_one_line(folder):
    rows = json.loads((folder / "annotations.json").read_text())
    for options, message in (
        ({"pad_each_to": 0}, "pad_each_to is 0; it must be at least 1"),
        ({"pad_each_to": 2048, "max_tokens": 1024}, "more than max_tokens 1024"),
        ({"pad_each_to": 8, "packing": False}, "packing=False pads each to the longest"),
    ):
        with pytest.raises(ConfigError, match=message):
            BalancedLoader(rows, **OPTIONS | {"data_root": folder} | options)
    with pytest.raises(ConfigError, match="more than max_seq_len 448"):
        build(folder, folder / "never", max_seq_len=CAP, pad_each_to=512)


def test_padding_of_counts_is_of_each_sample():
    zeros = np.zeros(3, np.int64)
    counts = Counts(
        num_image_patches=zeros,
        num_vit_tokens=zeros,
        num_image_tokens=np.array([4, 0, 0]),
        num_text_tokens=np.array([5, 8, 1]),
        num_audio_tokens=zeros,
        num_loss_tokens=zeros,
    )
    assert counts.padded(8).seq_len.tolist() == [16, 8, 8]
    assert counts.padded(1) is counts
    limits = Limits(max_seq_len=8, max_vision=0, min_seq_len=8, min_vision=0, pad_each_to=8)
    assert limits.llm_load(counts).tolist() == [16, 8, 8]
    assert Limits(**limits.to_json()) == limits
