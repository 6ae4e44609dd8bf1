"""What each rank has measured, told to all through torch.distributed's store.

Keys name what is exchanged, so ranks that begin again at some position find each other, and a
thread that was given up disturbs nobody. The lowest rank joins the parts; the others read one
value.
"""

import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch.distributed as dist

from isobatch.common.errors import Cancelled
from isobatch.loaders.ranks.store import (
    Awaited,
    RankMissing,
    answering,
    open_store,
    place_of,
    wait_for,
)

PAUSES_S = 0.001, 0.05
"""Between two looks at the store: doubled each time."""


class RankExchange(Awaited):
    """Exchanges of one loader with those of other ranks.

    While no trainer awaits them, no rank is late: all may be at an evaluation, for which this one
    has read ahead a step more than another.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        """`ranks` of torch.distributed, one of them this process. All make one, in one order."""
        self._ranks = sorted(ranks)
        self._timeout_s = timeout_s
        self._me = dist.get_rank()
        self._store = open_store()
        place = place_of("exchange", ranks)
        self._place = f"{place}/{self._store.add(f'{place}/loaders/{self._me}', 1)}"
        self._last = ""

    @property
    def rank(self) -> int:
        """Place of this process among the ranks."""
        return self._ranks.index(self._me)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    def all_gather(self, key: str, value: Any, is_cancelled: Callable[[], bool]) -> list[Any]:
        """Every rank's value for `key`, which names it on all ranks, in the ranks' order.

        `Cancelled` when that becomes true; RankMissing if a rank does not come in time.
        """
        store = self._store
        place = f"{self._place}/{key}"
        keys = {rank: f"{place}/{rank}" for rank in self._ranks}
        if is_cancelled():  # others may be told the same by what has followed
            raise Cancelled
        with answering():
            message = zlib.compress(pickle.dumps(value), 1)
            store.set(keys[self._me], message)  # type: ignore[arg-type]
            if self._me == self._ranks[0]:
                self._wait([*keys.values()], keys, is_cancelled)
                parts = [store.get(key) for key in keys.values()]
                store.set(place, pickle.dumps(parts))  # type: ignore[arg-type]
                # the last one: all have read it, or had no part here; if it is this, not all have
                obsolete = [self._last] if self._last not in ("", place) else []
                for obsolete_key in [*keys.values(), *obsolete]:
                    store.delete_key(obsolete_key)
                self._last = place
            else:
                self._wait([place], keys, is_cancelled)
                parts = pickle.loads(store.get(place))
            return [pickle.loads(zlib.decompress(part)) for part in parts]

    def _wait(
        self, wanted: list[str], keys: dict[int, str], is_cancelled: Callable[[], bool]
    ) -> None:
        end = time.monotonic() + self._timeout_s

        def left_s() -> float:
            nonlocal end
            if is_cancelled():
                raise Cancelled
            if not self.is_awaited:
                end = time.monotonic() + self._timeout_s
                return inf
            return end - time.monotonic()

        if not wait_for(self._store, wanted, PAUSES_S, left_s):
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise RankMissing(
                f"rank {self._me} has waited {self._timeout_s:g} s for what the ranks "
                f"{missing or self._ranks[:1]} measure; iterate on all ranks, or give a longer "
                "rank_timeout_s"
            )
