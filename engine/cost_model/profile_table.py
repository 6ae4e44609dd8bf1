"""Profiles: measured costs of layers as JSON, fitted to other loads. NumPy.

The runtime writes a `Profile`, planning reads it. A time or size is fitted as a constant, plus a
term per squared length and per token; the slope per token may grow at 1/32, 1/16, 1/8, 1/4 and 1/2
of the most tokens measured. The head's tokens are those with a label; what it holds of the others
is another term. No term is negative. So the fit bends where reading weights no longer limits a
layer, and more work never looks faster, as it would in a table of noisy measurements. Errors are
relative: small micro-batches count as much as large ones. A fit takes 20 ms once per profile, costs
from it 2 ms for 256 micro-batches.

What the loss has in float32 grows up to a chunk (`LOSS_CHUNK` of `models.layer_bytes`), which no
fit follows: where small micro-batches were measured, up to two chunks may be missing.
"""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.common.errors import ConfigError, first_line
from isobatch.common.plain_values import parse_json, read_text
from isobatch.common.types import BoolArray, FloatArray, IntArray
from isobatch.engine.cost_model.costs import ARRAYS, COLUMNS, Costs
from isobatch.engine.cost_model.loads import Loads, PhaseLoads
from isobatch.engine.cost_model.training_mode import BYTES_OF, Precision

VERSION = 4
PHASES = ("audio", "vision", "llm", "labels")
BENDS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the most tokens measured where a fit may become steeper."""
FARTHEST = 1.25
"""Loads over the largest measured ones that a fit is trusted for; caps bound micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profile:
    """Measurements of all kinds of a model's layers for the same micro-batches."""

    loads: Loads
    """Loads of the micro-batches measured."""
    costs: Costs
    """A row per kind, by first appearance; `send_ns` as if another layer followed."""
    layers: tuple[int, ...]
    """The row of each layer of the model, in order."""
    names: tuple[str, ...]
    """Names of the layers, for people."""
    phases: tuple[str, ...]
    """Phase whose tokens decide each kind's costs; `sent_bytes` and `send_ns` depend on all."""
    precision: Precision | None = None
    """Dtype of the weights when it was measured; None: not known, as before there was one."""

    def __post_init__(self) -> None:
        kinds = self.costs.num_layers
        if len(self.loads) != self.costs.num_micro_batches:
            measured = self.costs.num_micro_batches
            raise ConfigError(f"{len(self.loads)} micro-batches, but measurements of {measured}")
        if len(self.phases) != kinds or not set(self.phases) <= set(PHASES):
            names = ", ".join(PHASES)
            raise ConfigError(f"phases are {list(self.phases)}; give one of {names} to each kind")
        known = bool(self.layers) and set(self.layers) <= set(range(kinds))
        if not known or len(self.names) != len(self.layers):
            counts = f"{len(self.layers)} layers of {kinds} kinds, {len(self.names)} names"
            raise ConfigError(f"{counts}: they do not fit together")


def profiled_costs(profile: Profile, loads: Loads, *, farthest: float = FARTHEST) -> Costs:
    """Costs of other micro-batches by a profile.

    ConfigError where one has more than `farthest` times the most tokens or squares measured of a
    phase. Below the least measured a fit ends at its constant, or at 0 without any tokens.
    """
    for phase in PHASES[:-1]:  # what depends on labels is linear
        for name in ("tokens", "squares"):
            largest = int(getattr(getattr(profile.loads, phase), name).max(initial=0))
            asked = int(getattr(getattr(loads, phase), name).max(initial=0))
            if asked > farthest * largest:
                raise ConfigError(
                    f"a micro-batch has {asked:,} {phase} {name}, the profile's largest "
                    f"{largest:,}: fits are trusted up to {farthest:g} times that; "
                    "measure larger micro-batches"
                )
    columns: dict[str, Any] = {name: _fitted(profile, name, loads) for name in COLUMNS}
    fitted = {name: np.rint(values).astype(np.int64) for name, values in columns.items()}
    return _of_layers(profile, replace(profile.costs, **fitted))


