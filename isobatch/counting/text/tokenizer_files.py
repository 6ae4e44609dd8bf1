"""A tokenizer's files, from a folder or the Hub, and the tokenizer itself.

For `counting.text.chat_tokenizer`; no transformers, because packing must not need torch. The rules
are those of `PreTrainedTokenizerFast.from_pretrained` (transformers 5): `tokenizer.json` is the
tokenizer, and tokens that only `tokenizer_config.json` knows (InternLM2's) are added after it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from isobatch.common.errors import ConfigError
from isobatch.common.plain_values import read_text
from isobatch.models.folder.files import FileSource
from isobatch.shards.stored_group import Int32Array

NAMED_TOKENS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Keys of `tokenizer_config.json` that are variables in chat templates (`special_tokens_map`)."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What a tokenizer folder contains, as read."""

    where: str
    """Folder or Hub id, for messages."""
    tokenizer_json: str
    config: dict[str, Any]
    """`tokenizer_config.json`; an old one with the tokens of `special_tokens_map.json`."""
    chat_templates: dict[str, str]
    """Name -> template; a single one is called `default`."""

    @property
    def named_tokens(self) -> dict[str, str]:
        """`bos_token` and so on -> the token's text, for tokens that the tokenizer has."""
        tokens = {key: self.config.get(key) for key in NAMED_TOKENS}
        return {key: _content(token) for key, token in tokens.items() if token is not None}


def read_tokenizer_files(source: str | Path) -> TokenizerFiles:
    """Read a tokenizer folder, that of a `tokenizer.json`, or a Hub repository."""
    files = FileSource.find(source, "tokenizer", hub_id=_HUB_ID)
    tokenizer_json = files.read("tokenizer.json", required=True)
    if tokenizer_json is None:
        raise ConfigError(
            f"tokenizer {files.where}: no tokenizer.json; save it with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) and give that folder"
        )
    config = files.read_object("tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= files.read_object("special_tokens_map.json")
    return TokenizerFiles(
        where=files.where,
        tokenizer_json=tokenizer_json,
        config=config,
        chat_templates=_chat_templates(files, config),
    )


def build_backend(files: TokenizerFiles) -> Tokenizer:
    """The tokenizer with all added tokens, under transformers' ids; no padding, no truncation."""
    try:
        backend = Tokenizer.from_str(files.tokenizer_json)
    except Exception as error:  # the Rust side raises plain Exception
        problem = f"tokenizer.json cannot be loaded: {error}"
        raise ConfigError(f"tokenizer {files.where}: {problem}") from None
    backend.no_padding()
    backend.no_truncation()
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, AddedToken] = {}
    for token in _listed_tokens(files.config):
        if token.content not in known:
            missing.setdefault(token.content, token)
    backend.add_tokens(list(missing.values()))
    return backend


def id_conflicts(files: TokenizerFiles, backend: Tokenizer) -> dict[str, tuple[int, int]]:
    """Tokens whose id differs from `tokenizer_config.json`: content -> (declared id, id in use).

    Not empty for InternLM2: its config puts `<|im_end|>` on the id of a placeholder, which only its
    own Python class honours. transformers' generic class appends it, and so do we. A model trained
    elsewhere would then see an id that it does not know, so the caller should warn.
    """
    listed = files.config.get("added_tokens_decoder", {})
    declared = {_content(value): int(index) for index, value in listed.items()}
    return {
        token.content: (declared[token.content], index)
        for index, token in backend.get_added_tokens_decoder().items()
        if declared.get(token.content, index) != index
    }


def _listed_tokens(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Every token of the config, in the order in which transformers adds the missing ones."""
    listed = config.get("added_tokens_decoder", {})
    for index in sorted(listed, key=int):
        yield _added_token(listed[index])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    model_specific = [key for key in config if key.endswith("_token") and key not in NAMED_TOKENS]
    for key in (*NAMED_TOKENS, *model_specific):
        if isinstance(config.get(key), str | dict):
            yield _added_token(config[key])
    yield from map(_added_token, extra.values() if isinstance(extra, dict) else extra)


def _added_token(value: str | dict[str, Any]) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    names = ("lstrip", "rstrip", "single_word", "normalized")
    flags = {key: flag for key, flag in value.items() if key in names}
    return AddedToken(value["content"], special=value.get("special", True), **flags)


def _content(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else str(value["content"])


def _chat_templates(files: FileSource, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates by name: from a file of its own, else the processor's, else the config."""
    template = (
        files.read("chat_template.jinja")
        or files.read_object("chat_template.json").get("chat_template")
        or config.get("chat_template")
    )
    match template:
        case None:
            return {}
        case str():
            return {"default": template}
        case dict():
            return template
        case list() if all(
            isinstance(e, dict) and {"name", "template"} <= set(e) for e in template
        ):
            return {entry["name"]: entry["template"] for entry in template}
    kind = type(template).__name__
    raise ConfigError(f"tokenizer {files.where}: chat_template is a {kind}; expected Jinja text")


def choose_template(files: TokenizerFiles, wanted: str | None) -> str:
    """The chat template of that name or file, or `wanted` itself; ConfigError if there is none."""
    named = files.chat_templates
    if wanted is None or wanted in named:
        if (name := wanted or "default") in named:
            return named[name]
        has = f"only templates named {', '.join(sorted(named))}" if named else "no chat template"
        raise ConfigError(f"tokenizer {files.where}: has {has}; give one, or a .jinja file")
    if "{" in wanted:
        return wanted
    try:
        return read_text(wanted)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat template {wanted}: not one of {sorted(named)}, nor a readable file: {error}"
        ) from None


def document_ends(files: TokenizerFiles, backend: Tokenizer) -> tuple[Int32Array, Int32Array]:
    """The ids before and after a document: `bos_token` and `eos_token`, or none.

    The first only if the post-processor of `tokenizer.json` adds it, which is what decides in
    transformers (5.x drops `add_bos_token` of the config). The second ends a text in training.
    """
    bos, eos = (
        [backend.token_to_id(files.named_tokens[name])] if name in files.named_tokens else []
        for name in ("bos_token", "eos_token")
    )
    adds_bos = backend.encode("a text").ids[:1] == bos
    return np.array(bos if adds_bos else [], dtype=np.int32), np.array(eos, dtype=np.int32)
