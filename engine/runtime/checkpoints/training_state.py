"""Training state on disk, by layer: `StateSaver`, `save_state` and `load_state`.

Every tensor is named after its layer's index in the model and its parameter, never after a rank or
a stage. So a run resumes with another partition, or other numbers of stages and replicas: each rank
reads what it holds, whoever wrote it. Weights are saved as the optimizer has them: float32 masters
where there are any. A tied parameter has several names and the same optimizer state under each,
because its layers may move to different ranks. torch.distributed.checkpoint writes the tensors: of
equal ones each replica a part, of shared out ones each its rows. A state is a folder that gets its
name when it is complete, so after a kill the newest state is usable. A failure on one rank is
raised on all, in one line: DataError, ConfigError; PeerLost if a rank is lost.
"""

import json
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from isobatch.common.errors import ConfigError, DataError
from isobatch.engine.runtime.checkpoints._state_folders import (
    PROGRESS_NAME,
    begin_state,
    cannot,
    finish_state,
    newest_state,
    read_progress,
    remove_older,
)
from isobatch.engine.runtime.communication.collectives import (
    any_rank,
    gather_objects,
    on_all_ranks,
    on_first_rank,
    world_errors,
)
from isobatch.engine.runtime.optimizer.main_weights import gather_weight, local_part, main_param

__all__ = [
    "PROGRESS_NAME",
    "Progress",
    "StateSaver",
    "load_state",
    "newest_state",
    "save_state",
]

Layers = Mapping[int, nn.Module]
"""A rank's layers by index in the model: `Pipeline.layers`."""
Options = list[dict[str, Any]]
"""Parameter groups in plain JSON: the names of `parameters` and the optimizer's `values`."""

_ROOT = "layers"
"""Key above all tensors: torch wants equal top-level keys on all ranks."""
_WEIGHT, _OPTIMIZER = "weight.", "optimizer."
_CHECKPOINT = "torch.distributed.checkpoint"
_IN_METADATA = frozenset(
    {"torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath"}
    | {"pathlib._local.PosixPath"}  # of Python 3.13
    | {f"{_CHECKPOINT}.filesystem._{name}" for name in ("StorageInfo", "StoragePrefix")}
    | {
        f"{_CHECKPOINT}.metadata.{name}"
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
            *("TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
            "_MEM_FORMAT_ENCODING",
        )
    }
)
"""What torch's metadata of a state is made of."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a run."""

    step: int
    """Optimizer steps that are done."""
    loader: dict[str, Any]
    """`StreamingLoader.state_dict()`: equal on all ranks, valid for any number of them."""


Basis = Mapping[str, Any]
"""What saved adapters depend on, as plain JSON by name: a run that resumes must have the same."""


