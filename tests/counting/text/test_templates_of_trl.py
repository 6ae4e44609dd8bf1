"""Chat templates that models have: ids and labels against transformers, and a page that says so."""

import importlib.util
import json
from functools import cache
from importlib.metadata import version

import pytest

from isobatch.counting.text.chat_template import ChatTemplate
from isobatch.counting.text.chat_tokenizer import ChatTokenizer
from support import ROOT
from support.cases import RESULTS, for_each

pytest.importorskip("trl")
spec = importlib.util.spec_from_file_location("templates", ROOT / "scripts/list_templates.py")
listing = importlib.util.module_from_spec(spec)
spec.loader.exec_module(listing)

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# GLM-4.xV-Thinking's: the prompt opens a thought, and earlier turns have none
GLM_THINKING = r"""[gMASK]<sop>
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>\n' }}
{%- if loop.index0 > ns.last and '</think>' in m.content %}
{{- '<think>' + m.content.split('</think>')[0].split('<think>')[-1].strip() + '</think>\n' }}
{%- else %}{{ '<think></think>\n' }}{% endif %}
{{- m.content.split('</think>')[-1].strip() }}
{%- else %}{{ '<|' + m.role + '|>\n' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n<think>' }}{% endif %}"""
INST = """{{ bos_token }}{% for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'system' %}
{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"""
OWN = {"ChatML": CHATML, "GLM thinking": GLM_THINKING, "INST": INST}
KIND_OF_FAMILY = {
    **dict.fromkeys(("internvl", "llava_onevision", "qwen2_vl"), "ChatML"),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), "GLM thinking"),
    **dict.fromkeys(("gemma3", "paligemma"), "gemma3"),
    **dict.fromkeys(("llava", "llava_next"), "llava_next"),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_omni"), "qwen2_5_vl"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"), "qwen3_vl"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "qwen3_5_think"),
    **{"gemma4": "gemma4", "idefics3": "idefics3", "smolvlm": "smolvlm"},
    **{"minicpmv4_6": "qwen3", "mistral3": "INST"},
}
"""Family of docs/reference/families.md -> a template of the kind that its models have."""


@cache
def rows():
    return listing.rows()


def source_of(name):
    return OWN.get(name) or listing.templates()[name]


def labelled(template, chat):
    """The pieces of the text that have labels."""
    text, spans = ChatTemplate(source_of(template), listing.TOKENS).render_with_answers(chat)
    return [text[start:end] for start, end in spans]


@pytest.mark.thorough
def test_all_that_transformers_renders_has_its_ids_and_labels():
    assert len(rows()) > 50
    for row in rows():
        assert not row.wrong_refusals, row
        assert not row.other_ids, row
        assert not row.other_labels, row
        assert {"one answer", "several answers", "several thoughts"} <= set(row.used), row


@pytest.mark.thorough
def test_the_page_of_templates_is_current():
    if f"TRL {version('trl')}" in listing.PAGE.read_text("utf-8"):
        assert listing.PAGE.read_text("utf-8") == listing.make_page(rows()), (
            "run scripts/list_templates.py"
        )


def test_a_template_that_is_labelled_or_rendered_otherwise_would_be_found(monkeypatch):
    plain = ChatTokenizer.encode_batch

    def changed(self, batch):
        found = plain(self, batch)
        for each in found:
            each.loss_spans[-1, 0] -= 1
        found[0].input_ids.flags.writeable = True
        found[0].input_ids[0] += 1
        return found

    monkeypatch.setattr(ChatTokenizer, "encode_batch", changed)
    for name in ("qwen3", "qwen3_training"):
        row = listing.compare(name, source_of(name))
        assert row.other_ids == ["one answer"], row
        kinds = set(listing.CONVERSATIONS) - {"one answer", "two answers in a row"}
        assert kinds <= set(row.other_labels), row


def test_every_family_takes_plain_conversations_of_several_answers():
    families = json.loads(RESULTS.read_text("utf-8"))["rule"]
    assert set(families) == set(KIND_OF_FAMILY)
    for name in sorted(set(KIND_OF_FAMILY.values())):
        row = listing.compare(name, source_of(name))
        assert "several answers" in row.used, row
        assert not row.wrong_refusals, row
        assert not row.other_ids + row.other_labels, row


Q, A = listing.user, listing.answer
EARLIER_THOUGHTS = [
    *(Q("q"), A("<think>\nhm\n</think>\n\na")),
    *(Q("r"), A("<think>\nhmm\n</think>\n\nb")),
]
FIELDS = [
    *(Q("q"), A("a", reasoning_content="hm", thinking="hm")),
    *(Q("r"), A("b", reasoning_content="hmm", thinking="hmm")),
]


@for_each(
    ("template", "chat", "pieces"),
    [
        ("GLM thinking", EARLIER_THOUGHTS, ["</think>\na", "hmm</think>\nb"]),
        ("qwen3_5_think", EARLIER_THOUGHTS, ["a<|im_end|>\n", "hmm\n</think>\n\nb<|im_end|>\n"]),
        ("qwen3_5_think", FIELDS, ["a<|im_end|>\n", "hmm\n</think>\n\nb<|im_end|>\n"]),
        ("qwen3", FIELDS, ["a<|im_end|>\n", "<think>\nhmm\n</think>\n\nb<|im_end|>\n"]),
        (
            "gptoss",
            FIELDS,
            [
                "<|channel|>final<|message|>a<|end|>",
                "<|channel|>analysis<|message|>hmm<|end|><|start|>assistant"
                "<|channel|>final<|message|>b<|return|>",
            ],
        ),
        ("qwen3_vl", FIELDS, ["a<|im_end|>\n", "b<|im_end|>\n"]),
        ("phi3", FIELDS, ["a<|end|>\n", "b<|end|>\n<|im_end|>"]),
    ],
)
def test_thoughts_have_labels_where_the_template_writes_them(template, chat, pieces):
    assert labelled(template, chat) == pieces
