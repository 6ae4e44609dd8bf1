"""Collectives that name a lost rank, and work that all ranks do or none.

`on_all_ranks` and `on_first_rank` are for work outside of passes, such as saved state: an
IsobatchError on one rank is raised on all. A rank that dies is noticed by its closed connection
(`engine.runtime.errors`). Without torch.distributed, all but `all_reduce` are plain calls.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from isobatch.common.errors import IsobatchError
from isobatch.engine.runtime.errors import finish, peer_errors

T = TypeVar("T")


def on_all_ranks(work: Callable[[], T]) -> T:
    """`work()` on all ranks, without messages between them; -> this rank's own value.

    If it fails on any, the lowest rank's IsobatchError is raised on all.
    """
    value, error = _attempt(work)
    failed = next((one for one in gather_objects(error) if one is not None), None)
    return _unwrap(value, failed)


def on_first_rank(work: Callable[[], T]) -> T:
    """`work()` on rank 0 alone; -> its value, or its IsobatchError, on all ranks."""
    if not dist.is_initialized():
        return work()
    return _unwrap(*broadcast(_attempt(work) if dist.get_rank() == 0 else (None, None)))


def broadcast(value: T) -> T:
    """The first rank's value, on all ranks."""
    box = [value]
    with world_errors():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, on all ranks of a group; None: of the world."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size(group)
        with peer_errors(dist.get_process_group_ranks(group)):
            dist.all_gather_object(values, value, group=group)
    return values


def any_rank(value: bool) -> bool:
    """Whether it is so on any rank. One small message over the CPU's backend."""
    flag = torch.tensor(int(value))
    if dist.is_initialized():
        all_reduce(flag, dist.group.WORLD, dist.ReduceOp.MAX)
    return bool(flag)


def all_gather(values: Tensor) -> list[Tensor]:
    """Every rank's values, of one shape and dtype, on all ranks of the world."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    with world_errors():
        _finish(dist.all_gather(gathered, values, async_op=True), values)
    return gathered


def all_reduce(
    values: Tensor,
    group: dist.ProcessGroup | None,
    operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Reduce values over a group in place; PeerLost if one of its ranks is lost."""
    with peer_errors(dist.get_process_group_ranks(group)):
        _finish(dist.all_reduce(values, op=operation, group=group, async_op=True), values)


def _finish(work: dist.Work | None, values: Tensor) -> None:
    assert work is not None  # this process belongs to the group
    if values.is_cpu:
        finish(work)
    else:
        work.wait()  # the stream does, not the host


def world_errors() -> AbstractContextManager[None]:
    """PeerLost if a rank is lost while all ranks of the world communicate."""
    return peer_errors(range(dist.get_world_size())) if dist.is_initialized() else nullcontext()


def _attempt(work: Callable[[], T]) -> tuple[T | None, IsobatchError | None]:
    try:
        return work(), None
    except IsobatchError as error:
        return None, error


def _unwrap(value: T | None, error: IsobatchError | None) -> T:
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only if that is the work's value
