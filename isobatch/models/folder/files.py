"""Files of a tokenizer or a model: from a folder, or from the Hugging Face Hub.

The edge of `models.folder`, which is pure otherwise; `counting.text.tokenizer_files` reads
through it too. Downloads are huggingface_hub's (an extra): cached, and read from the cache offline.
"""

import logging
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from os.path import isdir, isfile
from pathlib import Path
from typing import Any, Self

from isobatch.common.config import config_root
from isobatch.common.errors import ConfigError, first_line, os_reason
from isobatch.common.plain_values import parse_json, read_text
from isobatch.common.visible_text import shown
from isobatch.models.folder.json_table import Json, JsonTable

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""OWNER/NAME; a tokenizer's may be a single word."""

ANSWER_S = 10.0
"""Longest wait for the Hub's first answer."""

CONFIG_NAME = "config.json"
PROCESSOR_NAME = "processor_config.json"
IMAGE_PROCESSOR_NAME = "preprocessor_config.json"
VIDEO_PROCESSOR_NAME = "video_preprocessor_config.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class FileSource:
    """A folder or a Hub repository, to read small text files from."""

    kind: str
    """What is looked for, for messages: `tokenizer` or `model`."""
    where: str
    """Folder or Hub id."""
    folder: Path | None
    """Folder of the files; None: they are on the Hub."""

    @classmethod
    def find(cls, source: str | Path, kind: str, *, hub_id: re.Pattern[str] = HUB_ID) -> Self:
        """The folder, that of a file, or a Hub repository. ConfigError for anything else."""
        path = Path(source).expanduser()
        folder = path.parent if isfile(path) else path
        if isdir(folder):
            return cls(kind, str(folder), folder)
        if isinstance(source, str) and hub_id.fullmatch(source) and not _is_number(source):
            return cls(kind, source, None)
        name = source if str(source).isprintable() and len(str(source)) < 1000 else shown(source)
        raise ConfigError(f"{kind} {name}: no such folder or file, nor a Hub id (OWNER/NAME)")

    def read(self, name: str, *, required: bool = False) -> str | None:
        """A file's text, or None if there is no such file; ConfigError if it cannot be read.

        `required`: the file that must be there, so that a Hub out of reach is an error.
        """
        if self.folder is None:
            return self._read_hub(name, required=required)
        try:
            return read_text(self.folder / name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"{self.folder / name}: cannot be read: {os_reason(error)}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.folder / name}: cannot be read: {error}") from None

    def read_object(self, name: str, *, required: bool = False) -> Json:
        """A file's JSON object; empty if there is no such file."""
        return parse_object(self.read(name, required=required), f"{self.where}/{name}")

    def _read_hub(self, name: str, *, required: bool) -> str | None:
        missing = f"{self.kind} {self.where}: no such folder here"
        try:
            from huggingface_hub import errors, hf_hub_download  # noqa: PLC0415  (an extra)
        except ImportError:
            hint = "to fetch it from the Hub: pip install huggingface_hub datasets"
            raise ConfigError(f"{missing}; {hint}") from None
        try:
            with quiet_hub():
                is_offline = not _hub_answers()
                file = hf_hub_download(self.where, name, local_files_only=is_offline)
                return Path(file).read_text("utf-8")
        except errors.LocalEntryNotFoundError:  # neither in the cache, nor could the Hub be asked
            if not required:
                return None
            problem = "the Hub cannot be reached and its cache here has no copy"
        except errors.EntryNotFoundError:
            return None
        except (OSError, ValueError) as error:  # all of the Hub's errors are one of the two
            problem = first_line(error)
        raise ConfigError(f"{missing}, and not from the Hub: {problem}; give a local folder")


def _is_number(text: str) -> bool:
    """Whether a text is a number: a mistake, for which nobody should wait for the Hub."""
    try:
        float(text)
    except ValueError:
        return False
    return True


@cache
def _hub_answers() -> bool:
    """Whether the Hub can be reached, asked once: its client tries five times for every file."""
    from huggingface_hub import constants, get_session  # noqa: PLC0415  (an extra)

    try:
        get_session().head(constants.ENDPOINT, timeout=ANSWER_S)
    except Exception:  # offline mode, and whatever the network's libraries raise
        return False
    return True


