"""What authors say of turns is in ids and labels: learned or not, more fields, dates; and templates
that take too much end in one line.
"""

import json
import time

import numpy as np
import pytest

from isobatch.common.errors import ConfigError
from isobatch.counting.text.chat_tokenizer import ChatTokenizer, EncodedText, TextRejected, Turn
from isobatch.loaders import BalancedLoader
from isobatch.models.presets import MediaMarkup
from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.demo.dataset import demo_tokenizer_path
from isobatch.shards.manifest import read_manifest
from support.builds.packed import digests, quiet
from support.builds.raw_data import options, record, write_dataset
from support.cases import for_each

MARKUP = MediaMarkup(prefix="<img>", suffix="</img>", token="<IMG_CONTEXT>")
START = "{{ '<|im_start|>' + m.role + '\\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
ANSWER = "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
PLAIN = (
    f"{{% for m in messages %}}{START}{{{{ m.content + '<|im_end|>\\n' }}}}{{% endfor %}}{PROMPT}"
)
MARKED = PLAIN.replace(
    "{{ m.content + '<|im_end|>\\n' }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\\n' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}",
)
# Qwen3's kind: thoughts of earlier turns are dropped, so a longer conversation rewrites them
FORGETS = PLAIN.replace("{{ m.content", "{% if loop.last %}" + ANSWER + "{% endif %}{{ m.content")
TEMPLATES = {"plain": PLAIN, "marked": MARKED, "forgets": FORGETS}


def load(template, **more):
    return ChatTokenizer.load(demo_tokenizer_path(), MARKUP, chat_template=template, **more)


def encoded(template, *turns, **more):
    tokenizer = load(template, **more)
    (found,) = tokenizer.encode_batch([turns])
    return tokenizer, found


def texts_of(tokenizer, found):
    """Whole text, and the texts with labels."""
    assert isinstance(found, EncodedText), found
    decode = tokenizer._backend.decode
    spans = [found.input_ids[start:end] for start, end in found.loss_spans]
    whole = decode(found.input_ids.tolist(), skip_special_tokens=False)
    return whole, [decode(ids.tolist(), skip_special_tokens=False) for ids in spans]


def talk(*learned):
    """Questions and answers, of which each says whether it is learned."""
    names = ["a question", "the answer", "another question", "the other answer"]
    roles = ["user", "assistant"] * 2
    return [Turn(*each) for each in zip(roles, names, [""] * 4, learned, strict=True)]


LEARNED = {
    "by their roles": ((None,) * 4, ["the answer", "the other answer"]),
    "not the first": ((None, False, None, None), ["the other answer"]),
    "not the last": ((None, None, False, False), ["the answer"]),
    "a question too": ((None, None, True, False), ["the answer", "another question"]),
    "a part": ((None, ((4, 10),), None, False), [" answer"]),
}


@for_each("name", TEMPLATES)
def test_a_turn_is_learned_as_its_author_says(name):
    for case, (learned, expected) in LEARNED.items():
        tokenizer, found = encoded(TEMPLATES[name], *talk(*learned))
        whole, parts = texts_of(tokenizer, found)
        assert [part.split("<|im_end|>")[0] for part in parts] == expected, case
        assert whole == texts_of(*encoded(TEMPLATES[name], *talk(*[None] * 4)))[0], case
        assert found.num_loss_tokens == int(np.diff(found.loss_spans).sum())


@for_each("name", TEMPLATES)
def test_a_conversation_of_which_nothing_is_learned_is_refused(name):
    _, found = encoded(TEMPLATES[name], *talk(False, False, None, False))
    assert isinstance(found, TextRejected)
    assert found.reason == "not_learned"


def thinking(role, text, thought):
    return Turn(role, text, json.dumps({"reasoning_content": thought, "colour": "red"}))


def test_thoughts_are_learned_where_they_are_written_and_named_where_they_are_dropped():
    turns = [Turn("user", "a"), thinking("assistant", "b", "hm"), Turn("user", "c")]
    turns.append(thinking("assistant", "d", "aha"))
    tokenizer, found = encoded(FORGETS, *turns)
    whole, parts = texts_of(tokenizer, found)
    assert "hm" not in whole
    assert [part.split("<|im_end|>")[0] for part in parts] == ["b", "<think>aha</think>d"]
    assert set(found.unused) == {(1, "reasoning_content"), (1, "colour"), (3, "colour")}


