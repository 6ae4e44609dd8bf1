"""Tensors between ranks: `P2PQueue` sends and receives them in an order that both sides know
beforehand.

What goes from one rank to another is a list that follows from the schedule alone: the sender's
operations in order, and who waits for them. Receives are posted in that order, so nothing needs a
tag, which NCCL would ignore. Each direction of each pair of ranks has a communicator of its own:
then sends in opposite directions cannot wait for each other, and no order of operations can
deadlock that the simulator runs to its end. A send never stops the sender.

What was sent must stay in memory until it has arrived. NCCL tells; gloo does not before one waits
for it, but an answer tells: who makes a result has taken up all that its operations until then
waited for. So with gloo a rank holds no more than its schedule has under way, and what goes where
nothing comes back from, frozen stages' outputs, to the step's end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from engine.runtime.communication.p2p_schedule import Message, messages_of
from engine.runtime.communication.process_groups import Pair, ProcessGroups
from engine.runtime.errors import PeerLost, peers
from engine.runtime.stage_io import StageTensors, TensorSpec

__all__ = ["Message", "P2PQueue", "PeerLost", "messages_of"]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor on its way."""

    message: Message
    receiver: int
    tensor: Tensor
    work: dist.Work


@dataclass(slots=True)
class _Inbox:
    """What comes from one other rank."""

    waiting: deque[Message]
    arrived: dict[Message, tuple[StageTensors, list[dist.Work]]] = field(default_factory=dict)


class P2PQueue:
    """One rank's sends and receives of one step."""

    def __init__(
        self,
        groups: ProcessGroups,
        messages: Mapping[Pair, list[Message]],
        specs: Callable[[Message], Mapping[str, TensorSpec]],
        device: torch.device,
    ) -> None:
        """`specs` says what a message holds; only tensors that are not empty travel."""
        self._groups, self._specs, self._device = groups, specs, device
        self._inboxes = {
            pair[0]: _Inbox(deque(own)) for pair, own in messages.items() if pair[1] == groups.rank
        }
        self._sent: list[_Sent] = []
        # NCCL receives with a kernel that turns until something comes: it takes part of the GPU
        # from passes, and what waits for the whole GPU meanwhile (memory given back, a kernel
        # loaded) would do so for ever, if this rank itself must send something first
        self._on_gpu = device.type == "cuda"
        if not self._on_gpu:
            for sender in self._inboxes:
                self._post(sender)

    def send(self, message: Message, receiver: int, carry: Mapping[str, Tensor]) -> None:
        """Send a message's tensors, which are as their specs say; they are kept until they have
        arrived.
        """
        group = self._groups.links[self._groups.rank, receiver]
        self._let_go(lambda _: False)
        for name, spec in sorted(self._specs(message).items()):
            if not spec.is_empty:
                tensor = carry[name].detach().to(spec.dtype).contiguous()
                work = self._begin(dist.isend, tensor, receiver, group)
                self._sent.append(_Sent(message, receiver, tensor, work))

    def receive(self, message: Message, sender: int) -> StageTensors:
        """A message's tensors, when they are there."""
        inbox = self._inboxes[sender]
        while message not in inbox.arrived:
            self._post(sender)
        carry, works = inbox.arrived.pop(message)
        for work in works:
            self._wait(work, sender)
        self._let_go(lambda sent: sent.receiver == sender and sent.message.target <= message.source)
        if not self._on_gpu:
            self._post(sender)  # the next one may come while this one is worked on
        return carry

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        self._let_go(lambda _: True)

    @property
    def num_under_way(self) -> int:
        """Tensors that were sent and may not have arrived."""
        return len(self._sent)

    def _let_go(self, has_arrived: Callable[[_Sent], bool]) -> None:
        """Keep what was sent no longer where it has arrived, as `has_arrived` knows or NCCL
        says.
        """
        kept = []
        for sent in self._sent:
            if has_arrived(sent):
                self._wait(sent.work, sent.receiver)
            elif not self._on_gpu or not sent.work.is_completed():
                kept.append(sent)
        self._sent = kept

    def _post(self, sender: int) -> None:
        """Begin to receive the next message of a rank."""
        inbox = self._inboxes[sender]
        if not inbox.waiting:
            return
        message = inbox.waiting.popleft()
        group = self._groups.links[sender, self._groups.rank]
        carry: StageTensors = {}
        works = []
        for name, spec in sorted(self._specs(message).items()):
            carry[name] = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            if not spec.is_empty:
                works.append(self._begin(dist.irecv, carry[name], sender, group))
        inbox.arrived[message] = carry, works

    def _begin(
        self,
        operation: Callable[..., dist.Work | None],
        tensor: Tensor,
        other: int,
        group: dist.ProcessGroup,
    ) -> dist.Work:
        with self._peer(other):
            work = operation(tensor, self._groups.ranks[other], group=group)
        assert work is not None  # this process is of the group
        return work

    def _wait(self, work: dist.Work, other: int) -> None:
        with self._peer(other):
            work.wait()

    def _peer(self, other: int) -> AbstractContextManager[None]:
        return peers(self._groups.ranks, self._groups.ranks[other])
