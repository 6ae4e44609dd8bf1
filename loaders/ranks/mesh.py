"""Which data-parallel rank this is, by a device mesh."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from isobatch.common.errors import ConfigError

_SAME_DATA = {"tp", "cp", "sp", "pp"}
"""Dimensions of a mesh whose ranks work on the same samples."""


def mesh_ranks(mesh: DeviceMesh, dp_dims: Sequence[str] | None) -> tuple[int, int]:
    """(dp_rank, dp_world_size) of this process: its place in the data-parallel dimensions."""
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    place = mesh.get_coordinate()
    rank = 0
    size = 1
    if place is None:
        raise ConfigError(f"device_mesh {mesh} is without rank {dist.get_rank()}; give its own")
    for name in data_dims(names, dp_dims):
        dim = names.index(name)
        rank, size = rank * mesh.size(dim) + place[dim], size * mesh.size(dim)
    return rank, size


def data_dims(names: Sequence[str], chosen: Sequence[str] | None = None) -> list[str]:
    """The data-parallel dimensions of a mesh, in its order. ConfigError if that is not clear.

    "fsdp" and "ep", for example, may hold context parallelism, or not.
    """
    known = ", ".join(names)
    if chosen is not None:
        chosen = [chosen] if isinstance(chosen, str) else chosen
        if unknown := [name for name in chosen if name not in names]:
            raise ConfigError(f"dp_dims has {', '.join(unknown)}; the device_mesh has {known}")
        return [name for name in names if name in chosen]
    dims = []
    for name in names:
        parts = name.split("_")
        if name in _SAME_DATA:
            continue
        if _SAME_DATA & set(parts) or (parts[0] not in {"dp", "ddp"} and len(names) > 1):
            raise ConfigError(
                f"device_mesh has the dimensions {known}, and {name} may be data parallel or not; "
                "name those that are in dp_dims"
            )
        dims.append(name)
    return dims


def data_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The group of the data-parallel ranks of a mesh; a group, or None for all ranks, as it is.

    ConfigError for a mesh of several data-parallel dimensions.
    """
    if not isinstance(group, DeviceMesh):
        return group
    names = group.mesh_dim_names
    if group.ndim == 1:
        return group.get_group()
    dims = data_dims(names or tuple(map(str, range(group.ndim))))
    if len(dims) != 1:
        raise ConfigError(
            f"device_mesh has the data-parallel dimensions {', '.join(dims) or '(none)'}; give the "
            "group of them all together, e.g. mesh[...] of one dimension"
        )
    return group.get_group(dims[0])
