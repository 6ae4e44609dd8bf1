"""Evaluation: every sample once in a fixed order, equally many micro-batches on all ranks, none
empty, resumed on any ranks.
"""

import json
import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from isobatch.common.errors import ConfigError
from isobatch.loaders import StepDataset, StreamingLoader
from isobatch.loaders.read.build import open_builds
from isobatch.loaders.steps.in_order import StoredSource, cut_borders
from support.builds.sample_tables import text_samples, write_tabled, write_texts
from support.loading.rank_steps import make_ranks
from support.ranks import on_ranks

SIZES = {"a": 130, "b": 37}
NUM_SAMPLES = sum(SIZES.values())


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    root = tmp_path_factory.mktemp("evaluated")
    return write_texts(root, SIZES)


def samples_of(builds, selections):
    for selection in selections:
        for part in selection:
            size = builds[part.build].samples.groups.sizes[part.group]
            yield from ((part.build, part.group, place) for place in part.places or range(size))


def test_every_sample_once_equally_shared_on_any_ranks_and_resumed(urls):
    builds = open_builds(urls)
    source = StoredSource(builds)
    for seed in range(25):
        rng = random.Random(seed)
        seen, state, ranks = [], None, []
        while not ranks or ranks[0].remaining:
            world = rng.choice([1, 2, 3, 5, 8, 13])
            ranks = make_ranks(source, world, rng.randint(1, 4), remainder="split")
            for steps in ranks:
                steps.load(json.loads(state)) if state else None
            planned = len(ranks[0]) if state is None else ranks[0].remaining
            for _ in range(count := rng.choice([rng.randint(0, 5), 10**6])):
                if not ranks[0].remaining:
                    break
                plans = [steps.plan(1)[0] for steps in ranks]
                planned -= 1
                # the rounds of a step, each of all ranks
                rounds = list(zip(*(plan.micro_batches for plan in plans), strict=True))
                assert all(selection for each in rounds for selection in each)
                for each in rounds:
                    seen += samples_of(builds, each)
                num_samples = sum(
                    len(list(samples_of(builds, plan.micro_batches))) for plan in plans
                )
                assert {plan.totals.num_samples for plan in plans} == {num_samples}
            assert {steps.remaining for steps in ranks} == {planned}
            assert count < 10**6 or planned == 0
            (state,) = {json.dumps(steps.state()) for steps in ranks}
        expected = [
            (number, group, place)
            for number, build in enumerate(builds)
            for group, size in enumerate(build.samples.groups.sizes)
            for place in range(size)
        ]
        assert seen == expected  # in stored order too


def test_cut_as_little_as_needed():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        borders = np.concatenate([[0], np.cumsum(rng.integers(1, 6, size=rng.integers(1, 30)))])
        ranks = int(rng.integers(1, 12))
        cut = cut_borders(borders, 0, ranks)
        assert set(borders) <= set(cut)
        enough = borders[-1] >= -(-(len(borders) - 1) // ranks) * ranks
        if enough:
            assert (len(cut) - 1) % ranks == 0
            assert len(cut) - len(borders) < ranks
        else:
            assert len(cut) - 1 == borders[-1]
        # the same micro-batches when resumed after any round
        for given in cut[:-1:ranks]:
            rest = cut[cut >= given]
            assert cut_borders(borders, int(given), ranks)[-len(rest) :].tolist() == rest.tolist()


def test_where_samples_are_too_few_the_last_ranks_have_one_less(tmp_path):
    url = write_tabled(tmp_path / "few", [[sample] for sample in text_samples(7)])
    source = StoredSource(open_builds([url]))
    for remainder, sizes in (("split", [2, 2, 2, 1]), ("pad", [2] * 4)):
        ranks = make_ranks(source, 4, 2, remainder=remainder)
        plans = [steps.plan(1)[0] for steps in ranks]
        assert [len(plan.micro_batches) for plan in plans] == sizes
        assert {steps.remaining for steps in ranks} == {0}
    assert plans[-1].micro_batches[-1] == ()


def test_ranks_that_meet_in_every_forward_pass_all_come(urls, tmp_path):
    """As FSDP and DDP do; with other numbers of micro-batches a rank would wait forever."""
    on_ranks(3, tmp_path, evaluate, [(url, 1.0) for url in urls], tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert found[0] == found[1] == found[2]
    assert found[0]["samples"] == NUM_SAMPLES


def evaluate(datasets, folder):
    totals = torch.zeros(2)
    loader = StreamingLoader(datasets, shuffle=False, micro_batches_per_step=2, workers=0)
    for step in loader:
        for batch in step:
            assert batch.num_samples > 0
            sums = torch.tensor([batch.num_samples, (batch.labels >= 0).sum()], dtype=torch.float)
            dist.all_reduce(sums)
            totals += sums
    samples, labels = totals.tolist()
    found = {"samples": samples, "labels": labels, "steps": len(loader)}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))