class StateSaver:
    """Saves states while training goes on: `begin` copies them to the CPU, a thread writes.

    All ranks call its methods alike. A state gets its name in `poll` or `finish`, and the failure
    of a save is raised there.
    """

    def __init__(
        self,
        folder: Path,
        layers: Layers,
        optimizer: Optimizer | None,
        *,
        max_states: int = 2,
        basis: Basis | None = None,
    ) -> None:
        """`optimizer`: None on a rank where nothing is trained. `max_states`: the newest are kept.

        `basis`: with it, frozen weights and buffers are not saved. Every start makes them the same,
        which `load_state` checks.
        """
        self._folder, self._layers, self._optimizer = folder, layers, optimizer
        self._max_states, self._basis = max_states, basis
        self._group: dist.ProcessGroup | None = None
        self._pending: _Pending | None = None

    def begin(self, progress: Progress, *, in_thread: bool = True) -> None:
        """Copy a state and begin to write it; waits until the one before it is written.

        `in_thread`: otherwise nothing is copied, and `finish` writes. On all ranks: ConfigError if
        the optimizer keeps anything but tensors; DataError if a number is NaN or infinite, or the
        state before could not be written.
        """
        self.finish()
        tensors, options = on_all_ranks(
            lambda: _to_save(self._layers, self._optimizer, trained_only=self._basis is not None)
        )
        ranks = gather_objects((sorted(self._layers), options))
        unfinished = on_first_rank(lambda: begin_state(self._folder, progress.step))
        content = {
            "step": progress.step,
            "loader": progress.loader,
            "places": sorted({index for indices, _ in ranks for index in indices}),
            "options": _merge_options([options for _, options in ranks]),
            "basis": self._basis,
        }
        future = None
        if in_thread:
            if self._group is None and dist.is_initialized():
                # the thread's messages must not meet those of training
                self._group = dist.new_group(backend="gloo")
            with _torch_errors(unfinished, "written") as alone:
                future = async_save(
                    {_ROOT: tensors},
                    checkpoint_id=unfinished,
                    process_group=self._group,
                    async_stager=_Copies(),
                    no_dist=alone,
                )
        self._pending = _Pending(progress.step, unfinished, content, {_ROOT: tensors}, future)

    def poll(self) -> None:
        """Complete a save that has been written on all ranks. Errors as of `finish`."""
        pending = self._pending
        if pending and pending.future and not any_rank(not pending.future.done()):
            self.finish()

    def finish(self) -> Path | None:
        """Wait for the save, and remove all but the newest states; -> its folder, None without one.

        DataError on all ranks if it cannot be written: its remains are removed, and those before
        stay.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            with _torch_errors(pending.unfinished, "written") as alone:
                if pending.future is not None:
                    pending.future.result()
                else:
                    save(pending.tensors, checkpoint_id=pending.unfinished, no_dist=alone)
            target = on_first_rank(
                lambda: finish_state(pending.unfinished, pending.step, pending.content)
            )
        except DataError:  # raised on all ranks
            on_first_rank(lambda: shutil.rmtree(pending.unfinished, ignore_errors=True))
            raise
        on_first_rank(lambda: remove_older(self._folder, self._max_states))
        return target


class _Copies(BlockingAsyncStager):
    """Copies on the CPU; torch's own copy whole what is a view, and fail for shards of no rows."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy that training does not change."""
        return {
            key: {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
            for key, tensors in state_dict.items()
        }


class _Pending(NamedTuple):
    """A state that is being written."""

    step: int
    unfinished: Path
    content: dict[str, Any]
    tensors: dict[str, Any]
    future: Any
    """That of the thread; None where `finish` writes."""


def save_state(
    folder: Path,
    layers: Layers,
    optimizer: Optimizer | None,
    progress: Progress,
    *,
    max_states: int = 2,
) -> Path:
    """Save a state and wait for it; -> its folder. As `StateSaver`; all ranks call it."""
    saver = StateSaver(folder, layers, optimizer, max_states=max_states)
    saver.begin(progress, in_thread=False)
    return cast(Path, saver.finish())


def load_state(
    folder: Path, layers: Layers, optimizer: Optimizer | None, *, basis: Basis | None = None
) -> Progress | None:
    """Load the newest state into layers and optimizer; None if there is none. All ranks call it.

    Parameters that were not trained before start with a fresh optimizer state. On all ranks:
    ConfigError if the state is of another model or `basis`, and nothing has changed; DataError if
    its files are damaged, and layers may then hold anything.
    """
    newest = on_first_rank(lambda: newest_state(folder))
    if newest is None:
        return None
    content = on_all_ranks(lambda: read_progress(newest))
    places = sorted({index for indices in gather_objects(sorted(layers)) for index in indices})
    if places != content["places"]:
        raise ConfigError(
            f"{newest} has {len(content['places'])} layers, the model {len(places)}:"
            " give the same model"
        )
    if basis is not None:
        _check_basis(newest, content.get("basis"), basis)
    trained_only = basis is not None
    tensors = on_all_ranks(lambda: _to_load(newest, layers, optimizer, trained_only=trained_only))
    with _torch_errors(newest, "read") as alone:
        load({_ROOT: tensors}, storage_reader=_StateReader(newest), no_dist=alone)
    with world_errors():
        for layer in layers.values():
            for weight in layer.parameters():
                gather_weight(weight)
    moments = _with_prefix(_OPTIMIZER, tensors)
    on_all_ranks(lambda: _load_into(optimizer, layers, moments, content["options"]))
    return Progress(step=content["step"], loader=content["loader"])


def _check_basis(state: Path, saved: Basis | None, basis: Basis) -> None:
    """ConfigError unless a state depends on the same things as this run."""
    if saved is None:
        raise ConfigError(
            f"{state} does not say what its adapters were trained on, or has none: give another"
            " folder for this run's states"
        )
    for name, value in basis.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"{state} was trained with {name} {saved.get(name)}, this run has {value}: give the"
                " same, or another folder for its states"
            )


