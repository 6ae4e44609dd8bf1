"""`--dataset`: a name or a place -> the raw datasets to read.

A dataset is one part or a mixture of several. A part is found by looking at its place
(`packer.sources.detect`); presets, mixture files and InternVL's meta JSON name several.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from rich.console import Console
from rich.table import Table

from isobatch.common.config import preset_names
from isobatch.common.consoles import foreign
from isobatch.common.errors import ConfigError, DataError, first_line
from isobatch.counting.columns import Columns, named_columns
from isobatch.models.folder.files import quiet_hub
from isobatch.models.presets import DatasetPreset, load_dataset
from isobatch.packer.sources.base import Located, has_file
from isobatch.packer.sources.columns import require_columns
from isobatch.packer.sources.detect import Part, locate, open_located
from isobatch.packer.sources.hub import parse_hub_id
from isobatch.packer.sources.mixture import (
    is_meta,
    is_mixture,
    is_onevision,
    meta_unread,
    missing_parts,
    read_meta,
    read_mixture,
    read_onevision,
)
from isobatch.packer.sources.trainers.metadataset import (
    is_metadataset,
    read_metadataset,
    split_of_place,
)
from isobatch.packer.sources.trainers.sampling import Sampling, parse_sampling
from isobatch.shards.folders import is_uri, join, open_folder

DEMO = "demo"
OWN_SITE = "its own site"
SHARE_KEYS = ("weight", "repeat", "limit")
"""What a mixture says about how much of a part goes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What a build reads."""

    name: str
    parts: tuple[Part, ...]
    num_samples: int | None = None
    """Samples of a mixture with weights; None: as many as possible without repeating any."""

    def keeping(self, columns: tuple[str, ...], seed: int) -> "Dataset":
        """The same dataset, of which these columns are read too; `seed` draws records."""
        parts = (
            replace(part, located=replace(part.located, keep=columns).seeded(seed))
            for part in self.parts
        )
        return replace(self, parts=tuple(parts))


def no_records(dataset: Dataset) -> DataError:
    """The error of a dataset whose files are empty."""
    names = (f"{part.located.folder}/{part.located.names[0]}" for part in dataset.parts)
    return DataError(f"{', '.join(names)}: holds no records")


def find_dataset(
    dataset: str, data_root: str | None, *, fetch: bool = False, columns: Columns | None = None
) -> Dataset:
    """The dataset that `--dataset` and `--data-root` mean.

    A preset's name, a mixture (TOML, InternVL's meta JSON, LLaVA-NeXT's YAML), or anything that
    `locate` knows. With `fetch`, a preset's annotation file is downloaded from the Hugging Face Hub
    if it is missing. `columns` are those of parts that have none of their own; ConfigError if one
    is not in the first records.
    """
    result = _find(dataset, data_root, fetch=fetch)
    parts = tuple(_with_columns(part, columns) for part in result.parts)
    return replace(result, parts=parts)


def demo_dataset(folder: Path) -> Dataset:
    """The generated demo in a folder, where it has been written."""
    dataset = find_dataset(str(folder), None)
    return replace(dataset, name=DEMO, parts=(replace(dataset.parts[0], name=DEMO),))


def _with_columns(part: Part, columns: Columns | None) -> Part:
    located = part.located
    columns = located.columns or columns
    if columns is None:
        return part
    plain = open_located(replace(located, columns=None), part.name, part.data_root)
    require_columns(located, columns, plain.columns(), part.name)
    return replace(part, located=replace(located, columns=columns))


def _find(dataset: str, data_root: str | None, *, fetch: bool) -> Dataset:
    if dataset in preset_names("datasets") and not Path(dataset).exists():
        if is_mixture(dataset):
            return _mixture(dataset, data_root, fetch=fetch)
        return _preset(load_dataset(dataset), data_root, fetch=fetch)
    if is_metadataset(dataset):
        return _metadataset(dataset, data_root)
    if is_mixture(dataset) or is_meta(dataset) or is_onevision(dataset):
        return _mixture(dataset, data_root, fetch=fetch)
    located = locate(dataset, known=[DEMO, *preset_names("datasets")])
    root = data_root or located.folder
    if not is_uri(root) and not Path(root).is_dir():
        raise DataError(_no_data_root(root))
    part = Part(name=_name(dataset, located), located=located, data_root=root)
    return Dataset(name=part.name, parts=(part,))


def _no_data_root(root: str) -> str:
    return f"no data root {root}: give the folder that image paths start from with --data-root"


def _name(place: str, located: Located) -> str:
    if located.name:
        return located.name
    if is_uri(place) or not Path(place).exists():
        last = place.rstrip("/").rpartition("/")[2]
    else:
        last = Path(place).resolve().name
    is_folder = len(located.names) != 1 or not last.endswith(located.names[0].rpartition("/")[2])
    return last if is_folder else last.partition(".")[0]


def _mixture(file: str, data_root: str | None, *, fetch: bool) -> Dataset:
    read = read_onevision if is_onevision(file) else read_mixture
    mixture = (read_meta if is_meta(file) else read)(file)
    _require(mixture.name, data_root, missing_parts(mixture, data_root))
    parts: list[Part] = []
    unread = meta_unread(file) if is_meta(file) else [()] * len(mixture.datasets)
    for place, entry in enumerate(mixture.datasets):
        root, wanted = entry.data_root, entry.dataset
        if data_root is not None:
            root, wanted = root and _under(data_root, root), _under(data_root, wanted)
        subset = _find(wanted, root or data_root, fetch=fetch)
        if any(_has_share(part) for part in subset.parts):
            raise ConfigError(
                f"mixture {mixture.name}: its dataset {wanted} is a mixture with weights, repeats "
                "or limits of its own, which would be lost; name that mixture's datasets here"
            )
        share: dict[str, Any] = {key: getattr(entry, key) for key in SHARE_KEYS}
        sampling = parse_sampling(entry.sampling)
        drawn = None if sampling is None else replace(sampling, place=place)
        columns = named_columns(entry.columns.items())
        for part in subset.parts:
            located = _sampled(part.located, drawn, mixture.name)
            located = replace(
                located,
                columns=columns or located.columns,
                unread=located.unread + unread[place],
            )
            parts.append(replace(part, name=entry.name or part.name, located=located, **share))
    entry_names = {entry.name for entry in mixture.datasets}
    parts = _told_apart(parts, entry_names)
    names = [part.name for part in parts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        hint = f"two of its datasets are named {twice!r}; give each a `name`"
        raise ConfigError(f"mixture {mixture.name}: {hint}")
    return Dataset(name=mixture.name, parts=tuple(parts), num_samples=mixture.num_samples)


def _has_share(part: Part) -> bool:
    """Whether a mixture says how much of the part goes in."""
    return part.weight is not None or part.repeat != 1 or part.limit is not None


def _metadataset(place: str, data_root: str | None) -> Dataset:
    """A mixture that a YAML file of Energon's describes."""
    parts = read_metadataset(place, data_root)
    name = PurePosixPath(split_of_place(place)[0]).stem
    return Dataset(name=name, parts=tuple(_numbered(_told_apart(parts, ()))))


