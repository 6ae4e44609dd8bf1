"""Measures every layer of a running model: `measure_layers` -> `Profile`, from which everything can
be planned.

Micro-batches go through the pipeline one at a time, layer by layer, each layer alone on the rank
that holds it while all others wait: so a figure is that of the layer, also where ranks share cores.
No more is held than one layer's activations: whatever can be trained can be measured. A repetition
runs each layer forward twice and backward twice, once with both gradients and once with one after
the other; counting bytes runs it some three times more.

Times are those of what schedules run. The gradients of input and weights in one pass take less than
one after the other, for the second pass goes through the layer once more: so `weight_grad_ns` is
what the weights add to the joint pass, unless the schedule runs them apart (zero bubble).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from balance.errors import ConfigError
from balance.types import IntArray
from engine.cost_model.costs import Costs
from engine.cost_model.loads import Loads
from engine.cost_model.profile_table import Profile, make_profile
from engine.runtime.communication.process_groups import ProcessGroups
from engine.runtime.errors import peers
from engine.runtime.layer_rng import generators_kept
from engine.runtime.pipeline import Pipeline
from engine.runtime.profiling._links import link_times, meet
from engine.runtime.profiling._stage_inputs import cut_off, stage_inputs
from engine.runtime.profiling.layer_timing import (
    LayerBytes,
    LayerTimes,
    layer_bytes,
    layer_times,
    times_in_passes,
)
from engine.runtime.stage_executor import RankLayers
from engine.runtime.stage_io import Batch, StageTensors

TIMES = tuple(f.name for f in fields(LayerTimes))
BYTES = tuple(f.name for f in fields(LayerBytes))
OF_LAYERS = ("state_bytes", "param_counts", "is_trained")
MOMENTS = 2
"""Adam's, each as large as the parameter."""

Tables = dict[str, IntArray]
"""Of `TIMES` and `BYTES` (layers, micro_batches), of `OF_LAYERS` (layers,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """How layers are measured."""

    repeats: int = 3
    """The first warms up, the median of the others counts."""
    apart: bool = False
    """For schedules that run the gradients of weights alone."""
    together: bool | None = None
    """Whether ranks measure at once, not one after the other; None: on CPUs."""

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise ConfigError(
                f"repeats is {self.repeats}; give at least 2, for the first one only warms up"
            )


def measure_layers(
    pipeline: Pipeline,
    batches: Sequence[Batch],
    loads: Loads,
    *,
    names: Sequence[str],
    kinds: Sequence[str],
    phases: Mapping[str, str],
    options: MeasureOptions | None = None,
) -> Profile:
    """What each kind of layer costs for these micro-batches, measured. All ranks of a pipeline call
    it; all get it.

    `loads` are those of `batches` (`engine.runtime.batch_loads`), which should be from small to
    large ones, so that a fit is possible. `names` and `kinds` of all layers; `phases` by kind. Of
    equal layers the median counts. A kind of which some layers are trained and others are not, or
    have nothing trained before them, becomes several.

    State is that of this model: parameters, gradients and two moments of the parameters' own dtype.
    Gradients and generators of random numbers stay as they were. ConfigError if layers of one kind
    differ in their parameters.
    """
    own, groups = pipeline._own, pipeline._groups
    _check(own, batches, loads, names, kinds)
    options = options or MeasureOptions()
    together = own.device.type == "cpu" if options.together is None else options.together
    with _gradients_kept(own.layers.values()), generators_kept(own.device):
        tables = _measured(own, groups, batches, options.repeats, together=together)
    sent = np.array(
        [[_sent_bytes(own, place, batch) for batch in batches] for place in range(len(kinds))],
        np.int64,
    )
    link = link_times(groups, int(sent.max(initial=0)), own.device)
    parts = _split_kinds(names, kinds, tables, own.first_trained)
    columns = _columns(tables, own.first_trained, apart=options.apart)
    costs = Costs(
        names=tuple(names),
        kinds=parts,
        **{name: _alike(values, parts, name) for name, values in columns.items()},
        sent_bytes=sent,
        send_ns=link.travel_ns(sent),
        state_bytes=tables["state_bytes"],
        param_counts=tables["param_counts"],
        sends_grad=np.arange(len(kinds)) >= own.first_trained,
    )
    return make_profile(
        costs,
        loads,
        {part: phases[kind] for part, kind in zip(parts, kinds, strict=True) if kind in phases},
    )


def _check(
    own: RankLayers,
    batches: Sequence[Batch],
    loads: Loads,
    names: Sequence[str],
    kinds: Sequence[str],
) -> None:
    count = own.borders[-1]
    if len(names) != count or len(kinds) != count:
        raise ConfigError(
            f"{len(names)} names and {len(kinds)} kinds; the model has {count} layers"
        )
    if len(loads) != len(batches) or not batches:
        raise ConfigError(
            f"{len(batches)} micro-batches and loads of {len(loads)}; give as many, and at least one"
        )


@contextmanager
def _gradients_kept(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards parameters have the gradients that they had, and none in between but those that
    are made there.
    """
    kept = [(weight, weight.grad) for layer in layers for weight in layer.parameters()]
    for weight, _ in kept:
        weight.grad = None
    try:
        yield
    finally:
        for weight, gradient in kept:
            weight.grad = gradient


