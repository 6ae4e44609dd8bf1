"""Token ids and labels equal those of transformers; control strings in content stay letters; every
failure is named.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE
from isobatch.counting.pack_block import expand
from isobatch.counting.text.chat_tokenizer import ChatTokenizer, EncodedText, TextRejected, Turn
from isobatch.models.presets import MediaMarkup
from isobatch.packer.demo.dataset import demo_tokenizer_path
from support.cases import for_each
from support.corpora import BYTE_FALLBACK, BYTE_LEVEL, CORPORA, TOKENIZERS

INTERNVL = MediaMarkup(prefix="<img>", suffix="</img>", token="<IMG_CONTEXT>")
QWEN_VL = MediaMarkup(prefix="<|vision_start|>", suffix="<|vision_end|>", token="<|image_pad|>")
LLAVA = MediaMarkup(token="<image>")
FIRST_ADDED = {
    "demo": 2_000,
    "byte_level": 6_006,
    "byte_fallback": 6_010,
    "qwen2_5": 151_665,
    "internlm2": 92_550,
}
"""Ids of the first token that transformers adds after a tokenizer's own."""

MARKED_TEMPLATE = """
{%- for message in messages -%}
    {{ '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' -%}
        {% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else -%}
        {{ message.content + '<|im_end|>' }}
    {%- endif -%}
    {{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
# Each image first, as in llava-hf's templates, and content lists only.
PARTS_TEMPLATE = """
{%- for message in messages -%}
    {{ message.role | upper + ': ' }}
    {%- for part in message.content | selectattr('type', 'equalto', 'image') -%}
        {{ '<image>\n' }}
    {%- endfor -%}
    {%- for part in message.content | selectattr('type', 'equalto', 'text') -%}
        {{ part.text + ' ' }}
    {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT: ' }}{%- endif -%}
"""
# Texts of no loop over messages, of which the last is written otherwise.
REWRITING_TEMPLATE = """
{%- set texts = messages | map(attribute='content') | list -%}
{%- for text in texts -%}
    {{ '<|im_start|>' + (text if loop.last else text | upper) + '<|im_end|>' }}
{%- endfor -%}
"""


def tokenizer_folder(name: str) -> Path:
    return demo_tokenizer_path() if name == "demo" else TOKENIZERS / name


@cache
def ours(name: str, markup: MediaMarkup = INTERNVL, template: str | None = None) -> ChatTokenizer:
    return ChatTokenizer.load(tokenizer_folder(name), markup, chat_template=template)


@cache
def reference(name: str, markup: MediaMarkup = INTERNVL) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder(name))
    tokenizer.add_tokens(
        [t for t in (markup.prefix, markup.suffix, markup.token) if t], special_tokens=True
    )
    return tokenizer


def messages(turns: list[Turn], markup: MediaMarkup = INTERNVL) -> list[dict[str, str]]:
    image = markup.prefix + markup.token + markup.suffix
    return [{"role": turn.role, "content": turn.text.replace("<image>", image)} for turn in turns]


def reference_labels(
    tokenizer: PreTrainedTokenizerFast, chat: list[dict[str, str]], image_id: int
) -> list[int]:
    """Labels by the definition in docs/design.md: prefix differences of the text, and overlap of
    offsets with them.
    """
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    answers = [
        (
            len(
                tokenizer.apply_chat_template(chat[:i], tokenize=False, add_generation_prompt=True)
            ),
            len(tokenizer.apply_chat_template(chat[: i + 1], tokenize=False)),
        )
        for i, message in enumerate(chat)
        if message["role"] == "assistant"
    ]
    return [
        token
        if token != image_id and any(a < last and b > first for first, last in answers)
        else LABEL_IGNORE
        for token, (a, b) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    ]


def check_against_reference(name: str, conversations: list[list[Turn]]) -> None:
    tokenizer, expected = ours(name), reference(name)
    for turns, encoded in zip(conversations, tokenizer.encode_batch(conversations), strict=True):
        assert isinstance(encoded, EncodedText), (turns, encoded)
        chat = messages(turns)
        assert encoded.input_ids.tolist() == expected.apply_chat_template(chat, return_dict=False)
        assert labels_of(tokenizer, encoded) == reference_labels(
            expected, chat, tokenizer.image_token_id
        )
        assert encoded.num_images == sum(turn.text.count("<image>") for turn in turns)


def labels_of(tokenizer: ChatTokenizer, encoded: EncodedText) -> list[int]:
    _, labels = expand(
        encoded.input_ids, encoded.loss_spans, tokenizer.image_token_id, [1] * encoded.num_images
    )
    assert encoded.num_loss_tokens == (labels != LABEL_IGNORE).sum()
    return labels.tolist()


@cache
def corpus(name: str) -> list[list[Turn]]:
    path = CORPORA / name / "annotations.json"
    role = {"human": "user", "gpt": "assistant"}
    return [
        [Turn(role[turn["from"]], turn["value"]) for turn in record["conversations"]]
        for record in json.loads(path.read_text("utf-8"))
    ]


PIECES = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "\n",
            "\n\n",
            "  ",
            " ",
            "e\u0301",
            "\u1100\u1161",
            "한국",
            "👩‍👩‍👧",
            "ﬁ",
            "\ufdd0",
            "\x00",
            "a",
            "<image>",
            "12",
            "\u200b",
        ]
    ),
)


def has_no_control_strings(turns: list[Turn]) -> bool:
    """Hypothesis draws constants of our modules too (`<img>`), which transformers takes for tokens
    and we for text.
    """
    tokens = reference("demo").get_added_vocab()
    return not any(token in turn.text for turn in turns for token in tokens)


TURNS = st.builds(
    lambda system, rounds: (
        ([Turn("system", system)] if system is not None else [])
        + [t for q, a in rounds for t in (Turn("user", q), Turn("assistant", a))]
    ),
    st.none() | st.text(max_size=8),
    st.lists(st.tuples(*[st.lists(PIECES, max_size=6).map("".join)] * 2), min_size=1, max_size=4),
).filter(has_no_control_strings)
QUICK = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("corpus_name", ["manuals", "speech"])
@pytest.mark.parametrize("name", [BYTE_LEVEL, BYTE_FALLBACK])
def test_ids_and_labels_equal_apply_chat_template_on_a_whole_corpus(
    name: str, corpus_name: str
) -> None:
    check_against_reference(name, corpus(corpus_name))


@pytest.mark.thorough
@given(turns=TURNS)
@QUICK
def test_ids_and_labels_equal_apply_chat_template_on_any_conversation(turns: list[Turn]) -> None:
    check_against_reference("demo", [turns])


@pytest.mark.parametrize("name", ["demo", BYTE_LEVEL, BYTE_FALLBACK])
def test_generation_marks_give_the_reference_mask(name: str) -> None:
    conversations = corpus("manuals")[:200] + corpus("speech") if name != "demo" else CONVERSATIONS
    check_marked(name, conversations)


@given(turns=TURNS)
@QUICK
def test_generation_marks_give_the_reference_mask_on_any_conversation(turns: list[Turn]) -> None:
    check_marked("demo", [turns])


def check_marked(name: str, conversations: list[list[Turn]]) -> None:
    tokenizer, expected = ours(name, INTERNVL, MARKED_TEMPLATE), reference(name)
    for turns, encoded in zip(conversations, tokenizer.encode_batch(conversations), strict=True):
        assert isinstance(encoded, EncodedText)
        wanted = expected.apply_chat_template(
            messages(turns),
            chat_template=MARKED_TEMPLATE,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert encoded.input_ids.tolist() == wanted["input_ids"]
        mask = np.array(wanted["assistant_masks"], dtype=bool) & (
            encoded.input_ids != tokenizer.image_token_id
        )
        labels = np.where(mask, encoded.input_ids, LABEL_IGNORE)
        assert labels_of(tokenizer, encoded) == labels.tolist()


CONVERSATIONS = [
    [Turn("user", "<image>\nHow many?"), Turn("assistant", "Three.\n")],
    [
        Turn("system", ""),
        Turn("user", ""),
        Turn("assistant", ""),
        Turn("user", "\n"),
        Turn("assistant", "é\n\n"),
    ],
    [Turn("user", "a<image><image>b"), Turn("assistant", "see <image> here")],
    [Turn("user", "no answer yet")],
]


@pytest.mark.parametrize("name", ["demo", BYTE_LEVEL, BYTE_FALLBACK])
def test_edge_conversations_equal_the_reference(name: str) -> None:
    check_against_reference(name, CONVERSATIONS)


@pytest.mark.parametrize(
    ("name", "markup", "added"),
    [
        (BYTE_LEVEL, INTERNVL, ["<img>", "</img>", "<IMG_CONTEXT>"]),
        (BYTE_LEVEL, QWEN_VL, []),
        (BYTE_LEVEL, LLAVA, ["<image>"]),
        (BYTE_FALLBACK, INTERNVL, ["<img>", "</img>", "<IMG_CONTEXT>"]),
        ("demo", INTERNVL, ["<img>", "</img>", "<IMG_CONTEXT>"]),
    ],
)
def test_unknown_markup_is_added_behind_the_vocabulary_as_transformers_does(
    name: str, markup: MediaMarkup, added: list[str]
) -> None:
    tokenizer, expected = ours(name, markup), reference(name, markup)
    first = FIRST_ADDED[name]
    assert tokenizer.added_tokens == {token: first + place for place, token in enumerate(added)}
    assert tokenizer.vocab_size == len(expected)
    assert tokenizer.image_token_id == expected.convert_tokens_to_ids(markup.token)


def test_tokens_that_only_the_config_lists_get_the_ids_of_transformers_and_a_note() -> None:
    conflicts = ours(BYTE_FALLBACK).id_conflicts
    assert conflicts["<|im_end|>"] == (
        6001 if BYTE_FALLBACK == "byte_fallback" else 92542,
        reference(BYTE_FALLBACK).convert_tokens_to_ids("<|im_end|>"),
    )
    assert ours(BYTE_LEVEL).id_conflicts == {}


def letters(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)[
        "input_ids"
    ]
    return ids


CONTROL_STRINGS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<IMG_CONTEXT>",
    "<img>",
    "</img>",
    "<|im_end|>\n<|im_start|>",
]


@given(
    texts=st.lists(
        st.lists(st.sampled_from(CONTROL_STRINGS) | PIECES, max_size=6).map("".join),
        min_size=2,
        max_size=2,
    )
)
@QUICK
@pytest.mark.parametrize("name", ["demo", BYTE_LEVEL])
def test_control_strings_in_content_stay_letters(name: str, texts: list[str]) -> None:
    assume("<image>" not in "".join(texts) and not any(ord(c) >= 0xF0000 for c in "".join(texts)))
    tokenizer, expected = ours(name), reference(name)
    turns = [Turn("system", "s"), Turn("user", texts[0]), Turn("assistant", texts[1])]
    encoded = tokenizer.encode_batch([turns])[0]
    assert isinstance(encoded, EncodedText)
    start, end = expected.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids: list[int] = []
    for turn in turns:
        # a turn's content is tokenised as if no special token existed, and the template's own are
        # control tokens
        ids += [
            start,
            *letters(expected, f"{turn.role}\n{turn.text}"),
            end,
            *letters(expected, "\n"),
        ]
    assert encoded.input_ids.tolist() == ids
    assert encoded.loss_spans[-1, 1] == len(ids)
    # the newline may share its token with the answer's first letters, and then has a label
    assert (
        expected.decode(ids[: encoded.loss_spans[0, 0]])
        .rstrip("\n")
        .endswith("<|im_start|>assistant")
    )


@pytest.mark.parametrize("name", ["demo", BYTE_LEVEL, BYTE_FALLBACK])
def test_a_control_string_in_one_conversation_changes_no_other(name: str) -> None:
    strange = [
        Turn("user", "What does <|im_end|> mean, beside <IMG_CONTEXT> and <image>?"),
        Turn("assistant", "<img>"),
    ]
    mixed = ours(name).encode_batch([CONVERSATIONS[0], strange, CONVERSATIONS[1]])
    alone = ours(name).encode_batch([CONVERSATIONS[0], CONVERSATIONS[1]])
    assert [mixed[0].input_ids.tolist(), mixed[2].input_ids.tolist()] == [
        e.input_ids.tolist() for e in alone
    ]  # type: ignore[union-attr]
    assert isinstance(mixed[1], EncodedText)
    assert (mixed[1].input_ids == ours(name).image_token_id).sum() == 1
    decoded = reference(name).decode(mixed[1].input_ids)
    assert (
        "What does <|im_end|> mean, beside <IMG_CONTEXT> and <img><IMG_CONTEXT></img>?<|im_end|>"
        in decoded
    )


def test_private_characters_beside_a_control_string_are_rejected_not_forged() -> None:
    forged = [Turn("user", "\U000f0001 and <|im_end|>"), Turn("assistant", "x")]
    harmless = [Turn("user", "\U000f0001 alone"), Turn("assistant", "x")]
    rejected, encoded = ours("demo").encode_batch([forged, harmless])
    assert isinstance(rejected, TextRejected)
    assert rejected.reason == "control_token"
    assert isinstance(encoded, EncodedText)


def test_templates_that_take_content_lists_place_the_images_themselves() -> None:
    tokenizer = ours("demo", LLAVA, PARTS_TEMPLATE)
    turns = [Turn("user", "Compare <image> with <image>"), Turn("assistant", "Same.")]
    encoded = tokenizer.encode_batch([turns])[0]
    assert isinstance(encoded, EncodedText)
    chat: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Compare "},
                {"type": "image"},
                {"type": "text", "text": " with "},
                {"type": "image"},
            ],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "Same."}]},
    ]
    expected = reference("demo", LLAVA).apply_chat_template(
        chat, chat_template=PARTS_TEMPLATE, return_dict=False
    )
    assert encoded.input_ids.tolist() == expected
    assert encoded.num_images == 2
    answer = encoded.input_ids[slice(*encoded.loss_spans[0])]
    assert (
        reference("demo", LLAVA).decode(answer) == " Same. "
    )  # the prompt's last space is in the first token


def test_content_lists_get_the_markup_when_the_template_writes_no_image_of_its_own() -> None:
    encoded = ours("demo", INTERNVL, PARTS_TEMPLATE).encode_batch([[Turn("user", "a <image> b")]])[
        0
    ]
    assert isinstance(encoded, EncodedText)
    assert reference("demo").decode(encoded.input_ids) == "USER: a <img><IMG_CONTEXT></img> b "


@for_each(
    ("template", "turns", "reason", "detail"),
    [
        (None, [Turn("user", "a\ud800b")], "invalid_utf8", "character 1"),
        (None, [], "chat_template", "empty"),
        ("{{ raise_exception('roles must alternate') if messages|length > 1"
         " else messages[0].content }}",
         [Turn("user", "a"), Turn("user", "b")], "chat_template", "roles must alternate"),
        ("{{ messages[0].content + (messages[1].nothing.at_all if messages|length > 1 else '') }}",
         [Turn("user", "a"), Turn("user", "b")], "chat_template", "nothing"),
        ("{{ messages[0].content }}{{ 1 + 'a' if messages|length > 1 }}",
         [Turn("user", "a"), Turn("user", "b")], "chat_template", "refuses"),
        ("{{ messages[0].content | replace('<IMG_CONTEXT>', '') }}",
         [Turn("user", "<image>")], "chat_template", "0 image tokens in the text for 1"),
        (REWRITING_TEMPLATE,
         [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d")],
         "chat_template", "rewrites earlier turns"),
    ],
)  # fmt: skip
def test_what_cannot_be_tokenised_is_rejected_with_a_reason(
    template: str | None, turns: list[Turn], reason: str, detail: str
) -> None:
    good = [Turn("user", "fine")]
    before, rejected, after = ours("demo", INTERNVL, template).encode_batch([good, turns, good])
    assert isinstance(rejected, TextRejected)
    assert rejected.reason == reason
    assert detail in rejected.detail
    assert isinstance(before, EncodedText)
    assert isinstance(after, EncodedText)


@given(
    ids=st.lists(st.integers(0, 5), max_size=30),
    spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=3),
    data=st.data(),
)
@QUICK
def test_expand_equals_a_loop_over_tokens(
    ids: list[int], spans: list[tuple[int, int]], data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.integers(0, 4), min_size=ids.count(5), max_size=ids.count(5)))
    expected: list[tuple[int, int]] = []
    left = iter(counts)
    for place, token in enumerate(ids):
        labelled = token != 5 and any(a <= place < b for a, b in spans)
        expected += [(token, token if labelled else LABEL_IGNORE)] * (
            next(left) if token == 5 else 1
        )
    loss_spans = np.array(spans, dtype=np.int32).reshape(-1, 2)
    input_ids, labels = expand(np.array(ids, dtype=np.int32), loss_spans, 5, counts)
    assert list(zip(input_ids.tolist(), labels.tolist(), strict=True)) == expected
    assert input_ids.dtype == labels.dtype == np.int32


def test_expand_refuses_another_number_of_images() -> None:
    with pytest.raises(ValueError, match="2 image tokens but tokens for 1 images"):
        expand(np.array([7, 7], dtype=np.int32), np.zeros((0, 2), dtype=np.int32), 7, [3])


def write_tokenizer(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((demo_tokenizer_path() / "tokenizer.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "other", "template": "O{{ messages[0].content }}"},
    ]
    folder = write_tokenizer(tmp_path / "t", chat_template=named)

    def text(source: Path, template: str | None = None) -> str:
        tokenizer = ChatTokenizer.load(source, LLAVA, chat_template=template)
        encoded = tokenizer.encode_batch([[Turn("user", "x")]])[0]
        assert isinstance(encoded, EncodedText)
        return reference("demo").decode(encoded.input_ids)

    assert text(folder) == text(folder / "tokenizer.json") == "Dx"
    assert text(folder, "other") == "Ox"
    assert text(folder, "I{{ messages[0].content }}") == "Ix"
    (folder / "chat_template.jinja").write_text("J{{ messages[0].content }}")
    assert text(folder) == "Jx"
    assert text(folder, str(folder / "chat_template.jinja")) == "Jx"
    only_processor = write_tokenizer(tmp_path / "p")
    (only_processor / "chat_template.json").write_text(
        json.dumps({"chat_template": "P{{ messages[0].content }}"})
    )
    assert text(only_processor) == "Px"


def test_the_hash_changes_with_the_template_the_markup_and_the_tokens(tmp_path: Path) -> None:
    base = ours("demo").hash
    same = ChatTokenizer.load(demo_tokenizer_path() / "tokenizer.json", INTERNVL).hash
    config = json.loads((demo_tokenizer_path() / "tokenizer_config.json").read_text())
    other = write_tokenizer(tmp_path / "o", **config, cls_token="<cls>")
    hashes = {
        ours("demo", INTERNVL, MARKED_TEMPLATE).hash,
        ours("demo", LLAVA).hash,
        ChatTokenizer.load(other, INTERNVL).hash,
    }
    assert same == base
    assert len(hashes | {base}) == 4


def test_a_tokenizer_that_cannot_be_used_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    bare = write_tokenizer(tmp_path / "bare")
    cases: list[tuple[str | Path, str | None, str]] = [
        (tmp_path / "empty", None, "no tokenizer.json"),
        (tmp_path / "broken", MARKED_TEMPLATE, "cannot be loaded"),
        (bare, None, "no chat template"),
        (bare, "missing.jinja", "missing.jinja"),
        (bare, "{% if %}", "chat template, line 1"),
        (bare, "{{ 'nothing' }}", "renders no user message"),
        (tmp_path / "absent" / "deep", None, "no such folder"),
        ("./absent/deep/er", None, "no such folder"),
    ]
    for source, template, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            ChatTokenizer.load(source, INTERNVL, chat_template=template)
        assert "\n" not in str(caught.value)


def test_a_hub_id_is_fetched_and_its_absence_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def fetch(repo_id: str, name: str, *, local_files_only: bool) -> str:
        path = demo_tokenizer_path() / name
        if repo_id != "owner/demo":
            raise hub.errors.LocalEntryNotFoundError("offline")
        if not path.is_file():
            raise hub.errors.EntryNotFoundError(name)
        return str(path)

    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    assert ChatTokenizer.load("owner/demo", INTERNVL).hash == ours("demo").hash
    with pytest.raises(ConfigError, match=r"owner/other.*cannot be reached"):
        ChatTokenizer.load("owner/other", INTERNVL)


def test_calls_of_tools_are_rendered_as_transformers_renders_them() -> None:
    call = {"type": "function", "function": {"name": "look_up", "arguments": {"of": "é <x>"}}}
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    for used, content in ((tools, None), (None, ""), (tools, "I look.")):
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "What is é?"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": 'A "letter"\n'},
            {"role": "assistant", "content": "A letter."},
        ]
        more: list[dict[str, Any]] = [{"tools": used} if used else {}, {"tool_calls": [call]}]
        if content is None:
            more[1]["content"] = None
        turns = [
            Turn(one["role"], one["content"] or "", json.dumps(extra) if extra else "")
            for one, extra in zip(chat, [*more, {}, {}], strict=True)
        ]
        encoded = ours(BYTE_LEVEL).encode_batch([turns])[0]
        assert isinstance(encoded, EncodedText), encoded
        expected = reference(BYTE_LEVEL).apply_chat_template(chat, tools=used, return_dict=False)
        assert encoded.input_ids.tolist() == expected
        assert len(encoded.loss_spans) == 2
    rejected = ours("demo").encode_batch([turns])[0]
    if isinstance(rejected, EncodedText):
        shown = reference("demo").decode(rejected.input_ids.tolist())
        assert "look_up" in shown
        assert "letter" in shown
    else:
        assert "leaves out turn" in rejected.detail


def test_control_strings_in_other_fields_stay_letters() -> None:
    call = {"function": {"name": "look_up", "arguments": {"of": "a<|im_end|>b"}}}
    turns = [Turn("user", "q"), Turn("assistant", "", json.dumps({"tool_calls": [call]}))]
    encoded = ours(BYTE_LEVEL).encode_batch([turns])[0]
    assert isinstance(encoded, EncodedText), encoded
    expected = reference(BYTE_LEVEL)
    end = expected.convert_tokens_to_ids("<|im_end|>")
    plain = call | {"function": {"name": "look_up", "arguments": {"of": "a  b"}}}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [plain]}]
    chat[1]["content"] = ""
    without = expected.apply_chat_template(chat, return_dict=False)
    assert (encoded.input_ids == end).sum() == without.count(end)
    assert "a<|im_end|>b" in expected.decode(encoded.input_ids)
    escaping = (
        "{% for m in messages %}{{ m.content }}{{ m.name | default() | tojson(ensure_ascii=True) }}"
    )
    escaping += "{% endfor %}"
    turns = [Turn("user", "q"), Turn("assistant", "a", json.dumps({"name": "<|im_end|>"}))]
    rejected = ours(BYTE_LEVEL, INTERNVL, escaping).encode_batch([turns])[0]
    assert isinstance(rejected, TextRejected)
    assert rejected.reason == "control_token"


@for_each(
    ("first", "last", "dropped"),
    [
        ("hm", "hmm", [1]),
        ("hmm", "hm", [1]),
        ("hm", "hm", [1]),
        ("see <image> here", "and <image>", []),
        ("", "<image>", []),
    ],
)
def test_a_thought_that_is_left_out_is_named_and_no_other_one(first, last, dropped):  # type: ignore[no-untyped-def]
    thinks = "{% for m in messages %}{{ m.content if loop.last else m.content.split('</think>')[-1]"
    turns = [
        *(Turn("user", "q"), Turn("assistant", f"<think>{first}</think>a")),
        *(Turn("user", "r"), Turn("assistant", f"<think>{last}</think>b")),
    ]
    template = thinks + " }}\n{% endfor %}"
    if "<image>" in first:  # where it is left out, its image is too
        template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    encoded = ours("demo", INTERNVL, template).encode_batch([turns])[0]
    assert isinstance(encoded, EncodedText), encoded
    assert encoded.unused == tuple((i, "<think>") for i in dropped)


def test_a_text_that_would_take_gigabytes_is_rejected(monkeypatch):
    demo = ChatTokenizer.load(demo_tokenizer_path(), INTERNVL)
    monkeypatch.setattr("isobatch.counting.text.chat_tokenizer.MOST_CHARACTERS", 20)
    turns = [Turn("user", "a question"), Turn("assistant", "x" * 9)]
    fits, rejected = demo.encode_batch([turns, [*turns[:1], Turn("assistant", "x" * 10)]])
    assert isinstance(fits, EncodedText)
    assert rejected == TextRejected(
        "too_many_characters", "21 characters; at most 20 are tokenized"
    )
