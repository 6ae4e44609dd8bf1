"""How ranks end together: all act on SIGTERM, and one of them prints an error.

Schedulers send SIGTERM before they kill, to all processes or only to one, or torchrun passes it on.
So a rank only notes it, and all ranks agree at the end of each step: they save and end. An error
that all ranks run into is printed by the first, and that of one rank by that rank; those that only
miss a lost rank are silent if it has said why it ended. Ranks tell each other in the store at which
they met.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from types import FrameType
from typing import Any

import torch.distributed as dist

from isobatch.common.command_line import TERMINATED
from isobatch.common.errors import IsobatchError
from isobatch.engine.runtime.errors import ROLL_CALL_S, PeerLost
from isobatch.engine.train.launch import is_first_rank

TOGETHER_S = 2.0
"""Signals within this time are one: a scheduler may signal a rank that torchrun signals too."""
FIRST_RANK_S = 1.0
"""Time that the first rank gets to print an error before another does; after it, to hear of it."""
_FAULTS = "isobatch/faults"


class StoppedBySignal(IsobatchError, RuntimeError):
    """Training has ended after SIGTERM, with everything saved that was to be saved."""


class StopSignal:
    """SIGTERM of this rank, noted once it has begun to train."""

    def __init__(self) -> None:
        self._noted_at: float | None = None

    @property
    def is_noted(self) -> bool:
        """Whether it has come."""
        return self._noted_at is not None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note SIGTERM inside a `with`; a second one ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python tells only the main thread of signals
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._noted_at is None:
            self._noted_at = now
        elif now - self._noted_at > TOGETHER_S:
            if is_first_rank():
                os.write(2, b"error: stopped\n")
            os._exit(TERMINATED)


def is_mine_to_print(error: BaseException) -> bool:
    """Whether this rank prints the error that ends it; each rank asks once, with its own.

    Takes up to a second where ranks must wait for each other.
    """
    stopped = isinstance(error, KeyboardInterrupt)
    if not dist.is_initialized():
        return is_first_rank() or not stopped
    try:
        return _is_mine(error, dist.distributed_c10d._get_default_store(), dist.get_rank())
    except RuntimeError:  # the store was on a rank that has ended
        return dist.get_rank() == 0 or not stopped


def _is_mine(error: BaseException, store: Any, rank: int) -> bool:
    fault, asked = f"{_FAULTS}/own", f"{_FAULTS}/asked"
    if isinstance(error, KeyboardInterrupt):  # also from torchrun, because another rank has ended
        return rank == 0 and not store.check([fault])
    if isinstance(error, PeerLost):
        mine = not store.check([fault]) and store.add(f"{_FAULTS}/lost", 1) == 1
    else:  # its own fault, or one of all ranks
        store.set(fault, "")
        mine = _is_first_of_its_kind(error, store, rank)
    store.add(asked, 1)
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # the store ends with this rank; others may notice later that one is lost
        is_lost = isinstance(error, PeerLost)
        expected = dist.get_world_size() - is_lost
        most_s = FIRST_RANK_S + 2 * ROLL_CALL_S * is_lost
        _wait(lambda: store.add(asked, 0) >= expected, most_s)
    return mine


def _is_first_of_its_kind(error: BaseException, store: Any, rank: int) -> bool:
    """Whether no rank has this error to print already; the first rank is let go first."""
    text = re.sub(rf"\brank {rank}\b", "rank", f"{type(error).__name__}: {error}")
    alike, first = f"{_FAULTS}/{blake2b(text.encode()).hexdigest()}", f"{_FAULTS}/first"
    if rank:
        _wait(lambda: store.check([first]))
    is_first = bool(store.add(alike, 1) == 1)
    if rank == 0:
        store.set(first, "")
    return is_first


def _wait(is_done: Callable[[], bool], most_s: float = FIRST_RANK_S) -> None:
    until = time.monotonic() + most_s
    while not is_done() and time.monotonic() < until:
        time.sleep(0.01)
