"""Memory for pixels that is used again.

Memory that is new to a process costs a tenth to a third of decoding into it: the system zeroes each
page at its first use, and allocators give large blocks back as soon as they are free. A batch's
pixels come back here instead, when the trainer has dropped the last tensor that uses them.
"""

import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

LEAST_BYTES = 1 << 17
"""Smallest block; smaller ones are left to allocators, which keep them."""
KEPT_BYTES = 64 << 20
"""Limit of the free blocks."""
SPARE = 1.5
"""Largest block that is given, as a multiple of the size asked for."""

Block = NDArray[np.uint8]


class BufferPool:
    """Memory of earlier tensors. No lock: finalizers give blocks back while others are taken."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        # the last one was used last: it may still be in the processor's cache
        self._free: deque[Block] = deque()

    def empty(self, num_bytes: int) -> torch.Tensor:
        """uint8, (num_bytes,), of any content."""
        if num_bytes < LEAST_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        block = self._take(num_bytes)
        used = block[:num_bytes]
        # the tensor's storage holds the array `used`, which is freed with the last view of it
        weakref.finalize(used, self._give, block).atexit = False
        return torch.from_numpy(used)

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
        with suppress(IndexError, RuntimeError):  # another thread took or gave one meanwhile
            while sum(map(len, tuple(self._free))) > self._kept_bytes:
                self._free.popleft()


pixel_pool = BufferPool()
"""Pool of this process."""
