"""Saved positions of a loader: which of them it resumes from. Pure."""

from typing import Any

from balance.errors import ConfigError

STATE_VERSION = 2

# key -> why a state with another value is refused
_SAME = {
    "manifest_hash": "it belongs to another build",
    "order": "give the loader the order of the run that saved it",
    "seed": "give the loader the seed of the run that saved it",
    "regroup": "give the loader the regroup and regroup_window of the run that saved it",
}


def check_state(state: dict[str, Any], own: dict[str, Any]) -> None:
    """ConfigError unless a loader with the state `own` can resume from `state`."""
    if state.get("version") != STATE_VERSION and "version" in state:
        raise _mismatch("version", state, own, "it was saved by another version of Isobatch")
    if set(state) != set(own):
        raise ConfigError(
            f"state has the keys {sorted(state)}; a StreamingLoader's state has {sorted(own)}"
        )
    for key, reason in _SAME.items():
        if state[key] != own[key]:
            raise _mismatch(key, state, own, reason)
    if not isinstance(state["epoch"], int) or state["epoch"] < 0:
        raise ConfigError(f"state has epoch {state['epoch']!r}; epochs are numbered from 0")


def _mismatch(key: str, state: dict[str, Any], own: dict[str, Any], reason: str) -> ConfigError:
    return ConfigError(f"state has {key} {state[key]!r}, this loader {own[key]!r}: {reason}")
