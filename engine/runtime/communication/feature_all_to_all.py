"""Features from the ranks that encode to the ranks that train: OrchMLLM's dispatcher at run time,
data parallel.

For trainers whose loader has `engine.dispatching.step_planner.DispatchedSteps` as its step planner:
each rank encodes what the plan dealt to it, `exchange_features` brings the features of a round to
where its micro-batches are in one all-to-all per encoder, and the backward pass brings their
gradients back the same way (OrchMLLM, section 6). A step:

    rounds = step.note.rounds  # what the planner answered comes with the step
    for number, (batch, routes) in enumerate(zip(step, rounds)):
        made = {name: encoders[name](step.encoders[name][number]) for name in routes} came =
        exchange_features(made, routes) loss = language_model(batch, came.features) /
        batch.num_loss_tokens  # in place of image and audio tokens (loss + came.link).backward()
    # now sum gradients over all ranks: once per step, not their mean

Every rank takes part in every exchange, whatever it holds. What a rank with nothing to encode gives
is an empty tensor of the usual width; `came.link` is 0 and lets a rank take part in the backward
pass too, though it uses no features.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from balance.errors import ConfigError
from balance.steps.all_to_all import Exchange
from balance.steps.step_planner import StepAssignment
from balance.types import Groups, IntArray
from engine.dispatching.routes import Route, step_routes
from engine.runtime.errors import peers
from engine.runtime.stage_io import Batch


class DispatchedBatches(Protocol):
    """A step out of a loader with a step planner: `loaders.StepBatches`."""

    @property
    def encoders(self) -> Mapping[str, Sequence[Batch]]:
        """By encoder, this rank's batches."""

    def __iter__(self) -> Iterator[Batch]:
        """This rank's micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What a rank has after an exchange."""

    features: dict[str, Tensor]
    """By encoder, (features of this rank's micro-batch, ...), in the order of its samples."""
    link: Tensor
    """0, to be added to the loss: so that a rank that uses no features passes gradients on."""


def exchange_features(
    made: Mapping[str, Tensor],
    routes: Mapping[str, Route],
    group: dist.ProcessGroup | None = None,
    *,
    frozen: Collection[str] = (),
) -> Exchanged:
    """Bring features to the ranks that use them; a collective of all ranks of `group`,
    differentiable.

    `made`: by encoder, (features that this rank made, ...), sample after sample; the same width and
    dtype on all ranks. `frozen`: encoders that want no gradients, the same on all ranks. One
    all-to-all per encoder that has anything to send on any rank, in the order of their names, there
    and back. PeerLost, there or back, if another rank has gone.
    """
    names = sorted(routes)
    for name in names:
        wanted = len(routes[name].tokens.send_places)
        if len(made[name]) != wanted:
            raise ConfigError(
                f"the {name} encoder made {len(made[name])} features, its batch should give {wanted}; an encoder gives "
                "one per token that stands for it"
            )
    trained = tuple(name not in frozen for name in names)
    # something here must want a gradient, or this rank would be left out of the backward pass
    anchor = torch.zeros(
        (), requires_grad=any(trained), device=made[names[0]].device if names else None
    )
    ways = tuple(_Way.of(routes[name], made[name].device) for name in names)
    link, *came = _AllToAlls.apply(anchor, ways, trained, group, *(made[name] for name in names))  # type: ignore[no-untyped-call]
    return Exchanged(features=dict(zip(names, came, strict=True)), link=link)


