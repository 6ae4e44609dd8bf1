"""Raw record -> sample: its keys say which known schema it has. Pure.

Each schema becomes turns with `<image>`, `<video>` and `<audio>` markers, and their files. A plain
text, a caption and an interleaved document (MMC4, OBELICS) are one turn with the role `document`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from isobatch.counting.records._message_fields import (
    ROLES,
    joined_calls,
    plain_turns,
    read_fields,
    with_tools,
)
from isobatch.counting.records.answers import HUB_KEYS, one_answer_each
from isobatch.counting.records.choices import CHOICE_KEYS, LETTER_KEYS, with_choices
from isobatch.counting.records.fields import Fields, is_empty
from isobatch.counting.records.loss import LOSS_KEYS, parts_learned, record_learned, turn_learned
from isobatch.counting.records.media import (
    FILE_KEYS,
    Media,
    SampleProblem,
    media_of,
    media_of_base64,
    media_of_part,
)
from isobatch.counting.records.places.grounding import OBJECTS_KEY, read_objects
from isobatch.counting.records.places.marks import (
    MARKERS,
    NUMBERED_KEYS,
    column_numbers,
    edited,
    first_question,
    place_marks,
    record_files,
)
from isobatch.counting.records.reading import DEFAULT_READING, Reading
from isobatch.counting.records.record import (
    STORED,
    TOO_DEEP,
    Content,
    RawRecord,
    RawSample,
    is_deep,
)
from isobatch.counting.records.reject_reasons import Rejected
from isobatch.counting.text.chat_tokenizer import DOCUMENT, IMAGE_MARKER, Turn
from isobatch.counting.text.stored_tokens import StoredTokens

_Places = list[Media | None]
"""Files of parts of messages; None where a part only marks a place."""
_Parts = dict[str, _Places]
"""Kind of files -> the places of that kind."""

TURN_KEYS = ("conversations", "messages")
OTHER_TURNS_KEY = "conversation"
"""Turns (LMSYS's), or pairs of a question and its answer; next to none of TURN_KEYS."""
PAIR_ROLES = (("human", "assistant"), ("user", "assistant"), ("input", "output"))
"""Keys of such a pair: ms-swift's ShareGPT form, xtuner's own."""
QUESTIONS_AND_ANSWERS = (
    ("inputs", "targets"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("query", "response"),
    ("question", "answer"),
)
"""Keys of a record with one question and its answer: FLAN's, Alpaca's, Dolly's, ms-swift's."""
TOOLS_KEYS = ("tools", "functions")
"""What may be called; the second is OpenAI's older one."""
HISTORY_KEY = "history"
"""Earlier questions and answers of a record with one: ms-swift's and LLaMA-Factory's."""
SYSTEM_KEYS = ("system", "system_prompt")
"""A system prompt next to the turns."""
INPUT_KEYS = ("input", "context")
"""What an instruction is about, in Alpaca's and in Dolly's words."""
CAPTION_KEYS = ("caption", "txt", "TEXT")
PAIR_KEYS = ("width", "image_phash")
"""Keys next to `url` and `text` that tell a pair of COYO or LAION from a web page."""
URL_KEYS = ("url", "URL", "raw_url")
CONTENT_KEYS: frozenset[str] = frozenset(
    {*TURN_KEYS, OTHER_TURNS_KEY, "text_list", "texts", "text", *CAPTION_KEYS}
    | {"query", "captions"}
    | {key for keys in QUESTIONS_AND_ANSWERS for key in keys}
)
"""A record without any of these has none of the schemas."""
RECORD_KEYS: frozenset[str] = frozenset(
    {"id", "__key__", "source", "image_info", "status", "error_message", HISTORY_KEY, *TOOLS_KEYS}
    | {*CONTENT_KEYS, *INPUT_KEYS, *PAIR_KEYS, *URL_KEYS, *SYSTEM_KEYS, *LOSS_KEYS}
    | {key for keys in FILE_KEYS.values() for key in keys}
    | {*NUMBERED_KEYS, *HUB_KEYS, *CHOICE_KEYS, *LETTER_KEYS, OBJECTS_KEY}
)
"""Every key that is read: the columns worth reading of a table."""


def parse_records(
    record: RawRecord, source: str, reading: Reading = DEFAULT_READING
) -> list[RawSample | Rejected]:
    """The samples in a record: one, or with `Reading.answers` "all" one for each answer.

    They are of the dataset `source`, unless the record names another itself. Ids are in `id` or
    `__key__`; without either, an id is the record's place.
    """
    sample_id = id_of(record.value, f"{source}:{record.position}")
    source = _text(record.value, "source") or source
    try:
        if record.broken:
            raise SampleProblem(record.reason, record.broken)
        if not isinstance(record.value, Mapping):
            raise SampleProblem("not_an_object", f"it is a {type(record.value).__name__}")
        fields = Fields(record.value)
        if isinstance(fields.peek(STORED), StoredTokens):
            samples: Sequence[tuple[str, Fields]] = [("", fields)]
        else:
            samples = one_answer_each(fields, QUESTIONS_AND_ANSWERS, reading, sample_id)
    except SampleProblem as problem:
        return [Rejected(sample_id, source, problem.reason, problem.detail)]
    return [_parse(value, sample_id + suffix, source, reading) for suffix, value in samples]


def _parse(record: Fields, sample_id: str, source: str, reading: Reading) -> RawSample | Rejected:
    """The sample in a record of one answer."""
    try:
        if isinstance(record.peek(STORED), StoredTokens):
            content = _stored(record)
        else:
            content = _content(with_choices(record, QUESTIONS_AND_ANSWERS, reading), reading)
            turns = record_learned(record, content.turns, reading.keep_columns)
            if turns is not content.turns:
                content = replace(content, turns=turns)
        return RawSample(
            sample_id=sample_id,
            source=source,
            turns=content.turns,
            images=content.images,
            audios=content.audios,
            videos=content.videos,
            objects=content.objects,
            stored=content.stored,
            turns_path=content.turns_path,
            unread=tuple(pair for pair in record.unread() if pair[0] not in reading.keep_columns),
        )
    except SampleProblem as problem:
        return Rejected(sample_id, source, problem.reason, problem.detail)


def id_of(value: Any, fallback: str) -> str:
    """The id in a record, or else `fallback`."""
    for key in ("id", "__key__"):
        number = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(number, int | float) and not isinstance(number, bool):
            return str(number)
        if text := _text(value, key):
            return text
    return fallback


def _text(value: Any, key: str) -> str:
    text = value.get(key) if isinstance(value, Mapping) else None
    # surrogates would break every writer downstream; the text itself is checked by the tokenizer
    return text.encode("utf-8", "replace").decode("utf-8") if isinstance(text, str) else ""


# --- conversations ---


def _conversation(record: Fields, reading: Reading) -> Content:
    """LLaVA's `conversations` and ShareGPT's, OpenAI's `messages` with text or with parts."""
    by_key = {}
    for key in TURN_KEYS:
        raw = _rows(_parsed(record.peek(key), key))
        if isinstance(raw, list | tuple) and raw:
            record[key]
            by_key[key] = raw
    if not by_key:
        raise SampleProblem("no_conversation", "`conversations` is missing, empty or not a list")
    both = [_turns(record, raw, key) for key, raw in by_key.items()]
    if len(both) > 1 and both[1] != both[0]:
        bad = "`conversations` and `messages` are different conversations; keep one"
        raise SampleProblem("bad_turn", bad)
    return _content_of_turns(record, *both[0], f"{next(iter(by_key))}[]", reading)


def _content_of_turns(
    record: Fields, turns: tuple[Turn, ...], parts: _Parts, path: str, reading: Reading
) -> Content:
    """The content of a conversation, with what the record has next to it."""
    turns = _with_system(record, turns)
    for key in TOOLS_KEYS:
        if record.peek(key) is None:
            continue
        with_them = with_tools(turns, record.peek(key), key)
        if with_them is not turns:
            record[key]
            turns = with_them
            break
    files = {kind: _files(record, kind, places) for kind, places in parts.items()}
    if not any(turn.role == "assistant" for turn in turns):
        raise SampleProblem("no_answer", f"{len(turns)} turns, none by the assistant")
    content = _with_files(turns, files, reading, column_numbers(record), path)
    objects = read_objects(record, turns, files["image"] or content.images, content.images)
    return content if objects is None else replace(content, objects=objects)


def _single_key(record: Fields, reading: Reading) -> Content:
    """`conversation`: turns, or pairs, of which the first may have a system prompt.

    One output without an input is a document, as xtuner has it for pre-training.
    """
    key = OTHER_TURNS_KEY
    path = f"{OTHER_TURNS_KEY}[]"
    raw = _rows(_parsed(record[key], key))
    if not _are_objects(raw):
        raise SampleProblem("no_conversation", f"`{key}` is no list of turns or pairs")
    if "role" in raw[0] or "from" in raw[0]:
        return _content_of_turns(record, *_turns(record, raw, key), path, reading)
    roles = next((roles for roles in PAIR_ROLES if set(roles) <= set(raw[0])), None)
    if roles is None:
        raise SampleProblem("bad_turn", f"`{path}` has neither roles nor {PAIR_ROLES}")
    messages: list[Any] = []
    for number, pair in enumerate(record.inner(item, path) for item in raw):
        if number == 0 and not is_empty(pair.peek("system")):
            messages.append({"role": "system", "content": pair["system"]})
        question, answer = (pair.get(role) for role in roles)
        more = {}
        if pair.peek("output_with_loss") in (True, False):
            more = {"loss": bool(pair["output_with_loss"])}
        if len(raw) == 1 and roles[0] == "input" and not question and not messages:
            return _document_text(record.overlaid({"text": answer}), reading)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer, **more})
    return _content_of_turns(record, *_turns(record, messages, path), path, reading)


