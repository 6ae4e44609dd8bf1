"""Batches for Megatron-Bridge: beside its own functions, their state, and peers' data."""

import itertools
import json
import re
import subprocess
from dataclasses import replace
from itertools import chain, islice
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from isobatch.common.errors import ConfigError
from isobatch.loaders import BalancedLoader, StreamingLoader
from isobatch.loaders.integrations.megatron_bridge import BridgeBatches, BridgeIterator
from support import TESTS, child_env
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.frameworks.environments import python_of
from support.frameworks.page_programs import program
from support.loading.online_data import OPTIONS, open_ranks, records
from support.ranks import run_ranks

pytest.importorskip("transformers")

from support.models.family_models import make_family_batch, make_family_model
from support.models.tiny_models import make_batch, make_config

CHECKS = TESTS / "support" / "frameworks" / "checks" / "bridge_checks.py"
CASES = [("qwen2_vl", counts) for counts in ([1, 0, 2], [0, 0], [2], [])]


@pytest.mark.other_trainers
@pytest.mark.timeout(1200)
def test_batches_are_what_bridge_packs_itself(pytestconfig, tmp_path):
    python = python_of("megatron_bridge", pytestconfig.cache.mkdir("frameworks"))
    pairs = []
    for (kind, counts), multiple in itertools.product(CASES, (1, 4, 16)):
        batch, config = make_batch(kind, counts, seed=multiple), make_config(kind)
        rows = BridgeBatches(config, dict, layout="rows")(batch)
        pairs.append((rows, BridgeBatches(config, dict, pad_each_to=multiple)(batch), multiple))
    torch.save(pairs, tmp_path / "pairs.pt")
    done = subprocess.run(
        [python, CHECKS, tmp_path / "pairs.pt"],
        env=child_env(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bridge")
    return write_tabled(folder / "packed", group_samples(make_samples(60)))


def tiny_config(loader):
    from tiny_internvl import make_internvl  # noqa: PLC0415  imports transformers

    return make_internvl(loader).config


@pytest.mark.parametrize("kind", ["build", "records"])
def test_a_state_is_that_after_the_last_whole_step(build, tmp_path, kind):
    rows = records(tmp_path, 40) if kind == "records" else []

    def iterator():
        options = {"micro_batches_per_step": 2, "dp_rank": 0, "dp_world_size": 1}
        if kind == "records":
            options |= OPTIONS | {"data_root": str(tmp_path)}
            loader = BalancedLoader(rows, **options)
        else:
            loader = StreamingLoader(build, **options)
        return BridgeIterator(loader, BridgeBatches(tiny_config(loader), SimpleNamespace))

    whole = [batch["input_ids"].tolist() for batch in islice(iterator(), 8)]
    begun = iterator()
    for _ in range(5):  # the third step has begun
        next(begun)
    resumed = iterator()
    resumed.restore_state(begun.save_state())
    assert [batch["input_ids"].tolist() for batch in islice(resumed, 4)] == whole[4:]


def test_a_state_of_two_ranks_is_gone_on_from_by_three(build):
    def iterators(num_ranks):
        for rank in range(num_ranks):
            loader = StreamingLoader(build, dp_rank=rank, dp_world_size=num_ranks)
            yield BridgeIterator(loader, BridgeBatches(tiny_config(loader), SimpleNamespace))

    def rows(iterator, count):
        return [tuple(batch["input_ids"].flatten().tolist()) for batch in islice(iterator, count)]

    (alone,) = iterators(1)
    num_groups = len(alone.loader)
    whole = rows(alone, num_groups)
    two = list(iterators(2))
    begun = [row for iterator in two for row in rows(iterator, 3)]
    assert two[0].save_state() == two[1].save_state()
    rest = []
    for iterator in iterators(3):
        iterator.restore_state(two[0].save_state())
        rest += rows(iterator, (num_groups - 6) // 3)
    assert len(set(begun + rest)) == len(begun + rest) == 6 + (num_groups - 6) // 3 * 3
    assert set(begun + rest) <= set(whole)
    assert len(whole) - len(begun + rest) < 3


def test_a_state_without_a_build_is_gone_on_from_by_other_ranks(tmp_path):
    """Two ranks begin, three go on, and one ends the epoch: each sample comes once."""
    rows = records(tmp_path, 80)

    def iterators(num_ranks, state=None):
        for loader in open_ranks(rows, num_ranks, tmp_path, state=state, epochs=1):
            yield BridgeIterator(loader, BridgeBatches(tiny_config(loader), dict))

    def samples(iterator, count=None):
        return [
            tuple(ids.tolist())
            for batch in islice(iterator, count)
            for ids in batch["input_ids"][0].tensor_split(batch["cu_seqlens_q"][1:-1].tolist())
        ]

    (alone,) = iterators(1)
    whole = samples(alone)
    found, state = [], None
    for num_ranks, count in ((2, 2), (3, 1), (1, None)):
        ranks = list(iterators(num_ranks, state))
        parts = [samples(iterator, count) for iterator in ranks]
        assert all(parts)
        state = ranks[0].save_state()
        assert all(iterator.save_state() == state for iterator in ranks)
        found += chain.from_iterable(parts)
    assert len(set(whole)) == len(whole) == 80
    assert sorted(found) == sorted(whole)


def peers(say, build):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    loader = StreamingLoader(build, device_mesh=mesh)
    iterator = BridgeIterator(loader, BridgeBatches(tiny_config(loader), dict, pad_each_to=4))
    say["ids"] = [batch["input_ids"].tolist() for batch in islice(iterator, 2)]
    say["lengths"] = [batch["input_ids"].shape[1] % 4 for batch in islice(iterator, 2)]


def test_context_parallel_peers_have_the_same_batches(build, tmp_path):
    ranks = run_ranks(tmp_path, 4, peers, build)
    assert ranks[0]["ids"] == ranks[1]["ids"] != ranks[2]["ids"]
    assert ranks[2]["ids"] == ranks[3]["ids"]
    assert [rank["lengths"] for rank in ranks] == [[0, 0]] * 4


def test_the_provider_of_the_docs_gives_batches(build, monkeypatch):
    monkeypatch.chdir(build.parent)
    loader = StreamingLoader("packed")
    code = program("megatron_bridge", "megatron_bridge")
    code = re.sub(r"^from megatron.*\n", "", code, flags=re.MULTILINE)
    scope = {"DatasetProvider": object, "GenericVisualInputs": SimpleNamespace}
    scope |= {"mesh": None, "config": tiny_config(loader)}
    exec(code, scope)
    train, *others = scope["IsobatchProvider"]().build_datasets(None)
    assert others == [None, None]
    batch = next(train)
    assert batch["labels"].shape == batch["input_ids"].shape
    assert json.dumps(train.save_state())


def test_weights_of_losses_are_those_of_thd_also_without_images():
    batch = make_batch("qwen2_vl", [0, 0], seed=1)
    batch = replace(batch, loss_weights=torch.rand(len(batch.input_ids)))
    config = make_config("qwen2_vl")
    rows = BridgeBatches(config, dict, layout="rows")(batch)
    row = BridgeBatches(config, dict)(batch)["loss_mask"][0]
    assert row.any()
    assert torch.equal(rows["loss_mask"][rows["attention_mask"].bool()], row)


def test_what_does_not_fit_is_one_line():
    config = make_config("qwen2_vl")
    with pytest.raises(ConfigError, match="layout is 'sbhd'; use 'rows'"):
        BridgeBatches(config, dict, layout="sbhd")
    with pytest.raises(ConfigError, match="which Bridge pads itself; leave out pad_each_to"):
        BridgeBatches(config, dict, layout="rows", pad_each_to=4)
    for name, other in (("llava_next", "image_sizes"), ("qwen2_5_omni_thinker", "input_features")):
        config = make_family_model(name).config
        with pytest.raises(ConfigError, match=f"Bridge with layout='thd' is given no {other}"):
            BridgeBatches(config, dict)(make_family_batch(name, [1, 0]))
