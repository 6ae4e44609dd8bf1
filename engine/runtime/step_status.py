"""How a step ended, told alike to all ranks of all replicas: its losses, or why what it made is
void.

One small message in each pipeline, and one between replicas; texts travel only if something went
wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from engine.planning.adaptive_recompute import OutOfMemory
from engine.runtime.communication.process_groups import ProcessGroups
from engine.runtime.errors import LossNotFinite, peers
from engine.runtime.oom_recovery import uncounted
from engine.runtime.stage_io import Batch, ids_text
from engine.simulator.schedule import PassKind, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trouble:
    """Why a step is void."""

    text: str
    stage: int | None = None
    """That ran out of memory; None if a loss is not finite."""


class Outcome:
    """What the ranks of one replica know of a step, each its own part until they `agree`."""

    def __init__(
        self,
        groups: ProcessGroups,
        schedule: Schedule,
        batches: Sequence[Batch],
        device: torch.device,
    ) -> None:
        self._groups, self._schedule, self._batches = groups, schedule, batches
        with uncounted():
            # losses of micro-batches; then, of each rank that ran out of memory, 1 + at which
            # action
            self._told = torch.zeros(
                len(batches) + len(groups.ranks), dtype=torch.float64, device=device
            )

    def note_loss(self, number: int, loss: Tensor) -> None:
        """The loss of a micro-batch; without waiting for it."""
        self._told[number] = loss

    def note_out_of_memory(self, place: int) -> None:
        """That this rank ran out of memory at an action of the schedule."""
        with uncounted():
            self._told[len(self._batches) + self._groups.rank] = 1 + place

    def agree(self) -> NDArray[np.float64]:
        """The losses of all micro-batches of this replica, (micro_batches,).

        If any rank of any replica ran out of memory, OutOfMemory; else, if losses are not finite,
        LossNotFinite.
        """
        with uncounted():
            with peers(self._groups.ranks):
                dist.all_reduce(self._told, group=self._groups.pipeline)
            told = np.asarray(self._told.cpu().numpy(), np.float64)
            losses, ran_out = np.split(told, [len(self._batches)])
            # what a rank answers that ran out of memory is no number worth telling
            troubles = self._out_of_memory(ran_out) or self._not_finite(losses)
            everywhere = _of_all_replicas(troubles, self._groups, self._told.device)
        stages = sorted({trouble.stage for trouble in everywhere if trouble.stage is not None})
        if stages:
            raise OutOfMemory(
                stages, [trouble.text for trouble in everywhere if trouble.stage is not None]
            )
        if everywhere:
            texts = "; ".join(trouble.text for trouble in everywhere)
            raise LossNotFinite(
                f"the loss is not finite; the gradients of this step are void: {texts}"
            )
        return losses

    def _out_of_memory(self, ran_out: NDArray[np.float64]) -> list[_Trouble]:
        found = []
        for rank in np.flatnonzero(ran_out).tolist():
            action = self._schedule.action(int(ran_out[rank]) - 1)
            # who encodes ahead does it for the first stage, in the memory of his own
            stage = rank if action.kind == PassKind.ENCODE else action.stage
            where = f"{action} of replica {self._groups.replica}, {ids_text(self._batches[action.micro_batch])}"
            found.append(_Trouble(text=where, stage=stage))
        return found

    def _not_finite(self, losses: NDArray[np.float64]) -> list[_Trouble]:
        replica = self._groups.replica
        return [
            _Trouble(
                text=f"{losses[number]} in micro-batch {number} of replica {replica}, {ids_text(self._batches[number])}"
            )
            for number in np.flatnonzero(~np.isfinite(losses)).tolist()
        ]


def _of_all_replicas(
    own: list[_Trouble], groups: ProcessGroups, device: torch.device
) -> list[_Trouble]:
    """What any replica says."""
    if groups.replicas is None:
        return own
    count = torch.tensor(len(own), device=device)
    told: list[list[_Trouble]] = [[] for _ in range(dist.get_world_size(groups.replicas))]
    with peers(dist.get_process_group_ranks(groups.replicas)):
        dist.all_reduce(count, group=groups.replicas)
        if int(count):
            dist.all_gather_object(told, own, group=groups.replicas)
    return [trouble for troubles in told for trouble in troubles]
