"""Records as a tool documents them, packed and loaded without a build, against what they mean.

What a record means is said as messages. Its ids must be those of transformers' own rendering of
them, tokenised as one text, and its labels must be on the texts that are listed.
"""

import json
from dataclasses import dataclass, field
from types import SimpleNamespace

import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer

from isobatch.common.types import LABEL_IGNORE
from isobatch.loaders import BalancedLoader, StreamingLoader
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.shards.manifest import read_manifest
from support.builds.packed import quiet
from support.builds.raw_data import options, write_image

IMAGE = "<image>"
MARKUP = "<img><IMG_CONTEXT></img>"
"""An image in the text of the model `tiny`, with its tokens as one."""
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}{{ message.reasoning_content }}; {% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    " calls {{ call.function.name }} {{ call.function.arguments | tojson }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""With tools, calls and thoughts; `role` and `content` as ChatML has them."""
PATHS = {name: f"{name}.png" for name in "ab"}


@dataclass(frozen=True)
class Case:
    """A record, and what its tool makes of it."""

    record: dict
    means: list = field(default_factory=list)
    """Messages, with `<image>` in their texts; empty if the record is rejected."""
    learned: list = field(default_factory=list)
    """Texts with labels; without any, those of all answers."""
    tools: list | None = None
    unread: tuple = ()
    """Keys that are reported."""
    reason: str = ""
    """Of rejecting it."""
    document: str = ""
    """A text without a chat."""


def user(text, **more):
    return {"role": "user", "content": text, **more}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def tool(text, **more):
    return {"role": "tool", "content": text, **more}


def calls(*pairs, text=""):
    """An answer that calls functions: pairs of a name and arguments."""
    made = [
        {"type": "function", "function": {"name": name, "arguments": args}} for name, args in pairs
    ]
    return said(text, tool_calls=made)


def write_lines(folder, rows):
    """The records as JSON lines, and the place to name."""
    place = folder / "data.jsonl"
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def check(folder, cases, write=write_lines, *, is_in_memory=True, **changes):
    """Check records of one dataset, that `write` writes from rows with ids; returns the manifest.

    `changes` are options of packing, as `columns`; those in memory are given to the loader alone.
    """
    raw = folder / "raw"
    for name in PATHS.values():
        write_image(raw / name, 40, 40, ord(name[0]))
    rows = [{"id": name, **case.record} for name, case in cases.items()]
    place = write(raw, rows)
    given = {"max_seq_len": 4096, "max_rejected": 0.99, "data_root": str(raw)}
    config = options(place, folder / "out", chat_template=TEMPLATE, **given | changes)
    Builder(BuildConfig(**config), quiet()).build()
    columns = dict(pair.split("=") for pair in changes.get("columns", ()))
    ranks = {"workers": 0, "dp_rank": 0, "dp_world_size": 1}
    online = {
        **{"model": "tiny", "tokenizer": str(demo_tokenizer_path()), "chat_template": TEMPLATE},
        **{"data_root": str(raw), "max_rejected": 0.99, "columns": columns or None},
        **ranks,
    }
    online |= {key: value for key, value in changes.items() if key != "columns"}
    loaders = {
        "packed": StreamingLoader(folder / "out", **ranks),
        "place": BalancedLoader(str(place), **online),
    }
    if is_in_memory:
        loaders["memory"] = BalancedLoader(rows, **online)
    tokenizer = AutoTokenizer.from_pretrained(str(demo_tokenizer_path()))
    tokenizer.add_tokens(["<img>", "</img>", "<IMG_CONTEXT>"], special_tokens=True)
    for route, loader in loaders.items():
        found = samples_of(loader)
        assert set(found) == {name for name, case in cases.items() if not case.reason}, route
        for name, sample in found.items():
            _check_sample(cases[name], sample, tokenizer, f"{name}, {route}")
        if route != "packed":
            rejected = {each.sample_id: each.reason for each in loader.rejected}
            assert rejected == {name: case.reason for name, case in cases.items() if case.reason}
        loader.close()
    table = pq.read_table(folder / "out" / "rejected.parquet")
    names, why = (table.column(key).to_pylist() for key in ("sample_id", "reason"))
    reasons = dict(zip(names, why, strict=True))
    assert reasons == {name: case.reason for name, case in cases.items() if case.reason}
    values = read_manifest(str(folder / "out")).values
    named = {key for keys in values.get("never_read", {}).values() for key in keys}
    assert named == {key for case in cases.values() for key in case.unread}
    return SimpleNamespace(values=values, place=place, raw=raw)


def _check_sample(case, sample, tokenizer, name):
    text = case.document
    if not text:
        text = tokenizer.apply_chat_template(
            case.means, tools=case.tools, chat_template=TEMPLATE, tokenize=False
        )
    expected = tokenizer(text.replace(IMAGE, MARKUP), add_special_tokens=False)["input_ids"]
    ids, labels = sample
    is_document = bool(case.document)
    assert ids[: len(expected)] == expected, (name, tokenizer.decode(ids), text)
    assert len(ids) == len(expected) + is_document, name  # a document ends with eos
    learned = case.learned or [m["content"] for m in case.means if m["role"] == "assistant"]
    told = tokenizer.decode(labels, skip_special_tokens=True)
    if not is_document:
        assert [each for each in told.split("\n") if each] == learned, name


def samples_of(loader):
    """Id -> ids with one token for each image, and the ids that have labels."""
    found = {}
    for batch in (batch for step in loader for batch in step):
        cuts = batch.cu_seqlens.diff().tolist()
        pairs = zip(batch.input_ids.split(cuts), batch.labels.split(cuts), strict=True)
        for name, (ids, labels) in zip(batch.sample_ids, pairs, strict=True):
            is_image = ids == loader.image_token_id
            keep = ~is_image | ~torch.roll(is_image, 1)
            found[name] = ids[keep].tolist(), labels[labels != LABEL_IGNORE].tolist()
    return found
