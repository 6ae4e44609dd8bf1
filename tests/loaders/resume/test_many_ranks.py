"""512 ranks that really read: the same steps for all, every sample once, and on from there with
other ranks.
"""

from collections import Counter
from itertools import islice

import pytest

from support.builds.sample_tables import path_groups, text_samples
from support.builds.shard_fixture import FORMATS, write_build
from support.loading.consume_steps import mark, open_ranks, steps_of

WORLD = 512
SAMPLES = text_samples(2000)
EXPECTED = {mark(sample.sample_id, sample.input_ids, sample.labels) for sample in SAMPLES}


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Two steps of all ranks and a part of a third."""
    root = tmp_path_factory.mktemp("builds")
    groups = path_groups(SAMPLES, max_tokens=40)
    assert 2 * WORLD < len(groups) < 3 * WORLD
    return {format: write_build(root / format, groups, format) for format in FORMATS}


@pytest.mark.parametrize(
    ("format", "remainder"), [("arrow", "pad"), ("webdataset", "drop"), ("refs", "drop")]
)
def test_all_have_the_same_steps_and_together_every_sample_once(builds, format, remainder):
    ranks = open_ranks(WORLD, url=builds[format], remainder=remainder, workers=0)
    num_steps = 3 if remainder == "pad" else 2
    assert {len(loader) for loader in ranks} == {num_steps}
    *steps, end = islice(steps_of(ranks), num_steps + 1)
    seen = Counter(sample for step in steps for sample in step.samples)
    assert (end.samples, end.epoch) == ([], 1)
    assert set(seen.values()) == {1}
    assert set(seen) <= EXPECTED
    assert len(seen) + end.num_dropped == len(EXPECTED)
    assert (end.num_dropped > 0) == (remainder == "drop")


def test_they_go_on_where_few_stopped_and_few_where_they_stopped(builds):
    steps = _take(open_ranks(7, url=builds["arrow"], workers=0), 2)
    steps += _take(open_ranks(WORLD, steps[-1].state, url=builds["arrow"], workers=0), 1)
    ranks = open_ranks(7, steps[-1].state, url=builds["arrow"], workers=0)
    steps += _take(ranks, ranks[0].remaining_steps)
    assert Counter(sample for step in steps for sample in step.samples) == Counter(EXPECTED)


def _take(ranks, num_steps):
    return list(islice(steps_of(ranks), num_steps))
