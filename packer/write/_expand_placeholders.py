"""One token per image or audio file -> as many as the LLM sees, and labels."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from balance.types import LABEL_IGNORE, IntArray


def expand(
    input_ids: NDArray[np.int32],
    loss_spans: NDArray[np.int32] | IntArray,
    image_token_id: int,
    tokens_per_image: Sequence[int] | NDArray[np.int64],
    audio_token_id: int | None = None,
    tokens_per_audio: Sequence[int] | NDArray[np.int64] = (),
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`input_ids` with each image or audio token repeated as often as its file has, and labels.

    For one sample, or several one after the other. Labels are the ids inside `loss_spans`, and
    LABEL_IGNORE elsewhere and on image and audio tokens. ValueError unless there are as many
    numbers as tokens.

    >>> ids, labels = expand(np.int32([1, 9, 2, 3]), np.int32([[2, 4]]), 9, [3])
    >>> ids.tolist(), labels.tolist()
    ([1, 9, 9, 9, 2, 3], [-100, -100, -100, -100, 2, 3])
    """
    # +1 where a span begins and -1 after it: their running sum is 1 inside
    borders = np.zeros(len(input_ids) + 1, dtype=np.int32)
    starts, ends = np.minimum(loss_spans, len(input_ids)).T
    np.add.at(borders, starts, 1)
    np.subtract.at(borders, np.maximum(starts, ends), 1)
    labels = np.where(np.cumsum(borders[:-1]) > 0, input_ids, np.int32(LABEL_IGNORE))
    repeats = np.ones(len(input_ids), dtype=np.int64)
    media = {
        "image": (image_token_id, tokens_per_image),
        "audio": (audio_token_id, tokens_per_audio),
    }
    places = {}
    for kind, (token_id, tokens) in media.items():
        # no id is negative
        places[kind] = np.flatnonzero(input_ids == (-1 if token_id is None else token_id))
        if len(places[kind]) != len(tokens):
            found = len(places[kind])
            raise ValueError(
                f"{found} {kind} tokens but tokens for {len(tokens)} {kind}s; give one for each"
            )
        repeats[places[kind]] = tokens
    # nearly all of the result is images' tokens: filled first, then overwritten by the others
    token_ends = np.cumsum(repeats)
    total = int(token_ends[-1]) if len(token_ends) else 0
    expanded = np.full(total, image_token_id, dtype=np.int32)
    expanded_labels = np.full(total, LABEL_IGNORE, dtype=np.int32)
    for end, count in zip(
        token_ends[places["audio"]].tolist(), repeats[places["audio"]].tolist(), strict=True
    ):
        expanded[end - count : end] = -1 if audio_token_id is None else audio_token_id
    is_text = np.ones(len(input_ids), dtype=np.bool_)
    is_text[np.concatenate(list(places.values()))] = False
    targets = token_ends[is_text] - 1
    expanded[targets] = input_ids[is_text]
    expanded_labels[targets] = labels[is_text]
    return expanded, expanded_labels
