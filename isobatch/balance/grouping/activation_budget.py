"""Memory budget of a group's activations, per token and unit of vision. Pure.

`balance.grouping.caps` shares it between both caps; `models.layer_bytes` gives a model's prices.
"""

from dataclasses import dataclass

from isobatch.common.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBudget:
    """Bound of a group: `bytes_per_token * tokens + bytes_per_vision * vision <= num_bytes`.

    To give it in tokens instead: a price of 1 per token, and per unit of vision its ViT tokens.
    """

    num_bytes: float
    bytes_per_token: float
    bytes_per_vision: float
    """Price of a unit of the vision cap: an image patch, or a ViT token."""

    def __post_init__(self) -> None:
        if self.num_bytes <= 0 or self.bytes_per_token <= 0 or self.bytes_per_vision < 0:
            prices = "a budget and a price per token above 0, and a price of vision of 0 or more"
            raise ConfigError(f"{self}: give {prices}")

    def most_tokens(self, vision: int) -> int:
        """LLM tokens that fit next to so much vision; below 0 where even that is too much.

        >>> ActivationBudget(num_bytes=100, bytes_per_token=2, bytes_per_vision=5).most_tokens(10)
        25
        """
        return int((self.num_bytes - self.bytes_per_vision * vision) // self.bytes_per_token)

    def most_vision(self, tokens: int) -> int | None:
        """Units of vision that fit next to so many LLM tokens; None where vision is free."""
        if self.bytes_per_vision == 0:
            return None
        return int((self.num_bytes - self.bytes_per_token * tokens) // self.bytes_per_vision)
