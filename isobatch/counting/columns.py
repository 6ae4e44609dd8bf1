"""Names of a dataset's own columns -> names that schemas know: `Columns`. Pure.

For `--columns messages=my_conv,images=pics`, the `columns` of a mixture's dataset, and
LLaMA-Factory's dataset_info.json. A record's other keys stay as they are. One that has a name which
a column was given gets a dot before it, `.messages`: nothing reads that, so it is reported.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from isobatch.common.errors import ConfigError
from isobatch.counting.records.schemas import CONTENT_KEYS, RECORD_KEYS

_NEXT_TO_TURNS = frozenset({"system", "system_prompt", "history", "tools", "input", "context"})
_OTHERS = frozenset({"answers", "label"})
TURNS = ("messages", "conversations", "conversation")
"""Keys of turns."""
PROPERTIES = ("role", "content")
"""Keys of a turn, which have other names too (Axolotl's `message_property_mappings`)."""
CONTENT = CONTENT_KEYS | _NEXT_TO_TURNS | _OTHERS
"""Keys that are text to learn, or lead to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """How a dataset names what the schemas read."""

    names: tuple[tuple[str, str], ...]
    """Our name and the dataset's of each column."""
    is_complete: bool = False
    """Whether other keys with text are not to be read: they get a dot too."""
    role_key: str = ""
    """Key of a turn's role; empty if turns have ours."""
    text_key: str = ""
    roles: tuple[tuple[str, str], ...] = ()
    """The dataset's name and ours of each role."""
    chosen: str = ""
    """Column of the last turn: the better one of two answers."""

    @property
    def theirs(self) -> frozenset[str]:
        """The columns to read."""
        return frozenset(theirs for _, theirs in self.names) | (
            {self.chosen} if self.chosen else set()
        )

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """The dataset's name and ours of each column."""
        return tuple((theirs, ours) for ours, theirs in self.names)

    def ours(self, column: str) -> str:
        """Our name of a column."""
        return next((ours for ours, theirs in self.names if theirs == column), column)

    def apply(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """The record with our names.

        >>> Columns(names=(("messages", "chat"),)).apply({"chat": [], "messages": 1, "id": 7})
        {'.messages': 1, 'id': 7, 'messages': []}
        """
        theirs = self.theirs
        hidden = {ours for ours, _ in self.names} | (CONTENT if self.is_complete else frozenset())
        rest = (key for key in record if key not in theirs)
        result = {f".{key}" if key in hidden else key: record[key] for key in rest}
        result |= {ours: record[column] for ours, column in self.names if column in record}
        if self.role_key or self.text_key:
            key = next((key for key in TURNS if result.get(key) is not None), TURNS[0])
            result[key] = self._turns(result.get(key), record.get(self.chosen))
        if result.get("instruction") == "" and result.get("input"):
            result["instruction"] = result.pop("input")
        return result

    def _turns(self, turns: Any, chosen: Any) -> Any:
        """Turns with our keys and roles; what is no list of objects as it is."""
        if not isinstance(turns, list):
            return turns
        several = [*turns, chosen] if isinstance(chosen, Mapping) else turns
        return [self._turn(turn) if isinstance(turn, Mapping) else turn for turn in several]

    def _turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        pairs = ((self.role_key, "role"), (self.text_key, "content"))
        named = {theirs: ours for theirs, ours in pairs if theirs}
        hidden = {ours for theirs, ours in named.items() if theirs != ours}
        rest = {f".{k}" if k in hidden else k: v for k, v in turn.items() if k not in named}
        result = rest | {ours: turn[theirs] for theirs, ours in named.items() if theirs in turn}
        role = result.get("role")
        return result | (
            {"role": dict(self.roles).get(role, role)} if isinstance(role, str) else {}
        )


def named_columns(pairs: Iterable[tuple[Any, ...]]) -> Columns | None:
    """The columns of pairs of our name and theirs; ConfigError for an unknown name of ours."""
    names = tuple(pairs)
    for ours, theirs in names:
        if ours not in RECORD_KEYS and ours not in PROPERTIES:
            files = {"id", "source", "images", "videos", "audios"}
            known = ", ".join(sorted(CONTENT | files | {*PROPERTIES}))
            raise ConfigError(f"columns: no field {ours!r}; known: {known}")
        if not isinstance(theirs, str) or not theirs:
            raise ConfigError(f"columns: {ours} is {theirs!r}; give the name of a column")
    for place in (0, 1):
        several = [pair[place] for pair in names]
        if twice := next((name for name in several if several.count(name) > 1), None):
            raise ConfigError(f"columns: {twice!r} is given twice")
    if not names:
        return None
    role, text = (dict(names).get(ours, "") for ours in PROPERTIES)
    columns = tuple(pair for pair in names if pair[0] not in PROPERTIES)
    return Columns(names=columns, role_key=role, text_key=text)
