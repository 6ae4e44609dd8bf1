"""Answers take one rendering where the template copies texts, and many where it does not."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.counting.text.chat_template import MANY_ANSWERS, ChatTemplate, TemplateRefusedError
from support.cases import for_each

COPIES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
STRIPS = COPIES.replace("m.content", "m.content | trim")
READS = COPIES.replace("m.content", "m.content.split('#')[-1]")
LAST = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last else m.content.replace('b', 'BBB') }}</{{ m.role }}>\n{% endfor %}"
)
# each looks into the texts
LOOKS = {
    "tests": "{% if m.content %}full{% endif %}{{ m.content }}",
    "contains": "{% if 'a' in m.content %}!{% endif %}{{ m.content }}",
    "compares": "{% if m.content == 'b' %}!{% endif %}{{ m.content }}",
    "compares the other way": "{% if 'b' == m.content %}!{% endif %}{{ m.content }}",
    "is in": "{% if m.content in ['b', 'a'] %}!{% endif %}{{ m.content }}",
    "key": "{{ {'b': '!'}.get(m.content, '') }}{{ m.content }}",
    "measures": "{{ m.content | length }}{{ m.content }}",
    "slices": "{{ m.content[:1] }}{{ m.content }}",
    "loops": "{% for c in m.content %}-{% endfor %}{{ m.content }}",
    "joined first": "{% if (m.content + 'x')[0] == 'b' %}!{% endif %}{{ m.content }}",
    "joined from the left": "{% if ('x' + m.content)[1:] == 'b' %}!{% endif %}{{ m.content }}",
    "concatenated": "{% if (m.content ~ 'x')[0] == 'b' %}!{% endif %}{{ m.content }}",
    "formatted": "{% if ('%s' % m.content) == 'b' %}!{% endif %}{{ m.content }}",
    "format": "{% if '{}'.format(m.content) == 'b' %}!{% endif %}{{ m.content }}",
    "joined list": "{% if [m.content, ''] | join == 'b' %}!{% endif %}{{ m.content }}",
    "join method": "{% if ''.join([m.content]) == 'b' %}!{% endif %}{{ m.content }}",
    "json": "{% if m | tojson | length > 40 %}!{% endif %}{{ m.content }}",
    "json text": "{{ m.content | tojson }}",
    "block": "{% set x %}{{ m.content }}{% endset %}{% if x == 'b' %}!{% endif %}{{ x }}",
    "macro": "{% macro f(x) %}{{ x }}{% endmacro %}"
    "{% if f(m.content) == 'b' %}!{% endif %}{{ m.content }}",
    "namespace": "{% set n = namespace(t=m.content) %}{% if n.t == 'b' %}!{% endif %}{{ n.t }}",
    "mapped": "{% if 'b' in messages | map(attribute='content') | list %}!{% endif %}"
    "{{ m.content }}",
    "selected": "{{ messages | selectattr('content', 'equalto', 'b') | list | length }}"
    "{{ m.content }}",
    "whole": "{% if (m | string) == 'b' %}!{% endif %}{{ m.content }}",
    "minimum": "{{ [m.content, 'b'] | min }}",
    "ordered": "{% if m.content < 'b' %}!{% endif %}{{ m.content }}",
    "repeated": "{{ (m.content * 2) | length }}{{ m.content }}",
    "filtered block": "{% filter upper %}{{ m.content }}{% endfilter %}",
    "method": "{{ m.content.upper() }}",
    "starts": "{% if m.content.startswith('b') %}!{% endif %}{{ m.content }}",
    "items": "{% for k, v in m.items() %}{% if v == 'b' %}!{% endif %}{% endfor %}{{ m.content }}",
    "even": "{% if m.content is divisibleby 2 %}!{% endif %}{{ m.content }}",
    "day": "{{ strftime_now('%f') }}{{ m.content }}",
}
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
texts = st.text("ab#\n <", max_size=6)
conversations = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


def spans_by_renderings(template, messages):
    full = template.render(messages)
    return full, template._answers(messages, full)


def outcome(function, *arguments):
    try:
        return function(*arguments)
    except TemplateRefusedError as error:
        return str(error)


@pytest.mark.parametrize("source", [COPIES, STRIPS, READS, LAST])
def test_the_short_way_gives_what_one_rendering_per_turn_gives(source):
    template = ChatTemplate(source + PROMPT, {})

    @settings(max_examples=200, deadline=None)
    @given(conversations)
    def check(turns):
        messages = [
            {"role": role, "content": text}
            for pair in turns
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        assert outcome(template.render_with_answers, messages) == outcome(
            spans_by_renderings, template, messages
        )

    check()


def test_a_template_that_copies_is_rendered_once_per_conversation(monkeypatch):
    template = ChatTemplate(COPIES + PROMPT, {})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template.render_with_answers(messages)
    renderings = []
    plain = template.render
    monkeypatch.setattr(template, "render", lambda *a, **k: renderings.append(a) or plain(*a, **k))
    text, spans = template.render_with_answers(
        [{**m, "content": m["content"] * 5} for m in messages]
    )
    assert len(renderings) == 1
    assert [text[a:b] for a, b in spans] == ["bbbbb</assistant>\n"]


@for_each("looks", LOOKS)
def test_a_template_that_looks_into_texts_gets_the_spans_of_its_renderings(looks):
    """Each conversation has the shape of the one before, but other texts."""
    template = ChatTemplate("{% for m in messages %}" + LOOKS[looks] + ";{% endfor %}" + PROMPT, {})
    for texts in (("a", "c"), ("b", "b"), ("bbb", "ab")):
        messages = [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), texts, strict=True)
        ]
        if looks == "day":  # another text at each rendering
            continue
        assert outcome(template.render_with_answers, messages) == outcome(
            spans_by_renderings, template, messages
        )


LONG = {
    "copies": COPIES,
    "strips": STRIPS,
    "strips answers": COPIES.replace(
        "m.content", "m.content | trim if m.role == 'assistant' else m.content"
    ),
    "numbers": COPIES.replace("{{ m.content }}", "{{ loop.index }} {{ m.content }}"),
    "reads": READS,
    "looks back": COPIES.replace(
        "<{{", "{{ '+' if loop.previtem and loop.previtem.role == m.role }}<{{"
    ),
    "rewrites": LAST,
    "rewrites the last role": COPIES.replace("</", "{{ '' if loop.last else '.' }}</"),
    "hides from 40 on": COPIES.replace("{{ m.content }}", "{{ m.content if loop.index < 40 }}"),
}


@for_each("case", LONG)
def test_long_conversations_get_the_spans_of_one_rendering_per_turn(case):
    template, draw = ChatTemplate(LONG[case] + PROMPT, {}), random.Random(case)
    for changes in (False, True):
        messages = [
            {
                "role": draw.choice(["user", "assistant", "assistant"])
                if changes
                else ("user", "assistant")[i % 2],
                "content": draw.choice(["a", " a\n", "c c"]),
            }
            for i in range(3 * MANY_ANSWERS)
        ]
        messages[5]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "c"}]
        messages[5]["role"] = "user"
        if case != "copies":
            messages[5]["content"] = "a"
        assert outcome(template.render_with_answers, messages) == outcome(
            spans_by_renderings, template, messages
        ), changes


def test_renderings_of_a_conversation_do_not_grow_with_its_turns(monkeypatch):
    template, renderings = ChatTemplate(COPIES + PROMPT, {}), []
    plain = template.render
    monkeypatch.setattr(template, "render", lambda *a, **k: renderings.append(a) or plain(*a, **k))
    roles = ("user", "assistant") * 2000
    text, spans = template.render_with_answers(
        [{"role": role, "content": f" {i} "} for i, role in enumerate(roles)]
    )
    assert len(renderings) < 60
    assert [text[a:b] for a, b in spans[::1999]] == [" 1 </assistant>\n", " 3999 </assistant>\n"]
