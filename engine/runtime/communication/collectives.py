"""What all ranks do or none does: an error of one is raised on all of them, which would wait for it
in vain.

For work outside of passes, such as reading and writing saved state. An error that is raised on
purpose (IsobatchError) travels to the others as a short message; a rank that dies is noticed by its
closed connection (`engine.runtime.errors`). Without torch.distributed, all of this is a plain call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from balance.errors import IsobatchError
from engine.runtime.errors import peers

T = TypeVar("T")


def together(work: Callable[[], T]) -> T:
    """`work()` on all ranks, which must not talk to each other in it; -> this rank's own value.

    If it fails on any, the lowest rank's IsobatchError is raised on all.
    """
    value, error = _outcome(work)
    failed = next((own for own in gathered(error) if own is not None), None)
    return _value(value, failed)


def from_first(work: Callable[[], T]) -> T:
    """`work()` on the first rank alone; -> its value, on all ranks. Its IsobatchError is raised on
    all.
    """
    told = [_outcome(work) if is_first() else (None, None)]
    if dist.is_initialized():
        with everyone():
            dist.broadcast_object_list(told, src=0)
    return _value(*told[0])


def gathered(value: T) -> list[T]:
    """Every rank's value, on all ranks."""
    found = [value]
    if dist.is_initialized():
        found *= dist.get_world_size()
        with everyone():
            dist.all_gather_object(found, value)
    return found


def is_first() -> bool:
    """Whether this is the first rank, or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def everyone() -> Iterator[None]:
    """PeerLost if another rank of the world has gone while this one talks to all."""
    if not dist.is_initialized():
        yield
        return
    with peers(range(dist.get_world_size())):
        yield


def _outcome(work: Callable[[], T]) -> tuple[T | None, IsobatchError | None]:
    try:
        return work(), None
    except IsobatchError as error:
        return None, error


def _value(value: T | None, error: IsobatchError | None) -> T:
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only where it is what the work gives