def _pairs(record: Fields, reading: Reading) -> Content:
    """The Cauldron's `texts`: a list of one user and one assistant text each."""
    messages = []
    for pair in _rows(record["texts"]):
        fields = record.inner(pair, "texts[]")
        messages += [{"role": role, "content": fields.get(role)} for role in ("user", "assistant")]
    turns, parts = _turns(record, messages, "texts[]")
    return _content_of_turns(record, turns, parts, "texts[]", reading)


def _question(record: Fields, reading: Reading) -> Content:
    """One question and its answer, as in FLAN; an `instruction` may have an `input`."""
    keys = next(keys for keys in QUESTIONS_AND_ANSWERS if _has(record, *keys))
    question, answer = (record[key] for key in keys)
    if keys[0] == "instruction" and isinstance(question, str):
        texts = [record[key] for key in INPUT_KEYS if isinstance(record.peek(key), str)]
        question = "\n".join([question, *filter(None, texts)])
    if _are_objects(question) and _are_objects(answer):  # both are lists of messages
        turns, parts = _turns(record, question, f"{keys[0]}[]")
        answers, more = _turns(record, answer, f"{keys[1]}[]")
        joined = {kind: parts[kind] + more[kind] for kind in parts}
        return _content_of_turns(record, (*turns, *answers), joined, f"{keys[1]}[]", reading)
    pairs = [*_history(record), (question, answer)]
    messages = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    turns, parts = _turns(record, messages, keys[1])
    return _content_of_turns(record, turns, parts, keys[1], reading)


