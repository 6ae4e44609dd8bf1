"""Datasets of other libraries, that shard themselves or do not, given to `BalancedLoader`.

    python sharding_datasets.py write FOLDER LIBRARY
    torchrun ... sharding_datasets.py read FOLDER LIBRARY WAY OUT [together]

`read` writes OUT.RANK.json: by epoch the samples that the rank was given, or what was said.
"""

import io
import json
import sys
import tarfile
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

NUM_ITEMS, NUM_FILES = 101, 6
EPOCHS = 2


def item(number):
    return {"id": f"item-{number}", "input_ids": [number] * (5 + 7 * number % 90)}


def from_json(record):
    """The item in a sample of a tar file."""
    value = record["json"]
    return value if isinstance(value, dict) else json.loads(value)


# --- writing ---


def write_litdata(folder):
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_size=20)
    for number in range(NUM_ITEMS):
        writer.add_item(number, item(number))
    writer.done()
    writer.merge()


def write_mosaicml(folder):
    without_torchvision_operators()
    from streaming import MDSWriter

    columns = {"id": "str", "input_ids": "ndarray:int64"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=4096) as out:
        for number in range(NUM_ITEMS):
            given = item(number)
            out.write({**given, "input_ids": np.array(given["input_ids"], np.int64)})


def write_webdataset(folder):
    folder.mkdir(exist_ok=True)
    numbers = np.array_split(np.arange(NUM_ITEMS), NUM_FILES)
    for file, own in enumerate(numbers):
        with tarfile.open(folder / f"{file:03}.tar", "w") as tar:
            for number in own.tolist():
                content = json.dumps(item(number)).encode()
                member = tarfile.TarInfo(f"{number:04}.json")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_energon(folder):
    write_webdataset(folder)
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors import BaseWebdatasetFactory

    BaseWebdatasetFactory.prepare_dataset(
        EPath(str(folder)),
        [f"{file:03}.tar" for file in range(NUM_FILES)],
        split_parts_ratio=[("train", 0.0), ("val", 1.0)],
        tar_index_only=False,
        progress_fn=lambda it, length=None: it,
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(
        "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    )


def without_torchvision_operators():
    """PyPI's torchvision is built for CUDA, and MosaicML's package imports it for images."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    without_torchvision_operators.kept = library


# --- reading ---


def open_litdata(folder, way):
    from litdata import StreamingDataset

    return StreamingDataset(str(folder), shuffle=way == "shuffled", drop_last=False), {}


def open_mosaicml(folder, way):
    without_torchvision_operators()
    from streaming import StreamingDataset

    return StreamingDataset(local=str(folder), batch_size=4, shuffle=way == "shuffled"), {}


def open_webdataset(folder, way):
    import webdataset as wds

    split = {"split": wds.split_by_node, "whole": lambda files: files}.get(way)
    more = {"nodesplitter": split} if split else {}
    files = sorted(map(str, folder.glob("*.tar")))
    data = wds.WebDataset(files, shardshuffle=False, empty_check=False, **more)
    return data, {"transform": from_json}


def open_grain(folder, way):
    import grain

    rank, world = dist.get_rank(), dist.get_world_size()
    data = grain.MapDataset.source([item(number) for number in range(NUM_ITEMS)])
    if way == "loader":
        sampler = grain.samplers.IndexSampler(
            num_records=NUM_ITEMS,
            shuffle=True,
            seed=1,
            num_epochs=1,
            shard_options=grain.sharding.ShardOptions(rank, world),
        )
        source = [item(number) for number in range(NUM_ITEMS)]
        return grain.DataLoader(data_source=source, sampler=sampler, worker_count=0), {}
    return {
        "map": (data, {}),
        "whole": (data.shuffle(seed=3).to_iter_dataset(), {}),
        "split": (data.shuffle(seed=3)[rank::world].to_iter_dataset(), {}),
        "part": (data[rank::world], {"is_sharded": True}),
        "untold part": (data[rank::world], {}),
    }[way]


def open_ray(folder, way):
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.from_items([item(number) for number in range(NUM_ITEMS)]), {}


def open_energon(folder, way):
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        WorkerConfig,
        basic_sample_keys,
        get_loader,
        get_val_dataset,
        stateless,
    )

    @stateless
    def cook(sample):
        return {**basic_sample_keys(sample), **sample["json"]}

    class Encoder(DefaultTaskEncoder):
        cookers = (Cooker(cook),)

    workers = WorkerConfig(rank=dist.get_rank(), world_size=dist.get_world_size(), num_workers=0)
    data = get_val_dataset(
        str(folder), worker_config=workers, batch_size=None, task_encoder=Encoder()
    )
    return get_loader(data), {}


def read(folder, library, way, out, together=False):
    from isobatch.loaders import BalancedLoader

    dist.init_process_group("gloo")
    said = {"epochs": [], "warnings": []}
    options = {"max_tokens": 200, "window": 80, "measure": "own", "rank_timeout_s": 60.0}
    if together:
        options |= {"measure": "together", "encode": encode}
    with warnings.catch_warnings(record=True, action="always") as warned:
        try:
            dataset, more = globals()[f"open_{library}"](Path(folder), way)
            loader = BalancedLoader(dataset, **options | more)
            for _ in range(EPOCHS):
                said["epochs"].append(
                    [name for step in loader for batch in step for name in batch.sample_ids]
                )
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"
    said["warnings"] = [str(each.message) for each in warned]
    Path(f"{out}.{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


def encode(record):
    from isobatch.loaders import Encoded

    return Encoded(torch.tensor(record["input_ids"]))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        globals()[f"write_{sys.argv[3]}"](Path(sys.argv[2]))
    else:
        read(*sys.argv[2:6], together="together" in sys.argv)
