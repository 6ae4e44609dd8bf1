"""A processor of transformers: an image's text and tokens, and its pixels.

For the rule `processor`. This is the one module that calls transformers, an extra, and it is
imported only where a build uses that rule. A processor is described by one string
(`describe_processor`), without paths and without its tokenizer, so that any process of the packer
and the loader makes the same one (`open_processor`). What is described is tried before it is used:
`describe_processor` compares ids and pixels with those that the processor itself gives.
"""

import ast
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from PIL import Image

from isobatch.common.errors import ConfigError, DataError, first_line

Values = dict[str, Any]

MISSING = "pip install transformers accelerate"
"""What to do where transformers is not there."""
_PROBES = ((97, 64), (640, 480), (333, 1250), (1600, 700))
"""Width and height of the images that a processor is tried on."""
_QUICK = {"do_rescale": False, "do_normalize": False, "resample": 0}
"""Pixels of no use, resized to the nearest one, in less time."""
_TEXT_OUTPUTS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
_BASIC = (bool, int, float, str)
_FAILURES = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError)
"""What processors raise for what they do not expect."""


class ImageRun(NamedTuple):
    """A run of image tokens in what a processor writes for an image."""

    text: str
    """Text with one token for the run: from the run before, and to the end if it is the last."""
    tokens: int


@dataclass(frozen=True)
class ImageProcessor:
    """A processor's part for images, made of its description."""

    processor: Any
    """The processor without its tokenizer."""
    token: str
    """Token that vision features take the place of."""
    token_id: int
    arguments: Values
    """Arguments of the image processor, as the processor calls it."""
    output_names: tuple[str, ...]
    """Outputs that the model takes."""
    counts_runs: bool
    """Whether an image is one run of as many tokens as the processor counts of its size."""
    blank_arguments: Values
    """Further ones for a blank image, of which only the text is wanted."""

    def runs_of(self, width: int, height: int) -> list[ImageRun]:
        """Text of an image of this size. ValueError where the processor refuses it."""
        if self.counts_runs:
            (tokens,) = self.processor._get_num_multimodal_tokens(
                image_sizes=[(height, width)]
            ).num_image_tokens
            return [ImageRun(self.token, int(tokens))]
        outputs = self.process([Image.new("RGB", (width, height))], **self.blank_arguments)
        return split_runs(self.texts(outputs, 1)[0], self.token)

    def process(self, images: Sequence[Image.Image], **more: Any) -> Values:
        """Everything that the image processor gives, as tensors of torch."""
        arguments = {**self.arguments, **more, "return_tensors": "pt"}
        return dict(self.processor.image_processor(list(images), **arguments))

    def texts(self, outputs: Values, number: int) -> list[str]:
        """Text of each of the images that `outputs` are of."""
        write = self.processor.replace_image_token
        return [write(outputs, image_idx=place, **self.arguments) for place in range(number)]

    def pixels(self, images: Sequence[Image.Image], num_tokens: int | None) -> Values:
        """Outputs for the model, of images with so many image tokens together; None: not known.

        DataError if the processor makes other numbers of tokens of them.
        """
        outputs = self.process(images)
        count = sum(text.count(self.token) for text in self.texts(outputs, len(images)))
        if num_tokens not in (None, count):
            raise DataError(
                f"{type(self.processor).__name__} makes {count} image tokens of images that were"
                f" counted as {num_tokens}; build again with this version of transformers"
            )
        return {name: outputs[name] for name in self.output_names}

    @cached_property
    def blank(self) -> tuple[Values, int]:
        """Outputs for a small blank image, and its image tokens."""
        outputs = self.process([Image.new("RGB", _PROBES[0])])
        (text,) = self.texts(outputs, 1)
        return {name: outputs[name] for name in self.output_names}, text.count(self.token)


