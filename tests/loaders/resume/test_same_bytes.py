"""Two runs of one configuration give identical bytes: with other workers, other formats, resumed,
from a bucket.
"""

import hashlib
import json
from dataclasses import fields
from itertools import islice

import pytest
import torch

from isobatch.loaders import StreamingLoader
from isobatch.loaders.read.build import StorageOptions
from support.builds.remote_builds import upload, use
from support.builds.shard_fixture import FORMATS, group_samples, make_samples, write_build

WORLD, EPOCHS = 3, 2
BALANCES = (0.0, 0.5)


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    root = tmp_path_factory.mktemp("builds")
    groups = group_samples(make_samples(50), max_tokens=60)
    return {format: write_build(root / format, groups, format) for format in FORMATS}


@pytest.fixture(scope="module")
def reference(builds):
    """By `balance`, what a plain run of the Arrow build gives."""
    return {balance: digests(builds["arrow"], balance=balance, workers=0) for balance in BALANCES}


def digests(url, stop_every=None, **options):
    """A hash of everything that each rank gets in each step; loaders are made anew every
    `stop_every` steps.
    """
    return [_digests_of(url, rank, stop_every, options) for rank in range(WORLD)]


def _digests_of(url, rank, stop_every, options):
    found, state = [], None
    while state is None or state["epoch"] < EPOCHS:
        loader = StreamingLoader(
            url, dp_rank=rank, dp_world_size=WORLD, micro_batches_per_step=2, **options
        )
        if state is not None:
            loader.load_state_dict(state)
        found += map(_digest, islice(loader, stop_every))
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
    return found


def _digest(step):
    total = hashlib.sha256()
    for batch in step:
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, torch.Tensor):
                total.update(f"{field.name} {value.dtype} {tuple(value.shape)}".encode())
                total.update(value.numpy().tobytes())
            else:
                total.update(f"{field.name} {value!r}".encode())
    return total.hexdigest()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("balance", BALANCES)
def test_of_every_format_with_other_workers_and_resumed(builds, reference, format, balance):
    assert len({digest for rank in reference[balance] for digest in rank}) > WORLD * EPOCHS
    assert digests(builds[format], balance=balance, workers=2, stop_every=4) == reference[balance]


@pytest.mark.server
@pytest.mark.parametrize("format", FORMATS)
def test_from_a_bucket_first_and_again(s3, builds, reference, tmp_path, monkeypatch, format):
    use(monkeypatch, s3)
    url = upload(s3, builds[format], tmp_path.name)
    options = {"image_root": f"{url}/images"} if format == "refs" else {}
    for workers in (2, 0):  # the second time out of the cache
        storage = StorageOptions(cache_dir=tmp_path / "cache")
        assert (
            digests(url, balance=0.5, workers=workers, storage=storage, **options) == reference[0.5]
        )
