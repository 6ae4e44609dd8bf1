"""Marks of places other than `<image>`: each means the file that its author meant, or none does."""

import random

import pytest

from isobatch.counting.records.media import Media, SampleProblem
from isobatch.counting.records.places.marks import edited, place_marks
from isobatch.counting.records.reading import Reading
from isobatch.counting.records.record import RawRecord, RawSample
from isobatch.counting.text.chat_tokenizer import Turn
from support.builds.raw_data import parse_record
from support.cases import for_each

QWEN = ("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>", "[IMG]")
REJECT = Reading(image_tokens=QWEN)
KEEP = Reading(image_tokens=QWEN, unknown_marks="text")


def parse(question, images, reading=REJECT, **more):
    """The question with its markers and the names of its images, or the reason against it."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "A"}]
    record = {"messages": turns, **({"images": images} if images else {}), **more}
    sample = parse_record(RawRecord(0, record), "set", reading)
    if not isinstance(sample, RawSample):
        return sample.reason
    return sample.turns[0].text, [image.name for image in sample.images]


PLACES = {
    "one number": ("a <image1> b", "x", "a <image> b", "x"),
    "numbers in another order": ("<image 2> and <image_1>", "xy", "<image> and <image>", "yx"),
    "numbers from 0": ("<image1>, <image0>", "xy", "<image>, <image>", "yx"),
    "Phi-3's numbers": ("<|image_2|><|image_1|>", "xy", "<image><image>", "yx"),
    "capitals": ("<IMAGE> <Image>", "xy", "<image> <image>", "xy"),
    "bars": ("<|image|>?", "x", "<image>?", "x"),
    "empty tags": ("<img></img> <ImageHere>", "xy", "<image> <image>", "xy"),
    "one tag": ("<img> and", "x", "<image> and", "x"),
    "the model's own, wrapped": (QWEN[0] + "What?", "x", "<image>What?", "x"),
    "the model's own, bare": ("<|image_pad|>[IMG]", "xy", "<image><image>", "xy"),
    "fewer numbers than images": ("<image2>", "xyz", "<image>\n<image>\n<image>", "xzy"),
    "fewer marks than images": ("<IMAGE>", "xy", "<image>\n<image>", "xy"),
    "markers take what no number names": (
        "<image> <image3> <image>",
        "xyz",
        "<image> <image> <image>",
        "xzy",
    ),
    "HTML": ("<img src='x'>", "x", "<image>\n<img src='x'>", "x"),
    "words between tags": ("<image>words</image>", "x", "<image>words</image>", "x"),
    "no images": ("<image1> <IMAGE> <img></img>", "", "<image1> <IMAGE> <img></img>", ""),
}


@for_each("case", PLACES)
def test_a_mark_is_the_place_of_the_image_that_it_means(case):
    question, images, text, order = PLACES[case]
    assert parse(question, list(images)) == (text, list(order))


UNKNOWN = {
    "a number that no image has": ("<image3>", "xy", "<image>\n<image>\n<image3>"),
    "a number twice": ("<image1> <image1>", "x", "<image> <image1>"),
    "0 where others do not fit": ("<image0> <image2>", "xy", "<image>\n<image0> <image>"),
    "more marks than images": ("<IMAGE> <IMAGE>", "x", "<image> <IMAGE>"),
    "a number of none next to enough markers": ("<image> <image2>", "x", "<image> <image2>"),
    "a path of another file": ("<img>z.jpg</img>", "x", "<image>\n<img>z.jpg</img>"),
}


LETTERS = (
    ("<image> as in <image1>", "x"),
    ("<image>Go to <Image>/Filters", "x"),
    ("<image><image>: <img>y</img>, <|image|>, <ImageHere>", "xy"),
)


@for_each(("text", "images"), LETTERS)
def test_next_to_as_many_markers_as_images_marks_are_letters(text, images):
    assert parse(text, list(images)) == (text, list(images))


@for_each("case", UNKNOWN)
def test_a_mark_that_means_no_image_rejects_the_sample_or_stays_as_letters(case):
    question, images, text = UNKNOWN[case]
    assert parse(question, list(images)) == "unknown_mark"
    assert parse(question, list(images), KEEP)[0] == text


def test_a_path_between_tags_names_an_image_or_is_one():
    question = "Picture 1: <img>d/a.jpg</img>\nPicture 2: <img>b.jpg</img>\nWhich?"
    text = "Picture 1: <image>\nPicture 2: <image>\nWhich?"
    assert parse(question, []) == (text, ["d/a.jpg", "b.jpg"])
    assert parse(question, ["/data/b.jpg", "d/a.jpg"]) == (text, ["d/a.jpg", "/data/b.jpg"])
    assert parse("<img>not a path</img>", []) == ("<img>not a path</img>", [])


def test_numbered_columns_are_the_images_of_their_numbers():
    columns = {"image_1": "p", "image_2": None, "image_3": "r", "image_4": None}
    assert parse("<image 3>, <image 1>", [], **columns) == ("<image>, <image>", ["r", "p"])
    assert parse("<image 2>", [], **columns) == "unknown_mark"
    assert parse("<image_1>", [], image_0="p", image_1="q") == ("<image>\n<image>", ["p", "q"])
    assert parse("?", [], image2="q", image1="p") == ("<image>\n<image>\n?", ["p", "q"])
    assert parse("<image>", ["x"], image_1="x") == ("<image>", ["x"])
    assert parse("<image>", ["x"], image_1="y") == "bad_image_field"


def test_marks_of_videos_and_clips_are_places_too():
    turns = [
        {"role": "user", "content": "<video2> <vid1> <|audio|>"},
        {"role": "assistant", "content": "<image1>"},
    ]
    record = {"messages": turns, "videos": ["a.mp4", "b.mp4"], "audios": ["c.wav"]}
    sample = parse_record(RawRecord(0, record), "set")
    assert sample.turns[0].text == "<video> <video> <audio>"
    assert [video.name for video in sample.videos] == ["b.mp4", "a.mp4"]
    assert sample.turns[1].text == "<image1>", "a record without images keeps the letters"


def test_any_order_of_marks_puts_every_image_at_its_mark():
    rng = random.Random(0)
    forms = (
        "<image{}>",
        "<image {}>",
        "<image_{}>",
        "<|image_{}|>",
        "<IMAGE{}>",
        "<img>f{}.png</img>",
    )
    for _ in range(300):
        count = rng.randint(1, 6)
        files = [Media(f"f{k}.png") for k in range(1, count + 1)]
        order = rng.sample(range(1, count + 1), rng.randint(1, count))
        turns = [Turn(rng.choice(["user", "assistant", "system"]), "") for _ in range(3)]
        texts = ["", "", ""]
        by_turn = [[], [], []]
        for number in order:
            turn = rng.randrange(3)
            texts[turn] += f"say {number} {rng.choice(forms).format(number)}."
            by_turn[turn].append(number)
        turns = tuple(Turn(turn.role, text) for turn, text in zip(turns, texts, strict=True))
        placed, found = place_marks(turns, "image", files, REJECT)
        assert sorted(file.name for file in found) == sorted(file.name for file in files)
        text = " ".join(turn.text for turn in placed)
        assert text.count("<image>") == count
        pieces = text.split("<image>")
        for piece, file in zip(pieces, found, strict=False):
            said = piece.strip(" .\n").split("say ")[-1]
            assert not said.isdigit() or file.name == f"f{said}.png", text


def test_edits_move_what_is_learned():
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(rng.choice("ab") for _ in range(20))
        places = sorted(rng.sample(range(21), 6))
        edits = [(places[k], places[k + 1], rng.choice(["", "<image>"])) for k in (0, 2, 4)]
        outside = [k for k in range(20) if not any(start <= k < end for start, end, _ in edits)]
        learned = tuple((k, k + 1) for k in outside)
        turn = edited(Turn("assistant", text, learned=learned), edits)
        assert [turn.text[start:end] for start, end in turn.learned] == [text[k] for k in outside]


def test_too_many_markers_are_refused_as_without_other_marks():
    assert parse("<image> <image>", ["x"]) == "marker_without_image"
    with pytest.raises(SampleProblem, match="unknown_mark"):
        place_marks((Turn("user", "<image9>"),), "image", [Media("x")], REJECT)
