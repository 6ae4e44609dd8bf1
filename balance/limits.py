"""Caps of a group from the dataset's statistics: OmniBal, section 5.2.

Q_t is the longest sample, the model's context or the user's cap, whichever is least. Q_v follows from the ratio of
vision load to LLM tokens in the data, so that an average group reaches both caps together. Pure.
"""

from __future__ import annotations

import numpy as np

from balance.records import VISION_UNITS, Counts, IntArray, Limits

FILTER_SLACK_TOKENS = 128
"""Q_t - Q'_t: OmniBal, Table 6."""


def choose_limits(
    counts: Counts,
    *,
    vision_unit: str,
    context_len: int,
    max_seq_len: int | None = None,
    max_vision: int | None = None,
) -> Limits:
    """Caps and filter targets for `counts` (OmniBal 5.2); given caps are taken as they are.

    Q_v is raised to the largest sample that Q_t admits where the ratio alone would shut that sample out: a cap taken
    from the data must not reject data. Raises ValueError when there is no sample.
    """
    if len(counts) == 0:
        raise ValueError("no sample to choose caps from; see the rejected samples for the reasons")
    longest = int(counts.seq_len.max())
    q_t = max_seq_len if max_seq_len is not None else min(longest, context_len)
    q_t = min(q_t, context_len)
    fitting = counts.take(np.flatnonzero(counts.seq_len <= q_t))
    q_v = max_vision if max_vision is not None else _vision_cap(fitting, vision_unit, q_t)
    slack = min(FILTER_SLACK_TOKENS, q_t // 8)
    # a group without images never reaches a vision target: with a cap of 0 the target must be out of reach, not met
    # by all
    return Limits(
        max_seq_len=q_t, max_vision=q_v, min_seq_len=q_t - slack, min_vision=max(q_v, 1), vision_unit=vision_unit
    )


def over_limits(counts: Counts, limits: Limits) -> tuple[IntArray, IntArray]:
    """Samples that no group can hold: (longer than `max_seq_len`; the others with more than `max_vision`)."""
    too_long = counts.seq_len > limits.max_seq_len
    too_much_vision = limits.vision_load(counts) > limits.max_vision
    return np.flatnonzero(too_long), np.flatnonzero(too_much_vision & ~too_long)


def _vision_cap(fitting: Counts, vision_unit: str, q_t: int) -> int:
    if vision_unit not in VISION_UNITS:
        raise ValueError(f"vision_unit is {vision_unit!r}; use one of {', '.join(VISION_UNITS)}")
    if len(fitting) == 0:
        return 0
    load = fitting.num_vit_tokens if vision_unit == "vit_tokens" else fitting.num_image_patches
    tokens = int(fitting.seq_len.sum())
    by_ratio = round(q_t * int(load.sum()) / tokens) if tokens else 0
    return max(by_ratio, int(load.max()))
