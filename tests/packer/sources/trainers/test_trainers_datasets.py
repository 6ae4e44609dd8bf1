"""Datasets of Energon and of MosaicML, written and read by their own code, and packed.

Each in an environment of its own, kept in pytest's cache, so not by default:

    pytest -m other_trainers tests/packer/sources/trainers/test_trainers_datasets.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT, TESTS, child_env
from support.frameworks.environments import python_of

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1800)]
RUN_S = 900


@pytest.mark.parametrize(
    ("environment", "checks"),
    [("energon", "energon_source_checks.py"), ("sharding", "mds_source_checks.py")],
)
def test_what_they_write_is_packed_as_they_read_it(pytestconfig, tmp_path, environment, checks):
    python = python_of(environment, pytestconfig.cache.mkdir("frameworks"))
    # with the S3 server, which is among the programs of this environment
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [
            *command,
            f"--basetemp={tmp_path / 'checks'}",
            TESTS / "support" / "frameworks" / "checks" / checks,
        ],
        cwd=ROOT,
        env=child_env(OMP_NUM_THREADS="1", PATH=programs),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    assert not done.returncode, done.stdout[-6000:]
    assert " passed" in done.stdout
