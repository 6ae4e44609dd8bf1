"""Builds that grow: a dataset in two halves, and what a build of it holds by sample."""

import contextlib

from isobatch.loaders import StreamingLoader
from isobatch.loaders.read.build import open_build
from isobatch.packer.changes.add import Adder, grown_config
from isobatch.packer.config import BuildConfig
from isobatch.shards.manifest import read_manifest
from support.builds.packed import build, quiet
from support.builds.raw_data import good_records, options, write_dataset

CAPS = {"max_seq_len": 2048, "max_vision": 24, "shard_mb": 1}
FIRST, NEW = 150, 90


def write_halves(folder):
    """Records in `first` and in `new`, of which one in each cannot be used; files are shared."""
    rows = good_records(folder, FIRST + NEW)
    for number, row in enumerate(rows):
        row["id"] = f"id-{number:03d}"
        row["score"] = number
        row["never"] = f"secret of {row['id']}"
    rows[7]["image"], rows[FIRST + 7]["image"] = "images/none.png", "images/none.png"
    rows[30]["id"] = rows[31]["id"] = "twice"
    for name, part in (("first", rows[:FIRST]), ("new", rows[FIRST:])):
        write_dataset(folder / name, part)
    return rows


def pack(halves, out, part="first", **changes):
    caps = CAPS | {"data_root": str(halves)} | changes
    build(halves / part, out, **caps)
    return out


def add(halves, out, part="new", discard=False, **changes):
    """-> what `packer add` says of it; None if other shares are missing."""
    values = options(halves / part, out, data_root=str(halves), **changes)
    config = grown_config(read_manifest(out), BuildConfig(**values))
    return Adder(config, quiet()).add(discard=discard)


def samples_of(out):
    with contextlib.closing(StreamingLoader(out)) as loader:
        return {name for step in loader for batch in step for name in batch.sample_ids}


def by_sample(out):
    """Id -> tokens, labels, files and kept columns of each sample, as they are stored."""
    contents, stored = {}, open_build(out)
    for group in map(stored.read, range(len(stored.index))):
        borders = group.cu_seqlens.tolist()
        for place, name in enumerate(group.sample_ids):
            tokens = slice(*borders[place : place + 2])
            files = zip(group.images, group.image_samples.tolist(), strict=True)
            contents[name] = (
                group.input_ids[tokens].tolist(),
                group.labels[tokens].tolist(),
                [bytes(file) for file, owner in files if owner == place],
                group.image_sizes[group.image_samples == place].tolist(),
                group.extras["score"][place],
            )
    stored.close()
    return contents
