"""What the stages of a running pipeline begin with, so that their layers can be looked at one by
one.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from engine.runtime.communication.process_groups import ProcessGroups
from engine.runtime.errors import peers
from engine.runtime.profiling.layer_timing import LayerAlone
from engine.runtime.stage_executor import RankLayers
from engine.runtime.stage_io import Batch, StageTensors, check_carry, ids_text


def stage_inputs(own: RankLayers, groups: ProcessGroups, batch: Batch) -> dict[int, StageTensors]:
    """What this rank's stages begin with, by stage: a micro-batch goes through the whole model,
    forward only.
    """
    given: dict[int, StageTensors] = {}
    carry: StageTensors = {}
    for stage in range(len(own.borders) - 1):
        carry = _hand_on(own, groups, stage, batch, carry)
        if stage % len(groups.ranks) == groups.rank:
            given[stage] = carry
            with torch.no_grad():
                for place in own.of_stage(stage):
                    alone = cut_off(own, place, batch, carry)
                    carry = alone.forward(alone.leaves())
    return given


def cut_off(own: RankLayers, place: int, batch: Batch, given: StageTensors) -> LayerAlone:
    """A layer of this rank with what the one before gave."""
    specs = own.specs(place, batch) if place else {}
    if place:
        check_carry(given, specs, f"what layer {place - 1} gives ({ids_text(batch)})")
    return LayerAlone(
        layer=own.layers[place],
        batch=batch,
        given=given,
        specs=specs,
        flows=own.gradient_comes(place),
        device=own.device,
        context=own.context,
    )


def _hand_on(
    own: RankLayers, groups: ProcessGroups, stage: int, batch: Batch, made: StageTensors
) -> StageTensors:
    """What a stage begins with, on the rank that runs it; the rank of the stage before sends it."""
    num_ranks = len(groups.ranks)
    sender, receiver = (stage - 1) % num_ranks, stage % num_ranks
    if not stage or sender == receiver or groups.rank not in (sender, receiver):
        return made
    is_sender = groups.rank == sender
    other, carry = groups.ranks[receiver if is_sender else sender], dict[str, torch.Tensor]()
    for name, spec in sorted(own.specs(own.borders[stage], batch).items()):
        if is_sender:
            carry[name] = made[name].to(spec.dtype).contiguous()
        else:
            carry[name] = torch.empty(spec.shape, dtype=spec.dtype, device=own.device)
        if not spec.is_empty:
            with peers(groups.ranks, other):
                (dist.send if is_sender else dist.recv)(
                    carry[name], other, group=groups.links[sender, receiver]
                )
    return carry
