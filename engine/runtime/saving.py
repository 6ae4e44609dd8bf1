"""Training state on disk, by layer: a run goes on with another partition, or with other numbers of stages and replicas.

Every tensor is named after the place of its layer in the model and its parameter, never after a rank or a stage: a rank
reads what it holds, whoever wrote it. torch.distributed.checkpoint writes them; replicas share out what they all have.
A state is a folder that gets its name when it is whole. So whenever a run is killed, the newest state can be used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from balance.errors import ConfigError, DataError, first_line
from engine.runtime.optimizer_state import Layers, load_into, merge_options, options_of, parameters_of, tensors_of

STATE_VERSION = 1
PROGRESS_NAME = "progress.json"
_ROOT = "layers"
"""All tensors stand below one key: torch wants those of the top level alike on all ranks."""
_WEIGHT, _OPTIMIZER = "weight.", "optimizer."
_NAME = re.compile(r"step-(\d+)(?:-(\d+))?")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come."""

    step: int
    """Optimizer steps that are done."""
    loader: dict[str, Any]
    """`StreamingLoader.state_dict()`: the same on all ranks, good for any number of them."""


def save_state(folder: Path, layers: Layers, optimizer: Optimizer | None, progress: Progress, *, kept: int = 2) -> Path:
    """Save a new state, then remove all but the newest `kept`; -> its folder. All ranks call it.

    Of replicas, which are alike, any one's tensors are taken. Learning rates and the like are saved by parameter.
    `optimizer`: None on a rank where nothing is trained. ConfigError if it keeps anything but tensors.
    """
    tensors = {f"{_WEIGHT}{name}": value for name, value in _weights(layers).items()}
    options = []
    if optimizer is not None:
        tensors |= {f"{_OPTIMIZER}{name}": value for name, value in tensors_of(layers, optimizer).items()}
        options = options_of(layers, optimizer)
    ranks = _gathered((sorted(layers), options))
    unfinished = folder / f"step-{progress.step}.new"
    if _is_first():
        for left in [*folder.glob("step-*.new"), *folder.glob("step-*.old")]:  # by a run that was killed
            shutil.rmtree(left)
        unfinished.mkdir(parents=True)
    _meet()
    with _alone_or_not() as alone:
        save({_ROOT: tensors}, checkpoint_id=unfinished, no_dist=alone)
    target = unfinished
    if _is_first():
        content = {
            "version": STATE_VERSION,
            "step": progress.step,
            "loader": progress.loader,
            "places": sorted({place for places, _ in ranks for place in places}),
            "options": merge_options([options for _, options in ranks]),
        }
        _write(unfinished / PROGRESS_NAME, json.dumps(content, indent=1))
        target = _finish(unfinished, progress.step)
        for old in _states(folder)[:-kept]:
            shutil.rmtree(old.rename(old.with_name(f"{old.name}.old")))
    return _from_first(target)


def load_state(folder: Path, layers: Layers, optimizer: Optimizer | None) -> Progress | None:
    """Load the newest state into layers and optimizer; None, and nothing changes, if there is none. All ranks call it.

    ConfigError if it is of another model. What was not trained before begins with an optimizer state of its own.
    """
    newest = _from_first(newest_state(folder))
    if newest is None:
        return None
    content = _read(newest)
    found = sorted({place for places in _gathered(sorted(layers)) for place in places})
    if found != content["places"]:
        raise ConfigError(f"{newest} has {len(content['places'])} layers, the model {len(found)}: give the same model")
    saved = _saved(FileSystemReader(newest).read_metadata())
    weights = _weights(layers)
    _check(weights, saved, newest)
    own = parameters_of(layers) if optimizer is not None else {}
    # where the optimizer wants them, it moves them to itself
    moments = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in saved.items()
        if key.startswith(_OPTIMIZER) and (name := key.removeprefix(_OPTIMIZER)).rpartition(".")[0] in own
    }
    tensors = {f"{_WEIGHT}{name}": value for name, value in weights.items()}
    tensors |= {f"{_OPTIMIZER}{name}": value for name, value in moments.items()}
    with _alone_or_not() as alone:
        load({_ROOT: tensors}, checkpoint_id=newest, no_dist=alone)
    if optimizer is not None:
        load_into(optimizer, layers, moments, content["options"])
    return Progress(step=content["step"], loader=content["loader"])


def newest_state(folder: Path) -> Path | None:
    """The newest whole state in a folder, if there is one."""
    return next(reversed(_states(folder)), None)


def _states(folder: Path) -> list[Path]:
    """Whole states, oldest first."""
    found = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(((int(match[1]), int(match[2] or 0)), path) for match, path in found)]


def _finish(unfinished: Path, step: int) -> Path:
    """Give a whole state its name; another one if the step was saved before: nothing is ever written over."""
    again = [
        int(match[2] or 0)
        for path in _states(unfinished.parent)
        if (match := _NAME.fullmatch(path.name)) and int(match[1]) == step
    ]
    target = unfinished.with_name(f"step-{step}-{max(again) + 1}" if again else f"step-{step}")
    _flush(unfinished)
    unfinished.rename(target)
    _flush(target.parent)
    return target


def _weights(layers: Layers) -> dict[str, Tensor]:
    """Parameters and buffers by name: the layers' own memory."""
    found: dict[str, Tensor] = {}
    for place, layer in layers.items():
        for name, value in layer.state_dict().items():
            if not isinstance(value, Tensor):
                raise ConfigError(f"layer {place} keeps {name}, a {type(value).__name__}; only tensors are saved")
            found[f"{place}.{name}"] = value
    return found


def _saved(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    found = metadata.state_dict_metadata.items()
    return {key.removeprefix(f"{_ROOT}."): entry for key, entry in found if isinstance(entry, TensorStorageMetadata)}


def _check(weights: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata], where: Path) -> None:
    """ConfigError unless all of the weights were saved, in the same shapes."""
    for name, weight in weights.items():
        entry = saved.get(f"{_WEIGHT}{name}")
        if entry is None or entry.size != weight.shape:
            has = "does not have it" if entry is None else f"has it as {tuple(entry.size)}"
            raise ConfigError(f"weight {name} of shape {tuple(weight.shape)}: {where} {has}; give the model it is of")


def _read(state: Path) -> dict[str, Any]:
    path = state / PROGRESS_NAME
    try:
        content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {first_line(error)}; remove {state} to use the state before it") from None
    if content.get("version") != STATE_VERSION:
        raise ConfigError(f"{path}: version {content.get('version')}; this isobatch reads version {STATE_VERSION}")
    return content


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Put a folder's names on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def _alone_or_not() -> Iterator[bool]:
    """Whether this process has no others, which torch would warn of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield not dist.is_initialized()


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _gathered(value: T) -> list[T]:
    """Every rank's value, on all ranks."""
    found = [value]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, value)
    return found


def _from_first(value: T) -> T:
    """The first rank's value, on all ranks."""
    found = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]
