"""A dataset in two parts, and a build of the first, in every format; made once for all tests."""

import shutil

import pytest

from support.growing.halves import pack, write_halves

FORMATS = ["arrow", "webdataset", "refs"]


@pytest.fixture(scope="session")
def halves(shared):
    return shared("halves", write_halves)


@pytest.fixture(scope="session")
def first_builds(halves, shared):
    """Format -> a build of the first half, to be copied."""

    def make(folder):
        for name in FORMATS:
            pack(halves, folder / name, format=name, keep_columns=("score",))

    folder = shared("first builds", make)
    return {name: folder / name for name in FORMATS}


@pytest.fixture(params=FORMATS)
def packed(request, first_builds, tmp_path):
    """A build of the first half, to be changed."""
    return shutil.copytree(first_builds[request.param], tmp_path / "packed")


@pytest.fixture
def arrow_build(first_builds, tmp_path):
    """The same of the usual format alone."""
    return shutil.copytree(first_builds["arrow"], tmp_path / "packed")
