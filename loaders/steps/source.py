"""`GroupSource` begins an epoch: a table of groups, and a position in their order.

The only interface between `loaders.steps.steps` and an order of groups. Builds, mixtures of builds,
stored order, and windows of a dataset without a build are sources.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from isobatch.balance.loss_weights import LossWeights
from isobatch.balance.order.step_order import GroupOrder
from isobatch.common.types import COUNT_COLUMNS, Counts, IntArray
from isobatch.loaders.steps.selection import SampleRefs, Selection
from isobatch.models.presets import ModelPreset

Position = TypeVar("Position", bound=GroupOrder)


class GroupTable(Protocol):
    """The groups of an epoch, by number; it may grow while it is read."""

    def __len__(self) -> int:
        """Number of groups; an estimate while it grows."""

    @property
    def max_seq_len(self) -> IntArray:
        """Cap of the LLM tokens of a group, by the number of its build."""

    def require_counts(self) -> None:
        """ConfigError or DataError if `column` cannot give `llm_squares`."""
        return

    def column(self, name: str, groups: IntArray) -> IntArray:
        """Sums of `num_samples`, a column of `Counts` or `llm_squares` over `groups`, int64."""

    def selections(self, groups: IntArray) -> list[Selection]:
        """What to read for each of the groups."""

    def samples(self, groups: IntArray) -> SampleRefs:
        """All samples of the groups, group after group."""

    def origins(self, groups: IntArray) -> tuple[IntArray, IntArray]:
        """Build of each group, and its number there in every epoch; int64, same shape."""

    def label_weights(self, weights: LossWeights) -> float:
        """Weights of all labels of the epoch."""

    def sample_column(self, name: str, refs: SampleRefs) -> IntArray:
        """A column of `Counts` of samples of the groups, int64."""


class GroupSource(ABC, Generic[Position]):
    """The groups of all epochs of a run, in an order."""

    model: ModelPreset
    """Whose samples they are."""
    order: str
    """Name of the order in a state."""
    identity: dict[str, object]
    """What a state must agree with when a run resumes; plain JSON."""

    @abstractmethod
    def begin(self, epoch: int, state: dict[str, Any], ranks: int) -> tuple[GroupTable, Position]:
        """An epoch's groups, and its order after the position `state`; {}: at its beginning.

        `ranks`: data-parallel ranks that must get equally many groups; 1 if they need not.
        ValueError or TypeError for a state of something else.
        """

    def adopted(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state of what these groups were before as one of what they are now, if it is that."""
        return state

    @abstractmethod
    def samples_between(self, table: GroupTable, first: Position, last: Position) -> int:
        """Samples that steps from `first` to `last`, two positions in one epoch, should have."""

    def prepare(self, epoch: int) -> None:
        """Start in the background what that epoch needs, if that takes long."""

    def forget(self, position: Position) -> None:
        """Let go of what neither this position nor a later one needs."""

    def next_state(self, position: Position) -> dict[str, Any]:
        """The state to begin the next epoch with, after the last step of this one."""
        return {}

    def require_start(self, epoch: int) -> None:
        """ConfigError if that epoch cannot be begun without the steps before it."""

    def waiting_line(self, shape: tuple[int, int]) -> str:
        """How long ranks will wait, if that is long, and what to do; `shape`: (dp, micro_batches).

        Empty if they will not, or if it is not known.
        """
        return ""


def sample_counts(table: GroupTable, refs: SampleRefs) -> Counts:
    """What samples of an epoch's groups cost."""
    return Counts(**{name: table.sample_column(name, refs) for name in COUNT_COLUMNS})
