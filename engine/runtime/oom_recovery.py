"""What a rank still does in a step in which it ran out of memory, so that all ranks come to the
step's end.

Other ranks wait for what it sends, and send it what nobody will take. It knows the shapes of both
beforehand: so it lets go of all that the step holds, takes up what comes, and answers with zeros
until its schedule ends. A step in which memory suffices pays some 7 us for each message that it
sends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from engine.runtime.communication.p2p import Message, P2PQueue
from engine.runtime.cpu_memory import MemoryUsedUp
from engine.runtime.stage_io import StageTensors, TensorSpec

__all__ = ["OUT_OF_MEMORY", "StepMailbox", "is_out_of_memory", "uncounted"]

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryUsedUp)
"""What is raised where there is no memory: by torch's allocators, and by those that count for a
CPU.
"""
SAID_ELSEWHERE = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""What CUDA, cuBLAS and cuDNN say where a GPU has no room for what is theirs; torch raises
RuntimeErrors then.
"""

uncounted = no_dispatch
"""Within it, no `LiveBytes` counts or limits: for what ranks tell each other, which must not fail
on one of them.
"""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an operation failed for want of memory.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    said = isinstance(error, RuntimeError) and any(text in str(error) for text in SAID_ELSEWHERE)
    return said or isinstance(error, OUT_OF_MEMORY)


class StepMailbox(P2PQueue):
    """A mailbox that is whole after it ran out of memory: each message has been sent, or received,
    or not begun.
    """

    _zeros: Tensor | None = None

    def send(self, message: Message, receiver: int, carry: Mapping[str, Tensor]) -> None:
        """Send a message, or raise one of OUT_OF_MEMORY before any of its tensors is on its way."""
        specs = self._specs(message).items()
        ready = {
            name: carry[name].detach().to(spec.dtype).contiguous()
            for name, spec in specs
            if not spec.is_empty
        }
        super().send(message, receiver, ready)

    def finish(self) -> None:
        """Wait until all that was sent has arrived, and hold nothing more."""
        super().finish()
        self._zeros = None

    def receive(self, message: Message, sender: int) -> StageTensors:
        """A message's tensors, when they are there; or raise one of OUT_OF_MEMORY, and it can still
        be received.
        """
        inbox = self._inboxes[sender]
        while message not in inbox.arrived:
            self._post_next(sender)
        return super().receive(message, sender)

    def drop(self, message: Message, sender: int) -> None:
        """Receive a message that nobody needs, unless it has been received."""
        inbox = self._inboxes[sender]
        if message in inbox.arrived or message in inbox.waiting:
            self.receive(message, sender)

    def send_zeros(self, message: Message, receiver: int) -> None:
        """Send zeros for what a message should hold: parts of one block, for memory is what is
        lacking.
        """
        specs = self._specs(message)
        self.send(
            message,
            receiver,
            {name: self._some_zeros(spec) for name, spec in specs.items() if not spec.is_empty},
        )

    def _some_zeros(self, spec: TensorSpec) -> Tensor:
        size = math.prod(spec.shape) * spec.dtype.itemsize
        if self._zeros is None or len(self._zeros) < size:
            self._zeros = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return self._zeros[:size].view(spec.dtype).view(spec.shape)

    def _post(self, sender: int) -> None:
        """Begin to receive the next message; where there is no room yet, it begins when it is
        needed.
        """
        try:
            self._post_next(sender)
        except OUT_OF_MEMORY:
            return

    def _post_next(self, sender: int) -> None:
        """Begin to receive the next message, or raise one of OUT_OF_MEMORY before any of its
        tensors is begun.
        """
        inbox = self._inboxes[sender]
        if not inbox.waiting:
            return
        message = inbox.waiting[0]
        specs = sorted(self._specs(message).items())
        carry = {
            name: torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
            for name, spec in specs
        }
        group = self._groups.links[sender, self._groups.rank]
        works = [
            self._begin(dist.irecv, carry[name], sender, group)
            for name, spec in specs
            if not spec.is_empty
        ]
        inbox.waiting.popleft()
        inbox.arrived[message] = carry, works
