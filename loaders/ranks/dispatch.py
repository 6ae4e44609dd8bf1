"""`dispatch`: an encoder's inputs to other ranks and its outputs back (OrchMLLM).

In place of `features = encoder(pixels, grids)` in a model that is trained data-parallel:

    features = dispatch(encode, {"pixels": pixels, "grids": grids}, sizes, group, merge=4)

Each rank then encodes an equal part of all ranks' images (section 5.1 of the paper: an algorithm
for how the encoder batches), on a rank of its node where that is possible (5.2), and has the
features of its own images as if it had encoded them. Losses and gradients stay those of the step:
the ranks' gradients of the encoder are summed or averaged by the trainer as before. A whole model
is such an encoder too, with tokens as rows and a loss or logits per token as outputs.

Two all-to-alls per tensor, both ways; pixels travel. Where a dataset can be read on any rank,
`rebalance` of references moves less.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from isobatch.balance.dispatching.all_to_all import Permutation, from_assignment
from isobatch.balance.dispatching.node_placement import place_batches
from isobatch.balance.dispatching.post_balancing import Algorithm, assign_batches, batch_costs
from isobatch.common.errors import ConfigError
from isobatch.common.types import IntArray
from isobatch.loaders.ranks.mesh import data_group
from isobatch.loaders.ranks.object_exchange import all_gather_rows

MOST_INPUTS = 32
"""Twice as many tensors as `encode` may take."""
MIN_GAIN = 0.02
"""Share of the slowest rank's work that a dispatch must save."""


