"""Every shape of record that exists in the wild: what becomes of it, and why damaged ones are
rejected.
"""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.counting.records._message_fields import ROLES
from isobatch.counting.records.media import Media, SampleProblem, open_media
from isobatch.counting.records.record import RawRecord, RawSample
from isobatch.counting.records.reject_reasons import REASONS, Rejected
from isobatch.counting.records.schemas import CONTENT_KEYS, RECORD_KEYS
from isobatch.shards.local_folder import LocalFolder
from support.builds.raw_data import parse_record
from support.cases import for_each

ASK = {"from": "human", "value": "<image>\nWhat?"}
ANSWER = {"from": "gpt", "value": "That."}
PIXELS = b"\x89PNG not really"
BASE64 = base64.b64encode(PIXELS).decode()
DATA_URL = f"data:image/png;base64,{BASE64}"
EMBEDDED = Media("image", data=PIXELS)


def parse(value):
    return parse_record(RawRecord(7, value), "set")


def content(value):
    """(role, text) of each turn, and the names or contents of the images and audio files."""
    sample = parse(value)
    assert isinstance(sample, RawSample), sample
    files = [
        [media.data or media.name for media in kind] for kind in (sample.images, sample.audios)
    ]
    return [(turn.role, turn.text) for turn in sample.turns], *files


def chat(question, answer):
    return [("user", question), ("assistant", answer)]


def document(text):
    return [("document", text)]


LLAVA = {"id": "a", "image": "x.jpg", "conversations": [ASK, ANSWER]}
CHAT = [
    {"type": "text", "text": "Look: "},
    {"type": "image_url", "image_url": {"url": DATA_URL}},
    {"type": "text", "text": " and "},
    {"type": "image", "image": "y.png"},
]

