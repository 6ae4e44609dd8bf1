"""Training state on disk, by layer: a run goes on with another partition, or with other numbers of
stages and replicas.

Every tensor is named after the place of its layer in the model and its parameter, never after a
rank or a stage: a rank reads what it holds, whoever wrote it. torch.distributed.checkpoint writes
them; replicas share out what they all have. A state is a folder that gets its name when it is
whole. So whenever a run is killed, the newest state can be used. What fails on one rank is raised
on all, in one line: DataError, ConfigError; PeerLost if a rank has gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from balance.errors import ConfigError, DataError
from engine.runtime.checkpoints._optimizer_state import (
    Layers,
    Options,
    load_into,
    merge_options,
    options_of,
    parameters_of,
    tensors_of,
)
from engine.runtime.checkpoints._state_folders import (
    PROGRESS_NAME,
    begin_state,
    cannot,
    finish_state,
    give_up,
    newest_state,
    read_progress,
    reason_of,
    remove_older,
)
from engine.runtime.communication.collectives import everyone, from_first, gathered, together

__all__ = ["PROGRESS_NAME", "Progress", "load_state", "newest_state", "save_state"]

_ROOT = "layers"
"""All tensors stand below one key: torch wants those of the top level alike on all ranks."""
_WEIGHT, _OPTIMIZER = "weight.", "optimizer."

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come."""

    step: int
    """Optimizer steps that are done."""
    loader: dict[str, Any]
    """`StreamingLoader.state_dict()`: the same on all ranks, good for any number of them."""


def save_state(
    folder: Path, layers: Layers, optimizer: Optimizer | None, progress: Progress, *, kept: int = 2
) -> Path:
    """Save a new state, then remove all but the newest `kept`; -> its folder. All ranks call it.

    Of replicas, which are alike, any one's tensors are taken. Learning rates and the like are saved
    by parameter. `optimizer`: None on a rank where nothing is trained. On all ranks alike:
    ConfigError if it keeps anything but tensors; DataError if the state cannot be written, and then
    what was written of it is removed and the run may go on.
    """
    tensors, options = together(lambda: _to_save(layers, optimizer))
    ranks = gathered((sorted(layers), options))
    unfinished = from_first(lambda: begin_state(folder, progress.step))
    content = {
        "step": progress.step,
        "loader": progress.loader,
        "places": sorted({place for places, _ in ranks for place in places}),
        "options": merge_options([options for _, options in ranks]),
    }
    try:
        with _torch_files(lambda error, rank: cannot(unfinished, "written", error, rank)) as alone:
            save({_ROOT: tensors}, checkpoint_id=unfinished, no_dist=alone)
        target = from_first(lambda: finish_state(unfinished, progress.step, content))
    except DataError:  # on all ranks alike
        from_first(lambda: give_up(unfinished))
        raise
    from_first(lambda: remove_older(folder, kept))
    return target


def load_state(folder: Path, layers: Layers, optimizer: Optimizer | None) -> Progress | None:
    """Load the newest state into layers and optimizer; None, and nothing changes, if there is none.
    All ranks call it.

    What was not trained before begins with an optimizer state of its own. On all ranks alike:
    ConfigError if it is of another model, and then nothing has changed; DataError if its files are
    damaged, and then layers may hold anything.
    """
    newest = from_first(lambda: newest_state(folder))
    if newest is None:
        return None
    content = together(lambda: read_progress(newest))
    found = sorted({place for places in gathered(sorted(layers)) for place in places})
    if found != content["places"]:
        raise ConfigError(
            f"{newest} has {len(content['places'])} layers, the model {len(found)}: give the same model"
        )
    tensors = together(lambda: _to_load(newest, layers, optimizer))
    with _torch_files(lambda error, rank: _damaged(newest, error, rank)) as alone:
        load({_ROOT: tensors}, checkpoint_id=newest, no_dist=alone)
    together(lambda: _into(optimizer, layers, _below(_OPTIMIZER, tensors), content["options"]))
    return Progress(step=content["step"], loader=content["loader"])


