"""Which of several answers or captions a sample has. Pure.

For `counting.records.schemas`, before it looks for a schema. A record with a list of answers
(question columns of the Hub) becomes one question with one answer, by `Reading.answers`:

- "first": the first of the list;
- "drawn": one by the seed and the sample's id, so the order of reading does not matter. All that
  are listed have the same chance: of VQAv2's ten, the one that most people gave is drawn most;
- "all": a sample for each different text, in the order of the list, called `ID#a1`, `ID#a2`, ...
  (`ID#2` is what a second sample of the same id is called). A single one keeps the id.

Lists are of texts or numbers, of objects with the text under a key of `TEXT_KEYS` (VQAv2, TextVQA),
or an object of such lists (SQuAD, and `datasets`' own form of a list of objects).
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from isobatch.counting.records.fields import Fields
from isobatch.counting.records.media import SampleProblem
from isobatch.counting.records.reading import Reading

ANSWER_COLUMNS = (("question", "answers"), ("query", "answers"), ("query", "label"))
"""Keys of a question and of its answers: TextVQA, DocVQA, VQAv2; ChartQA."""
CAPTION_COLUMNS = ("captions", "caption")
"""Keys of several captions: COCO, Flickr30k."""
TEXT_KEYS = ("answer", "text", "raw", "caption")
"""Keys of the text in an object of a list of answers or captions."""
HUB_KEYS = frozenset({"query", "label", "answers", "captions"})
"""Keys that only this file reads."""
_OTHER_CONTENT = ("conversations", "messages", "text_list", "texts", "response")
"""Keys of schemas that come before questions."""


def one_answer_each(
    record: Fields, pairs: Sequence[tuple[str, str]], reading: Reading, sample_id: str
) -> Sequence[tuple[str, Fields]]:
    """The samples of a record: what comes after its id, and the record with that answer alone.

    `pairs`: the keys of questions with one answer, which come first. SampleProblem if the answers
    are not texts (`bad_turn`), or there is none (`no_answer`).
    """
    keys = _columns(record, pairs)
    if keys is None:
        return (("", record),)
    key, values, renamed = keys
    texts = _texts(record[key], key)
    if reading.answers == "all":
        several = list(dict.fromkeys(texts))
    elif reading.answers == "drawn":
        # the id may hold half of a surrogate pair
        seed = f"{reading.seed} {sample_id}".encode("utf-8", "replace")
        number = int.from_bytes(blake2b(seed, digest_size=8).digest(), "little")
        several = [texts[number % len(texts)]]
    else:
        several = texts[:1]
    suffixes = [f"#a{number}" for number in range(1, len(several) + 1)]
    if len(several) == 1:
        suffixes = [""]
    return [
        (suffix, record.overlaid({**values, renamed: text}))
        for suffix, text in zip(suffixes, several, strict=True)
    ]


def _columns(
    record: Fields, pairs: Sequence[tuple[str, str]]
) -> tuple[str, dict[str, Any], str] | None:
    """The key of several answers, the question as schemas name it, and the answer's name there.

    None for a record of another schema.
    """
    for key in _OTHER_CONTENT:
        if record.peek(key) is not None:
            return None
    pair = next((pair for pair in pairs if _has(record, *pair)), None)
    if pair is not None:
        return (pair[1], {}, pair[1]) if _are_several(record.peek(pair[1])) else None
    for question, answers in ANSWER_COLUMNS:
        if _has(record, question, answers):
            return answers, {"question": record[question]}, "answer"
    for key in CAPTION_COLUMNS:
        if _has(record, key) and _are_several(record.peek(key)):
            return key, {}, "caption"
    return None


def _has(record: Fields, *keys: str) -> bool:
    return all(record.peek(key) is not None for key in keys)


def _are_several(value: Any) -> bool:
    """Whether a value is answers, and neither one text nor messages or parts of one."""
    if isinstance(value, Mapping):
        return any(isinstance(value.get(key), list) for key in TEXT_KEYS)
    if not isinstance(value, list):
        return False
    return not any(isinstance(item, Mapping) and not _text_keys(item) for item in value)


def _text_keys(item: Mapping[str, Any]) -> list[str]:
    """The keys of an object of answers that hold its text; none for messages and their parts."""
    if "role" in item or "from" in item or "type" in item:
        return []
    return [name for name in TEXT_KEYS if item.get(name) is not None]


def _texts(value: Any, key: str) -> list[str]:
    """The answers in a value, one or more; SampleProblem if there is none, or one is no text."""
    if isinstance(value, Mapping):
        name = next((name for name in TEXT_KEYS if value.get(name) is not None), None)
        value = value if name is None else value[name]
    items = value if isinstance(value, list) else [value]
    texts = [_text(item, key) for item in items]
    if not texts:
        raise SampleProblem("no_answer", f"`{key}` is an empty list")
    return texts


def _text(item: Any, key: str) -> str:
    text = item
    if isinstance(item, Mapping):
        text = next((item[name] for name in _text_keys(item)), None)
    if isinstance(text, int | float) and not isinstance(text, bool):
        text = str(text)
    if not isinstance(text, str):
        raise SampleProblem("bad_turn", f"`{key}` holds a {type(item).__name__}, not a text")
    return text
