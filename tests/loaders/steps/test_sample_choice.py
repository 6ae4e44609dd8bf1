"""Split, filter and limit: the same samples in any build, on any ranks."""

from collections import Counter

import numpy as np
import pytest
import xxhash

from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader
from isobatch.loaders.read.build import Build, open_builds
from isobatch.loaders.steps.build_groups import KEPT_LOAD, pack_chosen
from support.builds.sample_tables import (
    LIMITS,
    llm_tokens,
    path_groups,
    text_samples,
    write_tabled,
)

NUM_SAMPLES = 400
SAMPLES = text_samples(NUM_SAMPLES)
FRACTION = 0.2


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    """The same samples in two builds of other groups."""
    root = tmp_path_factory.mktemp("chosen")
    return [
        write_tabled(root / str(size), path_groups(SAMPLES, max_tokens=size)) for size in (60, 35)
    ]


def ids_of(url, **options):
    loader = StreamingLoader(url, workers=0, validation_fraction=FRACTION, **options)
    ids = [i for step in loader for batch in step for i in batch.sample_ids]
    assert len(set(ids)) == len(ids)
    assert loader.stats().unchosen_samples == NUM_SAMPLES - len(ids)
    return set(ids)


def share_of(sample_id):
    return xxhash.xxh3_64_intdigest(sample_id.encode()) / 2**64


def test_the_split_is_by_the_hash_of_the_id_in_any_build(urls):
    validation = {s.sample_id for s in SAMPLES if share_of(s.sample_id) < FRACTION}
    assert 0.1 < len(validation) / NUM_SAMPLES < 0.3
    for url in urls:
        for options in ({}, {"shuffle": False}, {"regroup": "epoch", "regroup_window": 16}):
            assert ids_of(url, split="validation", **options) == validation
            train = ids_of(url, split="train", **options)
            assert train == {s.sample_id for s in SAMPLES} - validation


def test_a_limit_is_the_same_samples_everywhere_and_a_smaller_one_a_part_of_it(urls):
    chosen = [ids_of(url, limit=50, **options) for url in urls for options in ({}, {"balance": 0})]
    assert all(ids == chosen[0] for ids in chosen)
    assert len(chosen[0]) == 50
    assert ids_of(urls[0], limit=20, shuffle=False) < chosen[0]
    assert len(ids_of(urls[0], limit=10**6)) == NUM_SAMPLES
    ranks = [
        StreamingLoader(urls[0], dp_rank=r, dp_world_size=3, workers=0, limit=50, shuffle=False)
        for r in range(3)
    ]
    seen = Counter(i for loader in ranks for step in loader for b in step for i in b.sample_ids)
    assert seen == Counter(chosen[0])


def test_a_filter_sees_columns_and_its_samples_are_in_the_state(urls):
    def long_ones(columns):
        assert columns["source"][0] == "text"
        assert columns["sample_id"].shape == (NUM_SAMPLES,)
        return columns["num_text_tokens"] > 15

    long = {s.sample_id for s in SAMPLES if len(s.input_ids) > 15}
    assert ids_of(urls[0], filter=long_ones) == long
    one, _, same, none = (
        StreamingLoader(urls[0], workers=0, filter=keeps)
        for keeps in (
            long_ones,
            lambda columns: columns["num_text_tokens"] > 14,
            lambda columns: columns["num_text_tokens"] >= 16,
            None,
        )
    )
    next(iter(one))
    same.load_state_dict(one.state_dict())
    for other in (_, none):
        with pytest.raises(ConfigError, match="give the loader the split, filter and limit"):
            other.load_state_dict(one.state_dict())
    with pytest.raises(ConfigError, match="give the loader the split, filter and limit"):
        one.load_state_dict(none.state_dict())


def test_wrong_filters_get_one_line_and_close_what_is_open(urls, monkeypatch):
    closed = []
    monkeypatch.setattr(Build, "close", lambda build: closed.append(build.manifest.place))
    for keeps, message in [
        (lambda columns: columns["width"] > 1, "no column 'width'; they have num_image_patches, "),
        (lambda columns: columns["num_text_tokens"], "filter gave int64 of shape"),
        (lambda columns: np.ones(3, bool), r"bool of shape \(3,\)"),
        (lambda columns: columns["num_text_tokens"] < 0, "leave none of 800 samples"),
    ]:
        with pytest.raises(ConfigError, match=message):
            StreamingLoader(urls, filter=keeps)
        assert sorted(closed) == sorted(map(str, urls))
        closed.clear()


def test_groups_of_chosen_samples_are_full_again(urls):
    (build,) = open_builds(urls[:1])
    table = build.samples
    for seed in range(10):
        rng = np.random.default_rng(seed)
        chosen = rng.random(NUM_SAMPLES) < rng.choice([0.05, 0.5, 0.99])
        groups = pack_chosen(build, chosen)
        assert sorted(groups.samples) == np.flatnonzero(chosen).tolist()
        tokens = groups.sum(llm_tokens(table, np.arange(NUM_SAMPLES)))
        assert tokens.max() <= LIMITS.max_seq_len
        stored = np.diff(table.offsets)
        whole = {
            tuple(range(*pair)) for pair in zip(table.offsets, table.offsets[1:], strict=False)
        }
        unbroken = {members for members in whole if chosen[list(members)].all()}
        assert unbroken <= {tuple(sorted(groups[g].tolist())) for g in range(len(groups))}
        assert len(stored) >= len(groups)
        # as few as all tokens need, but for groups that stayed and one that is not full
        assert len(groups) <= tokens.sum() / (KEPT_LOAD * 50) + 2
