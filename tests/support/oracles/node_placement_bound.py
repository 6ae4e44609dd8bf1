"""Proven lower bounds of the node-wise problem by HiGHS: of one node alone, and of all nodes
together.
"""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, eye_array, hstack, kron, vstack


def pair_tokens(lengths, batches, offsets, ranks):
    """Tokens that each of `ranks` holds of each batch, shape (ranks, batches)."""
    tokens = np.zeros((len(ranks), len(offsets) - 1))
    for row, rank in enumerate(ranks):
        held = slice(offsets[rank], offsets[rank + 1])
        np.add.at(tokens[row], batches[held], lengths[held])
    return tokens


def node_bound(lengths, batches, offsets, node, ranks_per_node, *, seconds=5.0):
    """Least possible largest send of one node's ranks if it may choose any batches: no plan sends
    less.
    """
    num_ranks = len(offsets) - 1
    ranks = range(node * ranks_per_node, min((node + 1) * ranks_per_node, num_ranks))
    tokens = pair_tokens(lengths, batches, offsets, ranks)
    tokens = tokens[:, tokens.any(axis=0)]
    # variables: whether the node gets the batch, then the largest send
    rows = vstack(
        [
            hstack([csr_array(tokens), csr_array(np.ones((len(ranks), 1)))]),
            csr_array(np.append(np.ones(tokens.shape[1]), 0)[None]),
        ]
    )
    low = np.append(tokens.sum(axis=1), 0)
    high = np.append(np.full(len(ranks), np.inf), len(ranks))
    return _solve(rows, low, high, tokens.shape[1], seconds)


def worst_node_bound(lengths, batches, offsets, sends, ranks_per_node, *, nodes=4, seconds=5.0):
    """Largest of the bounds of the nodes whose ranks send most, and of those where a simple greedy
    leaves most.
    """
    starts = range(0, len(sends), ranks_per_node)
    sent = [sends[start : start + ranks_per_node].max() for start in starts]
    left = [
        greedy_send(lengths, batches, offsets, node, ranks_per_node) for node in range(len(starts))
    ]
    candidates = [int(node) for values in (sent, left) for node in np.argsort(values)[::-1][:nodes]]
    return max(
        node_bound(lengths, batches, offsets, n, ranks_per_node, seconds=seconds)
        for n in dict.fromkeys(candidates)
    )


def greedy_send(lengths, batches, offsets, node, ranks_per_node):
    """Largest send if the rank that sends most always takes its largest batch, for itself alone:
    tells hard nodes.
    """
    ranks = range(node * ranks_per_node, min((node + 1) * ranks_per_node, len(offsets) - 1))
    tokens = pair_tokens(lengths, batches, offsets, ranks)
    sends, largest = tokens.sum(axis=1), -np.sort(-tokens, axis=1)[:, : len(ranks)]
    taken = np.zeros(len(ranks), np.int64)
    for _ in ranks:
        worst = sends.argmax()
        sends[worst] -= largest[worst, taken[worst]]
        taken[worst] += 1
    return sends.max()


def whole_bound(lengths, batches, offsets, ranks_per_node, *, seconds=20.0):
    """OrchMLLM's Algorithm 3: every batch to one node, every node as many batches as ranks."""
    num_ranks = len(offsets) - 1
    num_nodes = num_ranks // ranks_per_node
    tokens = pair_tokens(lengths, batches, offsets, range(num_ranks))
    # variables: (node, batch), then the largest send
    sends = csr_array((num_ranks, num_nodes * num_ranks)).tolil()
    for rank in range(num_ranks):
        node = rank // ranks_per_node
        sends[rank, node * num_ranks : (node + 1) * num_ranks] = tokens[rank]
    per_node = kron(eye_array(num_nodes), np.ones((1, num_ranks)))
    per_batch = kron(np.ones((1, num_nodes)), eye_array(num_ranks))
    places = vstack([per_node, per_batch])
    rows = vstack(
        [
            hstack([sends.tocsr(), csr_array(np.ones((num_ranks, 1)))]),
            hstack([places, csr_array((num_nodes + num_ranks, 1))]),
        ]
    )
    counts = np.append(np.full(num_nodes, ranks_per_node), np.ones(num_ranks))
    low = np.append(tokens.sum(axis=1), counts)
    high = np.append(np.full(num_ranks, np.inf), counts)
    return _solve(rows, low, high, num_nodes * num_ranks, seconds)


def _solve(rows, low, high, num_binary, seconds):
    """Proven lower bound of the last variable, the others binary."""
    result = milp(
        np.append(np.zeros(num_binary), 1),
        constraints=LinearConstraint(rows, low, high),
        integrality=np.append(np.ones(num_binary), 0),
        bounds=Bounds(0, np.append(np.ones(num_binary), np.inf)),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    return max(0.0, float(result.mip_dual_bound))
