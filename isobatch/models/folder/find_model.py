"""The model that `--model` names: a preset, a TOML file, a folder, or a Hub id.

A folder is read by the reader of its family, `model_type` in `config.json`; each gives the rule,
the markup and the dimensions that a preset would hold. Any other family goes through its processor
of transformers. Files are read in `models.folder.files`; the families' readers are pure.
"""

from collections.abc import Callable
from os.path import expanduser, isdir

from isobatch.common.config import preset_names
from isobatch.common.errors import ConfigError
from isobatch.models.folder.files import ModelFiles, read_model_files
from isobatch.models.folder.gemma import read_gemma3, read_gemma4, read_paligemma
from isobatch.models.folder.internvl import read_internvl
from isobatch.models.folder.llava import read_llava, read_llava_next, read_llava_onevision
from isobatch.models.folder.minicpm import read_minicpm
from isobatch.models.folder.native import read_glm4v, read_qwen_omni, read_qwen_vl
from isobatch.models.folder.pixtral import read_pixtral
from isobatch.models.folder.shapes import part_of
from isobatch.models.folder.splits import read_splits
from isobatch.models.folder.video._readers import with_videos
from isobatch.models.image_rules.processor import ProcessorRule
from isobatch.models.presets import MediaMarkup, ModelPreset, load_model

Reader = Callable[[ModelFiles], ModelPreset]

READERS: dict[str, Reader] = {
    "gemma3": read_gemma3,
    "gemma4": read_gemma4,
    "glm4v": read_glm4v,
    "glm46v": read_glm4v,
    "glm4v_moe": read_glm4v,
    "idefics3": read_splits,
    "internvl": read_internvl,
    "llava": read_llava,
    "llava_next": read_llava_next,
    "llava_onevision": read_llava_onevision,
    "minicpmv4_6": read_minicpm,
    "mistral3": read_pixtral,
    "paligemma": read_paligemma,
    "qwen2_5_omni": read_qwen_omni,
    "qwen2_5_vl": read_qwen_vl,
    "qwen2_vl": read_qwen_vl,
    "qwen3_5": read_qwen_vl,
    "qwen3_5_moe": read_qwen_vl,
    "qwen3_omni_moe": read_qwen_omni,
    "qwen3_vl": read_qwen_vl,
    "qwen3_vl_moe": read_qwen_vl,
    "smolvlm": read_splits,
}
"""`model_type` of a `config.json` -> its reader."""

_CROSS_ATTENTION = ("mllama", "idefics")
"""Images that are not in the sequence of the language model."""


def find_model(source: str) -> ModelPreset:
    """The model of a preset's name, a TOML file (`.toml`), a folder, or a Hub id (OWNER/NAME).

    ConfigError for a family that is not known, and for settings that would change what an image
    becomes and that this version does not know.
    """
    return model_from_files(read_model_files(source)) if is_folder(source) else load_model(source)


def is_folder(source: str) -> bool:
    """Whether `--model` is a folder or a Hub id, which has a tokenizer too; it may not be there.

    >>> [is_folder(source) for source in ("qwen2_vl", "mine.toml", "Qwen/Qwen2-VL-7B-Instruct")]
    [False, False, True]
    """
    if source.endswith(".toml") or source in preset_names("models"):
        return False
    return "/" in source or isdir(expanduser(source))


def model_from_files(files: ModelFiles) -> ModelPreset:
    """The model that `save_pretrained` wrote."""
    family = files.model_type
    if family in _CROSS_ATTENTION:
        raise ConfigError(
            f"model {files.where}: {family} looks at images by cross attention, so they take no"
            " tokens of the sequence, and packing by tokens does not apply to it"
        )
    if family == "llava" and part_of(files, "vision_config").value("model_type") == "pixtral":
        return read_pixtral(files)
    try:
        return with_videos(files, READERS.get(family, _read_by_processor)(files))
    except ConfigError as error:
        # of a rule or a shape, which do not know where their numbers are from
        where = "" if files.where in str(error) else f"model {files.where}: "
        raise ConfigError(f"{where}{error}") from None


def _read_by_processor(files: ModelFiles) -> ModelPreset:
    """A model that transformers has a processor for. It has no dimensions, so no predicted times.

    ConfigError, with the reason, where that processor cannot be used.
    """
    from isobatch.models.hf_processor import describe_processor  # noqa: PLC0415  (an extra)

    family = files.model_type
    if not family:
        raise ConfigError("its config.json names no model_type; give a preset (.toml)")
    try:
        facts = describe_processor(files.where, family)
    except ConfigError as error:
        raise ConfigError(
            f"family {family} has no rule of its own, and {error}; or describe it in a preset"
            " (.toml)"
        ) from None
    return ModelPreset(
        name=family,
        description=f"{family}: counted and cut by {facts.name}; its encoder's cost is not known",
        context_len=facts.context_len,
        image_markup=MediaMarkup(
            token=facts.token,
            placeholder=facts.placeholder,
            parts=(("run", "{label}"),),
            template_first=True,
        ),
        vision=ProcessorRule(
            description=facts.description, values_per_token=max(1, facts.values_per_token)
        ),
    )
