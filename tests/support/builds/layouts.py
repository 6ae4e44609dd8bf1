"""Raw data in the layouts of others: Arrow streams, `save_to_disk` folders, tars."""

import io
import json
import tarfile

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
