"""Fixtures that several of the engine's tests share."""

import pytest
from rich.console import Console

from isobatch.packer.build import Builder
from isobatch.packer.config import BuildConfig
from isobatch.packer.progress import StageProgress


@pytest.fixture(scope="session")
def demo_build(shared, demo_data):
    """The folder of a packed demo dataset."""

    def build(folder):
        config = BuildConfig(dataset="demo", data_root=str(demo_data), out=str(folder), workers=1)
        Builder(config, StageProgress(Console(quiet=True))).build()

    return shared("demo-build", build)
