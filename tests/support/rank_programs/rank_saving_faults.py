"""What ranks run in `test_saving_faults`, each writing down what it saw; as a program, on a disk
that it fills up.
"""

import json
import os
import resource
import signal
import sys
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from isobatch.common.errors import IsobatchError
from isobatch.engine.runtime.checkpoints import training_state as saving
from isobatch.engine.runtime.checkpoints.training_state import (
    Progress,
    load_state,
    newest_state,
    save_state,
)
from support.models.toy_model import make_model
from support.rank_programs.rank_faults import batches_of, make_pipeline
from support.ranks import run_ranks


class Trained:
    """A pipeline of all ranks behind one step."""

    def __init__(self, model=None):
        self.pipeline = make_pipeline(dist.get_world_size(), model=model)
        self.optimizer = torch.optim.AdamW(self.pipeline.parameters(), lr=1e-3)
        self.train()

    def train(self):
        self.optimizer.zero_grad()
        loss = self.pipeline.step(batches_of(3), 10).loss
        self.pipeline.reduce_gradients()
        self.optimizer.step()
        return loss

    def save(self, folder, step):
        return save_state(
            folder, self.pipeline.layers, self.optimizer, Progress(step=step, loader={})
        )

    def load(self, folder):
        return load_state(folder, self.pipeline.layers, self.optimizer)


def note(said, name, work):
    """Whether some work fails, how, and after how long."""
    begun = time.monotonic()
    try:
        work()
        said[name] = None
    except IsobatchError as error:
        said[name] = {
            "type": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - begun,
        }


def lose(said, folder, victim, when):
    """A rank dies when its tensors are written, or are about to be read."""
    folder, trained = Path(folder), Trained()
    trained.save(folder, 1)
    if dist.get_rank() == victim:
        owner, name = {"save": (os, "fsync"), "load": (saving._StateReader, "read_metadata")}[when]
        setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    note(said, "lost", lambda: trained.save(folder, 2) if when == "save" else trained.load(folder))


def fail_while_saving(said, folder):
    """A rank may write files of a few bytes only; then as long as it likes again. And a folder that
    is a file.
    """
    folder, trained = Path(folder), Trained()
    trained.save(folder, 1)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    note(said, "save", lambda: trained.save(folder, 2))
    said["left"] = sorted(path.name for path in folder.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if dist.get_rank() == 0:
        (folder.parent / "file").touch()
    note(said, "no folder", lambda: trained.save(folder.parent / "file", 2))
    # the one before is as it was, and a run that goes on can save again
    said["loaded"] = trained.load(folder).step
    trained.train()
    note(said, "again", lambda: trained.save(folder, 3))
    said["newest"] = newest_state(folder).name


def damage(said, folder):
    """Tensors that one rank cannot read, then what all must know, on each of which all ranks
    fail.
    """
    folder, trained = Path(folder), Trained()
    trained.save(folder, 1)
    other = make_model(seed=1)
    other.layers[-1].norm = torch.nn.LayerNorm(
        3
    )  # only the last layer's rank finds another shape than was saved
    model = make_pipeline(dist.get_world_size(), model=other)
    note(said, "other model", lambda: load_state(folder, model.layers, None))
    for name, pattern in {"tensors": "__1_*", "metadata": ".metadata"}.items():
        dist.barrier()
        if dist.get_rank() == 0:
            (path,) = newest_state(folder).glob(pattern)
            path.write_bytes(path.read_bytes()[:40])
        dist.barrier()
        note(said, name, lambda: trained.load(folder))
    said["trains"] = trained.train()


def fill_disk(said, folder):
    """The disk is full when a state is to be written; then there is room again."""
    folder, trained = Path(folder), Trained()
    trained.save(folder, 1)
    if dist.get_rank() == 0:
        fill(folder / "filling")
    dist.barrier()
    note(said, "save", lambda: trained.save(folder, 2))
    said["left"] = sorted(path.name for path in folder.iterdir())
    said["loaded"] = trained.load(folder).step
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "filling").unlink()
    dist.barrier()
    note(said, "again", lambda: trained.save(folder, 2))
    said["newest"] = newest_state(folder).name


def fill(path):
    """Write until nothing goes any more."""
    with path.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            for _ in count():
                try:
                    file.write(b"x" * size)
                except OSError:
                    break


if __name__ == "__main__":
    place, disk = map(Path, sys.argv[1:])
    print(json.dumps(run_ranks(place, 2, fill_disk, str(disk))))
