"""Axolotl's records are learned as Axolotl learns them.

https://docs.axolotl.ai/docs/dataset-formats/conversation.html (chat_template, `train`,
`train_detail`, `message_property_mappings`), https://docs.axolotl.ai/docs/multimodal.html, and
https://github.com/axolotl-ai-cloud/axolotl/blob/main/src/axolotl/prompt_strategies/chat_template.py
(parts). `roles_to_train` and `train_on_eos` are in Axolotl's configuration, not in the data: the
answers are what is learned, with the end of their turns.
"""

from support.frameworks.tool_records import IMAGE, Case, calls, check, said, system, tool, user

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HELLO = "I'm very well, thank you!"
DETAILS = [
    {"begin_offset": 0, "end_offset": 2, "train": False},
    {"begin_offset": 3, "end_offset": 12, "train": True},
    {"begin_offset": 13, "end_offset": 24, "train": False},
]
TALK = [user("Hello"), said("Hello there"), user("How are you?"), said(HELLO)]


def by(role, text, **more):
    return {"from": role, "value": text, **more}


def parts(*texts, **more):
    return [{"type": "text", "text": text, **more} for text in texts]


def picture(**given):
    return [{"type": "image", **given}, *parts("Describe it.")]


CASES = {
    "messages": Case({"messages": TALK}, TALK),
    "conversations": Case({"conversations": TALK}, TALK),
    "sharegpt": Case(
        {"conversations": [by("human", "Hello"), by("gpt", "Hello there")]}, TALK[:2]
    ),
    "pygmalion": Case(
        {"conversations": [{"role": "human", "value": "Hello"}, {"role": "bot", "value": "Yes"}]},
        [user("Hello"), said("Yes")],
    ),
    "train": Case(
        {"conversations": [
            by("system", "Be kind.", train=False), by("human", "Hello", train=False),
            by("assistant", "Hello there", train=True), by("human", "How are you?", train=True),
            by("assistant", HELLO, train=False)]},
        [system("Be kind."), *TALK],
        ["Hello there", "How are you?"],
    ),
    "train_detail": Case(
        {"conversations": [by("human", "Hello"), by("assistant", HELLO, train_detail=DETAILS)]},
        [user("Hello"), said(HELLO)],
        [" very well"],
    ),
    "train and train_detail": Case(
        {"messages": [user("Hello", train=True), said(HELLO, train_detail=DETAILS, train=True)]},
        [user("Hello"), said(HELLO)],
        ["Hello very well"],
    ),
    "training": Case(
        {"messages": [user("Hello"), said("Hello there", training=False), *TALK[2:]]},
        TALK,
        [HELLO],
    ),
    "parts with train": Case(
        {"messages": [user("Hello"), {"role": "assistant", "content": [
            *parts("Let me think.", train=False), *parts(" It is 4.", train=True)]}]},
        [user("Hello"), said("Let me think. It is 4.")],
        [" It is 4."],
    ),
    "parts with weight": Case(
        {"messages": [user("Hello"), {"role": "assistant", "content": [
            *parts("It is 4."), *parts(" I guess.", weight=0)]}]},
        [user("Hello"), said("It is 4. I guess.")],
        ["It is 4."],
    ),
    "tools": Case(
        {"tools": [F], "messages": [user("Do."), calls(("f", {"x": 1})), tool("2"), said("Done")]},
        [user("Do."), calls(("f", {"x": 1})), tool("2"), said("Done")],
        [' calls f {"x": 1}', "Done"],
        tools=[F],
    ),
    "reasoning_content": Case(
        {"messages": [user("Hello"), said("Yes", reasoning_content="A greeting")]},
        [user("Hello"), said("Yes", reasoning_content="A greeting")],
        ["A greeting; Yes"],
    ),
    "image by path": Case(
        {"messages": [user(picture(path="a.png")), said(parts("A bee."))]},
        [user(f"{IMAGE}Describe it."), said("A bee.")],
    ),
    "image of the column": Case(
        {"messages": [user(picture()), said(parts("A bee."))], "images": ["a.png"]},
        [user(f"{IMAGE}Describe it."), said("A bee.")],
    ),
    "image by URL": Case(
        {"messages": [user(picture(url="https://x.y/bee.jpg")), said("A bee.")]},
        reason="image_url",
    ),
    "system of the record": Case({"system": "S", "messages": TALK}, [system("S"), *TALK]),
    "part between 0 and 1": Case(
        {"messages": [user("Hello"), said(parts("Yes", weight=0.5))]}, reason="bad_loss"
    ),
}  # fmt: skip
MAPPED = {
    "mapped": Case(
        {"chat": [{"speaker": "user", "words": "Hello"}, {"speaker": "assistant", "words": "Yes"}]},
        [user("Hello"), said("Yes")],
    ),
    "role that is another key": Case(
        {"chat": [{"speaker": "user", "words": "Hello", "role": "Eve"},
                  {"speaker": "model", "words": "Yes", "train": False},
                  {"speaker": "user", "words": "No"}, {"speaker": "model", "words": "Bye"}]},
        [user("Hello"), said("Yes"), user("No"), said("Bye")],
        ["Bye"],
        unread=("messages[]..role",),
    ),
}  # fmt: skip


def test_records_mean_what_axolotl_makes_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(tmp_path, CASES)


def test_properties_of_messages_are_mapped(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    check(tmp_path, MAPPED, columns=("messages=chat", "role=speaker", "content=words"))
