"""Answers take one rendering per conversation where the template copies texts, and many where it does not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.chat_template import ChatTemplate, TemplateRefusedError

COPIES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
STRIPS = COPIES.replace("m.content", "m.content | trim")
READS = COPIES.replace("m.content", "m.content.split('#')[-1]")
LAST = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content.replace('b', 'BBB') }}"
    "</{{ m.role }}>\n{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
texts = st.text("ab#\n <", max_size=6)
conversations = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


def spans_by_renderings(template, messages):
    full = template.render(messages)
    return full, template._by_renders(messages, full)


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
        assert outcome(template.render_with_answers, messages) == outcome(spans_by_renderings, template, messages)

    check()


def test_a_template_that_copies_is_rendered_once_per_conversation(monkeypatch):
    template = ChatTemplate(COPIES + PROMPT, {})
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template.render_with_answers(messages)
    renderings = []
    plain = template.render
    monkeypatch.setattr(template, "render", lambda *a, **k: renderings.append(a) or plain(*a, **k))
    text, spans = template.render_with_answers([{**m, "content": m["content"] * 5} for m in messages])
    assert len(renderings) == 1
    assert [text[a:b] for a, b in spans] == ["bbbbb</assistant>\n"]
