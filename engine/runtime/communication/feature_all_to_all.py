"""Encoder features to the ranks that train with them (OrchMLLM).

For data-parallel trainers whose loader plans with `DispatchedSteps`
(`engine.dispatching.dispatch`). Each rank encodes what the plan assigned to it.
`exchange_features` sends the features of a round to their micro-batches in one all-to-all per
encoder, and the backward pass returns their gradients the same way (OrchMLLM, section 6). A step:

    for number, (batch, routes) in enumerate(zip(step, step.note.rounds)):
        features = {name: encoders[name](step.encoders[name][number]) for name in routes}
        received = exchange_features(features, routes)
        loss = batch.reduce_loss(language_model(batch, received.features))
        (loss + received.link).backward()
    # then sum the gradients over all ranks, once per step; do not average them

Every rank takes part in every exchange; with nothing to encode, it gives an empty tensor of the
usual width. Through `received.link`, which is 0, it takes part in the backward pass in any case.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from isobatch.common.errors import ConfigError
from isobatch.engine.dispatching.routes import Route
from isobatch.engine.runtime.errors import peer_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedFeatures:
    """Features of a rank after an exchange."""

    features: dict[str, Tensor]
    """Features of this rank's micro-batch by encoder, (features, ...), in the order of samples."""
    link: Tensor
    """0, to be added to the loss: a rank that uses no features still takes part in backward."""


def exchange_features(
    features: Mapping[str, Tensor],
    routes: Mapping[str, Route],
    group: dist.ProcessGroup | None = None,
    *,
    frozen: Collection[str] = (),
) -> ReceivedFeatures:
    """Send features to the ranks that use them; a differentiable collective over `group`.

    `features`: by encoder, (features that this rank made, ...), sample after sample; the same width
    and dtype on all ranks. `frozen`: encoders without gradients, the same on all ranks. One
    all-to-all per encoder that has anything to send on any rank, in the order of their names, both
    ways. PeerLost, in either direction, if another rank is lost.
    """
    names = sorted(routes)
    for name in names:
        expected = len(routes[name].tokens.send_places)
        if len(features[name]) != expected:
            raise ConfigError(
                f"the {name} encoder made {len(features[name])} features, its batch should give"
                f" {expected}; an encoder gives one per token that stands for it"
            )
    trained = tuple(name not in frozen for name in names)
    # one input must require a gradient, or this rank would be left out of the backward pass
    anchor = torch.zeros(
        (), requires_grad=any(trained), device=features[names[0]].device if names else None
    )
    exchanges = tuple(_Exchange.of(routes[name], features[name].device) for name in names)
    link, *received = _AllToAlls.apply(  # type: ignore[no-untyped-call]
        anchor, exchanges, trained, group, *(features[name] for name in names)
    )
    return ReceivedFeatures(features=dict(zip(names, received, strict=True)), link=link)


class _Exchange(NamedTuple):
    """A route's permutation and counts, on a device; in reverse order, that of the gradients."""

    send_places: Tensor
    send_counts: list[int]
    travels: bool
    receive_counts: list[int]
    receive_places: Tensor

    @classmethod
    def of(cls, route: Route, device: torch.device) -> "_Exchange":
        tokens = route.tokens
        return cls(
            torch.from_numpy(tokens.send_places).to(device),
            tokens.send_counts.tolist(),
            route.travels,
            tokens.receive_counts.tolist(),
            torch.from_numpy(tokens.receive_places).to(device),
        )

    def run(self, rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Rows of this rank in source order -> rows of this rank in target order."""
        received = sent = rows.index_select(0, self.send_places)
        if self.travels:
            received = rows.new_empty((len(self.receive_places), *rows.shape[1:]))
            with peer_errors(dist.get_process_group_ranks(group)):
                dist.all_to_all_single(
                    received, sent, self.receive_counts, self.send_counts, group=group
                )
        return torch.empty_like(received).index_copy_(0, self.receive_places, received)


class _AllToAlls(torch.autograd.Function):
    """A round's exchanges as one operation: backward calls them in one order on all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        exchanges: tuple[_Exchange, ...],
        trained: tuple[bool, ...],
        group: dist.ProcessGroup | None,
        *features: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.exchanges, ctx.trained, ctx.group = exchanges, trained, group
        pairs = zip(exchanges, features, strict=True)
        received = [exchange.run(rows.detach(), group) for exchange, rows in pairs]
        ctx.mark_non_differentiable(
            *(rows for rows, wanted in zip(received, trained, strict=True) if not wanted)
        )
        return torch.zeros_like(anchor), *received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        parts = zip(ctx.exchanges, ctx.trained, gradients[1:], strict=True)
        returned = [
            _Exchange(*exchange[::-1]).run(gradient, ctx.group) if wanted else None
            for exchange, wanted, gradient in parts
        ]
        return None, None, None, None, *returned
