"""Datasets that give each rank items of its own, or all of them to all: told by what they give."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.distributed import split_dataset_by_node

from isobatch.common.errors import ConfigError, DataError
from isobatch.loaders import BalancedLoader
from isobatch.loaders.online.per_rank.sharding import is_sharded, parts_of
from support.ranks import run_ranks

NUM_ITEMS = 61
OPTIONS = {"measure": "own", "max_tokens": 200, "window": 64, "rank_timeout_s": 80.0}


def item(number):
    return {"id": f"item-{number}", "input_ids": [number] * (5 + 7 * number % 90)}


def first_items(numbers, seed=None, text=None):
    """Parts of a rank's first items; with a seed, augmented at random."""
    draw, items = random.Random(seed), []
    for number in numbers:
        given = item(number) | ({} if text is None else {"question": text})
        if seed is not None:
            given |= {"prompt": draw.choice("abcdefgh"), "pixels": np.ones((draw.randrange(9), 3))}
        items.append(parts_of(given))
    return items


def test_verdicts():
    same, other, third = range(4), range(50, 54), range(80, 84)
    text = "Describe the image."
    cases = [
        ([first_items(same), first_items(same)], False),
        ([first_items(same), first_items(other), first_items(third)], True),
        # the question that all ask, and what is drawn on each rank, tell nothing
        ([first_items(same, text=text), first_items(other, text=text)], True),
        ([first_items(same, seed=1), first_items(same, seed=2)], False),
        ([first_items(same, seed=1), first_items(other, seed=1)], True),
        # of ranks without items nothing is known: their share has none
        ([[], first_items(same), first_items(other)], True),
        ([[], first_items(same)], True),
        ([[], []], False),
        # pixels alone may be random
        ([[parts_of({"pixels": np.ones(3)})]] * 2, False),
    ]
    for told, expected in cases:
        assert is_sharded(told, None) is expected, told
    with pytest.raises(ConfigError, match="ranks 0 and 2 begins with the same items, and that of"):
        is_sharded([first_items(same), first_items(other), first_items(same)], None)
    assert is_sharded([first_items(same), first_items(other), first_items(same)], True)
    with pytest.raises(ConfigError, match="is_sharded=True, and the data of all ranks begins with"):
        is_sharded([first_items(same), first_items(same)], True)
    with pytest.raises(ConfigError, match="is_sharded=False, and the data of each rank begins"):
        is_sharded([first_items(same), first_items(other)], False)


class Whole(torch.utils.data.IterableDataset):
    """Items in one order, or in another on each rank."""

    def __init__(self, numbers, seed=None):
        self.numbers, self.seed = numbers, seed

    def __iter__(self):
        numbers = list(self.numbers)
        if self.seed is not None:
            random.Random(self.seed).shuffle(numbers)
        return map(item, numbers)


class Sharded(Whole):
    """Each rank's own items by itself, as some libraries do: it has items and a length, too."""

    def __iter__(self):
        return map(item, self.numbers[dist.get_rank() :: dist.get_world_size()])

    def __len__(self):
        return len(self.numbers) // dist.get_world_size()

    def __getitem__(self, number):
        return item(self.numbers[number])


class Augmented(Whole):
    """One order, and what is drawn at random on each rank."""

    def __iter__(self):
        draw = random.Random(dist.get_rank())
        for given in super().__iter__():
            yield given | {"prompt": draw.choice("abcdefgh")}


class Once:
    """A loader whose second pass goes on where the first stopped, as Energon's do."""

    def __init__(self, numbers):
        self.left = iter(numbers)

    def __iter__(self):
        return (item(number) for number in self.left)


class Rows:
    """Iterated by a method, as Ray Data's datasets are."""

    def __init__(self, numbers):
        self.numbers = numbers

    def iter_rows(self):
        return map(item, self.numbers)


