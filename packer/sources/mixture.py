"""Mixtures of datasets: TOML, presets, InternVL's meta JSON, LLaVA-NeXT's YAML."""

import re
from dataclasses import dataclass, field, replace
from os.path import exists, isfile
from pathlib import Path, PurePosixPath
from typing import Any

from isobatch.common.config import build_config, config_root, preset_names, read_toml
from isobatch.common.errors import ConfigError, DataError
from isobatch.common.plain_values import parse_json, read_text
from isobatch.counting.columns import named_columns
from isobatch.counting.records.fields import Unread, example_of, is_empty
from isobatch.packer.sources.base import require_known
from isobatch.packer.sources.hub import parse_hub_id
from isobatch.packer.sources.trainers.energon import expanded, read_yaml
from isobatch.packer.sources.trainers.sampling import parse_sampling
from isobatch.shards.folders import is_uri, join, open_folder, split

META_KEYS = ("root", "annotation", "repeat_time")
"""Keys of InternVL's meta JSON that are read."""
PEEK_BYTES = 1 << 16
MOST_SAMPLES = 2**32
"""Samples of a mixture: groups of them are arrays in memory."""
LEAST_SHARE = 1e-9
"""Smallest share of a dataset with a weight: one sample of a thousand million."""
MOST_OF = {"weight": 1e15, "repeat": 2**20, "limit": 2**63 - 1}
"""Largest value of each number of a dataset: what they come to together fits 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePart:
    """One dataset of a mixture, as in its file."""

    dataset: str
    """Preset's name or place, relative to `--data-root` or, without one, to the mixture's file."""
    name: str | None = None
    data_root: str | None = None
    weight: float | None = None
    repeat: float = 1.0
    limit: int | None = None
    sampling: str = "all"
    """Records that are read, in LLaVA-NeXT's words: first:50%, end:100, random:3, or all."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Our names of its columns -> its own."""
    download: str = ""
    """Origin, for the message that says what is missing."""

    def __post_init__(self) -> None:
        if not self.dataset.strip() or (self.data_root is not None and not self.data_root.strip()):
            raise ConfigError("an empty dataset or data_root; give a name, a path or a URI")
        for key, value in (("weight", self.weight), ("repeat", self.repeat), ("limit", self.limit)):
            if value is not None and not 0 < value <= MOST_OF[key]:
                bound = f"at most {MOST_OF[key]:,}"
                raise ConfigError(f"{key} is {value}; it must be greater than 0 and {bound}")
        parse_sampling(self.sampling)
        named_columns(self.columns.items())
        if self.weight is not None and self.repeat != 1.0:
            raise ConfigError(f"{self.dataset}: give a weight or a repeat, not both")

    @property
    def places(self) -> tuple[str, ...]:
        """The dataset and, if that is another place, its data root."""
        if self.data_root is None or self.data_root == self.dataset:
            return (self.dataset,)
        return self.dataset, self.data_root


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Datasets, with weights for all of them or for none."""

    name: str
    description: str = ""
    datasets: tuple[MixturePart, ...]
    num_samples: int | None = None
    model: str = ""
    """The model that a build is for, unless `--model` names one."""
    tokenizer: str = ""
    """Hub id of the tokenizer, where `model` is a preset."""

    def __post_init__(self) -> None:
        if self.num_samples is not None and not 0 < self.num_samples <= MOST_SAMPLES:
            allowed = f"it must be greater than 0 and at most {MOST_SAMPLES:,}"
            raise ConfigError(f"num_samples is {self.num_samples}; {allowed}")
        weights = [part.weight for part in self.datasets if part.weight is not None]
        if weights and min(weights) < LEAST_SHARE * sum(weights):
            raise ConfigError(
                f"weight {min(weights)} is less than {LEAST_SHARE:g} of all weights: leave that"
                " dataset out, or give it more"
            )


def is_mixture(place: str) -> bool:
    """Whether a dataset's name or place means a mixture file."""
    if place.endswith(".toml"):
        return True
    if place not in preset_names("datasets"):
        return False
    return "datasets" in read_toml(_preset_path(place), place)


def read_mixture(place: str) -> Mixture:
    """A mixture by a preset's name or from a TOML file; ConfigError says which key is wrong."""
    is_file = place.endswith(".toml")
    path = Path(place) if is_file else _preset_path(place)
    if not exists(path):
        raise DataError(f"{path}: cannot be read: No such file or directory")
    values = read_toml(path, str(path))
    values.setdefault("name", path.stem)
    entries = values.pop("datasets", None)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: no [[datasets]]; a mixture names at least one")
    parts = tuple(
        build_config(MixturePart, entry, where=f"{path}, dataset {number}")
        for number, entry in enumerate(entries, 1)
    )
    if is_file:
        parts = tuple(_beside(path.parent, part) for part in parts)
    mixture = build_config(Mixture, {**values, "datasets": parts}, where=str(path))
    with_weight = sum(part.weight is not None for part in parts)
    if 0 < with_weight < len(parts):
        raise ConfigError(
            f"{path}: {with_weight} of {len(parts)} datasets have a weight; give one to all or none"
        )
    if mixture.num_samples is not None and not with_weight:
        raise ConfigError(f"{path}: num_samples needs weights")
    return mixture