def test_control_strings_in_a_field_stay_letters():
    turns = [Turn("user", "a"), thinking("assistant", "b", "<|im_end|> is a token")]
    tokenizer, found = encoded(FORGETS, *turns)
    assert (found.input_ids == tokenizer._backend.token_to_id("<|im_end|>")).sum() == 2
    assert "<|im_end|> is a token" in texts_of(tokenizer, found)[0]


WRITES_CALLS = "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% else %}"
CALLS = PLAIN.replace("{{ m.content + ", WRITES_CALLS + "{{ m.content }}{% endif %}{{ ")


@for_each("arguments", [{"unit": "C", "n": 2}, json.dumps({"unit": "C", "n": 2})])
def test_arguments_of_a_call_are_written_once(arguments):
    calls = [{"type": "function", "function": {"name": "C", "arguments": arguments}}]
    more = json.dumps({"tool_calls": calls, "content": None})
    tokenizer, found = encoded(CALLS, Turn("user", "a"), Turn("assistant", "", more))
    assert '{"unit": "C", "n": 2}' in texts_of(tokenizer, found)[0]


# --- dates ---

DATED = "{{ strftime_now('%d %B %Y') }}" + PLAIN


def test_a_date_is_the_same_on_every_day_and_may_be_chosen(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    folder = write_dataset(tmp_path / "raw", [record(number) for number in range(20)])
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)

    def build(name, **more):
        given = options(folder, tmp_path / name, chat_template=str(template), **more)
        Builder(BuildConfig(**given), quiet()).build()
        return digests(tmp_path / name), read_manifest(tmp_path / name).values

    usual, manifest = build("usual")
    chosen, other = build("chosen", template_date="2024-07-26")
    assert manifest["tokenizer"]["hash"] != other["tokenizer"]["hash"]
    assert usual != chosen
    assert "2024-07-26" in json.dumps(other)
    assert load(DATED).template_date == "2026-01-01"
    assert load(PLAIN).template_date is None
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1721952000")  # of the day that was chosen
    assert load(DATED).template_date == "2024-07-26"
    rows = [record(number) for number in range(20)]
    given = {"model": "tiny", "tokenizer": str(demo_tokenizer_path()), "workers": 0}
    ranks = {"dp_rank": 0, "dp_world_size": 1, "chat_template": DATED}
    loader = BalancedLoader(rows, **given, **ranks, template_date="2030-05-17")
    ids = next(iter(loader))[0].input_ids.tolist()
    assert "17 May 2030" in load(DATED)._backend.decode(ids)
    loader.close()
    with pytest.raises(ConfigError, match="template-date"):
        load(DATED, template_date="tomorrow")


# --- templates that take too much ---

HOSTILE = {
    "it calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a long text": "{{ 'a' * 10**11 }}",
    "a wide text": "{{ 'a' | center(100000000000) }}",
    "a wide number": "{{ '%99999999999d' % 1 }}",
    "it doubles": "{% set n = namespace(x='aaaaaaaaaa') %}{% for a in range(99) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "a large power": "{{ 10**(10**9) }}",
    "deep ifs": "{% if x %}" * 5000 + "a" + "{% endif %}" * 5000,
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.thorough
@for_each("name", HOSTILE)
def test_a_template_that_takes_too_much_is_one_line_in_seconds(name):
    began = time.monotonic()
    with pytest.raises(ConfigError) as error:
        load(HOSTILE[name])
    assert "\n" not in str(error.value)
    assert "template" in str(error.value)
    assert time.monotonic() - began < 60  # a machine may be busy; without a limit it has no end


def test_what_a_template_raises_is_shown_and_cannot_steer_a_terminal():
    with pytest.raises(ConfigError) as error:
        load("{{ raise_exception('only \x1b[2Jfor robots, sorry') }}")
    assert "for robots, sorry" in str(error.value)
    assert "\x1b" not in str(error.value)
