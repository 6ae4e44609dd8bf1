"""Every line of the table of samples in docs/reference/bad_input.md: the records and files, and
what must become of them.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from support import ROOT
from support.builds import bad_pictures as pictures
from support.builds.raw_data import record

STRICT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] != ('assistant' if loop.index0 % 2 else 'user') %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BUILDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decode": {"check_images": "decode"},
    "vision cap": {"max_vision": 2},
    "strict template": {"chat_template": STRICT_TEMPLATE},
    "native": {"model": "qwen2_vl"},
    "reading": {"choices": "letters", "answers": "drawn", "unknown_marks": "text"},
    "links": {"follow_links": True},
    "undecodable": {},
}
"""The options of the builds that the cases are in."""

DOCS = ROOT / "docs" / "reference" / "bad_input.md"
OUTSIDE = "outside.png"
"""A whole image next to the data root."""
LINKS = {"link.png": f"../{OUTSIDE}", "followed.png": f"../{OUTSIDE}", "loop.png": "loop.png"}


@dataclass(frozen=True)
class Case:
    what: str
    happens: str
    reason: str
    """Empty for samples that are used."""
    lines: tuple[Any, ...]
    """Records, or lines as bytes; the same becomes of all."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    build: str = "plain"
    size: tuple[int, int] | None = None
    """Width and height that the model must see."""
    images: tuple[tuple[str, ...], ...] = ()
    """Files of each record in the order of its text, if not that of its `image`."""


UNKNOWN = (
    record("unknown", text="<image3>") | {"image": ["good.png"]},
    record("again", text="<image1> <image1>") | {"image": ["good.png"]},
    record("too many", text="<IMAGE> <IMAGE>") | {"image": ["good.png"]},
)
BOXES = record("boxes", ["good.png"], "Where is <ref-object>?", "<bbox>") | {
    "objects": {"ref": ["a cat"], "bbox": [[1, 2, 3, 4]]}
}
OPTIONS = {"question": "Which?", "answer": "B", "options": ["cat", "dog"]}


def used(what, *lines, happens="used", **rest):
    return Case(what, happens, "", lines, **rest)


def rejected(what, reason, *lines, happens="rejected", **rest):
    return Case(what, happens, reason, lines, **rest)


def picture(what, name, data, reason="", **rest):
    """A sample with one image file."""
    make = (lambda *args, **kw: rejected(args[0], reason, *args[1:], **kw)) if reason else used
    return make(what, record(name, [name]), files={name: data}, **rest)


def pointing(what, path, reason, **rest):
    """A sample whose image is at a path that cannot be used."""
    return rejected(what, reason, record(what, [path]), **rest)


def raw(value, **changes):
    return json.dumps(value | changes).encode()


def turns(*pairs):
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


def asking(**sizes):
    """A record whose image asks for a size of its own."""
    parts = [{"type": "image", "image": "good.png", **sizes}, {"type": "text", "text": "a"}]
    return {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]}


FIRST = used("byte order mark at the beginning of the file", b"\xef\xbb\xbf" + raw(record("first")))