def _to_save(
    layers: Layers, optimizer: Optimizer | None, *, trained_only: bool
) -> tuple[dict[str, Tensor], Options]:
    """This rank's tensors by saved name, and its optimizer's options. DataError if not finite."""
    moments, options = {}, []
    if optimizer is not None:
        moments, options = _tensors_of(layers, optimizer), _options_of(layers, optimizer)
    tensors = _join(_weights(layers, trained_only=trained_only), moments)
    masks = {
        f"{_WEIGHT}{index}.{name}"
        for index, layer in layers.items()
        for name, _ in layer.named_buffers()
    }
    for name, value in tensors.items():
        if not _is_finite(local_part(value.detach()), may_be_infinite=name in masks):
            raise DataError(
                f"{name} has numbers that are NaN or infinite, so this state is not saved; resume"
                " from the one before it, with a smaller learning rate"
            )
    return tensors, options


def _is_finite(value: Tensor, *, may_be_infinite: bool) -> bool:
    """Whether no number is NaN, nor infinite, by one pass without copies."""
    if not value.is_floating_point() or not value.numel():
        return True
    ends = torch.stack(torch.aminmax(value))  # NaN if any number is
    return not bool(ends.isnan().any() if may_be_infinite else (~ends.isfinite()).any())


def _to_load(
    state: Path, layers: Layers, optimizer: Optimizer | None, *, trained_only: bool
) -> dict[str, Tensor]:
    """Tensors to read a state into: the layers' own memory, and new tensors for the optimizer.

    DataError if the state's metadata is damaged, ConfigError if it is of another model.
    """
    saved = _saved(state)
    weights = _weights(layers, trained_only=trained_only)
    for name, weight in weights.items():
        entry = saved.get(f"{_WEIGHT}{name}")
        if entry is None or entry.size != weight.shape:
            has = "does not have it" if entry is None else f"has it as {tuple(entry.size)}"
            raise ConfigError(
                f"weight {name} of shape {tuple(weight.shape)}: {state} {has}; give the same model"
            )
    parameters = _parameters_of(layers) if optimizer is not None else {}
    moments = {
        name: _empty(entry, parameters[name.rpartition(".")[0]])
        for name, entry in _with_prefix(_OPTIMIZER, saved).items()
        if name.rpartition(".")[0] in parameters
    }
    return _join(weights, moments)


