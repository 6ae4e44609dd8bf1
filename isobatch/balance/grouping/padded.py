"""Groups of a window for batches that are padded: samples of similar length.

For loaders that feed models without attention over packed samples. Sorted by length, samples are
cut into as few batches as possible, and of such cuts into one with the least padding, by dynamic
programming over the ends of batches. Without the vision cap no other grouping has fewer batches, or
as many with less padding: taking a batch's samples from neighbours never makes one longer.

A batch's cost is its rows times its longest sample. AI2D + ChartQA, 4,096 tokens, windows of 2,048
samples: .04 % padding, and 13.8 % more batches than packing needs, since three samples of 1,366
tokens do not fit. Evening out vision among neighbours cost more padding than it balanced, so that
is left to the order. Pure; integers only. 2,048 samples take a millisecond.
"""

import math
from bisect import bisect_left

import numpy as np

from isobatch.balance.grouping.caps import PaddedChoice
from isobatch.balance.grouping.window import WAITING_SHARE, planned_order
from isobatch.balance.kernels import free_kernel
from isobatch.balance.metrics import longest
from isobatch.common.types import Groups, IntArray, Limits

FULL, SEVERAL, LEAST_BATCHES = 0.9, 2, 64
"""A chosen token cap fills batches with samples by so much, holds so many on average, and leaves so
many batches of those that it is chosen by.
"""
MULTIPLES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""Token caps that are tried, in longest samples."""
FREE = 0.005
"""Share of batches that a chosen vision cap may cost."""


def choose_padded_limits(
    vision: IntArray,
    tokens: IntArray,
    *,
    max_tokens: int | None,
    max_vision: int | None,
    vision_unit: str,
) -> PaddedChoice:
    """Caps of padded batches of such samples, as far as none is given; and why.

    The least tokens under which batches are `FULL` of samples, else the ones under which they are
    fullest; then the least vision that costs no batches.
    """
    rows = np.argsort(-tokens, kind="stable")
    longest_one = max(1, int(tokens.max(initial=0)))
    free = int(vision.sum())

    def num_batches(q_t: int, q_v: int) -> int:
        limits = _caps(q_t, q_v, vision_unit)
        return max(1, len(_cut(rows, vision[rows], tokens[rows], limits)))

    q_v = free if max_vision is None else max_vision
    sizes = [max_tokens] if max_tokens else [int(factor * longest_one) for factor in MULTIPLES]
    numbers = {q_t: num_batches(q_t, q_v) for q_t in sizes}
    tried = [q_t for q_t in sizes if q_t == sizes[0] or numbers[q_t] >= LEAST_BATCHES]
    fills = {q_t: int(tokens.sum()) / (q_t * numbers[q_t]) for q_t in tried}
    full = [q for q in tried if fills[q] >= FULL and numbers[q] * SEVERAL <= len(rows)]
    q_t = full[0] if full else max(tried, key=lambda size: fills[size])
    if max_vision is None:
        max_batches = int(numbers[q_t] * (1 + FREE))
        allowed = range(int(vision.max(initial=0)), free + 1)
        first_free = bisect_left(
            allowed, x=True, key=lambda cap: num_batches(q_t, cap) <= max_batches
        )
        q_v = allowed[first_free]
    limits = _caps(q_t, q_v, vision_unit)
    count = num_batches(q_t, q_v)
    return PaddedChoice(
        limits=limits,
        tokens_given=bool(max_tokens),
        vision_given=max_vision is not None,
        multiple=q_t / longest_one,
        samples_per_batch=len(rows) / count,
        fill=int(tokens.sum()) / (count * q_t),
    )


def group_padded(
    vision: IntArray,
    tokens: IntArray,
    limits: Limits,
    *,
    seed: int,
    place: tuple[int, int] = (0, 0),
    is_last: bool = True,
) -> tuple[Groups, IntArray]:
    """Padded batches in random order, each with its longest sample first; samples that wait, int64.

    As `balance.grouping.window.group_window`, but `max_seq_len` holds for the rows of a batch times
    its longest sample. Those wait that have the most padding, or rows to spare.
    """
    is_over = (vision > limits.max_vision) | (tokens > limits.max_seq_len)
    over, rows = np.flatnonzero(is_over), np.flatnonzero(~is_over)
    rows = rows[np.argsort(-tokens[rows], kind="stable")]
    batches = _cut(rows, vision[rows], tokens[rows], limits)
    # how far each batch is from another row: its tokens or vision, of 2**16 that it could have
    length = longest(batches, tokens)
    room = limits.max_seq_len // np.maximum(length, 1) * length
    fills = np.maximum(
        (batches.sum(tokens) << 16) // np.maximum(room, 1),
        (batches.sum(vision) << 16) // max(1, limits.max_vision),
    )
    count = 0 if is_last else min(math.ceil(len(batches) * WAITING_SHARE), len(batches) - 1)
    by_fill = np.argsort(fills, kind="stable")
    waiting = batches.take(by_fill[: max(0, count)]).samples
    chosen = batches.take(np.sort(by_fill[max(0, count) :]))
    return planned_order(chosen, over, seed=seed, place=place), waiting


def _caps(q_t: int, q_v: int, vision_unit: str) -> Limits:
    """Caps without targets of their own."""
    return Limits(
        max_seq_len=q_t, max_vision=q_v, min_seq_len=q_t, min_vision=q_v, vision_unit=vision_unit
    )


def _cut(rows: IntArray, vision: IntArray, tokens: IntArray, limits: Limits) -> Groups:
    """Samples `rows`, the longest first, as batches of neighbours; each alone is within caps."""
    offsets = _cheapest_cut(
        vision.astype(np.int64), tokens.astype(np.int64), limits.max_vision, limits.max_seq_len
    )
    return Groups(rows, offsets)


@free_kernel
def _cheapest_cut(vision, tokens, max_vision, max_tokens):  # type: ignore[no-untyped-def]
    """Offsets of the fewest batches that fit, int64, of those with the least area.

    `tokens` fall, so a batch is as long as its first sample; each sample fits alone.
    """
    num_samples = len(tokens)
    # of the samples from each place on: batches, area, and where the first batch ends
    counts, areas = np.zeros(num_samples + 1, np.int64), np.zeros(num_samples + 1, np.int64)
    ends = np.zeros(num_samples + 1, np.int64)
    for start in range(num_samples - 1, -1, -1):
        seen = 0
        end = start
        while end < num_samples:
            seen += vision[end]
            end += 1
            area = tokens[start] * (end - start)
            if area > max_tokens or seen > max_vision:
                break
            count, area = 1 + counts[end], area + areas[end]
            is_fewer = count < counts[start] or end == start + 1
            if is_fewer or (count == counts[start] and area < areas[start]):
                counts[start], areas[start], ends[start] = count, area, end
    offsets = np.zeros(counts[0] + 1, np.int64)
    for batch in range(counts[0]):
        offsets[batch + 1] = ends[offsets[batch]]
    return offsets
