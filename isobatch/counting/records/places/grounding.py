"""ms-swift's `<ref-object>` and `<bbox>`, filled in from `objects`. Pure.

For `counting.records.schemas`, which reads `objects`, and `counting.sample_counter`, which knows
the images' sizes and writes the boxes as ms-swift's template of the model does:

- Qwen: `<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(10,20),(100,120)<|box_end|>`;
- InternVL from 2.5 on: `<ref>a dog</ref><box>[[10, 20, 100, 120]]</box>`;
- LLaVA, Gemma, PaliGemma, GLM-4V, InternVL 1.5: `a dog[(10,20),(100,120)]`.

Coordinates are thousandths of the image; of Qwen2.5-VL and Qwen2.5-Omni pixels of the image as it
is resized for them. The reference are ms-swift's sources (`template/base.py`, `templates/`, 4.x),
for the rounding too. Letters of marks in a record without `objects` stay letters.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from isobatch.counting.records.media import Media, SampleProblem
from isobatch.counting.records.places.marks import edited
from isobatch.counting.text.chat_tokenizer import Turn

OBJECTS_KEY = "objects"
_REF, _BOX = "<ref-object>", "<bbox>"
_MARK = re.compile(f"{_REF}|{_BOX}")
_MOST = 1e9
"""Number beyond any coordinate; NaN and infinity are too."""
_KEYS = ("ref", "bbox", "bbox_type", "image_id")


@dataclass(frozen=True, slots=True)
class Objects:
    """Names and boxes of objects, in the order of their marks."""

    refs: tuple[str, ...]
    boxes: tuple[tuple[float, ...], ...]
    """(x, y) or (left, top, right, bottom)."""
    images: tuple[int, ...]
    """Image of each box, among the sample's."""
    are_shares: bool
    """Whether coordinates are shares of width and height; else pixels of the image's file."""


class ImageSize(NamedTuple):
    """Sizes of an image in pixels: its own, upright, and that in which the model sees it."""

    width: int
    height: int
    resized_width: int
    resized_height: int


class _Form(NamedTuple):
    """How a model's texts name objects and give boxes."""

    tokens: tuple[str, ...]
    """Tokens around a name and around a box; empty: nothing is around them."""
    is_list: bool = False
    """Whether numbers are a list in a list; else points in brackets."""
    is_resized: bool = False
    """Whether coordinates are pixels of the resized image; else thousandths."""


_QWEN = ("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>")
_LISTS = _Form(("<ref>", "</ref>", "<box>", "</box>"), is_list=True)
_POINTS = _Form(())
_FORMS: dict[str, _Form] = {
    "qwen2_vl": _Form(_QWEN),
    "qwen2_5_vl": _Form(_QWEN, is_resized=True),
    "qwen2_5_omni": _Form(_QWEN, is_resized=True),
    "qwen3_vl": _Form(_QWEN),
    "qwen3_omni": _Form(_QWEN),
    "qwen3_5": _Form(_QWEN),
    **dict.fromkeys(("internvl", "internvl2_5", "internvl3", "internvl3_5"), _LISTS),
    "internvl_1_5": _POINTS,
    **dict.fromkeys(("llava", "gemma3", "gemma3n", "gemma4"), _POINTS),
    **dict.fromkeys(("paligemma", "paligemma2", "glm4v", "glm46v"), _POINTS),
}
"""Model's name (its `model_type`, or its preset's, with or without a size) -> its form."""


# --- reading ---


def read_objects(
    record: Mapping[str, Any],
    turns: Sequence[Turn],
    numbered: Sequence[Media],
    images: Sequence[Media],
) -> Objects | None:
    """The objects that a record's texts have marks for; None if there are no marks or no objects.

    `numbered` are the images in the order that `image_id` counts in, `images` in that of the text.
    SampleProblem (`grounding`) unless there is one object for each mark.
    """
    if OBJECTS_KEY not in record or not any(_MARK.search(turn.text) for turn in turns):
        return None
    if (raw := record[OBJECTS_KEY]) is None:
        return None
    values = _values(raw)
    refs = tuple(_ref(ref) for ref in _list(values, "ref"))
    boxes = tuple(_box(box) for box in _list(values, "bbox"))
    _require_as_many(turns, _REF, refs)
    _require_as_many(turns, _BOX, boxes)
    if not any(_BOX in turn.text for turn in turns):
        boxes = ()
    kind = values.get("bbox_type") or "real"
    if kind not in ("real", "norm1"):
        raise _problem(f"bbox_type is {str(kind)[:40]!r}; known: real, norm1")
    places = [*_list(values, "image_id"), *[0] * len(boxes)][: len(boxes)]
    for place in places:
        if type(place) is not int or not 0 <= place < len(numbered):
            raise _problem(
                f"a box is on image {str(place)[:40]}, from 0, of {len(numbered)} images"
            )
    ordered = list(images)
    # equal files have equal sizes, so any of them will do
    return Objects(
        refs, boxes, tuple(ordered.index(numbered[place]) for place in places), kind == "norm1"
    )


