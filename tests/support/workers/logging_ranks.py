"""A rank that trains on nothing but logs, and says what it has written."""

import os

import torch.distributed as dist

from isobatch.loaders import StreamingLoader


def log_alone(said, build, folder):
    """An epoch of two ranks, both asked to log to one folder."""
    loader = StreamingLoader(build, log_to=f"tensorboard:{folder}", log_every=3, workers=0)
    said["steps"] = len(list(loader))
    loader.close()
    said["pid"] = os.getpid()
    said["logs"] = loader._logger is not None


def log_in_groups(said, build):
    """Two ranks with a data-parallel group each, as beside tensor or pipeline parallelism."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    steps = []
    options = {"process_group": groups[dist.get_rank()], "workers": 0, "log_every": 1}
    loader = StreamingLoader(build, log_to=lambda _, step: steps.append(step), **options)
    said["steps"] = len(list(loader))
    loader.close()
    said["logged"] = len(steps)
