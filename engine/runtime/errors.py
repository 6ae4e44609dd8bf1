"""What goes wrong in a step, in one line: a rank that is gone, a loss that is no number, a tensor
unlike its spec.

A rank that dies closes its connections: whoever waits for it notices at once, stops too, and closes
his own. So all ranks end, one after the other; that each names the rank that went first, they tell
each other through the store at which they met.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch.distributed as dist

from balance.errors import IsobatchError, first_line

FIRST_LOST = "isobatch/first_lost"
ANSWERED = "isobatch/answered"
ROLL_CALL_S = 3.0
"""How long a rank that does not know who has gone waits for the others to say that they are still
there.
"""


class _Store(Protocol):
    """Of a `torch.distributed.Store`, what is used to look something up."""

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...


class PeerLost(IsobatchError, RuntimeError):
    """Another rank of the pipeline does not answer any more."""


class LossNotFinite(IsobatchError, ArithmeticError):
    """The loss of some micro-batches is NaN or infinite; what the step added to the gradients is
    void.
    """


class SpecMismatch(IsobatchError, ValueError):
    """A layer gives something else than the model's specs say."""


@contextmanager
def peers(ranks: Sequence[int], other: int | None = None) -> Iterator[None]:
    """Tell what torch raises when another rank has gone in one line: PeerLost.

    `ranks`: those of the world that take part; `other`: the one that is talked to, where it is one.
    """
    try:
        yield
    except IsobatchError:
        raise
    except RuntimeError as error:
        me = dist.get_rank()
        others = [rank for rank in ranks if rank != me]
        lost = _first_lost(others, others[0] if other is None and len(others) == 1 else other)
        raise PeerLost(f"rank {me} stops, for {_reason(me, lost)} ({first_line(error)})") from error


def _reason(me: int, lost: int | None) -> str:
    if lost == me:
        return "the others waited for it in vain and have stopped; timeout_s says for how long they wait"
    who = "another rank" if lost is None else f"rank {lost}"
    return f"{who} does not answer any more; its own output says why"


def _first_lost(others: Sequence[int], seen: int | None) -> int | None:
    """Who went first: what the first rank to notice wrote into the store, or else whom this one has
    lost itself.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{ANSWERED}/{dist.get_rank()}", "")
        if seen is not None:
            return int(store.compare_set(FIRST_LOST, "", str(seen)))
        return _roll_call(store, others)
    except RuntimeError:  # the store was with the rank that has gone
        return seen


def _roll_call(store: _Store, others: Sequence[int]) -> int | None:
    """Who does not answer: a collective failed, which does not say because of whom."""
    until = time.monotonic() + ROLL_CALL_S
    while True:
        if store.check([FIRST_LOST]):
            return int(store.get(FIRST_LOST))
        silent = [rank for rank in others if not store.check([f"{ANSWERED}/{rank}"])]
        if not silent:
            return None
        if time.monotonic() > until:
            return silent[0] if len(silent) == 1 else None
        time.sleep(0.05)
