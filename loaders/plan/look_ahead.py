"""Plans of steps, some way ahead of their work, so that stores are asked early and for many groups
at a time.

A step's groups are a few hundred kilobytes in several places. Asked for step by step, each waits
for a round trip, and requests are small; known many steps ahead, neighbours travel together and all
connections are busy. For the loader; of builds on disk some are planned at a time only because that
is quicker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from loaders.plan.steps import StepPlan, Steps
from loaders.read.reader import SampleReader

AHEAD_BYTES = 64 << 20
"""Asked for and not yet taken, about, but at least one step: 16 requests of 4 MB, as many as are
under way.
"""
MAX_WINDOW, SLOW_WINDOW = 64, 4
"""Steps planned at a time, at most; the second where each takes longer: with a step planner, or in
random order.
"""


def plans_ahead(
    steps: Steps, reader: SampleReader, max_bytes: int | None = None
) -> Iterator[StepPlan]:
    """The rest of the epoch's steps, in order; `reader` hears of each before it is given.

    Windows of 1, 2, 4, ... steps are planned at a time: the first step comes soon, even if planning
    takes long. At most about `max_bytes` are asked for and not yet taken.
    """
    max_bytes = AHEAD_BYTES if max_bytes is None else max_bytes
    planned: deque[tuple[StepPlan, int]] = deque()
    held = 0  # bytes of what is planned
    window, is_remote = 1, reader.is_remote
    while planned or steps.remaining:
        # two windows at the beginning, so that something is on its way behind the first step
        for _ in range(2 if window == 1 and is_remote else 1):
            # half empty, so that windows stay large
            if (planned and not (is_remote and 2 * held <= max_bytes)) or not steps.remaining:
                break
            added = [
                (plan, reader.remote_bytes(plan.items) if is_remote else 0)
                for plan in steps.plan(window)
            ]
            if is_remote:
                reader.prefetch([item for plan, _ in added for item in plan.items])
            planned.extend(added)
            num_bytes = sum(num_bytes for _, num_bytes in added)
            held += num_bytes
            fitting = max_bytes // 2 * len(added) // num_bytes if num_bytes else MAX_WINDOW
            window = max(1, min(2 * window, fitting, MAX_WINDOW if steps.is_quick else SLOW_WINDOW))
        plan, num_bytes = planned.popleft()
        held -= num_bytes
        yield plan
