"""Plans of ranks that pack what they have loaded: every sample once per epoch, equal steps."""

import json
import os
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, product

import numpy as np
import pyarrow as pa
import torch

from isobatch.common.errors import Cancelled
from isobatch.common.types import COUNT_COLUMNS
from isobatch.counting.record_counter import RejectedSample
from isobatch.loaders.online.config import PackingConfig
from isobatch.loaders.online.lengths import LengthOptions
from isobatch.loaders.online.per_rank.lengths import OwnLengths, RecentRows
from isobatch.loaders.online.per_rank.streams import StreamRecords
from isobatch.loaders.online.reader import RecordReader
from isobatch.loaders.online.records import Records
from isobatch.loaders.steps.steps import StepConfig, Steps
from isobatch.loaders.steps.window_groups import WindowSettings
from isobatch.loaders.steps.windows import WindowSource
from isobatch.models.presets import load_model

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "3"))


@dataclass
class Counted:
    """What the drawn records cost."""

    indices: np.ndarray
    counts: np.ndarray
    usable: np.ndarray
    sources: list
    rejected: list
    never_read: dict = field(default_factory=dict)
    num_bytes = 1
    has_videos = False

    @property
    def table(self):
        return pa.record_batch({"sample_id": [str(index) for index in self.indices.tolist()]})


class Counter:
    """Records have patches and tokens, or are bad."""

    model, identity = load_model("tiny"), "drawn"

    def unread_columns(self):
        return {}

    def count(self, indices, values):
        rows = np.zeros((len(values), len(COUNT_COLUMNS)), np.int32)
        usable = np.array([isinstance(value, list) for value in values])
        for row, value in zip(rows, values, strict=True):
            if isinstance(value, list):
                patches, tokens = value
                row[:] = patches, 4 * patches, 10 * patches, tokens, 0, tokens // 2
        rejected = [
            RejectedSample(index, str(index), "drawn", "unreadable_record", "")
            for index, good in zip(indices.tolist(), usable, strict=True)
            if not good
        ]
        return Counted(indices, rows, usable, ["drawn"] * len(values), rejected)


def drawn(count, seed, bad):
    rng = np.random.default_rng(seed)
    return [
        [int(rng.integers(0, 5)), int(rng.integers(5, 400))] if rng.random() >= bad else None
        for _ in range(count)
    ]


class Exchange:
    """Ranks in the threads of this process, which tell one another values by key."""

    rank = 0

    def __init__(self, size):
        self.size, self.told, self.changed = size, {}, threading.Condition()

    def all_gather(self, key, value, is_cancelled):
        with self.changed:
            told = self.told.setdefault(key, {})
            told[value.rank] = pickle.dumps(value)
            self.changed.notify_all()
            while len(told) < self.size:
                if is_cancelled():
                    raise Cancelled
                self.changed.wait(0.05)
            return [pickle.loads(told[rank]) for rank in range(self.size)]


class Stream(torch.utils.data.IterableDataset):
    """Items one after the other, of this rank alone, or of all; they may have no end."""

    def __init__(self, items):
        self.items, self.next = items, 0

    def __iter__(self):
        for item in islice(self.items, self.next, None):
            self.next += 1
            yield item


