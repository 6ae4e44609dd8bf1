"""Time of a rank in a step of `benchmarks/dispatch_ablation.py`, and what it sends.

`Clock` splits a rank's time without gaps: computing of each phase, exchanges, gradients' sum, and
waiting. To tell waiting from sending, ranks meet at a barrier before all that they do together;
what a barrier itself takes, some 0.1 ms, counts as waiting. `boundary` marks where a phase ends, in
the forward pass and on the way back.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

COMPUTING = ("vision", "audio", "llm", "optimizer")


class Clock:
    """Nanoseconds of this rank by what they were spent on, and bytes that it sent."""

    def __init__(self, *, together: bool, ranks_per_node: int) -> None:
        self.ranks_per_node = ranks_per_node
        self.together = together
        """Whether every phase begins on all ranks at once, as where each layer's weights are
        gathered from all.
        """
        self.spent_ns: dict[str, int] = defaultdict(int)
        self.sent_bytes = 0
        """To other ranks."""
        self.abroad_bytes = 0
        """To other nodes, among them."""
        self._kind, self._since = "", 0

    def begin(self, kind: str) -> None:
        """Ranks meet, and the step begins."""
        dist.barrier()
        self._kind, self._since = kind, time.perf_counter_ns()

    def turn_to(self, kind: str) -> None:
        """From now on the time is spent on `kind`."""
        now = time.perf_counter_ns()
        self.spent_ns[self._kind] += now - self._since
        self._kind, self._since = kind, now

    def meet(self) -> None:
        """Wait for the other ranks, and go on with what was being done."""
        before = self._kind
        self.turn_to("waiting")
        dist.barrier()
        self.turn_to(before)

    @property
    def step_ns(self) -> int:
        """All of it."""
        return sum(self.spent_ns.values())

    @property
    def busy_ns(self) -> int:
        """Computing."""
        return sum(self.spent_ns[kind] for kind in COMPUTING)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Meanwhile ranks meet before each all-to-all and all-gather, and what is sent to other
        ranks is counted.
        """
        exchange, gather = dist.all_to_all_single, dist.all_gather
        size = dist.get_world_size()

        def all_to_all(
            output: Tensor, given: Tensor, receives: list[int], sends: list[int], group: Any = None
        ) -> Any:
            self.meet()
            self._count(sends, given[:1].nbytes)
            return exchange(output, given, receives, sends, group=group)

        def all_gather(output: list[Tensor], given: Tensor, group: Any = None) -> Any:
            self.meet()
            self._count([1] * size, given.nbytes)
            return gather(output, given, group=group)

        dist.all_to_all_single, dist.all_gather = all_to_all, all_gather
        try:
            yield
        finally:
            dist.all_to_all_single, dist.all_gather = exchange, gather

    def _count(self, rows: list[int], row_bytes: int) -> None:
        me, per_node = dist.get_rank(), self.ranks_per_node
        for rank, count in enumerate(rows):
            self.sent_bytes += count * row_bytes * (rank != me)
            self.abroad_bytes += count * row_bytes * (rank // per_node != me // per_node)


def boundary(
    clock: Clock, before: str, after: str, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The same tensors; behind them `after` begins, and on the way back, when all of `after` is
    done, `before`.
    """
    passed = _Boundary.apply(clock, before, after, *tensors.values())  # type: ignore[no-untyped-call]
    return dict(zip(tensors, passed, strict=True))


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, clock: Clock, before: str, after: str, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.clock, ctx.before = clock, before
        _enter(clock, after)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _enter(ctx.clock, ctx.before)
        return None, None, None, *gradients


def _enter(clock: Clock, kind: str) -> None:
    if clock.together:
        clock.meet()
    clock.turn_to(kind)
