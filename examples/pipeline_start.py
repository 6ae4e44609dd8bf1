"""What planning and training a pipeline begin with: options that both have, ranks that meet, the
steps of a build.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from math import inf
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_models import MODELS

from balance.steps.step_planner import StepPlanner
from loaders import StreamingLoader

GIB = 2**30

# Before CUDA begins: what waits for the whole GPU while NCCL's kernels turn would wait for ever
# (docs/results/gpu.md).
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def common_options(description: str) -> argparse.ArgumentParser:
    """The options of both commands."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "build", help="output directory of `packer build` with a preset of the model"
    )
    parser.add_argument(
        "--model", choices=MODELS, help="default: the one that the build's preset is for"
    )
    parser.add_argument(
        "--config",
        type=Path,
        help="of transformers: config.json, or a folder with weights (default: a tiny model)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    # tensors of tiny models lose more to threads than they gain
    parser.add_argument("--threads", type=positive, default=1, help="of each rank on the CPU")
    return parser


def positive(text: str) -> int:
    """A number on the command line, above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def gib(text: str) -> float:
    """So much memory on the command line, 0 or more."""
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in GiB: give a number, as 0.5")
    return size


def join(kind: str) -> torch.device:
    """Meet the other ranks; -> this one's device. Without torchrun, there are no others."""
    backend, device = "gloo", torch.device(kind)
    if kind == "cuda":
        backend, device = (
            "cpu:gloo,cuda:nccl",
            torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))),
        )
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def open_loader(
    args: argparse.Namespace,
    pipelines: Sequence[Sequence[int]],
    micro_batches: int,
    device: torch.device,
    *,
    planner: StepPlanner | None = None,
    decode: bool = False,
) -> StreamingLoader:
    """The steps of this rank's replica; `pipelines` are the ranks of each. `decode`: images also
    behind stage 0.
    """
    rank = dist.get_rank()
    own = next(replica for replica, ranks in enumerate(pipelines) if rank in ranks)
    return StreamingLoader(
        args.build,
        dp_rank=own,
        dp_world_size=len(pipelines),
        micro_batches_per_step=micro_batches,
        seed=args.seed,
        planner=planner,
        device=device if device.type == "cuda" else None,
        # only the first stage sees pixels
        decode_images=decode or pipelines[own][0] == rank,
    )
