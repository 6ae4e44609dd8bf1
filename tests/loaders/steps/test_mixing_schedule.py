"""Mixing weights that change from step to step: shares, passes and resumes are exact."""

import json
import random
from collections import Counter

import pytest

from isobatch.common.errors import ConfigError
from isobatch.loaders import StreamingLoader
from isobatch.loaders.read.build import open_builds
from isobatch.loaders.steps.build_groups import BuildSource
from isobatch.loaders.steps.mixing_schedule import MixingSchedule, ScheduledSource
from support.builds.sample_tables import write_texts
from support.cases import for_each
from support.loading.rank_steps import make_ranks

SIZES = {"a": 150, "b": 60, "c": 21}
SCHEDULES = [
    [(0, {"a": 1, "b": 0.4}), (3, {"b": 1.0, "c": 0.3}), (9, {"a": 0.1, "b": 1, "c": 2})],
    lambda step: {"a": max(0.0, 1 - step / 12), "b": 0.5, "c": step / 40},
    [(0, {"a": 1.0, "b": 1.0, "c": 1.0})],
]


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    root = tmp_path_factory.mktemp("scheduled")
    return write_texts(root, SIZES)


@pytest.fixture(scope="module")
def builds(urls):
    return open_builds(urls)


def make_source(builds, schedule, regrouped=False):
    parts = [
        BuildSource(build, number, window_groups=16 if regrouped else None)
        for number, build in enumerate(builds)
    ]
    return ScheduledSource(parts, MixingSchedule(schedule, list(SIZES)), seed=3)


def resumed(source, world, micro_batches, state=None):
    """All ranks at `state`, or at the beginning."""
    ranks = make_ranks(source, world, micro_batches, seed=3)
    for steps in ranks if state is not None else []:
        steps.load(json.loads(state))
    return ranks


def take(ranks, count):
    """What each of the next steps gives each rank, epoch after epoch."""
    given = []
    for _ in range(count):
        if ranks[0].is_after_last:
            assert {steps.finish_epoch() for steps in ranks} == {0}  # nothing is ever dropped
        given.append([steps.plan(1)[0].micro_batches for steps in ranks])
        assert all(selection for rank in given[-1] for selection in rank)  # every step is full
    return given


def samples_of(builds, given):
    for step in given:
        for rank in step:
            for selection in rank:
                for part in selection:
                    first = int(builds[part.build].samples.offsets[part.group])
                    size = int(builds[part.build].samples.groups.sizes[part.group])
                    yield from ((part.build, first + p) for p in part.places or range(size))


def state_of(ranks):
    (state,) = {json.dumps(steps.state()) for steps in ranks}
    return state


def test_nothing_is_lost_or_repeated_on_any_ranks_and_resumes(builds):
    for seed in range(10):
        rng = random.Random(seed)
        regrouped = seed % 5 == 0
        source = make_source(builds, SCHEDULES[seed % 3], regrouped)
        seen: Counter[tuple[int, int]] = Counter()
        groups_of: Counter[int] = Counter()
        state, num_steps, ideal = None, 0, [0.0] * 3
        while num_steps < 30:
            if state is not None and rng.random() < 0.3:  # as another process
                source = make_source(builds, SCHEDULES[seed % 3], regrouped)
            ranks = resumed(source, rng.choice([1, 2, 3, 7]), rng.randint(1, 3), state)
            for step in take(ranks, rng.randint(1, 6)):
                seen.update(samples_of(builds, [step]))
                owners = [selection[0].build for rank in step for selection in rank]
                groups_of.update(owners)
                if not regrouped:
                    shares = source.schedule.shares(num_steps)
                    loads = [
                        float(share) * build.manifest.num_groups
                        for share, build in zip(shares, builds, strict=True)
                    ]
                    assert {place for place in set(owners) if not loads[place]} == set()
                    for place, load in enumerate(loads):
                        ideal[place] += len(owners) * load / sum(loads)
                num_steps += 1
            state = state_of(ranks)
        assert json.loads(state)["stream"]["step"] == num_steps
        # a weight that falls to 0 leaves what is owed to others
        assert regrouped or all(abs(groups_of[p] - ideal[p]) < 3 for p in range(3))
        for place, (name, size) in enumerate(SIZES.items()):
            times = {seen[place, sample] for sample in range(size)}
            # passes are whole: none comes again before all others have come
            assert max(times) - min(times) <= 1, name