def _numbered(parts: list[Part]) -> list[Part]:
    """Parts of one name with numbers after it: a metadataset's have no names to change."""
    taken = {part.name for part in parts}
    seen: set[str] = set()
    numbered = []
    for part in parts:
        name = part.name
        if name in seen:
            name = next(new for n in count(2) if (new := f"{part.name}-{n}") not in taken)
        taken.add(name)
        seen.add(name)
        numbered.append(replace(part, name=name))
    return numbered


def _sampled(located: Located, sampling: Sampling | None, mixture: str) -> Located:
    """The files of which a mixture reads some records only."""
    if sampling is None:
        return located
    if located.layout != "annotations":
        what = f"{located.folder}: sampling is for JSON files, not for {located.layout}"
        raise ConfigError(f"mixture {mixture}: {what}; use limit or weight")
    return replace(located, options=(*located.options, ("sampling", sampling)))


def _told_apart(parts: list[Part], entry_names: Collection[str | None]) -> list[Part]:
    """Parts of one name, such as `annotations`, with the folders in which they differ before it."""
    named: dict[str, list[Part]] = {}
    for part in parts:
        named.setdefault(part.name, []).append(part)
    names = {}
    for name, several in named.items():
        # a folder's own name is its last one already
        paths = [PurePosixPath(part.located.folder.rstrip("/")).parts for part in several]
        ends = [path[:-1] if path[-1:] == (name,) else path for path in paths]
        depth = next((n for n in range(1, 9) if len({end[-n:] for end in ends}) == len(ends)), 0)
        if len(several) > 1 and depth and name not in entry_names:
            for part, end in zip(several, ends, strict=True):
                names[id(part)] = "/".join([*(x for x in end[-depth:] if x != "/"), name])
    return [replace(part, name=names.get(id(part), part.name)) for part in parts]


def _under(data_root: str, place: str) -> str:
    """A place in a mixture, relative to `--data-root` unless it is absolute or a name."""
    if is_uri(place) or Path(place).is_absolute() or place in preset_names("datasets"):
        return place
    full = join(data_root, place)
    return place if parse_hub_id(place) and not is_uri(full) and not Path(full).exists() else full