@contextmanager
def quiet_hub() -> Iterator[None]:
    """No lines of the Hub's client about what it tries again: the error says what is wrong."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def parse_object(text: str | None, where: str) -> Json:
    """A JSON object; empty for no text. ConfigError for anything else."""
    values = parse_json(text or "{}", where)
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: contains a {type(values).__name__}, not a JSON object")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What `save_pretrained` of a model and its processor wrote, as plain JSON."""

    where: str
    """Folder or Hub id, for messages."""
    config: Json
    processor: Json = field(default_factory=dict)
    """Content of `processor_config.json`, with its parts' settings if transformers 5 wrote it."""
    image_processor: Json = field(default_factory=dict)
    """Content of `preprocessor_config.json`, of older versions."""
    video_processor: Json = field(default_factory=dict)
    """Content of `video_preprocessor_config.json`, of older versions."""
    tokenizer: Json = field(default_factory=dict)
    """Content of `tokenizer_config.json`."""

    @property
    def model_type(self) -> str:
        """The family's name in transformers."""
        return str(self.config.get("model_type", ""))

    def config_table(self) -> JsonTable:
        """The model's config, with the values that transformers assumes for its family."""
        where = f"{self.where}/{CONFIG_NAME}"
        return JsonTable(self.config, where, config_defaults(self.model_type))

    def processor_table(self) -> JsonTable:
        """The processor's own settings, without those of its parts."""
        parts = ("image_processor", "video_processor", "feature_extractor", "audio_processor")
        values = {key: value for key, value in self.processor.items() if key not in parts}
        return JsonTable(values, f"{self.where}/{PROCESSOR_NAME}")

    def image_table(self, *classes: str) -> JsonTable:
        """The image processor's settings; `classes`: those that the family may use.

        ConfigError if there are none, or if they are of another class. The first class is assumed
        where the file names none.
        """
        values, name = self.image_processor, IMAGE_PROCESSOR_NAME
        nested = self.processor.get("image_processor")
        if isinstance(nested, dict):  # transformers 5, which prefers it too
            values, name = nested, f"{PROCESSOR_NAME}, image_processor"
        if not values:
            raise ConfigError(
                f"model {self.where}: has neither {IMAGE_PROCESSOR_NAME} nor image_processor in"
                f" {PROCESSOR_NAME}; save both with transformers' AutoProcessor"
                ".from_pretrained(...).save_pretrained(FOLDER)"
            )
        table = JsonTable(values, f"{self.where}/{name}")
        kind = _plain_class(table.value("image_processor_type"), table)
        if kind is not None and kind not in classes:
            raise ConfigError(
                f"{table.where}: image processor {kind} is not supported for {self.model_type}; "
                f"known: {', '.join(classes)}"
            )
        defaults = _defaults()["image_processor"][kind or classes[0]]
        return JsonTable(values, table.where, defaults)

    @property
    def has_video_settings(self) -> bool:
        """Whether videos have settings of their own; else those of images are theirs."""
        return bool(self.video_processor or self.processor.get("video_processor"))

    def video_table(self, kind: str) -> JsonTable | None:
        """The video processor's settings, found as transformers does; None if not of this class."""
        values, name = self.image_processor, IMAGE_PROCESSOR_NAME
        if self.video_processor:
            values, name = self.video_processor, VIDEO_PROCESSOR_NAME
        nested = self.processor.get("video_processor")
        if isinstance(nested, dict):
            values, name = nested, f"{PROCESSOR_NAME}, video_processor"
        defaults = _defaults()["video_processor"].get(kind)
        if defaults is None or values.get("video_processor_type", kind) != kind:
            return None
        return JsonTable(values, f"{self.where}/{name}", defaults)

    def audio_table(self, kind: str) -> JsonTable:
        """The settings of the audio's feature extractor, of class `kind`; ConfigError if none.

        In old files they are next to the image processor's.
        """
        defaults = _defaults()["feature_extractor"][kind]
        values, where = self.processor.get("feature_extractor"), PROCESSOR_NAME
        if not isinstance(values, dict):
            known, where = (*defaults, "feature_extractor_type"), IMAGE_PROCESSOR_NAME
            values = {key: value for key, value in self.image_processor.items() if key in known}
        table = JsonTable(values, f"{self.where}/{where}", defaults)
        if table.value("feature_extractor_type") != kind:
            raise table.wrong("feature_extractor_type", f"only '{kind}' is supported")
        return table

    def named_token(self, key: str, otherwise: str = "") -> str:
        """A token that the tokenizer names (`image_token`), or the processor's own default.

        ConfigError if the processor has none either.
        """
        extra = self.tokenizer.get("extra_special_tokens")
        value = self.tokenizer.get(key) or (extra.get(key) if isinstance(extra, dict) else None)
        if isinstance(value, Mapping):
            value = value.get("content")
        token = value if isinstance(value, str) and value else otherwise
        if not token:
            where = f"{self.where}/{TOKENIZER_CONFIG_NAME}"
            raise ConfigError(f"{where}: names no {key}, which {self.model_type}'s processor needs")
        return token


def read_model_files(source: str | Path) -> ModelFiles:
    """Read a model's folder or Hub repository. ConfigError if it has no `config.json`."""
    files = FileSource.find(source, "model")
    config = files.read_object(CONFIG_NAME, required=True)
    if not config:
        raise ConfigError(
            f"model {files.where}: no {CONFIG_NAME}; give a folder as transformers' "
            "save_pretrained(FOLDER) of model and processor write it"
        )
    return ModelFiles(
        where=files.where,
        config=config,
        processor=files.read_object(PROCESSOR_NAME),
        image_processor=files.read_object(IMAGE_PROCESSOR_NAME),
        video_processor=files.read_object(VIDEO_PROCESSOR_NAME),
        tokenizer=files.read_object(TOKENIZER_CONFIG_NAME),
    )


def config_defaults(model_type: str) -> Json:
    """What transformers assumes where a `config.json` of this type, or a part, says nothing."""
    defaults: Json = _defaults()["config"].get(model_type, {})
    return defaults


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    path = config_root() / "transformers_defaults.toml"
    return tomllib.loads(path.read_text("utf-8"))


def _plain_class(name: Any, table: JsonTable) -> str | None:
    """An image processor's class without its backend; CLIPFeatureExtractor is CLIP's old name."""
    if name is None:
        old = table.value("feature_extractor_type")
        name = old.replace("FeatureExtractor", "ImageProcessor") if isinstance(old, str) else None
    if not isinstance(name, str):
        return None
    return name.removesuffix("Pil").removesuffix("Fast")
