"""LLaMA-Factory's dataset_info.json: where a dataset is, and its columns' names.

As its `data/parser.py` and `data/converter.py` read it: without `columns` or `tags`, the defaults
hold; with them, only what they list. Of two ranked answers the chosen one is learned. What is
fetched from elsewhere, and `kto_tag` (answers that are not to be learned), is refused in one line.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.common.errors import ConfigError
from isobatch.common.visible_text import shown
from isobatch.counting.columns import Columns
from isobatch.packer.sources.base import require_known
from isobatch.packer.sources.trainers.sampling import Sampling

INFO_NAME = "dataset_info.json"
MOST_BYTES = 16 << 20
ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys that say where else the data is; LLaMA-Factory prefers them to `file_name`."""
KEYS = frozenset(
    {*ELSEWHERE, "file_name", "file_sha1", "formatting", "ranking", "subset", "split", "folder"}
    | {"num_samples", "revision", "columns", "tags"}
)
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
COMMON = {"system": "system", "tools": "tools", "images": "images", "videos": "videos"}
COMMON |= {"audios": "audios"}
"""LLaMA-Factory's names of columns -> ours."""
COLUMNS = frozenset({*ALPACA, *COMMON, "messages", "chosen", "rejected", "kto_tag"})
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
"""Tags and their defaults."""
ROLES = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool"}
ROLES |= {"function_tag": "function_call", "system_tag": "system"}


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """A dataset of dataset_info.json."""

    name: str
    place: str
    """File or folder, with its split."""
    columns: Columns
    sampling: Sampling | None


def read_info(path: Path) -> dict[str, Any] | None:
    """LLaMA-Factory's datasets by name; None for another file, such as that of `datasets`."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    where = {*ELSEWHERE, "file_name"}
    is_theirs = isinstance(values, dict) and all(
        isinstance(entry, dict) and not where.isdisjoint(entry) for entry in values.values()
    )
    return values if is_theirs and values else None


def dataset_of(values: Mapping[str, Any], wanted: str | None, path: Path) -> DatasetInfo:
    """The wanted dataset, or the only one; ConfigError for what cannot be read as it says."""
    has = f"{path} has the datasets {', '.join(values)}"[:400]
    if wanted is None and len(values) > 1:
        raise ConfigError(f"{has}; say which one: {path}@NAME")
    name = next(iter(values)) if wanted is None else wanted
    if name not in values:
        raise ConfigError(f"{has}, and no {name!r}")
    entry = values[name]
    where = f"{path}, {name}"
    _known(entry, KEYS, where)
    return DatasetInfo(
        name, _place(entry, path, where), _columns(entry, where), _sampling(entry, where)
    )


def _place(entry: Mapping[str, Any], path: Path, where: str) -> str:
    """The file or folder of a dataset, with its split."""
    if elsewhere := next((key for key in ELSEWHERE if entry.get(key)), None):
        hint = "name that dataset (ORG/NAME) and its --columns"
        raise ConfigError(f"{where}: {elsewhere} is not fetched from here; {hint}")
    if on_hub := next((key for key in ("subset", "folder", "revision") if entry.get(key)), None):
        raise ConfigError(f"{where}: {on_hub} is for datasets on the Hub, and this one is a file")
    place = path.parent / str(entry["file_name"])
    try:
        # another such file would lead on, and this one here again
        is_info = place.name == INFO_NAME or read_info(place / INFO_NAME) is not None
        is_there = place.exists() and not is_info
    except (OSError, ValueError):  # a name that no file system takes
        is_there = False
    if not is_there:
        raise ConfigError(f"{where}: no data file {shown(str(place))}")
    split = entry.get("split") or "train"
    if split != "train" and not place.is_dir():
        raise ConfigError(f"{where}: a file has no split {str(split)[:40]!r}")
    return f"{place}@{split}" if split != "train" else str(place)


def _sampling(entry: Mapping[str, Any], where: str) -> Sampling | None:
    if (number := entry.get("num_samples")) is None:
        return None
    if type(number) is not int or number < 1:
        raise ConfigError(f"{where}: num_samples is {str(number)[:40]}; give a number above 0")
    return Sampling("random", number)


def _columns(entry: Mapping[str, Any], where: str) -> Columns:
    renames = entry.get("columns")
    tags = entry.get("tags")
    _known(renames or {}, COLUMNS, f"{where}, columns")
    _known(tags or {}, TAGS, f"{where}, tags")
    formatting = entry.get("formatting", "alpaca")
    is_ranking = bool(entry.get("ranking"))
    if formatting not in ("alpaca", "sharegpt", "openai"):
        known = "alpaca, sharegpt, openai"
        raise ConfigError(f"{where}: formatting is {str(formatting)[:40]!r}; known: {known}")
    columns = {key: value for key, value in (renames or {}).items() if value is not None}
    if "kto_tag" in columns:
        raise ConfigError(
            f"{where}: kto_tag marks answers that are not to be learned; leave it out"
        )
    if is_ranking and "chosen" not in columns:
        raise ConfigError(f"{where}: a ranking without the column `chosen`")
    common = [(ours, columns[key]) for key, ours in COMMON.items() if key in columns]
    if formatting == "alpaca":
        return Columns(
            names=(*_alpaca(columns, renames is None, is_ranking), *common), is_complete=True
        )
    all_tags = TAGS if tags is None else tags or {}
    tag_values = {key: value for key, value in all_tags.items() if value is not None}
    return Columns(
        names=(("messages", columns.get("messages", "conversations")), *common),
        is_complete=True,
        role_key=tag_values.get("role_tag", TAGS["role_tag"]),
        text_key=tag_values.get("content_tag", TAGS["content_tag"]),
        roles=tuple((tag_values[tag], ours) for tag, ours in ROLES.items() if tag in tag_values),
        chosen=columns["chosen"] if is_ranking else "",
    )


def _alpaca(
    columns: Mapping[str, str], has_defaults: bool, is_ranking: bool
) -> list[tuple[str, str]]:
    if has_defaults:
        columns = {key: ours for key, ours in ALPACA.items() if key != "history"}
    if is_ranking:
        columns = {**columns, "response": columns["chosen"]}
    if "response" not in columns and "prompt" in columns:  # for pre-training
        return [("text", columns["prompt"])]
    return [(ours, columns[key]) for key, ours in ALPACA.items() if key in columns]


def _known(values: Any, known: frozenset[str] | Mapping[str, str], where: str) -> None:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: is a {type(values).__name__}, not an object")
    require_known(values, known, where)
    if known is not KEYS and (
        bad := [k for k, v in values.items() if not isinstance(v, str | None)]
    ):
        raise ConfigError(f"{where}: {bad[0]} is not a text")
