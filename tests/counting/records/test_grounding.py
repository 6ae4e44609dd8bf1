"""ms-swift's grounding data: filled in as ms-swift does for the model, or refused."""

import json
import random

import pytest
from transformers import PreTrainedTokenizerFast

from isobatch.counting.records.media import SampleProblem
from isobatch.counting.records.places.grounding import ImageSize, Objects, with_objects
from isobatch.counting.records.record import RawRecord, RawSample
from isobatch.counting.text.chat_tokenizer import ChatTokenizer, Turn
from isobatch.models.presets import MediaMarkup
from support.builds.raw_data import parse_record
from support.cases import for_each
from support.corpora import TOKENIZERS

SIZE = ImageSize(200, 150, 196, 140)
DOG = {"ref": ["a dog"], "bbox": [[331.5, 761.4, 853.5, 1594.8]]}
"""Of ms-swift's docs, "Custom dataset", "Grounding":
https://github.com/modelscope/ms-swift/blob/main/docs/source_en/Customization/Custom-dataset.md
"""


def parse(answer, objects, question="<image>Describe.", images=("x.jpg",)):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    record = {"messages": turns, "images": list(images), "objects": objects}
    return parse_record(RawRecord(0, record), "set")


def filled(answer, objects, model="qwen2_vl", sizes=(SIZE,), **more):
    """The answer with its objects, or the reason against the sample."""
    sample = parse(answer, objects, **more)
    if not isinstance(sample, RawSample):
        return sample.reason
    return with_objects(sample.turns, sample.objects, model, sizes)[-1].text


QWEN = "<|object_ref_start|>cat<|object_ref_end|><|box_start|>{}<|box_end|>"
FORMS = {
    "qwen2_vl": QWEN.format("(50,133),(500,800)"),
    "qwen3_vl_4b": QWEN.format("(50,133),(500,800)"),
    "qwen2_5_vl_72b": QWEN.format("(10,19),(98,112)"),
    "qwen2_5_omni": QWEN.format("(10,19),(98,112)"),
    "internvl3_5": "<ref>cat</ref><box>[[50, 133, 500, 800]]</box>",
    "internvl_1_5": "cat[(50,133),(500,800)]",
    "llava_next": "cat[(50,133),(500,800)]",
    "gemma3_12b": "cat[(50,133),(500,800)]",
}


@for_each("model", FORMS)
def test_objects_are_written_as_ms_swift_writes_them_for_the_model(model):
    objects = {"ref": ["cat"], "bbox": [[10, 20, 100, 120]]}
    text = "<ref-object><bbox>"
    assert filled(text, objects, model) == FORMS[model]
    assert filled(text, json.dumps(objects), model) == FORMS[model]
    shares = {"ref": ["cat"], "bbox": [[0.05, 20 / 150, 0.5, 0.8]], "bbox_type": "norm1"}
    assert filled(text, shares, model) == FORMS[model]
    turned = {"ref": ["cat"], "bbox": [[100, 120, 10, 20]], "image_id": None}
    assert filled(text, turned, model) == FORMS[model]


def test_the_examples_of_the_docs_are_the_texts_that_the_docs_give():
    size = [ImageSize(1500, 1800, 1484, 1792)]
    two = {"ref": ["a dog", "a woman"], "bbox": [*DOG["bbox"], [676.5, 685.8, 1099.5, 1427.4]]}
    assert filled("<ref-object><bbox> and <ref-object><bbox> play", two, sizes=size) == (
        "<|object_ref_start|>a dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|> and"
        " <|object_ref_start|>a woman<|object_ref_end|><|box_start|>(451,381),(733,793)<|box_end|>"
        " play"
    )
    click = {"ref": [], "bbox": [[615, 226]]}
    text = filled("click(start_box='<bbox>')", click, sizes=[ImageSize(2500, 2000, 0, 0)])
    assert text == "click(start_box='<|box_start|>(246,113)<|box_end|>')"


def test_a_box_is_scaled_by_its_own_image_wherever_the_text_has_it():
    sizes = [ImageSize(100, 100, 0, 0), ImageSize(1000, 1000, 0, 0)]
    objects = {"bbox": [[50, 50], [50, 50]], "image_id": [0, 1]}
    both = {"images": ("a.jpg", "b.jpg"), "sizes": sizes}
    boxes = [f"<|box_start|>({n},{n})<|box_end|>" for n in (500, 50)]
    text = filled("<bbox><bbox>", objects, question="<image><image>", **both)
    assert text == "".join(boxes)
    # the second image is the first of the text, so its size is
    text = filled("<bbox><bbox>", objects, question="<image2><image1>", **both)
    assert text == "".join(reversed(boxes))
    assert filled("<bbox><bbox>", {"bbox": [[50, 50]] * 2}, question="<image>" * 2, **both) == (
        boxes[0] * 2
    )


