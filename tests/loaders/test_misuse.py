"""Misuse of the loader: each is one line that says what, the value, and what to do."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from isobatch.common.errors import ConfigError, IsobatchError
from isobatch.loaders import LoaderConfig, StepDataset, StorageOptions, StreamingLoader
from support.builds.shard_fixture import group_samples, make_samples, write_build
from support.cases import for_each


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    return write_build(tmp_path_factory.mktemp("misuse") / "build", group_samples(make_samples(12)))


def load(url, **options):
    return StreamingLoader(url, **{"workers": 0, **options})


def line(misuse):
    """The one line that a misuse ends with."""
    with pytest.raises(IsobatchError) as error:
        misuse()
    assert "\n" not in str(error.value)
    return str(error.value)


OPTIONS = [
    ({"dp_rank": "0", "dp_world_size": 1}, "dp_rank is '0'; it must be int or None"),
    ({"dp_rank": 0.0, "dp_world_size": 1}, "dp_rank is 0.0; it must be int or None"),
    ({"dp_rank": 0, "dp_world_size": True}, "dp_world_size is True; it must be int or None"),
    ({"dp_rank": np.int64(0), "dp_world_size": 1}, "dp_rank is np.int64(0); it must be int"),
    ({"micro_batches_per_step": 2.0}, "micro_batches_per_step is 2.0; it must be int"),
    ({"seed": None}, "seed is None; it must be int"),
    ({"seed": "1"}, "seed is '1'; it must be int"),
    ({"workers": 1.5}, "workers is 1.5; it must be int or None"),
    ({"prefetch_bytes": 1e9}, "prefetch_bytes is 1000000000.0; it must be int"),
    ({"exact_resize": "no"}, "exact_resize is 'no'; it must be bool"),
    ({"check_ranks": 0}, "check_ranks is 0; it must be bool"),
    ({"rank_timeout_s": 0}, "rank_timeout_s is 0; it must be at least 1"),
    ({"pixel_dtype": "uint8"}, "pixel_dtype is 'uint8'; it must be dtype"),
    ({"planner": 3}, "planner is 3; it must be a function or None"),
    ({"filter": "id > 3"}, "filter is 'id > 3'; it must be a function or None"),
    ({"limit": 1e3}, "limit is 1000.0; it must be int or None"),
    ({"storage": {"cache_bytes": 1}}, "it must be StorageOptions or None"),
    ({"device_mesh": "dp"}, "device_mesh is 'dp'; it must be DeviceMesh or None"),
    ({"device": "gpu"}, "device is 'gpu': "),
    *([] if torch.cuda.is_available() else [({"device": "cuda"}, "torch finds no GPU here")]),
    ({"audio": ["features"]}, "audio is ['features']; it must be one of waveform, "),
    ({"balance": "0.5"}, "balance is '0.5'; it must be float"),
    ({"micro_batches": 2}, "no option micro_batches; did you mean micro_batches_per_step? ("),
    ({"sead": 2}, "no option sead; did you mean seed? (options: dp_rank, dp_world_size, "),
    ({"xyz": 2}, "there is no option xyz (options: dp_rank, "),
]


@for_each(("options", "expected"), OPTIONS)
def test_wrong_options(build, options, expected):
    assert expected in line(lambda: load(build, **options))
    assert expected in line(lambda: LoaderConfig(**options))


def test_wrong_storage_options_and_configs(build):
    assert "cache_bytes is '16GB'; it must be int" in line(
        lambda: StorageOptions(cache_bytes="16GB")
    )
    assert "timeout_s is '9'; it must be float" in line(lambda: StorageOptions(timeout_s="9"))
    assert "verify is 1; it must be one of" in line(lambda: StorageOptions(verify=1))
    assert "config is {'seed': 1}; give a LoaderConfig" in line(
        lambda: StreamingLoader(build, {"seed": 1})
    )


DATASETS = [
    (lambda url: None, "a dataset is None; give the folder or URI of a build"),
    (lambda url: "", "a dataset is ''; "),
    (lambda url: 3, "a dataset is 3; "),
    (lambda url: {url}, "a dataset is {"),
    (lambda url: {}, "datasets are {}; "),
    (lambda url: (url, 0.5), ", without a weight; "),
    (lambda url: [url, (url, 0.5)], ", without a weight; "),
    (lambda url: [(url, "1")], "'1'); give "),
    (lambda url: [(url, True)], "True); give "),
    (lambda url: [(url, float("nan"))], "nan); give "),
    (lambda url: [(url, 1, 2)], "1, 2); give "),
    (lambda url: {"name": url}, "a dataset is ('name', "),
    (lambda url: {url: 0}, "0); give "),
]


@for_each(("datasets", "expected"), DATASETS)
def test_wrong_datasets(build, datasets, expected):
    assert expected in line(lambda: load(datasets(str(build))))


def test_builds_without_weights_have_equal_ones(build):
    def ids(datasets):
        return [i for step in load(datasets) for batch in step for i in batch.sample_ids]

    place = str(build)
    assert ids([place, build]) == ids([(place, 1.0), (build, 1.0)]) == ids({place: 2, build: 2})
    assert ids({place: 2, build: 1}) == ids([(place, np.float32(1)), (build, 0.5)])


@pytest.mark.parametrize("state", [None, [1], "x", 3, torch.zeros(2)])
def test_states_that_are_none(build, state):
    loader = load(build)
    next(iter(loader))
    before = loader.state_dict()
    assert "give what `state_dict()` returned" in line(lambda: loader.load_state_dict(state))
    wrong = before | {"stream": state}
    assert "give what `state_dict()` returned" in line(lambda: loader.load_state_dict(wrong))
    assert "state has the keys []; a" in line(lambda: loader.load_state_dict({}))
    old = before | {"version": 2, "stream": {"consumed": "x"}}
    assert "finish that epoch with 0.1" in line(lambda: loader.load_state_dict(old))
    assert loader.state_dict() == before


def test_data_loaders_without_step_dataset_or_with_batches(build):
    for size in (1, None):
        misused = DataLoader(load(build), batch_size=size)
        assert "DataLoader(StepDataset(loader), batch_size=None)" in line(
            lambda steps=misused: next(iter(steps))
        )
    batched = DataLoader(StepDataset(load(build)))
    assert "give it batch_size=None" in line(lambda: next(iter(batched)))
    assert "give it a StreamingLoader" in line(lambda: StepDataset(str(build)))


def test_raw_data_for_a_build(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("c.parquet", "b.json", "a.json"):
        (tmp_path / name).write_text("[]")
    assert line(lambda: load(tmp_path)) == (
        f"{tmp_path}: no manifest.json, so no finished build; it holds a.json, b.json, c.parquet, "
        f"...: pack raw data with `packer build --dataset {tmp_path}`"
    )
    assert "b.json: a file, no folder; give the output folder" in line(
        lambda: load(tmp_path / "b.json")
    )
    (tmp_path / "staging").mkdir()
    assert "run the same `packer build` again to finish it" in line(lambda: load(tmp_path))


def test_a_closed_loader(build):
    loader = load(build)
    steps = iter(loader)
    next(steps)
    loader.close()
    for begin in (lambda: next(steps), lambda: list(loader)):
        assert line(begin) == "this StreamingLoader was closed; make another to continue"
    with load(build) as loader:
        next(iter(loader))
    assert line(lambda: list(loader)) == "this StreamingLoader was closed; make another to continue"
    assert issubclass(ConfigError, ValueError)
    assert len(list(StreamingLoader(build, workers=0))) == len(loader)