def split_runs(text: str, token: str) -> list[ImageRun]:
    """The runs of the token in a processor's text. ValueError if there is none.

    >>> [tuple(run) for run in split_runs("<a>xx<b>x<c>", "x")]
    [('<a>x', 2), ('<b>x<c>', 1)]
    """
    matches = list(re.finditer(f"(?:{re.escape(token)})+", text))
    if not matches:
        raise ValueError("it has no image token")
    starts = [0, *(match.end() for match in matches[:-1])]
    runs = [
        ImageRun(text[start : match.start()] + token, len(match[0]) // len(token))
        for start, match in zip(starts, matches, strict=True)
    ]
    end = text[matches[-1].end() :]
    return [*runs[:-1], ImageRun(runs[-1].text + end, runs[-1].tokens)]


@lru_cache(maxsize=8)
def open_processor(description: str) -> ImageProcessor:
    """The processor of a description. ConfigError where it cannot be made here."""
    values: Values = ast.literal_eval(description)
    kind = _class_named(values["processor"])
    processor = object.__new__(kind)
    processor.__dict__ |= values["attributes"]
    processor.tokenizer = SimpleNamespace(**values["tokens"], init_kwargs={})
    with _quiet():
        processor.image_processor = _image_processor(values["image_processor"], values["settings"])
    return ImageProcessor(
        processor=processor,
        token=values["token"],
        token_id=values["token_id"],
        arguments=values["arguments"],
        output_names=tuple(values["kept"]),
        counts_runs=values["counts_runs"],
        blank_arguments=values["blank_arguments"],
    )


def _image_processor(name: str, settings: Values) -> Any:
    """The class that transformers chooses: with torchvision if that is here, else with Pillow."""
    failed = ""
    for class_name in (name, f"{name}Pil"):
        try:
            return _class_named(class_name).from_dict(dict(settings))
        except (ImportError, ConfigError) as error:
            failed = failed or first_line(error)
    raise ConfigError(f"{name} needs torchvision: pip install torchvision ({failed})")


def _class_named(name: str) -> Any:
    try:
        import transformers  # noqa: PLC0415  (an extra)
        from transformers.models.auto.image_processing_auto import (  # noqa: PLC0415
            get_image_processor_class_from_name,
        )
    except ImportError:
        raise ConfigError(f"{name} is a processor of transformers: {MISSING}") from None
    kind = get_image_processor_class_from_name(name) or getattr(transformers, name, None)
    if kind is None:
        raise ConfigError(f"transformers {transformers.__version__} has no {name}")
    return kind


# --- describing ---


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedProcessor:
    """A model's processor, as far as packing and loading need it."""

    name: str
    """Class in transformers."""
    description: str
    token: str
    """Token that vision features take the place of."""
    placeholder: str
    """What the chat template writes for an image."""
    context_len: int
    """Positions of the language model."""
    values_per_token: int
    """Numbers of its outputs for each image token, about."""


@contextmanager
def _quiet() -> Iterator[None]:
    """No notes of transformers meanwhile, such as which of its classes it falls back to."""
    with suppress(ImportError):  # what is missing is said where it is used
        import transformers  # noqa: F401, PLC0415  (it sets the level when it is imported)
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@_quiet()
def describe_processor(source: str, family: str) -> DescribedProcessor:
    """Describe the processor of a model's folder or Hub id, and try what is described.

    `family`: its `model_type`.
    ConfigError, with the reason, for one that does more than to put a text in place of each image's
    placeholder, and for models whose images are not in the sequence.
    """
    _check_family(family)
    config, full = _load(source)
    name = type(full).__name__
    _check_model(config, full)
    placeholder = full.image_token
    token = _image_token(config, full)
    try:
        values = _description(full, token)
        unknown = {"kept": (), "counts_runs": False, "blank_arguments": {}}
        described = open_processor(repr(values | unknown))
        images = _blank_images()
        message = _probe_text(full, placeholder, len(images))
        outputs = described.process(images)
        full_outputs = full(images=images, text=[message], return_tensors="pt")
        values["kept"], size = _try_pixels(described, full_outputs, outputs)
        texts = _try_texts(described, outputs)
        _try_message(full, full_outputs, message.split(placeholder), texts)
        values["counts_runs"] = _counts_runs(described)
        values["blank_arguments"] = _QUICK if _is_quick(described, texts) else {}
    except _FAILURES as error:
        raise ConfigError(f"{name} cannot be used for packing: {first_line(error)}") from None
    return DescribedProcessor(
        name=name,
        description=repr(values),
        token=token,
        placeholder=placeholder,
        context_len=config.get_text_config().max_position_embeddings,
        values_per_token=size,
    )


def _check_family(family: str) -> None:
    """ConfigError unless transformers has models of this type, for images and text."""
    try:
        from transformers import __version__  # noqa: PLC0415  (an extra)
        from transformers.models.auto import modeling_auto  # noqa: PLC0415
    except ImportError:
        raise ConfigError(f"transformers has its processor: {MISSING}") from None
    if family not in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        what = "no model of it that writes text about images"
        raise ConfigError(f"transformers {__version__} has {what}")


def _check_model(config: Any, full: Any) -> None:
    """ConfigError for a model or a processor that this cannot be for."""
    from transformers import ProcessorMixin  # noqa: PLC0415  (an extra)

    name = type(full).__name__
    if config.is_encoder_decoder:
        raise ConfigError("an encoder and a decoder have two sequences, which are not packed")
    if not isinstance(getattr(config.get_text_config(), "max_position_embeddings", None), int):
        raise ConfigError("its config says no max_position_embeddings")
    for method in ("replace_image_token", "_get_num_multimodal_tokens"):
        function = getattr(type(full), method, None)
        if function is None or function is getattr(ProcessorMixin, method, None):
            raise ConfigError(f"{name} has no {method}, which says what an image becomes")
    if not isinstance(getattr(full, "image_token", None), str):
        raise ConfigError(f"{name} names no image_token")


def _image_token(config: Any, full: Any) -> str:
    """The token that features take the place of, as the model and the processor both say."""
    names = "image_token_id", "image_token_index"
    numbers = [getattr(config, name, None) for name in names] + [getattr(full, names[0], None)]
    ids = {number for number in numbers if isinstance(number, int)}
    token = full.tokenizer.convert_ids_to_tokens(ids.pop()) if len(ids) == 1 else None
    if not isinstance(token, str):
        several = f"ids {sorted(ids)}" if ids else "no id of the tokenizer"
        raise ConfigError(
            f"its config and processor give {several} for the image token; repair them"
        )
    return token


def _load(source: str) -> tuple[Any, Any]:
    """Config and processor of a folder or Hub id."""
    import transformers  # noqa: PLC0415  (an extra)

    models: Any = transformers
    try:
        config = models.AutoConfig.from_pretrained(source, trust_remote_code=False)
        full = models.AutoProcessor.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # of any kind, for the files are someone else's
        if "torchvision" in str(error):
            raise ConfigError("its processor needs torchvision: pip install torchvision") from None
        raise ConfigError(f"its processor cannot be loaded: {first_line(error)}") from None
    if not isinstance(full, transformers.ProcessorMixin):
        raise ConfigError("it has no processor for text and images")
    return config, full


def _description(full: Any, token: str) -> Values:
    """Everything but what is found by trying: plain values only."""
    merged = full._merge_kwargs(tokenizer_init_kwargs=full.tokenizer.init_kwargs)
    arguments = {
        key: value
        for key, value in merged["images_kwargs"].items()
        if key != "return_tensors" and value is not None
    }
    if not _is_plain(arguments):
        raise ValueError("its arguments for images are no plain values")
    settings = _plain(full.image_processor.to_dict())
    named = {
        key: value
        for key, value in full.tokenizer.special_tokens_map.items()
        if isinstance(value, str)
    }
    ids = {f"{key}_id": full.tokenizer.convert_tokens_to_ids(value) for key, value in named.items()}
    return {
        "processor": type(full).__name__,
        "attributes": _plain(vars(full), without=("chat_template",)),
        "tokens": dict(sorted((named | ids).items())),
        "image_processor": type(full.image_processor).__name__.removesuffix("Pil"),
        "settings": settings,
        "arguments": dict(sorted(arguments.items())),
        "token": token,
        "token_id": full.tokenizer.convert_tokens_to_ids(token),
    }


def _plain(values: Values, without: Sequence[str] = ()) -> Values:
    """The plain values, sorted by their names."""
    return {
        key: _without_enums(value)
        for key, value in sorted(values.items())
        if key not in without and _is_plain(_without_enums(value))
    }


def _without_enums(value: Any) -> Any:
    """Numbers that have a name, such as Pillow's filters, as numbers."""
    return int(value) if isinstance(value, int) and type(value) not in _BASIC else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or type(value) in _BASIC


def _probe_text(full: Any, placeholder: str, num_images: int) -> str:
    """A text with so many images, as the chat template writes it if it can."""
    content: list[dict[str, str]] = [{"type": "text", "text": "first"}]
    for number in range(num_images):
        content += [{"type": "image"}, {"type": "text", "text": f"\nnext {number} "}]
    messages = [{"role": "user", "content": content}]
    try:
        text: str = full.apply_chat_template(messages, tokenize=False)
    except Exception:  # of any kind: a template is someone else's program
        text = ""
    if text.count(placeholder) == num_images:
        return text
    return "".join(part.get("text", placeholder) for part in content)


def _blank_images() -> list[Image.Image]:
    return [Image.new("RGB", size, (90, 120, 150)) for size in _PROBES]


def _try_pixels(
    described: ImageProcessor, full_outputs: Any, outputs: Any
) -> tuple[tuple[str, ...], int]:
    """Names of the outputs that the model takes, and numbers per token.

    ValueError if the processor itself has other outputs (`full_outputs`) than what is described.
    """
    expected = {key: value for key, value in full_outputs.items() if key not in _TEXT_OUTPUTS}
    for key, value in expected.items():
        actual = outputs.get(key)
        if not hasattr(value, "shape"):
            raise ValueError(f"its output {key} is no tensor for images of several sizes")
        if actual is None or actual.shape != value.shape or not bool((actual == value).all()):
            raise ValueError(f"it makes {key} of more than its image processor's outputs")
    tokens = sum(text.count(described.token) for text in described.texts(outputs, len(_PROBES)))
    numbers = sum(int(value.numel()) for value in expected.values())
    return tuple(sorted(expected)), numbers // max(1, tokens)


def _try_texts(described: ImageProcessor, outputs: Any) -> list[str]:
    """Texts of the probes. ValueError unless each depends on nothing but the image's size."""
    texts = described.texts(outputs, len(_PROBES))
    alone = [described.texts(described.process([image]), 1)[0] for image in _blank_images()]
    if texts != alone:
        raise ValueError("an image's tokens depend on the others of its sample")
    return texts


def _try_message(full: Any, full_outputs: Any, pieces: list[str], texts: Sequence[str]) -> None:
    """ValueError if the processor has other ids than those of these texts between the pieces."""
    written = "".join(a + b for a, b in zip(pieces, [*texts, ""], strict=True))
    if full.tokenizer(written)["input_ids"] != full_outputs["input_ids"].tolist()[0]:
        raise ValueError("it changes more of the text than the images' placeholders")


def _is_quick(described: ImageProcessor, texts: Sequence[str]) -> bool:
    """Whether the texts of the probes are the same without values of pixels."""
    try:
        quick_outputs = [described.process([image], **_QUICK) for image in _blank_images()]
        return [described.texts(outputs, 1)[0] for outputs in quick_outputs] == texts
    except _FAILURES:
        return False


def _counts_runs(described: ImageProcessor) -> bool:
    """Whether the quick count of an image's size is all that there is to its text."""
    for size in _PROBES:
        runs = described.runs_of(*size)
        if [run.text for run in runs] != [described.token]:
            return False
        sizes = [(size[1], size[0])]
        try:
            counted = described.processor._get_num_multimodal_tokens(image_sizes=sizes)
        except _FAILURES:
            return False  # of more of the processor than is described
        if [int(counted.num_image_tokens[0])] != [run.tokens for run in runs]:
            return False
    return True
