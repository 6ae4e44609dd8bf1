"""After an epoch on any route: samples used, rejected and left out are those that there are."""

from itertools import chain, islice

import numpy as np
import pytest
import torch

from isobatch.common.errors import IsobatchError
from isobatch.common.types import Groups
from isobatch.loaders import BalancedLoader, StreamingLoader
from isobatch.loaders.steps import build_groups
from isobatch.loaders.steps import steps as planning
from support.builds.sample_tables import write_texts

SIZES = {"a": 150, "b": 60, "c": 21}
ROWS = [{"input_ids": [number] * (5 + 7 * number % 90)} for number in range(150)]
ROWS[40] = {"text": "not a sample"}
"""It is rejected, which is not lost."""


class Stream(torch.utils.data.IterableDataset):
    """The rows, one after the other."""

    def __iter__(self):
        return iter(ROWS)


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return list(map(str, write_texts(tmp_path_factory.mktemp("used"), SIZES)))


def online(dataset, **options):
    own = {"max_tokens": 200, "window": 40, "max_rejected": 0.5}
    return BalancedLoader(dataset, dp_rank=0, dp_world_size=1, **own | options)


def from_build(url, **options):
    return StreamingLoader(url, dp_rank=0, dp_world_size=2, **options)


def encode(record):
    from isobatch.loaders import Encoded  # noqa: PLC0415  (torch)

    return Encoded(torch.tensor(record["input_ids"]))


def routes(urls):
    """By name, a function that makes a loader."""
    weights = list(zip(urls, (1.0, 0.5, 2.0), strict=True))
    schedule = [(0, dict.fromkeys(urls, 1.0)), (3, dict(zip(urls, (1.0, 0.2, 1.0), strict=True)))]
    return {
        "build": lambda: from_build(urls[0]),
        "random": lambda: from_build(urls[0], balance=0, micro_batches_per_step=2),
        "drop": lambda: from_build(urls[0], micro_batches_per_step=3, remainder="drop"),
        "regrouped": lambda: from_build(urls[0], regroup="epoch"),
        "chosen": lambda: from_build(urls[0], limit=70),
        "in order": lambda: from_build(urls, shuffle=False),
        "builds": lambda: from_build(urls, micro_batches_per_step=2),
        "weights": lambda: from_build(weights),
        "schedule": lambda: from_build(urls, mixing_weights=schedule, regroup="epoch"),
        "together": lambda: online(ROWS, encode=encode),
        "padded": lambda: online(ROWS, encode=encode, packing=False),
        "evaluation": lambda: online(ROWS, encode=encode, shuffle=False),
        "own": lambda: online(ROWS, measure="own"),
        "stream": lambda: online(Stream(), measure="own"),
    }


NAMES = list(routes([""] * 3))


@pytest.mark.parametrize("name", NAMES)
def test_what_was_used_is_what_there_is(urls, name, monkeypatch):
    monkeypatch.setattr(build_groups, "CHUNK", 7)  # what is left is summed in parts
    make = routes(urls)[name]
    checked = []
    check = planning.Steps._check_samples
    monkeypatch.setattr(
        planning.Steps,
        "_check_samples",
        lambda self: checked.append(self._num_used) or check(self),
    )
    loader = make()
    for _ in range(3):
        list(loader)
    # resumed in the middle, and begun anew there
    list(islice(loader, 2))
    state = loader.state_dict()
    loader.close()
    again = make()
    again.load_state_dict(state)
    list(again)
    if name != "schedule":
        again.set_epoch(again.epoch + 2)
    list(again)
    again.close()
    # an evaluation's epoch ends when the next begins
    assert len(checked) >= 4
    assert all(checked)


@pytest.mark.parametrize("kind", ["lost", "twice"])
@pytest.mark.parametrize("name", NAMES)
def test_a_group_that_is_lost_or_used_twice_is_an_error(urls, name, kind, monkeypatch):
    take, faults = planning.take_steps, []

    def take_wrong(*given):
        steps, streams = take(*given)
        if not faults:
            faults.append(kind)
            groups = np.flatnonzero(steps >= 0)
            steps = steps.copy()
            if kind == "lost":
                steps.ravel()[groups[-1]] = -1
            else:  # one of another size comes instead of it
                steps = np.concatenate([steps, steps[-1:]])
                streams = [*streams, streams[-1]]
        return steps, streams

    monkeypatch.setattr(planning, "take_steps", take_wrong)
    loader = routes(urls)[name]()
    said = r"should have used \d+ samples and has used \d+: that"
    if (name, kind) == ("stream", "twice"):  # whichever comes first
        said += "|items of a stream are read once"
    with pytest.raises(IsobatchError, match=said):
        list(chain(loader, loader))
    loader.close()


def test_a_window_that_loses_a_sample_is_an_error(monkeypatch):
    from isobatch.balance.grouping import window  # noqa: PLC0415  (compiles)

    whole = window.group_window

    def lossy(*given, **options):
        groups, left = whole(*given, **options)
        fewer = len(groups.samples) - 1
        return Groups(groups.samples[:-1], np.append(groups.offsets[:-1], fewer)), left

    monkeypatch.setattr(window, "group_window", lossy)
    loader = online(ROWS, encode=encode)
    with pytest.raises(
        IsobatchError, match=r"of \d+ samples of a window \d+ are in groups, \d+ wait and"
    ):
        list(loader)
    loader.close()
