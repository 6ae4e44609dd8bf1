"""Windows of a random order: every sample once per epoch, whatever the ranks and the stops."""

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from isobatch.balance.grouping.window import group_window
from isobatch.balance.order.step_order import GlobalShuffle
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.types import COUNT_COLUMNS, Limits
from isobatch.loaders.steps.steps import StepConfig, Steps
from isobatch.loaders.steps.window_groups import WindowSettings
from isobatch.loaders.steps.windows import MOST_PASSED, WindowSource
from isobatch.models.flops import FlopsModel
from isobatch.models.presets import load_model

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "3"))
LIMITS = Limits(max_seq_len=1000, max_vision=8, min_seq_len=1000, min_vision=8)


class Lengths:
    """Drawn lengths, known once they are measured; some samples cannot be used."""

    model = load_model("tiny")

    def __init__(self, count, seed, bad=0.0):
        rng = np.random.default_rng(seed)
        self.values = {name: np.zeros(count, np.int64) for name in COUNT_COLUMNS}
        self.values["num_image_patches"] = rng.integers(0, 5, count)
        self.values["num_vit_tokens"] = self.values["num_image_patches"] * 4
        self.values["num_image_tokens"] = self.values["num_image_patches"] * 10
        self.values["num_text_tokens"] = rng.integers(5, 400, count)
        self.values["num_loss_tokens"] = self.values["num_text_tokens"] // 2
        self.usable = rng.random(count) >= bad
        self.known = np.zeros(count, bool)

    def __len__(self):
        return len(self.known)

    def measure(self, samples, is_cancelled, epoch):
        self.known[samples] = True
        return self.usable[samples]

    def column(self, name, samples):
        assert self.known[samples].all()
        return self.values[name][samples]

    def sorted_sources(self, samples):
        assert self.known[samples].all()
        return (self.values["num_text_tokens"][samples] > 150).astype(np.int64)

    def choose_limits(self, samples):
        has_images = self.column("num_image_patches", samples).any()
        return LIMITS if has_images else replace(LIMITS, max_vision=0)

    def with_images(self, samples, limits):
        return self.choose_limits(samples)

    def within(self, samples):
        return samples


def make_ranks(lengths, world, micro_batches, *, window, seed=0, state=None, **changes):
    ranks = []
    for rank in range(world):
        settings = WindowSettings(
            window=window,
            first_window=min(window, changes.get("first_window", window)),
            seed=seed,
            balance=0.5,
            step_groups=world * micro_batches,
            loss_weights="token",
            packing=changes.get("packing", True),
            shuffle=changes.get("shuffle", True),
            ranks=world,
        )
        source = WindowSource(lengths(), settings, {"dataset": "drawn", "window": window})
        config = StepConfig(
            dp_rank=rank,
            dp_world_size=world,
            micro_batches=micro_batches,
            seed=seed,
            remainder=changes.get("remainder", "pad"),
        )
        ranks.append(Steps(source, config))
        if state is not None:
            ranks[-1].load(state)
    return ranks


def take_step(ranks):
    """The next step's plans of all ranks, and the state after it; None at the epoch's end."""
    if not all(ranks[0].remaining == each.remaining for each in ranks):
        raise AssertionError("ranks have different numbers of steps")
    if not ranks[0].remaining:
        return None
    plans = [each.copy().plan(1)[0] for each in ranks]
    for each, plan in zip(ranks, plans, strict=True):
        each.move_past(plan)
    (state,) = {json.dumps(each.state(), sort_keys=True) for each in ranks}
    return plans, json.loads(state)


def samples_of(plans):
    return [part.group for plan in plans for batch in plan.micro_batches for part in batch]


def test_elastic_runs():
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        count, window = int(rng.integers(1, 400)), int(rng.choice([7, 30, 64, 500]))
        first, bad = int(rng.choice([5, window])), float(rng.choice([0, 0.2]))
        lengths = partial(Lengths, count, draw, bad)
        usable = np.flatnonzero(lengths().usable).tolist()
        if not usable:
            continue

        packing = bool(rng.random() < 0.7)

        def ranks(
            state=None, *, lengths=lengths, window=window, first=first, rng=rng, packing=packing
        ):
            world, micro_batches = int(rng.integers(1, 5)), int(rng.integers(1, 4))
            options = {"window": window, "first_window": first, "packing": packing, "state": state}
            return make_ranks(lengths, world, micro_batches, **options)

        state, running, per_group = None, ranks(), set()
        for epoch in range(2):
            seen, running, state = elastic_epoch(ranks, running, state, rng, per_group)
            assert sorted(seen) == usable, f"draw {draw}, epoch {epoch}"
            assert [each.finish_epoch() for each in running] == [0] * len(running)
            state = running[0].state()
            assert state["epoch"] == epoch + 1
        assert len(per_group) == 1, draw  # a label counts the same in all steps, on any ranks


