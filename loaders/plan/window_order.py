"""`WindowOrder`: position in groups that are planned while training runs."""

from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from isobatch.balance.order.global_shuffle import (
    CENTRES,
    MOST_PASSED,
    LoadLookup,
    assign_ranks,
    most_alike,
)
from isobatch.balance.order.mixture import most_alike_mixed
from isobatch.common.errors import IsobatchError
from isobatch.common.types import BoolArray, Groups, IntArray, Limits

LLM_KINDS = ("image", "text", "audio")
LEAST_WIDTH = 4
"""Times a step's groups that wait at least, if `balance` asks for as many: more come by windows."""

PADDED_TOLERANCE = 2.0
"""Times `EQUAL` by which padded batches may differ: those of one length, often of one source, are
so much nearer to each other that steps would else be of one kind. AI2D + ChartQA at 4,096 tokens:
entropy of sources .62 of random's instead of .43, while ranks wait 1.4 % instead of 1.2 %.
"""

IsCancelled = Callable[[], bool]

if TYPE_CHECKING:
    from isobatch.loaders.plan.windows import WindowEpoch


class Lengths(Protocol):
    """What the samples of a dataset cost, as far as that is known."""

    def __len__(self) -> int:
        """Samples of the dataset."""

    def measure(self, samples: IntArray, is_cancelled: IsCancelled, epoch: str) -> BoolArray:
        """Learn what samples cost, together with all ranks; -> which of them can be used.

        `epoch` tells one pass over the same samples from another.
        """

    def column(self, name: str, samples: IntArray) -> IntArray:
        """A column of `Counts` of samples that were measured, int64, same shape."""

    def sorted_sources(self, samples: IntArray) -> IntArray:
        """Number of each sample's source; two sources are in the same order on all ranks."""

    def choose_limits(self, samples: IntArray) -> Limits:
        """Caps, chosen by these samples as far as they are not given."""

    def with_images(self, samples: IntArray, limits: Limits) -> Limits:
        """Caps that were chosen without images, with one for the images of these samples."""

    def within(self, samples: IntArray) -> IntArray:
        """Samples without those that are over a given cap, which are rejected."""


@dataclass(slots=True)
class WindowFigures:
    """What planning has done so far in this process."""

    num_groups: int = 0
    num_tokens: int = 0
    """LLM tokens of all groups, padding included."""
    num_padding: int = 0
    room: int = 0
    """LLM tokens that groups may have, together."""
    first_window_s: float = 0.0
    """Time until the groups of the first window were there."""
    measuring_s: float = 0.0
    """Time in which samples were measured, waiting for other ranks included."""
    grouping_s: float = 0.0

    @property
    def token_fill(self) -> float:
        """Share of `max_seq_len` that groups fill, on average."""
        return self.num_tokens / max(1, self.room)

    @property
    def padding(self) -> float:
        """Share of groups' tokens that is padding."""
        return self.num_padding / max(1, self.num_tokens)

    def add(
        self, sums: dict[str, IntArray], max_seq_len: int, measuring_s: float, grouping_s: float
    ) -> None:
        """Count a window, by the sums of its groups."""
        self.num_groups += len(sums["num_samples"])
        self.num_tokens += sum(int(sums[f"num_{kind}_tokens"].sum()) for kind in LLM_KINDS)
        self.num_padding += int(sums["num_padding"].sum())
        self.room += len(sums["num_samples"]) * max_seq_len
        self.measuring_s += measuring_s
        self.grouping_s += grouping_s
        self.first_window_s = self.first_window_s or measuring_s + grouping_s


@dataclass(frozen=True, slots=True)
class PlannedWindow:
    """What one window adds."""

    numbers: IntArray
    """Numbers of its groups in the epoch, in random order."""
    carried: IntArray
    """Samples that wait for the next window."""
    consumed: int
    """Samples of the random order that are read after it."""
    limits: Limits | None
    """Caps of its groups."""
    num_rejected: int
    """Samples that cannot be used, or of a stream are not there."""


@dataclass(frozen=True, slots=True)
class PlannedGroups:
    """Groups that are planned and still in use; replaced, never changed."""

    first: int
    """Number of the first of them in the epoch."""
    groups: Groups
    """Of samples of the dataset."""
    sums: dict[str, IntArray]
    """Sums of `num_samples` and the columns of `Counts`; empty until they are measured."""

    def with_groups(self, groups: Groups, sums: dict[str, IntArray]) -> "PlannedGroups":
        """With more groups after these."""
        own = self.groups
        joined = Groups(
            np.concatenate([own.samples, groups.samples]),
            np.concatenate([own.offsets, own.offsets[-1] + groups.offsets[1:]]),
        )
        added = {name: np.concatenate([self.sums[name], sums[name]]) for name in sums}
        return PlannedGroups(self.first, joined, added)

    def without(self, count: int) -> "PlannedGroups":
        """Without the first groups."""
        kept = self.groups.take(np.arange(count, len(self.groups)))
        sums = {name: each[count:] for name, each in self.sums.items()}
        return PlannedGroups(self.first + count, kept, sums)

    def members(self, numbers: IntArray) -> Groups:
        """The groups of these numbers."""
        return self.groups.take(numbers - self.first)