def _measured(
    own: RankLayers,
    groups: ProcessGroups,
    batches: Sequence[Batch],
    repeats: int,
    *,
    together: bool,
) -> Tables:
    """Of all ranks' layers."""
    shape = own.borders[-1], len(batches)
    tables: Tables = {name: np.zeros(shape, np.int64) for name in (*TIMES, *BYTES)}
    tables |= {name: np.zeros(shape[0], np.int64) for name in OF_LAYERS}
    for place, layer in own.layers.items():
        _note_weights(tables, place, layer)
    for number, batch in enumerate(batches):
        given = stage_inputs(own, groups, batch)
        for rank in range(len(groups.ranks)):
            meet(groups, own.device)
            if together or rank == groups.rank:
                for stage, carry in given.items():
                    found = [
                        _stage_times(own, stage, batch, carry, together=together)
                        for _ in range(repeats)
                    ]
                    _note_times(own, stage, found, tables, number)
                    _note_bytes(own, stage, batch, carry, tables, number)
            if together:
                _compute_until_all_are_done(own, groups, batch, given)
                break
    flat = torch.from_numpy(np.concatenate([table.ravel() for table in tables.values()])).to(
        own.device
    )
    with peers(groups.ranks):
        dist.all_reduce(flat, group=groups.pipeline)
    ends = np.cumsum([table.size for table in tables.values()])[:-1]
    parts = np.split(flat.cpu().numpy(), ends)
    return {
        name: part.reshape(table.shape)
        for (name, table), part in zip(tables.items(), parts, strict=True)
    }


def _compute_until_all_are_done(
    own: RankLayers, groups: ProcessGroups, batch: Batch, given: dict[int, StageTensors]
) -> None:
    """So that a rank that measures longer than others does not have the machine for itself."""
    with peers(groups.ranks):
        done = dist.all_reduce(
            torch.zeros(1, device=own.device), group=groups.pipeline, async_op=True
        )
        assert done is not None
        while not done.is_completed():
            for stage, carry in given.items():
                _stage_times(own, stage, batch, carry, together=True)
        done.wait()


