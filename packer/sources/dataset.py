"""`--dataset`: a name or a path -> where the annotations and the images are, or one clear line about what is
missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from balance.errors import ConfigError, DataError
from balance.presets import DatasetPreset, load_dataset, preset_names

DEMO = "demo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A raw dataset on disk."""

    name: str
    annotations: Path
    data_root: Path
    """Image paths in the annotations are relative to this folder."""


def find_dataset(dataset: str, data_root: Path | None, *, fetch: bool = False) -> Dataset:
    """The dataset that `--dataset` and `--data-root` mean.

    A preset's name, an annotation file, or a folder that holds exactly one. With `fetch`, a preset's missing annotation
    file is downloaded from the Hugging Face Hub. Raises ConfigError or DataError with what is missing and where to
    get it.
    """
    path = Path(dataset)
    if dataset in preset_names("datasets") and not path.exists():
        return _find_preset(load_dataset(dataset), data_root, fetch=fetch)
    if not path.exists():
        known = ", ".join([DEMO, *preset_names("datasets")])
        raise DataError(f"no dataset {dataset!r}: it is neither a file, a folder, nor a known name ({known})")
    annotations = _annotations_in(path) if path.is_dir() else path
    root = data_root or annotations.parent
    if not root.is_dir():
        raise DataError(f"no data root {root}: give the folder that the image paths start from with --data-root")
    return Dataset(
        name=path.resolve().stem if path.is_file() else path.resolve().name, annotations=annotations, data_root=root
    )


def _annotations_in(folder: Path) -> Path:
    found = sorted(p for p in folder.iterdir() if p.suffix in {".json", ".jsonl"} and p.is_file())
    named = [p for p in found if p.stem == "annotations"]
    if len(named) == 1:
        return named[0]
    if len(found) == 1:
        return found[0]
    if not found:
        raise DataError(f"no annotations in {folder}: expected one .json or .jsonl file in LLaVA layout")
    names = ", ".join(p.name for p in found[:5])
    raise ConfigError(
        f"{len(found)} annotation files in {folder} ({names}...): name the one to pack, and --data-root {folder}"
    )


def _find_preset(preset: DatasetPreset, data_root: Path | None, *, fetch: bool) -> Dataset:
    if data_root is None:
        raise ConfigError(
            f"--dataset {preset.name} needs --data-root: the folder that holds {preset.annotations} and the images"
        )
    annotations = data_root / preset.annotations
    problems = []
    if not annotations.is_file() and not fetch:
        problems.append(
            f"annotation file {preset.annotations}: from the Hugging Face dataset {preset.hub_repo},"
            " or add --fetch-annotations"
        )
    for folder in preset.image_folders:
        if not (data_root / folder).is_dir():
            problems.append(f"image folder {folder}: from {preset.downloads.get(folder, 'its own site')}")
    if problems:
        raise DataError(f"{preset.name} is incomplete under {data_root}; missing:\n  - " + "\n  - ".join(problems))
    if not annotations.is_file():
        _fetch(preset, annotations)
    return Dataset(name=preset.name, annotations=annotations, data_root=data_root)


def _fetch(preset: DatasetPreset, target: Path) -> None:
    try:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - an extra, needed only here
    except ImportError:
        raise ConfigError("fetching annotations needs huggingface_hub: pip install 'isobatch[hub]'") from None
    try:
        hf_hub_download(preset.hub_repo, preset.hub_file, repo_type="dataset", local_dir=target.parent)
    except Exception as error:  # the Hub client raises some twenty types, network libraries' own among them
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"{preset.hub_file} could not be fetched from {preset.hub_repo}: {reason}") from None
