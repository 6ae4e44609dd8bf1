"""Raw data in the layouts of others: Arrow streams, `save_to_disk` folders, tars."""

import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import yaml

CONVERSATION = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("image", IMAGE),
        ("conversations", CONVERSATION),
        ("unused", pa.string()),
    ]
)


def write_stream(path, values, batch=7, schema=SCHEMA, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_stream(path, schema, **options) as writer:
        writer.write_table(pa.Table.from_pylist(values, schema=schema), max_chunksize=batch)


def write_saved(folder, values, num_files=2, **options):
    """A folder as `datasets.save_to_disk` leaves it."""
    names = [f"data-{number:05d}-of-{num_files:05d}.arrow" for number in range(num_files)]
    size = -(-len(values) // num_files)
    for number, name in enumerate(names):
        write_stream(folder / name, values[number * size : (number + 1) * size], **options)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_split": "train",
        "_fingerprint": "0",
    }
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


LINK, FOLDER = tarfile.SYMTYPE.decode(), tarfile.DIRTYPE.decode()


def tar_bytes(members, **options):
    """A tar of (name, content) pairs, or of (name, LINK or FOLDER)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = content.encode(), "elsewhere"
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def write_tar(path, members, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar_bytes(members, **options))
    return path


JPEG = b"\xff\xd8\xff\xe0" + b"pixels" * 50
CRUDE = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}


def write_prepared(folder, shards, *, split=None, counts=None, about=None, yaml_info=False):
    """A folder as `energon prepare` leaves it; `shards`: name -> (key, members)."""
    for name, given in shards.items():
        members = [(f"{key}.{end}", data) for key, ends in given for end, data in ends.items()]
        write_tar(folder / name, members)
    meta = folder / ".nv-meta"
    meta.mkdir()
    info = {"energon_version": "7.4.1"}
    info["shard_counts"] = counts or {name: len(given) for name, given in shards.items()}
    text = yaml.safe_dump(info) if yaml_info else json.dumps(info)
    (meta / (".info.yaml" if yaml_info else ".info.json")).write_text(text)
    split = split or {"split_parts": {"train": list(shards), "val": [], "test": []}}
    (meta / "split.yaml").write_text(yaml.safe_dump(split))
    if about is not None:
        (meta / "dataset.yaml").write_text(yaml.safe_dump(about))
    return folder


def pair(key, caption="A cat."):
    return key, {"jpg": JPEG, "txt": caption.encode(), "json": b'{"alt": "Another."}'}


def write_mds(folder, columns, rows, per_shard=4, **changes):
    """A dataset as `MDSWriter` writes it; `columns`: name -> encoding; `changes` of the index."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for number, first in enumerate(range(0, len(rows), per_shard)):
        samples = [_mds_sample(columns, row) for row in rows[first : first + per_shard]]
        sizes = [4 * (len(samples) + 2), *map(len, samples)]
        ends = np.cumsum(sizes).astype("<u4").tobytes()
        data = np.uint32(len(samples)).tobytes() + ends + b"".join(samples)
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(data)
        about = {"basename": name, "bytes": len(data), "hashes": {}}
        shard = {"format": "mds", "version": 2, "compression": None, "hashes": []}
        shard |= {"column_names": sorted(columns), "samples": len(samples), "raw_data": about}
        shard["column_encodings"] = [columns[name] for name in sorted(columns)]
        shard |= {"column_sizes": [None] * len(columns), "zip_data": None, "size_limit": None}
        shards.append(shard | changes)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def _mds_sample(columns, row):
    values = [row[name] for name in sorted(columns)]
    values = [
        x if isinstance(x, bytes) else x.encode() if isinstance(x, str) else json.dumps(x).encode()
        for x in values
    ]
    return np.array([*map(len, values)], "<u4").tobytes() + b"".join(values)
