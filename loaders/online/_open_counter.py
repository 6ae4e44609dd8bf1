"""`open_counter`: a model, a processor or a function says what samples cost."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from isobatch.common.errors import ConfigError, first_line
from isobatch.counting.columns import named_columns
from isobatch.counting.record_counter import RecordCounter
from isobatch.counting.records.reading import READING_OPTIONS, Reading
from isobatch.loaders.config import LoaderConfig
from isobatch.loaders.online._encode_counter import EncodedCounter
from isobatch.loaders.online._packer import (
    RecordTable,
    column_texts,
    demo_tokenizer,
    places_of,
    text_tokenizer,
)
from isobatch.loaders.online.config import PackingConfig
from isobatch.loaders.online.records import Records
from isobatch.models.folder.files import CONFIG_NAME, FileSource
from isobatch.models.folder.find_model import find_model, is_folder
from isobatch.models.image_rules.base import ImagePlan, ImageRejected, NativeSizeRule
from isobatch.models.presets import MediaMarkup, ModelPreset
from isobatch.shards.stored_group import EMPTY_GROUP

IDENTITY_RECORDS = 8
"""Records that are counted when a loader opens, to tell its dataset from others."""
_OF_IMAGES = ("images", "image_transform", "pixel_dtype", "exact_resize", "reduced_decode")
"""Options that the decoding of images has."""
_NO_LENGTH = 1 << 30
"""`model_max_length` from which on a tokenizer of transformers says none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoImages(NativeSizeRule):
    """Of text alone, and of models that are not known, whose media cost what `encode=` says."""

    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    vit_patch_size: int = 16

    def plan(self, width: int, height: int) -> ImagePlan:
        """None: ImageRejected."""
        raise ImageRejected("no_vision_encoder", "no model= says what an image is")


def open_counter(
    options: PackingConfig, config: LoaderConfig, places: RecordTable | None
) -> RecordCounter:
    """The counter of `model=`, `processor=` or `encode=`. ConfigError unless options fit."""
    _check(options, config)
    root = options.data_root
    if places is None and root is not None and not Path(root).is_dir():
        raise ConfigError(
            f"data_root is {root}, which is no folder here; files of records in "
            "memory begin at one, or have absolute paths"
        )
    kind: Any = RecordCounter
    if options.encode is not None:
        kind = partial(EncodedCounter, encode=options.encode, cache_key=options.cache_key)
    reading = Reading(
        **{name: getattr(options, name) for name in READING_OPTIONS}, seed=config.seed
    )
    names = ("chat_template", "template_date", "data_root", "keep_columns")
    kind = partial(
        kind,
        reading=reading,
        columns=column_texts(options.columns),
        # records of places have our names
        renaming=named_columns((options.columns or {}).items()) if places is None else None,
        places=None if places is None else places_of(places),
        **{name: getattr(options, name) for name in names},
    )
    if options.processor is not None:
        with _saved(options.processor, options.model) as folder:
            has_images = hasattr(options.processor, "tokenizer")
            name = folder if has_images else options.model
            model = _model_of_text(options) if name is None else find_model(name)
            counter: RecordCounter = kind(model, tokenizer=folder)
    elif options.model is not None:
        model = find_model(options.model)
        return cast("RecordCounter", kind(model, tokenizer=_tokenizer(options)))
    else:  # its text is that of stand-ins
        counter = kind(_model_of_text(options), tokenizer=text_tokenizer())
        counter.vocab_size, counter.image_token_id = 0, -1  # no id is negative
        counter.empty_group = replace(EMPTY_GROUP, arrays=())
    if isinstance(counter.model.vision, NoImages) and counter.vocab_size:
        counter.vocab_size -= len(counter.tokenizer.added_tokens)  # that of images, in no text
    return counter


def _tokenizer(options: PackingConfig) -> str:
    """Folder or Hub id of the tokenizer: by default the model's."""
    model = options.model or ""
    default = model if is_folder(model) else demo_tokenizer(model)
    if tokenizer := options.tokenizer or default:
        return tokenizer
    raise ConfigError(f"model is the preset {model}; give the tokenizer to train with too")


