"""A build in all formats, in a bucket and on disk, loaders of it, and nothing left behind by any
test.
"""

import contextlib
import gc

import pytest
import torch

from isobatch.loaders.read.build import StorageOptions
from support.builds.remote_builds import upload, use
from support.builds.shard_fixture import FORMATS, write_build
from support.loading.contents import content
from support.loading.fault_runs import GROUPS, children, loader_threads, make
from support.servers import FaultyProxy


@pytest.fixture(scope="session")
def builds(tmp_path_factory):
    """In three shards or more, so that there are whole ones next to a damaged one."""
    root = tmp_path_factory.mktemp("builds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.builds.shard_fixture.SHARD_GROUPS", 7)
        return {format: write_build(root / format, GROUPS, format) for format in FORMATS}


@pytest.fixture(scope="session")
def uploaded():
    """Scheme of a store and format -> URI."""
    return {}


@pytest.fixture
def urls(store, builds, uploaded):
    for format, folder in builds.items():
        if (store.scheme, format) not in uploaded:
            place = upload(store, folder, f"loader-faults/{format}")
            uploaded[store.scheme, format] = place
    return {format: uploaded[store.scheme, format] for format in builds}


@pytest.fixture(scope="session")
def expected(builds):
    """What each step holds."""
    torch.set_num_threads(1)
    runs = [[content(step) for step in make(builds[format], workers=0)] for format in FORMATS]
    assert runs[0] == runs[1] == runs[2]
    return runs[0]


@pytest.fixture(autouse=True)
def _nothing_is_left(store):
    before = children()
    yield
    gc.collect()
    assert loader_threads() == []
    assert children() == before


@pytest.fixture
def little_ahead(monkeypatch):
    """Or these small builds would have arrived before a fault begins, however late it is."""
    monkeypatch.setattr("isobatch.loaders.step_builder.AHEAD_BYTES", 1)
    monkeypatch.setattr("isobatch.loaders.prefetch.STEPS_PER_WORKER", 2)


@pytest.fixture
def proxy(store, monkeypatch):
    with contextlib.closing(FaultyProxy(store.endpoint)) as proxy:
        use(monkeypatch, store, proxy.endpoint)
        yield proxy


@pytest.fixture
def load(tmp_path):
    """Makes a loader with a cache of the test's own; closed at the end."""
    with contextlib.ExitStack() as stack:

        def load_it(url, *, workers=2, **storage):
            options = StorageOptions(
                **{"cache_dir": tmp_path / "cache", "timeout_s": 30.0} | storage
            )
            images = f"{url}/images" if str(url).endswith("refs") else None
            return stack.enter_context(
                contextlib.closing(make(url, workers=workers, image_root=images, storage=options))
            )

        yield load_it
