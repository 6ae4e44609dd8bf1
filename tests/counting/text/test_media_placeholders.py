"""Audio clips in conversations, and documents: ids as transformers gives them, labels where they
belong.
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

from isobatch.common.types import LABEL_IGNORE
from isobatch.counting.pack_block import expand
from isobatch.counting.text.chat_tokenizer import (
    DOCUMENT,
    ChatTokenizer,
    EncodedText,
    TextRejected,
    Turn,
)
from isobatch.models.presets import MediaMarkup
from isobatch.packer.demo.dataset import demo_tokenizer_path
from support.corpora import BYTE_FALLBACK, BYTE_LEVEL, TOKENIZERS

INTERNVL = MediaMarkup(prefix="<img>", suffix="</img>", token="<IMG_CONTEXT>")
AUDIO = MediaMarkup(prefix="<|audio_bos|>", suffix="<|audio_eos|>", token="<|AUDIO|>")
MARKUP = [INTERNVL.prefix, INTERNVL.suffix, INTERNVL.token, AUDIO.prefix, AUDIO.suffix, AUDIO.token]

# Takes strings, or parts in which it numbers the clips, as Qwen2-Audio's.
NUMBERING_TEMPLATE = """
{%- set clips = namespace(count=0) -%}
{%- for message in messages -%}
    {{ '<|im_start|>' + message.role + '\n' }}
    {%- if message.content is string -%}
        {{ message.content }}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == 'audio' -%}
                {%- set clips.count = clips.count + 1 -%}
                {{ 'Audio ' ~ clips.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' }}
            {%- else -%}
                {{ part.text }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
# Takes parts only and writes images, first of all, but knows no audio.
IMAGE_PARTS_TEMPLATE = """
{%- for message in messages -%}
    {{ message.role | upper + ': ' }}
    {%- for part in message.content | selectattr('type', 'equalto', 'image') -%}
        {{ '<IMG_CONTEXT>\n' }}
    {%- endfor -%}
    {%- for part in message.content | selectattr('type', 'equalto', 'text') -%}
        {{ part.text + ' ' }}
    {%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT: ' }}{%- endif -%}
"""


def tokenizer_folder(name: str) -> Path:
    return demo_tokenizer_path() if name == "demo" else TOKENIZERS / name


@cache
def ours(name: str, template: str | None = None) -> ChatTokenizer:
    return ChatTokenizer.load(tokenizer_folder(name), INTERNVL, AUDIO, chat_template=template)


@cache
def reference(name: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder(name))
    tokenizer.add_tokens(MARKUP, special_tokens=True)
    return tokenizer


def encode(tokenizer: ChatTokenizer, *turns: Turn) -> EncodedText:
    encoded = tokenizer.encode_batch([turns])[0]
    assert isinstance(encoded, EncodedText), encoded
    return encoded


def labels_of(tokenizer: ChatTokenizer, encoded: EncodedText) -> list[int]:
    _, labels = expand(
        encoded.input_ids,
        encoded.loss_spans,
        tokenizer.image_token_id,
        [1] * encoded.num_images,
        tokenizer.audio_token_id,
        [1] * encoded.num_audios,
    )
    assert encoded.num_loss_tokens == (labels != LABEL_IGNORE).sum()
    return labels.tolist()


def written_out(text: str) -> str:
    """A raw text with its markup."""
    return text.replace("<image>", "<img><IMG_CONTEXT></img>").replace(
        "<audio>", "<|audio_bos|><|AUDIO|><|audio_eos|>"
    )


NAMES = ["demo", BYTE_LEVEL, BYTE_FALLBACK]
CLIPS_AND_IMAGES = [
    Turn("user", "<audio>\nand <image><audio> together?"),
    Turn("assistant", "Yes: <audio>."),
    Turn("user", "<audio>"),
    Turn("assistant", ""),
]


@pytest.mark.parametrize("name", NAMES)
def test_ids_with_audio_equal_apply_chat_template(name: str) -> None:
    encoded = encode(ours(name), *CLIPS_AND_IMAGES)
    chat = [{"role": turn.role, "content": written_out(turn.text)} for turn in CLIPS_AND_IMAGES]
    assert encoded.input_ids.tolist() == reference(name).apply_chat_template(
        chat, return_dict=False
    )
    assert (encoded.num_images, encoded.num_audios) == (1, 4)
    labels = labels_of(ours(name), encoded)
    assert ours(name).audio_token_id not in labels
    learned = reference(name).decode([label for label in labels if label != LABEL_IGNORE])
    assert "Yes: <|audio_bos|><|audio_eos|>." in learned


def test_audio_tokens_come_behind_those_of_images_in_the_vocabulary() -> None:
    tokenizer, expected = ours("demo"), reference("demo")
    assert tokenizer.added_tokens == {
        token: expected.convert_tokens_to_ids(token) for token in MARKUP
    }
    assert tokenizer.audio_token_id == expected.convert_tokens_to_ids("<|AUDIO|>")
    assert tokenizer.vocab_size == len(expected)


def test_without_audio_the_marker_is_text_and_the_hash_stays_apart() -> None:
    deaf = ChatTokenizer.load(demo_tokenizer_path(), INTERNVL)
    encoded = encode(deaf, Turn("user", "an <audio> tag"))
    assert deaf.audio_token_id is None
    assert encoded.num_audios == 0
    assert "an <audio> tag" in reference("demo").decode(encoded.input_ids)
    assert deaf.hash != ours("demo").hash
    other = ChatTokenizer.load(demo_tokenizer_path(), INTERNVL, MediaMarkup(token="<audio>"))
    assert other.hash not in (deaf.hash, ours("demo").hash)
    assert encode(other, Turn("user", "an <audio> tag")).num_audios == 1


def parts(text: str) -> list[dict[str, str]]:
    first, *rest = text.split("<audio>")
    pieces = [{"type": "text", "text": first}]
    for piece in rest:
        pieces += [{"type": "audio"}, {"type": "text", "text": piece}]
    return [part for part in pieces if part != {"type": "text", "text": ""}]


def test_a_template_that_numbers_the_clips_does_so() -> None:
    turns = [
        Turn("user", "<audio>What is it?"),
        Turn("assistant", "A bell."),
        Turn("user", "And <audio> here, <audio>?"),
    ]
    encoded = encode(ours("demo", NUMBERING_TEMPLATE), *turns)
    chat: list[dict[str, Any]] = [
        {"role": turn.role, "content": parts(turn.text)} for turn in turns
    ]
    expected = reference("demo").apply_chat_template(
        chat, chat_template=NUMBERING_TEMPLATE, return_dict=False
    )
    assert encoded.input_ids.tolist() == expected
    assert encoded.num_audios == 3
    assert "Audio 3: <|audio_bos|>" in reference("demo").decode(encoded.input_ids)


def test_inline_markup_stands_beside_the_images_that_a_template_writes() -> None:
    encoded = encode(
        ours("demo", IMAGE_PARTS_TEMPLATE), Turn("user", "a <audio> b <image> c <audio>")
    )
    written = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    assert (
        reference("demo").decode(encoded.input_ids)
        == f"USER: <IMG_CONTEXT>\na {written} b   c {written} "
    )
    assert (encoded.num_images, encoded.num_audios) == (1, 2)


def test_a_template_that_loses_a_clip_is_rejected() -> None:
    template = "{{ messages[0].content | replace('<|AUDIO|>', '') }}"
    rejected = ours("demo", template).encode_batch([[Turn("user", "<audio>")]])[0]
    assert rejected == TextRejected(
        "chat_template", "the chat template makes 0 audio tokens in the text for 1 <audio> markers"
    )


def document_reference(name: str, text: str) -> tuple[list[int], list[int]]:
    """Ids and labels of a document: all ids but those of the start and of markup, which offsets
    tell apart, and the first, which no model predicts.
    """
    tokenizer = reference(name)
    ids: list[int] = [*tokenizer(written_out(text))["input_ids"], tokenizer.eos_token_id]
    unlearned = {*tokenizer.convert_tokens_to_ids(MARKUP), tokenizer.bos_token_id}
    labels = [LABEL_IGNORE if token in unlearned else token for token in ids]
    return ids, [LABEL_IGNORE, *labels[1:]]


DOCUMENTS = [
    "A plain text.",
    "<image>A caption",
    "Text, <image>\n\nmore <audio> text <image><audio>",
    "<audio>",
    "  two spaces \n",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_documents_are_tokenised_as_by_transformers_and_learned_in_whole(name: str) -> None:
    for text, encoded in zip(
        DOCUMENTS, ours(name).encode_batch([[Turn(DOCUMENT, t)] for t in DOCUMENTS]), strict=True
    ):
        assert isinstance(encoded, EncodedText)
        ids, labels = document_reference(name, text)
        assert encoded.input_ids.tolist() == ids
        assert labels_of(ours(name), encoded) == labels
        assert (encoded.num_images, encoded.num_audios) == (
            text.count("<image>"),
            text.count("<audio>"),
        )
        assert encoded.input_ids.dtype == encoded.loss_spans.dtype == np.int32


PIECES = st.sampled_from(
    [
        "<image>",
        "<audio>",
        " ",
        "\n",
        "  a",
        "word ",
        "é",
        "e\u0301",
        "한국",
        "👩‍👧",
        "\u200b",
        "12",
    ]
)


@given(text=st.lists(PIECES | st.text(max_size=8), max_size=10).map("".join))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_document_is_tokenised_as_by_transformers(text: str) -> None:
    assume(not any(token in text for token in MARKUP))
    encoded = encode(ours("demo"), Turn(DOCUMENT, text))
    ids, labels = document_reference("demo", text)
    assert encoded.input_ids.tolist() == ids
    assert labels_of(ours("demo"), encoded) == labels


@pytest.mark.parametrize(("file_adds", "starts"), [(True, True), (False, False)])
@pytest.mark.parametrize("config_says", [True, False, None])
def test_the_tokenizer_file_decides_about_the_start_as_in_transformers(
    tmp_path: Path, file_adds: bool, starts: bool, config_says: bool | None
) -> None:
    values = json.loads((demo_tokenizer_path() / "tokenizer.json").read_text())
    bos = {"id": "<|im_start|>", "type_id": 0}
    if file_adds:
        values["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": bos}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {
                "<|im_start|>": {
                    "id": "<|im_start|>",
                    "ids": [
                        next(
                            t["id"]
                            for t in values["added_tokens"]
                            if t["content"] == "<|im_start|>"
                        )
                    ],
                    "tokens": ["<|im_start|>"],
                }
            },
        }
    config = json.loads((demo_tokenizer_path() / "tokenizer_config.json").read_text()) | {
        "bos_token": "<|im_start|>"
    }
    config |= {} if config_says is None else {"add_bos_token": config_says}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    encoded = encode(ChatTokenizer.load(tmp_path, INTERNVL, AUDIO), Turn(DOCUMENT, "a text"))
    assert encoded.input_ids.tolist() == [*expected("a text")["input_ids"], expected.eos_token_id]
    assert (encoded.input_ids[0] == expected.bos_token_id) == starts
    assert encoded.loss_spans.tolist() == [[1, len(encoded.input_ids)]]


@pytest.mark.parametrize("name", ["demo", BYTE_LEVEL])
def test_control_strings_in_a_document_stay_letters(name: str) -> None:
    text = "<image>How <|im_end|> and <|AUDIO|> are written: <audio>"
    encoded = encode(ours(name), Turn(DOCUMENT, text))
    tokenizer = reference(name)
    letters = tokenizer("How <|im_end|> and <|AUDIO|> are written: ", split_special_tokens=True)[
        "input_ids"
    ]
    image, audio = (tokenizer.convert_tokens_to_ids(MARKUP[i : i + 3]) for i in (0, 3))
    expected = [
        image[0],
        image[2],
        image[1],
        *letters,
        audio[0],
        audio[2],
        audio[1],
        tokenizer.eos_token_id,
    ]
    assert encoded.input_ids.tolist() == expected
    assert labels_of(ours(name), encoded) == [-100] * 3 + letters + [-100] * 3 + [
        tokenizer.eos_token_id
    ]


def test_documents_and_chats_share_a_batch_without_changing_each_other() -> None:
    samples = [
        [Turn(DOCUMENT, "one <image>")],
        CLIPS_AND_IMAGES,
        [Turn(DOCUMENT, "of <|im_end|>")],
        [Turn("user", "of <|im_end|>"), Turn("assistant", "a")],
    ]
    together = ours("demo").encode_batch(samples)
    for turns, encoded in zip(samples, together, strict=True):
        alone = encode(ours("demo"), *turns)
        assert isinstance(encoded, EncodedText)
        assert encoded.input_ids.tolist() == alone.input_ids.tolist()
        assert encoded.loss_spans.tolist() == alone.loss_spans.tolist()


def test_a_document_among_other_turns_is_rejected() -> None:
    rejected = ours("demo").encode_batch([[Turn(DOCUMENT, "a"), Turn("user", "b")]])[0]
    assert rejected == TextRejected("chat_template", "2 turns, but a document must be the only one")


@given(ids=st.lists(st.integers(0, 5), max_size=30), data=st.data())
@settings(max_examples=100, deadline=None)
def test_expand_with_audio_equals_a_loop_over_tokens(ids: list[int], data: st.DataObject) -> None:
    tokens = {
        kind: data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
        for kind in (4, 5)
        for n in [ids.count(kind)]
    }
    left = {kind: iter(counts) for kind, counts in tokens.items()}
    expected: list[tuple[int, int]] = []
    for place, token in enumerate(ids):
        labelled = token not in left and place >= 3
        expected += [(token, token if labelled else LABEL_IGNORE)] * (
            next(left[token]) if token in left else 1
        )
    spans = np.array([[3, len(ids)]], dtype=np.int32)
    input_ids, labels = expand(np.array(ids, dtype=np.int32), spans, 4, tokens[4], 5, tokens[5])
    assert list(zip(input_ids.tolist(), labels.tolist(), strict=True)) == expected


@pytest.mark.parametrize(("token_id", "tokens"), [(7, [3]), (None, [3]), (8, [1])])
def test_expand_refuses_another_number_of_clips(token_id: int | None, tokens: list[int]) -> None:
    with pytest.raises(ValueError, match=r"\d audio tokens but tokens for 1 audios"):
        expand(
            np.array([7, 7], dtype=np.int32),
            np.zeros((0, 2), dtype=np.int32),
            1,
            [],
            token_id,
            tokens,
        )