SHAPES = {
    "LLaVA": (LLAVA, chat("<image>\nWhat?", "That."), ["x.jpg"], []),
    "LLaVA, text only": (
        {"conversations": [{"from": "human", "value": "Hi"}, ANSWER]},
        chat("Hi", "That."),
        [],
        [],
    ),
    "InternVL, several images": (
        {
            "id": 3,
            "image": ["a.jpg", "b.jpg"],
            "width": [4, 5],
            "height": [6, 7],
            "conversations": [
                {"from": "human", "value": "Image-1: <image>\nImage-2: <image>\nWhich?"},
                ANSWER,
            ],
        },
        chat("Image-1: <image>\nImage-2: <image>\nWhich?", "That."),
        ["a.jpg", "b.jpg"],
        [],
    ),
    "InternVL, images without markers": (
        {"image": ["a", "b"], "conversations": [{"from": "system", "value": "S"}, ASK, ANSWER]},
        [("system", "S"), *chat("<image>\n<image>\nWhat?", "That.")],
        ["a", "b"],
        [],
    ),
    "ShareGPT, system beside the turns": (
        {"system": "Be kind.", "conversations": [{"from": "human", "value": "Hi"}, ANSWER]},
        [("system", "Be kind."), *chat("Hi", "That.")],
        [],
        [],
    ),
    "ShareGPT, system in both places": (
        {
            "system": "No.",
            "conversations": [
                {"from": "system", "value": "Yes."},
                {"from": "user", "value": "?"},
                ANSWER,
            ],
        },
        [("system", "Yes."), *chat("?", "That.")],
        [],
        [],
    ),
    "OpenAI": (
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        chat("Hi", "Ho"),
        [],
        [],
    ),
    "OpenAI, parts": (
        {"messages": [{"role": "user", "content": CHAT}, {"role": "assistant", "content": "Ho"}]},
        chat("Look: <image> and <image>", "Ho"),
        [PIXELS, "y.png"],
        [],
    ),
    "OpenAI, audio": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}
                    ],
                },
                {"role": "assistant", "content": [{"type": "text", "text": "A bell"}]},
            ]
        },
        chat("<audio>", "A bell"),
        [],
        [PIXELS],
    ),
    "parts that say where the images of the record stand": (
        {
            "images": [{"bytes": PIXELS, "path": None}],
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "A"}, {"type": "image", "text": None}],
                },
                {"role": "assistant", "content": [{"type": "text", "text": "B"}]},
            ],
        },
        chat("A<image>", "B"),
        [PIXELS],
        [],
    ),
    "keys that a table leaves null": (
        {
            "conversations": [
                {"from": None, "role": "user", "value": None, "content": "Hi"},
                ANSWER,
            ],
            "image": None,
        },
        chat("Hi", "That."),
        [],
        [],
    ),
    "turns stored as columns": (
        {"conversations": {"from": ["human", "gpt"], "value": ["Hi", "Ho"]}},
        chat("Hi", "Ho"),
        [],
        [],
    ),
    "The Cauldron": (
        {
            "images": [{"bytes": PIXELS, "path": "p.png"}, {"bytes": "q.png", "path": None}],
            "texts": [
                {"user": "One?", "assistant": "1", "source": "s"},
                {"user": "Two?", "assistant": "2", "source": "s"},
            ],
        },
        [*chat("<image>\n<image>\nOne?", "1"), *chat("Two?", "2")],
        [PIXELS, "q.png"],
        [],
    ),
    "MMC4": (
        {
            "text_list": ["First.", "Second.", "Third."],
            "image_info": [
                {"image_name": "c.jpg", "matched_text_index": 2, "raw_url": "http://x/c.jpg"},
                {"image_name": "a.jpg", "matched_text_index": 0},
                {"image_base64": BASE64, "matched_text_index": 2},
            ],
            "similarity_matrix": [[0.1]],
        },
        document("<image>First. Second. <image><image>Third."),
        ["a.jpg", "c.jpg", PIXELS],
        [],
    ),
    "MMC4, no images": ({"text_list": ["A.", "B."], "image_info": None}, document("A. B."), [], []),
    "OBELICS": (
        {
            "images": [None, {"bytes": PIXELS, "path": None}, None, "i.jpg"],
            "texts": ["Before", None, "Between", None],
            "metadata": "[]",
        },
        document("Before\n\n<image>\n\nBetween\n\n<image>"),
        [PIXELS, "i.jpg"],
        [],
    ),
    "FLAN": ({"inputs": "2+2?", "targets": "4"}, chat("2+2?", "4"), [], []),
    "Alpaca": (
        {"instruction": "Add.", "input": "2 2", "output": "4"},
        chat("Add.\n2 2", "4"),
        [],
        [],
    ),
    "Alpaca, no input": (
        {"instruction": "Sing.", "input": "", "output": "La"},
        chat("Sing.", "La"),
        [],
        [],
    ),
    "Dolly": (
        {"instruction": "When?", "context": "In 5.", "response": "5"},
        chat("When?\nIn 5.", "5"),
        [],
        [],
    ),
    "question about an image": (
        {"question": "What?", "answer": "A cat", "image": {"bytes": PIXELS, "path": "c.png"}},
        chat("<image>\nWhat?", "A cat"),
        [PIXELS],
        [],
    ),
    "messages as prompt and completion": (
        {
            "prompt": [{"role": "user", "content": "Hi"}],
            "completion": [{"role": "assistant", "content": "Ho"}],
        },
        chat("Hi", "Ho"),
        [],
        [],
    ),
    "img2dataset": (
        {
            "__key__": "01",
            "caption": "A dog",
            "url": "http://x",
            "status": "success",
            "jpg": PIXELS,
        },
        document("<image>A dog"),
        [PIXELS],
        [],
    ),
    "COYO with its image": (
        {"url": "http://x", "text": "A dog", "width": 5, "image_phash": "f", "image": "d.jpg"},
        document("<image>A dog"),
        ["d.jpg"],
        [],
    ),
    "caption of a clip": (
        {"caption": "Rain", "audio": "r.wav"},
        document("<audio>Rain"),
        [],
        ["r.wav"],
    ),
    "text": (
        {"text": "Once upon a time", "url": "http://page"},
        document("Once upon a time"),
        [],
        [],
    ),
    "text with images": (
        {"text": "A <image> b", "images": ["x"]},
        document("A <image> b"),
        ["x"],
        [],
    ),
    "transcribed speech": (
        {"text": "HELLO", "audio": {"bytes": PIXELS, "path": "1.flac"}},
        document("<audio>\nHELLO"),
        [],
        [PIXELS],
    ),
}


