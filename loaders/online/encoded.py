"""`Encoded`: what a user's own function makes of a record, checked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobatch.common.types import LABEL_IGNORE

OF_TEXT = {
    *("input_ids", "labels", "attention_mask", "position_ids"),
    *("token_type_ids", "mm_token_type_ids"),
}
"""What a processor gives next to media, and what is made for packed samples here."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample as the model takes it, for `BalancedLoader(dataset, encode=function)`."""

    input_ids: Any
    """Ids of the tokens: a list, array or tensor of integers, (tokens,). Image tokens are repeated
    as often as the model takes them.
    """
    labels: Any = None
    """(tokens,), aligned with `input_ids`, -100 = no loss. None: all ids, but the image tokens of
    `model=`. That of the first token, which no model predicts, is left out.
    """
    media: Any = ()
    """Images for `model=`: a list of PIL images, file contents (bytes) or paths, in the order of
    their tokens. Or a dict of arrays or tensors by name, such as a processor gives:
    `MicroBatch.processed` has those of its samples joined along dimension 0.
    """
    num_vision: int | None = None
    """What a dict of media costs the vision encoder, in units of `max_vision`; by default the rows
    of its first array.
    """


Encode = Callable[[Any], Encoded]
"""record -> sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedSample:
    """An `Encoded` that was checked."""

    input_ids: NDArray[np.int32]
    labels: NDArray[np.int32]
    images: list[Any]
    arrays: dict[str, Tensor]
    num_vision: int
    extras: list[Any] = field(default_factory=list)
    """Kept columns of its record."""

    @property
    def num_bytes(self) -> int:
        """Memory of tokens and arrays."""
        return 2 * self.input_ids.nbytes + sum(array.nbytes for array in self.arrays.values())


def checked(result: object, image_token_id: int) -> EncodedSample:
    """What an `Encoded` has. ValueError or TypeError, in one line, if it is no sample."""
    if not isinstance(result, Encoded):
        raise TypeError(f"it gives a {type(result).__name__}; give loaders.Encoded(input_ids, ...)")
    input_ids = _ids("input_ids", result.input_ids)
    labels = np.where(input_ids == image_token_id, LABEL_IGNORE, input_ids)
    if result.labels is not None:
        labels = _ids("labels", result.labels, LABEL_IGNORE)
    if len(labels) != len(input_ids):
        raise ValueError(f"{len(labels)} labels for {len(input_ids)} input_ids; align them")
    labels[0] = LABEL_IGNORE
    images, arrays = _media(result.media)
    number = result.num_vision
    if number is None:
        number = next((len(array) for array in arrays.values()), 0)
    elif images or isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"num_vision is {number!r}; give 0 or more, for arrays, or leave it out")
    return EncodedSample(
        input_ids=input_ids, labels=labels, images=images, arrays=arrays, num_vision=number
    )


def _ids(name: str, tokens: Any, also: int = 0) -> NDArray[np.int32]:
    """Ids of tokens, or `also`."""
    values = np.asarray(tokens)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"{name} has the shape {values.shape}; give (tokens,), at least one")
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name} has the dtype {values.dtype}; give integers")
    is_wrong = ((values < 0) & (values != also)) | (values > np.iinfo(np.int32).max)
    if is_wrong.any():
        raise ValueError(f"{name} has {values[is_wrong][0]}, which is no id of a token")
    return values.astype(np.int32)


def _media(media: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """Images, or arrays by name."""
    if isinstance(media, Mapping):
        if wrong := sorted(OF_TEXT & media.keys()):
            raise ValueError(f"media has {wrong[0]}, which is of the text; leave it out")
        arrays = {str(key): torch.as_tensor(value).detach().cpu() for key, value in media.items()}
        if wrong := [name for name, array in arrays.items() if not array.dim()]:
            raise ValueError(f"{wrong[0]} of media has no dimension 0 to join it along; add one")
        return [], arrays
    if isinstance(media, str | bytes) or not isinstance(media, Sequence | None):
        raise TypeError(f"media is a {type(media).__name__}; give a list of images, or a dict")
    return list(media or ()), {}
