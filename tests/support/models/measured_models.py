"""Models of which it is known what their layers take and hold, and micro-batches for them."""

import time
from dataclasses import dataclass
from itertools import pairwise
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from isobatch.engine.cost_model.costs import NS_PER_MS
from isobatch.engine.cost_model.loads import Loads, PhaseLoads
from isobatch.engine.runtime.stage_io import LayerStack, TensorSpec


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """So many rows of so many numbers."""

    values: Tensor
    sample_ids: tuple[str, ...] = ("a",)


def rows(count, width):
    return RowBatch(values=torch.ones(count, width))


def loads_of(batches):
    lengths = torch.tensor([len(batch.values) for batch in batches]).numpy()
    llm = PhaseLoads(tokens=lengths, squares=lengths**2, items=lengths**0)
    return Loads(
        vision=PhaseLoads.nothing(len(batches)), audio=PhaseLoads.nothing(len(batches)), llm=llm
    )


class WorkClock:
    """Rank's clock that stands still unless layers work: what they take is known to the ns, on
    however busy a machine.

    In a `with`, it is what `time.perf_counter_ns` tells. Waiting for other ranks takes no time by
    it.
    """

    def __init__(self):
        self.ns = 0
        self._patch = mock.patch.object(time, "perf_counter_ns", self.read)

    def __enter__(self):
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()

    def read(self):
        return self.ns

    def work(self, milliseconds):
        self.ns += round(milliseconds * NS_PER_MS)


class _WorksBack(torch.autograd.Function):
    """The input; its gradient takes a while."""

    @staticmethod
    def forward(ctx, given, clock, milliseconds):
        ctx.clock, ctx.milliseconds = clock, milliseconds
        return given.view_as(given)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.work(ctx.milliseconds)
        return gradient, None, None


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Milliseconds for each row of a micro-batch."""

    forward: float
    input_grad: float
    weight_grad: float


class TimedLayer(nn.Module):
    """Takes a known time; with `only_on`, runs out of memory on other ranks."""

    def __init__(
        self,
        durations: Durations,
        clock: WorkClock,
        width: int,
        *,
        is_last: bool,
        only_on: int | None = None,
    ):
        super().__init__()
        self.durations, self.clock, self.is_last, self.only_on = durations, clock, is_last, only_on
        self.weight, self.rows = nn.Parameter(torch.ones(width, width)), 0
        self.weight.register_hook(self._work_for_weight)

    def _work_for_weight(self, _):
        self.clock.work(self.durations.weight_grad * self.rows)

    def forward(self, carry, batch):
        if self.only_on is not None and dist.get_rank() != self.only_on:
            raise torch.OutOfMemoryError("too much")
        each = self.rows = len(batch.values)
        self.clock.work(self.durations.forward * each)
        given = _WorksBack.apply(
            carry.get("x", batch.values), self.clock, self.durations.input_grad * each
        )
        made = given + functional.linear(given, self.weight)
        return {"loss": made.sum()} if self.is_last else {"x": made}


def timed_model(durations, clock, width=2, only_on=None):
    """`only_on`: by layer, the rank that has memory for it."""
    only_on = only_on or {}
    layers = [
        TimedLayer(
            own, clock, width, is_last=place == len(durations) - 1, only_on=only_on.get(place)
        )
        for place, own in enumerate(durations)
    ]
    return LayerStack(layers=layers, specs=_Rows([width] * len(durations)))


class _Rows:
    """`x` of a width for each cut."""

    def __init__(self, widths):
        self.widths = widths

    def __call__(self, cut, batch):
        return {
            "x": TensorSpec(shape=(len(batch.values), self.widths[cut - 1]), dtype=torch.float32)
        }


class Block(nn.Module):
    """A linear map and what follows."""

    def __init__(self, inputs, outputs, follows):
        super().__init__()
        self.map, self.follows = nn.Linear(inputs, outputs), follows

    def forward(self, carry, batch):
        return {"x": self.follows(self.map(carry.get("x", batch.values)))}


class Square(nn.Module):
    """A loss for which the input is needed once more."""

    def forward(self, carry, batch):
        return {"loss": carry["x"].square().sum()}


class Sum(nn.Module):
    """A loss for which it is not."""

    def forward(self, carry, batch):
        return {"loss": carry["x"].sum()}


def chain(widths, follows, loss):
    """Linear maps from width to width, each followed by a function, and a loss."""
    blocks = [Block(inputs, outputs, follows) for inputs, outputs in pairwise(widths)]
    return LayerStack(layers=[*blocks, loss], specs=_Rows(widths[1:]))
