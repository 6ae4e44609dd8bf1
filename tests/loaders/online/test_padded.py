"""`BalancedLoader(packing=False)`: batches of similar length, with the guarantees of packing."""

import json

import pytest
import torch

from isobatch.common.errors import ConfigError, DataError
from support.loading.contents import content
from support.loading.online_data import OPTIONS, open_ranks, records, samples_of
from support.loading.step_planners import repack

OWN = {"packing": False, "micro_batches_per_step": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("padded")


@pytest.fixture(scope="module")
def rows(folder):
    return records(folder)


def close(*ranks):
    for loader in ranks:
        loader.close()


def test_samples_are_those_of_packing_within_padded_caps(rows, folder):
    kinds = {}
    for packing in (True, False):
        options = {**OWN, "packing": packing, "pixel_dtype": torch.uint8}
        ranks = open_ranks(rows, 2, folder, **options)
        steps = list(zip(*ranks, strict=True))
        batches = [batch for step in steps for own in step for batch in own]
        kinds[packing] = samples_of(batches, ranks[0].image_token_id)
        assert {batch.is_padded for batch in batches} == {not packing}
        for step in steps:
            whole = [batch for own in step for batch in own]
            for name in ("num_loss_tokens", "num_step_samples", "loss_normalizer"):
                assert len({getattr(batch, name) for batch in whole}) == 1
            labels = sum(int((batch.labels != -100).sum()) for batch in whole)
            assert labels == whole[0].num_loss_tokens
        report = ranks[0].report()
        close(*ranks)
        if packing:
            assert report["padding"] == 0
            continue
        areas = [batch.num_samples * batch.max_seqlen for batch in batches]
        assert max(areas) <= OPTIONS["max_tokens"]
        padding = 1 - sum(len(batch.input_ids) for batch in batches) / sum(areas)
        assert 0 < padding < 0.15
        # the next epoch's first window is counted too
        assert report["padding"] == pytest.approx(padding, abs=0.02)
        fill = sum(areas) / sum(area > 0 for area in areas) / OPTIONS["max_tokens"]
        assert report["token_fill"] == pytest.approx(fill, abs=0.05)
        for batch in batches:
            sizes = batch.cu_seqlens.diff()
            assert (sizes.diff() <= 0).all()  # the longest sample first
            assert batch.padded()["input_ids"].shape == (batch.num_samples, batch.max_seqlen)
    assert kinds[True] == kinds[False]


def test_resumes_on_other_ranks_and_after_steps_of_similar_loads(rows, folder):
    ranks = open_ranks(rows, 2, folder, **OWN)
    given, states = [], []
    for step in zip(*ranks, strict=True):
        given.append([content(each) for each in step])
        (state,) = {json.dumps(loader.state_dict()) for loader in ranks}
        states.append(json.loads(state))
    assert len(given) > 3
    # what ranks wait is of padded tokens
    assert ranks[0].report()["dist_ratio_llm"] < 0.15
    again = open_ranks(rows, 2, folder, state=states[1], **OWN)
    assert [[content(each) for each in step] for step in zip(*again, strict=True)] == given[2:]
    alone = open_ranks(rows, 1, folder, state=states[0], **OWN)
    names = [name for step in alone[0] for batch in step for name in batch.sample_ids]
    first = [name for rank in given[0] for batch in rank for name in batch[0]]
    assert sorted(names + first) == sorted(row["id"] for row in rows)
    (packed,) = open_ranks(rows, 1, folder)
    with pytest.raises(ConfigError, match="'packing': False"):
        packed.load_state_dict(states[0])
    close(packed, *ranks, *again, *alone)
    with pytest.raises(ConfigError, match="a planner packs steps again; leave it out"):
        open_ranks(rows, 1, folder, planner=repack, **OWN)


def test_caps_that_are_not_given_are_chosen_for_padding(rows, folder):
    (loader,) = open_ranks(rows, 1, folder, max_tokens=None, max_vision=None, window=90, **OWN)
    names = [name for step in loader for batch in step for name in batch.sample_ids]
    assert sorted(names) == sorted(row["id"] for row in rows)
    assert "tokens with padding (" in loader.explained[0]
    close(loader)
    # a row is within the model's context, and rows together may be above it
    (loader,) = open_ranks(rows, 1, folder, max_tokens=50_000, **OWN)
    assert loader.model.context_len < 50_000
    assert next(iter(loader))[0].num_samples > 1
    assert loader.limits.max_seq_len == 50_000
    close(loader)
    (loader,) = open_ranks(rows, 1, folder, max_tokens=5, max_vision=None, **OWN)
    with pytest.raises(DataError, match="all of the first 40 samples are over 5 tokens"):
        next(iter(loader))
    close(loader)