def elastic_epoch(ranks, running, state, rng, per_group):
    """The samples of an epoch, in which runs stop and continue on other ranks."""
    seen = []
    while True:
        if state is not None and rng.random() < 0.2:
            running = ranks(state)
        taken = take_step(running)
        if taken is None:
            return seen, running, state
        plans, state = taken
        seen += samples_of(plans)
        (total,) = {plan.totals for plan in plans}
        assert total.num_samples == len(samples_of(plans))
        config = running[0]._config
        per_group.add(total.loss_normalizer / config.dp_world_size / config.micro_batches)


def in_order(plans):
    """Samples of a step, micro-batch after micro-batch of all ranks; and how many each rank has."""
    numbers = [len(plan.micro_batches) for plan in plans]
    batches = [
        [part.group for part in plan.micro_batches[place]]
        for place in range(max(numbers))
        for plan in plans
        if place < len(plan.micro_batches)
    ]
    return [sample for batch in batches for sample in batch], numbers, batches


def test_an_evaluation_is_in_the_datasets_order_on_any_ranks():
    for draw in range(4 * DRAWS):
        rng = np.random.default_rng(draw)
        count, window = int(rng.integers(1, 300)), int(rng.choice([7, 30, 64, 500]))
        lengths = Lengths(count, draw, float(rng.choice([0, 0.2])))
        usable = np.flatnonzero(lengths.usable).tolist()
        if not usable:
            continue
        options = {"window": window, "shuffle": False, "remainder": "split"}
        options["packing"] = bool(rng.random() < 0.7)

        def ranks(state=None, *, rng=rng, lengths=lengths, options=options):
            world, micro_batches = int(rng.integers(1, 5)), int(rng.integers(1, 4))
            return make_ranks(lambda: lengths, world, micro_batches, state=state, **options)

        state, running = None, ranks()
        for epoch in range(2):
            seen, running, state = ordered_epoch(ranks, running, state, rng, lengths)
            assert seen == usable, (draw, epoch)
            for each in running:
                each.prepare_next_epoch()  # would wait for ranks that come at the next evaluation
                assert each._source._next is None
                each.finish_epoch()
            state = running[0].state()


def ordered_epoch(ranks, running, state, rng, lengths):
    """The samples of an evaluation, in which runs stop and continue on other ranks."""
    seen, is_whole = [], True
    while True:
        if state is not None and rng.random() < 0.15:
            running, is_whole = ranks(state), False
        left, (dp, micro_batches) = running[0].remaining, shape_of(running)
        if (taken := take_step(running)) is None:
            return seen, running, state
        plans, state = taken
        samples, numbers, batches = in_order(plans)
        seen += samples
        assert all(batches)
        check_caps(lengths, batches, packing=running[0]._source.run.settings.packing)
        # all ranks are full in all steps but the last, where they have equally many; of a run that
        # is resumed close to its end there may be too few samples for that
        if left > 1:
            assert numbers == [micro_batches] * dp
        elif is_whole and len(lengths) >= 60:
            assert len(set(numbers)) == 1


def shape_of(ranks):
    config = ranks[0]._config
    return config.dp_world_size, config.micro_batches


def check_caps(lengths, batches, *, packing):
    tokens = lengths.values["num_image_tokens"] + lengths.values["num_text_tokens"]
    for batch in batches:
        own = tokens[batch]
        assert (own.sum() if packing else own.max() * len(own)) <= 1000
        assert lengths.values["num_image_patches"][batch].sum() <= 8


def steps_of_two_epochs(ranks):
    """Samples, totals and the state after it, of each step that is left."""
    steps = []
    while ranks[0].epoch < 2:
        while (taken := take_step(ranks)) is not None:
            steps.append((samples_of(taken[0]), taken[0][0].totals, taken[1]))
        for each in ranks:
            each.prepare_next_epoch()
            each.finish_epoch()
    return steps


def with_late_images(*, shuffle):
    """Lengths of which the first windows have no image, so that a later one chooses that cap."""
    lengths = Lengths(200, 1)
    order = GlobalShuffle(num_groups=200, seed=0, epoch=0).take(200)
    first = order[:100] if shuffle else np.arange(100)
    for name in ("num_image_patches", "num_vit_tokens", "num_image_tokens"):
        lengths.values[name][first] = 0
    return lengths


