"""Point-to-point messages of a step, in an order known to both sides.

The messages from one rank to another follow from the schedule alone, by the same `Program` whose
edges the simulator runs: the sender's operations in order, and who waits for them. Receives are
posted in that order, so no tags are needed, which NCCL would ignore. A send never blocks the
sender. Each direction of each pair of ranks has its own communicator, so opposite sends do not wait
for each other: what can be simulated does not deadlock.

A sent tensor must stay in memory until it has arrived. NCCL says when. Gloo does not, but an answer
does: a rank that sends a result has received everything its operations before needed. So with gloo
a rank holds what its schedule has in flight; outputs of frozen stages stay until the step ends.

Running out of memory leaves the queue usable: every message has been sent, received, or not begun.
Preparing a send for this costs about 7 us.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.communication.process_groups import Pair, ProcessGroups
from isobatch.engine.runtime.errors import OUT_OF_MEMORY, peer_errors
from isobatch.engine.runtime.stage_io import StageTensors, TensorSpec
from isobatch.engine.simulator.program import Program
from isobatch.engine.simulator.schedule import PassKind, Schedule
from isobatch.engine.simulator.simulate import Timeline, equal_passes


class Message(NamedTuple):
    """A result, named by the operation that makes it and the one that waits for it."""

    source: int
    target: int


_MessagesByOperation = dict[int, list[tuple[Message, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class P2PSchedule:
    """Messages of a schedule as one rank needs them."""

    program: Program
    """Its edges; all passes take equally long, and sends no time."""
    incoming: _MessagesByOperation
    """Inputs from other stages by operation of this rank, each with its sender."""
    outgoing: _MessagesByOperation
    """Results for other stages by operation of this rank, each with its receiver."""
    ahead: _MessagesByOperation
    """Inputs of the next operation that can be received from before an operation of this rank on,
    even if that operation waits for whatever was posted."""
    messages: dict[Pair, list[Message]]
    """All messages from rank to rank, in the order in which they are made."""


@lru_cache(maxsize=64)
def make_p2p_schedule(schedule: Schedule, sends_grad: tuple[bool, ...], rank: int) -> P2PSchedule:
    """Messages of a schedule in which gradients return to the stages with `sends_grad`.

    ConfigError if an action is missing or not on its stage's rank; Deadlock if they cannot all run.
    """
    _check(schedule)
    timeline = equal_passes(schedule, sends_grad)
    program = timeline.program
    # what a stage keeps from its own forward pass is no message; features encoded ahead are
    sources = program.edge_sources
    between = schedule.stages[sources] != schedule.stages[program.edge_targets]
    between |= schedule.kinds[sources] == PassKind.ENCODE
    p2p = P2PSchedule(program=program, incoming={}, outgoing={}, ahead={}, messages={})
    edges = sources[between].tolist(), program.edge_targets[between].tolist()
    ranks = schedule.ranks.tolist()
    for source, target in zip(*edges, strict=True):
        message = Message(source, target)
        sender = ranks[source]
        receiver = ranks[target]
        if receiver == rank:
            p2p.incoming.setdefault(target, []).append((message, sender))
        if sender == rank:
            p2p.outgoing.setdefault(source, []).append((message, receiver))
        if sender != receiver:
            p2p.messages.setdefault((sender, receiver), []).append(message)
    _find_ahead(p2p, timeline, rank)
    return p2p


def _find_ahead(p2p: P2PSchedule, timeline: Timeline, rank: int) -> None:
    """Fill `ahead` of a rank.

    Operations have an order in which each comes after all that it needs: by their end if all passes
    take equally long, then forward passes down the ranks, then the others up. A receive is posted
    before an operation only if its source is earlier in this order. So if every operation waited
    for all receives posted until then, each would still wait for earlier ones alone: no circle.
    """
    schedule = p2p.program.schedule
    is_back = (schedule.kinds != PassKind.FORWARD).astype(np.int64)
    by = np.where(is_back, -schedule.ranks, schedule.ranks), is_back, timeline.end_ns
    places = np.empty(len(schedule), np.int64)
    places[np.lexsort(by)] = np.arange(len(schedule))
    first, last = schedule.rank_offsets[rank : rank + 2].tolist()
    for operation in range(first, last - 1):
        p2p.ahead[operation] = [
            (message, sender)
            for message, sender in p2p.incoming.get(operation + 1, ())
            if sender != rank and places[message.source] < places[operation]
        ]


def forward_only(schedule: Schedule) -> Schedule:
    """A schedule's forward passes in their order, for evaluation."""
    ranks = [schedule.of_rank(rank) for rank in range(schedule.num_ranks)]
    return Schedule.of(
        f"{schedule.name}, forward",
        schedule.num_stages,
        schedule.num_micro_batches,
        [[action for action in actions if action.kind == PassKind.FORWARD] for actions in ranks],
    )


