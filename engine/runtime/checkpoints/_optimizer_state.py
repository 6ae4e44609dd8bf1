"""An optimizer's state by parameter name, independent of ranks.

Two parts: tensors, such as Adam's moments, and options, such as learning rates. A tied parameter
has several names and the same state under each, because its layers may move to different ranks.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.optimizer.main_weights import main_param

Layers = Mapping[int, nn.Module]
"""A rank's layers by index in the model: `Pipeline.layers`."""
Options = list[dict[str, Any]]
"""Parameter groups in plain JSON: the names of `parameters` and the optimizer's `values`."""


def parameters_of(layers: Layers) -> dict[str, nn.Parameter]:
    """The optimizer's parameters by name, `index.name in the layer`; a tied one has several."""
    return {
        f"{index}.{name}": main_param(weight)
        for index, layer in layers.items()
        for name, weight in layer.named_parameters(remove_duplicate=False)
    }


def tensors_of(layers: Layers, optimizer: Optimizer) -> dict[str, Tensor]:
    """State of each parameter by `name.field`. ConfigError if it has anything but tensors."""
    tensors: dict[str, Tensor] = {}
    for name, weight in parameters_of(layers).items():
        for field, value in optimizer.state.get(weight, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{field}"] = value
            elif value is not None:
                raise ConfigError(
                    f"the optimizer keeps {field}, a {type(value).__name__}; only tensors are saved"
                )
    return tensors


def options_of(layers: Layers, optimizer: Optimizer) -> Options:
    """Options for this rank's parameters. ConfigError for an option that JSON cannot hold."""
    names: dict[int, list[str]] = {}
    for name, weight in parameters_of(layers).items():
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


def merge_options(ranks: Sequence[Options]) -> Options:
    """Options of all ranks; groups with equal values become one.

    >>> first = {"parameters": ["0.w"], "values": {"lr": 0.1}}
    >>> second = {"parameters": ["1.w"], "values": {"lr": 0.1}}
    >>> merge_options([[first], [second]])
    [{'parameters': ['0.w', '1.w'], 'values': {'lr': 0.1}}]
    """
    groups: dict[str, tuple[Any, set[str]]] = {}
    for group in (group for options in ranks for group in options):
        key = json.dumps(group["values"], sort_keys=True)
        groups.setdefault(key, (group["values"], set()))[1].update(group["parameters"])
    return [{"parameters": sorted(names), "values": values} for values, names in groups.values()]


def load_into(
    optimizer: Optimizer | None, layers: Layers, tensors: Mapping[str, Tensor], options: Options
) -> None:
    """Restore `tensors_of` and `merge_options`. Parameters without saved state start from scratch.

    ConfigError if parameters of one group had different options.
    """
    if optimizer is None:
        return
    values_of = {name: group["values"] for group in options for name in group["parameters"]}
    names = {id(weight): name for name, weight in parameters_of(layers).items()}
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
