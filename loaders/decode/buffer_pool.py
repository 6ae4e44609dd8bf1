"""Memory for pixels that is used again: what is new to a process costs a tenth to a third of
decoding into it.

The system zeroes each page and enters it into a table at its first touch, and allocators give large
blocks back as soon as they are free. A batch's pixels come back here instead, when the trainer has
dropped the last tensor that looks at them.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

LEAST_BYTES = 1 << 17
"""Smaller blocks are left to allocators, which keep them."""
KEPT_BYTES = 64 << 20
"""Of free blocks, at most."""
SPARE = 1.5
"""A block may be so many times as large as what is wanted."""

Block = NDArray[np.uint8]


class BufferPool:
    """Gives tensors memory of earlier ones. For any thread, without a lock: blocks come back from
    finalizers, which may run at any moment, in a thread that is just taking one too.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._free: deque[Block] = (
            deque()
        )  # the last one was used last: it may still be in the processor's cache

    def empty(self, num_bytes: int) -> torch.Tensor:
        """uint8, (num_bytes,), of any content."""
        if num_bytes < LEAST_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        block = self._take(num_bytes)
        lent = block[:num_bytes]
        # the tensor's storage holds the array `lent`: it goes when nothing looks at that memory any
        # more
        weakref.finalize(lent, self._give, block).atexit = False
        return torch.from_numpy(lent)

    def _take(self, num_bytes: int) -> Block:
        others = []
        try:
            while self._free:
                block = self._free.pop()
                if num_bytes <= len(block) <= SPARE * num_bytes:
                    return block
                others.append(block)
        except IndexError:  # another thread took the last one
            pass
        finally:
            self._free.extend(reversed(others))
        return np.empty(num_bytes, np.uint8)

    def _give(self, block: Block) -> None:
        self._free.append(block)
        while sum(map(len, tuple(self._free))) > self._kept_bytes:
            self._free.popleft()


pixel_memory = BufferPool()
"""Of this process."""