@for_each("name", SHAPES)
def test_each_shape_becomes_turns_and_files_in_their_order(name):
    value, *expected = SHAPES[name]
    assert list(content(value)) == expected


@for_each("name", SHAPES)
def test_a_table_needs_no_column_that_is_not_in_record_keys(name):
    value, *expected = SHAPES[name]
    assert (
        list(content({key: item for key, item in value.items() if key in RECORD_KEYS})) == expected
    )
    assert CONTENT_KEYS & set(value)


def damaged(*shape, **changes):
    return {**SHAPES[shape[0]][0], **changes}


DAMAGED = [
    ({}, "no_conversation"),
    ({"id": 1, "label": "cat"}, "no_conversation"),
    ({"conversations": []}, "no_conversation"),
    ({"conversations": "hello"}, "no_conversation"),
    ({"conversations": {"from": ["human"], "value": ["a", "b"]}}, "no_conversation"),
    ({"conversations": [ASK]}, "no_answer"),
    ({"conversations": ["hello"]}, "bad_turn"),
    ({"conversations": [{"from": "narrator", "value": "x"}, ANSWER]}, "bad_turn"),
    ({"conversations": [{"from": ["human"], "value": "x"}, ANSWER]}, "bad_turn"),
    ({"conversations": [{"from": "human", "value": 3}, ANSWER]}, "bad_turn"),
    ({"conversations": [{"from": "human", "value": None}, ANSWER]}, "bad_turn"),
    (damaged("ShareGPT, system beside the turns", system=["x"]), "bad_turn"),
    ({"conversations": [ASK, ANSWER]}, "marker_without_image"),
    (damaged("LLaVA", image=[]), "marker_without_image"),
    (damaged("LLaVA", image=["a", 3]), "bad_image_field"),
    (damaged("LLaVA", image=5), "bad_image_field"),
    (damaged("LLaVA", image={"bytes": 5, "path": None}), "bad_image_field"),
    (damaged("LLaVA", image=[None]), "bad_image_field"),
    (damaged("LLaVA", image="\ud800.jpg"), "bad_image_field"),
    (damaged("LLaVA", image="data:image/png;base64"), "bad_image_field"),
    (damaged("LLaVA", image="data:image/png;base64,%%%"), "bad_image_field"),
    (damaged("LLaVA", image="data:image/svg,\ud800"), "bad_image_field"),
    (damaged("LLaVA", audio=[[]]), "bad_audio_field"),
    (
        {"messages": [{"role": "user", "content": [{"type": "video"}]}, ANSWER]},
        "marker_without_video",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "film"}]}, ANSWER]}, "bad_turn"),
    ({"messages": [{"role": "user", "content": ["hi"]}, ANSWER]}, "bad_turn"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "<image>"}]}, ANSWER]},
        "marker_without_image",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]},
        "marker_without_image",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "input_audio", "input_audio": {"data": "*"}}],
                },
                ANSWER,
            ]
        },
        "bad_audio_field",
    ),
    (damaged("The Cauldron", texts=[{"user": "One?"}]), "bad_turn"),
    (damaged("MMC4", text_list="no list"), "bad_turn"),
    (damaged("MMC4", text_list=["a", None, "c"]), "bad_turn"),
    (damaged("MMC4", image_info=5), "bad_image_field"),
    (damaged("MMC4", image_info=["a.jpg"]), "bad_image_field"),
    (damaged("MMC4", image_info=[{"image_name": "a", "matched_text_index": 3}]), "bad_image_field"),
    (
        damaged("MMC4", image_info=[{"image_name": "a", "matched_text_index": True}]),
        "bad_image_field",
    ),
    (damaged("MMC4", image_info=[{"matched_text_index": 0}]), "bad_image_field"),
    (damaged("MMC4", image_info=[{"image_base64": 5, "matched_text_index": 0}]), "bad_image_field"),
    (damaged("MMC4", text_list=["an <image> of", "b", "c"]), "marker_without_image"),
    ({"text_list": []}, "no_conversation"),
    (damaged("OBELICS", texts=["Before"]), "bad_image_field"),
    (damaged("OBELICS", texts=["Before", None, 5, None]), "bad_turn"),
    (damaged("OBELICS", images=[None, 5, None, None]), "bad_image_field"),
    ({"images": [None], "texts": [None]}, "no_conversation"),
    ({"images": ["a.jpg"], "texts": [None]}, "no_conversation"),
    ({"inputs": "2+2?", "targets": None}, "no_conversation"),
    ({"inputs": 5, "targets": "4"}, "bad_turn"),
    ({"question": "?", "answer": ["a", None]}, "bad_turn"),
    ({"caption": 5, "image": "x"}, "bad_turn"),
    ({"caption": " ", "image": "x"}, "no_conversation"),
    ({"caption": "<image>", "image": "x"}, "marker_without_image"),
    ({"caption": "A dog"}, "missing_image"),
    (
        {
            "caption": "A dog",
            "status": "failed_to_download",
            "error_message": "404",
            "url": "http://x",
        },
        "missing_image",
    ),
    ({"TEXT": "A dog", "URL": "http://x"}, "image_url"),
    ({"text": "A dog", "url": "http://x", "width": 5, "image_phash": "f"}, "image_url"),
    ({"text": ["a"]}, "bad_turn"),
    ({"text": None}, "bad_turn"),
    ({"text": "  "}, "no_conversation"),
    ({"text": "<image>", "images": []}, "marker_without_image"),
    (damaged("LLaVA", image="a.jpg", images=["b.jpg"]), "bad_image_field"),
    (damaged("LLaVA", image=["a.jpg"], images=["b.jpg", "c.jpg"]), "bad_image_field"),
    ({"text": "x", "audio": "a.wav", "audios": ["b.wav"]}, "bad_audio_field"),
    (
        {"conversations": [ASK, ANSWER], "messages": [{"role": "assistant", "content": "No"}]},
        "bad_turn",
    ),
    ({"conversations": "{"}, "no_conversation"),
    ({"conversations": "17"}, "no_conversation"),
    ({"conversations": "[" * 5000 + "]" * 5000}, "no_conversation"),
    ({"conversations": "[" * 300 + "]" * 300}, "no_conversation"),
]


