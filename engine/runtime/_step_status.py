"""Status of a step, agreed by all ranks: losses, or why it is invalid.

Costs one small message in each pipeline and one between replicas; texts are sent only on failure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from isobatch.engine.planning.adaptive_recompute import OutOfMemory
from isobatch.engine.runtime.communication.collectives import all_reduce
from isobatch.engine.runtime.communication.process_groups import ProcessGroups
from isobatch.engine.runtime.cpu_memory import uncounted
from isobatch.engine.runtime.errors import LossNotFinite, peer_errors
from isobatch.engine.runtime.stage_io import Batch, samples_text
from isobatch.engine.simulator.schedule import PassKind, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why a step's gradients are invalid."""

    text: str
    stage: int | None = None
    """Stage that ran out of memory; None if a loss is not finite."""


class StepStatus:
    """Losses and failures of one replica's step, each rank its own part until `agree`."""

    def __init__(
        self,
        groups: ProcessGroups,
        schedule: Schedule,
        batches: Sequence[Batch],
        device: torch.device,
    ) -> None:
        self._groups, self._schedule, self._batches = groups, schedule, batches
        with uncounted():
            # losses of micro-batches; then, per rank, 1 + the action that ran out of memory, or 0
            self._values = torch.zeros(
                len(batches) + len(groups.ranks), dtype=torch.float64, device=device
            )

    def note_loss(self, number: int, loss: Tensor) -> None:
        """Record the loss of a micro-batch, without waiting for the GPU."""
        self._values[number] = loss

    def note_out_of_memory(self, action: int) -> None:
        """Record the action of the schedule at which this rank ran out of memory."""
        with uncounted():
            self._values[len(self._batches) + self._groups.rank] = 1 + action

    def agree(self) -> NDArray[np.float64]:
        """Losses of this replica's micro-batches, (micro_batches,). All ranks call it.

        Errors: OutOfMemory of any rank of any replica; without one, LossNotFinite.
        """
        with uncounted():
            all_reduce(self._values, self._groups.pipeline)
            values = np.asarray(self._values.cpu().numpy(), np.float64)
            losses, actions = np.split(values, [len(self._batches)])
            # losses after a lack of memory come from zeros: not worth reporting
            local_failures = self._out_of_memory(actions) or self._not_finite(losses)
            failures = _of_all_replicas(local_failures, self._groups, self._values.device)
        stages = {failure.stage for failure in failures if failure.stage is not None}
        if stages:
            passes = [failure.text for failure in failures if failure.stage is not None]
            raise OutOfMemory(sorted(stages), passes)
        if failures:
            texts = "; ".join(failure.text for failure in failures)
            raise LossNotFinite(
                f"the loss is not finite; the gradients of this step are invalid: {texts}"
            )
        return losses

    def _out_of_memory(self, actions: NDArray[np.float64]) -> list[_Failure]:
        failures = []
        for rank in np.flatnonzero(actions).tolist():
            action = self._schedule.action(int(actions[rank]) - 1)
            # a rank that encodes ahead for the first stage does so in its own memory
            stage = rank if action.kind == PassKind.ENCODE else action.stage
            samples = samples_text(self._batches[action.micro_batch])
            text = f"{action} of replica {self._groups.replica}, {samples}"
            failures.append(_Failure(text=text, stage=stage))
        return failures

    def _not_finite(self, losses: NDArray[np.float64]) -> list[_Failure]:
        replica = self._groups.replica
        return [
            _Failure(
                text=f"{losses[number]} in micro-batch {number} of replica {replica},"
                f" {samples_text(self._batches[number])}"
            )
            for number in np.flatnonzero(~np.isfinite(losses)).tolist()
        ]


def _of_all_replicas(
    local_failures: list[_Failure], groups: ProcessGroups, device: torch.device
) -> list[_Failure]:
    if groups.replicas is None:
        return local_failures
    count = torch.tensor(len(local_failures), device=device)
    failures: list[list[_Failure]] = [[] for _ in range(dist.get_world_size(groups.replicas))]
    all_reduce(count, groups.replicas)
    if int(count):
        with peer_errors(dist.get_process_group_ranks(groups.replicas)):
            dist.all_gather_object(failures, local_failures, group=groups.replicas)
    return [failure for replica in failures for failure in replica]
