"""A folder for temporary files that must be empty after each test."""

import tempfile

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert list(folder.iterdir()) == []
