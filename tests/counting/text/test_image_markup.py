"""Markup that depends on the image: ids and labels as transformers' processors give them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.image_utils import SizeDict
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from isobatch.common.errors import ConfigError
from isobatch.common.types import LABEL_IGNORE
from isobatch.counting.pack_block import expand
from isobatch.counting.text.chat_tokenizer import (
    DOCUMENT,
    ChatTokenizer,
    EncodedText,
    TextRejected,
    Turn,
)
from isobatch.models.image_tokens import plan_image
from isobatch.models.presets import MediaMarkup, load_model
from support.cases import for_each
from support.corpora import BYTE_LEVEL, TOKENIZERS
from support.oracles.family_processors import (
    Size,
    families,
    function_of,
    resizing_shapes,
    shape_only,
)

FAMILIES = families()
DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "12"))
Texts = Callable[[list[Size]], list[str]]
PARTS_TEMPLATE = """
{%- for message in messages -%}
    {{ '<|im_start|>' + message.role + '\n' }}
    {%- for part in message.content -%}
        {%- if part.type == 'image' -%}PLACEHOLDER{%- else -%}{{ part.text }}{%- endif -%}
    {%- endfor -%}
    {{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


def _idefics3(name: str) -> Texts:
    rule = FAMILIES[name].rule
    processor = Idefics3ImageProcessorPil()

    def texts(sizes: list[Size]) -> list[str]:
        written = []
        for size in sizes:
            with resizing_shapes():
                image = processor.resize(shape_only(size), SizeDict(longest_edge=rule.longest_side))
                image = processor.resize_for_vision_encoder(image, rule.image_size)
                side = {"longest_edge": rule.image_size}
                _, rows, columns = processor.split_images(image, side)
            fake, count = "<fake_token_around_image>", rule.llm_tokens_per_patch
            text = get_image_prompt_string(rows, columns, count, fake, "<image>", "<global-img>")
            written.append(text)
        return written

    return texts


def _pixtral(sizes: list[Size]) -> list[str]:
    write = function_of("pixtral/processing_pixtral.py", "replace_image_token")
    tokens = {name: f"[IMG_{name.upper()}]" for name in ("break", "end")}
    fake = SimpleNamespace(
        patch_size=14,
        spatial_merge_size=2,
        image_token="[IMG]",
        **{f"image_{name}_token": token for name, token in tokens.items()},
    )
    plans = [plan_image(FAMILIES["mistral3"].rule, *size) for size in sizes]
    resized = [(plan.resized_height, plan.resized_width) for plan in plans]
    return [write(fake, {"image_sizes": resized}, i) for i in range(len(sizes))]


def _minicpm(sizes: list[Size]) -> list[str]:
    names = {
        **{"image_token": "<unk_image>", "image_start_token": "<image>"},
        **{"image_end_token": "</image>", "slice_start_token": "<slice>"},
        **{"slice_end_token": "</slice>"},
        **{"image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>"},
    }
    if not sizes:
        return []
    fake = SimpleNamespace(slice_mode=True, **names)
    images = MiniCPMV4_6ImageProcessorPil(do_rescale=False, do_normalize=False)
    with resizing_shapes():
        inputs = images([shape_only(size) for size in sizes], return_tensors="np")
    write = MiniCPMV4_6Processor.replace_image_token
    texts = [write(fake, inputs, i, image_token_divisor=16) for i in range(len(sizes))]
    markers = [names["image_token"] * len(sizes)]
    return MiniCPMV4_6Processor._prepend_local_ids(fake, markers, texts, names["image_token"])


def _gemma3(sizes: list[Size]) -> list[str]:
    image = "<image_soft_token>" * 256
    fake = SimpleNamespace(full_image_sequence=f"\n\n<start_of_image>{image}<end_of_image>\n\n")
    inputs = {"num_crops": [0] * len(sizes)}
    return [Gemma3Processor.replace_image_token(fake, inputs, i) for i in range(len(sizes))]


MINICPM = MediaMarkup(
    token="<unk_image>",
    placeholder="<unk_image>",
    prefix="<image_id>{number}</image_id>",
    parts=(
        ("whole", "<image><unk_image></image>"),
        ("slice", "<slice><unk_image></slice>"),
        ("row_break", "\n"),
    ),
)
CASES: dict[str, tuple[MediaMarkup, str, Texts]] = {
    "smolvlm2": (load_model("smolvlm2").image_markup, "smolvlm2", _idefics3("smolvlm2")),
    "idefics3": (load_model("idefics3").image_markup, "idefics3", _idefics3("idefics3")),
    "mistral3": (load_model("mistral3").image_markup, "mistral3", _pixtral),
    "gemma3": (load_model("gemma3").image_markup, "gemma3", _gemma3),
    "minicpm_v": (MINICPM, "minicpm_v", _minicpm),
}
SPECIAL = {
    "smolvlm2": ["<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_2_col_3>"],
    "idefics3": ["<fake_token_around_image>"],  # rows and columns are letters
    "mistral3": ["[IMG_BREAK]", "[IMG_END]"],
    "gemma3": ["<end_of_image>"],
    "minicpm_v": ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"],
}
ANSWER = "An <answer> of\nlines.\n"


def _tokenizers(
    name: str, folder: Path, *, parts: bool
) -> tuple[ChatTokenizer, PreTrainedTokenizerFast]:
    markup = CASES[name][0]
    theirs = PreTrainedTokenizerFast.from_pretrained(TOKENIZERS / BYTE_LEVEL)
    tokens = dict.fromkeys([*SPECIAL[name], markup.placeholder, markup.token])
    theirs.add_tokens(list(tokens), special_tokens=True)
    theirs.chat_template = PARTS_TEMPLATE.replace("PLACEHOLDER", markup.placeholder)
    if not parts:
        theirs.chat_template = (
            "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n'"
            " + message.content + '<|im_end|>\\n' }}{%- endfor -%}"
            "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
        )
    place = folder / f"{name}-{parts}"
    theirs.save_pretrained(place)
    return ChatTokenizer.load(place, markup), theirs


def _written(name: str, sizes: list[Size]) -> tuple[list[str], list[int]]:
    markup, family, _ = CASES[name]
    plans = [plan_image(FAMILIES[family].rule, *size, len(sizes)) for size in sizes]
    runs = [run for plan in plans for run in plan.runs]
    return [markup.written(plan, number) for number, plan in enumerate(plans)], runs


def _full(template_text: str, placeholder: str, texts: list[str]) -> str:
    pieces = template_text.split(placeholder)
    assert len(pieces) == len(texts) + 1
    return "".join(a + b for a, b in zip(pieces, [*texts, ""], strict=True))


@for_each("parts", [False, True])
def test_chats_equal_the_processors_expansion(parts: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    for name, (markup, _, texts) in CASES.items():
        ours, theirs = _tokenizers(name, tmp_path, parts=parts)
        assert ours.takes_markups
        for _ in range(DRAWS):
            sizes = [(int(w), int(h)) for w, h in rng.integers(8, 1900, (rng.integers(0, 4), 2))]
            user = "".join(rng.choice(["see", "\n", " ", "<image>"]) for _ in range(4))
            user = user.replace("<image>", "") + "".join(
                f"{rng.choice(['', ' ', chr(10), 'a'])}<image>" for _ in sizes
            )
            user += str(rng.choice(["", "\n", "\n\n\nx", " what?"]))
            turns = [Turn("user", user), Turn("assistant", ANSWER), Turn("user", "more?\n")]
            written, runs = _written(name, sizes)
            assert written == _collapsed(texts(sizes), markup.token)
            encoded = ours.encode_batch([turns], [written])[0]
            assert isinstance(encoded, EncodedText), encoded
            assert encoded.num_images == len(sizes)
            ids, labels = expand(encoded.input_ids, encoded.loss_spans, ours.image_token_id, runs)
            text = theirs.apply_chat_template(
                [_message(turn, markup.placeholder, parts=parts) for turn in turns], tokenize=False
            )
            full = _full(text, markup.placeholder, texts(sizes))
            assert ids.tolist() == theirs(full, add_special_tokens=False)["input_ids"], (name, user)
            learned = ids[labels != LABEL_IGNORE].tolist()
            answer = theirs(f"{ANSWER}<|im_end|>\n", add_special_tokens=False)["input_ids"]
            assert learned == answer, (name, theirs.decode(learned))
            assert encoded.num_loss_tokens == len(learned)


def _collapsed(texts: list[str], token: str) -> list[str]:
    """Each run of the token as one."""
    collapsed = []
    for text in texts:
        pieces = text.split(token)
        kept = [piece for i, piece in enumerate(pieces) if piece or i in {0, len(pieces) - 1}]
        collapsed.append(token.join(kept))
    return collapsed


def _message(turn: Turn, placeholder: str, *, parts: bool) -> dict[str, object]:
    if not parts:
        return {"role": turn.role, "content": turn.text.replace("<image>", placeholder)}
    first, *rest = turn.text.split("<image>")
    content = [{"type": "text", "text": first}]
    for piece in rest:
        content += [{"type": "image"}, {"type": "text", "text": piece}]
    return {"role": turn.role, "content": content}


def test_documents_learn_all_but_the_markup_and_control_strings_stay_letters(
    tmp_path: Path,
) -> None:
    for name, (markup, _, texts) in CASES.items():
        ours, theirs = _tokenizers(name, tmp_path, parts=True)
        sizes = [(700, 300), (64, 64)]
        written, runs = _written(name, sizes)
        document = "a one<image>two\n<image>\nthree"
        encoded = ours.encode_batch([[Turn(DOCUMENT, document)]], [written])[0]
        assert isinstance(encoded, EncodedText), encoded
        ids, labels = expand(encoded.input_ids, encoded.loss_spans, ours.image_token_id, runs)
        full = _full(document, "<image>", texts(sizes))
        expected = theirs(full, add_special_tokens=False)["input_ids"]
        assert ids.tolist()[: len(expected)] == expected, name
        learned = theirs.decode(ids[labels != LABEL_IGNORE])
        assert "one" in learned, name
        assert "three" in learned, name
        assert "_of_image" not in learned, name
        # the strings of the markup, written by a user
        forged = f"a {markup.token} b {markup.placeholder} c"
        forged = forged.replace("<image>", "< image>")
        turns = [Turn("user", f"{forged}<image>"), Turn("assistant", "x")]
        one = ours.encode_batch([turns], [written[:1]])[0]
        assert isinstance(one, EncodedText), one
        num_runs = written[0].count(markup.token)
        assert (one.input_ids == ours.image_token_id).sum() == num_runs, name


def test_markup_that_does_not_fit_is_one_clear_line(tmp_path: Path) -> None:
    ours, _ = _tokenizers("smolvlm2", tmp_path, parts=True)
    turns = [Turn("user", "<image>"), Turn("assistant", "x")]
    # of fewer images than markers: the packer refuses the sample by its markers
    encoded = ours.encode_batch([turns], [[]])[0]
    assert isinstance(encoded, EncodedText)
    assert encoded.num_images == 1
    silent = "{% for one in messages %}{{ one.content | replace('<image>', '') }}{% endfor %}"
    path = tmp_path / "smolvlm2-True"
    lost = ChatTokenizer.load(path, CASES["smolvlm2"][0], chat_template=silent)
    rejected = lost.encode_batch([[Turn("user", "a <image>")]], [["<image>"]])[0]
    assert isinstance(rejected, TextRejected)
    assert rejected.detail == "the chat template makes 0 <image> for 1 files"
    with pytest.raises(ConfigError, match="placeholder"):
        MediaMarkup(token="<image>", parts=(("tile", "<image>"),))
    with pytest.raises(ConfigError, match="more than once"):
        MediaMarkup(token="<i>", placeholder="<i>", parts=(("tile", "<i><i>"),))
