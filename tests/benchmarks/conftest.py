"""Fixtures of the benchmarks' tests."""

import pytest

from support import ranks


@pytest.fixture
def forked(monkeypatch):
    """Ranks that a benchmark starts are forked; none imports torch again."""
    monkeypatch.setattr("torch.multiprocessing.spawn", ranks.spawn)