def _empty(entry: TensorStorageMetadata, weight: Tensor) -> Tensor:
    """Room for an optimizer's tensor, shared out as its parameter is if it has as many numbers."""
    if isinstance(weight, DTensor) and entry.size == weight.shape:
        return torch.empty_like(weight.detach(), dtype=entry.properties.dtype)
    # the optimizer itself moves it to the right device
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _join(weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of layers and optimizer by saved name."""
    tensors = {f"{_WEIGHT}{name}": value for name, value in weights.items()}
    return tensors | {f"{_OPTIMIZER}{name}": value for name, value in moments.items()}


def _weights(layers: Layers, *, trained_only: bool) -> dict[str, Tensor]:
    """Parameters, as the optimizer has them, and buffers by name: their own memory."""
    tensors: dict[str, Tensor] = {}
    for index, layer in layers.items():
        mains = {
            name: main_param(weight).detach()
            for name, weight in layer.named_parameters(remove_duplicate=False)
            if weight.requires_grad or not trained_only
        }
        for name, value in (mains if trained_only else layer.state_dict() | mains).items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"layer {index} keeps {name}, a {type(value).__name__}; only tensors are saved"
                )
            tensors[f"{index}.{name}"] = value
    return tensors


class _PlainUnpickler(pickle.Unpickler):
    """Of torch's metadata only its own tables and types: a pickle could run any function."""

    def find_class(self, module: str, name: str) -> Any:
        """A class or a type that metadata has; UnpicklingError for anything else."""
        whole = f"{module}.{name}"
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_type and whole not in _IN_METADATA:
            raise pickle.UnpicklingError(f"it names {whole}, which no state has")
        return super().find_class(module, name)


class _StateReader(FileSystemReader):
    """torch's reader of states, which runs nothing that the files name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of a state. UnpicklingError and others if it is damaged."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _PlainUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}, no metadata")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _saved(state: Path) -> dict[str, TensorStorageMetadata]:
    """Metadata of a state's tensors by name. DataError if it cannot be read."""
    try:
        entries = _StateReader(state).read_metadata().state_dict_metadata.items()
    except Exception as error:  # a damaged pickle may raise anything
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise cannot(state, "read", error, rank) from error
    return {
        key.removeprefix(f"{_ROOT}."): entry
        for key, entry in entries
        if isinstance(entry, TensorStorageMetadata)
    }


def _with_prefix(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """Entries with a prefix, by name without it."""
    return {
        key.removeprefix(prefix): value for key, value in named.items() if key.startswith(prefix)
    }


def _parameters_of(layers: Layers) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, `index.name in the layer`; a tied one has several."""
    return {
        f"{index}.{name}": main_param(weight)
        for index, layer in layers.items()
        for name, weight in layer.named_parameters(remove_duplicate=False)
    }


def _tensors_of(layers: Layers, optimizer: Optimizer) -> dict[str, Tensor]:
    """State of each parameter by `name.field`. ConfigError if it has anything but tensors."""
    tensors: dict[str, Tensor] = {}
    for name, weight in _parameters_of(layers).items():
        for field, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{field}"] = value
            elif value is not None:
                raise ConfigError(
                    f"the optimizer keeps {field}, a {type(value).__name__}; only tensors are saved"
                )
    return tensors


def _options_of(layers: Layers, optimizer: Optimizer) -> Options:
    """Options for this rank's parameters. ConfigError for an option that JSON cannot hold."""
    names: dict[int, list[str]] = {}
    for name, weight in _parameters_of(layers).items():
        names.setdefault(id(weight), []).append(name)
    return [
        {
            "parameters": sorted(name for weight in group["params"] for name in names[id(weight)]),
            "values": {
                name: _plain(name, value) for name, value in group.items() if name != "params"
            },
        }
        for group in optimizer.param_groups
    ]


def _merge_options(ranks: Sequence[Options]) -> Options:
    """Options of all ranks; groups with equal values become one.

    >>> first = {"parameters": ["0.w"], "values": {"lr": 0.1}}
    >>> second = {"parameters": ["1.w"], "values": {"lr": 0.1}}
    >>> _merge_options([[first], [second]])
    [{'parameters': ['0.w', '1.w'], 'values': {'lr': 0.1}}]
    """
    groups: dict[str, tuple[Any, set[str]]] = {}
    for group in (group for options in ranks for group in options):
        key = json.dumps(group["values"], sort_keys=True)
        groups.setdefault(key, (group["values"], set()))[1].update(group["parameters"])
    return [{"parameters": sorted(names), "values": values} for values, names in groups.values()]


def _load_into(
    optimizer: Optimizer | None, layers: Layers, tensors: Mapping[str, Tensor], options: Options
) -> None:
    """Restore `_tensors_of` and `_merge_options`.

    Parameters without saved state start from scratch. ConfigError if parameters of one group had
    different options.
    """
    if optimizer is None:
        return
    values_of = {name: group["values"] for group in options for name in group["parameters"]}
    names = {id(weight): name for name, weight in _parameters_of(layers).items()}
    fields: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, field = key.rpartition(".")
        fields.setdefault(name, {})[field] = value
    state: dict[str, Any] = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    for group, optimizer_group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        members = [names[id(weight)] for weight in optimizer_group["params"]]
        saved = [values_of[name] for name in members if name in values_of]
        if any(values != saved[0] for values in saved):
            raise ConfigError(
                "parameters of one group were saved with different options: group them as they were"
            )
        group.update(saved[0] if saved else {})
        numbered = zip(group["params"], members, strict=True)
        state["state"] |= {number: fields[name] for number, name in numbered if name in fields}
    optimizer.load_state_dict(state)


def _plain(name: str, value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        raise ConfigError(
            f"the optimizer's {name} is {value!r}; only plain numbers and names are saved"
        ) from None


@contextmanager
def _torch_errors(path: Path, action: str) -> Iterator[bool]:
    """Turn torch's errors of reading or writing a state into a DataError, on all ranks.

    Yields whether this is the only process, of which torch would warn.
    """
    with warnings.catch_warnings(), world_errors():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield not dist.is_initialized()
        except CheckpointException as error:  # a BaseException, but no Exception
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            if not isinstance(cause, Exception):
                raise cause from None  # an interrupt
            raise cannot(path, action, cause, rank) from cause
