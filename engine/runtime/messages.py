"""Tensors between ranks: `Mailbox` sends and receives them in an order that both sides know beforehand.

What goes from one rank to another is a list that follows from the schedule alone: the sender's operations in order, and
who waits for them. Receives are posted in that order, so nothing needs a tag, which NCCL would ignore. Each direction
of each pair of ranks has a communicator of its own: then sends in opposite directions cannot wait for each other, and
no order of operations can deadlock that the simulator runs to its end. A send never stops the sender.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from engine.program import Program
from engine.runtime.carries import Carry, Spec
from engine.runtime.groups import Groups, Pair


@dataclass(frozen=True, slots=True)
class Message:
    """A result that travels, by the operations that make it and that wait for it."""

    source: int
    target: int


def messages_of(program: Program) -> dict[Pair, list[Message]]:
    """What goes from rank to rank in a step, in the order in which it is made."""
    ranks = program.schedule.ranks.tolist()
    offsets, targets = program.edge_offsets.tolist(), program.edge_targets.tolist()
    found: dict[Pair, list[Message]] = {}
    for source, rank in enumerate(ranks):
        for target in targets[offsets[source] : offsets[source + 1]]:
            if ranks[target] != rank:
                found.setdefault((rank, ranks[target]), []).append(Message(source, target))
    return found


class PeerLost(RuntimeError):
    """Another rank of the pipeline does not answer any more."""


@dataclass(slots=True)
class _Inbox:
    """What comes from one other rank."""

    waiting: deque[Message]
    arrived: dict[Message, tuple[Carry, list[dist.Work]]] = field(default_factory=dict)


class Mailbox:
    """One rank's sends and receives of one step."""

    def __init__(
        self,
        groups: Groups,
        messages: Mapping[Pair, list[Message]],
        specs: Callable[[Message], Mapping[str, Spec]],
        device: torch.device,
    ) -> None:
        """`specs` says what a message holds; only tensors that are not empty travel."""
        self._groups, self._specs, self._device = groups, specs, device
        self._inboxes = {pair[0]: _Inbox(deque(own)) for pair, own in messages.items() if pair[1] == groups.rank}
        self._sent: list[tuple[dist.Work, Tensor]] = []
        for sender in self._inboxes:
            self._post(sender)

    def send(self, message: Message, receiver: int, carry: Mapping[str, Tensor]) -> None:
        """Send a message's tensors; they are kept until they have arrived."""
        group = self._groups.links[self._groups.rank, receiver]
        for name, spec in sorted(self._specs(message).items()):
            if not spec.is_empty:
                tensor = carry[name].detach().to(spec.dtype).contiguous()
                if tuple(tensor.shape) != spec.shape:
                    raise ValueError(f"{name} has shape {tuple(tensor.shape)}, its spec says {spec.shape}")
                self._sent.append((self._begin(dist.isend, tensor, receiver, group), tensor))

    def receive(self, message: Message, sender: int) -> Carry:
        """A message's tensors, when they are there."""
        inbox = self._inboxes[sender]
        while message not in inbox.arrived:
            self._post(sender)
        carry, works = inbox.arrived.pop(message)
        for work in works:
            self._wait(work, sender)
        self._post(sender)  # the next one may come while this one is worked on
        return carry

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self._sent:
            self._wait(work, None)
        self._sent.clear()

    def _post(self, sender: int) -> None:
        """Begin to receive the next message of a rank."""
        inbox = self._inboxes[sender]
        if not inbox.waiting:
            return
        message = inbox.waiting.popleft()
        group = self._groups.links[sender, self._groups.rank]
        carry: Carry = {}
        works = []
        for name, spec in sorted(self._specs(message).items()):
            carry[name] = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            if not spec.is_empty:
                works.append(self._begin(dist.irecv, carry[name], sender, group))
        inbox.arrived[message] = carry, works

    def _begin(
        self, operation: Callable[..., dist.Work | None], tensor: Tensor, other: int, group: dist.ProcessGroup
    ) -> dist.Work:
        try:
            work = operation(tensor, self._groups.ranks[other], group=group)
        except RuntimeError as error:
            raise PeerLost(self._lost(other, error)) from error
        assert work is not None  # this process is of the group
        return work

    def _wait(self, work: dist.Work, other: int | None) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(self._lost(other, error)) from error

    def _lost(self, other: int | None, error: Exception) -> str:
        who = "another rank" if other is None else f"rank {other}"
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return f"rank {self._groups.rank} of the pipeline lost {who}: {first}"
