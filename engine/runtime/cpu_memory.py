"""How many bytes of tensors are alive on a rank, and at most: `LiveBytes`, for devices whose
allocator does not count.

On a GPU torch's allocator says it. On a CPU every operation is watched: what it makes is alive
until nobody holds its storage any more. That slows a step down a few times over, so it is for
measuring, not for training; buffers inside an operation are not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from balance.errors import IsobatchError


class MemoryUsedUp(IsobatchError):
    """More tensors would be alive than allowed."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered: `live_bytes` now, `peak_bytes` at most since `restart`.

    Only what is made meanwhile counts: parameters and optimizer states that were there before do
    not. `limit_bytes`: at more, the operation raises MemoryUsedUp, as an allocator would; its
    result is dropped.

    >>> with LiveBytes() as memory:
    ...     kept = torch.zeros(1000) + 1  # of the two, one stays
    >>> memory.live_bytes, memory.peak_bytes
    (4000, 8000)
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.finalize[Any, Any]] = {}

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count what it made."""
        given = {_key(tensor) for tensor in _tensors((args, kwargs or {}))}
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            key = _key(tensor)
            if key not in given and key not in self._known:
                self._count(tensor.untyped_storage(), key)
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            raise MemoryUsedUp(
                f"{self.live_bytes:,} bytes of tensors are alive; {self.limit_bytes:,} are allowed"
            )
        return made

    def _count(self, storage: torch.UntypedStorage, key: int) -> None:
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self._known[key] = weakref.finalize(storage, self._release, key, storage.nbytes())

    def _release(self, key: int, size: int) -> None:
        self.live_bytes -= size
        del self._known[key]


def _key(tensor: Tensor) -> int:
    """The same for all views of one storage, while it is alive."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
