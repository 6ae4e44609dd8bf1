"""Data-parallel training of the tiny model of three modalities, with phases balanced or not."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from isobatch.balance.steps.step_planner import ENCODERS
from isobatch.engine.dispatching.dispatch import PHASES, DispatchedSteps, DispatchOptions
from isobatch.engine.dispatching.routes import PlannedRoutes
from isobatch.engine.runtime.communication.collectives import world_errors
from isobatch.engine.runtime.communication.feature_all_to_all import exchange_features
from isobatch.engine.runtime.communication.process_groups import sum_gradients
from isobatch.engine.train.step_source import endless
from isobatch.loaders import StreamingLoader
from support.models.tiny_three_modalities import make_three_modalities

BALANCE = 0.5
"""Of the loader: less than the default, so that the planner has something to even out."""
BALANCED = {"none": (), "encoders": ENCODERS, "all": PHASES}


@dataclass(frozen=True, kw_only=True)
class Run:
    """All that one rank trains with."""

    model: nn.ModuleDict
    loader: StreamingLoader
    optimizer: torch.optim.Optimizer


def make_run(build, balance, *, seed=0, micro_batches=2, check_ranks=True):
    planner, balanced = None, BALANCED[balance]
    if balanced:
        options = DispatchOptions(
            ranks_per_node=1,  # so that it matters where encoders' batches go
            algorithms=dict.fromkeys(balanced, "sums"),
            padded=frozenset(),
            reads_directly=True,
        )
        planner = DispatchedSteps(options=options)
    loader = StreamingLoader(
        build,
        dp_rank=dist.get_rank(),
        dp_world_size=dist.get_world_size(),
        micro_batches_per_step=micro_batches,
        seed=seed,
        planner=planner,
        audio="features",
        balance=BALANCE,
        check_ranks=check_ranks,
    )
    torch.manual_seed(seed)  # the same weights on all ranks
    model = make_three_modalities(loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Run(model=model, loader=loader, optimizer=optimizer)


def train(run, steps):
    """-> the loss of each step, over all ranks."""
    losses = []
    for _, step in zip(range(steps), endless(run.loader), strict=False):
        run.optimizer.zero_grad()
        loss, work = accumulate(run.model, step)
        sum_over_ranks(run.model)
        run.optimizer.step()
        figures, _ = gather([loss], work)
        losses.append(float(figures.sum()))
    return losses


def accumulate(model, step):
    """Add the gradients of a step; -> this rank's part of its mean loss, and its work: patches,
    frames and tokens of each round.
    """
    nothing_is_sent = ({},) * len(step)
    rounds = step.note.rounds if isinstance(step.note, PlannedRoutes) else nothing_is_sent
    total, work = 0.0, []
    for number, (batch, routes) in enumerate(zip(step, rounds, strict=True)):
        # an encoder without a route works on what came with the micro-batch
        given = {
            name: step.encoders[name][number] if name in routes else batch for name in ENCODERS
        }
        made = {name: model[name](own) for name, own in given.items()}
        received = exchange_features({name: made[name] for name in routes}, routes)
        loss = model["language"](batch, made | received.features) / max(1, batch.num_loss_tokens)
        (loss + received.link).backward()
        total += loss.item()
        sizes = given["vision"].pixel_values, given["audio"].audio_values, batch.input_ids
        work.append(tuple(map(len, sizes)))
    return total, work


def sum_over_ranks(model):
    sum_gradients([weight.grad for weight in model.parameters()], dist.group.WORLD)


def gather(figures, work):
    """(ranks, figures) and (rounds, ranks, phases) of all ranks."""
    mine = torch.tensor([*figures, *(count for own in work for count in own)], dtype=torch.float64)
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with world_errors():
        dist.all_gather(ranks, mine)
    told, done = torch.stack(ranks).split([len(figures), len(mine) - len(figures)], dim=1)
    return told.numpy(), done.long().unflatten(1, (-1, len(PHASES))).transpose(0, 1).numpy()
