"""Energon's own loader on builds of `--format energon`, by the code of docs/load/trainers.

It is installed from PyPI into an environment of its own, kept in pytest's cache, so not by default:

    pytest -m other_trainers tests/loaders/trainers/test_energon.py
"""

import pytest

from support.frameworks.environments import run_checks

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1200)]


def test_energon_reads_builds_in_our_order_and_resumes(pytestconfig, tmp_path):
    run_checks("energon", "checks/energon_checks.py", pytestconfig, tmp_path)
