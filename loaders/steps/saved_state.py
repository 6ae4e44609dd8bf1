"""States of `Steps`: which can be resumed from, or why not. Pure."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from isobatch.common.errors import ConfigError
from isobatch.common.visible_text import shown

STATE_VERSION = 3
NOTHING_DONE = {"steps": 0, "tokens": 0}
"""What states of earlier versions say of the training so far."""
_REFUSALS = {
    "version": "it was saved by another version of Isobatch",
    "dataset": "give the loader the dataset, model and tokenizer of the run that saved it",
    "window": "give the loader the window, caps and packing of the run that saved it",
    "manifest_hash": "it belongs to another build, or to other weights, or to this build before"
    " samples were removed; `set_epoch` begins an epoch anew",
    "samples": "give the loader the split, filter and limit of the run that saved it",
    "order": "give the loader the shuffle of the run that saved it",
    "seed": "give the loader the seed of the run that saved it",
    "regroup": "give the loader the regroup and regroup_window of the run that saved it",
}
"""Key of a state -> why one with another value is refused."""

_EARLIER_ORDERS = ("random", "alike"), ("random", "mixed"), ("windows", "windows by source")
"""Names of orders in states of earlier versions, and of what they are now."""
_NUMBERS = ("consumed", "given", "passed", "step", "began", "length", "ranks")
_LISTS = ("spare", "carried", "owners", "taken")
"""Keys of a state's stream that are counts, or lists of groups' or ranks' numbers."""


def checked_state(
    state: Any,
    expected: dict[str, Any],
    adopted: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state,
) -> dict[str, Any]:
    """`state` in the form of this version, if a loader of the state `expected` can resume from it.

    `adopted` makes states of a build before it grew those of the build as it is now.
    ConfigError if it cannot: other builds, order or seed, the middle of an epoch of version 0.1, or
    no state at all.
    """
    if not (isinstance(state, dict) and isinstance(state.get("stream", {}), dict)):
        raise ConfigError(f"state is {state!r:.200}; give what `state_dict()` returned")
    updated = _updated(state, expected)
    with suppress(KeyError, TypeError, ValueError):  # what is wrong with it is said below
        updated = adopted(updated)
    # of the same form, and of the order that this one has replaced
    is_before = (updated.get("order"), expected["order"]) in _EARLIER_ORDERS
    if is_before:
        updated = {**updated, "order": expected["order"]}
    _check_state(updated, expected)
    if is_before and updated["stream"].get("given", updated["stream"].get("consumed")):
        warnings.warn(
            "the state is of an earlier version, whose order may be another one: what is left of"
            " the epoch comes in this version's, each group still once",
            stacklevel=2,
        )
    return updated


def _updated(state: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """A state of the previous version as one of this; ConfigError if it is within an epoch."""
    stream = state.get("stream")
    if not isinstance(stream, dict) or state.get("version") != STATE_VERSION - 1:
        return state
    # of the random order a number, of blocks one per lane
    if np.any(np.asarray(stream.get("consumed", 0), object) != 0):
        raise ConfigError(
            f"state is from the middle of epoch {state.get('epoch')} in the order of Isobatch 0.1, "
            "which this version does not have; finish that epoch with 0.1, or start the next one "
            "(`set_epoch`)"
        )
    begun = {"consumed": 0, "spare": []}
    return {**state, "version": STATE_VERSION, "order": expected["order"], "stream": begun}


def _check_state(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """ConfigError unless a loader with the state `expected` can resume from `state`."""
    if ("dataset" in state) != ("dataset" in expected):
        kinds = "BalancedLoader", "StreamingLoader"
        its, mine = kinds if "dataset" in state else kinds[::-1]
        raise ConfigError(f"state is of a {its}, and this is a {mine}; give it to one of its kind")
    keys, expected = sorted(state), {"samples": None, **expected}
    state = {"samples": None, "done": NOTHING_DONE, **state}
    for key, reason in _REFUSALS.items():
        if key in state and state[key] != expected[key]:
            raise ConfigError(
                f"state has {key} {shown(state[key])}, this loader {expected[key]!r}: {reason}"
            )
    if set(state) != set(expected):
        raise ConfigError(
            f"state has the keys {keys}; a state of this loader has {sorted(expected)}"
        )
    if not isinstance(state["epoch"], int) or state["epoch"] < 0:
        raise ConfigError(f"state has epoch {state['epoch']!r}; epochs are numbered from 0")
    done = state["done"]
    if not (isinstance(done, dict) and all(type(done.get(of)) is int for of in NOTHING_DONE)):
        raise ConfigError(f"state has done {done!r:.200}; give what `state_dict()` returned")
    for key, value in (state["stream"] or {}).items():
        numbers = value if key in _LISTS and isinstance(value, list) else [value]
        if key in (*_NUMBERS, *_LISTS) and not all(type(n) is int for n in numbers):
            what = f"{key} is {shown(value)}; give what `state_dict()` returned"
            raise ConfigError(f"state of another stream: {what}")
