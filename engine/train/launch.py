"""Start of a rank's process: CUDA's settings, the process group and the device."""

import os

import torch
import torch.distributed as dist

from isobatch.common.command_line import WRONG_CALL, require_writable
from isobatch.common.errors import ConfigError
from isobatch.engine.runtime.communication.collectives import any_rank
from isobatch.engine.train.options import RunConfig

FILES = ("figures", "trace")
OUTPUTS = (*FILES, "state", "export", "out")
"""Options that name what is written."""


def join_ranks(config: RunConfig) -> torch.device:
    """Meet the other ranks; -> this rank's device. Without torchrun it is the only rank."""
    # before CUDA starts: else what waits for the whole GPU hangs in NCCL (docs/results/gpu.md)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no GPU here; leave the option out, or give cpu"
        )
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.set_num_threads(config.threads)
    backend, device = "gloo", torch.device("cpu")
    if (config.device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return device


def require_outputs(config: RunConfig) -> None:
    """Raise ConfigError if the first rank, which writes, cannot write an output of the run.

    All ranks call it; the others exit then. Else hours of work would end in such an error.
    """
    problem = None
    try:
        for name in OUTPUTS if is_first_rank() else ():
            if (path := getattr(config, name, None)) is not None:
                require_writable(f"--{name}", path, is_file=name in FILES)
    except ConfigError as error:
        problem = error
    if any_rank(problem is not None):
        raise problem or SystemExit(WRONG_CALL)


def is_first_rank() -> bool:
    """Whether this rank writes files and prints: the first, also before the ranks have met."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
