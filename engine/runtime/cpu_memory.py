"""Bytes of live tensors on a CPU, now and at the peak: `LiveBytes`.

A GPU's allocator counts by itself. On a CPU every torch operation is watched: its result is live
until nobody holds its storage. This slows a step down a few times, so it is for measuring, not for
training. Buffers inside an operation are not seen.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from isobatch.common.errors import IsobatchError

uncounted = no_dispatch
"""Context without counting or limit: for status messages that must not fail on one rank only."""


class CpuMemoryExceeded(IsobatchError):
    """More bytes of tensors would be live than allowed."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered: `live_bytes` now, `peak_bytes` since `restart`.

    What was made before, such as parameters, does not count. `limit_bytes`: an operation that
    exceeds it raises CpuMemoryExceeded, as an allocator would, and its result is dropped.

    >>> with LiveBytes() as memory:
    ...     ones = torch.zeros(1000) + 1  # one of the two tensors stays
    >>> memory.live_bytes, memory.peak_bytes
    (4000, 8000)
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._counted: dict[int, weakref.finalize[Any, Any]] = {}

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
        """Run an operation and count the storages that it made."""
        inputs = {_key(tensor) for tensor in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            key = _key(tensor)
            if key not in inputs and key not in self._counted:
                storage = tensor.untyped_storage()
                size = storage.nbytes()
                self.live_bytes += size
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                self._counted[key] = weakref.finalize(storage, self._release, key, size)
        if self.limit_bytes is not None and self.live_bytes > self.limit_bytes:
            raise CpuMemoryExceeded(
                f"{self.live_bytes:,} bytes of tensors are live; {self.limit_bytes:,} are allowed"
            )
        return result

    def _release(self, key: int, size: int) -> None:
        self.live_bytes -= size
        del self._counted[key]


def _key(tensor: Tensor) -> int:
    """Identity of a storage, equal for all its views while it is live."""
    return int(tensor.untyped_storage()._cdata)


def _tensors(values: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dicts; of a DTensor, what this process holds."""
    if isinstance(values, Tensor):
        yield getattr(values, "_local_tensor", values)
    elif isinstance(values, (list, tuple)):  # pytrees take several times as long
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
