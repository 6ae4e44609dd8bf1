"""Requests, and plans with their predictions, to and from plan.json.

A plan holds everything that it was made from (dimensions, cluster, loads of the planned steps) and
a hash of that, so that anyone can simulate it again. Pure, but for `read_plan` and `write_plan`.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.common.config import build_config
from isobatch.common.errors import ConfigError, DataError, os_reason
from isobatch.common.plain_values import parse_json, read_text, write_text
from isobatch.common.types import BoolArray, IntArray
from isobatch.common.visible_text import shown
from isobatch.engine.cost_model.analytical import layer_costs
from isobatch.engine.cost_model.costs import Costs
from isobatch.engine.cost_model.layer_list import layers_of
from isobatch.engine.cost_model.loads import PHASES, QUANTITIES, Loads
from isobatch.engine.cost_model.parallel import Parallelism, Training, head_notes
from isobatch.engine.cost_model.training_mode import TrainingMode
from isobatch.engine.simulator.schedule import SCHEDULES, Schedule, make_schedule
from isobatch.engine.simulator.stages import check_partition
from isobatch.models.clusters import Cluster
from isobatch.models.presets import ModelPreset, model_from_dict, model_to_dict

PLAN_VERSION = 4
_BY_STAGE = ("forward_ns", "backward_ns", "recompute_ns")
_NUMBERS = ("schedule", "stages_per_rank", "num_micro_batches", "memory_bytes")
_PARTITION = ("layer_names", "borders", "recompute", "deferred", "gap")
_MODE_IN = ("parallel", "training")
"""Inputs that had parts of the mode in version 1."""
_KEYS = ("version", "inputs", "inputs_hash", *_PARTITION, "predicted")
_TABLES: dict[str, type] = {"cluster": Cluster, "parallel": Parallelism, "training": Training}
_INPUTS = ("model", *_TABLES, *_NUMBERS, "full", "loads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Simulated figures of a plan, means over its steps unless said otherwise."""

    step_ns: int
    """Step of the slowest data-parallel rank, without `reduction_ns` and the optimizer."""
    reduction_ns: int
    """Reduction of gradients and return of weights after a step, slowest rank, no overlap."""
    bubble_ratio: tuple[float, ...]
    """Share of the step that each rank waits."""
    forward_ns: tuple[int, ...]
    """Forward time of each stage for a micro-batch."""
    backward_ns: tuple[int, ...]
    """Backward time of each stage for a micro-batch, recomputation included."""
    recompute_ns: tuple[int, ...]
    """Recomputation of each stage for a micro-batch."""
    state_bytes: tuple[int, ...]
    """Weights, gradients and optimizer state of each rank."""
    peak_bytes: tuple[int, ...]
    """Peak of each rank, the largest of any step."""
    full_peak_bytes: tuple[int, ...]
    """Peak of each rank if every micro-batch were as large as they come."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRequest:
    """What a plan is wanted for."""

    model: ModelPreset
    cluster: Cluster
    parallel: Parallelism
    training: Training
    schedule: str
    stages_per_rank: int
    num_micro_batches: int
    """Micro-batches per step and data-parallel rank."""
    memory_bytes: int
    """Memory of a GPU that may be used."""
    full: Loads
    """One micro-batch, the largest that memory is planned for."""
    loads: Loads
    """Loads of the planned steps, (steps * dp * micro_batches,): by step, in it by rank."""
    deferred: tuple[int, ...] | None = None
    """Weight gradients that each pipeline rank may hold back, so that they fit into memory: chosen
    by the planner. None: as many as the schedule does (`most_deferred`)."""

    def __post_init__(self) -> None:
        parts = {layer.part for layer in layers_of(self.model, self.parallel)}
        if not any(map(self.training.trains, parts)):
            raise ConfigError("everything is frozen: there is nothing to train")
        if self.loads.audio.tokens.any() and self.model.audio_encoder is None:
            raise ConfigError(
                f"model preset {self.model.name} has no [audio_encoder] table, so the cost of its "
                "audio is not known: add the encoder's dimensions"
            )
        node, tp = self.cluster.gpus_per_node, self.parallel.tp
        if node % tp and tp % node:
            raise ConfigError(
                f"tp is {tp}, but a node of {self.cluster.name} has {node} GPUs: give a divisor or "
                f"a multiple of {node}"
            )
        head_notes(self.model, tp)

    def changed(self, **changes: Any) -> "PlanRequest":
        """This request, or that of a plan, with some of it changed."""
        return PlanRequest(**{f.name: getattr(self, f.name) for f in fields(PlanRequest)} | changes)

    def costs(self, loads: Loads) -> Costs:
        """Costs of the layers for some micro-batches."""
        return layer_costs(self.model, self.cluster, self.parallel, loads, self.training)

    @property
    def full_step(self) -> Loads:
        """A step in which every micro-batch is the largest."""
        return self.full.take(np.zeros(self.num_micro_batches, np.int64))

    def split(self, costs: Costs) -> list[Costs]:
        """Costs of many micro-batches, by step and, in it, data-parallel rank."""
        count = self.num_micro_batches
        starts = range(0, costs.num_micro_batches, count)
        return [costs.take(np.arange(first, first + count)) for first in starts]

    def make_schedule(self) -> Schedule:
        """The schedule of the pipeline's stages."""
        count, per_rank = self.num_micro_batches, self.stages_per_rank
        return make_schedule(self.schedule, self.parallel.pp, count, per_rank, self.deferred)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan(PlanRequest):
    """A partition with its recomputed layers, and the request that it was made for."""

    layer_names: tuple[str, ...]
    borders: tuple[int, ...]
    """Stage s holds the layers `borders[s]:borders[s + 1]`."""
    recompute: tuple[int, ...]
    """Layers that are recomputed, ascending."""
    predicted: Prediction
    gap: float | None = None
    """Share by which another partition of the searched step could be faster; None: not known."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"schedule is {self.schedule!r}; use one of {', '.join(SCHEDULES)}")
        check_partition(np.array(self.borders), len(self.layer_names))
        if len(self.borders) - 1 != self.parallel.pp * self.stages_per_rank:
            raise ConfigError(
                f"{len(self.borders) - 1} stages; {self.parallel.pp} ranks with "
                f"{self.stages_per_rank} each make {self.parallel.pp * self.stages_per_rank}"
            )
        if any(not 0 <= layer < len(self.layer_names) for layer in self.recompute):
            raise ConfigError(
                f"recompute names layers {list(self.recompute)}; there are {len(self.layer_names)}"
            )
        per_step = self.parallel.dp * self.num_micro_batches
        if per_step < 1 or not len(self.loads) or len(self.loads) % per_step or len(self.full) != 1:
            raise ConfigError(
                f"loads of {len(self.loads)} micro-batches and {len(self.full)} of the largest; "
                f"give steps of {max(per_step, 1)}, and 1"
            )
        if self.deferred is not None:
            self.make_schedule()
        self._check_predicted()

    def _check_predicted(self) -> None:
        """ConfigError unless there is an entry per rank or stage."""
        for f in fields(Prediction):
            value = getattr(self.predicted, f.name)
            count = len(self.borders) - 1 if f.name in _BY_STAGE else self.parallel.pp
            if isinstance(value, tuple) and len(value) != count:
                raise ConfigError(
                    f"predicted {f.name} has {len(value)} entries; there must be {count}"
                )

    @property
    def num_steps(self) -> int:
        """Number of planned steps."""
        return len(self.loads) // (self.parallel.dp * self.num_micro_batches)

    @property
    def border_array(self) -> IntArray:
        """`borders`, (stages + 1,)."""
        return np.array(self.borders)

    @property
    def recompute_mask(self) -> BoolArray:
        """Whether each layer is recomputed, (layers,)."""
        mask = np.zeros(len(self.layer_names), np.bool_)
        mask[list(self.recompute)] = True
        return mask

    @property
    def inputs_hash(self) -> str:
        """SHA-256 of all that the plan was made from: equal for plans of equal requests."""
        return _hash(self._inputs())

    def to_json(self) -> dict[str, Any]:
        """The plan, plain JSON."""
        return {
            "version": PLAN_VERSION,
            "inputs": self._inputs(),
            "inputs_hash": self.inputs_hash,
            **_plain({name: getattr(self, name) for name in _PARTITION}),
            "predicted": _plain(asdict(self.predicted)),
        }

    def _inputs(self) -> dict[str, Any]:
        settings = {
            "model": model_to_dict(self.model),
            **{name: asdict(getattr(self, name)) for name in _TABLES},
            **{name: getattr(self, name) for name in _NUMBERS},
        }
        loads = {"full": self.full.to_lists(), "loads": self.loads.to_lists()}
        return {**_plain(settings), **loads}


def plan_from_json(values: dict[str, Any], *, where: str) -> Plan:
    """The inverse of `Plan.to_json`. ConfigError: other version or keys, edited inputs.

    Version 1 had no mode: its plans are of what they assumed, bf16 weights and float32 masters. It
    had no gap. Before version 3 all tokens counted as labelled, before 4 nothing bound deferral.
    """
    version = values.get("version") if isinstance(values, dict) else None
    if not isinstance(version, int) or not 1 <= version <= PLAN_VERSION:
        raise ConfigError(
            f"{where}: plan version {version}; this isobatch reads version {PLAN_VERSION}:"
            " plan again"
        )
    if version == 1:
        values = {"gap": None, **values}
    if version < 4:
        values = {"deferred": None, **values}
    _require_keys(values, set(_KEYS), where)
    # first, so that what follows only meets what a planner wrote
    if _hash(values["inputs"]) != values["inputs_hash"]:
        raise ConfigError(
            f"{where}: its inputs are not those that its predictions were made from: plan again"
        )
    inputs = dict(_require_keys(values["inputs"], set(_INPUTS), f"{where}, inputs"))
    inputs |= _with_mode(inputs, version, where)
    names = {f.name for f in fields(Prediction)}
    predicted = _require_keys(values["predicted"], names, f"{where}, predicted")
    parts: dict[str, Any] = {
        "model": model_from_dict(inputs["model"]),
        **{
            name: build_config(kind, inputs[name], where=f"{where}, {name}")
            for name, kind in _TABLES.items()
        },
        **{name: _loads_from_json(inputs[name], version, where) for name in ("full", "loads")},
        "predicted": build_config(Prediction, predicted, where=f"{where}, predicted"),
    }
    partition = {name: values[name] for name in _PARTITION}
    return build_config(Plan, {**inputs, **parts, **partition}, where=where)


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan, whole or not at all."""
    write_text(path, json.dumps(plan.to_json(), indent=1) + "\n")


