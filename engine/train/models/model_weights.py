"""Weights of a model of transformers, made where they are needed: `LazyWeights`.

The model is on the meta device. Each rank fills the layers that it runs, with tensors of the
folder's safetensors files or with random numbers, and reads no others. Files are read through a
mapping of `BLOCK_BYTES` at a time, since pages that are mapped count as memory of the process.
"""

import importlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isobatch.common.errors import ConfigError, first_line
from isobatch.engine.runtime.stage_io import set_values

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of transformers: of one file, and of the table of several."""
READABLE = ("F64", "F32", "BF16", "F16")
BLOCK_BYTES = 64 << 20


class StoredWeight(NamedTuple):
    """A tensor in a file."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


class LazyWeights:
    """Where the values of a model's parameters come from, and which have none yet."""

    def __init__(self, model: Any, folder: Path | None, seed: int) -> None:
        """ConfigError unless the files of `folder` have all weights; None: they are random."""
        self._model, self._seed = model, seed
        self._names = {id(weight): name for name, weight in model.named_parameters()}
        self._stored: dict[int, list[StoredWeight]] = {}
        if folder is not None:
            self._stored = _find(model, folder)

    def fill(self, weights: Iterable[nn.Parameter]) -> None:
        """Give those that are on the meta device memory of the CPU and their values, in float32.

        Values depend on neither the other weights nor the order of calls. ConfigError if a file
        cannot be read.
        """
        lacking = [weight for weight in dict.fromkeys(weights) if weight.is_meta]
        for weight in lacking:
            set_values(weight, torch.empty(weight.shape, dtype=torch.float32))
        with torch.no_grad():
            if self._stored:
                for weight in lacking:
                    _read(self._stored[id(weight)], weight)
            else:
                self._draw([self._names[id(weight)] for weight in lacking])
        for weight in lacking:
            weight._is_hf_initialized = True  # type: ignore[attr-defined]  # then left as it is

    def values(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Values of parameters by name, also of those that no layer here has."""
        weights = {name: self._model.get_parameter(name) for name in names}
        self.fill(weights.values())
        return {name: weight.detach() for name, weight in weights.items()}

    def _draw(self, names: Iterable[str]) -> None:
        """Initialise as transformers does, but with a seed for each module's path.

        So weights are the same on every layout. A module initialises its own parameters and may
        change its children's (CLIP): those come first.
        """
        parts = [name.split(".") for name in names]
        paths = {tuple(path[:length]) for path in parts for length in range(len(path))}
        for path in sorted(paths, key=lambda path: (-len(path), path)):
            modules = [self._model]
            for name in path:
                modules.append(getattr(modules[-1], name))
            init = next(one._init_weights for one in modules[::-1] if hasattr(one, "_init_weights"))
            text = f"{self._seed} {'.'.join(path)}"
            digest = blake2b(text.encode(), digest_size=7).digest()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int.from_bytes(digest, "little"))
                init(modules[-1])


def _find(model: Any, folder: Path) -> dict[int, list[StoredWeight]]:
    """Where the files have each parameter, by id; tied ones may have several places. ConfigError
    if one is missing, of another shape or of a dtype that is not trained."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found: dict[int, list[StoredWeight]] = {}
    for name, stored in _named(model, _stored_weights(folder)):
        weight = parameters.get(name)
        if weight is None:
            continue
        where = f"{folder}: {stored.key} in {stored.file.name}"
        if stored.shape != tuple(weight.shape):
            raise ConfigError(
                f"{where} has the shape {stored.shape}, config.json asks for"
                f" {tuple(weight.shape)}: give the config.json of these weights"
            )
        if stored.dtype not in READABLE:
            raise ConfigError(
                f"{where} is {stored.dtype}, which is not trained: give a folder with weights of"
                f" {', '.join(READABLE)}"
            )
        found.setdefault(id(weight), []).append(stored)
    missing = sorted(name for name, weight in model.named_parameters() if id(weight) not in found)
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} weights that its config.json asks for, as"
            f" {missing[0]}: give a folder with all, or config.json for random ones"
        )
    return found


def _named(model: Any, weights: Iterable[StoredWeight]) -> Iterator[tuple[str, StoredWeight]]:
    """Weights with the names that the model's modules have for them, as `from_pretrained` maps."""
    mapping = importlib.import_module("transformers.conversion_mapping")
    loading = importlib.import_module("transformers.core_model_loading")
    # the first versions 5 have a part of the names' mapping in the class
    of_class = getattr(type(model), "_checkpoint_conversion_mapping", None) or None
    conversions = mapping.get_model_conversion_mapping(model, of_class)
    kinds = loading.WeightRenaming, loading.WeightConverter
    renamings, converters = (
        [one for one in conversions if isinstance(one, kind)] for kind in kinds
    )
    prefix, names = model.base_model_prefix, model.state_dict()
    for weight in weights:
        name, pattern = loading.rename_source_key(weight.key, renamings, converters, prefix, names)
        if name not in names and weight.key in names:
            name, pattern = weight.key, None
        # what a converter joins or splits is reported as missing: no family here needs one
        if pattern is None:
            yield name, weight


def _stored_weights(folder: Path) -> list[StoredWeight]:
    """All tensors of a folder's safetensors files. ConfigError if they cannot be read."""
    pickles = sorted(folder.glob("*.bin"))
    if pickles and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{folder}: {pickles[0].name} is a pickle, which could run code; load them where you"
            " trust them, and save_pretrained writes safetensors"
        )
    with reading(folder):
        return [weight for name in _file_names(folder) for weight in weights_of(folder / name)]


def weights_of(file: Path) -> list[StoredWeight]:
    """Tensors of a safetensors file."""
    with _opened(file) as opened:
        parts = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        return [
            StoredWeight(file, key, tuple(part.get_shape()), part.get_dtype())
            for key, part in parts.items()
        ]


def _file_names(folder: Path) -> list[str]:
    """Names of the files with weights, as transformers chooses them."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return [WEIGHTS]
    table = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    try:
        # a table may name no file outside of its folder
        return sorted({Path(name).name for name in table["weight_map"].values()})
    except (AttributeError, KeyError, TypeError):
        raise ConfigError(f"{folder / INDEX} has no weight_map: copy the folder again") from None


def _read(places: list[StoredWeight], weight: Tensor) -> None:
    """Copy a tensor from its file; ConfigError if its places differ, or cannot be read."""
    first = places[0]
    rows = max(1, BLOCK_BYTES // max(1, 4 * prod(first.shape[1:])))
    borders = [*range(0, first.shape[0], rows), first.shape[0]] if first.shape else [0, 0]
    for start, end in pairwise(borders):
        part = slice(start, end) if first.shape else ...
        for place in places:
            with reading(place.file.parent), _opened(place.file) as opened:
                values = opened.get_slice(place.key)[part]
                if place is first:
                    weight[part] = values
                elif not torch.equal(weight[part], values.float()):
                    raise ConfigError(
                        f"{first.file.parent}: {first.key} and {place.key} are tied by config.json,"
                        " but differ: give the config.json of these weights"
                    )


def _opened(file: Path) -> Any:
    return importlib.import_module("safetensors").safe_open(file, framework="pt")


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn errors of reading a model into a ConfigError of one line."""
    errors = (
        OSError,
        ValueError,
        RuntimeError,
        importlib.import_module("safetensors").SafetensorError,
    )
    try:
        yield
    except ConfigError:
        raise
    except errors as error:
        raise ConfigError(f"{path}: {first_line(error)}") from error
