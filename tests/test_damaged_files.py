"""Damaged files that users write or bring are taken, or refused in one line; seeds draw them.

`ISOBATCH_TEST_DRAWS=300` damages each kind of file so often.
"""

import os
import random
import time

import pytest

from isobatch.common.errors import IsobatchError
from support.builds.packed import build
from support.builds.raw_data import good_records, write_dataset
from support.damaged.changes import NoDamage
from support.damaged.kinds import KINDS, WholeFiles
from support.models.saved_folders import FAMILIES, save_folder

DRAWS = int(os.environ.get("ISOBATCH_TEST_DRAWS", "25"))
SAVED = ("qwen2_vl", "llava_next", "internvl")
SLOWEST_S = 20.0
"""A file of a few KiB takes far less: this is not for files that end after minutes."""


@pytest.fixture(scope="module")
def whole(shared):
    def make_models(folder):
        for name in FAMILIES if DRAWS > 100 else SAVED:
            save_folder(name, folder / name)

    def make_build(folder):
        raw = write_dataset(folder / "raw", good_records(folder / "raw", 4))
        build(raw, folder / "out")

    models = shared("to damage: models", make_models)
    place = shared("to damage: a build", make_build)
    return WholeFiles(models=tuple(sorted(models.iterdir())), build=place / "out")


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_is_taken(kind, whole, tmp_path):
    KINDS[kind](NoDamage(kind), tmp_path, whole)()


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_taken_or_refused_in_one_line(kind, whole, tmp_path):
    refused = 0
    for seed in range(DRAWS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        use = KINDS[kind](random.Random(f"{kind} {seed}"), folder, whole)
        begun = time.monotonic()
        try:
            use()
        except IsobatchError as error:
            refused += 1
            said = str(error)
            lines = said.split("\n")
            assert lines[0].strip(), seed
            assert all(line.isprintable() for line in lines), (seed, said)
            assert all(line.startswith("  - ") for line in lines[1:]), (seed, said)
        except Exception as error:
            raise AssertionError(f"draw {seed} of {kind} ends in {error!r}") from error
        assert time.monotonic() - begun < SLOWEST_S, seed
    assert refused
