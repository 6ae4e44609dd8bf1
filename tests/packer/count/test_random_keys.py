"""Any key that is added to a record changes what is learned, is reported, or rejects the sample."""

import copy
import random

from isobatch.counting.records.fields import NO_MEANING
from isobatch.counting.records.loss import LOSS_KEYS
from isobatch.counting.records.media import FILE_KEYS
from isobatch.counting.records.record import RawRecord
from isobatch.counting.records.schemas import RECORD_KEYS
from isobatch.counting.sample_counter import CountSettings, SampleCounter
from isobatch.models.presets import load_model
from isobatch.packer.demo.dataset import demo_tokenizer_path
from support.builds.bad_pictures import PNG
from support.cases import draws

ASK, ANSWER = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}
PICTURE = {"bytes": PNG, "path": "a.png"}
PARTS = [{"type": "text", "text": "Look"}, {"type": "image", "image": PICTURE}]
BASES = (
    {"conversations": [{"from": "human", "value": "<image>?"}, ANSWER, ASK, ANSWER], "image": PNG},
    {"messages": [{"role": "system", "content": "Be kind."}, ASK, ANSWER]},
    {"messages": [{"role": "user", "content": PARTS}, ANSWER]},
    {"messages": [ASK, ANSWER], "images": [PICTURE]},
    {"texts": [{"user": "?", "assistant": "!"}], "images": [PNG]},
    {"conversation": [{"human": "?", "assistant": "!"}, {"human": "a", "assistant": "b"}]},
    {"conversation": [{"input": "?", "output": "!"}]},
    {"messages": [ASK, {"role": "tool_call", "content": '{"name": "f"}'}, ANSWER]},
    {"conversations": [{"role": "user", "content": "<image_00>?"}, ANSWER],
     "image": {"<image_00>": PICTURE}},
    {"question": "?", "answer": "!", "image": PICTURE},
    {"question": "?", "answers": ["!", "no"]},
    {"instruction": "Add.", "input": "1", "output": "2"},
    {"query": "?", "response": "!", "history": [["a", "b"]]},
    {"caption": "A dog.", "image": PNG},
    {"text_list": ["One.", "Two."], "image_info": [{"image_base64": "", "matched_text_index": 0}]},
    {"texts": ["One.", None], "images": [None, PNG]},
    {"text": "One."},
)  # fmt: skip
KEYS = sorted(
    {*RECORD_KEYS, *LOSS_KEYS, *(key for keys in FILE_KEYS.values() for key in keys)}
    | {"reasoning_content", "thinking", "name", "tool_calls", "tool_call_id", "function_call"}
    | {"system", "output_with_loss", "need_eos_token", "train", "training_detail", "functions"}
    | {"objects", "bbox", "rejected_response", "chosen", "score", "min_pixels", "fps", "detail"}
    | {"role", "content", "from", "value", "type", "text", "cache_control", "level", "language"}
)
VALUES = (
    *(0, 1, 0.5, -3, 7, 1e300, True, False, "", "words", "<image>", "0", "data:,x", b"bytes", PNG),
    *([], ["A", "B"], [0, 1], [["a", "b"]], {}, {"a": 1}, {"text": "x"}, [{"name": "f"}], None),
    *({"url": "x"}, [{"role": "user", "content": "x"}], '["A"]', "{}", "user", [[1, 2, 3, 4]]),
)


def objects_in(value):
    """Every object in a record: itself, its turns, their parts and structs of files."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, dict | list):
            yield from objects_in(each)


def changed(rng):
    """A record, another with one more key somewhere, and that key; or None for no change."""
    base = copy.deepcopy(rng.choice(BASES))
    base["id"] = "same"
    for info in base.get("image_info", ()):
        info["image_base64"] = None
        info["image_name"] = "none.png"
    other = copy.deepcopy(base)
    inside = rng.choice(list(objects_in(other)))
    key = rng.choice(KEYS) if rng.random() < 0.8 else "".join(rng.choices("abcXYZ_09", k=5))
    value = copy.deepcopy(rng.choice(VALUES))
    if key in inside:
        return None
    inside[key] = value
    says_nothing = value is None or (isinstance(value, str | bytes | list | dict) and not value)
    # that an answer is learned, a question is not, and where the picture is, is so without the key
    agrees = (
        value in (0, 1, "user", [0, 1]) if key in LOSS_KEYS else (key, value) == ("from", "user")
    )
    is_twice = isinstance(value, bytes) and value == PNG
    return base, other, key, key in NO_MEANING or says_nothing or agrees or is_twice


def learned(row):
    names = ("input_ids", "loss_spans", "image_runs", "num_image_patches", "num_loss_tokens")
    files = [(file["size"], file["width"]) for file in row["images"] or ()]
    return [row[name] for name in names], files, len(row["audios"] or ())


def test_no_key_is_silent():
    settings = CountSettings(model=load_model("tiny"), tokenizer=str(demo_tokenizer_path()))
    counter = SampleCounter(settings)
    for seed in draws(4):
        rng = random.Random(seed)
        cases = [case for case in (changed(rng) for _ in range(500)) if case]
        records = [RawRecord(i, record) for i, (a, b, *_) in enumerate(cases) for record in (a, b)]
        rows = counter.count(records, "set", "/nowhere", "0").table.to_pylist()
        assert len(rows) == len(records)
        for (_, other, key, says_nothing), before, after in zip(
            cases, rows[::2], rows[1::2], strict=True
        ):
            told = f'{key}"' in (after["unread"] or "")
            is_rejected = after["reason"] is not None
            assert told or is_rejected or says_nothing or learned(after) != learned(before), (
                f"seed {seed}: {key!r} is silent in {other!r:.400}"
            )
