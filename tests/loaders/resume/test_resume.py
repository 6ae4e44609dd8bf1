"""Stopped, resumed and killed on any ranks, workers and micro-batches, every sample comes once per
epoch, with the tokens, pixels and positions of a run without a stop.
"""

import os
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from isobatch.loaders.read.build import StorageOptions
from support.builds.remote_builds import upload, use
from support.builds.sample_tables import LIMITS, path_groups, text_samples
from support.builds.shard_fixture import FORMATS, make_samples
from support.loading.consume_steps import EPOCHS, mark, open_ranks, steps_of
from support.loading.segments import Segment, killable_runs, run_segments, write_listed
from support.loading.step_planners import repack
from support.loading.transforms import marked, noisy

SAMPLES = [
    *text_samples(50),
    *(s for s in make_samples(14) if len(s.input_ids) <= LIMITS.max_seq_len),
]
EXPECTED = {
    (epoch, mark(s.sample_id, s.input_ids, s.labels)) for s in SAMPLES for epoch in range(EPOCHS)
}
FRACTION = 0.3
VALIDATION = {
    s.sample_id for s in SAMPLES if xxh3_64_intdigest(s.sample_id.encode()) < FRACTION * 2**64
}
SMALL_WORLD = 8
"""Ranks at most where groups are made anew: every simulated rank makes those of all, which takes
the square.
"""
MOST_DROPPED = 12
"""Groups of a step where what is less than one is dropped: half an epoch or less."""
DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "3"))
"""Random runs of each of three formats: set 100 for a longer test."""
HOOKS = {"image_transform": noisy, "batch_transform": marked}


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    root = tmp_path_factory.mktemp("builds")
    groups = path_groups(SAMPLES, max_tokens=40)
    found = {format: write_listed(root / format, groups, format) for format in FORMATS}
    for half in range(2):
        groups = path_groups(SAMPLES[half::2], max_tokens=40)
        for format in FORMATS:
            found[format, half] = write_listed(root / f"{format}-{half}", groups, format)
    return found


@pytest.fixture(scope="module")
def server(builds):
    with killable_runs(builds["arrow"]) as connection:
        yield connection


@pytest.fixture(scope="module")
def contents(builds):
    """By (halves, transformed): {(epoch, sample): checksum of its pixels and positions}, of one
    rank that runs to the end.
    """
    found = {}
    for halves in (False, True):
        url = [(builds["arrow", half], 1.0) for half in range(2)] if halves else builds["arrow"]
        for transformed in (False, True):
            hooks = HOOKS if transformed else {}
            steps = steps_of(open_ranks(1, url=url, workers=0, **hooks))
            found[halves, transformed] = {
                (step.epoch, sample): content
                for step in steps
                for sample, content in zip(step.samples, step.contents, strict=True)
            }
            assert found[halves, transformed].keys() == EXPECTED
            # transforms draw anew for each sample and epoch
            assert not transformed or len(set(found[halves, True].values())) == len(EXPECTED)
    assert found[False, False] == found[True, False]
    assert found[False, True] != found[True, True]  # a sample's place is another
    return found


segments = st.builds(
    Segment,
    world=st.one_of(st.integers(1, 8), st.integers(1, 64)),
    micro_batches=st.integers(1, 4),
    workers=st.integers(0, 2),
    num_steps=st.integers(0, 12),
    end=st.sampled_from(["stop", "go on", "kill"]),
    save_every=st.integers(1, 3),
    delay_s=st.floats(0, 0.02),
)
modes = st.sampled_from(
    [
        {},
        {"balance": 0.9},
        {"regroup": "epoch", "regroup_window": 16},
        {"planner": repack},
        {"regroup": "epoch", "regroup_window": 16, "planner": repack, "balance": 0},
        {"shuffle": False},
        {"shuffle": False, "split": "train", "validation_fraction": FRACTION},
        {"split": "train", "validation_fraction": FRACTION},
        {"halves": True},
        {"halves": True, "regroup": "epoch", "regroup_window": 16},
        {"halves": True, "weights": True},
        {"halves": True, "weights": True, "regroup": "epoch", "regroup_window": 16},
    ]
)
"""Options; "halves": the samples as two builds, which are mixed with equal weights;
"weights": with ones that change.
"""
runs = {
    "segments": st.lists(segments, min_size=1, max_size=3),
    "mode": modes,
    "remainder": st.sampled_from(["pad", "drop"]),
    "transformed": st.booleans(),
}


