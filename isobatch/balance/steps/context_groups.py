"""Groups of a step on as many context-parallel ranks as each needs.

A long group needs the memory of several ranks, a short one does not, and each rank more sends its
keys and values once more. So each group gets as few ranks as hold it, more only where it would
hold up the step: dynamic context parallelism, as Megatron-LM's hybrid one does for samples. Pure;
every rank plans the same.
"""

from dataclasses import dataclass

import numpy as np

from isobatch.balance.kernels import free_kernel
from isobatch.common.errors import ConfigError
from isobatch.common.types import FloatArray, IntArray

CHOICES = 17
"""Numbers of small groups, from none to one per rank, that are tried on more ranks than needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPlan:
    """Which ranks run each group; group i is on `sizes[i]` ranks from `first_ranks[i]` on."""

    sizes: IntArray
    """Ranks of each group, powers of two, shape (groups,): Megatron's `local_cp_size`."""
    first_ranks: IntArray
    """Shape (groups,); multiples of `sizes`."""
    order: IntArray
    """Groups as all ranks run them, shape (groups,): the largest sizes first, so that ranks of a
    group come to it at the same time."""
    rank_loads: FloatArray
    """Time of each rank, shape (num_ranks,), in the unit of `loads`, with what it sends."""

    def groups_of(self, rank: int) -> IntArray:
        """Numbers of the groups that a rank works on, in order."""
        first, size = self.first_ranks[self.order], self.sizes[self.order]
        return self.order[(first <= rank) & (rank < first + size)]

    @property
    def waiting(self) -> float:
        """Share of the ranks' time that waits for the last one, 0 to 1."""
        longest = float(self.rank_loads.max(initial=0.0))
        return 1 - float(self.rank_loads.mean()) / longest if longest else 0.0


def plan_context_groups(
    loads: FloatArray,
    num_tokens: IntArray,
    *,
    num_ranks: int,
    tokens_per_rank: int,
    sending: float = 0.01,
) -> ContextPlan:
    """Sizes and places of a step's groups on `num_ranks` ranks (data x context parallel).

    `loads`: time of each group on one rank, in any unit. `tokens_per_rank`: tokens that fit a rank.
    `sending`: share of a group's time that each rank more takes, for keys and values that it sends
    and does not hide: on c ranks a group takes (1 + sending (c - 1)) / c of its load.

    The largest sizes first, in them the longest times, each to the ranks with the least: blocks of
    a size have been busy equally long then, so nobody waits before the end. More ranks than needed
    go to groups that are longer than the step should be, and to the smallest ones, which fill the
    last round: of a few hundred such choices the fastest is taken.

    ConfigError if a group does not fit, or if `num_ranks` is no multiple of the size that it needs.
    """
    if num_ranks < 1 or tokens_per_rank < 1 or sending < 0:
        raise ConfigError(
            f"num_ranks is {num_ranks}, tokens_per_rank {tokens_per_rank}, sending {sending}; at "
            "least 1, 1 and 0"
        )
    parts = np.maximum(1, -(-num_tokens // tokens_per_rank))
    needed = 2 ** np.ceil(np.log2(parts)).astype(np.int64)
    if len(loads) and num_ranks % (largest := int(needed.max())):
        longest = int(num_tokens.max())
        raise ConfigError(
            f"a group of {longest:,} tokens needs {largest} ranks of {tokens_per_rank:,} tokens, "
            f"of which {num_ranks} is no multiple; give more ranks, or leave out longer samples"
        )
    loads = np.asarray(loads, np.float64)
    shortest = float(loads.sum()) / num_ranks
    sizes = needed.copy()
    while (long := (num_ranks % (2 * sizes) == 0) & (loads / sizes > shortest)).any():
        sizes[long] *= 2
    by_size = np.lexsort((loads, sizes))
    factors = [1 << power for power in range(1, (num_ranks & -num_ranks).bit_length())]
    counts = np.unique(np.linspace(0, min(len(loads), num_ranks), CHOICES).astype(np.int64))
    choices = [needed, sizes]
    for factor in factors:
        for count in counts[1:].tolist():
            grown = sizes.copy()
            chosen = by_size[:count]
            grown[chosen] = np.minimum(grown[chosen] * factor, factors[-1])
            choices.append(grown)
    best: ContextPlan | None = None
    for choice in choices:
        times = loads / choice * (1 + sending * (choice - 1))
        order = np.lexsort((-times, -choice))
        first_ranks, rank_loads = _place(times, choice, order, num_ranks)
        if best is None or rank_loads.max() < best.rank_loads.max():
            best = ContextPlan(
                sizes=choice, first_ranks=first_ranks, order=order, rank_loads=rank_loads
            )
    assert best is not None
    return best


@free_kernel
def _place(
    times: FloatArray, sizes: IntArray, order: IntArray, num_ranks: int
) -> tuple[IntArray, FloatArray]:
    """(first rank of each group, load of each rank)."""
    first_ranks = np.zeros(len(times), np.int64)
    rank_loads = np.zeros(num_ranks)
    for group in order:
        size = sizes[group]
        # all ranks of a block have the same load: what is there is on blocks at least as large
        first = 0
        for rank in range(size, num_ranks, size):
            if rank_loads[rank] < rank_loads[first]:
                first = rank
        first_ranks[group] = first
        rank_loads[first : first + size] += times[group]
    return first_ranks, rank_loads
