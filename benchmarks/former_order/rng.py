"""What version 0.1 drew random bits for, and how it mixed them."""

TIES, BLOCKS, INSIDE, TURNS = range(4)
"""Purposes that `balance.rng` does not use."""
MASK = 2**64 - 1


def mix64(bits: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014): every bit changes every output bit.

    For one Python int at a time: a microsecond, where making a generator takes twenty.
    """
    bits = (bits + 0x9E3779B97F4A7C15) & MASK
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & MASK
    return bits ^ (bits >> 31)
