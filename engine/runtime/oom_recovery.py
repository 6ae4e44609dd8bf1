"""Out of memory within a step: recognised, and survived by all ranks.

A rank that runs out of memory must still reach the end of the step, because other ranks wait for
its messages and send it theirs. It knows the shapes of both beforehand. So `StageExecutor` releases
everything that the step holds, receives what comes, and sends zeros until its schedule ends.
"""

import torch
from torch.utils._mode_utils import no_dispatch

from engine.runtime.cpu_memory import CpuMemoryExceeded

__all__ = ["OUT_OF_MEMORY", "is_out_of_memory", "uncounted"]

OUT_OF_MEMORY = (torch.OutOfMemoryError, CpuMemoryExceeded)
"""Errors of torch's allocators, and of `LiveBytes`, which stands in for one on a CPU."""
_CUDA_MESSAGES = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""RuntimeErrors of CUDA, cuBLAS and cuDNN when the GPU has no memory left for their own buffers."""

uncounted = no_dispatch
"""Context without counting or limit of `LiveBytes`: for status messages that must not fail on one
rank only."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether an operation failed for lack of memory.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, OUT_OF_MEMORY):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _CUDA_MESSAGES)