def check_run(server, segments, options, contents):
    if "planner" in options or "regroup" in options:
        segments = [replace(segment, world=min(segment.world, SMALL_WORLD)) for segment in segments]
    if not options.get("shuffle", True):
        options = options | {"remainder": None}
    if options["remainder"] == "drop":  # an epoch without a step is refused
        segments = [
            replace(segment, world=min(segment.world, MOST_DROPPED // segment.micro_batches))
            for segment in segments
        ]
    if "mixing_weights" in options:
        check_passes([*compared(run_segments(segments, server, options), contents)])
        return
    expected = EXPECTED
    if options.get("split") == "train":
        expected = {each for each in EXPECTED if each[1].split()[0] not in VALIDATION}
    seen, dropped = Counter(), 0
    for step in compared(run_segments(segments, server, options), contents):
        seen.update((step.epoch, sample) for sample in step.samples)
        dropped += step.num_dropped
    assert set(seen.values()) <= {1}
    assert set(seen) <= expected
    assert len(seen) + dropped == len(expected)
    assert dropped == 0 or options["remainder"] == "drop"


def compared(steps, contents):
    """The steps, each of whose samples has the content of a run without a stop."""
    for step in steps:
        assert step.contents == [contents[step.epoch, sample] for sample in step.samples]
        yield step


def check_passes(steps):
    """Every pass over a half has all of its samples: no sample comes twice before another has once
    come.
    """
    seen = Counter(sample.split()[0] for step in steps for sample in step.samples)
    for half in range(2):
        times = [seen[sample.sample_id] for sample in SAMPLES[half::2]]
        assert max(times) - min(times) <= 1
        assert max(times) > 0


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=DRAWS)
@given(**runs)
def test_every_sample_comes_once_per_epoch_whatever_happens(
    builds, server, contents, format, segments, mode, remainder, transformed
):
    options = {"url": builds[format], "remainder": remainder, **plain(mode, transformed)}
    if "halves" in mode:
        options["url"] = [(builds[format, half], 1.0) for half in range(2)]
    if "weights" in mode:
        one, two = (f"{format}-{half}" for half in range(2))
        options["mixing_weights"] = [(0, {one: 1, two: 0.5}), (3, {two: 1}), (7, {one: 1, two: 1})]
    check_run(server, segments, options, contents["halves" in mode, transformed])


def plain(mode, transformed):
    """The options of a mode, on one build."""
    options = {name: value for name, value in mode.items() if name not in {"halves", "weights"}}
    return options | (HOOKS if transformed else {})


@pytest.mark.server
@pytest.mark.parametrize("store", ["gcs", "azure"], indirect=True)
def test_a_run_from_another_store_resumes_after_kills(
    store, builds, server, contents, tmp_path, monkeypatch
):
    use(monkeypatch, store)
    url = upload(store, builds["refs"], tmp_path.name)
    storage = StorageOptions(cache_dir=tmp_path / "cache", cache_bytes=0)
    options = {"url": url, "image_root": f"{url}/images", "storage": storage, "remainder": "pad"}
    parts = [(4, 1, 5), (1, 3, 4)]
    killed = [
        Segment(world=world, micro_batches=size, workers=2, num_steps=steps, end="kill")
        for world, size, steps in parts
    ]
    check_run(server, killed, options, contents[False, False])


@pytest.fixture(scope="module")
def bucket(s3, builds, tmp_path_factory):
    """The builds in a bucket, by format."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        yield {
            format: upload(s3, builds[format], f"resume-{os.getpid()}/{format}")
            for format in FORMATS
        }


@pytest.mark.server
@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None, max_examples=3)
@given(**runs, cache_bytes=st.sampled_from([0, 200_000, 1 << 30]))
def test_every_sample_comes_once_per_epoch_from_a_bucket(
    bucket,
    server,
    contents,
    tmp_path_factory,
    format,
    segments,
    mode,
    remainder,
    transformed,
    cache_bytes,
):
    storage = StorageOptions(cache_dir=tmp_path_factory.mktemp("cache"), cache_bytes=cache_bytes)
    options = {"url": bucket[format], "remainder": remainder, "storage": storage}
    options |= plain(mode, transformed)
    if format == "refs":
        options["image_root"] = f"{bucket[format]}/images"
    check_run(server, segments, options, contents[False, transformed])
