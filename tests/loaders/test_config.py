"""`LoaderConfig`: as an object or as keywords, and ranks by default torch.distributed's."""

import json
import pickle
import typing
from dataclasses import FrozenInstanceError, fields

import pytest
import torch.distributed as dist

from isobatch.common.errors import ConfigError
from isobatch.loaders import LoaderConfig, StreamingLoader
from isobatch.loaders.config import LoaderOptions
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.ranks import on_ranks


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    root = tmp_path_factory.mktemp("config") / "build"
    write_build(root, group_samples(make_samples(30, model="tiny"), max_tokens=512))
    return root


def ids_of(loader):
    return [sample_id for step in loader for batch in step for sample_id in batch.sample_ids]


def test_keywords_are_the_fields_of_the_config():
    assert typing.get_type_hints(LoaderOptions) == typing.get_type_hints(LoaderConfig)
    assert list(LoaderOptions.__annotations__) == [field.name for field in fields(LoaderConfig)]


def test_a_config_and_keywords_give_the_same_loader(build):
    config = LoaderConfig(dp_rank=1, dp_world_size=2, seed=3, balance=0.75, workers=0)
    keywords = StreamingLoader(build, dp_rank=1, dp_world_size=2, seed=3, balance=0.75, workers=0)
    assert ids_of(StreamingLoader(build, config)) == ids_of(keywords)


def test_keywords_replace_fields_of_the_config(build):
    config = LoaderConfig(dp_rank=0, dp_world_size=1, seed=3, workers=0)
    other = StreamingLoader(build, config, seed=4)
    assert other.state_dict()["seed"] == 4
    assert config.seed == 3


def test_a_config_is_frozen_and_knows_its_options():
    with pytest.raises(FrozenInstanceError):
        LoaderConfig().seed = 1  # type: ignore[misc]
    with pytest.raises(ConfigError, match="did you mean micro_batches_per_step"):
        LoaderConfig(micro_batches=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("options", [{"dp_rank": 0}, {"dp_world_size": 2}])
def test_half_of_the_ranks_is_refused(options):
    with pytest.raises(ConfigError, match="give both, or neither"):
        LoaderConfig(**options)


def test_a_single_process_is_rank_0_of_1(build):
    assert LoaderConfig().ranks() == (0, 1)
    whole = StreamingLoader(build, dp_rank=0, dp_world_size=1, workers=0)
    assert ids_of(StreamingLoader(build, workers=0)) == ids_of(whole)


def test_ranks_of_torch_distributed_share_the_samples(build, tmp_path):
    on_ranks(2, tmp_path, read_as_rank, build, tmp_path)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank in range(2):
        given = StreamingLoader(build, dp_rank=rank, dp_world_size=2, workers=0)
        assert seen[rank] == ids_of(given)
    assert seen[0] != seen[1]


def read_as_rank(build, folder):
    """Iterate without naming ranks, then as a copy where there is no process group."""
    rank, early = dist.get_rank(), LoaderConfig(workers=0)
    loader = StreamingLoader(build, early)
    pickled = pickle.dumps(loader)
    seen = ids_of(loader)
    dist.destroy_process_group()
    assert ids_of(pickle.loads(pickled)) == seen
    (folder / f"{rank}.json").write_text(json.dumps(seen))
