"""Fixtures that several of the engine's tests share."""

import pytest
from rich.console import Console

from packer.build import Builder
from packer.config import BuildConfig
from packer.progress import StageProgress


@pytest.fixture(scope="session")
def demo_build(tmp_path_factory):
    """The folder of a packed demo dataset."""
    out = tmp_path_factory.mktemp("demo") / "packed"
    Builder(
        BuildConfig(dataset="demo", out=str(out), workers=1), StageProgress(Console(quiet=True))
    ).build()
    return out
