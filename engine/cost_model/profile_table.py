"""`Costs` out of measurements: what each kind of layer took for some micro-batches, as JSON, fitted
to others. NumPy.

The runtime writes a `Profile`, planning reads it. A time or a size is fitted as a constant, so much
per squared length, and so much per token, more from 1/32, 1/16, 1/8, 1/4 and 1/2 of the most tokens
measured on; nothing of it negative. So it bends where a layer stops being limited by reading its
weights, and a planner that compares nearly equal micro-batches never sees one with more to do as
the faster one, which a table between noisy measurements would show. The least squares are of
relative errors, so that small micro-batches count as much as large ones; `misfit` says how far the
fit is off at what was measured. A fit takes 20 ms once per profile; costs by it 2 ms for 256
micro-batches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balance.errors import ConfigError, first_line
from balance.types import FloatArray, IntArray
from engine.cost_model.costs import Costs
from engine.cost_model.loads import Loads, PhaseLoads

VERSION = 1
PHASES = ("audio", "vision", "llm")
COLUMNS = tuple(
    f.name for f in fields(Costs) if f.name.endswith(("_ns", "_bytes")) and f.name != "state_bytes"
)
BENDS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the most tokens measured: where a fit may become steeper."""
FARTHEST = 1.25
"""How far beyond what was measured a fit is trusted: OmniBal's caps let no micro-batch exceed them,
so profiles of full micro-batches need little more.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """What was measured: all kinds of a model's layers, all for the same micro-batches."""

    loads: Loads
    """Of the micro-batches measured."""
    costs: Costs
    """A row per kind, in the order in which they first appear; `send_ns` as if another layer
    followed.
    """
    layers: tuple[int, ...]
    """The row of each layer of the model, in order."""
    names: tuple[str, ...]
    """Of the layers, for people."""
    phases: tuple[str, ...]
    """Whose tokens decide what each kind costs: `audio`, `vision` or `llm`; `sent_bytes` and
    `send_ns` go by all.
    """

    def __post_init__(self) -> None:
        kinds = self.costs.num_layers
        if len(self.loads) != self.costs.num_micro_batches:
            raise ConfigError(
                f"{len(self.loads)} micro-batches, but measurements of {self.costs.num_micro_batches}"
            )
        if len(self.phases) != kinds or not set(self.phases) <= set(PHASES):
            raise ConfigError(
                f"phases are {list(self.phases)}; give one of {', '.join(PHASES)} to each of {kinds} kinds"
            )
        if (
            len(self.names) != len(self.layers)
            or not self.layers
            or not set(self.layers) <= set(range(kinds))
        ):
            raise ConfigError(
                f"{len(self.layers)} layers of {kinds} kinds, {len(self.names)} names: they do not fit"
            )


def profiled_costs(profile: Profile, loads: Loads, *, farthest: float = FARTHEST) -> Costs:
    """What a profile says about other micro-batches.

    ConfigError where one of them has more than `farthest` times the most tokens or squares measured
    of a phase. Below what was measured a fit ends at its constant, or at 0 where a phase has
    nothing to do: that is never refused.
    """
    _check_reach(profile.loads, loads, farthest)
    made = {name: _fitted(profile, name, loads) for name in COLUMNS}
    rows = np.array(profile.layers)
    columns = {name: np.rint(values[rows]).astype(np.int64) for name, values in made.items()}
    columns["send_ns"][-1] = 0
    costs = profile.costs
    return Costs(
        names=profile.names,
        kinds=tuple(costs.kinds[row] for row in profile.layers),
        **columns,
        state_bytes=costs.state_bytes[rows],
        param_counts=costs.param_counts[rows],
        sends_grad=costs.sends_grad[rows],
    )


def misfit(profile: Profile) -> float:
    """The largest error of a kind's forward and backward time at what was measured, as a share of
    the measured time.
    """
    made = sum(
        _fitted(profile, name, profile.loads)
        for name in ("forward_ns", "input_grad_ns", "weight_grad_ns")
    )
    measured = profile.costs.forward_ns + profile.costs.backward_ns
    return float(np.abs(made / np.maximum(measured, 1) - 1)[measured > 0].max(initial=0.0))