def measured_costs(profile: Profile, indices: IntArray) -> Costs:
    """Costs of some of the measured micro-batches, as measured: nothing is fitted."""
    return _of_layers(profile, profile.costs.take(indices))


def _of_layers(profile: Profile, kinds: Costs) -> Costs:
    """Costs of all layers, from those of kinds; the last layer sends nothing."""
    costs = replace(kinds.rows(profile.layers), names=profile.names)
    costs.send_ns[-1] = 0
    return costs


def misfit(profile: Profile) -> float:
    """Largest relative error of a kind's forward plus backward time at the measured loads."""
    times = ("forward_ns", "input_grad_ns", "weight_grad_ns")
    predicted = sum(_fitted(profile, name, profile.loads) for name in times)
    measured = profile.costs.forward_ns + profile.costs.backward_ns
    return float(np.abs(predicted / np.maximum(measured, 1) - 1)[measured > 0].max(initial=0.0))


def make_profile(
    costs: Costs, loads: Loads, phases: dict[str, str], precision: Precision | None = None
) -> Profile:
    """The profile of all measured layers: of each kind the first one counts. `phases`: by kind.

    The last layer sends nothing; the `send_ns` of its kind is 0 unless another one was measured.
    """
    missing = sorted(set(costs.kinds) - set(phases))
    if missing:
        wanted = ", ".join(PHASES)
        raise ConfigError(f"no phase is given for the layers {', '.join(missing)}; one of {wanted}")
    kinds = list(dict.fromkeys(costs.kinds))
    return Profile(
        loads=loads,
        costs=costs.rows([costs.kinds.index(kind) for kind in kinds]),
        layers=tuple(kinds.index(kind) for kind in costs.kinds),
        names=costs.names,
        phases=tuple(phases[kind] for kind in kinds),
        precision=precision,
    )


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON."""
    path.write_text(json.dumps(profile_to_dict(profile), indent=1) + "\n", "utf-8")


def read_profile(path: str | Path) -> Profile:
    """Read a profile. ConfigError if the file is not a profile, or of another version."""
    try:
        values = parse_json(read_text(path), f"{path}: not a profile", exact=True)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a profile: {first_line(error)}") from None
    try:
        return profile_from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        name = type(error).__name__
        raise ConfigError(f"{path}: not a profile: {name}: {first_line(error)}") from None


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """Plain values for JSON."""
    costs = profile.costs
    layers = zip(profile.names, profile.layers, strict=True)
    loads = profile.loads.to_lists()
    return {
        "version": VERSION,
        "precision": profile.precision,
        "layers": [{"name": name, "kind": row} for name, row in layers],
        "loads": {phase: loads[phase] for phase in PHASES},
        "kinds": [
            {"kind": kind, "phase": profile.phases[row]}
            | {name: getattr(costs, name)[row].tolist() for name in ARRAYS}
            for row, kind in enumerate(costs.kinds)
        ],
    }


def profile_from_dict(values: dict[str, Any]) -> Profile:
    """The inverse of `profile_to_dict`."""
    if values.get("version") != VERSION:
        version = values.get("version")
        raise ConfigError(
            f"version is {version!r}; this release reads version {VERSION}: measure again"
        )
    precision = values.get("precision")
    if precision not in (None, *BYTES_OF):
        raise ConfigError(f"precision is {precision!r}; use one of {', '.join(BYTES_OF)}")
    kinds = values["kinds"]
    types = {name: np.bool_ if name == "sends_grad" else np.int64 for name in ARRAYS}
    columns: dict[str, Any] = {
        name: np.array([kind[name] for kind in kinds], dtype) for name, dtype in types.items()
    }
    names = tuple(str(kind["kind"]) for kind in kinds)
    return Profile(
        loads=Loads.of_lists(values["loads"]),
        costs=Costs(names=names, kinds=names, **columns),
        layers=tuple(int(layer["kind"]) for layer in values["layers"]),
        names=tuple(str(layer["name"]) for layer in values["layers"]),
        phases=tuple(str(kind["phase"]) for kind in kinds),
        precision=precision,
    )


def _fitted(profile: Profile, name: str, loads: Loads) -> FloatArray:
    """A column of `Costs` for each kind, float64, (kinds, micro_batches)."""
    coefficients = _coefficients(profile)[name]
    rows = [
        _terms(profile.loads, loads, _decides(name, phase)) @ factors
        for phase, factors in zip(profile.phases, coefficients, strict=True)
    ]
    return np.stack(rows)


@lru_cache(maxsize=8)
def _coefficients(profile: Profile) -> dict[str, list[FloatArray]]:
    """Coefficients of each kind's terms, by column."""
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
    """The phases that a column depends on, the layer's own first."""
    if phase == "labels":
        return phase, "llm"
    others = tuple(other for other in PHASES[:-1] if other != phase)
    return (phase, *others) if name in ("sent_bytes", "send_ns") else (phase,)


