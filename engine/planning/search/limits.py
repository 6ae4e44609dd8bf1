"""What a partition search may spend.

A search that a deadline ends finds what the machine has reached by then; all others find the same
on every machine.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

CHUNK_ACTIONS = 10_000_000
"""Actions that are simulated between two looks at the clock: 40 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Limits of one search. What the start needs, a partition that fits, is never cut short."""

    deadline_s: float = math.inf
    """End of the search by `clock`."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""

    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.clock() >= self.deadline_s

    def part(self, share: float) -> "SearchLimits":
        """These limits with a share of the time that is left."""
        if self.deadline_s == math.inf:
            return self
        now = self.clock()
        return replace(self, deadline_s=now + share * max(0.0, self.deadline_s - now))


UNLIMITED = SearchLimits()
"""No limit of time."""
