"""Linear sorting equals NumPy's stable argsort, whatever the keys, the random bits and the width of
the numbers.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balance.radix_sort import MAX_BUCKET_BITS, index_dtype, radix_argsort, shuffle_ties

KEYS = st.one_of(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 2**64 - 1))


@settings(deadline=None)
@given(st.lists(KEYS, max_size=100))
def test_sorted_by_is_a_stable_argsort(keys):
    keys = np.array(keys, dtype=np.uint64)
    order = radix_argsort(keys)
    assert order.dtype == np.int32
    assert order.tolist() == np.argsort(keys, kind="stable").tolist()
    narrow = (keys >> np.uint64(32)).astype(np.uint32)
    assert radix_argsort(narrow).tolist() == np.argsort(narrow, kind="stable").tolist()


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), KEYS), max_size=100),
    dtype=st.sampled_from([np.int32, np.int64]),
)
def test_ties_stand_as_if_all_had_been_shuffled_before(rows, dtype):
    keys, bits = (np.array([row[column] for row in rows], dtype=np.uint64) for column in range(2))
    order = np.argsort(keys, kind="stable").astype(dtype)
    shuffle_ties(order, keys, bits)
    shuffled = np.argsort(bits, kind="stable")
    assert order.tolist() == shuffled[np.argsort(keys[shuffled], kind="stable")].tolist()


@pytest.mark.parametrize("size", [16, 17, 1_000, 3 << MAX_BUCKET_BITS - 1])
def test_a_long_run_of_ties_is_sorted_with_fewer_or_more_numbers_than_buckets(size):
    bits = np.random.default_rng(size).integers(0, 2**64, size, dtype=np.uint64)
    order = np.arange(size)
    shuffle_ties(order, np.zeros(size, np.uint32), bits)
    assert np.array_equal(order, np.argsort(bits, kind="stable"))


def test_numbers_are_wide_only_where_they_must_be():
    assert [index_dtype(count) for count in (0, 2**31 - 1, 2**31)] == [np.int32, np.int32, np.int64]