IMAGES = [
    picture("JPEG of no bytes", "empty.jpg", b"", "corrupt_image"),
    picture("JPEG cut short", "cut.jpg", pictures.JPEG[:900], "corrupt_image"),
    picture("PNG cut short", "cut.png", pictures.PNG[:900], "corrupt_image"),
    picture("PNG with a wrong bit", "flipped.png", pictures.flipped(pictures.PNG), "corrupt_image"),
    picture(
        "JPEG with a wrong bit",
        "flipped.jpg",
        pictures.flipped(pictures.JPEG),
        happens="used, as it decodes",
    ),
    picture(
        "image whose file is whole but whose pixels are not",
        "hollow.png",
        pictures.png(60, 40, pixels=b"\0" * 100),
        happens="used; the loader stops at it and names the sample",
        build="undecodable",
    ),
    picture(
        "the same with `--check-images decode`",
        "hollow2.png",
        pictures.png(60, 40, pixels=b"\0" * 100),
        "corrupt_image",
        build="decode",
    ),
    picture(
        "web page or other text under the name of an image",
        "page.jpg",
        b"<!DOCTYPE html>404",
        "corrupt_image",
    ),
    picture("SVG", "a.svg", b'<svg xmlns="http://www.w3.org/2000/svg"></svg>', "corrupt_image"),
    picture("EPS", "a.eps", pictures.encoded(pictures.PHOTO, "EPS"), "corrupt_image"),
    picture("image 0 px wide", "flat.jpg", pictures.without_width(pictures.JPEG), "corrupt_image"),
    picture(
        "PNG of 16 bits per colour",
        "deep.png",
        pictures.colour_16_bit(),
        happens="used with the upper 8 bits",
    ),
    picture(
        "PNG of 16 bits of grey",
        "deep-grey.png",
        pictures.grey_16_bit(),
        happens="used with the upper 8 bits (transformers makes all above 255 white)",
    ),
    picture("PNG with a palette", "palette.png", pictures.encoded(pictures.PALETTE, "PNG")),
    picture(
        "PNG with a transparent colour in its palette",
        "clear.png",
        pictures.encoded(pictures.PALETTE, "PNG", transparency=3),
        happens="used; what has that colour becomes white",
    ),
    *[
        picture(
            f"{what} with a transparent colour",
            f"clear-{number}.png",
            pictures.encoded(image, form, transparency=colour),
            happens="used; what has that colour becomes white",
        )
        for number, (what, image, form, colour) in enumerate(
            [
                ("PNG of RGB", pictures.PHOTO, "PNG", pictures.PHOTO.getpixel((5, 5))),
                ("PNG of grey", pictures.PHOTO.convert("L"), "PNG", 90),
                ("black and white PNG", pictures.PHOTO.convert("1"), "PNG", 0),
                ("GIF", pictures.PALETTE, "GIF", 3),
            ]
        )
    ],
    picture(
        "PNG with several transparent colours in its palette",
        "clear-several.png",
        pictures.encoded(pictures.PALETTE, "PNG", transparency=bytes(range(64))),
        happens="used; transparency is dropped",
    ),
    picture("AVIF that its library refuses", "bad.avif", pictures.AVIF, "corrupt_image"),
    picture("DDS of an unknown pixel format", "bad.dds", pictures.DDS, "corrupt_image"),
    picture("HEIC", "a.heic", pictures.HEIC, "corrupt_image"),
    picture(
        "PNG with alpha",
        "alpha.png",
        pictures.encoded(pictures.TRANSPARENT, "PNG"),
        happens="used; transparency is dropped",
    ),
    picture(
        "PNG of grey and alpha",
        "la.png",
        pictures.encoded(pictures.TRANSPARENT.convert("LA"), "PNG"),
    ),
    picture(
        "black and white PNG", "one-bit.png", pictures.encoded(pictures.PHOTO.convert("1"), "PNG")
    ),
    picture("CMYK JPEG", "cmyk.jpg", pictures.encoded(pictures.PHOTO.convert("CMYK"), "JPEG")),
    picture("grey JPEG", "grey.jpg", pictures.encoded(pictures.PHOTO.convert("L"), "JPEG")),
    *[
        picture(
            f"animated {form}",
            f"film.{form.lower()}",
            pictures.animated(form),
            happens="used: the first frame",
        )
        for form in ("GIF", "WebP", "PNG")
    ],
    picture(
        "TIFF of several pages",
        "pages.tiff",
        pictures.animated("TIFF"),
        happens="used: the first page",
    ),
    *[
        picture(
            f"{form} turned by EXIF",
            f"turned.{form.lower()}",
            pictures.sideways(form),
            happens="used upright",
            size=(40, 60),
        )
        for form in ("JPEG", "PNG", "WebP")
    ],
    picture(
        "image of 1 x 10,000 px",
        "line.png",
        pictures.png(1, 10_000, pixels=b"\0\0" * 10_000),
        size=(1, 10_000),
    ),
    picture(
        "the same for a model that refuses such shapes",
        "line2.png",
        pictures.png(1, 10_000, pixels=b"\0\0" * 10_000),
        "aspect_ratio",
        build="native",
    ),
    picture(
        "decompression bomb: 60,000 x 60,000 px in 70 bytes",
        "bomb.png",
        pictures.png(60_000, 60_000),
        "too_many_pixels",
    ),
    picture(
        "decompression bomb: 100 MB of text in a PNG",
        "text-bomb.png",
        pictures.text_bomb(),
        "corrupt_image",
    ),
]

