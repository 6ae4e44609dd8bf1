"""Loads of groups for tests of orders."""

import numpy as np

KINDS = ("uneven", "equal", "zeros", "giant")


def loads_of(num_groups, kind):
    """What an order asks for: groups -> (vision loads, tokens)."""
    vision, tokens = {
        "uneven": (np.arange(num_groups) * 7 % 16, np.arange(num_groups) * 31 % 4_096),
        "equal": (np.full(num_groups, 15), np.full(num_groups, 4_000)),
        "zeros": (np.zeros(num_groups, np.int64), np.zeros(num_groups, np.int64)),
        "giant": (
            np.r_[10**6, np.zeros(num_groups, np.int64)],
            np.r_[10**9, np.ones(num_groups, np.int64)],
        ),
    }[kind]
    return lambda groups: (vision[groups], tokens[groups])
