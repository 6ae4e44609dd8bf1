"""Objects between two processes, arrays and tensors without a copy in the pipe.

Large ones travel as memory without a name: its descriptor goes over the connection, and the
receiver maps it. Such memory ends with the last process that has it, however that ends, and no
limit of /dev/shm applies to it. Sending 40 MB of tensors took 55 ms of CPU time on a busy machine,
63 by torch.multiprocessing, and 160 through a pipe.
"""

import io
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobatch.loaders.read.cache import write_at

INLINE_BYTES = 1 << 17
"""Size from which a message is mapped memory: below that a pipe is as fast."""
SEPARATE_BYTES = 1 << 12
"""Size from which the bytes of an array are next to the pickle, not in it."""
ALIGNMENT = 64
"""Of arrays, as processors read them best."""


class Parcel(NamedTuple):
    """A pickled object."""

    pickled: bytes | memoryview
    buffers: list[memoryview]
    """Bytes of its large arrays, in the order of the pickle."""

    @property
    def places(self) -> list[tuple[int, int]]:
        """Start and end of the pickle and of each buffer, in a message."""
        places, end = [], 0
        for part in (self.pickled, *self.buffers):
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + len(part)
            places.append((start, end))
        return places


def pack(value: Any) -> Parcel:
    """Pickle an object; what pickling raises, if it cannot be."""
    buffers: list[memoryview] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        if (view := buffer.raw()).nbytes < SEPARATE_BYTES:
            return True
        buffers.append(view)
        return False

    pickled = io.BytesIO()
    _Pickler(pickled, protocol=5, buffer_callback=stays_inside).dump(value)
    return Parcel(pickled.getbuffer(), buffers)


def send(connection: Connection, parcel: Parcel) -> None:
    """Send a parcel to the process at the other end. OSError if that has ended."""
    places = parcel.places
    size = places[-1][1]
    if size < INLINE_BYTES:
        content = bytearray(size)
        for (start, end), part in zip(places, (parcel.pickled, *parcel.buffers), strict=True):
            content[start:end] = part
        connection.send((places, bytes(content)))
        return
    descriptor = _memory()
    try:
        for (start, _), part in zip(places, (parcel.pickled, *parcel.buffers), strict=True):
            write_at(descriptor, memoryview(part), start)
        connection.send((places, None))
        send_handle(connection, descriptor, None)
    finally:
        os.close(descriptor)


def receive(connection: Connection) -> Any:
    """The next object; its arrays are writable. EOFError or OSError if the sender has ended."""
    places, content = connection.recv()
    if content is not None:
        view = memoryview(bytearray(content))
    else:
        descriptor = recv_handle(connection)
        try:
            # `mmap` would keep a descriptor open for each message
            name, size = f"/dev/fd/{descriptor}", places[-1][1]
            view = torch.from_file(name, shared=True, size=size, dtype=torch.uint8).numpy().data
        finally:
            os.close(descriptor)
    pickled, *buffers = [view[start:end] for start, end in places]
    return pickle.loads(pickled, buffers=buffers)


class _Pickler(pickle.Pickler):
    """Tensors and memory views as arrays are pickled: their bytes in a buffer."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, memoryview):
            return memoryview, (pickle.PickleBuffer(value),)
        is_plain = type(value) is Tensor and value.layout == torch.strided
        if is_plain and value.device.type == "cpu" and not value.requires_grad:
            return _flat(value)
        return NotImplemented


def _flat(tensor: Tensor) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """How a tensor is made again; its strides stay if it has no gaps (`channels_last`)."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    if not dense.is_contiguous():
        order, dense = [*range(tensor.dim())], tensor.contiguous()
    flat = dense.reshape(-1)
    if flat.numel() == 1:  # may have a stride of 0, of which no bytes are seen
        flat = flat.clone(memory_format=torch.contiguous_format)
    content = flat.view(torch.uint8).numpy().data
    return _tensor, (pickle.PickleBuffer(content), tensor.dtype, tuple(dense.shape), order)


def _tensor(buffer: Any, dtype: torch.dtype, shape: Sequence[int], order: list[int]) -> Tensor:
    if not memoryview(buffer).nbytes:  # `frombuffer` takes none that is empty
        dense = torch.empty(shape, dtype=dtype)
    else:
        dense = torch.frombuffer(buffer, dtype=dtype).reshape(shape)
    return dense.permute([order.index(dim) for dim in range(len(order))])


def _memory() -> int:
    """The descriptor of new memory; on systems without such of a file that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("isobatch", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
