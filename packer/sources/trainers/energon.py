"""Energon's folders: the shards of a split, and which members become which fields.

As megatron-energon 7 reads them: `.nv-meta/split.yaml` has the shards of each split and what is
left out of them, `.info.json` the number of samples in each, and `dataset.yaml` the kind of the
samples with a `field_map`. Crude samples, which training code of the user cooks, are read by the
suffixes of their members. A `sample_loader` is the user's own code, which is not run: one line says
so.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from braceexpand import braceexpand

from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.counting.records.fields import example_of
from isobatch.packer.sources.base import Located, has_file, require_known
from isobatch.shards.folders import Folder, join

META = ".nv-meta"
INFO_NAMES = (".info.json", ".info.yaml")
SPLIT_NAMES = ("split.yaml", "split.json")
DATASET_NAME = "dataset.yaml"
INDEX_NAME = "index.sqlite"
"""Where each member of the shards is, by the key of its sample and its suffix."""
MOST_SHARDS = 1_000_000
"""Shards of a split at most, so that `{0..999999999}` is an error and not a full memory."""
_UNREAD = frozenset(
    {"subflavors", "auto_decode", "image_decode", "av_decode", "video_decode_audio"}
    | {"ignore_decoder_errors", "guess_content", "shuffle_over_epochs", "parallel_shard_iters"}
    | {"max_samples_per_sequence"}
)
DATASET_KEYS = _UNREAD.union(
    {"__module__", "__class__", "sample_type", "field_map", "part_filter", "sample_loader"}
)
"""Keys of dataset.yaml. Those of decoding, shuffling and `subflavors` are reported."""
_VQA = {"context": "question", "answers": "answers"}
SAMPLE_TYPES: dict[str, dict[str, str]] = {
    "CaptioningSample": {"image": "image", "caption": "caption"},
    "OCRSample": {"image": "image", "text": "caption"},
    "TextSample": {"text": "text"},
    "VQASample": {"image": "image", **_VQA},
    "VQAOCRSample": {"image": "image", **_VQA},
    "VidQASample": {"video": "video", **_VQA},
    "MultiChoiceVQASample": {
        **{"image": "image", "context": "question", "choices": "choices"},
        "correct_choice_idx": "correct_choice_idx",
    },
    "InterleavedSample": {"sequence": "texts"},
}
"""Type -> its fields -> keys of our records. Other fields keep their names, so are reported."""

_ACCESS = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FieldMap:
    """How the members of a tar become the fields of a sample type."""

    sample_type: str
    fields: tuple[tuple[str, tuple[_Path, ...]], ...]
    """Field -> where its value may be, in this order: a member's suffix, keys inside of that."""

    @property
    def members(self) -> frozenset[str]:
        """The suffixes that are read."""
        return frozenset(path[0] for _, paths in self.fields for path in paths)

    def record(self, members: Mapping[str, Any]) -> dict[str, Any]:
        """The record of a sample, by the values of its members. ValueError if one is not there."""
        known = SAMPLE_TYPES[self.sample_type]
        record = {known.get(field, field): _first(members, field, to) for field, to in self.fields}
        if self.sample_type == "MultiChoiceVQASample":
            return _with_choice(record)
        if self.sample_type == "InterleavedSample":
            texts = record["texts"]
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise ValueError("`sequence` is not a list of texts")
            return {**record, "images": [None] * len(texts)}
        return record


def _first(members: Mapping[str, Any], field: str, paths: tuple[_Path, ...]) -> Any:
    for path in paths:
        value: Any = members
        try:
            for key in path:
                value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError, TypeError):
            continue
        return value
    places = " or ".join(".".join(path) for path in paths)
    raise ValueError(f"field_map of {DATASET_NAME}: no {places} for `{field}`")


def _with_choice(record: dict[str, Any]) -> dict[str, Any]:
    """A question with its answer: the choice of the number."""
    number = record.pop("correct_choice_idx", 0)
    choices = record.get("choices")
    number = int(number) if isinstance(number, str) and number.strip().isdecimal() else number
    if (
        not isinstance(choices, list)
        or type(number) is not int
        or number not in range(len(choices))
    ):
        raise ValueError(f"`correct_choice_idx` is {str(number)[:40]}, which is none of `choices`")
    return {**record, "answer": choices[number]}


def is_energon(folder: Folder) -> bool:
    """Whether a folder has Energon's metadata."""
    names = (*INFO_NAMES, *SPLIT_NAMES, DATASET_NAME)
    return folder.has_folder(META) and any(has_file(folder, f"{META}/{name}") for name in names)


