"""Pipelines that use a model temporarily and restore it."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from balance.errors import IsobatchError
from engine.runtime.errors import PeerLost
from engine.runtime.stage_io import LayerStack


@contextmanager
def temporary_pipelines(model: LayerStack) -> Iterator[None]:
    """Afterwards layers are on their devices again, without gradients or new process groups.

    Nothing is restored if a rank is lost, which ends the run.
    """
    devices = [_device_of(layer) for layer in model.layers]
    groups = set(dist.distributed_c10d._world.pg_map)
    try:
        yield
    except PeerLost:
        raise
    except IsobatchError:
        _restore(model, devices, groups)
        raise
    _restore(model, devices, groups)


def _restore(
    model: LayerStack, devices: list[torch.device | None], groups: set[dist.ProcessGroup]
) -> None:
    # in the order in which all ranks made them: NCCL's ranks wait for each other here
    for group in [group for group in dist.distributed_c10d._world.pg_map if group not in groups]:
        dist.destroy_process_group(group)
    for layer, device in zip(model.layers, devices, strict=True):
        layer.zero_grad(set_to_none=True)
        if device is not None:
            layer.to(device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _device_of(layer: nn.Module) -> torch.device | None:
    return next((tensor.device for tensor in chain(layer.parameters(), layer.buffers())), None)