def _preset_path(name: str) -> Path:
    return config_root() / "datasets" / f"{name}.toml"


def _beside(folder: Path, part: MixturePart) -> MixturePart:
    """A part whose places are relative to the mixture's file, if they exist there."""
    paths: dict[str, Any] = {}
    for key in ("dataset", "data_root"):
        place = getattr(part, key)
        if place and not is_uri(place) and exists(folder / place):
            paths[key] = str((folder / place).resolve())
    return replace(part, **paths)


def missing_parts(mixture: Mixture, data_root: str | None) -> list[str]:
    """The datasets of a mixture and the data roots that are missing, and where they are from."""
    missing = []
    for part in mixture.datasets:
        needed = [place for place in part.places if place != part.dataset or not _is_known(place)]
        if lost := [place for place in needed if not _is_there(place, data_root)]:
            hint = f": from {part.download}" if part.download else ""
            missing.append(" and ".join(lost) + hint)
    return missing


def _is_known(dataset: str) -> bool:
    """Whether a dataset is found by its name: a preset, or perhaps on the Hub."""
    may_be_hub_id = PurePosixPath(dataset).suffix == "" and bool(parse_hub_id(dataset))
    return may_be_hub_id or dataset in preset_names("datasets")


def _is_there(place: str, data_root: str | None) -> bool:
    full = place
    if data_root is not None and not is_uri(place) and not Path(place).is_absolute():
        full = join(data_root, place)
    without_split = full.rpartition("@")[0] or full
    if not is_uri(full):
        return exists(full) or exists(without_split)
    folder, name = split(without_split)
    try:
        return open_folder(without_split).has_folder("") or open_folder(folder).info(name).size >= 0
    except OSError:
        return False


_BRACES = re.compile(r".*\{[^{}]*\}\.json")


def is_onevision(place: str) -> bool:
    """Whether a place is LLaVA-NeXT's: a YAML file with `datasets`, or `a/{x,y}.json`."""
    if _BRACES.fullmatch(place):
        return not exists(place)
    return Path(place).suffix in (".yaml", ".yml") and isfile(place)


def read_onevision(place: str) -> Mixture:
    """LLaVA-NeXT's data_path: each `json_path` with its `sampling_strategy`; ConfigError if not.

    https://github.com/LLaVA-VL/LLaVA-NeXT/blob/main/llava/train/train.py, LazySupervisedDataset
    """
    path = Path(place)
    if _BRACES.fullmatch(place):
        entries: Any = [{"json_path": place}]
    else:
        entries = read_yaml(open_folder(str(path.parent)), path.name).get("datasets")
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(e, dict) for e in entries)
    ):
        raise ConfigError(f"{path}: no list `datasets` of objects with json_path")
    parts: list[MixturePart] = []
    names: list[str] = []
    for number, entry in enumerate(entries, 1):
        where = f"{path}, dataset {number}"
        require_known(entry, {"json_path", "sampling_strategy"}, where)
        for file in expanded([entry.get("json_path")], where):
            names.append(Path(file).name.partition(".")[0])
            times = names.count(names[-1])
            values = {
                "dataset": file,
                "name": names[-1] if times == 1 else f"{names[-1]}-{times}",
                "sampling": entry.get("sampling_strategy", "all"),
            }
            part = build_config(MixturePart, values, where=where)
            parts.append(_beside(path.parent, part))
    return Mixture(name=path.stem.replace("{", "").replace("}", ""), datasets=tuple(parts))


def is_meta(place: str) -> bool:
    """Whether a file is InternVL's meta JSON: name -> {root, annotation, repeat_time, ...}."""
    path = Path(place)
    if path.suffix != ".json" or not isfile(path) or path.stat().st_size > PEEK_BYTES * 16:
        return False
    try:
        values = parse_json(read_text(path), place)
    except (ValueError, OSError):  # not the file that this looks for
        return False
    entries = list(values.values()) if isinstance(values, dict) else []
    return bool(entries) and all(isinstance(e, dict) and "annotation" in e for e in entries)


def read_meta(place: str) -> Mixture:
    """InternVL's meta JSON: `repeat_time` is our repeat; other keys are reported.

    https://github.com/OpenGVLab/InternVL/blob/main/internvl_chat/internvl/train
    """
    path = Path(place)
    parts = []
    for name, entry in parse_json(read_text(path), place).items():
        repeat = entry.get("repeat_time", 1)
        root = entry.get("root") or None
        values = {"dataset": entry["annotation"], "name": name, "data_root": root, "repeat": repeat}
        part = build_config(MixturePart, values, where=f"{path}: {name}")
        parts.append(_beside(path.parent, part))
    return Mixture(name=path.stem, datasets=tuple(parts))


def meta_unread(place: str) -> list[tuple[Unread, ...]]:
    """Keys that nothing reads, with their values, of each dataset of InternVL's meta JSON.

    `data_augment: false` is what is done here, and so not named.
    """
    path = Path(place)
    unread = []
    for entry in parse_json(read_text(path), place).values():
        others = {key: entry[key] for key in entry if key not in META_KEYS}
        if others.get("data_augment") is False:
            del others["data_augment"]
        pairs = [(f"{key} of {path.name}", value) for key, value in others.items()]
        unread.append(
            tuple((key, example_of(value)) for key, value in pairs if not is_empty(value))
        )
    return unread
