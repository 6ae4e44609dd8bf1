"""Train a tiny model that sees, hears and reads, every phase of a step balanced over the ranks
(OrchMLLM).

    torchrun --nproc-per-node 2 examples/train_three_modalities.py BUILD_DIR [--balance encoders]
    [--steps 60]

Data parallel. With `--balance all`, the loader's step planner deals each step's images, clips and
texts out to the ranks, phase by phase: what a rank encodes is read and decoded there, and only
there; features travel to where the language model wants them, and their gradients back. With
`--balance encoders`, texts stay where they were drawn: packed groups are even already. With
`--balance none`, each rank encodes and trains what it drew. The samples of a step, its loss and its
gradients are the same.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tiny_three_modalities import make_model
from torch import nn
from train_pipeline import join
from train_tiny import endless

from balance.errors import IsobatchError
from balance.metrics import dist_ratio
from balance.steps.step_planner import ENCODERS
from engine.dispatching.dispatch import PHASES, DispatchOptions
from engine.dispatching.routes import PlannedRoutes
from engine.dispatching.step_planner import DispatchedSteps
from engine.runtime.communication.feature_all_to_all import exchange_features
from engine.runtime.communication.process_groups import sum_gradients
from engine.runtime.errors import peer_errors
from loaders import StreamingLoader
from loaders.step_builder import StepBatches

BALANCED: dict[str, tuple[str, ...]] = {"none": (), "encoders": ENCODERS, "all": PHASES}

Work = list[tuple[int, int, int]]
"""What a rank does in each round of a step, by phase: image patches, frames of sound, LLM
tokens.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print a line per step; 0 if done, 1 if the run failed, 2 if the build cannot be
    used.
    """
    args = parse(argv)
    torch.set_num_threads(1)  # tensors this small lose more to threads than they gain
    join("cpu")
    try:
        run = make_run(args)
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        train(run, args.steps)
    except IsobatchError as error:
        print(error, file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Train a tiny model of three modalities, balanced phase by phase"
    )
    parser.add_argument("build", help="output directory of `packer build --model tiny_audio`")
    parser.add_argument(
        "--balance", choices=BALANCED, default="all", help="phases that are dealt out anew"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        help="encoders' batches go to nodes that want many of their features (default: as torchrun says)",
    )
    parser.add_argument("--micro-batches-per-step", type=int, default=2, help="per rank")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args(argv)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that one rank trains with."""

    model: nn.ModuleDict
    loader: StreamingLoader
    optimizer: torch.optim.Optimizer


def make_run(args: argparse.Namespace) -> Run:
    """This rank's part, once ranks have met. ConfigError or DataError if the build cannot be
    used.
    """
    planner, balanced = None, BALANCED[args.balance]
    if balanced:
        # nothing is padded in any phase of this model; an encoder that pads its batches is dealt
        # out by "padded"
        options = DispatchOptions(
            ranks_per_node=args.ranks_per_node,
            algorithms=dict.fromkeys(balanced, "sums"),
            padded=frozenset(),
            reads_directly=True,
        )
        planner = DispatchedSteps(options=options)
    loader = StreamingLoader(
        args.build,
        dp_rank=dist.get_rank(),
        dp_world_size=dist.get_world_size(),
        micro_batches_per_step=args.micro_batches_per_step,
        seed=args.seed,
        planner=planner,
        audio="features",
    )
    torch.manual_seed(args.seed)  # the same weights on all ranks
    model = make_model(loader)
    return Run(
        model=model, loader=loader, optimizer=torch.optim.AdamW(model.parameters(), lr=args.lr)
    )


def train(run: Run, steps: int) -> list[float]:
    """Train for `steps` steps, epoch after epoch; -> the loss of each, over all ranks."""
    losses, works = [], []
    begun, busy, data = time.perf_counter(), time.thread_time(), run.loader.stats().waiting_s
    for number, (_, step) in enumerate(zip(range(steps), endless(run.loader), strict=False)):
        run.optimizer.zero_grad()
        loss, work = accumulate(run.model, step)
        sum_gradients(run.model)
        run.optimizer.step()
        now = time.perf_counter(), time.thread_time(), run.loader.stats().waiting_s
        seconds, busy_s, data_s = now[0] - begun, now[1] - busy, now[2] - data
        begun, busy, data = now
        figures, done = gather([loss, sum(own[2] for own in work), busy_s, data_s], work)
        losses.append(float(figures[:, 0].sum()))
        works.append(done)
        if dist.get_rank() == 0:
            waiting = 1 - float(figures[:, 2].mean()) / seconds
            print(
                f"step {number:4d}  loss {losses[-1]:.4f}  tokens {int(figures[:, 1].sum()):6d}  {1000 * seconds:6.0f} "
                f"ms  waiting {waiting:5.1%}  for data {1000 * figures[:, 3].max():4.0f} ms  dist ratio "
                f"{ratios([done])}",
                flush=True,
            )
    if works and dist.get_rank() == 0:
        print(f"dist ratio of {len(works)} steps: {ratios(works)}")
    return losses


def accumulate(model: nn.ModuleDict, step: StepBatches) -> tuple[float, Work]:
    """Add the gradients of a step; -> this rank's part of its mean loss, and what this rank did.

    All ranks call it: features come from others, where a planner has dealt out the encoders' work.
    """
    nothing_travels = ({},) * len(step)
    rounds = step.note.rounds if isinstance(step.note, PlannedRoutes) else nothing_travels
    total, work = 0.0, []
    for number, (batch, routes) in enumerate(zip(step, rounds, strict=True)):
        # an encoder without a route works on what came with the micro-batch
        given = {
            name: step.encoders[name][number] if name in routes else batch for name in ENCODERS
        }
        made = {name: model[name](own) for name, own in given.items()}
        came = exchange_features({name: made[name] for name in routes}, routes)
        # divided by the step's labels: parts and gradients of ranks then only have to be summed
        loss = model["language"](batch, made | came.features) / max(1, batch.num_loss_tokens)
        (loss + came.link).backward()
        total += loss.item()
        work.append(
            (
                len(given["vision"].pixel_values),
                len(given["audio"].audio_values),
                len(batch.input_ids),
            )
        )
    return total, work


def sum_gradients(model: nn.ModuleDict) -> None:
    """Over all ranks, once per step. All encoders always run, if only with nothing, so none lacks
    gradients.
    """
    sum_gradients([weight.grad for weight in model.parameters()], dist.group.WORLD)


def gather(figures: list[float], work: Work) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """(ranks, figures) and (rounds, ranks, phases) of all ranks."""
    mine = torch.tensor([*figures, *(count for own in work for count in own)], dtype=torch.float64)
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with peer_errors(range(len(ranks))):
        dist.all_gather(ranks, mine)
    told, done = torch.stack(ranks).split([len(figures), len(mine) - len(figures)], dim=1)
    return told.numpy(), done.long().unflatten(1, (-1, len(PHASES))).transpose(0, 1).numpy()


def ratios(works: Sequence[NDArray[np.int64]]) -> str:
    """By phase, the share of the ranks' work that is waiting for the slowest in each round;
    (rounds, ranks, phases).
    """
    done = np.concatenate(works)
    shares = {
        name: dist_ratio(done[..., place].ravel(), done.shape[1])
        for place, name in enumerate(PHASES)
    }
    return "  ".join(f"{name} {share:.1%}" for name, share in shares.items())


if __name__ == "__main__":
    sys.exit(main())
