"""TorchTitan with both loaders, by the code of docs/load/trainers.

It is installed from PyPI into an environment of its own, kept in pytest's cache, so not by default:

    pytest -m other_trainers tests/loaders/trainers/test_torchtitan.py
"""

import pytest

from support.frameworks.environments import run_checks

pytestmark = [pytest.mark.other_trainers, pytest.mark.timeout(1200)]


def test_torchtitan_gets_batches_of_its_own_collator_and_resumes(pytestconfig, tmp_path):
    run_checks("torchtitan", "checks/torchtitan_checks.py", pytestconfig, tmp_path)
