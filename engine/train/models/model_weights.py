"""Weights of a model of transformers, made where they are needed: `LazyWeights`.

The model is on the meta device. Each rank fills the layers that it runs, with tensors of the
folder's safetensors files or with random numbers. A file is mapped for `BLOCK_BYTES` at a time,
since pages that were read count as memory of the process while they are mapped.
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
READABLE = ("F64", "F32", "BF16", "F16")
BLOCK_BYTES = 64 << 20


class StoredWeight(NamedTuple):
    """A tensor in a file."""

    file: Path
    key: str
    shape: list[int]
    dtype: str


class LazyWeights:
    """Values of a model's parameters, which have none until a layer needs them."""

    def __init__(self, model: Any, folder: Path | None, seed: int) -> None:
        """ConfigError unless the files of `folder` have all weights; None: they are random."""
        self._model, self._seed = model, seed
        self._names = {id(weight): name for name, weight in model.named_parameters()}
        self._stored = None if folder is None else _find(model, folder)

    def fill(self, weights: Iterable[nn.Parameter]) -> None:
        """Give parameters on the meta device float32 values, on the CPU; others keep theirs.

        Those of a layer depend on neither the other layers nor the order of calls. ConfigError if a
        file cannot be read.
        """
        known = [weight for weight in dict.fromkeys(weights) if id(weight) in self._names]
        lacking = [weight for weight in known if weight.is_meta]
        for weight in lacking:
            set_values(weight, torch.empty(weight.shape, dtype=torch.float32))
        with torch.no_grad():
            if self._stored is None:
                self._draw([self._names[id(weight)] for weight in lacking])
            else:
                for weight in lacking:
                    _read(self._stored[self._names[id(weight)]], weight)
        for weight in lacking:
            weight._is_hf_initialized = True  # type: ignore[attr-defined]  # for transformers

    def value(self, name: str) -> Tensor:
        """Value of a parameter, filled if no layer here has it."""
        weight = self._model.get_parameter(name)
        self.fill([weight])
        return weight.detach()  # type: ignore[no-any-return]

    def _draw(self, names: Iterable[str]) -> None:
        """Initialise as transformers does, with a seed for each module: the same on every layout.

        A module may change its children's parameters (CLIP): those come first.
        """
        parts = [name.split(".") for name in names]
        paths = {tuple(path[:length]) for path in parts for length in range(len(path))}
        for path in sorted(paths, key=lambda path: (-len(path), path)):
            modules = [self._model]
            for name in path:
                modules.append(getattr(modules[-1], name))
            init = next(one._init_weights for one in modules[::-1] if hasattr(one, "_init_weights"))
            text = f"{self._seed} {'.'.join(path)}"
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(blake2b(text.encode(), digest_size=7).hexdigest(), 16))
                init(modules[-1])


def weights_of(file: Path) -> list[StoredWeight]:
    """Tensors of a safetensors file."""
    with _opened(file) as opened:
        parts = [(key, opened.get_slice(key)) for key in opened.keys()]  # noqa: SIM118
        return [StoredWeight(file, key, part.get_shape(), part.get_dtype()) for key, part in parts]


def _find(model: Any, folder: Path) -> dict[str, list[StoredWeight]]:
    """Where files have each parameter; a tied one may have several places. ConfigError."""
    pickles = sorted(folder.glob("*.bin"))
    if pickles and not any(folder.glob("*.safetensors")):
        advice = "load them where you trust them, and save_pretrained writes safetensors"
        raise ConfigError(
            f"{folder}: {pickles[0].name} is a pickle, which could run code; {advice}"
        )
    with reading(folder):
        names = {WEIGHTS}
        if (folder / INDEX).exists() and not (folder / WEIGHTS).exists():
            table = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            names = {Path(name).name for name in table.values()}  # none outside of the folder
        stored = [weight for name in sorted(names) for weight in weights_of(folder / name)]
    first_names = {id(weight): name for name, weight in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places: dict[str, list[StoredWeight]] = {name: [] for name in first_names.values()}
    for name, weight in _named(model, stored):
        if name not in parameters:
            continue
        shape = list(parameters[name].shape)
        problem = None
        if weight.shape != shape:
            problem = f"has the shape {weight.shape}, config.json asks for {shape}: give its own"
        elif weight.dtype not in READABLE:
            problem = f"is {weight.dtype}, which is not trained: give {', '.join(READABLE)}"
        if problem is not None:
            raise ConfigError(f"{folder}: {weight.key} in {weight.file.name} {problem}")
        places[first_names[id(parameters[name])]].append(weight)
    missing = [name for name, found in places.items() if not found]
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} weights that its config.json asks for, as"
            f" {missing[0]}: give a folder with all, or config.json for random ones"
        )
    return places


def _named(model: Any, stored: Iterable[StoredWeight]) -> Iterator[tuple[str, StoredWeight]]:
    """Stored weights with their names in the model's modules, as `from_pretrained` maps them."""
    mapping = importlib.import_module("transformers.conversion_mapping")
    loading = importlib.import_module("transformers.core_model_loading")
    # the first versions 5 have a part of the mapping in the class
    of_class = getattr(type(model), "_checkpoint_conversion_mapping", None) or None
    conversions = mapping.get_model_conversion_mapping(model, of_class)
    kinds = loading.WeightRenaming, loading.WeightConverter
    rules = [[one for one in conversions if isinstance(one, kind)] for kind in kinds]
    prefix, names = model.base_model_prefix, model.state_dict()
    for weight in stored:
        name, converter = loading.rename_source_key(weight.key, *rules, prefix, names)
        if name not in names and weight.key in names:
            name, converter = weight.key, None
        # what a converter would join or split is missing then: no family here has such weights
        if converter is None:
            yield name, weight


def _read(places: list[StoredWeight], weight: Tensor) -> None:
    """Copy a tensor from its file; ConfigError if that fails, or tied ones differ."""
    shape = places[0].shape or [1]
    rows = max(1, BLOCK_BYTES // max(1, 4 * prod(shape[1:])))
    for start, end in pairwise([*range(0, shape[0], rows), shape[0]]):
        part = slice(start, end) if places[0].shape else ...
        for number, (file, key, *_) in enumerate(places):
            with reading(file.parent), _opened(file) as opened:
                values = opened.get_slice(key)[part]
                if not number:
                    weight[part] = values
                elif not torch.equal(weight[part], values.float()):
                    raise ConfigError(
                        f"{file.parent}: {places[0].key} and {key} are tied by config.json, but"
                        " differ: give the config.json of these weights"
                    )


def _opened(file: Path) -> Any:
    return importlib.import_module("safetensors").safe_open(file, framework="pt")


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """ConfigError, of one line, for errors of reading a model."""
    damaged = importlib.import_module("safetensors").SafetensorError
    try:
        yield
    except ConfigError:
        raise
    except (
        OSError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        RuntimeError,
        damaged,
    ) as error:
        raise ConfigError(f"{path}: {first_line(error)}") from error