PATHS = [
    pointing("missing file", "nowhere.png", "missing_image"),
    pointing("path of a folder", "folder", "missing_image", files={"folder/a.txt": b""}),
    pointing("path through a file", "good.png/a.png", "missing_image"),
    pointing("file name of 300 characters", "a" * 300, "unreadable_image"),
    pointing("link that leads to itself", "loop.png", "unreadable_image"),
    pointing("path with `../`", f"../{OUTSIDE}", "outside_data_root"),
    pointing("absolute path to elsewhere", "/pictures/1.png", "outside_data_root"),
    pointing("link out of the data root", "link.png", "outside_data_root"),
    used("the same with `--follow-links`", record("followed", ["followed.png"]), build="links"),
    pointing("path with a NUL character", "a\0.png", "outside_data_root"),
    pointing("image URL", "https://example.com/1.png", "image_url"),
    used(
        "`data:` URL",
        record("data-url", ["data:image/png;base64," + base64.b64encode(pictures.PNG).decode()]),
        happens="used: the image is in it",
    ),
    pointing("`data:` URL whose base64 is damaged", "data:image/png;base64,a", "bad_image_field"),
    rejected("`image` that is a number", "bad_image_field", record("number") | {"image": 7}),
    used(
        "`image` that is empty, and no marker",
        record("no-image") | {"image": ""},
        happens="used as text",
    ),
    rejected(
        "audio for a model without audio", "no_audio_encoder", record("audio") | {"audio": "a.wav"}
    ),
]

