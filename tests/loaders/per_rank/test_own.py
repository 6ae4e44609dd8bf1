"""`BalancedLoader(measure="own")`: what each rank has loaded is what it trains on."""

import json
import re
import warnings
from itertools import count, islice

import datasets
import pytest
import torch
import torch.distributed as dist

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import BalancedLoader
from isobatch.loaders.online.per_rank.sharding import FIRST_ITEMS
from support.loading.contents import content
from support.loading.online_data import OPTIONS, open_ranks, records, samples_of
from support.ranks import run_ranks

OWN = {"measure": "own", "window": 80, "max_tokens": 600, "pixel_dtype": torch.uint8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def rows(folder):
    return records(folder, 50)


class Stream(torch.utils.data.IterableDataset):
    """Items one after the other."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class SavingStream(Stream):
    """With a position that it can come back to."""

    next, note = 0, id

    def __iter__(self):
        self.note(self.next)
        for item in islice(self.items, self.next, None):
            self.next += 1
            yield item

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class LiveStream(Stream):
    """Its state is the one that it goes on to change."""

    state = None

    def __iter__(self):
        self.state = self.state or {"next": 0}
        for item in islice(self.items, self.state["next"], None):
            self.state["next"] += 1
            yield item

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def batches_of(ranks):
    return [batch for steps in zip(*ranks, strict=True) for step in steps for batch in step]


def test_samples_are_those_that_are_measured_together(rows, folder):
    (together,) = open_ranks(rows, 1, folder, max_tokens=600, pixel_dtype=torch.uint8)
    expected = samples_of(batches_of([together]), together.image_token_id)
    from_rows = datasets.Dataset.from_list([{"row": json.dumps(row)} for row in rows])
    from_json = {"transform": lambda row: json.loads(row["row"])}
    cases = {
        "list": (rows, {}),
        "stream": (Stream(rows), {}),
        "stream with a state": (SavingStream(rows), {}),
        "stream with a live state": (LiveStream(rows), {}),
        "files": (from_rows.to_iterable_dataset(num_shards=4), from_json),
        "shuffled": (from_rows.to_iterable_dataset(4).shuffle(1, buffer_size=20), from_json),
    }
    for name, (dataset, options) in cases.items():
        world = 2 if name == "list" else 1
        ranks = open_ranks(dataset, world, folder, **OWN, **options)
        given, states = [], []
        for step in zip(*ranks, strict=True):
            given.append(step)
            (state,) = {json.dumps(loader.state_dict()) for loader in ranks}
            states.append(json.loads(state))
        assert len(given) > 3, name
        all_batches = [batch for step in given for own in step for batch in own]
        assert samples_of(all_batches, ranks[0].image_token_id) == expected, name
        # exact on as many ranks; on others every sample once, or not at all of a stream
        again = open_ranks(dataset, world, folder, state=states[1], **OWN, **options)
        with warnings.catch_warnings(record=True, action="always") as warned:
            rest = [[content(each) for each in step] for step in zip(*again, strict=True)]
        says_so = ["items are read again"] * (name in ("stream", "shuffled"))
        assert [str(each.message)[-20:] for each in warned] == says_so, name
        assert rest == [[content(each) for each in step] for step in given[2:]], name
        for loader in (*ranks, *again):
            loader.close()
        if name == "list":
            (alone,) = open_ranks(rows, 1, folder, state=states[1], **OWN)
            first = [batch for step in given[:2] for own in step for batch in own]
            found = samples_of([*first, *batches_of([alone])], alone.image_token_id)
            assert found == expected
            alone.close()


def load_together(said, folder, rows):
    """On two ranks: what each has loaded itself, and what its steps hold."""
    loaded = []

    def note(row):
        loaded.append(row.get("id"))
        return row

    options = OPTIONS | OWN | {"data_root": str(folder), "transform": note, "rank_timeout_s": 80.0}
    loader = BalancedLoader(rows, **options)
    said["names"], said["states"], said["labels"] = [], [], []
    for step in loader:
        said["names"].append([name for batch in step for name in batch.sample_ids])
        own = sum(int((batch.labels != -100).sum()) for batch in step)
        said["labels"].append([own, step[0].num_loss_tokens, step[0].loss_normalizer])
        said["states"].append(loader.state_dict())
    said["loaded"], said["report"] = list(loaded), loader.report()
    loader.close()
    rank, from_json = dist.get_rank(), {"transform": lambda row: json.loads(row["row"])}
    from_rows = datasets.Dataset.from_list([{"row": json.dumps(row)} for row in rows])
    streams = {
        "items": (SavingStream(rows), {}),
        "files": (from_rows.to_iterable_dataset(4), from_json),
        "one file": (from_rows.to_iterable_dataset(), from_json),
        # of other lengths, and of rank 0 none
        "own": (SavingStream([[], rows][rank]), {"is_sharded": True}),
    }
    for name, (dataset, more) in streams.items():
        steps, states = [], []
        for step in (loader := BalancedLoader(dataset, **options | more)):
            steps.append([name for batch in step for name in batch.sample_ids])
            states.append(loader.state_dict())
        again = BalancedLoader(dataset, **options | more)
        again.load_state_dict(states[2])
        rest = [[name for batch in step for name in batch.sample_ids] for step in again]
        said[name] = {"steps": steps, "states": states, "is_rest": rest == steps[3:]}
    wrong = {
        "rejected": [row if row["id"] < "s3" else {} for row in rows],
        "few rejected": Stream([{}, *rows[:5]]),
        "broken": Stream(Broken(rows) if rank else rows),
        "empty": Stream([]),
    }
    for name, dataset in wrong.items():
        try:
            list(BalancedLoader(dataset, **options))
        except DataError as error:
            said[name] = str(error)


class Broken(list):
    """Raises at its 30th record, which ends a generator."""

    def __iter__(self):
        yield from self[:30]
        raise OSError("the store is gone")


def test_two_ranks_load_half_each(rows, folder, tmp_path):
    first, second = run_ranks(tmp_path, 2, load_together, folder, rows, most_s=240.0)
    given = []
    for said in (first, second):
        own = sorted(name for step in said["names"] for name in step)
        # the first record is looked at, too, and some are compared with those of other ranks
        assert sorted(said["loaded"][1 + FIRST_ITEMS :]) == own
        given += own
        assert "samples cannot be used, more than max_rejected=0.05" in said["rejected"]
        assert "1 of 6 samples cannot be used, more than" in said["few rejected"]
        assert "one rank failed: DataError: the stream raised OSError: the store" in said["broken"]
        assert (
            "no sample can be used; `rejected` says why, and is empty if the dataset is"
            in said["empty"]
        )
    for name in ("items", "files", "one file", "own"):
        each, other = first[name], second[name]
        assert each["states"] == other["states"], name
        assert len(each["steps"]) == len(other["steps"]) > 5, name
        assert each["is_rest"], name
        assert other["is_rest"], name
        ids = [[sample for step in said["steps"] for sample in step] for said in (each, other)]
        assert sorted(ids[0] + ids[1]) == sorted(row["id"] for row in rows), name
        assert len(ids[0]) == (0 if name == "own" else 25), name
        with pytest.raises(ConfigError, match="stream on 2 ranks, and this loader has 1: resume"):
            open_ranks(Stream(rows), 1, folder, state=each["states"][2], **OWN)
    assert sorted(given) == sorted(row["id"] for row in rows)
    assert first["states"] == second["states"]
    pairs = zip(first["labels"], second["labels"], strict=True)
    for (mine, total, divisor), (others, *same) in pairs:
        assert [total, divisor] == same
        assert total == mine + others
    assert first["report"]["sources"] == second["report"]["sources"]


def test_what_does_not_fit_is_refused(rows, folder, tmp_path):
    (loader,) = open_ranks(rows, 1, folder, **OWN)
    with pytest.raises(ConfigError, match="save_build is not there with measure='own'"):
        loader.save_build(tmp_path / "packed")
    state = loader.state_dict()
    with pytest.raises(ConfigError, match="of the run that saved it"):
        open_ranks(rows, 1, folder, state=state)
    cases = {
        "lengths_cache is not there with measure='own'": (rows, OWN | {"lengths_cache": tmp_path}),
        "shuffle=False is not there with measure='own'": (rows, OWN | {"shuffle": False}),
        "measure is 'alone'; it must be": (rows, {"measure": "alone"}),
        "dataset is a list_iterator; give a list of records": (iter(rows), OWN),
        "Hub id of the data, or with measure='own' an IterableDataset": (Stream(rows), {}),
    }
    for line, (dataset, options) in cases.items():
        with pytest.raises(ConfigError, match=line):
            open_ranks(dataset, 1, folder, **options)
    with pytest.raises(ConfigError, match="a stream on several ranks needs"):
        open_ranks(Stream(rows), 2, folder, **OWN)
    (loader,) = open_ranks(Stream(rows), 1, folder, **OWN)
    with pytest.raises(TypeError, match="nobody knows the length of a stream before its end"):
        len(loader)
    next(iter(loader))
    state = loader.state_dict()
    loader.close()
    with (
        pytest.raises(DataError, match="the stream has fewer items than in the run that"),
        pytest.warns(UserWarning, match="items are read again"),
    ):
        list(*open_ranks(Stream(rows[:3]), 1, folder, state=state, **OWN))


SHORT = {"labels": [1, 2]}


class Processed(torch.utils.data.Dataset):
    """Samples as a processor gives them, of another length each time; some are none."""

    def __init__(self, count):
        self.count, self.times = count, {}

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        self.times[number] = time = self.times.get(number, 0) + 1
        if number % 20 == 3:
            raise OSError("no such file")
        if number % 20 == 7:
            return {"text": "not processed"} if number % 40 == 7 else {"input_ids": [1], **SHORT}
        tokens, rows = 5 + (7 * number + 3 * time) % 90, number % 4
        ids = torch.full((1, tokens), number)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": torch.zeros_like(ids),
            "labels": torch.where(torch.arange(tokens) < 3, -100, ids),
            "pixel_values": torch.full((rows, 3, 2, 2), float(number)),
            "image_grid_thw": [[1, 1, rows]] if rows else [],
            "id": f"item-{number}",
        }


def test_processed_items_are_packed_as_they_are():
    bad = {number for number in range(120) if number % 20 in (3, 7)}
    options = {"measure": "own", "max_tokens": 200, "max_vision": 9, "max_rejected": 0.2}
    loader = BalancedLoader(Processed(120), window=240, workers=2, **options)
    for _ in range(2):
        found = []
        for step in loader:
            for batch in step:
                assert batch.cu_seqlens[-1] == len(batch.input_ids) <= 200
                assert batch.num_loss_tokens == (batch.labels != -100).sum()
                for name, ids in zip(
                    batch.sample_ids,
                    batch.input_ids.split(batch.cu_seqlens.diff().tolist()),
                    strict=True,
                ):
                    (number,) = set(ids.tolist())
                    assert name == f"item-{number}"
                    found.append(number)
                assert {*batch.processed} <= {"pixel_values", "image_grid_thw"}
                patches = [
                    number for number in found[-batch.num_samples :] for _ in range(number % 4)
                ]
                assert batch.processed["pixel_values"][:, 0, 0, 0].tolist() == patches
                assert len(patches) <= 9
        assert sorted(found) == sorted(set(range(120)) - bad)
    assert {each.index for each in loader.rejected} == bad
    assert {each.reason for each in loader.rejected} == {"unreadable_record", "encode_failed"}
    details = {each.index: each.detail for each in loader.rejected}
    assert "the item is a dict without input_ids" in details[7]
    assert "labels and input_ids have different lengths; align them" in details[27]
    loader.close()


class Numbers:
    """Processed samples without end, and some batches of them."""

    def __iter__(self):
        return ({"input_ids": torch.full((1 + (n % 50 == 9), 5 + 7 * n % 90), n)} for n in count())


def test_a_stream_may_have_no_end(tmp_path):
    options = {"measure": "own", "max_tokens": 200, "window": 160, "micro_batches_per_step": 2}
    loader = BalancedLoader(SavingStream(Numbers()), **options)
    given, states = [], []
    for step in islice(loader, 120):
        given.append([sorted(set(batch.input_ids.tolist())) for batch in step])
        states.append(json.loads(json.dumps(loader.state_dict())))
    found = [number for step in given for batch in step for number in batch]
    assert len(found) == len(set(found)) > 500
    assert set(range(400)) - set(found) == set(range(9, 400, 50))
    assert "input_ids has the shape (2, 68): an item is one" in loader.rejected[0].detail
    assert loader.report()["records"] is None
    loader.write_report(tmp_path / "report.html")
    assert re.search(r"<p>[0-9,]+ records", (tmp_path / "report.html").read_text("utf-8"))
    # what is kept does not grow
    assert len(loader._lengths._table._known) < 200
    assert len(json.dumps(states[-1])) < 5_000
    loader.close()
    begun = []
    stream = SavingStream(Numbers())
    stream.note = begun.append
    again = BalancedLoader(stream, **options)
    again.load_state_dict(states[79])
    rest = [[sorted(set(batch.input_ids.tolist())) for batch in step] for step in islice(again, 40)]
    assert rest == given[80:]
    # it began near what waited, and not at the beginning
    assert min(begun) > 300, begun
    again.close()
