"""What keeps groups from being full, and what to change. Pure."""

import math
from collections.abc import Mapping

from isobatch.common.types import Groups, IntArray, Limits
from isobatch.packer.format_text import share_text

WORTH = 0.02
"""Unused capacity below which nothing is worth changing."""

KINDS = {
    "vision": "in groups whose vision cap leaves no room",
    "alone": "in groups of one sample",
    "others": "in other groups",
}
"""What limits a group -> the same in words."""


def unused_tokens(
    groups: Groups, tokens: IntArray, vision: IntArray, limits: Limits
) -> dict[str, float]:
    """Share of all groups' LLM token capacity that is unused, by the kind of what limits a group.

    A group has no room for vision if a mean sample, of those that have any, no longer fits.
    """
    room = limits.max_seq_len - groups.sum(tokens)
    loads = vision[groups.samples]
    typical = float(loads[loads > 0].mean()) if loads.any() else 0.0
    is_full = (limits.max_vision - groups.sum(vision) < typical) & (typical > 0)
    is_alone = ~is_full & (groups.sizes == 1)
    kinds = {"vision": is_full, "alone": is_alone, "others": ~is_full & ~is_alone}
    capacity = max(1, len(groups) * limits.max_seq_len)
    return {kind: int(room[chosen].sum()) / capacity for kind, chosen in kinds.items()}


def fill_lines(
    unused: Mapping[str, float], lower_bounds: Mapping[str, int], limits: Limits
) -> list[str]:
    """Sentences on what limits the fill, and what to change."""
    total = math.fsum(unused.values())
    parts = ", ".join(f"{share_text(unused[kind])} {KINDS[kind]}" for kind in KINDS if unused[kind])
    line = f"unused: {share_text(total)} of the groups' LLM tokens" + (
        f": {parts}" if parts else ""
    )
    if total < WORTH:
        return [line, "to change: nothing; groups are about as full as they can be"]
    largest = max(unused, key=lambda kind: unused[kind])
    if largest == "vision":
        # the cap at which vision alone asks for no more groups than tokens do
        even = limits.max_vision * lower_bounds["vision"] / max(1, lower_bounds["tokens"])
        cap = max(math.ceil(even), limits.max_vision + 1)
        return [line, f"to change: --max-vision {cap} or more; memory and waiting grow with it"]
    larger = f"--max-seq-len {2 * limits.max_seq_len}, if the model's context and memory allow it"
    why = "a sample of more than half the cap is alone" if largest == "alone" else "short of choice"
    hint = "" if largest == "alone" else ", or more data"
    return [line, f"to change: {why}: {larger}{hint}"]
