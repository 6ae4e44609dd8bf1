"""Faults of network and server met by a whole loader: every byte arrives, or one line names the
shard in time.

What is right is what a local run without faults gives. After an error the state is that of the step
before it, and once the fault is gone the rest of the samples comes from there, exactly.
"""

import contextlib
import threading

import pytest

from isobatch.common.errors import DamagedShard, DataError
from isobatch.loaders import StreamingLoader
from isobatch.loaders.read.build import StorageOptions
from isobatch.shards.store_errors import CREDENTIALS
from support.builds.remote_builds import use
from support.loading.contents import content
from support.loading.fault_runs import (
    GROUPS,
    NAMED,
    WAYS,
    Door,
    at_random,
    fails,
    first_times,
    gives,
    of_shards,
)

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("little_ahead")]


PASSING = {  # what happens, and the loader's time limit
    "cut in the middle of the body": (lambda: first_times("cut", 5), 30.0),
    "30 % answered 503": (lambda: at_random("503", 0.3), 30.0),
    "200 ms stalls": (lambda: at_random("slow", 0.3), 30.0),
    "no more bytes in the middle of a body": (lambda: first_times("stall", 1), 1.5),
    "a bit flipped on the way": (lambda: first_times("flip", 1), 30.0),
}


@pytest.mark.parametrize(
    ("store", "format", "workers"),
    [*(("s3", *way) for way in WAYS), ("gcs", "refs", 2), ("azure", "refs", 2)],
    indirect=["store"],
)
@pytest.mark.parametrize("name", PASSING)
def test_what_passes_leaves_every_byte_as_it_was(
    urls, store, proxy, load, expected, name, format, workers
):
    fault, limit_s = PASSING[name]
    limit_s *= limit_of(store) / LIMIT_S
    proxy.fault = fault()
    assert gives(load(urls[format], workers=workers, timeout_s=limit_s), expected)


LIMIT_S = 1.0
IN_TIME_S = LIMIT_S + 4
"""The limit, a second that a request has to say more itself, and a busy machine."""


def limit_of(store):
    """An emulator on a busy machine takes more than a second for a first step."""
    return LIMIT_S if store.scheme == "s3" else 4 * LIMIT_S


LASTING = {
    "stall": (DataError, NAMED + ".*not read within {limit} s"),
    "503": (
        DataError,
        NAMED + r".*not read within {limit} s \(last: the store fails \(503 Made503\)",
    ),
    "cut": (DataError, NAMED + ".*not read within {limit} s"),
    "403": (DataError, NAMED + r".*access denied \(Made403\): check {credentials}"),
    "404": (DamagedShard, NAMED + ".*is missing; copy or build it again"),
    "flip": (DamagedShard, NAMED + ".*its bytes have another checksum than the index says"),
}


@pytest.mark.parametrize(
    ("store", "workers"),
    [("s3", 0), ("s3", 2), ("gcs", 2), ("azure", 2)],
    indirect=["store"],
)
@pytest.mark.parametrize("fault", LASTING)
def test_what_begins_midway_and_lasts_is_an_error_in_time_and_resumes(
    urls, store, proxy, load, expected, fault, workers
):
    limit_s = limit_of(store)
    loader = load(urls["arrow"], workers=workers, timeout_s=limit_s)
    steps = iter(loader)
    first = content(next(steps))
    proxy.fault = of_shards(fault)
    kind, message = LASTING[fault]
    message = message.replace("{credentials}", CREDENTIALS[store.scheme])
    message = message.replace("{limit}", f"{limit_s:g}")
    state, given = fails(loader, steps, expected[1:], kind, message, IN_TIME_S + limit_s - LIMIT_S)
    proxy.fault = lambda path: ""
    assert first == expected[0]
    assert 0 <= given < len(expected) - 1
    if workers:  # the same loader goes on as well as another one does
        assert gives(loader, expected, given + 1)
        loader = load(urls["arrow"], workers=1, cache_bytes=0)
    loader.load_state_dict(state)
    assert gives(loader, expected, given + 1)


def test_images_of_a_refs_build_that_cannot_be_read_name_their_sample(urls, proxy, load, expected):
    loader = load(urls["refs"], timeout_s=LIMIT_S)
    steps = iter(loader)
    assert content(next(steps)) == expected[0]
    proxy.fault = lambda path: "403" if ".img" in path else ""
    message = (
        r"^sample 'sample-\d+' \(shard-\d+\.arrow, group \d+\): image s3://.*\.img: access denied"
    )
    state, given = fails(loader, steps, expected[1:], DataError, message, IN_TIME_S)
    proxy.fault = lambda path: ""
    loader.load_state_dict(state)
    assert gives(loader, expected, given + 1)


def test_many_parts_that_stall_at_once_are_not_waited_for_one_after_the_other(
    urls, proxy, tmp_path
):
    options = StorageOptions(cache_dir=tmp_path / "cache", timeout_s=LIMIT_S)
    loader = StreamingLoader(
        urls["refs"],
        dp_rank=0,
        dp_world_size=1,
        micro_batches_per_step=len(GROUPS),
        image_root=f"{urls['refs']}/images",
        workers=2,
        storage=options,
    )
    proxy.fault = lambda path: "stall" if ".img" in path else ""
    with contextlib.closing(loader):
        fails(loader, loader, [], DataError, "^sample 'sample-", IN_TIME_S)


@pytest.mark.parametrize(
    ("store", "workers"), [("s3", 0), ("s3", 2), ("gcs", 2), ("azure", 2)], indirect=["store"]
)
def test_a_server_that_has_gone_for_good_is_said_in_time(
    store, urls, load, expected, monkeypatch, workers
):
    door = Door(store.endpoint)
    use(monkeypatch, store, door.endpoint)
    limit_s = limit_of(store)
    loader = load(urls["arrow"], workers=workers, timeout_s=limit_s)
    steps = iter(loader)
    assert content(next(steps)) == expected[0]
    door.shut()
    message = NAMED + rf".*not read within {limit_s:g} s \(last: cannot be reached \(Connection ref"
    in_time_s = IN_TIME_S + limit_s - LIMIT_S
    state, given = fails(loader, steps, expected[1:], DataError, message, in_time_s)
    with pytest.raises(DataError, match=rf"^{store.uri}/.*cannot be reached \(Connection refused"):
        load(urls["arrow"])
    door.open()
    loader.load_state_dict(state)
    assert gives(loader, expected, given + 1)
    door.shut()


@pytest.mark.parametrize("format", ["arrow", "refs"])
def test_a_server_that_is_back_after_two_seconds_is_waited_for(
    s3, urls, load, expected, monkeypatch, format
):
    door = Door(s3.endpoint)
    use(monkeypatch, s3, door.endpoint)
    loader = load(urls[format])
    steps = iter(loader)
    given = [content(next(steps))]
    door.shut()
    back = threading.Timer(2, door.open)
    back.start()
    given += [content(step) for step in steps]
    back.join()
    door.shut()
    assert given == expected