def test_a_rank_without_a_sample_gets_steps_without_micro_batches(tmp_path):
    url = write_tabled(tmp_path / "few", [[sample] for sample in text_samples(7)])
    last = StreamingLoader(url, dp_rank=8, dp_world_size=9, shuffle=False, workers=1)
    assert [len(step) for step in last] == [0]
    first = StreamingLoader(url, dp_rank=0, dp_world_size=9, shuffle=False, workers=1)
    assert [len(step) for step in first] == [1]


def test_the_loader_gives_the_same_passes_again(urls):
    loader = StreamingLoader([(url, 1.0) for url in urls], shuffle=False, workers=0)
    ids = [[i for step in loader for batch in step for i in batch.sample_ids] for _ in range(2)]
    assert ids[0] == ids[1]
    assert (len(ids[0]), len(set(ids[0]))) == (NUM_SAMPLES, NUM_SAMPLES)
    assert loader.epoch == 2
    other_seed = StreamingLoader([(url, 1.0) for url in urls], shuffle=False, workers=0, seed=7)
    assert [i for step in other_seed for batch in step for i in batch.sample_ids] == ids[0]


def test_each_iterator_is_a_whole_pass_but_after_a_state(urls):
    loader = StreamingLoader(urls[0], shuffle=False, workers=0)
    whole = [batch.sample_ids for step in loader for batch in step]
    next(iter(loader))  # as a trainer tries out its validation
    state = loader.state_dict()
    assert [batch.sample_ids for step in loader for batch in step] == whole
    loader.load_state_dict(state)
    assert [batch.sample_ids for step in loader for batch in step] == whole[1:]
    assert [batch.sample_ids for step in loader for batch in step] == whole
    data = DataLoader(StepDataset(loader), batch_size=None)
    for _ in range(2):
        next(iter(data))
        given = [batch.sample_ids for step in data for batch in step.micro_batches]
        assert given == whole
    copy = pickle.loads(pickle.dumps(loader))
    assert [batch.sample_ids for step in copy for batch in step] == whole


def test_a_shuffled_state_and_wrong_options_are_refused(urls):
    shuffled = StreamingLoader(urls[0], workers=0)
    loader = StreamingLoader(urls[0], workers=0, shuffle=False)
    with pytest.raises(ConfigError, match="order 'alike', this loader 'stored'"):
        loader.load_state_dict(shuffled.state_dict())
    with pytest.raises(ConfigError, match="500 of 130 samples"):
        loader.load_state_dict({**loader.state_dict(), "stream": {"samples": 500}})
    for options, message in [
        ({"shuffle": False, "regroup": "epoch"}, "leave out regroup and planner"),
        ({"shuffle": False, "remainder": "drop"}, "use remainder='split' or 'pad'"),
        ({"remainder": "split"}, "is for shuffle=False"),
        ({"limit": 0}, "limit is 0"),
        ({"split": "test"}, "split is 'test'; it must be one of train, validation or None"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
    ]:
        with pytest.raises(ConfigError, match=message):
            StreamingLoader(urls[0], **options)
    with pytest.raises(ConfigError, match="the weight 1"):
        StreamingLoader([(urls[0], 1.0), (urls[1], 0.5)], shuffle=False)


def test_set_epoch_begins_there_and_leaves_the_epoch_under_way_alone(urls):
    def ids_of(loader):
        return [i for step in loader for batch in step for i in batch.sample_ids]

    whole = StreamingLoader(urls[0], workers=0)
    epochs = [ids_of(whole) for _ in range(4)]
    loader = StreamingLoader(urls[0], workers=0)
    loader.set_epoch(2)
    assert ids_of(loader) == epochs[2]
    loader.set_epoch(3)  # as trainers call it, after the epoch before
    first = next(iter(loader))
    loader.set_epoch(3)  # of the epoch under way: it continues
    given = [i for batch in first for i in batch.sample_ids] + ids_of(loader)
    assert given == epochs[3]
    running = iter(loader)
    next(running)
    loader.set_epoch(0)
    with pytest.raises(RuntimeError, match="this iterator ended"):
        next(running)
    assert Counter(ids_of(loader)) == Counter(epochs[0])
    with pytest.raises(ConfigError, match="epoch is -1"):
        loader.set_epoch(-1)
