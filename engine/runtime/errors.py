"""Errors of a training step: lost peers, numbers not finite, out of memory.

A rank that dies closes its connections: whoever waits for it fails at once, and closes its own. So
all ranks end, one after the other. Through the store at which they met, they tell each other which
rank went first. A rank that runs out of memory ends only the step (`StageExecutor`).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from isobatch.common.errors import IsobatchError, first_line
from isobatch.engine.runtime.cpu_memory import CpuMemoryExceeded

OUT_OF_MEMORY = (torch.OutOfMemoryError, CpuMemoryExceeded)
"""Errors of torch's allocators, and of `LiveBytes`, which stands in for one on a CPU."""
_CUDA_MESSAGES = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""RuntimeErrors of CUDA, cuBLAS and cuDNN when the GPU has no memory left for their own buffers."""

FIRST_LOST = "isobatch/first_lost"
ROLL_CALL = "isobatch/roll_call"
ANSWERED = "isobatch/answered"
ROLL_CALL_S = 5.0
"""Time that the other ranks have to say that they are alive, if it is not clear who is gone."""
WATCH_S = 0.5
"""Time between two looks at the store while a collective waits."""


class PeerLost(IsobatchError, RuntimeError):
    """Another rank of the pipeline no longer answers."""


class LossNotFinite(IsobatchError, ArithmeticError):
    """The loss of some micro-batches is NaN or infinite; the step's gradients are invalid."""


class GradientNotFinite(IsobatchError, ArithmeticError):
    """A gradient is NaN or infinite, though the loss is finite; no weight has changed."""


class SpecMismatch(IsobatchError, ValueError):
    """A layer returned something other than the model's specs say."""


class _RollCalled(RuntimeError):
    """Another rank has lost one, while this one waits."""


def finish(work: dist.Work) -> None:
    """Wait for a collective on the CPU, or until another rank of the world has lost one.

    A rank that waits for a live one only would not notice: that one waits for its answer.
    """
    while True:
        try:
            work.wait(timedelta(seconds=WATCH_S))
        except RuntimeError:
            if work.is_completed():
                work.wait()  # raises what it failed with, if it did
                return
            with suppress(dist.DistError):  # no store: the rank that had it has ended
                if dist.distributed_c10d._get_default_store().check([ROLL_CALL]):
                    raise _RollCalled("another rank has lost one") from None
        else:
            return


def is_out_of_memory(error: Exception) -> bool:
    """Whether an operation failed for lack of memory.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, OUT_OF_MEMORY):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _CUDA_MESSAGES)


@contextmanager
def peer_errors(ranks: Sequence[int], other: int | None = None) -> Iterator[None]:
    """Turn torch's errors about a lost rank into PeerLost, one line.

    `ranks`: the world's ranks that take part; `other`: the only one talked to, if it is one.
    """
    try:
        yield
    except IsobatchError:
        raise
    except RuntimeError as error:
        me = dist.get_rank()
        others = [rank for rank in ranks if rank != me]
        seen = others[0] if other is None and len(others) == 1 else other
        lost = _first_lost(others, None if isinstance(error, _RollCalled) else seen)
        reason = "the others waited for it longer than timeout_s, and stopped"
        if lost != me:
            who = "another rank" if lost is None else f"rank {lost}"
            reason = f"{who} does not answer any more; its own output says why"
        raise PeerLost(f"rank {me} stops: {reason} ({first_line(error)})") from error


def _first_lost(others: Sequence[int], seen: int | None) -> int | None:
    """Rank that was lost first, as the first rank to notice wrote it; else `seen`."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"{ANSWERED}/{dist.get_rank()}", "")
        store.set(ROLL_CALL, "")
        if seen is not None:
            return int(store.compare_set(FIRST_LOST, "", str(seen)))
        return _roll_call(store, others)
    except RuntimeError:  # the store was on the lost rank
        return seen


def _roll_call(store: Any, others: Sequence[int]) -> int | None:
    """Rank that does not answer; a collective that fails does not say which one it is."""
    deadline = time.monotonic() + ROLL_CALL_S
    while True:
        if store.check([FIRST_LOST]):
            return int(store.get(FIRST_LOST))
        silent = [rank for rank in others if not store.check([f"{ANSWERED}/{rank}"])]
        if not silent:
            return None
        if time.monotonic() > deadline:
            return silent[0] if len(silent) == 1 else None
        time.sleep(0.05)