def _require_as_many(turns: Sequence[Turn], mark: str, objects: Sequence[Any]) -> None:
    """SampleProblem unless a mark has all objects or, as in ms-swift's own data, none is named."""
    marks = sum(turn.text.count(mark) for turn in turns)
    if marks and marks != len(objects):
        raise _problem(f"{marks} {mark} in the texts for {len(objects)} in `objects`")


def _values(raw: Any) -> Mapping[str, Any]:
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError):
            raise _problem("`objects` is a text that is not JSON") from None
    if not isinstance(raw, Mapping):
        raise _problem(f"`objects` is a {type(raw).__name__}; give ref and bbox, as ms-swift does")
    unknown = [str(key)[:40] for key in raw if key not in _KEYS and raw[key] is not None]
    if unknown:
        raise _problem(f"`objects` has {', '.join(unknown)}; known: {', '.join(_KEYS)}")
    return raw


def _list(values: Mapping[str, Any], key: str) -> Sequence[Any]:
    items = values.get(key)
    if items is None:
        return ()
    if not isinstance(items, list | tuple):
        raise _problem(f"{key} of `objects` is a {type(items).__name__}, not a list")
    return items


def _ref(ref: Any) -> str:
    if not isinstance(ref, str):
        raise _problem(f"ref of `objects` holds a {type(ref).__name__}, not a text")
    return ref


def _box(box: Any) -> tuple[float, ...]:
    """A point, or a box with its corners in order, as ms-swift puts them."""
    numbers = list(box) if isinstance(box, list | tuple) else []
    is_right = all(type(number) in (int, float) and abs(number) < _MOST for number in numbers)
    if len(numbers) not in (2, 4) or not is_right:
        raise _problem(f"bbox of `objects` holds {str(box)[:60]}, not 2 or 4 numbers")
    if len(box) == 2:
        return tuple(box)
    x0, y0, x1, y1 = box
    return min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)


def _problem(detail: str) -> SampleProblem:
    return SampleProblem("grounding", detail)


# --- writing ---


def with_objects(
    turns: Sequence[Turn], objects: Objects, model: str, sizes: Sequence[ImageSize]
) -> tuple[Turn, ...]:
    """Turns with names and boxes in place of their marks; `sizes` of the sample's images.

    SampleProblem (`grounding`) for a model whose form is not known.
    """
    names = [name for name in _FORMS if f"{model}_".startswith(f"{name}_")]
    if not names:
        known = ", ".join(_FORMS)
        raise _problem(f"how {model} writes boxes is not known; known: {known}")
    form = _FORMS[max(names, key=len)]
    texts = [*(turn.text for turn in turns), *objects.refs]
    present = [token for token in form.tokens if any(token in text for text in texts)]
    if present:
        raise _problem(f"the texts have {present[0]} of their own next to {_REF} or {_BOX}")
    before, after = form.tokens[:2] or ("", "")
    refs = iter([f"{before}{ref}{after}" for ref in objects.refs])
    pairs = zip(objects.boxes, objects.images, strict=True)
    boxes = iter([_written_box(form, box, objects, sizes[image]) for box, image in pairs])
    filled = []
    for turn in turns:
        edits = [
            (*match.span(), next(refs if match[0] == _REF else boxes))
            for match in _MARK.finditer(turn.text)
        ]
        filled.append(replace(edited(turn, edits), tokens=form.tokens) if edits else turn)
    return tuple(filled)


def _written_box(form: _Form, box: tuple[float, ...], objects: Objects, size: ImageSize) -> str:
    """A box as ms-swift writes it: divided first, then multiplied, then rounded."""
    unit = (1, 1) if objects.are_shares else size[:2]
    scaled = size[2:] if form.is_resized else (1000, 1000)
    numbers = [
        round(number / unit[place % 2] * scaled[place % 2]) for place, number in enumerate(box)
    ]
    points = zip(numbers[::2], numbers[1::2], strict=True)
    written = ",".join(f"({x},{y})" for x, y in points)
    if form.is_list:
        written = f"[{numbers}]"
    elif not form.tokens:
        written = f"[{written}]"
    return f"{form.tokens[2]}{written}{form.tokens[3]}" if form.tokens else written