class SavingStream(Stream):
    """With a position that it can come back to."""

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def make_ranks(rows, world, micro_batches, *, window, state=None, streams=None, remainder="pad"):
    """Of a dataset with items, or of `streams`: one of each rank, or one of all."""
    ranks, exchange = [], Exchange(world)
    for rank in range(world):
        counter, records = Counter(), Records(rows)
        if streams is not None:
            own = streams[rank % len(streams)]
            records = StreamRecords(own, None, as_files=False)
            records.is_sharded = len(streams) > 1
        reader = RecordReader(records, counter, (), may_lose=False, kept_bytes=1 << 40)
        packing = PackingConfig(max_tokens=1000, max_vision=8, max_rejected=1.0, window=window)
        options = LengthOptions(packing=packing, seed=0)
        lengths = OwnLengths(counter, reader.measure, RecentRows(), exchange, options)
        lengths.open(reader, (rank, world))
        settings = WindowSettings(
            window=max(1, window // 8) * world,
            first_window=max(1, window // 8) * world,
            seed=0,
            balance=0.5,
            step_groups=world * micro_batches,
            loss_weights="token",
            ranks=world,
        )
        source = WindowSource(lengths, settings, {"dataset": "drawn"}, lengths)
        config = StepConfig(
            dp_rank=rank,
            dp_world_size=world,
            micro_batches=micro_batches,
            seed=0,
            remainder=remainder,
        )
        ranks.append(Steps(source, config))
        if state is not None:
            ranks[-1].load(state)
    return ranks


def take_step(ranks):
    """What each rank reads of the next step, and the state after it; None at the epoch's end."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        (remaining,) = set(pool.map(lambda each: each.remaining, ranks))
        if not remaining:
            return None
        plans = list(pool.map(lambda each: each.copy().plan(1)[0], ranks))
    (totals,) = {plan.totals for plan in plans}
    given, labels = [], 0
    for each, plan in zip(ranks, plans, strict=True):
        assert len(plan.micro_batches) == len(plans[0].micro_batches)
        lengths = each._source.run.lengths
        for batch in plan.micro_batches:
            keys = np.array([part.group for part in batch], np.int64)
            assert set(keys.tolist()) <= lengths._reader.in_memory().keys()
            labels += int(lengths.column("num_loss_tokens", keys).sum())
            given += keys.tolist()
        each.move_past(plan)
    assert totals.num_loss_tokens == labels
    (state,) = {json.dumps(each.state(), sort_keys=True) for each in ranks}
    return given, json.loads(state)


def run_epochs(make, rng, *, stops=0.3):
    """What two epochs give, run by ranks that stop at random and resume as others."""
    running, epochs, dropped = make(None), [], []
    for _ in range(2):
        given = []
        while (step := take_step(running)) is not None:
            given += step[0]
            if rng.random() < stops:
                for each in running:
                    each._source.close()
                running = make(step[1])
        epochs.append(sorted(given))
        dropped.append({each.finish_epoch() for each in running})
    return epochs, dropped


def test_elastic_runs():
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        count, window = int(rng.integers(1, 300)), int(rng.choice([24, 64, 160, 800]))
        rows = drawn(count, draw, float(rng.choice([0, 0.2])))
        usable = [number for number, row in enumerate(rows) if row]
        if not usable:
            continue

        def make(state, rows=rows, window=window, rng=rng):
            world, micro_batches = int(rng.integers(1, 5)), int(rng.integers(1, 4))
            return make_ranks(rows, world, micro_batches, window=window, state=state)

        assert run_epochs(make, rng) == ([usable] * 2, [{0}] * 2), f"draw {draw}"


def test_elastic_runs_of_streams():
    for draw in range(DRAWS):
        rng = np.random.default_rng(draw)
        world, window = int(rng.integers(1, 5)), int(rng.choice([8, 24, 160, 800]))
        kind, is_one = (Stream, SavingStream)[draw % 2], rng.random() < 0.3
        # ranks whose streams have very different lengths, some none at all
        lengths = [int(rng.integers(0, 200)) * (rng.random() < 0.8) for _ in range(world)]
        if is_one:
            lengths = lengths[:1]
        rows = [drawn(count, [draw, n], rng.choice([0, 0.2])) for n, count in enumerate(lengths)]
        size = len(rows)
        # numbered as the loader does: of n ranks, every n-th is one rank's
        usable = sorted(
            number * size + rank
            for rank, own in enumerate(rows)
            for number, row in enumerate(own)
            if row
        )
        if not usable:
            continue

        def make(state, rows=rows, kind=kind, window=window, rng=rng, world=world):
            streams, micro_batches = [kind(own) for own in rows], int(rng.integers(1, 4))
            options = {"window": window, "state": state, "streams": streams}
            return make_ranks([], world, micro_batches, **options)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the dataset has no state of where it was")
            assert run_epochs(make, rng) == ([usable] * 2, [{0}] * 2), f"draw {draw}"


def test_a_stream_may_end_where_a_share_ends():
    kinds = {
        "drawn": lambda count: drawn(count, count, 0),
        "two in a batch": lambda count: [[1, 490]] * count,
        "none at the end": lambda count: [*drawn(count - 7, count, 0), *[None] * 7],
    }
    rng = np.random.default_rng(0)
    for world, more, kind in product((1, 2, 4), (-1, 0, 1), kinds):
        remainder, share = str(rng.choice(["pad", "drop"])), int(rng.choice([1, 2, 5]))
        rows = kinds[kind](10 * world + more)
        usable = {number for number, row in enumerate(rows) if row}

        def make(state, rows=rows, world=world, share=share, remainder=remainder):
            options = {"window": 8 * share, "state": state, "remainder": remainder}
            return make_ranks([], world, world % 3, streams=[SavingStream(rows)], **options)

        case = f"{len(rows)} items, {kind}, shares of {share}, {world} ranks, {remainder}"
        epochs, dropped = run_epochs(make, rng, stops=0.1)
        for given, (left_out,) in zip(epochs, dropped, strict=True):
            assert len(given) == len(set(given)) == len(usable) - left_out, case
            assert usable.issuperset(given), case
            assert not left_out or remainder == "drop", case