def test_a_resumed_run_gives_the_steps_of_the_uninterrupted_one(builds):
    for seed in (0, 1, 4):
        rng = random.Random(seed)
        schedule, regrouped = SCHEDULES[seed % 3], seed == 4
        whole = take(resumed(make_source(builds, schedule, regrouped), 2, 2), 30)
        state, given = None, []
        while len(given) < 30:
            ranks = resumed(make_source(builds, schedule, regrouped), 2, 2, state)
            given += take(ranks, min(rng.randint(1, 15), 30 - len(given)))
            state = state_of(ranks)
        assert given == whole


def test_constant_weights_give_epochs_of_whole_passes(builds):
    source = make_source(builds, [(0, {"a": 2, "b": 1})])
    steps = resumed(source, 1, 1)[0]
    num_groups = [build.manifest.num_groups for build in builds]
    assert len(steps) == num_groups[0] + num_groups[1] // 2
    for number in range(1, 5):
        owners = [step[0][0][0].build for step in take([steps], steps.remaining)]
        assert owners.count(0) in range(num_groups[0] - 1, num_groups[0] + 2)
        assert 2 not in owners
        steps.finish_epoch()
        assert steps.epoch == number
    with pytest.raises(ConfigError, match="load a state instead of setting epoch 2"):
        steps.start_epoch(2)


def test_the_weights_may_be_others_after_a_resume_but_not_the_builds(urls):
    def load(schedule, datasets=urls):
        return StreamingLoader(datasets, workers=0, mixing_weights=schedule)

    first = load([(0, {"a": 1.0})])
    for _, step in zip(range(5), first, strict=False):
        assert all(i.startswith("a-") for batch in step for i in batch.sample_ids)
    later = load([(0, {"a": 1.0}), (7, {str(urls[2]): 1.0})])
    later.load_state_dict(first.state_dict())
    starts = [step[0].sample_ids[0][0] for _, step in zip(range(6), later, strict=False)]
    assert starts == ["a"] * 2 + ["c"] * 4
    for other in (load([(0, {"a": 1.0})], urls[:2]), StreamingLoader([(u, 1) for u in urls])):
        with pytest.raises(ConfigError, match="belongs to another build"):
            other.load_state_dict(first.state_dict())
    for wrong in ({"builds": [[0, 0, 0]]}, {"builds": [[0, 10**6, 0]] * 3}, {"step": -1}, {"x": 1}):
        state = first.state_dict()
        with pytest.raises(ConfigError, match="another stream"):
            first.load_state_dict({**state, "stream": state["stream"] | wrong})
        assert first.state_dict() == state


@for_each(
    ("schedule", "message"),
    [
        ([(1, {"a": 1.0})], r"at the steps \[1\]; begin with 0"),
        ([(0, {"a": 1.0}), (0, {"b": 1.0})], "in ascending order"),
        ([], r"at the steps \[\]; begin with 0"),
        ([(0, {"d": 1.0})], "name 'd'; builds: "),
        ([(0, {"a": -1.0})], "are -1.0 for 'a'; give 0 or more"),
        ([(0, {"a": 1.0}), (5, {"a": 0})], "of step 5 are all 0"),
        ([(0, [1.0, 2.0])], r"are \[1.0, 2.0\]; give a dict"),
        ([0.5, 0.5], "give \\[\\(step, \\{build: weight\\}\\)"),
        (lambda step: {"a": float("nan")}, "are nan for 'a'"),
    ],
)
def test_wrong_weights_get_one_line(urls, schedule, message):
    with pytest.raises(ConfigError, match=message) as error:
        StreamingLoader(urls, mixing_weights=schedule)
    assert "\n" not in str(error.value)


def test_weights_are_given_in_one_place(urls):
    with pytest.raises(ConfigError, match="leave out the weights of the datasets"):
        StreamingLoader([(urls[0], 2.0)], mixing_weights=[(0, {"a": 1})])
    with pytest.raises(ConfigError, match="leave out mixing_weights"):
        StreamingLoader(urls, mixing_weights=[(0, {"a": 1})], shuffle=False)