def _check(schedule: Schedule) -> None:
    """ConfigError unless every stage's own rank runs each micro-batch forward and backward once.

    Or all of them forward only.
    """
    shape = len(PassKind), schedule.num_stages, schedule.num_micro_batches
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, (schedule.kinds, schedule.stages, schedule.micro_batches), 1)
    halves = counts[PassKind.INPUT_GRAD], counts[PassKind.WEIGHT_GRAD]
    num_backward = int((schedule.kinds != PassKind.FORWARD).any())
    once = (
        (counts[PassKind.FORWARD] == 1)
        & (counts[PassKind.BACKWARD] + halves[0] == num_backward)
        & (halves[0] == halves[1])
        & (counts[PassKind.ENCODE] <= 1)
    )
    if not once.all():
        stage, number = np.argwhere(~once)[0].tolist()
        raise ConfigError(
            f"schedule {schedule.name} does not run micro-batch {number} once forward and once"
            f" backward through stage {stage}"
        )
    elsewhere = schedule.ranks != schedule.stages % schedule.num_ranks
    elsewhere &= schedule.kinds != PassKind.ENCODE
    if elsewhere.any():
        place = int(np.argmax(elsewhere))
        raise ConfigError(
            f"schedule {schedule.name} has the {schedule.action(place)} on rank"
            f" {schedule.ranks[place]}, but stage s belongs to rank s modulo {schedule.num_ranks}"
        )


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor in flight."""

    message: Message
    receiver: int
    tensor: Tensor
    work: dist.Work


@dataclass(slots=True)
class _Inbox:
    """Messages from one other rank."""

    waiting: deque[Message]
    posted: dict[Message, tuple[StageTensors, list[dist.Work]]] = field(default_factory=dict)


def is_cuda(device: torch.device) -> bool:
    """Whether messages travel by NCCL."""
    return device.type == "cuda"


class P2PQueue:
    """Sends and receives of one rank in one step."""

    def __init__(
        self,
        groups: ProcessGroups,
        messages: Mapping[Pair, list[Message]],
        specs: Callable[[Message], Mapping[str, TensorSpec]],
        device: torch.device,
    ) -> None:
        """`specs` gives the tensors of a message; empty ones are not sent."""
        self._groups, self._specs, self._device = groups, specs, device
        self._inboxes = {
            pair[0]: _Inbox(deque(waiting))
            for pair, waiting in messages.items()
            if pair[1] == groups.rank
        }
        self._sent: list[_Sent] = []
        self._zeros: Tensor | None = None
        # NCCL receives with a kernel that spins until data comes. Whatever waits for the whole GPU
        # meanwhile (freeing memory, loading a kernel) would hang if this rank itself had to send
        # first. So on a GPU only `post_ahead` posts early.
        self._on_gpu = is_cuda(device)
        if not self._on_gpu:
            for sender in self._inboxes:
                self._post_early(sender)

    def send(self, message: Message, receiver: int, tensors: Mapping[str, Tensor]) -> None:
        """Send a message's tensors, which match their specs; they are kept until they have arrived.

        Raises one of OUT_OF_MEMORY before any tensor is in flight.
        """
        group = self._groups.links[self._groups.rank, receiver]
        ready = {
            name: tensors[name].detach().to(spec.dtype).contiguous()
            for name, spec in sorted(self._specs(message).items())
            if not spec.is_empty
        }
        self._release(lambda _: False)
        for tensor in ready.values():
            work = self._begin(dist.isend, tensor, receiver, group)
            self._sent.append(_Sent(message, receiver, tensor, work))

    def send_zeros(self, message: Message, receiver: int) -> None:
        """Send zeros in place of a message: views of one block, because memory is short."""
        specs = self._specs(message)
        zeros = {name: self._zeros_of(spec) for name, spec in specs.items() if not spec.is_empty}
        self.send(message, receiver, zeros)

    def receive(self, message: Message, sender: int) -> StageTensors:
        """Tensors of a message, once they are there.

        After one of OUT_OF_MEMORY, the message can still be received.
        """
        inbox = self._inboxes[sender]
        while message not in inbox.posted:
            self._post(sender)
        tensors, works = inbox.posted.pop(message)
        with self._peer_errors(sender):
            for work in works:
                work.wait()
        self._release(
            lambda sent: sent.receiver == sender and sent.message.target <= message.source
        )
        if not self._on_gpu:
            self._post_early(sender)  # the next one may arrive while this one is worked on
        return tensors

    def post_ahead(self, messages: Iterable[tuple[Message, int]]) -> None:
        """Post the receives of messages, each with its sender, and those that were made before.

        On a GPU, where a receive begins after all passes that were launched before it is posted.
        """
        for message, sender in messages if self._on_gpu else ():
            inbox = self._inboxes[sender]
            with suppress(*OUT_OF_MEMORY):
                while message in inbox.waiting:
                    self._post(sender)

    def drop(self, message: Message, sender: int) -> None:
        """Receive a message that nobody needs, unless it has been received."""
        inbox = self._inboxes[sender]
        if message in inbox.posted or message in inbox.waiting:
            self.receive(message, sender)

    def finish(self) -> None:
        """Wait until everything that was sent has arrived, and hold nothing any more."""
        self._release(lambda _: True)
        self._zeros = None

    def _release(self, has_arrived: Callable[[_Sent], bool]) -> None:
        """Release sent tensors that have arrived, as `has_arrived` or NCCL says."""
        in_flight = []
        for sent in self._sent:
            if has_arrived(sent):
                with self._peer_errors(sent.receiver):
                    sent.work.wait()
            elif not self._on_gpu or not sent.work.is_completed():
                in_flight.append(sent)
        self._sent = in_flight

    def _post_early(self, sender: int) -> None:
        """Post the next receive; without memory for it, it is posted when it is needed."""
        with suppress(*OUT_OF_MEMORY):
            self._post(sender)

    def _post(self, sender: int) -> None:
        """Post the next receive, or raise one of OUT_OF_MEMORY before it begins."""
        inbox = self._inboxes[sender]
        if not inbox.waiting:
            return
        message = inbox.waiting[0]
        specs = dict(sorted(self._specs(message).items()))
        tensors = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            for name, spec in specs.items()
        }
        group = self._groups.links[sender, self._groups.rank]
        works = [
            self._begin(dist.irecv, tensors[name], sender, group)
            for name, spec in specs.items()
            if not spec.is_empty
        ]
        inbox.waiting.popleft()
        inbox.posted[message] = tensors, works

    def _zeros_of(self, spec: TensorSpec) -> Tensor:
        if self._zeros is None or len(self._zeros) < spec.num_bytes:
            self._zeros = torch.zeros(spec.num_bytes, dtype=torch.uint8, device=self._device)
        return self._zeros[: spec.num_bytes].view(spec.dtype).view(spec.shape)

    def _begin(
        self,
        operation: Callable[..., dist.Work | None],
        tensor: Tensor,
        other: int,
        group: dist.ProcessGroup,
    ) -> dist.Work:
        with self._peer_errors(other):
            work = operation(tensor, self._groups.ranks[other], group=group)
        assert work is not None  # this process belongs to the group
        return work

    def _peer_errors(self, other: int) -> AbstractContextManager[None]:
        return peer_errors(self._groups.ranks, self._groups.ranks[other])