@for_each(("value", "reason"), DAMAGED)
def test_what_is_damaged_is_rejected_with_its_reason(value, reason):
    rejected = parse(value)
    assert isinstance(rejected, Rejected), rejected
    assert rejected.reason == reason
    assert rejected.detail


def test_a_failed_download_says_what_failed():
    assert parse(
        {"caption": "x", "status": "failed_to_download", "error_message": "404"}
    ).detail.endswith("404")


def test_tools_that_are_not_json_are_named():
    for changes, detail in (
        (
            {"conversations": [ASK, {"from": "function_call", "value": '{"name": "f"}'}, ANSWER]}
            | {"tools": '[{"name": "saw'},
            "`tools` is not JSON",
        ),
        (
            {"conversations": [ASK, {"from": "function_call", "value": "f("}, ANSWER]},
            "a tool call of turn 1 is not JSON",
        ),
    ):
        rejected = parse({"conversations": [ASK, ANSWER], **changes})
        assert (rejected.reason, rejected.detail) == ("bad_turn", detail)


def test_a_column_of_tools_that_defines_none_is_no_matter():
    chat = {"conversations": [{"from": "human", "value": "What?"}, ANSWER]}
    plain = "a saw", ["saw"], [5], 3, True, {"saw": 1}, '["saw"]', [{}], "\n", "[saw] a hammer"
    named = {"name": "saw"}, [{"name": "saw"}, 5], [{"name": "saw", "price": 3}], '[{"name": "saw'
    for tools in (*plain, *named):
        found = parse({**chat, "tools": tools})
        assert found.turns == parse(chat).turns, tools
        assert [path for path, _ in found.unread] == ["tools"], tools
    saw = {"name": "saw", "parameters": {}}
    for wrong in (saw, [saw, 5], [{"function": {"name": "saw"}}, {}]):
        assert parse({**chat, "tools": wrong}).reason == "bad_turn", wrong