class WindowOrder:
    """A step's groups are most like one of those that have waited longest, as `balance` says.

    Its state lists the samples that were read and not used yet, so it depends on no plan.
    """

    def __init__(
        self,
        epoch: "WindowEpoch",
        waiting: IntArray,
        carried: IntArray,
        *,
        consumed: int,
        given: int,
        passed: int,
    ) -> None:
        """`waiting` groups, samples `carried` into the next window, and how much is past.

        `given` is the number of groups that were taken, `consumed` that of samples that were read,
        `passed` that of steps in a row that did not take the first of the waiting groups.
        """
        self._epoch, self._waiting, self._carried = epoch, waiting, carried
        self._consumed, self.given, self._passed = consumed, given, passed
        self._limits = epoch.first_limits
        # what it began with, and samples that were read since and cannot be used
        self._num_begun, self._num_rejected = consumed - len(self._live()), 0

    @property
    def remaining(self) -> int:
        """Groups still to come: at least those of a step, exact where there are fewer."""
        ahead = self.copy()
        ahead._fill(self._epoch.source.settings.step_groups)
        return len(ahead._waiting)

    @property
    def expected(self) -> int:
        """Groups of the whole epoch by those that are read: by the first ones, if none are.

        By the position alone, and not by how far windows are planned ahead, so equal on all ranks.
        """
        read = self.copy()
        read._fill(0 if self._consumed else 1)
        placed, made = read._consumed - len(read._carried), read.given + len(read._waiting)
        left = len(self._epoch.source.lengths) - placed
        return made + round(left * made / max(1, placed)) if placed else left

    @property
    def is_read(self) -> bool:
        """Whether the epoch's last window is read, so that its groups are known."""
        return self._consumed == len(self._epoch.source.lengths)

    def take(self, count: int) -> IntArray:
        """The next `count` groups, int64, those that waited first; fewer at the epoch's end."""
        self._fill(count)
        return self._taken(np.arange(min(count, len(self._waiting))))

    def take_step(self, dp: int, micro_batches: int, loads: LoadLookup) -> IntArray:
        """The next step's groups, int64, (dp, micro_batches); -1 where the epoch has ended."""
        count, settings = dp * micro_batches, self._epoch.source.settings
        balance = settings.balance
        if settings.are_rounds or not settings.shuffle:  # neighbours to ranks, one after the other
            step = np.full(count, -1, np.int64)
            taken = self.take(count)
            step[: len(taken)] = taken
            return step.reshape(micro_batches, dp).T
        width = 1 / (1 - balance)
        # some to choose from, however large a step is
        self._fill(int(count * min(width, LEAST_WIDTH)))
        candidates = self._waiting[: int(count * width)]
        vision, tokens = loads(candidates)
        # of packed groups, attention is even already; padded ones are as long as their samples
        tokens = tokens + self._epoch.column("attention_tokens", candidates)
        centres = CENTRES if self._passed < MOST_PASSED else 1
        tolerance = min(1.0, 2 * (1 - balance))
        if not settings.packing:
            tolerance = min(PADDED_TOLERANCE, 10 * tolerance)
        sources = self._epoch.sources(candidates)
        if settings.is_mixed and sources.shape[1] > 1:
            chosen = most_alike_mixed((vision, tokens), sources, count, tolerance, centres)
        else:
            chosen = most_alike(vision, tokens, count, tolerance, centres)
        self._passed = 0 if 0 in chosen else self._passed + 1
        places = assign_ranks(vision[chosen], tokens[chosen], dp, micro_batches)
        return np.append(self._taken(chosen), -1)[places]

    def state(self) -> dict[str, Any]:
        """This position, with the samples that wait: plain JSON, the same on every rank."""
        source, epoch = self._epoch.source, self._epoch
        return {
            "consumed": self._consumed,
            "given": self.given,
            "passed": self._passed,
            "carried": self._carried.tolist(),
            "waiting": self._epoch.members(self._waiting),
            "limits": None if self._limits is None else asdict(self._limits),
            "mean_labels": source.mean_labels,
            **epoch.own_state(self._consumed, self._live(), self._carried),
        }

    def copy(self) -> "WindowOrder":
        """An order in the same state that moves independently."""
        return copy(self)  # arrays are replaced, never changed

    def samples_until(self, later: "WindowOrder") -> int:
        """Samples that were read, and given from where this order began until the epoch's end.

        IsobatchError if samples were never read.
        """
        if not later.is_read:
            raise IsobatchError(
                f"an epoch ends after {later._consumed:,} of {len(self._epoch.source.lengths):,} "
                "samples: that is an error of Isobatch's; please report it"
            )
        given = later._consumed - len(later._live()) - self._num_begun
        return given - later._num_rejected

    def forget_past(self) -> None:
        """Let the epoch drop the groups that neither this nor a later position needs."""
        self._epoch.source.limits = self._limits
        before = int(self._waiting.min(initial=self.given))  # if none waits all were taken
        self._epoch.forget(before, self._consumed, self._live())

    def _fill(self, count: int) -> None:
        """Read windows until so many groups wait, or the epoch ends."""
        while len(self._waiting) < count and self._consumed < len(self._epoch.source.lengths):
            window = self._epoch.window(self._consumed, self._carried)
            self._waiting = np.concatenate([self._waiting, window.numbers])
            self._consumed, self._carried = window.consumed, window.carried
            self._limits = window.limits
            self._num_rejected += window.num_rejected

    def _live(self) -> IntArray:
        """Samples that were read and are not given yet."""
        return np.concatenate([self._epoch.samples(self._waiting).groups, self._carried])

    def _taken(self, places: IntArray) -> IntArray:
        """The waiting groups at these places, which wait no longer."""
        groups = self._waiting[places]
        self._waiting = np.delete(self._waiting, places)
        self.given += len(groups)
        return groups
