"""Inputs of a running pipeline's stages, to measure layers singly."""

import torch
import torch.distributed as dist

from engine.runtime.communication.process_groups import ProcessGroups
from engine.runtime.errors import peer_errors
from engine.runtime.profiling.layer_timing import IsolatedLayer
from engine.runtime.stage_executor import RankLayers
from engine.runtime.stage_io import Batch, StageTensors, check_tensors, samples_text


def stage_inputs(local: RankLayers, groups: ProcessGroups, batch: Batch) -> dict[int, StageTensors]:
    """Inputs of this rank's stages: a micro-batch passes the whole model, forward only."""
    inputs: dict[int, StageTensors] = {}
    tensors: StageTensors = {}
    for stage in range(len(local.borders) - 1):
        tensors = _pass_on(local, groups, stage, batch, tensors)
        if stage % len(groups.ranks) == groups.rank:
            inputs[stage] = tensors
            with torch.no_grad():
                for index in local.stage_layers(stage):
                    layer = isolate(local, index, batch, tensors)
                    tensors = layer.forward(layer.leaves())
    return inputs


def isolate(local: RankLayers, index: int, batch: Batch, given: StageTensors) -> IsolatedLayer:
    """A layer of this rank with the output of the one before."""
    specs = local.specs(index, batch) if index else {}
    if index:
        check_tensors(given, specs, f"the output of layer {index - 1} ({samples_text(batch)})")
    return IsolatedLayer(
        layer=local.layers[index],
        batch=batch,
        given=given,
        specs=specs,
        has_gradient=local.has_gradient(index),
        device=local.device,
        context=local.context,
    )


def _pass_on(
    local: RankLayers, groups: ProcessGroups, stage: int, batch: Batch, made: StageTensors
) -> StageTensors:
    """A stage's input, on its rank; the rank of the stage before sends it."""
    num_ranks = len(groups.ranks)
    sender, receiver = (stage - 1) % num_ranks, stage % num_ranks
    if not stage or sender == receiver or groups.rank not in (sender, receiver):
        return made
    is_sender = groups.rank == sender
    other, tensors = groups.ranks[receiver if is_sender else sender], dict[str, torch.Tensor]()
    for name, spec in sorted(local.specs(local.borders[stage], batch).items()):
        if is_sender:
            tensors[name] = made[name].to(spec.dtype).contiguous()
        else:
            tensors[name] = torch.empty(spec.shape, dtype=spec.dtype, device=local.device)
        if not spec.is_empty:
            with peer_errors(groups.ranks, other):
                (dist.send if is_sender else dist.recv)(
                    tensors[name], other, group=groups.links[sender, receiver]
                )
    return tensors