def test_urls_are_kept_as_names_and_refused_when_opened(tmp_path):
    for value in (
        damaged("OBELICS", images=[None, "https://x/a.jpg", None, None]),
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": "https://x/a.jpg"}],
                },
                ANSWER,
            ]
        },
        {
            "text_list": ["a"],
            "image_info": [{"raw_url": "https://x/a.jpg", "matched_text_index": 0}],
        },
    ):
        (media,) = parse(value).images
        assert media == Media("https://x/a.jpg")
        with pytest.raises(SampleProblem, match="image_url"):
            open_media(LocalFolder(str(tmp_path)), media, "image")


def test_nothing_of_a_place_with_image_and_text_is_lost():
    assert content({"images": ["a.jpg"], "texts": ["both"]}) == (
        document("<image>both"),
        ["a.jpg"],
        [],
    )


def test_all_role_names_are_roles_of_a_turn():
    assert set(ROLES.values()) == {"user", "assistant", "system", "tool"}


keys = st.sampled_from(sorted(RECORD_KEYS)) | st.sampled_from(
    ["from", "value", "role", "content", "type", "user"]
)
words = (
    st.sampled_from(
        [*ROLES, "text", "image", "image_url", "<image>", "<audio>", "data:,x", DATA_URL]
    )
    | st.text()
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | words
    | st.binary(max_size=4)
    | st.just(EMBEDDED)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(keys | st.text(), inner, max_size=5)
    ),
    max_leaves=12,
)
near_records = st.sampled_from([value for value, *_ in SHAPES.values()])


def check(value):
    parsed = parse(value)
    if isinstance(parsed, Rejected):
        assert parsed.reason in REASONS
        assert parsed.detail
    else:
        text = "".join(turn.text for turn in parsed.turns)
        assert text.count("<image>") == len(parsed.images)
        assert not parsed.audios or text.count("<audio>") == len(parsed.audios)


@pytest.mark.thorough
@given(values)
def test_any_value_is_a_sample_or_has_a_reason(value):
    check(value)


@given(near_records, st.dictionaries(keys, values, max_size=3))
def test_any_damage_to_a_record_is_a_sample_or_has_a_reason(record, changes):
    check({**record, **changes})


def test_what_two_keys_say_alike_is_used_once():
    turns = [{"from": "Human", "value": "<image>\nWhat?"}, {"from": "GPT", "value": "That."}]
    plain = parse({"id": 1, "image": "a.jpg", "conversations": turns})
    messages = [
        {"role": " User ", "content": "<image>\nWhat?"},
        {"role": "Assistant", "content": "That."},
    ]
    same = [
        {"conversations": turns, "messages": messages, "image": "a.jpg"},
        {"conversations": [], "messages": messages, "image": "a.jpg"},
        {"conversations": turns, "messages": "", "image": "a.jpg"},
        {"conversations": json.dumps(turns), "image": "a.jpg"},
        {"messages": json.dumps(messages), "conversations": None, "image": "a.jpg"},
        {"conversations": turns, "image": "a.jpg", "images": ["a.jpg"]},
        {"conversations": turns, "image": "", "images": ["a.jpg"]},
        {"conversations": turns, "image": ["a.jpg"], "images": []},
    ]
    for record in same:
        assert parse({"id": 1, **record}) == plain, record
    two = [{"from": "human", "value": "<image><image>"}, {"from": "gpt", "value": "That."}]
    both = parse({"conversations": two, "image": "b.jpg", "images": ["a.jpg", "b.jpg"]})
    assert [file.name for file in both.images] == ["a.jpg", "b.jpg"]