def _check(options: PackingConfig, config: LoaderConfig) -> None:
    """ConfigError if options lack something, or would be ignored."""
    has_encode, has_processor = options.encode is not None, options.processor is not None
    if not (has_encode or has_processor or options.model):
        raise ConfigError(
            "nothing says what a sample costs; give model=, processor= or encode=, or "
            "measure='own' where items have input_ids"
        )
    names = ["chat_template", "template_date", "columns"] if has_encode else ["cache_key"]
    names += ["tokenizer"] if has_processor else []
    is_alone = has_encode and not has_processor and options.model is None
    names += ["tokenizer", "data_root"] if is_alone else []
    wrong = [name for name in names if getattr(options, name) is not None]
    if has_encode:
        default = Reading()
        wrong += [
            name for name in READING_OPTIONS if getattr(options, name) != getattr(default, name)
        ]
    if is_alone:
        usual = LoaderConfig()
        wrong += [name for name in _OF_IMAGES if getattr(config, name) != getattr(usual, name)]
    if wrong:
        ways = [name for name in ("model", "processor", "encode") if getattr(options, name)]
        raise ConfigError(f"{', '.join(wrong)}: of no use with {'= and '.join(ways)}=; leave out")
    if has_encode and options.lengths_cache and not options.cache_key:
        raise ConfigError(
            "lengths_cache cannot know whether encode= gives the same samples; leave it out, or "
            "give cache_key=, a name that you change with the function"
        )


@contextmanager
def _saved(processor: Any, model: str | None) -> Iterator[str]:
    """A folder for a while, with all that a model's folder has; errors do not name it."""
    tokenizer = getattr(processor, "tokenizer", processor)
    if not hasattr(tokenizer, "model_max_length"):
        kind = type(processor).__name__
        raise ConfigError(f"processor is a {kind}; give a processor or tokenizer of transformers")
    with TemporaryDirectory(prefix="isobatch-") as folder:
        try:
            if tokenizer is not processor:
                config = _config_of(model, tokenizer.name_or_path)
                (Path(folder) / CONFIG_NAME).write_text(config, "utf-8")
            try:
                processor.save_pretrained(folder)
            except Exception as error:  # of someone else's class
                raise ConfigError(f"processor= cannot be saved: {first_line(error)}") from None
            yield folder
        except ConfigError as error:
            raise ConfigError(str(error).replace(folder, "processor=")) from None


def _config_of(model: str | None, loaded_from: str) -> str:
    """The `config.json` of the model that a processor is for."""
    if model is not None and not is_folder(model):
        raise ConfigError(
            f"model is the preset {model}, and processor= has settings of its own; leave out one, "
            "or give processor=processor.tokenizer"
        )
    source, why = model or loaded_from, ""
    try:
        text = FileSource.find(source, "model").read(CONFIG_NAME, required=True)
    except ConfigError as error:
        text, why = None, f" ({error})"
    if text is None:
        raise ConfigError(
            f"processor= needs its model's {CONFIG_NAME}, and there is none in {source!r}{why}; "
            "give model= too, a folder or Hub id that has one"
        )
    return text


def _model_of_text(options: PackingConfig) -> ModelPreset:
    """Of which nothing is known but its context length."""
    max_tokens = options.max_tokens or _NO_LENGTH
    length = min(max_tokens, getattr(options.processor, "model_max_length", max_tokens))
    if length >= _NO_LENGTH:
        raise ConfigError("nothing says the model's context length; give max_tokens=")
    return ModelPreset(
        name="text",
        description="text, or what encode= gives; without dimensions",
        context_len=length,
        image_markup=MediaMarkup(token="<|isobatch image|>"),
        vision=NoImages(),
    )


def identity_of(records: Records, counter: RecordCounter) -> str:
    """Of a dataset and how it is counted; other if records are others, or in another order.

    Told by what some are counted as: pixels may be random.
    """
    rows = np.unique(np.linspace(0, len(records) - 1, IDENTITY_RECORDS).astype(np.int64))
    counted = counter.count(rows, records.take(rows))
    values = [counted.counts.tolist(), counted.table.column("sample_id").to_pylist()]
    digest = hashlib.sha256(json.dumps(values).encode("utf-8", "surrogatepass"))
    return f"{len(records)} {counter.identity} {digest.hexdigest()[:16]}"