def _history(record: Fields) -> list[tuple[Any, Any]]:
    """Earlier questions and answers: pairs in a list, which tables may hold as JSON."""
    if is_empty(record.peek(HISTORY_KEY)):
        return []
    pairs = _parsed(record[HISTORY_KEY], HISTORY_KEY)
    known = isinstance(pairs, list | tuple) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    )
    if not known:
        raise SampleProblem("bad_turn", f"`{HISTORY_KEY}` is not a list of [question, answer]")
    return [(pair[0], pair[1]) for pair in pairs]


# --- turns ---


def _turns(record: Fields, raw: Sequence[Any], key: str) -> tuple[tuple[Turn, ...], _Parts]:
    """The turns of a conversation, and the files that their parts bring."""
    parts: _Parts = {kind: [] for kind in MARKERS}
    if (plain := plain_turns(raw)) is not None:
        return plain, parts
    path = key if key.endswith("[]") else f"{key}[]"
    items = [record.inner(item, path) for item in raw]
    turns = tuple(_turn(item, number, parts) for number, item in enumerate(items))
    return joined_calls(turns, items), parts


def _files(record: Fields, kind: str, places: _Places) -> list[Media]:
    """The files that parts of messages bring, else those of the record."""
    files = [media for media in places if media is not None] or record_files(record, kind)
    if places and not files:
        bad = f"{len(places)} parts of the type {kind} for 0 files"
        raise SampleProblem(f"marker_without_{kind}", bad)
    return files


