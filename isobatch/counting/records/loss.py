"""What a record says of its loss: which turns are learned. Pure.

| key | its author's tool | 0 or false | 1 or true |
|---|---|---|---|
| `weight` of a turn | OpenAI | no labels | answers have labels |
| `loss` of a turn | ms-swift, xtuner | no labels | answers have labels |
| `train`, `training` of a turn | Axolotl | no labels | labels, whoever speaks |
| `train_detail`, `training_detail` of a turn | Axolotl | for characters: no labels | labels |
| `train`, `weight` of a part | Axolotl | its text has no labels | as of its turn |
| `loss_mask`, `mask` of a turn | several | no labels | labels, whoever speaks |
| `masked` of a turn | torchtune | labels, if an answer | no labels |
| all of them, of a record | | the sample is left out | as without the key |
| `loss_mask`, `mask`, `weight` of a record, a list | | as of each turn | as of each turn |
| `mask` of a record, a role | NeMo | turns of that role have no labels | |

A weight between 0 and 1 is refused, and so is a list that does not fit the turns. Any other value,
such as the loss that another training had, says nothing here: it is not read, and so reported.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from isobatch.counting.records.fields import Fields
from isobatch.counting.records.media import SampleProblem
from isobatch.counting.text.chat_tokenizer import Turn

Learned = bool | tuple[tuple[int, int], ...] | None
"""What is learned of a turn, as `Turn.learned`."""

_OF_ANSWERS = ("weight", "loss")
_OF_ANY_TURN = ("train", "training", "loss_mask", "mask")
_REVERSED = ("masked",)
_DETAILS = ("train_detail", "training_detail")
LOSS_KEYS = frozenset({*_OF_ANSWERS, *_OF_ANY_TURN, *_REVERSED, *_DETAILS})
"""Keys of turns and records that say what is learned; none of them reaches a chat template."""
_LISTS = ("loss_mask", "mask", "weight")
_ROLE_MASKS = {"user": "user", "human": "user", "system": "system"}
_ROLE_MASKS |= {"assistant": "assistant", "gpt": "assistant", "model": "assistant"}


def turn_learned(turn: Fields, role: str, text: str) -> Learned:
    """Whether a turn is learned, by the keys that it has; None if none says so.

    SampleProblem for a weight between 0 and 1, and for keys that contradict one another.
    """
    said: dict[str, bool] = {}
    if LOSS_KEYS.isdisjoint(turn):  # nearly all
        return None
    said = _said(turn, role)
    if len(set(said.values())) > 1:
        raise _refused(f"{' and '.join(turn.path(key) for key in said)} say different things")
    learned = next(iter(said.values()), None)
    if learned and role == "assistant":
        learned = None  # as without the key
    for key in _DETAILS:
        if isinstance(details := turn.peek(key), list) and details:
            return _by_ranges(turn[key], text, learned, role, turn.path(key))
    return learned


def parts_learned(
    parts: Sequence[Fields], pieces: Sequence[str], learned: Learned, role: str
) -> Learned:
    """What is learned of a turn whose parts, with these texts, may say that they are not."""
    keys = ("train", "weight")
    if all(key not in part for part in parts for key in keys):  # nearly all
        return learned
    off = [any(_switch(part, key) is False for key in keys) for part in parts]
    is_on = learned if isinstance(learned, bool) else role == "assistant"
    if not any(off) or isinstance(learned, tuple) or not is_on:
        return learned
    ranges = []
    start = 0
    for piece, is_off in zip(pieces, off, strict=True):
        if piece and not is_off:
            ranges.append((start, start + len(piece)))
        start += len(piece)
    return tuple(ranges) or False


def _said(turn: Fields, role: str) -> dict[str, bool]:
    """What each key of a turn says, as far as it changes anything."""
    said: dict[str, bool] = {}
    for key in (*_OF_ANSWERS, *_OF_ANY_TURN, *_REVERSED):
        value = _switch(turn, key)
        if value is None:
            continue
        learned = value is not (key in _REVERSED)
        # 1 changes nothing where only answers can be switched off
        if not learned or key in _OF_ANY_TURN or role == "assistant":
            said[key] = learned
    return said


def record_learned(
    record: Fields, turns: tuple[Turn, ...], keep_columns: Collection[str]
) -> tuple[Turn, ...]:
    """Turns with what the record itself says about its loss, but for `keep_columns`.

    SampleProblem `not_learned` for a record that says it is not to be learned.
    """
    if LOSS_KEYS.isdisjoint(record):  # nearly all
        return turns
    keys = (*_OF_ANSWERS, *_OF_ANY_TURN, *_REVERSED)
    for key in (key for key in keys if key in record and key not in keep_columns):
        value = record.peek(key)
        if key in _LISTS and isinstance(value, Sequence) and not isinstance(value, str | bytes):
            if len(value) > 0:
                turns = _by_list(record, key, value, turns)
        elif key == "mask" and isinstance(value, str) and value.strip().lower() in _ROLE_MASKS:
            role = _ROLE_MASKS[record[key].strip().lower()]
            turns = tuple(replace(t, learned=False) if t.role == role else t for t in turns)
        elif (switch := _switch(record, key)) is not None and switch is (key in _REVERSED):
            raise SampleProblem("not_learned", f"`{key}` of the record is {value!r}")
    return turns


def _by_list(
    record: Fields, key: str, values: Sequence[Any], turns: tuple[Turn, ...]
) -> tuple[Turn, ...]:
    """Turns, of which a list says each; a system turn that the record has besides is left out."""
    besides = len(turns) - len(values)
    known = all(isinstance(v, bool | int | float) and v in (0, 1) for v in values)
    if not known or besides not in (0, 1) or (besides and turns[0].role != "system"):
        fits = f"`{key}` is a list of {len(values)} for {len(turns)} turns"
        raise _refused(f"{fits}; give 0 or 1 for each")
    record[key]
    switched = []
    for value, turn in zip(values, turns[besides:], strict=True):
        is_as_before = key == "weight" or turn.role == "assistant"
        learned = turn.learned if is_as_before else True
        switched.append(replace(turn, learned=learned if value else False))
    return (*turns[:besides], *switched)


def _switch(fields: Fields, key: str) -> bool | None:
    """The value of a key that is 0, 1, or a boolean, which is noted as read; else None."""
    value = fields.peek(key)
    if isinstance(value, bool | int | float):
        if value in (0, 1):
            return bool(fields[key])
        if 0 < value < 1:
            bad = f"`{fields.path(key)}` is {value:g}; labels have a loss or none"
            hint = f"a sample's own weight is a column: --keep-columns {key}"
            raise _refused(f"{bad} ({hint})")
    return None


def _by_ranges(details: list[Any], text: str, learned: Learned, role: str, path: str) -> Learned:
    """Axolotl's ranges: `begin_offset`, `end_offset` (its last character), `train`."""
    on = [role == "assistant" if learned is None else learned is True] * len(text)
    for detail in details:
        keys = ("begin_offset", "end_offset", "train")
        begin, end, train = [detail.get(key) if isinstance(detail, dict) else None for key in keys]
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end < len(text):
            raise _refused(f"`{path}` needs begin_offset and end_offset, two places in the text")
        if train not in (True, False):
            raise _refused(f"`{path}` needs train: true or false")
        on[begin : end + 1] = [bool(train)] * (end + 1 - begin)
    edges = [i for i, (one, next_) in enumerate(pairwise([False, *on, False])) if one != next_]
    return tuple(zip(edges[::2], edges[1::2], strict=True)) or False


def _refused(detail: str) -> SampleProblem:
    return SampleProblem("bad_loss", detail)
