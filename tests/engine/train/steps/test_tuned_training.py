"""Training whose every step is tuned: the same gradients as untuned, of each sample once, by the
schedule tuned.
"""

import json
from collections import Counter

import pytest
import torch

from isobatch.engine.simulator.schedule import PassKind
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples
from support.rank_programs.tuned_ranks import Epoch, run_all, run_epochs, stated_profile
from support.ranks import on_ranks

NUM_SAMPLES = 90
TWO = (
    Epoch(name="plain"),
    Epoch(name="own", frozen=("vision",)),
    Epoch(
        name="any",
        frozen=("vision", "projector"),
        options=("--encode=any", "--schedule=zero_bubble"),
        vision_us=8_000,
    ),
)
FOUR = (Epoch(name="replicas", dp=2),)
STEPS, BEHIND = 10, 3

torch.set_num_threads(1)


def make_build(path):
    """Of uneven groups."""
    samples = make_samples(NUM_SAMPLES)
    groups = group_samples(samples[:66], max_tokens=160) + group_samples(
        samples[66:], max_tokens=40
    )
    return write_tabled(path, groups)


@pytest.fixture(scope="module")
def two(shared):
    """The folder with what two ranks wrote down."""
    return shared("tuned-on-two-ranks", run_two)


def run_two(folder):
    for case in TWO:
        stated_profile(folder / f"{case.name}.json", case.vision_us)
    stated_profile(folder / "profile.json")
    other = json.loads((folder / "profile.json").read_text())
    for kind in other["kinds"]:
        for name in ("forward_ns", "input_grad_ns", "weight_grad_ns"):
            kind[name] = [1_000_000 for _ in kind[name]]  # however large a micro-batch is
    (folder / "other.json").write_text(json.dumps(other))
    on_ranks(2, folder, run_all, folder, make_build(folder / "build"), TWO, STEPS, BEHIND)


@pytest.fixture(scope="module")
def four(shared):
    """The folder with what four ranks wrote down."""
    return shared("tuned-on-four-ranks", run_four)


def run_four(folder):
    for case in FOUR:
        stated_profile(folder / f"{case.name}.json", case.vision_us)
    on_ranks(4, folder, run_epochs, folder, make_build(folder / "build"), FOUR)


def of_ranks(folder, name, count=2):
    """What each rank wrote down."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "name"), [*(("two", case.name) for case in TWO), ("four", "replicas")]
)
def test_every_sample_comes_once_and_steps_run_as_they_were_tuned(request, world, name):
    ranks = of_ranks(request.getfixturevalue(world), name, {"two": 2, "four": 4}[world])
    pipelines = [ranks[first : first + 2] for first in range(0, len(ranks), 2)]
    for first, second in pipelines:
        assert first == second
    ids = Counter(
        sample_id
        for first, _ in pipelines
        for step in first
        for batch in step["ids"]
        for sample_id in batch
    )
    assert set(ids.values()) == {1}
    assert len(ids) == NUM_SAMPLES
    for step in (step for first, _ in pipelines for step in first):
        assert step["planned"] in (step["schedule"], None)
        assert 0 < step["step_ns"] <= step["untuned_ns"]
        numbers = {number for rank in step["schedule"] for _, _, number in rank}
        assert numbers == set(range(len(step["ids"])))
    counts = [len(step["ids"]) for step in ranks[0]]
    assert len(set(counts)) > 1
    assert any(step["step_ns"] < step["untuned_ns"] for step in ranks[0])
    for steps in zip(*(first for first, _ in pipelines), strict=True):
        assert len({(step["fingerprint"], step["untuned_ns"]) for step in steps}) == 1


def test_a_frozen_encoder_runs_ahead_where_it_may(two):
    encoded = {
        case.name: sum(step["encoded"] for step in of_ranks(two, case.name)[0]) for case in TWO
    }
    assert encoded["plain"] == 0
    assert min(encoded["own"], encoded["any"]) > 0
    second = [action for step in of_ranks(two, "any")[0] for action in step["schedule"][1]]
    assert any(kind == PassKind.ENCODE for kind, _, _ in second)


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_takes_the_same_steps(two):
    whole, parts = of_ranks(two, "whole"), of_ranks(two, "parts")
    assert [len(steps) for steps in whole] == [STEPS, STEPS]
    assert whole == parts
    losses = [loss for _, _, loss in whole[0]]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    lines = [json.loads(line) for line in (two / "whole.jsonl").read_text().splitlines()]
    assert [line["micro_batches"] for line in lines] == [len(ids) for ids, _, _ in whole[0]]
    for line in lines:
        assert 0 < line["tuned_s"] <= line["untuned_s"]
        assert line["tuning_s"] > 0
        assert 0 <= line["data_s"] < line["seconds"]
        assert 0 < line["passes_s"] < line["seconds"]


def test_ranks_that_tune_a_step_differently_all_say_so_before_they_train(two):
    for rank in (0, 1):
        assert (
            "ConfigError: the ranks tuned the step differently"
            in (two / f"error-{rank}.txt").read_text()
        )