def _note_weights(tables: Tables, place: int, layer: nn.Module) -> None:
    weights = list(layer.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    tables["param_counts"][place] = sum(weight.numel() for weight in weights)
    tables["state_bytes"][place] = sum(weight.nbytes for weight in weights) + (1 + MOMENTS) * sum(
        weight.nbytes for weight in trained
    )
    tables["is_trained"][place] = bool(trained)


def _stage_times(
    own: RankLayers, stage: int, batch: Batch, given: StageTensors, *, together: bool
) -> list[LayerTimes]:
    """Of a stage's layers."""
    if together:
        return times_in_passes(
            [partial(cut_off, own, place, batch) for place in own.of_stage(stage)], given
        )
    times, carry = [], given
    for place in own.of_stage(stage):
        found, carry = layer_times(cut_off(own, place, batch, carry))
        times.append(found)
    return times


def _note_times(
    own: RankLayers, stage: int, found: list[list[LayerTimes]], tables: Tables, number: int
) -> None:
    """The medians of all repetitions but the first."""
    every = np.array([[list(asdict(layer).values()) for layer in repeat] for repeat in found[1:]])
    middle = np.rint(np.median(every, axis=0)).astype(np.int64)  # (layers, times)
    places = slice(own.borders[stage], own.borders[stage + 1])
    for name, row in zip(TIMES, middle.T, strict=True):
        tables[name][places, number] = row


def _note_bytes(
    own: RankLayers, stage: int, batch: Batch, given: StageTensors, tables: Tables, number: int
) -> None:
    """Of a stage's layers, one alone after the other."""
    carry = given
    for place in own.of_stage(stage):
        alone = cut_off(own, place, batch, carry)
        for name, value in asdict(layer_bytes(alone)).items():
            tables[name][place, number] = value
        with torch.no_grad():
            carry = alone.forward(alone.leaves())


def _sent_bytes(own: RankLayers, place: int, batch: Batch) -> int:
    """What a layer gives to the next one; of the last one nothing."""
    if place + 1 == own.borders[-1]:
        return 0
    specs = own.specs(place + 1, batch).values()
    return sum(int(np.prod(spec.shape, dtype=np.int64)) * spec.dtype.itemsize for spec in specs)


def _split_kinds(
    names: Sequence[str], kinds: Sequence[str], tables: Tables, first_trained: int
) -> tuple[str, ...]:
    """Kinds of which all layers cost the same. ConfigError if their parameters differ."""
    roles = [
        _role(bool(own), place > first_trained) for place, own in enumerate(tables["is_trained"])
    ]
    first: dict[str, int] = {}
    for place, kind in enumerate(kinds):
        other = first.setdefault(kind, place)
        counts = tables["param_counts"]
        if counts[place] != counts[other]:
            raise ConfigError(
                f"layers {names[other]} and {names[place]} are of one kind, {kind}, but have {counts[other]:,} and "
                f"{counts[place]:,} parameters; give them different kinds"
            )
    several = {
        kind
        for kind in first
        if len({role for role, own in zip(roles, kinds, strict=True) if own == kind}) > 1
    }
    return tuple(
        f"{kind}, {role}" if kind in several else kind
        for kind, role in zip(kinds, roles, strict=True)
    )


def _role(is_trained: bool, flows: bool) -> str:
    """What runs backward in a layer, in words."""
    if is_trained:
        return "trained" if flows else "first trained"
    return "frozen" if flows else "forward only"


def _columns(tables: Tables, first_trained: int, *, apart: bool) -> Tables:
    """Columns of `Costs`, layer by layer."""
    count = len(tables["is_trained"])
    goes_back = (np.arange(count) >= first_trained)[:, np.newaxis]
    together, alone = (
        tables["backward_ns"],
        np.minimum(tables["input_grad_ns"], tables["backward_ns"]),
    )
    # what lies between two layers is held if either needs it
    border = np.maximum(tables["held_input_bytes"][1:], tables["held_output_bytes"][:-1])
    held = tables["own_bytes"] + np.concatenate([tables["held_input_bytes"][:1], border])
    saved = held * goes_back
    return {
        "forward_ns": tables["forward_ns"],
        "input_grad_ns": tables["input_grad_ns"] if apart else alone,
        "weight_grad_ns": tables["weight_grad_ns"] if apart else together - alone,
        "recompute_ns": tables["forward_ns"] * goes_back,
        "saved_bytes": saved,
        "kept_bytes": tables["given_bytes"] * goes_back,
        "working_bytes": np.maximum(tables["peak_bytes"] - saved, 0),
    }


def _alike(values: IntArray, kinds: Sequence[str], name: str) -> IntArray:
    """The same for all layers of a kind: the median of their times, the most of their bytes."""
    made = np.empty_like(values)
    for kind in dict.fromkeys(kinds):
        rows: NDArray[np.bool_] = np.array([own == kind for own in kinds])
        own = values[rows]
        made[rows] = np.rint(np.median(own, axis=0)) if name.endswith("_ns") else own.max(axis=0)
    return made
