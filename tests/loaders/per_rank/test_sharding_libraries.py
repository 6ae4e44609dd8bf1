"""LitData, MosaicML, WebDataset, Grain, Ray Data and Energon as sources on one rank and several.

They are installed from PyPI into an environment of their own, kept in pytest's cache (1 GB), so not
by default:

    pytest -m other_trainers tests/loaders/per_rank/test_sharding_libraries.py
"""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from support import TESTS, child_env
from support.frameworks.environments import python_of
from support.frameworks.sharding_datasets import EPOCHS, NUM_ITEMS

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1200)]
PROGRAM = TESTS / "support" / "frameworks" / "sharding_datasets.py"
WRITTEN = ("litdata", "mosaicml", "webdataset", "energon")
RUN_S = 300
WAYS = {
    "litdata": ("plain", "shuffled"),
    "mosaicml": ("shuffled",),
    "webdataset": ("split", "whole"),
    "grain": ("map", "whole", "split", "part"),
    "ray": ("whole",),
    "energon": ("loader",),
}
REPEATED = {"mosaicml": 1}
"""It repeats fewer than a sample per rank, so that ranks have equally many."""
REFUSED = {
    ("litdata", "plain together"): "which is iterated, and may have a part of its own on each rank",
    ("mosaicml", "shuffled together"): "which is iterated, and may have a part of its own on each",
    ("webdataset", "default"): "you need to add an explicit nodesplitter to your input pipeline",
    ("grain", "untold part"): "the ranks' datasets are not the same (51 items on rank 0, 50 on",
}


@pytest.fixture(scope="module")
def python(pytestconfig):
    return python_of("sharding", pytestconfig.cache.mkdir("frameworks"))


@pytest.fixture(scope="module")
def folders(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharding")
    for library in WRITTEN:
        run(python, PROGRAM, "write", folder / library, library)
    return folder


def run(*command):
    done = subprocess.run(
        list(map(str, command)),
        env=child_env(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    assert not done.returncode, done.stderr[-3000:]


def read(python, folders, library, way, world):
    """What each rank was given, by epoch, and what it said."""
    out = folders / f"{library}-{way.replace(' ', '-')}-{world}"
    way, *together = way.split(maxsplit=1) if way.endswith("together") else (way,)
    launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
    run(python, *launch, PROGRAM, "read", folders / library, library, way, out, *together)
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("library", WAYS)
def test_every_sample_once_in_an_epoch(python, folders, library, world):
    expected = {f"item-{number}" for number in range(NUM_ITEMS)}
    for way in WAYS[library]:
        said = read(python, folders, library, way, world)
        assert not any(rank.get("error") for rank in said), said
        for epoch in range(EPOCHS):
            found = Counter(name for rank in said for name in rank["epochs"][epoch])
            assert set(found) == expected, (way, epoch)
            assert found.total() - NUM_ITEMS <= REPEATED.get(library, 0) * (world - 1), (way, epoch)


@pytest.mark.parametrize(("library", "way"), REFUSED)
def test_what_cannot_be_right_is_refused_in_one_line(python, folders, library, way):
    for rank in read(python, folders, library, way, 2):
        assert REFUSED[library, way] in rank["error"]
        assert "\n" not in rank["error"]
