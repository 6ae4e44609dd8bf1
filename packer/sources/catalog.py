"""Datasets known by name, and what each needs under `--data-root`."""

from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from balance.config import preset_names
from balance.presets import load_dataset
from packer.sources.dataset import DEMO
from packer.sources.mixture import is_mixture, read_mixture


@dataclass(frozen=True, slots=True)
class KnownDataset:
    """A dataset that `--dataset` accepts by name."""

    name: str
    description: str
    needs: tuple[tuple[str, str], ...]
    """Files and folders under the data root, and where to get them."""


def list_datasets() -> list[KnownDataset]:
    """The generated demo, then the shipped presets in alphabetic order."""
    demo = KnownDataset(DEMO, "A small generated dataset with images, to try everything out", ())
    return [demo, *map(_known, preset_names("datasets"))]


def print_datasets(console: Console) -> None:
    """A table of the known datasets."""
    heading = "what it is, and what it needs under --data-root"
    table = Table("name", heading, box=None, pad_edge=False)
    for dataset in list_datasets():
        lines = [
            escape(dataset.description),
            *(f"  [bold]{escape(place)}[/]: {escape(origin)}" for place, origin in dataset.needs),
        ]
        table.add_row(f"[bold]{escape(dataset.name)}[/]", "\n".join(lines))
    console.print(table, highlight=False)


def _known(name: str) -> KnownDataset:
    if is_mixture(name):
        mixture = read_mixture(name)
        needs = [(" and ".join(part.places), part.download) for part in mixture.datasets]
        return KnownDataset(name, mixture.description, tuple(needs))
    preset = load_dataset(name)
    site = "its own site"
    annotations = f"the Hugging Face dataset {preset.hub_repo}" if preset.hub_repo else site
    folders = ((folder, preset.downloads.get(folder, site)) for folder in preset.image_folders)
    return KnownDataset(name, preset.description, ((preset.annotations, annotations), *folders))