def _parsed(raw: Any, key: str) -> Any:
    """What tables hold as JSON in a text; anything else, such as an empty text, as it is."""
    if not isinstance(raw, str) or not raw.strip():
        return raw
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise SampleProblem("no_conversation", f"`{key}` is a text that is not JSON") from None
    if is_deep(value):
        raise SampleProblem("no_conversation", f"`{key}`: {TOO_DEEP}")
    return value


def _turn(item: Any, number: int, parts: _Parts) -> Turn:
    if not isinstance(item, Fields):
        raise SampleProblem("bad_turn", f"turn {number} is a {type(item).__name__}, not an object")
    raw_role, text = _read_first(item, "from", "role"), _read_first(item, "value", "content")
    if raw_role is not None and raw_role == item.peek("role"):
        item["role"]
    role = ROLES.get(raw_role.strip().lower()) if isinstance(raw_role, str) else None
    if role is None:
        bad = f"turn {number} has the role {str(raw_role)[:80]!r}; known: {', '.join(ROLES)}"
        raise SampleProblem("bad_turn", bad)
    several, pieces = [], []
    if isinstance(text, list):
        several = [item.inner(part, "content[]") for part in text]
        pieces = [_part(part, number, parts) for part in several]
        text = "".join(pieces)
    text, more = read_fields(item, str(raw_role).strip().lower(), text, number)
    if not isinstance(text, str):
        raise SampleProblem("bad_turn", f"the text of turn {number} is a {type(text).__name__}")
    learned = turn_learned(item, role, text)
    return Turn(role, text, more, parts_learned(several, pieces, learned, role))


def _part(part: Any, number: int, parts: _Parts) -> str:
    """A part of an OpenAI message as text; its file is added to `parts`."""
    kind = part.get("type") if isinstance(part, Fields) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part.peek("text"), str):
        return _plain_text(part["text"])
    for name, marker in MARKERS.items():
        keys = (f"{name}_url", f"input_{name}", name)
        if kind in keys:
            parts[name].append(media_of_part(part, keys, name))
            return marker
    known = ", ".join(["text", *MARKERS])
    bad = f"a part of turn {number} has the type {str(kind)[:80]!r}; known: {known}"
    raise SampleProblem("bad_turn", bad)