def _to_save(layers: Layers, optimizer: Optimizer | None) -> tuple[dict[str, Tensor], Options]:
    """This rank's tensors, by the names under which they are saved, and its optimizer's options."""
    tensors = {f"{_WEIGHT}{name}": value for name, value in _weights(layers).items()}
    if optimizer is None:
        return tensors, []
    tensors |= {
        f"{_OPTIMIZER}{name}": value for name, value in tensors_of(layers, optimizer).items()
    }
    return tensors, options_of(layers, optimizer)


def _to_load(state: Path, layers: Layers, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Where this rank's tensors of a state are to be read to: the layers' own memory, and new one
    for the optimizer's.

    DataError if what the state says of itself is damaged, ConfigError if it is of another model.
    """
    saved = _saved(state)
    weights = _weights(layers)
    _check(weights, saved, state)
    own = parameters_of(layers) if optimizer is not None else {}
    # where the optimizer wants them, it moves them to itself
    moments = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in _below(_OPTIMIZER, saved).items()
        if name.rpartition(".")[0] in own
    }
    tensors = {f"{_WEIGHT}{name}": value for name, value in weights.items()}
    return tensors | {f"{_OPTIMIZER}{name}": value for name, value in moments.items()}


def _weights(layers: Layers) -> dict[str, Tensor]:
    """Parameters and buffers by name: the layers' own memory."""
    found: dict[str, Tensor] = {}
    for place, layer in layers.items():
        for name, value in layer.state_dict().items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"layer {place} keeps {name}, a {type(value).__name__}; only tensors are saved"
                )
            found[f"{place}.{name}"] = value
    return found


def _saved(state: Path) -> dict[str, TensorStorageMetadata]:
    """What a state holds, by name. DataError if that cannot be read."""
    try:
        found = FileSystemReader(state).read_metadata().state_dict_metadata.items()
    except Exception as error:  # a damaged pickle raises whatever it comes upon
        raise _damaged(state, error, dist.get_rank() if dist.is_initialized() else 0) from error
    return {
        key.removeprefix(f"{_ROOT}."): entry
        for key, entry in found
        if isinstance(entry, TensorStorageMetadata)
    }


def _into(
    optimizer: Optimizer | None, layers: Layers, moments: Mapping[str, Tensor], options: Options
) -> None:
    if optimizer is not None:
        load_into(optimizer, layers, moments, options)


def _below(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """What has a prefix, by its name without it."""
    return {
        key.removeprefix(prefix): value for key, value in named.items() if key.startswith(prefix)
    }


def _check(
    weights: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata], where: Path
) -> None:
    """ConfigError unless all of the weights were saved, in the same shapes."""
    for name, weight in weights.items():
        entry = saved.get(f"{_WEIGHT}{name}")
        if entry is None or entry.size != weight.shape:
            has = "does not have it" if entry is None else f"has it as {tuple(entry.size)}"
            raise ConfigError(
                f"weight {name} of shape {tuple(weight.shape)}: {where} {has}; give the model it is of"
            )


def _damaged(state: Path, error: Exception, rank: int) -> DataError:
    return DataError(
        f"{state} cannot be read: {reason_of(error)} (rank {rank}); remove it to use the state before it"
    )


@contextmanager
def _torch_files(told: Callable[[Exception, int], DataError]) -> Iterator[bool]:
    """While torch reads or writes a state; -> whether this process has no others, of which torch
    would warn.

    What fails on any rank, torch raises on all; `told` makes an error of it and its rank.
    """
    with warnings.catch_warnings(), everyone():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield not dist.is_initialized()
        except CheckpointException as error:  # no Exception, but a BaseException
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            if not isinstance(cause, Exception):
                raise cause from None  # somebody interrupts it
            raise told(cause, rank) from cause
