"""Energon's own loader on builds of `--format energon`, by the code of docs/load/trainers.

It is installed from PyPI into an environment of its own, kept in pytest's cache, so not by default:

    pytest -m other_trainers tests/loaders/trainers/test_energon.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT, TESTS, child_env
from support.frameworks.environments import python_of

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1200)]
CHECKS = TESTS / "support" / "frameworks" / "checks" / "energon_checks.py"
RUN_S = 900


def test_energon_reads_builds_in_our_order_and_resumes(pytestconfig, tmp_path):
    python = python_of("energon", pytestconfig.cache.mkdir("frameworks"))
    # with the S3 server, which is among the programs of this environment
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 'checks'}", CHECKS],
        cwd=ROOT,
        env=child_env(OMP_NUM_THREADS="1", PATH=programs),
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    assert not done.returncode, done.stdout[-6000:]
    assert " passed" in done.stdout
