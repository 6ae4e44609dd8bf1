"""Some records of a dataset: the first, the last, or drawn ones. Pure.

LLaVA-NeXT's `sampling_strategy`, for mixtures. A percentage is of the dataset's records, and rounds
up; drawn records keep their order, and the same seed draws the same. More than there are, or than
100 %, means all. 0 is an error: LLaVA-NeXT takes all for `end:0`, and none for the others.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from isobatch.balance.rng import SAMPLING, random_permutation
from isobatch.common.errors import ConfigError

_STRATEGY = re.compile(r"(first|end|random):(\d{1,18})(%?)")


@dataclass(frozen=True, slots=True)
class Sampling:
    """A choice of the records that are read."""

    strategy: Literal["first", "end", "random"]
    number: int
    is_percentage: bool = False
    seed: int = 0
    """Seed that records are drawn by."""
    place: int = 0
    """Dataset of the mixture: each draws for itself."""

    def seeded(self, seed: int) -> "Sampling":
        """The same sampling; records that are drawn are drawn by this seed."""
        return replace(self, seed=seed) if self.strategy == "random" else self

    def chosen(self, total: int) -> list[bool]:
        """Whether each of `total` records is read.

        >>> Sampling("end", 50, is_percentage=True).chosen(3)
        [False, True, True]
        """
        wanted = -(-self.number * total // 100) if self.is_percentage else self.number
        places = np.arange(total)
        if self.strategy == "random":
            places = random_permutation(total, self.seed, SAMPLING, place=self.place)
        taken = places[max(total - wanted, 0) :] if self.strategy == "end" else places[:wanted]
        mask = np.zeros(total, bool)
        mask[taken] = True
        return mask.tolist()


def parse_sampling(text: str) -> Sampling | None:
    """What a `sampling_strategy` says; None for `all`. ConfigError for anything else."""
    if text == "all":
        return None
    match = _STRATEGY.fullmatch(text)
    if match is None:
        known = "known: all, first:N, end:N and random:N, N a number or a percentage such as 50%"
        raise ConfigError(f"sampling {text[:60]!r}; {known}")
    if int(match[2]) == 0:
        theirs = "all records" if match[1] == "end" else "no record"
        hint = f"by which LLaVA-NeXT takes {theirs}; say all, or leave the dataset out"
        raise ConfigError(f"sampling {text[:60]!r}, {hint}")
    return Sampling(match[1], int(match[2]), bool(match[3]))  # type: ignore[arg-type]