def locate_energon(
    folder: Folder,
    place: str,
    choose: Callable[[list[str]], str],
    *,
    dataset_config: str | None = None,
    split_config: str | None = None,
) -> Located:
    """The shards of a split, which `choose` selects, and how their members are read.

    `dataset_config` and `split_config` are names of other files for dataset.yaml and split.yaml.
    ConfigError for samples that only code of the user makes; DataError for metadata that is not as
    `energon prepare` writes it.
    """
    split_names = SPLIT_NAMES if split_config is None else (split_config,)
    splits = _required(folder, split_names)
    parts = splits.get("split_parts")
    excluded = splits.get("exclude") or []
    where = join(folder.uri, f"{META}/{split_names[0]}")
    if not isinstance(parts, dict) or not parts or not isinstance(excluded, list):
        raise DataError(f"{where}: no `split_parts` with the shards of each split")
    require_known(splits, {"split_parts", "exclude"}, where)
    counts = shard_counts(folder)
    split = choose([str(name) for name in parts])
    left_out = frozenset(expanded(excluded, where))
    names = tuple(name for name in expanded(parts[split], where) if name not in left_out)
    if not names:
        raise DataError(f"{where}: the split {split!r} has no shards")
    if strange := next((name for name in names if not isinstance(counts.get(name), int)), None):
        raise DataError(f"{where}: {strange} has no count in {INFO_NAMES[0]}; prepare it again")
    samples = tuple(sorted(name for name in left_out if "/" in name))
    samples_left = sum(name.rpartition("/")[0] in names for name in samples)
    shards_left = [name for name in expanded(parts[split], where) if name in left_out]
    samples_left += sum(counts[name] for name in shards_left if isinstance(counts.get(name), int))
    number = f"{samples_left:,} sample{'s' * (samples_left != 1)}"
    unread = [("exclude of split.yaml", number)] if samples_left else []
    options: tuple[tuple[str, Any], ...] = (
        ("counts", tuple(counts[name] for name in names)),
        *((("exclude", samples),) if samples else ()),
    )
    about = dataset_config or DATASET_NAME
    if dataset_config is not None or has_file(folder, f"{META}/{about}"):
        fields, others = _described(folder, place, about)
        options += () if fields is None else (("fields", fields),)
        unread += [(f"{key} of {about}", example_of(value)) for key, value in others]
    return Located("tar", place, names, options, unread=tuple(unread))


def shard_counts(folder: Folder) -> dict[str, Any]:
    """Shard -> number of its samples, in Energon's order; DataError if nothing says it."""
    counts = _required(folder, INFO_NAMES).get("shard_counts")
    if not isinstance(counts, dict):
        raise DataError(f"{join(folder.uri, META)}/{INFO_NAMES[0]}: no `shard_counts`")
    return counts


def _described(
    folder: Folder, place: str, name: str
) -> tuple[FieldMap | None, list[tuple[str, Any]]]:
    """The `field_map` of the file `name`, None for crude samples, and keys that nothing reads."""
    path = join(folder.uri, f"{META}/{name}")
    values = _required(folder, (name,))
    require_known(values, DATASET_KEYS, path)
    class_name = values.get("sample_type", {"__class__": values.get("__class__", "")})
    if isinstance(class_name, dict):
        class_name = class_name.get("__class__", "")
    sample_type = re.sub("Webdataset$", "Sample", str(class_name).rpartition(".")[2])
    by_suffix = f"name its tars ({place}/NAME.tar) to read them by their suffixes"
    if "sample_loader" in values:
        made = "its samples are made by a sample_loader, code not run here"
        raise ConfigError(f"{path}: {made}; {by_suffix}")
    others = [(key, values[key]) for key in values if key in _UNREAD and values[key] is not None]
    if sample_type == "CrudeSample":
        if "part_filter" in values:
            raise ConfigError(f"{path}: part_filter is not read; {by_suffix}")
        return None, others
    if sample_type not in SAMPLE_TYPES:
        known = ", ".join(SAMPLE_TYPES)
        raise ConfigError(f"{path}: samples of the type {sample_type!r}; read are {known}")
    fields = values.get("field_map")
    if not isinstance(fields, dict) or not all(isinstance(x, str) for x in fields.values()):
        raise ConfigError(f"{path}: no field_map of texts; {by_suffix}")
    if "part_filter" in values:
        raise ConfigError(f"{path}: part_filter is for a sample_loader only")
    optional = {*fields, "correct_choice_idx"}
    if missing := [name for name in SAMPLE_TYPES[sample_type] if name not in optional]:
        raise ConfigError(f"{path}: the field_map has no {missing[0]}, which {sample_type} needs")
    paths = {str(field): _paths(text) for field, text in fields.items()}
    return FieldMap(sample_type, tuple(paths.items())), others


def _paths(text: str) -> tuple[_Path, ...]:
    """Places where a field's value may be.

    >>> _paths("json[about][0],txt")
    (('json', 'about', '0'), ('txt',))
    """
    matches = [(option, _ACCESS.fullmatch(option)) for option in text.split(",")]
    return tuple(
        (match[1].lower(), *re.findall(r"\[([^\[\]]+)\]", match[2])) if match else (option,)
        for option, match in matches
    )


# --- files ---


def _required(folder: Folder, names: tuple[str, ...]) -> dict[str, Any]:
    """The first of these files that is there."""
    name = next((name for name in names if has_file(folder, f"{META}/{name}")), None)
    if name is None:
        missing = f"{join(folder.uri, META)}: no {' or '.join(names)}"
        raise DataError(f"{missing}, which `energon prepare` writes")
    return read_yaml(folder, f"{META}/{name}")


def read_yaml(folder: Folder, name: str) -> dict[str, Any]:
    """An object in a YAML or JSON file; ConfigError for anything else."""
    path = join(folder.uri, name)
    try:
        values = yaml.safe_load(folder.read(name))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or first_line(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = first_line(error) or "damaged"
        raise ConfigError(f"{path}: not valid YAML: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: is a {type(values).__name__}, not an object with keys")
    return values


def expanded(names: Any, where: str) -> list[str]:
    """Names with their braces expanded; DataError if they are no list of names."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{where}: its files are not a list of names")
    files: list[str] = []
    for name in names:
        try:
            for file in braceexpand(name):
                files.append(file)
                if len(files) > MOST_SHARDS:
                    raise DataError(f"{where}: {name[:80]} stands for more than a million shards")
        except ValueError:
            raise DataError(f"{where}: {name[:80]!r} has a brace without its other one") from None
    return files