def _terms(measured: Loads, loads: Loads, phases: tuple[str, ...]) -> FloatArray:
    """Terms of a fit, (micro_batches, terms): constant if there are tokens, tokens, squares, bends.

    Features of other phases that travel along depend on those phases' tokens alone, and so does
    what the head keeps of tokens without a label.
    """
    load: PhaseLoads = getattr(loads, phases[0])
    columns = [load.tokens > 0, *(getattr(loads, phase).tokens for phase in phases)]
    if len(phases) == 1 or phases[0] == "labels":
        known: IntArray = getattr(measured, phases[0]).tokens
        max_tokens = known.max(initial=0)
        # a bend below all that was measured could not be told from the constant
        min_tokens = known[known > 0].min(initial=max_tokens)
        bends = [bend * max_tokens for bend in BENDS]
        steeper = (
            (load.tokens > bend) * (load.tokens - bend) * (bend > min_tokens) for bend in bends
        )
        columns += [load.squares, *steeper]
    return np.stack(columns, axis=1).astype(np.float64)


def _fit(terms: FloatArray, values: IntArray) -> FloatArray:
    """The coefficients, none negative, with the least sum of squared relative errors."""
    weights = 1 / np.maximum(values, 1)
    scale = np.maximum(np.abs(terms).max(axis=0, initial=0), 1)
    solution = nonnegative_least_squares(terms / scale * weights[:, np.newaxis], values * weights)
    return np.asarray(solution / scale)


def nonnegative_least_squares(rows: FloatArray, target: FloatArray) -> FloatArray:
    """The x >= 0 that minimises |rows x - target| (Lawson and Hanson's active set).

    >>> rows, target = np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([2.0, 1.0])
    >>> nonnegative_least_squares(rows, target).round(9).tolist()
    [1.5, 0.0]
    """
    solution, free = np.zeros(rows.shape[1]), np.zeros(rows.shape[1], np.bool_)
    for _ in range(3 * rows.shape[1]):
        gain = np.where(free, -np.inf, rows.T @ (target - rows @ solution))
        if gain.max(initial=0.0) <= 1e-10 * np.abs(rows.T @ target).max(initial=0.0):
            break
        free[int(gain.argmax())] = True
        solution = _shrink(rows, target, solution, free)
        free = solution > 0
    return solution


def _shrink(
    rows: FloatArray, target: FloatArray, solution: FloatArray, free: BoolArray
) -> FloatArray:
    """Move to the optimum in the free entries; entries that become 0 on the way are fixed there."""
    free = free.copy()
    while free.any():
        aim = np.zeros_like(solution)
        aim[free] = np.linalg.lstsq(rows[:, free], target, rcond=None)[0]
        falls = free & (aim <= 0)
        if not falls.any():
            return aim
        step = float((solution[falls] / (solution[falls] - aim[falls] + 1e-300)).min())
        solution = np.where(free, solution + step * (aim - solution), 0.0)
        free &= solution > 1e-14
    return solution
