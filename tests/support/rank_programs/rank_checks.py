"""Loaders on ranks that agree, disagree, or do not come; each says how its iterator began."""

import shutil
import time
import warnings
from functools import partial
from itertools import islice

import numpy as np
import pyarrow as pa
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from isobatch.common.errors import ConfigError, IsobatchError
from isobatch.loaders import StepDataset, StorageOptions, StreamingLoader
from isobatch.loaders.ranks import compare
from support.loading.step_planners import dispatch, repack


def with_other_index(build, folder):
    """A copy of a build whose index says of each group that it is shorter."""
    shutil.copytree(build, folder)
    with pa.ipc.open_file(str(build / "index.arrow")) as file:
        table = file.read_all()
    place = table.schema.get_field_index("num_text_tokens")
    field = table.schema.field(place)
    shorter = [count - 1 for count in table[field.name].to_pylist()]
    table = table.set_column(place, field, pa.array(shorter, field.type))
    with pa.ipc.new_file(str(folder / "index.arrow"), table.schema) as writer:
        writer.write_table(table)
    return folder


def leave_out(columns, count):
    """A filter: all but the first samples."""
    return np.arange(len(columns["num_text_tokens"])) >= count


def begin(said, name, loader):
    """Begin to iterate, and say what came of it."""
    begun = time.monotonic()
    try:
        next(iter(loader))
        said[name] = ["", "went on", 0.0]
    except IsobatchError as error:
        said[name] = [type(error).__name__, str(error), time.monotonic() - begun]


def disagree(said, folder):
    """On two ranks: what each option, build and position that only rank 1 has leads to."""
    rank = dist.get_rank()
    build, other = folder / "build", folder / "other"
    index = folder / "index"

    def load(url=build, **options):
        return StreamingLoader(url, workers=0, **options)

    own = {
        "agree": {},
        "build": {"url": other},
        "weights": {"url": [(build, 1.0), (other, 0.25)]},
        "seed": {"seed": 7},
        "balance": {"balance": 0.9},
        "remainder": {"remainder": "drop"},
        "regroup": {"regroup": "epoch"},
        "regroup_window": {"regroup": "epoch", "regroup_window": 9},
        "micro_batches_per_step": {"micro_batches_per_step": 2},
        "loss_normalizer": {"loss_normalizer": "step"},
        "planner": {"planner": repack},
        "dp_world_size": {"dp_rank": 1, "dp_world_size": 3},
        "dp_rank": {"dp_rank": 0, "dp_world_size": 2},
        "index": {"url": index, "storage": StorageOptions(verify="never")},
        "filter": {"filter": partial(leave_out, count=1)},
        "evaluation": {"shuffle": False},
        "may differ": {"images": "encoded", "prefetch_bytes": 5, "device": "cpu"},
    }
    others = {
        "balance": {"balance": 0.5},
        "weights": {"url": [(build, 1.0), (other, 0.5)]},
        "regroup_window": {"regroup": "epoch", "regroup_window": 8},
        "planner": {"planner": dispatch},
        "dp_rank": {"dp_rank": 0, "dp_world_size": 2},
        "index": {"storage": StorageOptions(verify="never")},
        "evaluation": {"shuffle": False},
        "filter": {"filter": partial(leave_out, count=2)},
    }
    for name, options in own.items():
        begin(said, name, load(**(options if rank == 1 else others.get(name, {}))))
    resume(said, load)
    fail_to_open(said, load, folder)

    # in a worker process nothing is compared, but here
    loader = load(seed=rank)
    forked = {"num_workers": 1, "multiprocessing_context": "fork"}
    steps = DataLoader(StepDataset(loader), batch_size=None, **forked)
    said["worker"] = len(list(islice(steps, 2)))
    begin(said, "before a worker", Checked(loader))
    begin(said, "switched off", load(seed=rank, check_ranks=False))

    # nobody waits longer than the limit for a rank that does not come, or is late; one says it soon
    loader = StreamingLoader(build, workers=0, rank_timeout_s=1)
    compare.PATIENCE_S = 0.25
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if rank == 0:
            begin(said, "missing", loader)
        dist.barrier()
        if rank == 1:
            begin(said, "missing", loader)
    said["warnings"] = [str(each.message) for each in warned]


def resume(said, load):
    """States: the same on both ranks, of different positions, or refused on one of them."""
    rank = dist.get_rank()
    loader = load()
    states = [loader.state_dict()] + [loader.state_dict() for _ in loader]
    begin(said, "next epoch", loader)
    given = {
        "same state": (states[3], states[3]),
        "state": (states[3], states[2]),
        "resumed alone": (states[0], states[1]),
        "epoch": (states[-1], states[-1] | {"epoch": 5}),
    }
    for name, each in given.items():
        loader = load()
        loader.load_state_dict(each[rank])
        begin(said, name, loader)
    for victim in (0, 1):
        # one rank has another seed, and gives up
        loader = load(seed=int(rank == victim))
        if refused(loader, states[0]) is None:
            begin(said, f"{victim} refused", loader)
        # one rank has no state, and begins without
        loader = load()
        said[f"{victim} had none"] = refused(loader, {} if rank == victim else states[0])
        begin(said, f"{victim} begins", loader)


def fail_to_open(said, load, folder):
    """One rank's build is not there, or it has a wrong option; then all go on to the next."""
    rank = dist.get_rank()
    wrong = {"has no build": {"url": folder / "nowhere"}, "has a wrong option": {"balance": 2.0}}
    for victim in (0, 1):
        for what, options in wrong.items():
            if rank == victim:
                said[f"{victim} {what}"] = begin_unopened(partial(load, **options))
            else:
                begin(said, f"{victim} {what}", load())
        begin(said, f"{victim} opens another", load())


def begin_unopened(opens):
    """What a loader says that cannot be opened."""
    try:
        opens()
    except IsobatchError as error:
        return str(error)


def refused(loader, state):
    """What the loader says of a state."""
    try:
        loader.load_state_dict(state)
    except ConfigError as error:
        return str(error)


class Checked:
    """Compares when it is iterated, and gives nothing."""

    def __init__(self, loader):
        self._loader = loader

    def __iter__(self):
        self._loader.check_ranks()
        yield None


def mesh_ranks(said, folder):
    """On four ranks: what dp 2 x tp 2 give each, by a mesh, a group, and meshes that differ."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def ids(**options):
        loader = StreamingLoader(folder / "build", workers=0, **options)
        return [i for step in loader for batch in step for i in batch.sample_ids]

    said["mesh"] = ids(device_mesh=mesh)
    said["group"] = ids(process_group=mesh.get_group("dp"))
    said["submesh"] = ids(device_mesh=mesh["dp"])
    said["explicit"] = ids(dp_rank=rank // 2, dp_world_size=2)
    flat = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    said["flat"] = ids(device_mesh=flat)
    said["world"] = ids()
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    loader = StreamingLoader(folder / "build", workers=0, device_mesh=turned if rank == 3 else mesh)
    begin(said, "other mesh", loader)
