"""Measurement of a running model's layers: a `Profile` to plan from.

Micro-batches pass through the pipeline one at a time. On a GPU each layer runs alone while all
other ranks wait, and only its activations are held. On CPUs ranks measure at once, as they compute
at once in training. A repetition runs each layer forward twice and backward twice, once with both
gradients and once with one after the other; counting bytes runs it about three times more.

Times are those that schedules run. Deferring weight gradients costs a little by itself, so
`weight_grad_ns` is what the weights add to the joint pass, unless the schedule defers them (zero
bubble). Times of messages come from the latency and the time per byte of the slowest link.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.loads import Loads
from isobatch.engine.cost_model.profile_table import Profile, make_profile
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.runtime.communication.collectives import all_reduce
from isobatch.engine.runtime.communication.process_groups import ProcessGroups
from isobatch.engine.runtime.errors import peer_errors
from isobatch.engine.runtime.layer_rng import preserve_rng
from isobatch.engine.runtime.pipeline import Pipeline
from isobatch.engine.runtime.profiling._layer_timing import (
    LayerBytes,
    LayerTimes,
    stage_bytes,
    stage_inputs,
    stage_times,
)
from isobatch.engine.runtime.stage_executor import RankLayers
from isobatch.engine.runtime.stage_io import Batch, StageTensors, placed

_OF_PASSES = (*LayerTimes._fields, *LayerBytes._fields)
_OF_LAYERS = ("state_bytes", "param_counts", "is_trained")
ADAM_MOMENTS = 2
"""Optimizer tensors as large as each trained parameter."""
ROUNDS = 7
"""Messages per size; the first warms up, the median of the others counts."""
MIN_BYTES = 1 << 20
"""Minimum size of a large message: enough for bytes to matter next to the latency."""

_Tables = dict[str, IntArray]
"""`_OF_PASSES` (layers, micro_batches), `_OF_LAYERS` (layers,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Options of `measure_layers`."""

    repeats: int = 3
    """Runs of each layer; the first warms up, the median of the others counts."""
    apart: bool = False
    """Whether the schedule computes the gradients of weights separately."""

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ConfigError(
                f"repeats is {self.repeats}; give at least 2, because the first only warms up"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLabels:
    """Names of a model's layers for its profile."""

    names: Sequence[str]
    """Name of each layer."""
    kinds: Sequence[str]
    """Kind of each layer; layers of one kind cost the same."""
    phases: Mapping[str, str]
    """Phase whose load the costs of a kind follow, by kind."""


def measure_layers(
    pipeline: Pipeline,
    batches: Sequence[Batch],
    loads: Loads,
    labels: LayerLabels,
    options: MeasureOptions | None = None,
) -> Profile:
    """Costs of each kind of layer for these micro-batches, measured; the same on all ranks.

    All ranks of a pipeline call it. `loads` are those of `batches` (`engine.runtime.batch_loads`),
    which should range from small to large, so that costs can be fitted. The median of equal layers
    counts. A kind is split by whether its layers are trained, and whether any before them is. State
    is that of the pipeline's mode for one replica; without a mode, parameters, gradients and two
    moments of the parameters' dtype.

    Gradients and random generators are restored. ConfigError if parameters differ within a kind.
    """
    local, groups = pipeline._local, pipeline._groups
    names, kinds, phases = labels.names, labels.kinds, labels.phases
    count = local.borders[-1]
    if len(names) != count or len(kinds) != count:
        raise ConfigError(
            f"{len(names)} names and {len(kinds)} kinds; the model has {count} layers"
        )
    if len(loads) != len(batches) or not batches:
        raise ConfigError(
            f"{len(batches)} micro-batches and {len(loads)} loads; give as many, and at least one"
        )
    options = options or MeasureOptions()
    # measure
    with _preserve_gradients(local.layers.values()), preserve_rng(local.device):
        tables = _measure(pipeline, batches, options.repeats)
    sizes = [
        [sum(spec.num_bytes for spec in local.specs(cut, batch).values()) for batch in batches]
        for cut in range(1, len(kinds))
    ]
    sent = np.array([*sizes, [0] * len(batches)], np.int64)  # the last layer sends nothing
    # one cost per kind
    parts = _split_kinds(names, kinds, tables, local.first_trained)
    columns = _columns(tables, local.first_trained, apart=options.apart)
    costs = Costs(
        names=tuple(names),
        kinds=parts,
        **{name: _equal_per_kind(values, parts, name) for name, values in columns.items()},
        sent_bytes=sent,
        send_ns=_message_times(groups, sent, local.device),
        state_bytes=tables["state_bytes"],
        param_counts=tables["param_counts"],
        sends_grad=np.arange(len(kinds)) >= local.first_trained,
    )
    pairs = zip(parts, kinds, strict=True)
    phases_of_parts = {part: phases[kind] for part, kind in pairs if kind in phases}
    mode = pipeline._options.mode
    return make_profile(costs, loads, phases_of_parts, mode.precision if mode else None)


@contextmanager
def _preserve_gradients(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Begin without gradients, and restore the old ones afterwards."""
    before = [(weight, weight.grad) for layer in layers for weight in layer.parameters()]
    for weight, _ in before:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in before:
            weight.grad = gradient


def _measure(pipeline: Pipeline, batches: Sequence[Batch], repeats: int) -> _Tables:
    """Tables of all ranks' layers. Ranks measure at once on CPUs, one after the other on GPUs."""
    local, groups, mode = pipeline._local, pipeline._groups, pipeline._options.mode
    together, num_layers = local.device.type == "cpu", local.borders[-1]
    of_passes = np.zeros((num_layers, len(batches), len(_OF_PASSES)), np.int64)
    of_layers = np.zeros((num_layers, len(_OF_LAYERS)), np.int64)
    for index, layer in local.layers.items():
        of_layers[index] = _weights(layer, mode)
    for number, batch in enumerate(placed(batch, local.device) for batch in batches):
        inputs = stage_inputs(local, groups, batch)
        for rank in range(1 if together else len(groups.ranks)):
            _barrier(groups, local.device)
            if together or rank == groups.rank:
                for stage, stage_tensors in inputs.items():
                    runs = [
                        stage_times(local, stage, batch, stage_tensors, together=together)
                        for _ in range(repeats)
                    ]
                    times = np.rint(np.median(runs[1:], axis=0))  # (layers, times)
                    sizes = stage_bytes(local, stage, batch, stage_tensors)
                    of_passes[local.stage_layers(stage), number] = np.hstack([times, sizes])
        if together:
            _compute_until_all_are_done(local, groups, batch, inputs)
    # each rank has filled in its own layers
    for table in (of_passes, of_layers):
        values = torch.from_numpy(table).to(local.device)
        all_reduce(values, groups.pipeline)
        table[:] = values.cpu().numpy()
    columns = np.moveaxis(of_passes, -1, 0)
    return dict(zip((*_OF_PASSES, *_OF_LAYERS), (*columns, *of_layers.T), strict=True))


def _compute_until_all_are_done(
    local: RankLayers, groups: ProcessGroups, batch: Batch, inputs: dict[int, StageTensors]
) -> None:
    """Keep the machine busy, so that a slower rank does not measure on an idle one."""
    with peer_errors(groups.ranks):
        token = torch.zeros(1, device=local.device)
        done = dist.all_reduce(token, group=groups.pipeline, async_op=True)
        assert done is not None
        while not done.is_completed():
            for stage, stage_tensors in inputs.items():
                stage_times(local, stage, batch, stage_tensors, together=True)
        done.wait()


def _weights(layer: nn.Module, mode: TrainingMode | None) -> tuple[int, int, bool]:
    """`_OF_LAYERS` of a layer."""
    weights = list(layer.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    state = sum(weight.nbytes for weight in weights)
    state += (1 + ADAM_MOMENTS) * sum(weight.nbytes for weight in trained)
    if mode is not None:
        state = sum(
            mode.state_bytes(weight.numel(), 1, trained=weight.requires_grad) for weight in weights
        )
    return state, sum(weight.numel() for weight in weights), bool(trained)


def _split_kinds(
    names: Sequence[str], kinds: Sequence[str], tables: _Tables, first_trained: int
) -> tuple[str, ...]:
    """Kinds whose layers all cost the same. ConfigError if their parameters differ."""
    # backward work of each layer, in words
    roles = []
    for index, is_trained in enumerate(tables["is_trained"]):
        if index > first_trained:
            roles.append("trained" if is_trained else "frozen")
        else:
            roles.append("first trained" if is_trained else "forward only")
    first: dict[str, int] = {}
    counts = tables["param_counts"]
    for index, kind in enumerate(kinds):
        other = first.setdefault(kind, index)
        if counts[index] != counts[other]:
            raise ConfigError(
                f"layers {names[other]} and {names[index]} are of one kind, {kind}, but have"
                f" {counts[other]:,} and {counts[index]:,} parameters; give them different kinds"
            )
    pairs = list(zip(kinds, roles, strict=True))
    roles_of = {kind: {role for other, role in pairs if other == kind} for kind in first}
    return tuple(f"{kind}, {role}" if len(roles_of[kind]) > 1 else kind for kind, role in pairs)


def _columns(tables: _Tables, first_trained: int, *, apart: bool) -> _Tables:
    """Columns of `Costs`, layer by layer."""
    count = len(tables["is_trained"])
    goes_back = (np.arange(count) >= first_trained)[:, np.newaxis]
    joint = tables["backward_ns"]
    input_ns = np.minimum(tables["input_grad_ns"], joint)
    # a tensor between two layers is held if either needs it
    between = np.maximum(tables["held_input_bytes"][1:], tables["held_output_bytes"][:-1])
    held = tables["inner_bytes"] + np.concatenate([tables["held_input_bytes"][:1], between])
    saved = held * goes_back
    deferred = tables["deferred_bytes"]
    forward_working = np.maximum(tables["forward_peak_bytes"] - saved, 0)
    of_input = tables["apart_peak_bytes"] - np.maximum(saved, deferred)
    return {
        "forward_ns": tables["forward_ns"],
        "input_grad_ns": tables["input_grad_ns"] if apart else input_ns,
        "weight_grad_ns": tables["weight_grad_ns"] if apart else joint - input_ns,
        "recompute_ns": tables["forward_ns"] * goes_back,
        "saved_bytes": saved,
        "kept_bytes": tables["input_bytes"] * goes_back,
        "working_bytes": np.maximum(tables["joint_peak_bytes"] - saved, 0),
        "input_working_bytes": np.maximum(of_input, forward_working),
        "weight_working_bytes": tables["weight_peak_bytes"],
        "deferred_bytes": deferred,
    }


def _equal_per_kind(values: IntArray, kinds: Sequence[str], name: str) -> IntArray:
    """The same values for all layers of a kind: median of times, maximum of bytes."""
    result = np.empty_like(values)
    for kind in dict.fromkeys(kinds):
        rows: NDArray[np.bool_] = np.array([other == kind for other in kinds])
        of_kind = values[rows]
        is_time = name.endswith("_ns")
        result[rows] = np.rint(np.median(of_kind, axis=0)) if is_time else of_kind.max(axis=0)
    return result


def _message_times(groups: ProcessGroups, num_bytes: IntArray, device: torch.device) -> IntArray:
    """Times of messages over a pipeline's slowest link, int64 ns; an empty message takes none.

    All its ranks call it; all get the same. Measures half a round trip of a tiny message and of the
    largest, link after link; others are in between. All times are 0 with a single rank.
    """
    slowest = torch.zeros(2, dtype=torch.float64, device=device)
    sizes = (1, max(int(num_bytes.max(initial=0)), MIN_BYTES))
    for first in range(len(groups.ranks) - 1):
        if groups.rank in (first, first + 1):
            small, large = (_one_way_ns(groups, first, size, device) for size in sizes)
            slope = max(0.0, large - small) / sizes[1]
            link_times = torch.tensor([small, slope], dtype=torch.float64, device=device)
            slowest = torch.maximum(slowest, link_times)
        _barrier(groups, device)
    all_reduce(slowest, groups.pipeline, dist.ReduceOp.MAX)
    latency_ns, ns_per_byte = slowest.tolist()
    times = (latency_ns + num_bytes * ns_per_byte) * (num_bytes > 0)
    return np.asarray(np.rint(times), np.int64)


def _barrier(groups: ProcessGroups, device: torch.device) -> None:
    """Wait until all ranks of the pipeline are here."""
    token = torch.zeros(1, device=device)
    all_reduce(token, groups.pipeline)
    token.item()


def _one_way_ns(groups: ProcessGroups, first: int, size: int, device: torch.device) -> float:
    """Half a round trip from rank `first` to the next, as either of them measures it."""
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter_ns()
        if groups.rank == first:
            groups.send(message, first + 1)
            groups.receive(message, first + 1)
        else:
            groups.receive(message, first)
            groups.send(message, first)
        message[0].item()  # waits until it has arrived
        times.append((time.perf_counter_ns() - begun) / 2)
    return median(times[1:])