def test_a_resumed_run_gives_the_same_steps():
    for shuffle, is_late in product((True, False), repeat=2):
        case = f"shuffle={shuffle}, late images={is_late}"
        lengths = with_late_images(shuffle=shuffle) if is_late else Lengths(200, 1)
        remainder = "pad" if shuffle else "split"
        make = partial(make_ranks, lambda own=lengths: own, 2, 2, window=40, remainder=remainder)
        ranks = make(shuffle=shuffle)
        steps = steps_of_two_epochs(ranks)
        caps = [state["stream"]["limits"]["max_vision"] for *_, state in steps]
        assert (caps[0], caps[-1], ranks[0]._source.run.limits) == (0 if is_late else 8, 8, LIMITS)
        assert len(steps) > 8
        for stop, (*_, state) in list(enumerate(steps))[:: 1 + len(steps) // 8]:
            rest = steps_of_two_epochs(make(shuffle=shuffle, state=state))
            assert rest == steps[stop + 1 :], (case, stop)
        # an epoch is left early, which one rank has planned further ahead than the other
        ranks = make(shuffle=shuffle)
        take_step(ranks)
        ranks[0].copy().plan(100)
        for each in ranks:
            each.prepare_next_epoch()
            each.start_epoch(1)
        seen = [sample for samples, *_ in steps_of_two_epochs(ranks) for sample in samples]
        assert sorted(seen) == list(range(200)), case


def test_loads_of_groups_have_padding_and_attention():
    flops = FlopsModel.of(load_model("tiny"))
    for packing in (True, False):
        (rank,) = make_ranks(lambda: Lengths(200, 7), 1, 2, window=200, packing=packing)
        lengths, epoch = rank._source.run.lengths, rank._groups
        numbers = epoch.window(0, np.zeros(0, np.int64)).numbers
        columns = {name: epoch.column(name, numbers) for name in (*COUNT_COLUMNS, "num_padding")}
        attention = epoch.column("attention_tokens", numbers)
        for number, samples in enumerate(epoch.members(numbers)):
            image, text = (
                lengths.column(f"num_{kind}_tokens", np.array(samples))
                for kind in ("image", "text")
            )
            tokens, rows = image + text, len(samples)
            padding = 0 if packing else rows * int(tokens.max()) - int(tokens.sum())
            assert columns["num_padding"][number] == padding
            assert columns["num_text_tokens"][number] == text.sum() + padding
            lengths_run = tokens if packing else np.full(rows, tokens.max())
            assert attention[number] == flops.attention_tokens(lengths_run).sum()
        assert attention.max() > 0
        assert (columns["num_padding"].max() > 0) == (not packing)


def test_no_group_is_passed_over_for_long():
    """Those unlike all others too: 33 steps at most as the first of those that wait."""
    lengths = Lengths(3000, 6)
    lengths.values["num_image_patches"][::150] = 40  # alone, and ten times the others
    (rank,) = make_ranks(lambda: lengths, 1, 2, window=300)
    first, steps, longest = None, 0, 0
    while take_step([rank]) is not None:
        waiting, passed = (rank.position.state()[name] for name in ("waiting", "passed"))
        steps = steps + 1 if waiting[:1] == first else 0
        if not first and waiting:  # the first of this step was not there before it
            steps = min(passed, 1)
        first, longest = waiting[:1], max(longest, steps)
        assert passed == steps or not waiting
    assert 5 < longest <= MOST_PASSED


def test_length_is_exact_when_all_is_planned():
    ranks = make_ranks(lambda: Lengths(400, 2), 2, 1, window=50)
    first = take_step(ranks)
    assert first is not None
    estimate, steps = len(ranks[0]), 1
    while take_step(ranks) is not None:
        steps += 1
    assert len(ranks[0]) == steps
    assert abs(estimate - steps) <= 0.2 * steps


def test_drop_leaves_out_what_makes_no_step():
    ranks = make_ranks(lambda: Lengths(90, 3), 4, 2, window=30, remainder="drop")
    seen = []
    while (taken := take_step(ranks)) is not None:
        assert all(len(batch) for plan in taken[0] for batch in plan.micro_batches)
        seen += samples_of(taken[0])
    dropped = {each.finish_epoch() for each in ranks}
    assert dropped == {90 - len(seen)}
    assert 0 < len(seen) < 90


def test_past_windows_are_forgotten():
    """A stream may have no end."""
    (rank,) = make_ranks(lambda: Lengths(2000, 6), 1, 2, window=20)
    while take_step([rank]) is not None:
        assert len(rank._groups._windows) + len(rank._groups._pending) < 10


def test_all_that_wait_for_a_window_wait_for_one_maker():
    """A second one would wait for the window after it, which other ranks may never begin."""
    lengths, may_measure, made = Lengths(300, 7), threading.Event(), []
    (rank,) = make_ranks(lambda: lengths, 1, 2, window=20)
    epoch, make, measure = rank._groups, rank._groups._make, lengths.measure
    epoch._make = lambda consumed, carried: made.append(consumed) or make(consumed, carried)
    lengths.measure = lambda *args: may_measure.wait() and measure(*args)
    epoch.prepare(0, np.zeros(0, np.int64))
    waiting = [threading.Thread(target=epoch.window, args=(0, [])) for _ in range(3)]
    for each in waiting:
        each.start()
        while not {"result", "_make"} & names_of_calls(each):
            time.sleep(0.001)
    may_measure.set()
    for each in waiting:
        each.join()
    assert made.count(0) == 1


def test_an_error_of_a_window_is_told_once():
    """Also if it came before anyone asked: who tried again alone would wait for the other ranks."""
    lengths, measure, tried = Lengths(60, 8), Lengths.measure, []
    (rank,) = make_ranks(lambda: lengths, 1, 2, window=30)

    def fails_once(*args):
        tried.append(1)
        if len(tried) == 1:
            raise DataError("the disk is gone")
        return measure(lengths, *args)

    lengths.measure = fails_once
    epoch, none = rank._groups, np.zeros(0, np.int64)
    epoch.prepare(0, none)
    while not epoch._pending[0].done():
        time.sleep(0.001)
    with pytest.raises(DataError, match="the disk is gone"):
        epoch.window(0, none)
    assert len(tried) == 1
    assert len(epoch.window(0, none).numbers)


def test_what_ranks_tell_is_new_wherever_they_begin():
    """And equal where one of them has begun it in advance, and another has not."""
    ranks, keys = make_ranks(lambda: Lengths(60, 8), 2, 1, window=30), []
    state = take_step(ranks)[1]
    while take_step(ranks) is not None:
        pass
    ranks[0].prepare_next_epoch()
    load = partial(Steps.load, state=state)
    for begin in (Steps.finish_epoch, load, load, partial(Steps.start_epoch, epoch=3), load):
        for rank in ranks:
            begin(rank)
        take_step(ranks)
        (key,) = {rank._groups._key for rank in ranks}
        assert key not in keys
        keys.append(key)


def names_of_calls(thread):
    """Of the functions that a thread is in."""
    calls = traceback.walk_stack(sys._current_frames().get(thread.ident))
    return {frame.f_code.co_name for frame, _ in calls}


def test_emptiest_groups_wait():
    lengths = Lengths(2000, 4)
    everything = np.arange(2000)
    lengths.measure(everything, bool, 0)
    vision = lengths.column("num_image_patches", everything)
    tokens = lengths.column("num_text_tokens", everything) + 10 * vision
    groups, waiting = group_window(vision, tokens, LIMITS, seed=0, is_last=False)
    assert 0 < len(waiting) < 0.06 * 2000
    assert sorted([*groups.samples.tolist(), *waiting.tolist()]) == everything.tolist()
    assert groups.sum(tokens).max() <= LIMITS.max_seq_len
    assert groups.sum(vision).max() <= LIMITS.max_vision
    # alike: no order is needed to balance them
    assert groups.sum(vision).std() / groups.sum(vision).mean() < 0.05
    last, none = group_window(vision, tokens, LIMITS, seed=0)
    assert len(none) == 0
    assert len(last.samples) == 2000


def test_errors_in_one_line():
    ranks = make_ranks(lambda: Lengths(30, 5), 1, 1, window=10)
    state = take_step(ranks)[1]
    for change in (
        {"consumed": 31},
        {"consumed": 1},
        {"given": -1},
        {"waiting": [[99]]},
        {"waiting": 3},
        {"carried": ["x"]},
    ):
        with pytest.raises(ConfigError, match="another stream"):
            ranks[0].load({**state, "stream": {**state["stream"], **change}})
    with pytest.raises(ConfigError, match="window"):
        ranks[0].load({**state, "window": 11})
    with pytest.raises(ConfigError, match="StreamingLoader"):
        ranks[0].load({key: value for key, value in state.items() if key != "dataset"})
    (broken,) = make_ranks(lambda: Lengths(30, 5, bad=1.1), 1, 1, window=10)
    with pytest.raises(DataError, match="no sample can be used; `rejected` says why"):
        take_step([broken])


def test_ranks_wait_less_for_attention_where_it_is_known():
    """Groups of few long samples have as many tokens as others, and more attention."""
    flops = replace(FlopsModel.of(load_model("tiny")), llm_flops_per_token=100_000)

    def waiting(known):
        lengths = Lengths(4000, 9)
        lengths.values["num_image_patches"][:] = lengths.values["num_image_tokens"][:] = 0
        lengths.values["num_text_tokens"][::2] = 900
        (rank,) = make_ranks(lambda: lengths, 1, 8, window=1000)
        rank._source.run.flops = known
        paid = used = 0
        while (taken := take_step([rank])) is not None:
            loads = [
                sum(lengths.values["num_text_tokens"][[part.group for part in batch]] ** 2)
                for batch in taken[0][0].micro_batches
            ]
            paid, used = paid + 8 * max(loads, default=0), used + sum(loads)
        return 1 - used / paid

    assert waiting(flops) < 0.5 * waiting(None)
