"""Random numbers per layer and micro-batch, equal for every partition.

Before each layer the generators are seeded with a hash of (seed, step, replica, micro-batch,
layer). Then neither the partition, the schedule nor other work of a rank changes the numbers, and a
recomputed layer gets the same ones. Costs about 5 us per layer and pass on a CPU.
"""

import struct
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRng:
    """Seeds of the layers in one step."""

    seed: int
    step: int
    replica: int = 0

    def seed_layer(self, layer: int, micro_batch: int, device: torch.device) -> None:
        """Seed the generators that a layer uses."""
        seed = _hash(self.seed, self.step, self.replica, micro_batch, layer)
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[_index(device)].manual_seed(seed)


def preserve_rng(device: torch.device) -> AbstractContextManager[None]:
    """Restore the state of torch's generators afterwards."""
    return torch.random.fork_rng(devices=[_index(device)] if device.type == "cuda" else [])


def _hash(*numbers: int) -> int:
    """63 bits.

    >>> _hash(1, 2) == _hash(1, 2), _hash(1, 2) == _hash(2, 1)
    (True, False)
    """
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
