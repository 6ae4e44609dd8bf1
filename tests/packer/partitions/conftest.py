"""A dataset of several partitions and its build, made once for all tests."""

import pytest

from support.builds.packed import build
from support.builds.raw_data import CUT, write_partitioned


@pytest.fixture(scope="module")
def raw(shared):
    return shared("partitions raw", write_partitioned)


@pytest.fixture(scope="module")
def packed(raw, shared):
    return shared("partitions packed", lambda folder: build(raw, folder / "out", **CUT)) / "out"
