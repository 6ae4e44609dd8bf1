"""Presets of models and datasets, and the TOML configs of commands, as frozen dataclasses
(clusters: see `engine`).

The one module of `balance` that reads files. An unknown key is an error that lists the known ones,
so that a typing mistake never silently becomes a default.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import MISSING, asdict, astuple, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from balance.errors import ConfigError
from balance.media.audio_tokens import AudioRule
from balance.shapes import AudioEncoderShape, LlmShape, TransformerShape, VitShape

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelRule:
    """How pixels become a tensor, the same for every vision rule; every number of a rule is
    positive.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        numbers = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if isinstance(getattr(self, f.name), int | float)
        }
        wrong = [
            f"{name} = {value}"
            for name, value in numbers.items()
            if value <= 0 and value is not False
        ]
        if wrong or min(self.std) <= 0:
            raise ConfigError(
                f"{', '.join(wrong) or f'std = {list(self.std)}'}: must be greater than 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRule(PixelRule):
    """LLaVA-1.5: the shorter edge to `image_size`, centre crop, one patch per image."""

    image_size: int
    vit_tokens_per_patch: int
    llm_tokens_per_patch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesRule(PixelRule):
    """InternVL: the grid of `image_size` tiles closest in aspect ratio, plus a thumbnail when there
    is more than one.
    """

    image_size: int
    vit_tokens_per_patch: int
    llm_tokens_per_patch: int
    min_patches: int = 1
    max_patches: int
    thumbnail: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyresRule(PixelRule):
    """LLaVA-NeXT: the best of `grid_pinpoints`, cut into tiles, plus the whole image; padding
    removed after the ViT.
    """

    image_size: int
    vit_patch_size: int
    vit_tokens_per_patch: int
    grid_pinpoints: tuple[tuple[int, int], ...]
    """(height, width) in pixels, as the reference lists them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRule(PixelRule):
    """Qwen2-VL: native resolution in `vit_patch_size` squares, merged `merge_size` x `merge_size`
    for the LLM.
    """

    vit_patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    max_aspect_ratio: float


VisionRule = FixedRule | TilesRule | AnyresRule | NativeRule

VISION_RULES: dict[str, type[FixedRule | TilesRule | AnyresRule | NativeRule]] = {
    "fixed": FixedRule,
    "tiles": TilesRule,
    "anyres": AnyresRule,
    "native": NativeRule,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaMarkup:
    """What an image or a clip becomes in the text: `prefix`, as many `token` as it has LLM tokens,
    `suffix`.

    Tokens that the tokenizer does not know are added behind its vocabulary, in the order prefix,
    suffix, token; an image's before an audio clip's.
    """

    token: str
    prefix: str = ""
    suffix: str = ""

    @property
    def text(self) -> str:
        """The markup with one token, as it is tokenised before tokens are repeated."""
        return self.prefix + self.token + self.suffix


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMarkup(MediaMarkup):
    """What an image becomes in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioMarkup(MediaMarkup):
    """What an audio clip becomes in the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """Everything about a model that decides what a sample costs."""

    name: str
    description: str
    context_len: int
    """LLM positions at most; the longest group that `choose_limits` may propose."""
    image_markup: ImageMarkup
    vision: VisionRule
    vit: VitShape | None = None
    """Dimensions for `balance.cost`; a preset without them counts and groups, but predicts no
    time.
    """
    llm: LlmShape | None = None
    audio: AudioRule | None = None
    """None for a model that hears nothing; then it has no `audio_markup` either."""
    audio_markup: AudioMarkup | None = None
    audio_encoder: AudioEncoderShape | None = None

    def __post_init__(self) -> None:
        if (self.audio is None) != (self.audio_markup is None):
            given, missing = (
                ("audio_markup", "audio") if self.audio is None else ("audio", "audio_markup")
            )
            raise ConfigError(
                f"has [{given}] but no [{missing}]; give both for a model with audio, else neither"
            )
        strings = Counter(
            astuple(self.image_markup) + (astuple(self.audio_markup) if self.audio_markup else ())
        )
        for markup in (self.image_markup, self.audio_markup):
            if markup is not None and strings[markup.token] > 1:
                raise ConfigError(
                    f"the token {markup.token!r} has a second place in the markup; give each its own"
                )

    @property
    def has_dimensions(self) -> bool:
        """Whether `balance.cost.CostModel.of` can predict times for this model."""
        return self.vit is not None and self.llm is not None

    @property
    def vision_unit(self) -> str:
        """What the vision cap counts: tokens of the vision encoder for native resolution, else
        patches.
        """
        return "vit_tokens" if isinstance(self.vision, NativeRule) else "image_patches"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetPreset:
    """A dataset known by name: where its annotations and images lie under the data root."""

    name: str
    description: str
    annotations: str
    """Path of the annotation file under the data root."""
    image_folders: tuple[str, ...] = ()
    """Folders that must be there before a build starts; image paths in the annotations begin with
    them.
    """
    hub_repo: str = ""
    """Hugging Face dataset repository that holds the annotation file, empty if there is none."""
    hub_file: str = ""
    downloads: dict[str, str] = field(default_factory=dict)
    """Image folder -> where to get it, for the message that says what is missing."""


_OPTIONAL_TABLES: dict[str, type[TransformerShape] | type[AudioRule] | type[AudioMarkup]] = {
    "vit": VitShape,
    "llm": LlmShape,
    "audio": AudioRule,
    "audio_markup": AudioMarkup,
    "audio_encoder": AudioEncoderShape,
}


def config_root() -> Path:
    """Folder of the shipped presets: inside the wheel, or beside the packages in a checkout."""
    installed = Path(__file__).parent / "configs"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "configs"


def preset_names(kind: str) -> list[str]:
    """Names of the shipped presets of a kind (`models`, `datasets`, `clusters`), sorted."""
    return sorted(path.stem for path in (config_root() / kind).glob("*.toml"))


def load_model(name: str) -> ModelPreset:
    """Model preset by name, or from a TOML file of the user's (anything that ends in `.toml`)."""
    return model_from_dict(read_preset("models", name))


def load_dataset(name: str) -> DatasetPreset:
    """Dataset preset by name, or from a TOML file of the user's."""
    return build_config(
        DatasetPreset, read_preset("datasets", name), where=f"dataset preset {name}"
    )


def model_from_dict(values: dict[str, Any]) -> ModelPreset:
    """Model preset from plain values, as a TOML file or a manifest holds them; checks every key."""
    where = f"model preset {values.get('name', '?')}"
    values = dict(values)
    vision = dict(values.pop("vision", {}))
    rule = vision.pop("rule", None)
    if rule not in VISION_RULES:
        raise ConfigError(f"{where}: vision.rule is {rule!r}; use one of {', '.join(VISION_RULES)}")
    markup = build_config(
        ImageMarkup, values.pop("image_markup", {}), where=f"{where}, [image_markup]"
    )
    parts: dict[str, Any] = {
        "image_markup": markup,
        "vision": build_config(VISION_RULES[rule], vision, where=f"{where}, [vision]"),
    }
    for name, kind in _OPTIONAL_TABLES.items():
        if values.get(name) is not None:
            parts[name] = build_config(kind, values[name], where=f"{where}, [{name}]")
    return build_config(ModelPreset, values | parts, where=where)


def model_to_dict(preset: ModelPreset) -> dict[str, Any]:
    """The inverse of `model_from_dict`: plain values for a manifest; what a model without audio
    lacks is left out.
    """
    values = {
        name: value
        for name, value in asdict(preset).items()
        if value is not None or name in ("vit", "llm")
    }
    rule = next(name for name, kind in VISION_RULES.items() if isinstance(preset.vision, kind))
    return {**values, "vision": {"rule": rule, **values["vision"]}}


def build_config(kind: type[Config], values: dict[str, Any], *, where: str) -> Config:
    """A config dataclass from plain values; lists become tuples.

    Unknown keys, missing keys and values of the wrong type are errors that name `where`.
    """
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(
            f"{where}: unknown key {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    missing = [
        name
        for name, f in known.items()
        if name not in values and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"{where}: missing key {', '.join(missing)}")
    frozen = {name: _frozen(value) for name, value in values.items()}
    hints = get_type_hints(kind)
    for name, value in frozen.items():
        if not _fits(value, hints[name]):
            raise ConfigError(f"{where}: {name} is {value!r}, but should be {known[name].type}")
    try:
        return kind(**frozen)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def load_config(
    kind: type[Config], file: Path | None, options: dict[str, Any], *, command: str
) -> Config:
    """A command's config: `options` that are not None over the keys of the TOML `file`."""
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text("utf-8"))
        except OSError as error:
            raise ConfigError(f"--config {file}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"--config {file}: not valid TOML: {error}") from None
    values |= {name: value for name, value in options.items() if value is not None}
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return build_config(kind, values, where=str(file) if set(values) - known else command)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of the type that a config field declares; an int is a float, a bool
    is neither.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple and isinstance(value, tuple):
        options = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return len(value) == len(options) and all(map(_fits, value, options))
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return hint is Any or isinstance(value, origin or hint)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def read_preset(kind: str, name: str, extended_by: tuple[str, ...] = ()) -> dict[str, Any]:
    """The TOML of a preset of a kind, by name or from a file of the user's (anything that ends in
    `.toml`).

    What it `extends` is filled in underneath, one table deep; `extended_by` are the presets that
    led here.
    """
    if name in extended_by:
        raise ConfigError(
            f"presets extend each other in a circle: {' -> '.join((*extended_by, name))}"
        )
    path = Path(name) if name.endswith(".toml") else config_root() / kind / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(
            f"no {kind[:-1]} preset {name!r}; shipped: {', '.join(preset_names(kind))}; or give a .toml file of yours"
        )
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    values.setdefault("name", path.stem)
    base_name = values.pop("extends", None)
    return (
        values
        if base_name is None
        else _overlay(read_preset(kind, base_name, (*extended_by, name)), values)
    )


def _overlay(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in values.items():
        merged[key] = (
            {**base[key], **value}
            if isinstance(value, dict) and isinstance(base.get(key), dict)
            else value
        )
    return merged