REFUSED = {
    "more marks than boxes": ("<bbox><bbox>", DOG),
    "fewer marks than boxes": ("<bbox>", {"bbox": [[1, 2], [3, 4]]}),
    "no boxes": ("<bbox>", {"ref": [], "bbox": []}),
    "three numbers": ("<bbox>", {"bbox": [[1, 2, 3]]}),
    "a text": ("<bbox>", {"bbox": [["1", "2"]]}),
    "not a number": ("<bbox>", {"bbox": [[float("nan"), 2]]}),
    "a number beyond any image": ("<bbox>", {"bbox": [[10**400, 2]]}),
    "an unknown kind of coordinates": ("<bbox>", {"bbox": [[1, 2]], "bbox_type": "norm1000"}),
    "an unknown key": ("<bbox>", {"bbox": [[1, 2]], "masks": [1]}),
    "an image that is not there": ("<bbox>", {"bbox": [[1, 2]], "image_id": [1]}),
    "a list": ("<bbox>", [{"bbox": [1, 2]}]),
    "a text that is not JSON": ("<bbox>", "{"),
    "a name that is a number": ("<ref-object>", {"ref": [3]}),
}


@for_each("case", REFUSED)
def test_what_cannot_be_written_exactly_rejects_the_sample(case):
    answer, objects = REFUSED[case]
    assert filled(answer, objects) == "grounding"


def test_a_sample_without_images_or_of_an_unknown_model_is_refused():
    assert filled("<bbox>", {"bbox": [[1, 2]]}, question="?", images=()) == "grounding"
    for model in ("idefics3", "llavaonevision1_5", "mine"):
        with pytest.raises(SampleProblem, match=f"how {model} writes boxes is not known"):
            filled("<bbox>", {"bbox": [[1, 2]]}, model)
    with pytest.raises(SampleProblem, match="of their own"):
        filled("<bbox><|box_start|>", {"bbox": [[1, 2]]})


def test_letters_without_objects_and_objects_without_marks_stay():
    for answer, objects in [("<bbox>", None), ("A dog.", DOG), ("A dog.", [1, "x"])]:
        sample = parse(answer, objects)
        assert sample.objects is None
        assert sample.turns[-1].text == answer
    assert filled("<ref-object>", {"ref": ["a"], "bbox": DOG["bbox"]}) == (
        "<|object_ref_start|>a<|object_ref_end|>"
    )


def test_coordinates_are_rounded_as_ms_swift_rounds_them():
    rng = random.Random(0)
    for _ in range(500):
        size = ImageSize(*(rng.randint(28, 4000) for _ in range(4)))
        x, y = rng.choice([rng.uniform(0, 4000), rng.randint(0, 4000)]), rng.uniform(0, 4000)
        objects = Objects((), ((x, y),), (0,), are_shares=False)
        turns = (Turn("assistant", "<bbox>"),)
        for model, (width, height) in [("llava", (1000, 1000)), ("qwen2_5_vl", size[2:])]:
            want = round(x / size.width * width), round(y / size.height * height)
            text = with_objects(turns, objects, model, [size])[0].text
            assert f"({want[0]},{want[1]})" in text


def test_names_and_boxes_are_control_tokens_and_other_control_strings_letters(tmp_path):
    reference = PreTrainedTokenizerFast.from_pretrained(TOKENIZERS / "byte_level")
    boxes = ["<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"]
    reference.add_tokens([*boxes, "<|image_pad|>"], special_tokens=True)
    reference.save_pretrained(tmp_path)
    tokenizer = ChatTokenizer.load(tmp_path, MediaMarkup(token="<|image_pad|>"))
    turns = (Turn("user", "Find <ref-object>"), Turn("assistant", "<bbox>"))
    objects = Objects(("cat",), ((10, 20, 100, 120),), (0,), are_shares=False)
    turns = with_objects(turns, objects, "qwen2_vl", [SIZE])
    (encoded,) = tokenizer.encode_batch([turns])
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    assert encoded.input_ids.tolist() == reference.apply_chat_template(messages, return_dict=False)
    told = (Turn("system", "The end is <|box_end|> or <|im_end|>."), *turns)
    (guarded,) = tokenizer.encode_batch([told])
    for token, times in [*((each, 1) for each in boxes[:3]), ("<|im_end|>", 3)]:
        found = (guarded.input_ids == reference.convert_tokens_to_ids(token)).sum()
        assert found == times, token
