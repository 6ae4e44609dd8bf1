"""Python objects from rank to rank in one all-to-all, tensors as they are.

For `rebalance`. Collectives run on the CPU where the group has a backend for it (gloo), else on the
current GPU. `measure_link` says what an exchange takes.
"""

import io
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from isobatch.common.errors import ConfigError
from isobatch.common.types import FloatArray, IntArray

ALIGNED = 64
"""Buffers begin at multiples of so many bytes."""
PLAIN_BYTES = 16
"""What a number or an object of another kind counts as."""
FAILED = -1
"""Size by which a rank tells the others that it sends nothing, and raises."""
TRIAL_BYTES, TRIALS = 1 << 22, 3
"""What each rank sends to measure the link, and how often; the fastest counts."""

_links: WeakKeyDictionary[dist.ProcessGroup, tuple[float, float]] = WeakKeyDictionary()


def group_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where tensors of the group's collectives are."""
    config = dist.get_backend_config(group)
    return torch.device("cpu") if "cpu:" in config else torch.device("cuda")


def object_bytes(value: Any) -> int:  # noqa: PLR0911 - one per kind of object
    """Bytes that an object takes on its way: its tensors, arrays, images, strings.

    ConfigError for a tensor on a GPU.
    """
    if isinstance(value, Tensor):
        _check_on_cpu(value)
    if isinstance(value, Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    if hasattr(value, "getbands"):  # an image of Pillow
        return int(value.width * value.height * len(value.getbands()))
    if isinstance(value, Mapping):
        return sum(map(object_bytes, [*value, *value.values()]))
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(object_bytes, value))
    if is_dataclass(value):
        return sum(object_bytes(getattr(value, part.name)) for part in fields(value))
    return PLAIN_BYTES


def _check_on_cpu(value: Tensor) -> None:
    if not value.is_cpu:
        raise ConfigError(
            f"a sample or value has a tensor on {value.device}; rebalance before tensors go to the "
            "GPU, and give back those on the CPU"
        )


def all_gather_rows(
    rows: FloatArray, sizes: IntArray, group: dist.ProcessGroup | None
) -> FloatArray:
    """Rows of all ranks, of which this one gives its own; float64.

    `sizes`: rows of each rank; where they are not known, all have as many as this one.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return rows
    if len(sizes) == 1:
        sizes = np.full(dist.get_world_size(group), sizes[0])
    device = group_device(group)
    sent = torch.zeros((int(sizes.max(initial=0)), rows.shape[1]), dtype=torch.float64)
    sent[: len(rows)] = torch.from_numpy(rows)
    sent = sent.to(device)
    received = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(received, sent, group=group)
    return np.concatenate([r[:n].cpu().numpy() for r, n in zip(received, sizes, strict=True)])


def exchange_objects(
    parts: Sequence[Sequence[Any]] | ConfigError, group: dist.ProcessGroup | None
) -> list[list[Any]]:
    """`parts[r]` to rank r of the group; -> what each rank has sent to this one, in its order.

    A collective. Tensors must be on the CPU. ConfigError on all ranks where any cannot pickle its
    part, or gives an error in place of its parts.
    """
    device = group_device(group)
    failure, blocks = None, list[list[Any]]()
    try:
        if isinstance(parts, ConfigError):
            raise parts
        blocks = [_packed(part) if len(part) else [] for part in parts]
    except ConfigError as error:
        failure = error
    except Exception as error:  # what a user's object raises when it is pickled
        failure = ConfigError(
            f"could not pickle what goes to another rank: {type(error).__name__}: "
            f"{' '.join(str(error).split())}; leave such objects out of samples and values"
        )
    num_bytes = [sum(map(len, block)) for block in blocks]
    if failure is not None:
        num_bytes = [FAILED] * dist.get_world_size(group)
    sizes = torch.tensor(num_bytes, device=device)
    arriving = torch.empty_like(sizes)
    dist.all_to_all_single(arriving, sizes, group=group)
    if failure is not None:
        raise failure
    if (failed := (arriving == FAILED).nonzero()).numel():
        raise ConfigError(f"rank {int(failed[0])} could not send what it has; it says why")
    sent = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    view, place = sent.numpy().data, 0
    for block in blocks:
        for piece in block:
            view[place : place + len(piece)] = piece
            place += len(piece)
    received = torch.empty(int(arriving.sum()), dtype=torch.uint8, device=device)
    dist.all_to_all_single(
        received, sent.to(device), arriving.tolist(), sizes.tolist(), group=group
    )
    whole = received.cpu().numpy().data
    ends = np.cumsum(arriving.tolist()).tolist()
    pieces = [whole[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return [_unpacked(piece) if len(piece) else [] for piece in pieces]


def measure_link(group: dist.ProcessGroup | None) -> tuple[float, float]:
    """(bytes per ms that a rank sends and receives, ms of an empty exchange), once per group.

    A collective; all ranks have the slowest one's numbers.
    """
    key = group or dist.group.WORLD
    assert key is not None  # torch.distributed has begun
    if key not in _links:
        num_ranks = dist.get_world_size(group)
        block = torch.zeros(TRIAL_BYTES // num_ranks, dtype=torch.uint8)
        times = [
            min(_exchange_ms(values, num_ranks, group) for _ in range(TRIALS))
            for values in ([torch.zeros(1)], [block])
        ]
        slowest = torch.tensor(times, dtype=torch.float64, device=group_device(group))
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        latency, full = slowest.tolist()
        sent = TRIAL_BYTES // num_ranks * (num_ranks - 1)
        _links[key] = sent / max(full - latency, 1e-3), latency
    return _links[key]


def _exchange_ms(values: list[Any], num_ranks: int, group: dist.ProcessGroup | None) -> float:
    parts = [values if rank != dist.get_rank(group) else [] for rank in range(num_ranks)]
    dist.barrier(group)
    began = time.perf_counter()
    exchange_objects(parts, group)
    return 1e3 * (time.perf_counter() - began)


class _Pickler(pickle.Pickler):
    """Leaves the memory of tensors out of the pickle, as NumPy does with arrays."""

    def reducer_override(self, value: Any) -> Any:
        """A plain tensor as its bytes, type and shape; everything else as usual."""
        if isinstance(value, Tensor):
            _check_on_cpu(value)
        if type(value) is not Tensor or value.layout != torch.strided or value.is_quantized:
            return NotImplemented
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        flat = plain.flatten().view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(flat.data), value.dtype, tuple(value.shape))


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not memoryview(buffer).nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


def _packed(values: Sequence[Any]) -> list[Any]:
    """Lengths, pickle and buffers of values, each padded to a multiple of `ALIGNED`."""
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(list(values))
    pieces = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
    lengths = np.array([len(pieces), *map(len, pieces)], np.int64).tobytes()
    padded: list[Any] = []
    for piece in (lengths, *pieces):
        padded += [piece, bytes(-len(piece) % ALIGNED)]
    return padded


def _unpacked(block: memoryview) -> list[Any]:
    """What `_packed` was given.

    Tensors and arrays have memory of their own: one that is kept does not keep all that arrived.
    """
    count = int(np.frombuffer(block[:8], np.int64)[0])
    lengths = np.frombuffer(block[8 : 8 * (count + 1)], np.int64).tolist()
    place = _aligned(8 * (count + 1))
    pieces = []
    for length in lengths:
        pieces.append(block[place : place + length])
        place += _aligned(length)
    values: list[Any] = pickle.loads(pieces[0], buffers=map(np.array, pieces[1:]))
    return values


def _aligned(length: int) -> int:
    return length + -length % ALIGNED
