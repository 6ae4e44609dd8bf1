"""Tokens that a build has of a sample, back to one per run of media. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isobatch.common.types import LABEL_IGNORE, IntArray
from isobatch.shards.stored_group import Int32Array


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StoredTokens:
    """The tokens of a packed sample, expanded, and what they were made for."""

    input_ids: Int32Array
    """Shape (num_tokens,), as `labels`."""
    labels: Int32Array
    videos_at: tuple[int, ...]
    """Places of the videos among its images and videos."""
    model: str
    """Hash of the model's preset."""
    tokenizer: str
    """Hash of the tokenizer with its chat template."""
    place: str
    """The build, for messages."""


def one_per_run(
    input_ids: Int32Array, labels: Int32Array, media: Sequence[tuple[IntArray, Sequence[int]]]
) -> tuple[Int32Array, Int32Array]:
    """Ids with one token per run, and spans of labels in them, (num_spans, 2).

    `media`: ids of tokens, and the lengths of the runs of these, for each kind of media. The
    inverse of `pack_block.expand`. ValueError if the tokens do not have such runs.

    >>> ids, labels = np.int32([1, 9, 9, 2, 3]), np.int32([-100, -100, -100, 2, 3])
    >>> ids, spans = one_per_run(ids, labels, [(np.array([9]), [2])])
    >>> ids.tolist(), spans.tolist()
    ([1, 9, 2, 3], [[2, 4]])
    """
    is_kept = np.ones(len(input_ids), np.bool_)
    for token_ids, runs in media:
        places = np.flatnonzero(np.isin(input_ids, token_ids))
        lengths = np.asarray(runs, np.int64)
        ends = np.cumsum(lengths)
        starts = ends - lengths
        if len(places) != (int(ends[-1]) if len(ends) else 0):
            raise ValueError(f"{len(places):,} tokens of media, for runs of {sum(runs):,}")
        if len(ends) and (places[ends - 1] - places[starts] != lengths - 1).any():
            raise ValueError("tokens of media that are not next to each other")
        is_kept[places] = False
        is_kept[places[starts]] = True
    has_label = np.concatenate([[False], (labels != LABEL_IGNORE)[is_kept], [False]])
    spans = np.flatnonzero(np.diff(has_label.astype(np.int8))).reshape(-1, 2)
    return input_ids[is_kept], spans.astype(np.int32)
