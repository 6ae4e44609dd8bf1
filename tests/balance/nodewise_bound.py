"""What no placement of batches can beat: an integer program for one node alone, the other nodes ignored."""

import itertools

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array


def volumes_between(lengths, batches, offsets):
    """Tokens that each rank holds of each batch, sparse (num_ranks, num_ranks)."""
    ranks = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    size = len(offsets) - 1
    return csr_array((lengths, (ranks, batches)), shape=(size, size))


def inter_node_sends(volume, rank_of_batch, ranks_per_node):
    """Tokens that each rank sends to other nodes."""
    pairs = volume.tocoo()
    rank, batch = pairs.coords
    abroad = rank // ranks_per_node != rank_of_batch[batch] // ranks_per_node
    return np.bincount(rank[abroad], pairs.data[abroad], minlength=volume.shape[0])


def node_bound(volume, node, ranks_per_node, *, seconds=20.0):
    """Least largest send of one node's ranks if it may choose its batches freely: proven by HiGHS."""
    first = node * ranks_per_node
    held = volume[first : first + ranks_per_node]
    loads = held.sum(axis=1)
    useful = np.unique(held.tocoo().coords[1])
    tokens = held[:, useful].toarray()  # (ranks, batches)
    num = len(useful)
    # variables: x of each batch, then t; minimise t with loads - tokens x <= t and at most so many batches as ranks
    rows = np.hstack([tokens, np.ones((len(loads), 1))])
    constraints = [
        LinearConstraint(rows, lb=loads),
        LinearConstraint(np.append(np.ones(num), 0.0)[None], ub=ranks_per_node),
    ]
    result = milp(
        np.append(np.zeros(num), 1.0),
        integrality=np.append(np.ones(num), 0),
        bounds=Bounds(0, np.append(np.ones(num), np.inf)),
        constraints=constraints,
        options={"time_limit": seconds},
    )
    return float(result.mip_dual_bound)


def brute_force(volume, ranks_per_node):
    """Least largest send over all placements of batches on ranks."""
    size = volume.shape[0]
    placements = {tuple(rank // ranks_per_node for rank in p): p for p in itertools.permutations(range(size))}
    return min(inter_node_sends(volume, np.array(p), ranks_per_node).max() for p in placements.values())