def load(said):
    """By dataset: what each epoch gave this rank, or why there was none."""
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = range(NUM_ITEMS)
    own = numbers[rank::world]
    table = Dataset.from_list([item(number) for number in numbers])
    datasets = {
        "whole": (Whole(numbers), {}),
        "augmented": (Augmented(numbers), {}),
        "sharded": (Sharded(numbers), {}),
        "own": (Whole(own), {}),
        "own, said": (Whole(own), {"is_sharded": True}),
        "few": (Whole([*numbers] if rank == world - 1 else []), {}),
        "once": (Once(own), {}),
        "rows": (Rows(numbers), {}),
        "torch loader": (partial_loader(own), {}),
        "split": (split_dataset_by_node(table.to_iterable_dataset(6), rank, world), {}),
        "table": (table, {}),
        "part": (table.shard(world, rank), {"is_sharded": True}),
        "subset": (torch.utils.data.Subset(table, [*own]), {"is_sharded": True}),
        "other orders": (Whole(numbers, seed=rank), {}),
        "untold part": (table.shard(world, rank), {}),
        "untold subset": (torch.utils.data.Subset(table, [*own][: NUM_ITEMS // world]), {}),
        "together": (Sharded(numbers), {"measure": "together", "model": "tiny"}),
        "wrongly said": (Whole(numbers), {"is_sharded": True}),
    }
    for name, (dataset, more) in datasets.items():
        said[name] = []
        try:
            loader = BalancedLoader(dataset, **OPTIONS | more)
            for _ in range(1 if name == "once" else 2):
                given = [each for step in loader for batch in step for each in batch.sample_ids]
                said[name].append(given)
            loader.close()
        except (ConfigError, DataError) as error:
            said[name] = str(error)
    resume(said, table.shard(world, rank))


def partial_loader(numbers):
    """torch's DataLoader of a rank's part, as a DistributedSampler gives it."""
    items = [item(number) for number in numbers]
    return torch.utils.data.DataLoader(items, batch_size=None, collate_fn=lambda each: each)


def resume(said, part):
    """A rank's own part goes on after a state, in its random order."""
    make = partial(BalancedLoader, part, is_sharded=True, **OPTIONS)
    loader = make()
    steps = iter(loader)
    before = [each for _ in range(2) for batch in next(steps) for each in batch.sample_ids]
    state = loader.state_dict()
    rest = [each for step in steps for batch in step for each in batch.sample_ids]
    again = make()
    again.load_state_dict(state)
    resumed = [each for step in again for batch in step for each in batch.sample_ids]
    said["resumed"] = [before + resumed, rest == resumed]
    loader.close()
    again.close()


@pytest.mark.parametrize("world", [2, 3])
def test_every_item_once_in_an_epoch_or_a_line(tmp_path, world):
    ranks = run_ranks(tmp_path, world, load, most_s=240.0)
    expected = sorted(f"item-{number}" for number in range(NUM_ITEMS))
    lines = {
        "other orders": "the ranks 0 and 1 have read the same 61 items in other orders, so each",
        "untold part": "the ranks' datasets are not the same (",
        "untold subset": "the ranks' datasets are not the same (",
        "together": "dataset is a Sharded, which is iterated, and may have a part of its own on",
        "wrongly said": "is_sharded=True, and the data of all ranks begins with the same items",
    }
    for name, line in lines.items():
        assert all(line in str(said.pop(name)) for said in ranks), name
    resumed = [said.pop("resumed") for said in ranks]
    assert all(is_rest for _, is_rest in resumed)
    assert sorted(each for given, _ in resumed for each in given) == expected
    for name in ranks[0]:
        epochs = [said[name] for said in ranks]
        assert {len(each) for each in epochs} == {1 if name == "once" else 2}, (name, epochs)
        for given in zip(*epochs, strict=True):
            assert sorted(each for own in given for each in own) == expected, name
    for said in ranks:
        first, second = said["part"]
        assert first != second
        assert sorted(first) == sorted(second)