TEXT = {"type": "text", "text": "b"}
UNLEARNED = {"role": "assistant", "content": "b", "loss": False}
CALL = {"role": "tool_call", "content": '{"name": "f", "arguments": {}}'}
RECORDS = [
    rejected("broken JSON line", "broken_json", b'{"id": "broken", "conv', b"}{", b"no JSON"),
    rejected("JSON nested 100,000 deep", "broken_json", b"[" * 100_000),
    rejected(
        "number of 5,000 digits",
        "broken_json",
        raw(record("digits"))[:-1] + b', "n": ' + b"1" * 5000 + b"}",
    ),
    rejected("record that is a list, a number or null", "not_an_object", b"[1, 2]", b"17", b"null"),
    rejected(
        "invalid UTF-8 in a text",
        "invalid_utf8",
        raw(record("bytes", text="XX")).replace(b"XX", b"\xff\xfe"),
    ),
    rejected(
        "half of a surrogate pair in a text", "invalid_utf8", record("surrogate", text="\ud800")
    ),
    rejected(
        "invalid UTF-8 in a path",
        "bad_image_field",
        raw(record("p", ["XX.png"])).replace(b"XX", b"\xff"),
    ),
    used(
        "invalid UTF-8 in an id",
        raw(record("XX")).replace(b"XX", b"\xff", 1),
        happens="used, with `?` in the id",
    ),
    used("byte order mark in front of a later line", b"\xef\xbb\xbf" + raw(record("joined"))),
    used(
        "NaN or Infinity in a field that is not read",
        raw(record("nan"), score=float("nan"), loss=float("inf")),
    ),
    rejected(
        "NaN in place of a text",
        "bad_turn",
        raw(record("nan2") | turns(("human", float("nan")), ("gpt", "a"))),
    ),
    used("NUL character in a text", record("nul", text="a\0b")),
    used("line that ends with CR LF", raw(record("windows")) + b"\r"),
    used(
        "record without an id",
        turns(("human", "a"), ("gpt", "b")),
        happens="used, named by its file and place",
    ),
    used(
        "an id twice",
        record("twice"),
        record("twice"),
        happens="both used; the second is called `ID#2`",
    ),
    used(
        "fewer `<image>` markers than images",
        record("fewer", text="What?") | {"image": ["good.png", "good.png"]},
        happens="used; images without a marker come before the first question",
    ),
    rejected(
        "more `<image>` markers than images",
        "marker_without_image",
        record("more", ["good.png"], text="<image>"),
        record("none", text="<image>"),
    ),
    used(
        "other marks of images: `<image2>`, `<IMAGE>`, `<img></img>`, `<img>good.png</img>`, ...",
        record("numbers", text="<image2> and <image_1>") | {"image": ["good.png", "wide.png"]},
        record("capitals", text="<IMAGE> <Image>") | {"image": ["good.png", "wide.png"]},
        record("tags", text="<img></img><|image|>") | {"image": ["good.png", "wide.png"]},
        record("path", text="Picture 1: <img>good.png</img>"),
        files={"wide.png": pictures.encoded(pictures.PHOTO.resize((90, 20)), "PNG")},
        images=(("wide.png", "good.png"), *[("good.png", "wide.png")] * 2, ("good.png",)),
        happens="used; each is a place, a number or a name says of which",
    ),
    used(
        "images in columns `image_1`, `image_2`, ...",
        record("columns", text="<image 2>") | {"image_1": "good.png", "image_2": "wide.png"},
        images=(("good.png", "wide.png"),),
    ),
    used(
        'images by their marks, as MiniCPM-V has them: `{"<image_00>": path}`',
        record("marks", text="<image_01>, <image_00>")
        | {"image": {"<image_00>": "good.png", "<image_01>": "wide.png"}},
        images=(("wide.png", "good.png"),),
        happens="used; each is at its mark",
    ),
    rejected("a mark that matches no image", "unknown_mark", *UNKNOWN),
    used(
        "the same with `--unknown-marks text`",
        *UNKNOWN,
        happens="used; it stays letters",
        build="reading",
    ),
    used(
        "marks without images",
        record("letters", text="<image1> <IMAGE> <img></img>"),
        happens="used; they stay letters",
    ),
    used(
        "ms-swift's `<ref-object>` and `<bbox>` with `objects`",
        BOXES,
        happens="used; filled in as ms-swift does for the model",
        build="native",
    ),
    rejected("the same for a model whose form is not known", "grounding", BOXES),
    rejected(
        "more or fewer `<bbox>` than boxes",
        "grounding",
        BOXES | {"objects": {"bbox": [[1, 2]]}},
        BOXES | {"objects": {"bbox": []}},
        build="native",
    ),
    used(
        "question with a list of answers",
        {"query": "?", "label": ["a", "b"]},
        {"question": "?", "answers": [{"answer": "a"}, {"answer": "b"}]},
        happens="used with the first; `--answers` draws one, or takes all",
    ),
    used("the same with `--answers drawn`", {"query": "?", "label": ["a", "b"]}, build="reading"),
    rejected(
        "list of answers with a null",
        "bad_turn",
        {"query": "?", "label": [None]},
        {"question": "?", "answers": [{"answer_id": 1}]},
    ),
    rejected("empty list of answers", "no_answer", {"query": "?", "label": []}),
    used("`options` of a question", OPTIONS, happens="used without them"),
    used(
        "the same with `--choices letters`",
        OPTIONS,
        OPTIONS | {"options": None, "A": "cat", "B": "dog"},
        happens="used; lettered lines after the question",
        build="reading",
    ),
    rejected(
        "options that are no list of texts, with `--choices letters`",
        "bad_turn",
        OPTIONS | {"options": "cat or dog"},
        OPTIONS | {"options": [["cat"]]},
        OPTIONS | {"answer": 2},
        build="reading",
    ),
    used(
        "`options` next to a conversation, with `--choices letters`",
        record("chosen") | {"options": ["A", "B"]},
        happens="used; the key is named as never read",
        build="reading",
    ),
    used(
        "`conversation` of pairs, as ms-swift and xtuner have it, or of turns",
        {"conversation": [{"human": "a", "assistant": "b"}]},
        {"conversation": [{"system": "s", "input": "a", "output": "b"}]},
        {"conversation": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]},
    ),
    rejected("`conversation` of neither", "bad_turn", {"conversation": [{"q": "a", "a": "b"}]}),
    rejected(
        "empty conversation",
        "no_conversation",
        record("e") | {"conversations": []},
        {"text": " \n"},
    ),
    rejected("no field that is known", "no_conversation", {"id": "other", "body": "a"}),
    rejected("conversation of a system turn only", "no_answer", turns(("system", "Be kind."))),
    rejected("conversation without an answer", "no_answer", turns(("human", "a"))),
    used(
        "`max_pixels`, `resized_height`, `fps` in a part, as the model's rule makes it",
        asking(max_pixels=1_003_520),
        asking(resized_height=40, resized_width=60),
        build="native",
    ),
    rejected(
        "the same, where the model's rule makes it otherwise",
        "asked_size",
        *(asking(min_pixels=100_000), asking(resized_height=280, resized_width=280)),
        *(asking(fps=2), asking(min_pixels=-1), asking(max_pixels="many")),
        build="native",
        happens="rejected; the line says where to give it for all",
    ),
    used(
        "the same for a model whose rule knows no such sizes",
        asking(max_pixels=1_003_520),
        happens="used; the key is named as never read",
    ),
    used(
        "key that nothing reads",
        record("unread") | {"options": ["A", "B"]},
        happens="used; the key is named at the end, in the manifest and the report",
    ),
    used(
        "`weight`, `loss`, `train` and their like of a turn, 0 or 1",
        turns(("human", "a"), ("gpt", "b")) | {"loss_mask": [0, 1]},
        happens="used; 0: the turn has no labels",
    ),
    used(
        "`train`, `weight` of a part, 0",
        turns(("human", "a"), ("gpt", [TEXT | {"train": False}, TEXT])),
        happens="used; the part has no labels",
    ),
    rejected(
        "`tool_call` of ms-swift, and the answer before it, of which one is learned",
        "bad_loss",
        {"messages": [{"role": "user", "content": "a"}, UNLEARNED, CALL]},
    ),
    rejected("`weight` between 0 and 1", "bad_loss", record("half") | {"weight": 0.5}),
    rejected("`weight` 0 of a record", "not_learned", record("unlearned") | {"weight": 0}),
    rejected(
        "`loss_mask` that does not fit the turns", "bad_loss", record("mask") | {"loss_mask": [1]}
    ),
    rejected(
        "`history` that is no list of pairs",
        "bad_turn",
        {"query": "a", "response": "b", "history": ["c", "d", "e"]},
    ),
    rejected(
        "`system` and `system_prompt` that differ",
        "bad_turn",
        {"query": "a", "response": "b", "system": "c", "system_prompt": "d"},
    ),
    used(
        "assistant first",
        turns(("gpt", "Hello."), ("human", "a"), ("gpt", "b")),
        happens="used, if the chat template takes it",
    ),
    rejected(
        "the same with a chat template that refuses it",
        "chat_template",
        turns(("gpt", "Hello."), ("human", "a"), ("gpt", "b")),
        build="strict template",
    ),
    rejected("turn of an unknown role", "bad_turn", turns(("judge", "a"), ("gpt", "b"))),
    rejected("turn without a text", "bad_turn", turns(("human", None), ("gpt", "b"))),
    rejected(
        "text longer than the cap", "longer_than_max_seq_len", record("long", answer="word " * 3000)
    ),
    rejected(
        "more patches than `--max-vision`",
        "more_than_max_vision",
        record("wide", ["wide.png"]),
        files={"wide.png": pictures.png(200, 100, pixels=(b"\0" * 201) * 100)},
        build="vision cap",
    ),
    used(
        "control tokens in a text",
        record(
            "control", text="<|im_end|>\n<|im_start|>assistant\n<IMG_CONTEXT></img><|endoftext|>"
        ),
        happens="used; they stay letters",
    ),
    rejected(
        "control tokens next to private-use characters",
        "control_token",
        record("private", text="<|im_end|>\U00100000"),
    ),
]

CASES = [FIRST, *IMAGES, *PATHS, *RECORDS]


def rows_of(heading):
    """The cells of a table in the docs, without its head."""
    section = DOCS.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in line) for line in lines[2:]]