def make_profile(costs: Costs, loads: Loads, phases: dict[str, str]) -> Profile:
    """The profile of measured layers, all of them: of each kind the first counts. `phases` by kind.

    The last layer sends nothing, so of its kind another one's `send_ns` should be measured; else it
    is 0.
    """
    missing = sorted(set(costs.kinds) - set(phases))
    if missing:
        raise ConfigError(
            f"no phase is given for the layers {', '.join(missing)}; one of {', '.join(PHASES)}"
        )
    kinds = list(dict.fromkeys(costs.kinds))
    rows = np.array([costs.kinds.index(kind) for kind in kinds])
    picked = {
        name: getattr(costs, name)[rows]
        for name in (*COLUMNS, "state_bytes", "param_counts", "sends_grad")
    }
    return Profile(
        loads=loads,
        costs=Costs(names=tuple(costs.names[row] for row in rows), kinds=tuple(kinds), **picked),
        layers=tuple(kinds.index(kind) for kind in costs.kinds),
        names=costs.names,
        phases=tuple(phases[kind] for kind in kinds),
    )


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON."""
    path.write_text(json.dumps(profile_to_dict(profile), indent=1) + "\n", "utf-8")


def read_profile(path: Path) -> Profile:
    """Read a profile. ConfigError if it is none, or of another version."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a profile: {first_line(error)}") from None
    try:
        return profile_from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: not a profile: {type(error).__name__}: {first_line(error)}"
        ) from None


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """Plain values for JSON."""
    costs = profile.costs
    arrays = (*COLUMNS, "state_bytes", "param_counts", "sends_grad")
    return {
        "version": VERSION,
        "layers": [
            {"name": name, "kind": row}
            for name, row in zip(profile.names, profile.layers, strict=True)
        ],
        "loads": {
            phase: {
                f.name: getattr(getattr(profile.loads, phase), f.name).tolist()
                for f in fields(PhaseLoads)
            }
            for phase in PHASES
        },
        "kinds": [
            {"kind": kind, "phase": profile.phases[row]}
            | {name: getattr(costs, name)[row].tolist() for name in arrays}
            for row, kind in enumerate(costs.kinds)
        ],
    }


def profile_from_dict(values: dict[str, Any]) -> Profile:
    """The inverse of `profile_to_dict`."""
    if values.get("version") != VERSION:
        raise ConfigError(
            f"version is {values.get('version')!r}; this release reads profiles of version {VERSION}"
        )
    kinds = values["kinds"]
    arrays = {
        name: np.array([kind[name] for kind in kinds], np.int64)
        for name in (*COLUMNS, "state_bytes", "param_counts")
    }
    names = tuple(str(kind["kind"]) for kind in kinds)
    grads = np.array([kind["sends_grad"] for kind in kinds], np.bool_)
    return Profile(
        loads=Loads(**{phase: _phase_loads(values["loads"][phase]) for phase in PHASES}),
        costs=Costs(names=names, kinds=names, **arrays, sends_grad=grads),
        layers=tuple(int(layer["kind"]) for layer in values["layers"]),
        names=tuple(str(layer["name"]) for layer in values["layers"]),
        phases=tuple(str(kind["phase"]) for kind in kinds),
    )


def _phase_loads(values: dict[str, list[int]]) -> PhaseLoads:
    return PhaseLoads(**{f.name: np.array(values[f.name], np.int64) for f in fields(PhaseLoads)})


def _check_reach(measured: Loads, loads: Loads, farthest: float) -> None:
    for phase in PHASES:
        for name in ("tokens", "squares"):
            most = int(getattr(getattr(measured, phase), name).max(initial=0))
            asked = int(getattr(getattr(loads, phase), name).max(initial=0))
            if asked > farthest * most:
                raise ConfigError(
                    f"a micro-batch has {asked:,} {phase} {name}, the profile's largest {most:,}: fits are trusted "
                    f"up to {farthest:g} times that; measure larger micro-batches"
                )


