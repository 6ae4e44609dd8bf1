"""Records of OpenAI's fine-tuning are learned as OpenAI learns them.

https://platform.openai.com/docs/guides/supervised-fine-tuning (messages, `weight`),
https://platform.openai.com/docs/guides/vision-fine-tuning (parts with images),
https://platform.openai.com/docs/guides/function-calling (`tools`, `functions`) and
https://platform.openai.com/docs/guides/direct-preference-optimization.
"""

import base64
import json

from support.builds.bad_pictures import PNG
from support.frameworks.tool_records import IMAGE, Case, calls, check, said, system, tool, user

WEATHER = {"name": "weather", "description": "Of a place.", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": WEATHER}
TALK = [user("Capital of France?"), said("Paris."), user("Of Italy?"), said("Rome.")]
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
MEANT = calls(("weather", {"city": "Bonn"}))
DATA = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


def picture(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words):
    return {"type": "text", "text": words}


CASES = {
    "messages": Case({"messages": [system("Be brief."), *TALK]}, [system("Be brief."), *TALK]),
    "developer": Case(
        {"messages": [{"role": "developer", "content": "Be brief."}, *TALK]},
        [system("Be brief."), *TALK],
    ),
    "weight": Case(
        {"messages": [TALK[0], said("Paris.", weight=0), TALK[2], said("Rome.", weight=1)]},
        TALK,
        ["Rome."],
    ),
    "weight 0 of all": Case(
        {"messages": [TALK[0], said("Paris.", weight=0)]}, reason="not_learned"
    ),
    "weight between": Case({"messages": [TALK[0], said("Paris.", weight=0.5)]}, reason="bad_loss"),
    "image as data": Case(
        {"messages": [user([text("What?"), picture(DATA)]), said("A dot.")]},
        [user(f"What?{IMAGE}"), said("A dot.")],
    ),
    "image with detail": Case(
        {"messages": [user([picture("b.png", detail="low"), text("What?")]), said("A dot.")]},
        [user(f"{IMAGE}What?"), said("A dot.")],
        unread=("messages[].content[].image_url.detail",),
    ),
    "image by URL": Case(
        {"messages": [user([text("What?"), picture("https://x.y/z.png")]), said("A dot.")]},
        reason="image_url",
    ),
    "parts of a system text": Case(
        {"messages": [{"role": "system", "content": [text("Be "), text("brief.")]}, *TALK]},
        [system("Be brief."), *TALK],
    ),
    "tools": Case(
        {"messages": [user("Weather?"), {"role": "assistant", "tool_calls": [{"id": "c1", **CALL}]},
                      tool("21", tool_call_id="c1"), said("It is 21.")],
         "parallel_tool_calls": False, "tools": [TOOL]},
        [user("Weather?"), MEANT, tool("21"), said("It is 21.")],
        [' calls weather {"city": "Bonn"}', "It is 21."],
        tools=[TOOL],
        unread=("parallel_tool_calls", "messages[].tool_call_id"),
    ),
    "functions": Case(
        {"messages": [user("Weather?"), said(None, function_call=CALL["function"])],
         "functions": [WEATHER]},
        [user("Weather?"), MEANT],
        [' calls weather {"city": "Bonn"}'],
        tools=[TOOL],
    ),
    "answer of a function": Case(
        {"messages": [user("Weather?"), said(None, function_call=CALL["function"]),
                      {"role": "function", "name": "weather", "content": "21"}, said("It is 21.")]},
        [user("Weather?"), MEANT, tool("21"), said("It is 21.")],
        [' calls weather {"city": "Bonn"}', "It is 21."],
        unread=("messages[].name",),
    ),
    "name of a user": Case(
        {"messages": [user("Hi", name="Eve"), said("Hello.")]},
        [user("Hi"), said("Hello.")],
        unread=("messages[].name",),
    ),
    "preference": Case(
        {"input": {"messages": TALK[:1]}, "preferred_output": [said("Paris.")],
         "non_preferred_output": [said("Rome.")]},
        reason="no_conversation",
    ),
    "prompt and completion": Case(
        {"prompt": "Capital?", "completion": " Paris"}, [user("Capital?"), said(" Paris")]
    ),
}  # fmt: skip


def test_records_mean_what_openai_makes_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert json.loads(CALL["function"]["arguments"]) == {"city": "Bonn"}
    check(tmp_path, CASES)