def _with_system(record: Fields, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Turns after a system prompt next to them; one of their own leaves that unread."""
    prompts = {key: record.peek(key) for key in SYSTEM_KEYS if not is_empty(record.peek(key))}
    if not prompts:
        return turns
    if turns[0].role == "system":
        for key, system in prompts.items():
            if system == turns[0].text:
                record[key]
        return turns
    for key, system in prompts.items():
        if not isinstance(record[key], str):
            raise SampleProblem("bad_turn", f"`{key}` is a {type(system).__name__}")
    if len(set(prompts.values())) > 1:
        raise SampleProblem("bad_turn", f"{' and '.join(f'`{key}`' for key in prompts)} differ")
    return (Turn("system", next(iter(prompts.values()))), *turns)


# --- documents ---


def _mmc4(record: Fields, _reading: Reading) -> Content:
    """MMC4: `text_list`, and in `image_info` the sentence that each image precedes."""
    before: dict[int, list[Media]] = {}
    sentences, infos = record["text_list"], record.get("image_info") or []
    if not isinstance(sentences, list) or not all(isinstance(text, str) for text in sentences):
        raise SampleProblem("bad_turn", "`text_list` is not a list of texts")
    if not isinstance(infos, list):
        bad = f"`image_info` is a {type(infos).__name__}, not a list"
        raise SampleProblem("bad_image_field", bad)
    for info in (record.inner(info, "image_info[]") for info in infos):
        place = info.get("matched_text_index") if isinstance(info, Fields) else None
        if type(place) is not int or not 0 <= place < len(sentences):  # True is an integer too
            bad = f"`image_info` puts an image at sentence {str(place)[:80]}"
            raise SampleProblem("bad_image_field", bad)
        before.setdefault(place, []).append(_mmc4_image(info))
    markers = (IMAGE_MARKER * len(before.get(place, ())) for place in range(len(sentences)))
    texts = [marker + _plain_text(text) for marker, text in zip(markers, sentences, strict=True)]
    images = [image for place in sorted(before) for image in before[place]]
    return _document(" ".join(texts), {"image": images})


def _mmc4_image(info: Fields) -> Media:
    """The image by name, as base64 (converters to tars), or by a URL that nobody downloaded."""
    if info.peek("image_base64") is not None:
        return media_of_base64(info["image_base64"], "image")
    return media_of(info.get("image_name") or info.get("raw_url"), "image")


def _obelics(record: Fields, _reading: Reading) -> Content:
    """OBELICS: `images` and `texts` of equal length, at each place one of the two."""
    images, texts = record["images"], record["texts"]
    if len(images) != len(texts):
        bad = f"{len(images)} `images` and {len(texts)} `texts`; one list of places"
        raise SampleProblem("bad_image_field", bad)
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise SampleProblem("bad_turn", f"`texts` holds a {type(text).__name__}")
    files = [media_of(record.inner(image, "images[]"), "image") for image in images if image]
    pairs = zip(images, texts, strict=True)
    pieces = [IMAGE_MARKER * bool(image) + _plain_text(text or "") for image, text in pairs]
    return _document("\n\n".join(filter(None, pieces)), {"image": files})


def _caption(record: Fields, _reading: Reading) -> Content:
    """An image, a video or a clip and its caption: COYO, img2dataset, and pairs in a tar."""
    text = _read_first(record, *CAPTION_KEYS, "text")
    if not isinstance(text, str):
        raise SampleProblem("bad_turn", f"the caption is a {type(text).__name__}")
    files = {kind: record_files(record, kind) for kind in MARKERS}
    if not any(files.values()):
        raise _no_image(record)
    markers = "".join(marker * len(files[kind]) for kind, marker in MARKERS.items())
    return _document(markers + _plain_text(text), files)


def _no_image(record: Fields) -> SampleProblem:
    """Why a caption has no file: its download failed, or has not been tried."""
    status, error = record.get("status"), record.get("error_message")
    if isinstance(status, str) and status != "success":
        return SampleProblem("missing_image", f"{status}: {error}"[:200] if error else status[:200])
    url = next((record[key] for key in URL_KEYS if isinstance(record.peek(key), str)), None)
    if status is None and url is not None:
        what = f"{url[:120]}: download it first, for example with img2dataset"
        return SampleProblem("image_url", what)
    return SampleProblem("missing_image", "a caption without an image")


def _document_text(record: Fields, reading: Reading) -> Content:
    """Plain text; with images, `<image>` marks their places."""
    text = record["text"]
    if not isinstance(text, str):
        raise SampleProblem("bad_turn", f"`text` is a {type(text).__name__}")
    files = {kind: record_files(record, kind) for kind in MARKERS}
    if not files["image"]:
        text = _plain_text(text)
    placed = _with_files((Turn(DOCUMENT, text),), files, reading, column_numbers(record))
    images, videos, audios = placed.images, placed.videos, placed.audios
    return _document(placed.turns[0].text, {"image": images, "video": videos, "audio": audios})


def _document(text: str, files: Mapping[str, Sequence[Media]]) -> Content:
    bare = text.replace(IMAGE_MARKER, "")
    for kind in (kind for kind in files if files[kind]):
        bare = bare.replace(MARKERS[kind], "")
    if not bare.strip():
        raise SampleProblem("no_conversation", "the text is empty")
    return _content_of((Turn(DOCUMENT, text),), files)


def _stored(record: Fields) -> Content:
    """A sample of a build: its tokens, with as many files as they have runs for."""
    images, videos, audios = (tuple(record[f"{kind}s"]) for kind in MARKERS)
    return Content((), images, audios, videos, stored=record[STORED])


# --- the schema of a record ---


def _content(record: Fields, reading: Reading) -> Content:
    for fits, read in _SCHEMAS:
        if fits(record):
            return read(record, reading)
    known = "`conversations`, `messages`, `text`, a caption, or a question and an answer"
    has = ", ".join(map(str, record))[:200]
    raise SampleProblem("no_conversation", f"it has the keys {has}; expected {known}")


def _is_captioned(record: Fields) -> bool:
    is_linked_pair = _has(record, "url", "text") and _has_any(record, *PAIR_KEYS)
    return is_linked_pair or _has_any(record, *CAPTION_KEYS)


_SCHEMAS: tuple[tuple[Callable[[Fields], bool], Callable[[Fields, Reading], Content]], ...] = (
    (lambda record: _has_any(record, *TURN_KEYS), _conversation),
    (lambda record: isinstance(record.peek(OTHER_TURNS_KEY), list | str), _single_key),
    (lambda record: _has(record, "text_list"), _mmc4),
    (lambda record: _are_objects(_rows(record.peek("texts"))), _pairs),
    (lambda record: all(isinstance(record.peek(k), list) for k in ("texts", "images")), _obelics),
    (lambda record: any(_has(record, *keys) for keys in QUESTIONS_AND_ANSWERS), _question),
    (_is_captioned, _caption),
    (lambda record: "text" in record, _document_text),
)
"""Schemas in the order in which they are tried: the most particular first. None reads by it."""


def _has(record: Fields, *keys: str) -> bool:
    return all(record.peek(key) is not None for key in keys)


def _has_any(record: Fields, *keys: str) -> bool:
    return any(record.peek(key) is not None for key in keys)


def _read_first(record: Fields, *keys: str) -> Any:
    """The first of these values; a key that a record does not have may be a null (in tables)."""
    for key in keys:
        if record.peek(key) is not None:
            return record[key]
    return None


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, Mapping) for x in value)


def _rows(raw: Any) -> Any:
    """A list of objects, also if `datasets` stored it as an object of equally long lists."""
    if not isinstance(raw, Mapping) or not raw:
        return raw
    columns = raw.values()
    if not all(isinstance(column, list) for column in columns) or len(set(map(len, columns))) > 1:
        return raw
    return [dict(zip(raw, row, strict=True)) for row in zip(*columns, strict=True)]


# --- markers: as many as there are files of their kind ---


def _plain_text(text: str) -> str:
    """A text without markers: its schema says itself where images are."""
    if IMAGE_MARKER in text:
        bad = f"the text holds {IMAGE_MARKER}, and its images have places already"
        raise SampleProblem("marker_without_image", bad)
    return text


def _with_files(
    turns: tuple[Turn, ...],
    files: Mapping[str, Sequence[Media]],
    reading: Reading,
    numbers: Mapping[str, Sequence[int]] | None = None,
    path: str = "",
) -> Content:
    """The content of these turns and files, with a marker for each file; SampleProblem if more.

    `numbers`: kind -> those of the columns that its files are from, if they are numbered. `path`:
    that of the turns in the record.
    """
    placed = dict(files)
    # each goes before those that are there: clips, images, videos
    for kind in ("video", "image", "audio"):
        several = (numbers or {}).get(kind, ())
        turns, placed[kind] = place_marks(turns, kind, files[kind], reading, several)
        if placed[kind] or kind == "image":
            turns = _with_markers(turns, MARKERS[kind], len(placed[kind]))
    return _content_of(turns, placed, path)


def _content_of(
    turns: tuple[Turn, ...], files: Mapping[str, Sequence[Media]], path: str = ""
) -> Content:
    """The content of turns with all their markers."""
    images, videos, audios = (tuple(files.get(kind, ())) for kind in MARKERS)
    return Content(turns, images, audios, videos, path)


def _with_markers(turns: tuple[Turn, ...], marker: str, num_files: int) -> tuple[Turn, ...]:
    """Turns with a marker per file, added before the first user turn; none too many."""
    missing = num_files - sum(turn.text.count(marker) for turn in turns)
    if missing < 0:
        bad = f"{num_files - missing} {marker} markers for {num_files} files"
        raise SampleProblem(f"marker_without_{marker[1:-1]}", bad)
    if missing == 0:
        return turns
    first = first_question(turns)
    marked = edited(turns[first], [(0, 0, f"{marker}\n" * missing)])
    return (*turns[:first], marked, *turns[first + 1 :])
