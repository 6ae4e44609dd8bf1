"""A stretch of a dataset's samples, as Energon's metadatasets say it. Pure."""

from dataclasses import dataclass
from typing import Any

from isobatch.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Subset:
    """`first` to `last` of the samples, then the `shares` of those, as Energon rounds them."""

    first: int = 0
    last: int | None = None
    """None: up to the end."""
    shares: tuple[float, float] = (0.0, 1.0)
    is_absolute: bool = False

    @classmethod
    def parse(cls, value: Any, where: str) -> "Subset":
        """What `subset: {range: [25%, 75%]}` or `[100, end]` says; ConfigError for another."""
        ends = value.get("range") if isinstance(value, dict) and len(value) == 1 else None
        if isinstance(ends, list | tuple) and len(ends) == 2:
            first, last = (_number(end) for end in ends)
            is_open = isinstance(ends[1], str) and ends[1].strip() == "end"
            if type(first) is int and (is_open or (type(last) is int and first <= last)):
                return cls(first, None if is_open else int(last or 0), is_absolute=True)
            if isinstance(first, float) and isinstance(last, float) and 0 <= first <= last <= 1:
                return cls(shares=(first, last))
        example = "give {range: [25%, 75%]}, [100, 200] or [100, end]"
        raise ConfigError(f"{where}: subset {str(value)[:60]}; {example}")

    def within(self, outer: "Subset | None", where: str) -> "Subset":
        """This subset, of which one of a blend around it takes its share."""
        if outer is None:
            return self
        if outer.is_absolute:
            raise ConfigError(f"{where}: a subset inside of one by numbers; give percentages there")
        start, end = self.shares
        lower, upper = (start + share * (end - start) for share in outer.shares)
        return Subset(self.first, self.last, (lower, upper), self.is_absolute)

    def borders(self, total: int, where: str) -> tuple[int, int]:
        """First sample and the one after the last, of `total`. ConfigError if there are fewer.

        >>> Subset(shares=(0.25, 0.75)).borders(10, ""), Subset(3, None).borders(10, "")
        ((2, 7), (3, 10))
        """
        last = total if self.last is None else self.last
        if not 0 <= self.first <= last <= total:
            raise ConfigError(f"{where}: subset [{self.first}, {last}] of {total:,} samples")
        size = last - self.first
        return self.first + int(size * self.shares[0]), self.first + int(size * self.shares[1])


def _number(value: Any) -> int | float | None:
    if type(value) is int:
        return value if value >= 0 else None
    text = value.strip() if isinstance(value, str) else ""
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else None
    except ValueError:
        return None