def dispatch(  # noqa: PLR0913 - options by name
    encode: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Mapping[str, Tensor],
    sizes: Tensor | Sequence[int],
    group: dist.ProcessGroup | DeviceMesh | None = None,
    *,
    merge: int = 1,
    outputs: Literal["tokens", "items"] = "tokens",
    algorithm: Algorithm = "sums",
    weight: float = 0.0,
    ranks_per_node: int = 8,
    min_gain: float = MIN_GAIN,
    example: Mapping[str, Tensor] | None = None,
) -> Any:
    """`encode(**inputs)`, worked on by all ranks of `group` alike; what it returns.

    `inputs`: tensors of this rank's items (images, clips, samples) by argument of `encode`, the
    same names, widths and types on all ranks: with a row per item, or one per token, item after
    item. `sizes`: tokens (ViT patches) of each item, (items,). A rank without items gives tensors
    without rows. `encode` returns a tensor or several, each with `size / merge` rows
    per item, or with one if `outputs` are of "items".

    `algorithm`: how items become batches ("sums" for packed encoders, "padded", "squares",
    "padded_attention", "conv": `balance.dispatching.post_balancing`); `weight` of squared sizes,
    as there. Nothing moves, and `encode` has this rank's inputs, if that saves less than `min_gain`
    of the slowest rank's work as that algorithm counts it (`batch_costs` there), or there are fewer
    items than ranks. No rank gets more tokens (of "padded" with padding) than the fullest brought.

    Many encoders fail without items. Where nothing moves, a rank that has none encodes the cheapest
    item of another rank, and where no rank has any, `example`: inputs of one item, of which only
    widths and types matter. Such results count for nothing, and their gradients are 0. ConfigError
    if there is no `example` and `encode` cannot do without items.

    A collective, and its backward pass is one: a rank whose loss does not use the features adds
    `features.sum() * 0` to it. Next to DDP or FSDP give a group of its own (`dist.new_group`).
    ConfigError on all ranks if any's tensors do not fit its sizes, on one for what `encode` made.
    """
    group = data_group(group)
    if merge < 1 or outputs not in ("tokens", "items"):
        raise ConfigError(f"merge is {merge}, outputs {outputs!r}; give 1 or more, tokens or items")
    if 2 * len(inputs) > MOST_INPUTS:
        raise ConfigError(f"{len(inputs)} inputs; give {MOST_INPUTS // 2} at most")
    inputs = dict(sorted(inputs.items()))  # tensors meet in this order
    item_sizes = np.asarray(torch.as_tensor(sizes).cpu(), dtype=np.int64).reshape(-1)
    named = (*get_args(Algorithm), algorithm).index(algorithm), outputs == "items"
    options = [merge, weight, ranks_per_node, min_gain, *named, example is not None]
    problem = ""
    if example is not None and {*example} != {*inputs}:
        problem = f"example has {', '.join(example)}, and inputs {', '.join(inputs)}; give the same"
    lengths, counts, per_token = _gathered(inputs, item_sizes, options, problem, group)
    if not len(lengths):
        return _of_nothing(encode, inputs, example)
    if len(counts) == 1:
        return encode(**inputs)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    ranks = _ranks(lengths, offsets, (algorithm, weight), ranks_per_node, min_gain)
    if ranks is None:
        lent = _lent(inputs, lengths, offsets, per_token, group) if not counts.all() else inputs
        return encode(**inputs) if len(item_sizes) else _no_rows(encode(**lent))
    items = from_assignment(ranks, offsets)
    tokens = items.expand(lengths)
    moved = {
        name: _exchanged(rows, tokens if name in per_token else items, group)
        for name, rows in inputs.items()
    }
    made = encode(**moved)
    back = (items if outputs == "items" else items.expand(lengths // merge)).inverse()
    expected = int(np.diff(back.source_offsets)[dist.get_rank(group)])

    def returned(rows: Tensor) -> Tensor:
        if len(rows) != expected:
            raise ConfigError(
                f"encode made {len(rows)} rows, its {outputs} are {expected}, with merge={merge}; "
                "say which outputs it has, and what it merges"
            )
        return _exchanged(rows, back, group)

    return returned(made) if isinstance(made, Tensor) else tuple(map(returned, made))


def _of_nothing(
    encode: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Mapping[str, Tensor],
    example: Mapping[str, Tensor] | None,
) -> Any:
    """What a step without any item has, on every rank."""
    if example is not None:
        return _no_rows(encode(**example))
    try:
        return encode(**inputs)
    except Exception as error:  # an encoder may raise anything
        raise ConfigError(
            "no rank has an item, and encode cannot do without "
            f"({type(error).__name__}: {' '.join(str(error).split())}); give example=, inputs of "
            "one item, to encode for nothing"
        ) from error


def _no_rows(made: Tensor | Sequence[Tensor]) -> Any:
    """Outputs of an item that counts for nothing; their gradients are 0."""
    return made[:0] if isinstance(made, Tensor) else tuple(rows[:0] for rows in made)


def _lent(
    inputs: Mapping[str, Tensor],
    lengths: IntArray,
    offsets: IntArray,
    per_token: set[str],
    group: dist.ProcessGroup | None,
) -> dict[str, Tensor]:
    """Inputs of the cheapest item of all ranks, on all of them."""
    item = int(lengths.argmin())
    lender = int(np.searchsorted(offsets, item, side="right")) - 1
    first = int(offsets[lender])
    source = dist.get_global_rank(group or dist.group.WORLD, lender)  # type: ignore[arg-type]
    lent = {}
    for name, rows in inputs.items():
        start, count = item - first, 1
        if name in per_token:
            start, count = int(lengths[first:item].sum()), int(lengths[item])
        part = rows.new_empty((count, *rows.shape[1:]))
        if dist.get_rank(group) == lender:
            part.copy_(rows[start : start + count].detach())
        dist.broadcast(part, source, group=group)
        lent[name] = part
    return lent


def _gathered(
    inputs: Mapping[str, Tensor],
    sizes: IntArray,
    options: Sequence[float],
    problem: str,
    group: dist.ProcessGroup | None,
) -> tuple[IntArray, IntArray, set[str]]:
    """Sizes of all ranks' items, their numbers, and the inputs with a row per token."""
    rows = np.array([len(tensor) for tensor in inputs.values()], np.int64)
    merge = int(options[0])
    total = int(sizes.sum())
    for name, count in zip(inputs, rows, strict=True):
        if count not in (len(sizes), total):
            problem = (
                f"{name} has {count} rows, and there are {len(sizes)} items of {total} tokens; give"
                " a row per item or per token"
            )
    if (sizes % merge).any() or sizes.min(initial=1) < 1:
        problem = f"sizes are {sizes.tolist()[:8]}; give multiples of merge={merge}, none 0"
    fits = [*(rows == len(sizes)), *(rows == total)]
    kinds = ", ".join(map(_kind, inputs, inputs.values()))
    digest = zlib.crc32(kinds.encode())
    head = [bool(problem), len(sizes), digest, len(rows), *options, *fits]
    head += [0] * (MOST_INPUTS - len(fits))
    heads = all_gather_rows(np.array([head], np.float64), np.ones(1, np.int64), group)
    if problem:
        raise ConfigError(problem)
    if heads[:, 0].any():
        failed = int(np.flatnonzero(heads[:, 0])[0])
        raise ConfigError(f"inputs of rank {failed} do not fit its sizes; it says how")
    if (heads[:, 2] != digest).any():
        raise ConfigError(
            f"ranks give dispatch other tensors, this one {kinds}; give all the same names, widths "
            "and types"
        )
    first = 4 + len(options)
    if len({tuple(row) for row in heads[:, 3:first].tolist()}) > 1:
        raise ConfigError("ranks give dispatch different inputs or options; give all the same")
    counts = heads[:, 1].astype(np.int64)
    lengths = all_gather_rows(sizes[:, None].astype(np.float64), counts, group)[:, 0]
    # one rank may have as many tokens as items, all ranks only if each item has one
    is_item, is_token = heads[:, first : first + len(fits)].all(axis=0).reshape(2, len(rows))
    per_token = {name for name, item in zip(inputs, is_item, strict=True) if not item}
    mixed = [name for name, token in zip(inputs, is_token, strict=True) if not token]
    mixed = [name for name in mixed if name in per_token]
    if mixed:
        raise ConfigError(f"{mixed[0]} has a row per item on some ranks, per token on others")
    return lengths.astype(np.int64), counts, per_token


def _kind(name: str, rows: Tensor) -> str:
    """What must be equal on all ranks."""
    follows = " with gradients" if rows.requires_grad and torch.is_grad_enabled() else ""
    width = "".join(f", {width}" for width in rows.shape[1:])
    return f"{name} (rows{width}) {str(rows.dtype).removeprefix('torch.')}{follows}"


def _ranks(
    lengths: IntArray,
    offsets: IntArray,
    how: tuple[Algorithm, float],
    ranks_per_node: int,
    min_gain: float,
) -> IntArray | None:
    """Rank that encodes each item, none of them without any; None: all as they are."""
    num_ranks = len(offsets) - 1
    if len(lengths) < num_ranks:
        return None
    algorithm, weight = how
    in_memory: Algorithm = "padded" if algorithm == "padded" else "sums"

    def most(batches: IntArray) -> tuple[float, float]:
        """Work of the slowest rank; rows of the fullest."""
        work = batch_costs(lengths, batches, num_ranks, algorithm=algorithm, weight=weight)
        return work.max(), batch_costs(lengths, batches, num_ranks, algorithm=in_memory).max()

    work, rows = most(np.repeat(np.arange(num_ranks), np.diff(offsets)))
    for name, factor in ((algorithm, weight), (in_memory, 0.0)):
        batches = assign_batches(lengths, num_ranks, algorithm=name, weight=factor, name="items")
        # a rank without items could not know the outputs' shape, and FSDP's would wait for it
        for empty in np.flatnonzero(np.bincount(batches, minlength=num_ranks) == 0):
            members = np.flatnonzero(batches == np.bincount(batches, minlength=num_ranks).argmax())
            batches[members[lengths[members].argmin()]] = empty
        new_work, new_rows = most(batches)
        if new_work <= work * (1 - min_gain) and new_rows <= rows:
            placed = place_batches(lengths, batches, offsets, ranks_per_node=ranks_per_node)
            return np.asarray(placed[batches])
    return None


def _exchanged(rows: Tensor, move: Permutation, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's rows in source order -> its rows in target order; differentiable."""
    exchange = move.exchange(dist.get_rank(group))
    sent = rows.index_select(0, torch.from_numpy(exchange.send_places).to(rows.device))
    counts = exchange.send_counts.tolist(), exchange.receive_counts.tolist()
    received: Tensor = _AllToAll.apply(sent, *counts, group)  # type: ignore[no-untyped-call]
    # arrived by source rank; to their places
    places = np.argsort(exchange.receive_places)
    return received.index_select(0, torch.from_numpy(places).to(rows.device))


class _AllToAll(torch.autograd.Function):
    """`all_to_all_single` of rows; gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send_counts: list[int],
        receive_counts: list[int],
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.back = receive_counts, send_counts, group
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        dist.all_to_all_single(
            received, rows.contiguous(), receive_counts, send_counts, group=group
        )
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        returned = _AllToAll.apply(gradients[0], *ctx.back)  # type: ignore[no-untyped-call]
        return returned, None, None, None