def read_plan(path: str | Path) -> Plan:
    """Read a plan. DataError if there is no such file; ConfigError as `plan_from_json`."""
    try:
        text = read_text(path)
    except OSError as error:
        raise DataError(
            f"{path}: {os_reason(error)}; give the plan.json that `python -m engine plan` wrote"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not JSON: {error}") from None
    values = parse_json(text, str(path), DataError, exact=True)
    return plan_from_json(values, where=str(path))


def _loads_from_json(values: dict[str, Any], version: int, where: str) -> Loads:
    phases = set(PHASES) - ({"labels"} if version < 3 else set())
    for phase, columns in _require_keys(values, phases, f"{where}, loads").items():
        _require_keys(columns, set(QUANTITIES), f"{where}, loads of {phase}")
        for column in columns.values():
            if not isinstance(column, list) or any(type(value) is not int for value in column):
                raise ConfigError(f"{where}: loads are not lists of integers")
    try:
        return Loads.of_lists(values)
    except ValueError as error:  # lists of other lengths
        raise ConfigError(f"{where}: {error}") from None


def _with_mode(inputs: dict[str, Any], version: int, where: str) -> dict[str, Any]:
    """Two tables with the mode as `TrainingMode`; version 1 had its parts in both."""
    parallel, training = (_table(inputs[name], f"{where}, {name}") for name in _MODE_IN)
    if version == 1:
        training["mode"] = {
            "precision": "bf16",
            "gradients": "fp32" if training.pop("gradient_bytes", 4) == 4 else "bf16",
            "zero_stage": parallel.pop("zero_stage", None),
        }
    # plans of isobatch 0.1 were of fused kernels without saying so
    training.setdefault("kernels", "fused")
    _require_keys(training, {f.name for f in fields(Training)}, f"{where}, training")
    names = {f.name for f in fields(TrainingMode)}
    mode = _require_keys(training["mode"], names, f"{where}, mode")
    training_mode = build_config(TrainingMode, mode, where=f"{where}, mode")
    return {"parallel": parallel, "training": {**training, "mode": training_mode}}


def _hash(inputs: Any) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _table(values: Any, where: str) -> dict[str, Any]:
    """A copy of a table."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: is {shown(values)}, but should be a table")
    return dict(values)


def _require_keys(values: Any, wanted: set[str], where: str) -> dict[str, Any]:
    """The table, if it has exactly these keys."""
    if not isinstance(values, dict) or set(values) != wanted:
        keys = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ConfigError(f"{where}: has {keys}; it must have {sorted(wanted)}")
    return values


def _plain(values: dict[str, Any]) -> Any:
    """The values that reading their JSON gives: tuples are lists."""
    return json.loads(json.dumps(values))
