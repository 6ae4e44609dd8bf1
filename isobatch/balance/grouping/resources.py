"""Resources of a group: a load per sample and a cap per group each.

For `balance.grouping.best_fit` and `isf`. The vision load and the LLM tokens of `Limits` always
count; others are added where a model needs them: audio tokens of an encoder, or tokens with a label
where the memory of the loss binds. Pure.

All loads of a sample are packed into one uint64, a field with a guard bit per resource, so that one
subtraction says whether it fits: a field that would become negative clears its guard bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isobatch.common.types import IntArray, Limits

WORD_BITS = 64

Load = NDArray[np.integer[Any]]
"""Non-negative load per sample, any integer type: 100 M samples as uint8 and uint16 take 2 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """Something of which the samples of a group may use only so much."""

    name: str
    """Name in words, for messages."""
    load: Load
    """Load of each sample, shape (num_samples,)."""
    cap: int
    """Sum of a group at most."""
    target: int | None = None
    """Sum from which a group passes ISF's filter; None: this resource lets no group pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLoads:
    """Layout of all resources in one number."""

    resources: Sequence[Resource]
    units: tuple[int, ...]
    """A field counts in units of 2 ** unit: 0 unless the caps together take more than 64 bits."""
    places: tuple[int, ...]
    """First bit of each field."""
    guards: tuple[int, ...]
    """Guard bit above each field, as a number."""

    @classmethod
    def of(cls, resources: Sequence[Resource]) -> "PackedLoads":
        """Lay out the fields; the widest lose bits until all fit into one number.

        >>> load = np.array([2])
        >>> caps = {"vision": 3, "tokens": 6}
        >>> resources = [Resource(name=name, load=load, cap=cap) for name, cap in caps.items()]
        >>> packing = PackedLoads.of(resources)
        >>> bin(packing.cap), bin(packing.guard), bin(packing.pack(np.array([0]))[0])
        ('0b1110111', '0b1000100', '0b10010')
        """
        widths = [resource.cap.bit_length() + 1 for resource in resources]
        units = [0] * len(resources)
        while sum(widths) > WORD_BITS:
            widest = widths.index(max(widths))
            widths[widest], units[widest] = widths[widest] - 1, units[widest] + 1
        places = tuple(sum(widths[:field]) for field in range(len(widths)))
        guards = tuple(1 << place + width - 1 for place, width in zip(places, widths, strict=True))
        return cls(resources=resources, units=tuple(units), places=places, guards=guards)

    @property
    def guard(self) -> int:
        """All guard bits."""
        return sum(self.guards)

    @property
    def cap(self) -> int:
        """What an empty group can take: all caps, and the guard bits."""
        return self.guard | self.packed([resource.cap for resource in self.resources])

    def packed(self, amounts: Sequence[int]) -> int:
        """One amount per resource as one number, rounded down to units."""
        fields = zip(amounts, self.units, self.places, strict=True)
        return sum(amount >> unit << place for amount, unit, place in fields)

    def pack(self, samples: IntArray | slice = slice(None)) -> NDArray[np.uint64]:
        """The loads of `samples`, one number each."""
        result: NDArray[np.uint64] = np.zeros(len(self.resources[0].load[samples]), np.uint64)
        for resource, unit, place in zip(self.resources, self.units, self.places, strict=True):
            load = resource.load[samples]
            if unit:
                # rounded up, so that no sum exceeds the cap, but a sample still fits alone
                load = np.minimum(-(-load.astype(np.int64) >> unit), resource.cap >> unit)
            result |= load.astype(np.uint64) << np.uint64(place)
        return result


def resources_of(
    vision: Load, tokens: Load, limits: Limits, also: Sequence[Resource] = ()
) -> list[Resource]:
    """The resources of `limits`, vision first, then those of `also`.

    Raises ValueError for columns of different lengths, negative loads, and samples over a cap.
    """
    vision, tokens = np.asarray(vision), np.asarray(tokens)
    resources = [
        Resource(name=limits.unit, load=vision, cap=limits.max_vision, target=limits.min_vision),
        Resource(name="tokens", load=tokens, cap=limits.max_seq_len, target=limits.min_seq_len),
        *also,
    ]
    for resource in resources:
        load, cap, name = resource.load, resource.cap, resource.name
        if len(load) != len(tokens):
            counted = f"{len(load)} loads of {name} but {len(tokens)} token counts"
            raise ValueError(f"{counted}; give one of each per sample")
        if cap < 0:
            raise ValueError(f"the cap of {cap} {name} is negative; give 0 or more")
        if len(load) and load.min() < 0:
            first = int(np.argmin(load))
            raise ValueError(f"sample {first} has {load[first]} {name}; loads are 0 or more")
        if len(load) and load.max() > cap:
            over = np.flatnonzero(load > cap)
            raise ValueError(
                f"{len(over)} samples are by themselves over the cap of {cap} {name}"
                f" (first: sample {over[0]} with {load[over[0]]}); reject them before grouping"
            )
    return resources