def _preset(preset: DatasetPreset, data_root: str | None, *, fetch: bool) -> Dataset:
    _require(preset.name, data_root, _missing_of_preset(preset, data_root, fetch=fetch))
    data_root = data_root or "."
    if not has_file(open_folder(data_root, follow_links=True), preset.annotations):
        _fetch(preset, Path(data_root) / preset.annotations)
    located = Located("annotations", data_root, (preset.annotations,))
    part = Part(name=preset.name, located=located, data_root=data_root)
    return Dataset(name=preset.name, parts=(part,))


def _missing_of_preset(preset: DatasetPreset, data_root: str | None, *, fetch: bool) -> list[str]:
    root = open_folder(data_root or ".")
    missing = [
        f"image folder {folder}: from {preset.downloads.get(folder, OWN_SITE)}"
        for folder in preset.image_folders
        if not root.has_folder(folder)
    ]
    can_fetch = fetch and not is_uri(data_root or ".")
    annotated = open_folder(data_root or ".", follow_links=True)
    if not can_fetch and not has_file(annotated, preset.annotations):
        origin = f"from the Hugging Face dataset {preset.hub_repo}, or add --fetch-annotations"
        missing.insert(0, f"annotation file {preset.annotations}: {origin}")
    return missing


def _require(name: str, data_root: str | None, missing: list[str]) -> None:
    """DataError that lists all that is missing, if anything is."""
    if missing:
        listed = "\n  - ".join(["", *missing])
        under = f"under {data_root}" if data_root else "in the current folder (--data-root)"
        raise DataError(f"{name} is incomplete {under}; missing:{listed}")


def require_all(dataset: str, data_root: str | None, problem: ConfigError, *, fetch: bool) -> None:
    """Raise another problem with what is missing too: a known dataset's files, or the data root."""
    if dataset in preset_names("datasets") and not Path(dataset).exists():
        if is_mixture(dataset):
            missing = missing_parts(read_mixture(dataset), data_root)
        else:
            missing = _missing_of_preset(load_dataset(dataset), data_root, fetch=fetch)
        if missing:
            _require(dataset, data_root, [*missing, str(problem)])
    elif data_root is not None and not is_uri(data_root) and not Path(data_root).is_dir():
        raise ConfigError(f"{problem}; and {_no_data_root(data_root)}")


def usual_model(dataset: str) -> tuple[str, str]:
    """(model, tokenizer) of a known dataset; empty texts where it is not known by name."""
    if dataset not in preset_names("datasets") or Path(dataset).exists():
        return "", ""
    known = read_mixture(dataset) if is_mixture(dataset) else load_dataset(dataset)
    return known.model, known.tokenizer


def _fetch(preset: DatasetPreset, target: Path) -> None:
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - an extra, needed only here
    except ImportError:
        raise ConfigError(
            "fetching annotations needs huggingface_hub: pip install huggingface_hub datasets"
        ) from None
    try:
        with quiet_hub():
            hf_hub_download(
                preset.hub_repo, preset.hub_file, repo_type="dataset", local_dir=target.parent
            )
    # the Hub client raises some twenty types, network libraries' own among them
    except Exception as error:
        raise DataError(
            f"{preset.hub_file} could not be fetched from {preset.hub_repo}: {first_line(error)}"
        ) from None


# --- the datasets known by name ---


def print_datasets(console: Console) -> None:
    """A table of the known datasets."""
    heading = "what it is, and what it needs under --data-root"
    table = Table("name", heading, box=None, pad_edge=False)
    table.add_row(
        f"[bold]{DEMO}[/]", "A small generated dataset with images, to try everything out"
    )
    for name in preset_names("datasets"):
        description, needs = describe_known(name)
        lines = [f"  [bold]{foreign(place)}[/]: {foreign(origin)}" for place, origin in needs]
        table.add_row(f"[bold]{foreign(name)}[/]", "\n".join([foreign(description), *lines]))
    console.print(table, highlight=False)


def describe_known(name: str) -> tuple[str, list[tuple[str, str]]]:
    """What a known dataset is; its files and folders under the data root, and where to get them."""
    if is_mixture(name):
        mixture = read_mixture(name)
        needs = [(" and ".join(part.places), part.download) for part in mixture.datasets]
        return mixture.description, needs
    preset = load_dataset(name)
    annotations = f"the Hugging Face dataset {preset.hub_repo}" if preset.hub_repo else OWN_SITE
    folders = [(folder, preset.downloads.get(folder, OWN_SITE)) for folder in preset.image_folders]
    return preset.description, [(preset.annotations, annotations), *folders]
