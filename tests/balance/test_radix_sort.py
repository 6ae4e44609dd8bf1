"""Linear sorting equals NumPy's stable argsort, whatever the keys and the width of the numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isobatch.balance.radix_sort import counting_sort
from isobatch.common.types import index_dtype

KEYS = st.one_of(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 2**64 - 1))


@pytest.mark.thorough
@settings(deadline=None)
@given(st.lists(KEYS, min_size=1, max_size=100))
def test_sorting_by_digits_is_a_stable_argsort(keys):
    wide = np.array(keys, dtype=np.uint64)
    for column in (wide, (wide >> np.uint64(32)).astype(np.uint32)):
        for dtype in (np.int32, np.int64):
            order = counting_sort(np.arange(len(keys), dtype=dtype), column)
            assert order.dtype == dtype
            assert order.tolist() == np.argsort(column, kind="stable").tolist()


def test_numbers_are_wide_only_where_they_must_be():
    assert [index_dtype(count) for count in (0, 2**31 - 1, 2**31)] == [np.int32, np.int32, np.int64]
