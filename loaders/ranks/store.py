"""The store of torch.distributed, in which ranks tell one another what they have.

It is the key-value store through which that was initialised. A collective needs a device and a
backend, must come in the same order on all ranks, gets between the trainer's, and would wait in a
thread that nothing can end.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from isobatch.common.errors import IsobatchError, first_line


class Awaited:
    """Whether a trainer waits for what a loader does, or is busy between two steps."""

    is_awaited = True

    @contextmanager
    def being(self, *, awaited: bool) -> Iterator[None]:
        """Set it for a while."""
        before, self.is_awaited = self.is_awaited, awaited
        try:
            yield
        finally:
            self.is_awaited = before


class RankMissing(IsobatchError, TimeoutError):
    """Another rank did not come to the comparison in time."""


def open_store() -> Store:
    """The store of torch.distributed's default group."""
    return dist.distributed_c10d._get_default_store()


def place_of(kind: str, ranks: Sequence[int]) -> str:
    """Beginning of all keys of one kind among these ranks."""
    digest = blake2b(str(sorted(ranks)).encode(), digest_size=8).hexdigest()
    return f"isobatch/{kind}/{digest}"


@contextmanager
def answering() -> Iterator[None]:
    """RankMissing where the store does not answer any more."""
    try:
        yield
    except RuntimeError as error:
        reason = f"torch.distributed's store does not answer ({first_line(error)})"
        raise RankMissing(f"{reason}: the process that holds it has ended") from error


def wait_for(
    store: Store, keys: Sequence[str], pauses_s: tuple[float, float], left_s: Callable[[], float]
) -> bool:
    """Whether all keys are there before `left_s` gives 0; it may raise.

    `pauses_s` between two looks: the first, doubled each time, and the longest. Not `Store.wait`,
    which an interrupt cannot end.
    """
    pause, longest = pauses_s
    while not store.check([*keys]):
        if (remaining_s := left_s()) <= 0:
            return False
        time.sleep(min(pause, remaining_s))
        pause = min(2 * pause, longest)
    return True
