"""Whether all ranks plan the same steps: `RankChecks`.

Ranks compare when an iterator begins, in torch.distributed's store, which also shows which ranks
have not come. The lowest rank reads what all have told; every other looks for one key. Measured on
two ranks: 3 ms.
"""

import json
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from isobatch.common.errors import ConfigError
from isobatch.loaders.ranks.store import RankMissing, answering, open_store, place_of, wait_for

PAUSES_S = 0.002, 1.0
"""Between two looks at the store: a wait is at most twice what it must be."""
PATIENCE_S = 30.0
"""Time after which one of the waiting ranks warns of those that have not come."""
GRACE_S = 3.0
"""Time for a rank that was refused its state to begin without one."""
REFUSED = "/refused"
"""End of the key at which it says so."""
WARNED = "/warned"
"""End of the key that tells waiting ranks that one of them has warned."""
MOST_VALUES, MOST_LETTERS = 3, 100
"""What an error shows of a field."""
_PARTS = (
    "give every rank the whole dataset in the same order, or, where each has a part of its own, "
    "measure='own' and is_sharded=True"
)


def find_difference(reports: Mapping[int, Mapping[str, str]]) -> str | None:
    """What is wrong with what ranks told of themselves, in one line; None if they agree.

    All fields must be equal but `dp_rank`, of which each below `dp_world_size` must be there.
    """
    fields = {name: None for report in reports.values() for name in report if name != "dp_rank"}
    for name in fields:
        owners = defaultdict(list)
        for rank, report in reports.items():
            owners[report.get(name, "not there")].append(rank)
        if len(owners) > 1:
            common = sorted(owners.items(), key=lambda item: (-len(item[1]), item[1]))
            shown = [f"{_short(value)} on {_names(ranks)}" for value, ranks in common[:MOST_VALUES]]
            if rest := sum(len(ranks) for _, ranks in common[MOST_VALUES:]):
                shown.append(f"others on {rest} ranks")
            advice = _PARTS if name == "dataset" else "give every rank the same"
            return f"ranks disagree: {name} is {', '.join(shown)}; {advice}"
    size = int(next(iter(reports.values()))["dp_world_size"])
    lacking = sorted(set(range(size)) - {int(report["dp_rank"]) for report in reports.values()})
    if lacking:
        which = f"dp_rank {_spans(lacking)} of dp_world_size {size}"
        return f"no rank has {which}: its samples would be left out"
    return None


class RankChecks:
    """Comparisons of one loader with those of other ranks, the same number on each.

    `ranks`: all that must agree, as ranks of torch.distributed, one of them this process.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self._ranks, self._timeout_s = sorted(ranks), timeout_s
        self._place = place_of("ranks", ranks)
        self._loader = 0
        self._round = 0
        self._refused = False

    def compare(self, fields: Mapping[str, str]) -> None:
        """Wait for all ranks. ConfigError on all if any tells others' fields; see `RankMissing`."""
        if not dist.is_initialized():
            return
        with answering():
            verdict = self._verdict(json.dumps(dict(fields)))
        if verdict:
            raise ConfigError(verdict)

    def tell(self, problem: str) -> None:
        """Let ranks that compare know why this one may not come: its state, or its build."""
        if dist.is_initialized():
            with suppress(RuntimeError):  # without a store they know by themselves
                store, me = open_store(), dist.get_rank()
                store.set(self._next(store) + REFUSED, f"rank {me} {problem}")
                self._refused = True

    def _verdict(self, report: str) -> str:
        store, me = open_store(), dist.get_rank()
        place = self._next(store)
        keys = {rank: f"{place}/{rank}" for rank in self._ranks}
        wait = _Wait(store, place, keys, self._timeout_s)
        self._round += 1
        store.set(keys[me], report)
        if self._refused:
            store.delete_key(place + REFUSED)
            self._refused = False
        if me == self._ranks[0] and wait.until([*keys.values()]):
            reports = {rank: json.loads(store.get(key)) for rank, key in keys.items()}
            store.set(place, find_difference(reports) or "")
        if not wait.until([place]):
            raise RankMissing(
                f"rank {me} has waited {self._timeout_s:g} s for {wait.missing()} to begin the "
                "same epoch; iterate on all ranks, or give a longer rank_timeout_s, or "
                "check_ranks=False where ranks load on their own"
            )
        store.delete_key(keys[me])  # read by now; only the verdicts stay
        verdict = store.get(place).decode()
        if verdict and me == self._ranks[0]:  # whose process may have the store, and ends with it
            until = time.monotonic() + 2 * PAUSES_S[1]
            while any(store.check([key]) for key in keys.values()) and time.monotonic() < until:
                time.sleep(PAUSES_S[1] / 100)
        return verdict

    def _next(self, store: Store) -> str:
        """Key of the next comparison, and of its verdict."""
        # loaders are numbered when they first compare; a rank may have opened others in between
        self._loader = self._loader or store.add(f"{self._place}/loaders/{dist.get_rank()}", 1)
        return f"{self._place}/{self._loader}/{self._round + 1}"


class _Wait:
    """A rank's wait for others in one comparison; `keys` has each rank's."""

    def __init__(self, store: Store, place: str, keys: Mapping[int, str], timeout_s: float) -> None:
        self._store, self._place, self._keys, self._timeout_s = store, place, keys, timeout_s
        self._began = time.monotonic()
        self._refused_at = 0.0
        self._warned = False

    def until(self, keys: list[str]) -> bool:
        """Whether all keys come in time. ConfigError if a rank's refusal stays."""
        return wait_for(self._store, keys, PAUSES_S, self._left_s)

    def _left_s(self) -> float:
        """Time that is left. ConfigError if a rank has refused its state, and does not come."""
        now = time.monotonic()
        if now - self._began > PATIENCE_S:
            self._warn()  # also where this process slept through the rest of its time
        if self._store.check([self._place + REFUSED]):
            self._refused_at = self._refused_at or now
            if now - self._refused_at > GRACE_S:
                raise ConfigError(self._store.get(self._place + REFUSED).decode())
        else:
            self._refused_at = 0.0
        return self._began + self._timeout_s - now

    def missing(self) -> str:
        """The ranks that have not come; the lowest if all have, since it has the verdict."""
        ranks = [rank for rank, key in self._keys.items() if not self._store.check([key])]
        return _names(ranks or [min(self._keys)])

    def _warn(self) -> None:
        """Say once, on one of the waiting ranks, for whom they wait."""
        if not self._warned and self._store.add(self._place + WARNED, 1) == 1:
            warnings.warn(
                f"rank {dist.get_rank()} has waited {PATIENCE_S:g} s for {self.missing()} to begin "
                f"the same epoch, and waits up to {self._timeout_s:g} s; where ranks load on their "
                "own, give check_ranks=False",
                RuntimeWarning,
                stacklevel=2,
            )
        self._warned = True


def _short(value: str) -> str:
    return value if len(value) <= MOST_LETTERS else f"{value[:MOST_LETTERS]}..."


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {_short(_spans(ranks))}"


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours joined.

    >>> _spans([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    spans = []
    for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        values = [number for _, number in run]
        spans.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return ", ".join(spans)
