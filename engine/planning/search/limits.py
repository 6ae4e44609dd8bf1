"""What a partition search may spend, and what it says while it runs.

Windows are counted, so what they alone limit is the same on every machine. Time is not: a search
that a deadline ends finds what the machine has reached by then.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

MOST_WINDOWS = 600_000
"""Windows that are simulated at most: 1 to 15 us each for 64 micro-batches."""
CHUNK_ACTIONS = 10_000_000
"""Actions that are simulated between two looks at the clock: 40 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProgress:
    """Where a search is."""

    width: int
    """Neighbouring stages whose bounds are known, of `num_stages`."""
    num_stages: int
    step_ns: int | None
    """Step of the best partition so far; None if none was found that fits."""
    gap: float
    """Share of that time by which another one could be faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Limits of one search. What the start needs, a partition that fits, is never cut short."""

    most_windows: int = MOST_WINDOWS
    deadline_s: float = math.inf
    """End of the search by `clock`."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    report: Callable[[SearchProgress], None] = lambda _: None
    """Called now and then."""

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
"""No limit of time; windows are always counted."""