def agree_on_routes(
    step: DispatchedBatches, tokens: Mapping[str, int], group: dist.ProcessGroup | None = None
) -> tuple[dict[str, Route], ...]:
    """Routes of each round of a step, as all ranks' batches are; a collective of all ranks of
    `group`, once per step.

    For planners that give no routes with their steps, as `DispatchedSteps` does: its
    `step.note.rounds` are the same. `tokens`: by encoder, the id that stands for it in `input_ids`.
    Ranks tell each other their sample ids and how many features each sample has. ConfigError if a
    sample is twice in the step.
    """
    names = sorted(step.encoders)
    own = {
        "used": [
            (batch.sample_ids, {name: _features(batch, tokens[name]) for name in names})
            for batch in step
        ],
        "made": {name: [batch.sample_ids for batch in step.encoders[name]] for name in names},
    }
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    used = [(ids, counts) for rank in every for ids, counts in rank["used"]]
    numbers: dict[str, int] = {}
    for sample in (sample for ids, _ in used for sample in ids):
        if sample in numbers:
            raise ConfigError(
                f"sample {sample!r} is twice in one step: its features cannot be told apart by their ids"
            )
        numbers[sample] = len(numbers)
    work = StepAssignment(
        micro_batches=tuple(_numbered([ids for ids, _ in rank["used"]], numbers) for rank in every),
        encoders={
            name: tuple(_numbered(rank["made"][name], numbers) for rank in every) for name in names
        },
    )
    nothing = np.empty(0, np.int64)
    features = {
        name: np.concatenate([nothing, *(counts[name] for _, counts in used)]) for name in names
    }
    return step_routes(work, features, dist.get_rank(group))


def _features(batch: Batch, token: int) -> NDArray[np.int64]:
    """Tokens that stand for an encoder's features, of each sample of a micro-batch."""
    running = np.concatenate([[0], np.cumsum((batch.input_ids == token).cpu().numpy())])
    return np.asarray(np.diff(running[batch.cu_seqlens.cpu().numpy()]))


def _numbered(batches: Sequence[Sequence[str]], numbers: Mapping[str, int]) -> Groups:
    samples: IntArray = np.array([numbers[sample] for ids in batches for sample in ids], np.int64)
    return Groups(samples, np.cumsum([0, *map(len, batches)]))


@dataclass(frozen=True, slots=True)
class _Way:
    """A route on a device; `turned`, that of the gradients."""

    send_places: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    receive_places: Tensor
    travels: bool

    @classmethod
    def of(cls, route: Route, device: torch.device) -> _Way:
        tokens: Exchange = route.tokens
        sent, received = (
            torch.from_numpy(p).to(device) for p in (tokens.send_places, tokens.receive_places)
        )
        return cls(
            sent,
            tokens.send_counts.tolist(),
            tokens.receive_counts.tolist(),
            received,
            route.travels,
        )

    @property
    def turned(self) -> _Way:
        return _Way(
            self.receive_places,
            self.receive_counts,
            self.send_counts,
            self.send_places,
            self.travels,
        )

    def move(self, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Rows out of this rank's source order into its target order, by way of the other ranks."""
        came = sent = rows.index_select(0, self.send_places)
        if self.travels:
            came = rows.new_empty((len(self.receive_places), *rows.shape[1:]))
            with peers(dist.get_process_group_ranks(group)):
                dist.all_to_all_single(
                    came, sent, self.receive_counts, self.send_counts, group=group
                )
        return torch.empty_like(came).index_copy_(0, self.receive_places, came)


class _AllToAlls(torch.autograd.Function):
    """All encoders' exchanges of a round as one operation.

    So the backward pass calls other ranks in one order everywhere, whatever uses the features on
    each of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        ways: tuple[_Way, ...],
        trained: tuple[bool, ...],
        group: dist.ProcessGroup | None,
        *made: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.ways, ctx.trained, ctx.group = ways, trained, group
        came = [way.move(rows.detach(), group) for way, rows in zip(ways, made, strict=True)]
        ctx.mark_non_differentiable(
            *(rows for rows, wanted in zip(came, trained, strict=True) if not wanted)
        )
        return torch.zeros_like(anchor), *came

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = [
            way.turned.move(gradient, ctx.group) if wanted else None
            for way, wanted, gradient in zip(ctx.ways, ctx.trained, gradients[1:], strict=True)
        ]
        return None, None, None, None, *back