def test_base64_in_many_lines_is_the_same_file():
    content = bytes(range(256)) * 2
    wrapped = base64.encodebytes(content).decode()
    assert wrapped.count("\n") > 5
    for text in (wrapped, wrapped.replace("\n", "\r\n"), wrapped.replace("\n", "")):
        image = f"data:image/png;base64,{text}"
        (file,) = parse({"image": image, "conversations": [ASK, ANSWER]}).images
        assert file.data == content


CALL = {"type": "function", "function": {"name": "look_up", "arguments": '{"of": "x"}'}}
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


def test_calls_of_tools_and_their_answers_are_kept_for_the_template():
    ask = {"role": "user", "content": "What?"}
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    answer = {"role": "tool", "tool_call_id": "7", "content": "It is."}
    end = {"role": "assistant", "content": "That."}
    sample = parse({"messages": [ask, call, answer, end], "tools": TOOLS})
    assert [turn.role for turn in sample.turns] == ["user", "assistant", "tool", "assistant"]
    assert [turn.text for turn in sample.turns] == ["What?", "", "It is.", "That."]
    more = [json.loads(turn.more) if turn.more else {} for turn in sample.turns]
    assert more == [
        {"tools": TOOLS},
        {"tool_calls": [CALL], "content": None},
        {"tool_call_id": "7"},
        {},
    ]
    old = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    found = parse({"messages": [ask, old, {**answer, "role": "function"}, end]})
    assert json.loads(found.turns[1].more) == more[1]
    assert found.turns[2].role == "tool"
    shared = [
        {"from": "human", "value": "What?"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "It is."},
        {"from": "gpt", "value": "That."},
    ]
    found = parse({"conversations": shared, "tools": json.dumps(TOOLS)})
    assert [turn.text for turn in found.turns] == ["What?", "", "It is.", "That."]
    assert json.loads(found.turns[1].more) == {"tool_calls": [CALL]}
    assert json.loads(found.turns[0].more) == {"tools": TOOLS}
    for wrong in (
        {"messages": [ask, {**call, "tool_calls": [{"function": {}}]}]},
        {"messages": [ask, {**call, "tool_calls": "look_up"}]},
        {"messages": [ask, call, answer, end], "tools": "{"},
        {"messages": [ask, end], "tools": [*TOOLS, 5]},
        {"conversations": [shared[0], {"from": "function_call", "value": "no JSON"}]},
    ):
        assert parse(wrong).reason == "bad_turn", wrong


_WORDS = st.sampled_from(["What?", "<image>", "<image>\n", "a < b </x>", "", "<img>a.jpg</img>"])
_PLAIN = st.tuples(st.sampled_from([*sorted(ROLES), "GPT", "nobody"]), _WORDS)


@given(st.lists(_PLAIN, max_size=5), st.sampled_from([("from", "value"), ("role", "content")]))
def test_a_key_without_a_value_in_its_messages_changes_no_sample(messages, keys):
    """Messages of a role and a text alone are read quicker: they are read the same."""
    plain = [dict(zip(keys, message, strict=True)) for message in messages]
    padded = [{**message, "name": None} for message in plain]
    key = "messages" if keys[0] == "role" else "conversations"
    assert parse({key: plain, "image": "1.jpg"}) == parse({key: padded, "image": "1.jpg"})
