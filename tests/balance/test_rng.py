"""Random orders: a part of one is what the whole one has there, also where bits are equal."""

import numpy as np
import pytest

from isobatch.balance import rng as module
from isobatch.balance.rng import SHUFFLE, permutation_mask, random_permutation


@pytest.mark.parametrize("distinct", [2**64 - 1, 3], ids=["any bits", "few distinct bits"])
def test_a_slice_of_an_order_has_the_numbers_of_the_whole(monkeypatch, distinct):
    class FewBits:
        def __init__(self, seed, purpose, epoch, place):
            self.generator = np.random.default_rng([seed, place])

        def random_raw(self, count):
            return self.generator.integers(0, distinct, count, np.uint64)

    monkeypatch.setattr(module, "_generator", FewBits)
    monkeypatch.setattr(module, "CHUNK", 64)
    rng = np.random.default_rng(0)
    for count in (0, 1, 2, 17, 200):
        for seed in range(4):
            order = random_permutation(count, seed, SHUFFLE, place=1)
            ends = [0, count, *rng.integers(0, count + 1, 6).tolist()]
            for first in ends:
                for end in (each for each in ends if each >= first):
                    found = permutation_mask(count, first, end, seed, SHUFFLE, place=1)
                    assert found.dtype == bool
                    assert np.flatnonzero(found).tolist() == sorted(order[first:end].tolist())