def _fitted(profile: Profile, name: str, loads: Loads) -> FloatArray:
    """A column of `Costs` for each kind, float64, (kinds, micro_batches)."""
    coefficients = _coefficients(profile)[name]
    rows = [
        _terms(profile.loads, loads, _decides(name, phase)) @ found
        for phase, found in zip(profile.phases, coefficients, strict=True)
    ]
    return np.stack(rows)


@lru_cache(maxsize=8)
def _coefficients(profile: Profile) -> dict[str, list[FloatArray]]:
    """Of the terms of each kind's fit, by column."""
    decided = {_decides(name, phase) for name in COLUMNS for phase in profile.phases}
    known = {phases: _terms(profile.loads, profile.loads, phases) for phases in decided}
    return {
        name: [
            _fit(known[_decides(name, phase)], values)
            for phase, values in zip(profile.phases, getattr(profile.costs, name), strict=True)
        ]
        for name in COLUMNS
    }


def _decides(name: str, phase: str) -> tuple[str, ...]:
    """The phases that a column goes by, the layer's own first."""
    others = tuple(other for other in PHASES if other != phase)
    return (phase, *others) if name in ("sent_bytes", "send_ns") else (phase,)


def _terms(measured: Loads, loads: Loads, phases: tuple[str, ...]) -> FloatArray:
    """What a fit is linear in, (micro_batches, terms): a constant if there is anything to do,
    tokens, squares, bends.

    What passes along of other phases goes by their tokens alone.
    """
    own: PhaseLoads = getattr(loads, phases[0])
    columns = [own.tokens > 0, *(getattr(loads, phase).tokens for phase in phases)]
    if len(phases) == 1:
        known: IntArray = getattr(measured, phases[0]).tokens
        most = known.max(initial=0)
        # a bend below all that was measured could not be told from the constant
        least = known[known > 0].min(initial=most)
        bends = [bend * most for bend in BENDS]
        columns += [
            own.squares,
            *((own.tokens > bend) * (own.tokens - bend) * (bend > least) for bend in bends),
        ]
    return np.stack(columns, axis=1).astype(np.float64)


def _fit(terms: FloatArray, values: IntArray) -> FloatArray:
    """The coefficients, none negative, with the least sum of squared relative errors."""
    weights = 1 / np.maximum(values, 1)
    scale = np.maximum(np.abs(terms).max(axis=0, initial=0), 1)
    found = nonnegative_least_squares(terms / scale * weights[:, np.newaxis], values * weights)
    return np.asarray(found / scale)


def nonnegative_least_squares(rows: FloatArray, target: FloatArray) -> FloatArray:
    """The x without a negative entry that minimises |rows x - target| (Lawson and Hanson's active
    set).

    >>> nonnegative_least_squares(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([2.0, 1.0])).round(9).tolist()
    [1.5, 0.0]
    """
    found, free = np.zeros(rows.shape[1]), np.zeros(rows.shape[1], np.bool_)
    for _ in range(3 * rows.shape[1]):
        gain = np.where(free, -np.inf, rows.T @ (target - rows @ found))
        if gain.max(initial=0.0) <= 1e-10 * np.abs(rows.T @ target).max(initial=0.0):
            break
        free[int(gain.argmax())] = True
        found = _shrink(rows, target, found, free)
        free = found > 0
    return found


def _shrink(
    rows: FloatArray, target: FloatArray, found: FloatArray, free: NDArray[np.bool_]
) -> FloatArray:
    """Go towards the optimum in the free entries; those that become 0 on the way are free no
    more.
    """
    free = free.copy()
    while free.any():
        aim = np.zeros_like(found)
        aim[free] = np.linalg.lstsq(rows[:, free], target, rcond=None)[0]
        falls = free & (aim <= 0)
        if not falls.any():
            return aim
        step = float((found[falls] / (found[falls] - aim[falls] + 1e-300)).min())
        found = np.where(free, found + step * (aim - found), 0.0)
        free &= found > 1e-14
    return found
